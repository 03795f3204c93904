"""Tunix's rollouts: answers, scores and weights are those of the engine itself."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import jaxpaged
from jaxpaged import InputError, SamplingParams
from jaxpaged.research.integrations.tunix_weights import from_tunix
from tests import tiny
from tests.api.tiny_llm import OPTIONS
from tests.integrations import tunix_protocol
from tests.tiny_gguf import write_gguf

base_rollout = tunix_protocol.stand_in()
from jaxpaged.research.integrations.tunix import JaxpagedRollout  # noqa: E402

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 32, 6, 2, 8, 48
# By Hugging Face's ending: Tunix's, its axes, and whether its matrix is transposed.
TUNIX = {
    "input_layernorm.weight": ("input_layernorm.w", (HIDDEN,)),
    "post_attention_layernorm.weight": ("post_attention_layernorm.w", (HIDDEN,)),
    "self_attn.q_proj.weight": ("attn.q_proj.w", (HIDDEN, HEADS, HEAD_DIM)),
    "self_attn.k_proj.weight": ("attn.k_proj.w", (HIDDEN, KV_HEADS, HEAD_DIM)),
    "self_attn.v_proj.weight": ("attn.v_proj.w", (HIDDEN, KV_HEADS, HEAD_DIM)),
    "self_attn.o_proj.weight": ("attn.o_proj.w", (HEADS, HEAD_DIM, HIDDEN)),
    "mlp.gate_proj.weight": ("mlp.gate_proj.kernel", (HIDDEN, MLP)),
    "mlp.up_proj.weight": ("mlp.up_proj.kernel", (HIDDEN, MLP)),
    "mlp.down_proj.weight": ("mlp.down_proj.kernel", (MLP, HIDDEN)),
}
TOP = {"model.embed_tokens.weight": "embedder.input_embedding", "model.norm.weight": "final_norm.w"}


class Part(nnx.Module):
    """A module with what it is given."""

    def __init__(self, **parts):
        for name, part in parts.items():
            setattr(self, name, part)


def actor(weights, lora=None):
    """Return weights of Hugging Face's names as a module of Tunix's form, with LoRA's factors by name."""
    flat = dict(lora or {})
    for name, array in weights.items():
        if name in TOP:
            flat[TOP[name]] = nnx.Param(jax.numpy.asarray(array))
        else:
            _, _, layer, rest = name.split(".", 3)
            said, shape = TUNIX[rest]
            flat[f"layers.{layer}.{said}"] = nnx.Param(jax.numpy.asarray(array.T.reshape(shape)))
    return module(flat)


def module(flat):
    """Build the modules that names with dots say."""
    inside: dict = {}
    for name, value in flat.items():
        first, _, rest = name.partition(".")
        if not rest:
            inside[first] = value
        else:
            inside.setdefault(first, {})[rest] = value
    parts = {name: module(its) if isinstance(its, dict) else its for name, its in inside.items()}
    if parts.keys() and all(name.isdigit() for name in parts):
        return nnx.List([parts[str(i)] for i in range(len(parts))])
    return Part(**parts)


class Tokenizer:
    """Tunix's adapter of a tokenizer: a character is the token of its code, less 32."""

    def __init__(self, pad=0, eos=2):
        self._pad, self._eos = pad, eos

    def encode(self, text):
        return [ord(character) - 32 for character in text]

    def decode(self, ids):
        return "".join(chr(32 + token) for token in ids)

    def dedup_bos_ids(self, ids):
        return ids[1:] if ids[:1] == ids[1:2] == [1] else ids

    def bos_id(self):
        return 1

    def eos_id(self):
        return self._eos

    def pad_id(self):
        return self._pad


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return jaxpaged.LLM(write_gguf(tmp_path_factory.mktemp("tunix") / "tiny.gguf"), **OPTIONS)


PROMPTS = ["Once upon a time", "7 times 6 is", "7 times 6 is"]
CONFIG = functools.partial(
    base_rollout.RolloutConfig,
    max_tokens_to_generate=12,
    temperature=1.0,
    max_prompt_length=24,
    seed=3,
    return_logprobs=True,
)


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_rollouts_are_the_engines_and_scores_the_samplers_to_the_bit(llm, pad_is_eos):
    weights, ids = tiny.weights(seed=4), [[1, *Tokenizer().encode(prompt)] for prompt in PROMPTS]
    llm.update_weights(weights)
    params = [SamplingParams(max_tokens=12, seed=3 + i, ignore_eos=True) for i in range(3)]
    want = [result.outputs[0].token_ids for result in llm.generate(ids, params, use_tqdm=False)]
    eos = want[0][6]  # so that the first answer ends early, and is padded
    want = [answer[: [*answer, eos].index(eos) + 1] for answer in want]
    pad = eos if pad_is_eos else 0
    tokenizer = Tokenizer(pad, eos)
    make = functools.partial(JaxpagedRollout, llm=llm)
    rollout = make(rollout_actor=actor(weights), tokenizer=tokenizer, mesh=None, rollout_config=CONFIG())
    assert isinstance(rollout, base_rollout.BaseRollout)
    assert (rollout.pad_id(), rollout.eos_id(), rollout.model()) == (pad, eos, None)

    llm.update_weights(tiny.weights())
    new = nnx.state(actor(weights), nnx.Param)
    with jax.transfer_guard("disallow_explicit"):  # as Tunix has it while it sends weights
        rollout.update_params(new, (nnx.Param,))

    found = rollout.generate(PROMPTS, CONFIG())
    assert [its.tolist() for its in found.tokens] == want
    assert found.tokens[1].tolist() != found.tokens[2].tolist()
    assert found.left_padded_prompt_tokens.tolist() == [[pad] * (24 - len(its)) + its for its in ids]
    assert found.text == [tokenizer.decode(its[:-1] if its[-1] == eos else its) for its in want]
    completions = np.full((3, 12), pad, np.int32)
    for row, its in zip(completions, found.tokens, strict=True):
        row[: len(its)] = its
    scores = np.asarray(rollout.get_per_token_logps(found.left_padded_prompt_tokens, completions))
    assert scores.dtype == np.float32
    for row, told, its in zip(scores, found.logprobs, found.tokens, strict=True):
        assert row[: len(its)].tolist() == told.tolist()
        assert np.ptp(told) > 1
        assert not row[len(its) :].any()


def test_lora_is_merged_into_its_matrix(llm):
    """An update of LoRA's factors alone is added to the actor's first weights, not to the last sum."""
    rng, name = np.random.default_rng(0), "layers.1.attn.o_proj.w"
    weights = tiny.weights(seed=4)

    def factors():
        a, b = rng.standard_normal((HEADS, HEAD_DIM, 3)), rng.standard_normal((3, HIDDEN))
        both = {f"{name}_lora_a": a, f"{name}_lora_b": b}
        return {key: nnx.LoRAParam(jax.numpy.asarray(x, np.float32)) for key, x in both.items()}, a, b

    lora, _, _ = factors()
    rollout = JaxpagedRollout(actor(weights, lora), Tokenizer(), llm=llm, lora_alpha=6)
    lora, a, b = factors()
    rollout.update_params(nnx.state(actor(weights, lora), nnx.LoRAParam), (nnx.LoRAParam,))
    found = rollout.generate(PROMPTS, CONFIG())

    matrix = "model.layers.1.self_attn.o_proj.weight"
    llm.update_weights(
        weights | {matrix: weights[matrix] + 2 * np.einsum("nhr,rd->dnh", a, b).reshape(HIDDEN, -1)}
    )
    want = rollout.generate(PROMPTS, CONFIG())
    for its, other in zip(found.logprobs, want.logprobs, strict=True):
        np.testing.assert_allclose(its, other, atol=1e-4)
    with pytest.raises(InputError, match=r"^lora_alpha must be the adapter's alpha: the model has 'layers.1"):
        JaxpagedRollout(actor(weights, lora), Tokenizer(), llm=llm)


def test_experts_and_heads_have_hugging_faces_names():
    """A matrix of each kind that the tiny model lacks."""
    rng = np.random.default_rng(0)
    its = {name: rng.standard_normal(shape) for name, shape in (("e", (2, 3, 4)), ("b", (6,)), ("h", (3, 5)))}
    params = {
        "layers": {0: {"mlp": {"gate_proj": its["e"]}, "attn": {"q_bias": its["b"]}}},
        "lm_head": {"w": its["h"]},
    }
    found = from_tunix(params)
    want = {f"model.layers.0.mlp.experts.{i}.gate_proj.weight": its["e"][i].T for i in range(2)}
    want |= {"model.layers.0.self_attn.q_proj.bias": its["b"], "lm_head.weight": its["h"].T}
    assert found.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"temperature": 0.5}, "^logprobs_mode='raw_logprobs' must be 'processed_logprobs' for log-prob"),
        (
            {"tensor_parallel_size": 2},
            "^rollout_config.tensor_parallel_size=2 must be -1, or the engine's 1$",
        ),
        ({"temperature": -1}, "^temperature=-1 must be a number >= 0"),
        ({"seed": "x"}, r"^rollout_config.seed of shape \(1,\) must be an int or a key of JAX$"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_configs_that_the_engine_cannot_follow_are_refused(llm, config, message):
    with pytest.raises(InputError, match=message):
        JaxpagedRollout(actor(tiny.weights()), Tokenizer(), rollout_config=CONFIG(**config), llm=llm)


def test_weights_that_are_none_of_tunixs_are_refused(llm):
    before = llm.weight_version
    for params, message in (
        ({"layers": {"0": {"attn": {"x": np.ones(2)}}}}, "^weight 'layers.0.attn.x' is none that Tunix's"),
        ([1], "^params of type list must be a state of flax.nnx, or a mapping$"),
        (
            {"lm_head": {"w_lora_a": np.ones((2, 1))}},
            "^weight 'lm_head.w_lora_a' must come with 'lm_head.w'$",
        ),
    ):
        with pytest.raises(InputError, match=message):
            from_tunix(params, lora_alpha=1)
    assert llm.weight_version == before
    with pytest.raises(InputError, match="^llm=None must be a jaxpaged.LLM that generates$"):
        JaxpagedRollout(actor(tiny.weights()), Tokenizer(), llm=None)
