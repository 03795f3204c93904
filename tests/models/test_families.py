"""Families: how they read configs, their table, experts that no token chose, and the cost of depth."""

import collections
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxpaged.checks import InputError
from jaxpaged.models import decoder, experts, families, layers, loading, weights
from jaxpaged.models.families import from_hf
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.ropes import LongScaling, Rope
from reference.ropes import frequency
from tests.models.test_decoder import GOLDENS, batch_of


def hf(name):
    return json.loads((GOLDENS / "families" / name / "config.json").read_text())


def phi3_rope():
    return hf("phi3")["rope_parameters"]


def test_the_pages_table_of_families_is_the_registry():
    assert families.markdown_table() in (Path(__file__).parents[2] / "docs/guides/models.md").read_text()


def test_an_unknown_model_type_is_refused_with_those_that_are_known():
    with pytest.raises(
        InputError, match=r"model_type='rwkv' must be one of 'llama', 'mistral', .*'qwen3_vl_moe'$"
    ):
        from_hf({"model_type": "rwkv"})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False must be True or left out"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim=16 must be 32 or left out"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "=True must be False or left out"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi=False must be True or left out"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] must be \[\] or left out"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, r"experts a token=9 must be an int in \[1, 5\]"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types=.* must be a list .* for each layer"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention=True must be False or left out"),
        ("phi3", {"rope_parameters": phi3_rope() | {"long_factor": [1.0]}}, "must be 3 numbers"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers=.* must be a list, one for each layer"),
        ("starcoder2", {"hidden_act": "mish"}, "hidden_act='mish' must be one of silu"),
        ("llama", {"n_shared_experts": 1}, "n_shared_experts=1 must be 0 or left out"),
        ("llama", {"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5 must be 1 or left out"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm=True must be False or left out"),
        (
            "glm4_moe",
            {"scoring_func": "softmax"},
            "scoring_func='softmax' must be 'sigmoid' or 'noaux_tc' or left out",
        ),
        ("glm4_moe", {"n_group": 3}, "groups of experts=3 must be a divisor of 8, the number of experts"),
        ("glm4_moe", {"n_group": 8}, "groups of experts=8 must be of two or more experts"),
        ("glm4_moe", {"topk_group": 5}, r"groups a token=5 must be an int in \[1, 4\]"),
        (
            "glm4_moe",
            {"num_experts_per_tok": 5},
            r"experts a token=5 must be an int in \[1, 4\], the number of",
        ),
        (
            "glm4_moe",
            {"first_k_dense_replace": 3},
            r"dense layers=\[0, 1, 2\] must be different ints in \[0, 3\), and not",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 must be None or left out"),
        ("phimoe", {"num_experts_per_tok": 3}, "experts a token=3 must be 2 for a sparse mixer"),
        ("phimoe", {"tie_word_embeddings": True}, "lm_head_bias=True must be False with a tied embedding"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True must be False or left out"),
        (
            "exaone4",
            {"layer_types": None, "sliding_window_pattern": "LX"},
            "pattern='LX' must be an int >= 1 or",
        ),
        ("minimax_m2", {"attn_type_list": [1, 0]}, r"attn_type_list=\[1, 0\] must be a list of ones"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block=False must be True or left out"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False must be True or left out"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window=True must be False or left out"),
        ("llava", {"text_config": {"model_type": "rwkv"}}, "text_config.model_type='rwkv' must be one of"),
        (
            "gemma4_experts",
            {"use_double_wide_mlp": True},
            "use_double_wide_mlp=True must be False or left out",
        ),
        ("gemma4_text", {"per_layer_config": {"2": {"head_dim": 16}}}, "per_layer_config=.* must be a JSON"),
        *(
            ("gemma4_text", {"per_layer_config": said}, "per_layer_config=.* must be a JSON object with the")
            for said in (
                {"2": {"head_dim": 16}, "02": {"head_dim": 16}},
                {"0": {"head_dim": 16}},
                {"99": {}},
                {"-1": {}},
                {"2": {"intermediate_size": 3}},
                {"2": 3},
                [],
            )
        ),
        ("gemma4_text", {"layer_types": ["sliding_attention"] * 6}, "layer_types='sliding.*' must be 'full"),
        ("llava", {"text_config": None}, "text_config=None must be a JSON object"),
    ],
)
def test_what_is_another_arithmetic_is_refused(name, change, message):
    with pytest.raises(InputError, match=message):
        from_hf(hf(name) | change)


def test_what_a_config_leaves_out_is_what_transformers_takes():
    assert from_hf(hf("gemma2") | {"final_logit_softcapping": None}).logit_soft_cap is None
    said = hf("gemma2")
    del said["final_logit_softcapping"], said["layer_types"]
    config = from_hf(said)
    assert config.logit_soft_cap == 30
    # This one is written into configs, and used by no other implementation.
    capped = hf("gemma3_text") | {"attn_logit_softcapping": 50.0}
    assert from_hf(capped) == from_hf(hf("gemma3_text"))
    assert [kind.sliding_window for kind in config.layers] == [12, None]
    old = {name: value for name, value in hf("phi3").items() if name != "rope_parameters"}
    spread = dict(hf("phi3")["rope_parameters"])
    del spread["original_max_position_embeddings"], spread["rope_theta"]
    old |= {"rope_scaling": spread, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    assert from_hf(old) == from_hf(hf("phi3"))
    said = {name: value for name, value in hf("cwm").items() if name != "rope_parameters"}
    assert from_hf(said).layers[0].rope.theta == 1000000
    assert from_hf(said | {"rope_scaling": hf("cwm")["rope_parameters"]}) == from_hf(hf("cwm"))


def test_old_configs_of_the_newer_families_are_read():
    """Letters for layers with a window, one scaling for layers without, a number of turned coordinates."""
    said = {name: value for name, value in hf("exaone4").items() if name != "layer_types"}
    said |= {"sliding_window_pattern": "LLG", "num_hidden_layers": 5}
    kinds = from_hf(said).layers
    assert [kind.sliding_window for kind in kinds] == [12, 12, None, 12, None]
    assert [kind.rope is None for kind in kinds] == [False, False, True, False, True]
    assert all(
        kind.rope and not kind.sliding_window for kind in from_hf(said | {"sliding_window": None}).layers
    )
    said = {name: value for name, value in hf("olmo3").items() if name != "rope_parameters"}
    old = {"rope_scaling": hf("olmo3")["rope_parameters"]["full_attention"], "rope_theta": 10000.0}
    assert from_hf(said | old) == from_hf(hf("olmo3"))
    assert from_hf(hf("minimax_m2") | {"rope_parameters": None, "rotary_dim": 4}).layers[0].rope.dim == 4
    said = hf("hunyuan_v1_dense")["rope_parameters"]
    old = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "alpha": 50.0}}
    assert from_hf(hf("hunyuan_v1_dense") | old) == from_hf(hf("hunyuan_v1_dense"))


def test_layers_with_wider_heads_are_named_together_or_one_by_one():
    """Files of before transformers 5.24 say it for all of them, later ones layer by layer."""
    wide = {"global_head_dim": 16, "num_global_key_value_heads": 2}
    for name in ("gemma4_text", "gemma4_large"):
        assert from_hf(without(hf(name), "per_layer_config") | wide) == from_hf(hf(name))
        its = hf(name)["per_layer_config"]
        padded = {key.zfill(2): sizes for key, sizes in its.items()}
        same = {"0": {"head_dim": hf(name)["head_dim"]}}  # a layer with a window, as all of them
        for said in (padded, its | same):
            assert from_hf(hf(name) | {"per_layer_config": said}) == from_hf(hf(name))
    even = hf("gemma4_text") | {"per_layer_config": {}}  # no layer differs from the others
    one = {"global_head_dim": even["head_dim"], "num_global_key_value_heads": even["num_key_value_heads"]}
    assert from_hf(even) == from_hf(without(even, "per_layer_config") | one)
    large = from_hf(hf("gemma4_large"))
    assert [large.heads_of(layer) for layer in range(3)] == [(4, 8), (4, 8), (2, 16)]
    assert (large.num_kv_heads, large.head_dim) == (4, 16)
    vision = {"use_bidirectional_attention": "vision", "rope_parameters": None}  # the default's are these
    assert from_hf(hf("gemma4_large") | vision) == large


def without(said, *names):
    return {name: value for name, value in said.items() if name not in names}


def test_a_text_part_is_the_model_that_it_would_be_alone():
    """Configs of before transformers 5 may be flat, or say of the text only what is unusual."""
    said = hf("qwen2_5_vl")
    text = without(said["text_config"], "model_type", "rope_parameters")
    mrope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_theta": 10000.0}
    flat = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}, **text, **mrope}
    assert from_hf(flat | {"tie_word_embeddings": False}) == from_hf(said)
    assert from_hf(flat | {"tie_word_embeddings": True}).tie_word_embeddings
    text = without(flat, "vision_config") | {"model_type": "qwen2"}
    assert from_hf(text | {"rope_scaling": None}) == from_hf(said)

    said = {"model_type": "mistral3", "text_config": hf("ministral3"), "tie_word_embeddings": False}
    assert from_hf(said) == from_hf(hf("ministral3"))
    few = {"model_type": "gemma3_text", "hidden_size": 2560, "sliding_window": 1024}
    few |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = from_hf({"model_type": "gemma3", "text_config": few, "eos_token_id": [1, 106]})
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.num_layers, config.eos_token_ids) == (262208, 26, (1, 106))
    assert config.tie_word_embeddings
    config = from_hf({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}})
    assert (config.hidden_size, config.num_layers, config.tie_word_embeddings) == (4096, 32, False)


@pytest.mark.parametrize("front", ["model.language_model.", "language_model.model.", "language_model."])
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3", "qwen2_5_vl"])
def test_weights_with_a_wrappers_names_are_read_under_the_text_parts_config_too(name, front, tmp_path):
    """Text parts are taken out of wrappers with their names; a head may have the prefix or not."""
    directory = loading.open_checkpoint(GOLDENS / "families" / name)
    want = weights.by_role(directory.config, directory.names, directory.load_weights())
    found = {directory.names.name_of(key): np.asarray(x) for key, x in directory.load_weights().items()}
    found = {key: x for key, x in found.items() if not directory.names.is_spare(key)}
    (tmp_path / "config.json").write_text(json.dumps(hf(name)))
    for head in ("lm_head.", "language_model.lm_head."):
        renamed = {
            key.replace("model.", front, 1).replace("lm_head.", head, 1): x for key, x in found.items()
        }
        save_file(renamed, tmp_path / "model.safetensors")
        again = loading.open_checkpoint(tmp_path)
        for key in renamed:  # adapters' modules, too
            assert again.module_names.name_of(key) == again.names.name_of(key)
        got = weights.by_role(again.config, again.names, again.load_weights())
        assert got.keys() == want.keys()
        for role, values in want.items():
            np.testing.assert_array_equal(got[role], values)
    save_file(renamed | {f"{front}x": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    again = loading.open_checkpoint(tmp_path)
    with pytest.raises(InputError, match="weight 'model.x' is none that the model config asks for"):
        weights.by_role(again.config, again.names, again.load_weights())


@pytest.mark.parametrize(
    ("version", "outside", "inside", "is_tied"),
    [
        ("4.57.0", True, False, False),
        ("4.57.0", None, None, False),
        ("4.57.0", False, True, True),
        ("5.1.0", False, True, False),
        ("5.1.0", None, False, True),
    ],
)
def test_since_transformers_5_a_config_says_outside_that_its_head_is_tied(version, outside, inside, is_tied):
    said = hf("mistral3") | {"transformers_version": version, "tie_word_embeddings": outside}
    said["text_config"] = said["text_config"] | {"tie_word_embeddings": inside}
    assert from_hf(said).tie_word_embeddings == is_tied


def test_layers_that_predict_further_tokens_are_not_read():
    checkpoint = loading.open_checkpoint(GOLDENS / "families" / "glm4_moe")
    tensors = dict(checkpoint.load_weights())
    beyond = tensors | {"model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32)}
    weights.check_weights(checkpoint.config, checkpoint.names, beyond)
    with pytest.raises(InputError, match=r"weight 'model.layers.2.eh_proj.weight' is none that the model"):
        weights.check_weights(
            checkpoint.config, checkpoint.names, tensors | {"model.layers.2.eh_proj.weight": np.zeros(2)}
        )


def test_only_layers_that_all_have_a_window_free_their_blocks():
    config = from_hf(hf("gemma3_text"))
    assert config.sliding_window is None
    windows = [dataclasses.replace(config.layers[0], sliding_window=window) for window in (8, 12)]
    assert dataclasses.replace(config, layers=tuple(windows)).sliding_window == 12


def test_short_sequences_have_the_short_factors():
    scaling = LongScaling(
        short_factors=(1.0, 2.0), long_factors=(1.0, 8.0), original_max_len=32, attention_factor=1.5
    )
    rope = Rope(theta=100.0, dim=4, scaling=scaling)
    for max_len, want in ((32, [1, 0.05]), (33, [1, 0.0125])):
        frequencies, factor = layers.rope_frequencies(rope, max_len)
        np.testing.assert_allclose(frequencies, want, rtol=1e-6)
        assert factor == 1.5


def test_a_dynamic_scaling_changes_nothing_up_to_the_length_before_it():
    """Beyond it, in an engine for longer sequences, theta is the oracle's at every position."""
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}}
    config, plain = from_hf(hf("qwen3") | dynamic), from_hf(hf("qwen3"))
    length, rope = plain.max_model_len, config.layers[0].rope
    assert (config.default_max_len, config.max_model_len) == (length, 3 * length)
    want, _ = layers.rope_frequencies(plain.layers[0].rope, length)
    np.testing.assert_array_equal(layers.rope_frequencies(rope, length)[0], want)
    longer, factor = layers.rope_frequencies(rope, length + 1)
    oracle = [frequency(rope, pair, length + 1) for pair in range(len(want))]
    np.testing.assert_allclose(longer, oracle, rtol=1e-6)
    assert (factor, longer[0]) == (1.0, want[0])
    # (3 * 3 - 2) ** (dim / (dim - 2)) times the theta, which transformers has for 3 times the length.
    power = rope.dim / (rope.dim - 2)
    np.testing.assert_allclose(longer[1], (10000 * 7**power) ** (-2 / rope.dim), rtol=1e-6)


QWENS = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("name", "rope", "default", "longest"),
    [
        ("qwen3", None, 40, 40),
        ("qwen3", QWENS, 128, 128),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0}, 160, 160),  # no original: the config's length
        ("qwen3", {"rope_type": "yarn", "original_max_position_embeddings": 10}, 40, 40),  # no factor
        ("qwen3", {"rope_type": "yarn", "factor": 3.999, "original_max_position_embeddings": 10}, 40, 40),
        ("qwen3", {"rope_type": "linear", "factor": 2.5}, 100, 100),
        ("qwen3", {"rope_type": "dynamic", "factor": 2.0}, 40, 80),
        ("qwen3", {"rope_type": "longrope"} | LONG, 32, 40),
        ("qwen3", {"type": "su"} | LONG, 32, 40),
        (
            "qwen3",
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            40,
            40,
        ),
        ("qwen2_5_vl", QWENS | {"mrope_section": [1, 1, 2]}, 128, 128),
        # The lengths of these count their scalings.
        ("gemma3_text", {"full_attention": {"rope_type": "linear", "factor": 8.0}}, 40, 40),
        ("olmo3", {"full_attention": QWENS, "sliding_attention": {"rope_type": "default"}}, 128, 128),
    ],
)
def test_a_scaling_makes_sequences_as_long_as_vllm_has_them(name, rope, default, longest):
    said = hf(name)
    nested = rope is not None and "full_attention" in rope
    key = "rope_parameters" if nested else "rope_scaling"
    inside = said.get("text_config", said)
    inside |= {"max_position_embeddings": 40, "head_dim": 8, "rope_parameters": None, key: rope}
    config = from_hf(said)
    assert (config.default_max_len, config.max_model_len) == (default, longest)


def test_a_factor_that_is_left_out_loses_no_position():
    """8056 / 1077 times 1077 is a little less than 8056 in float64."""
    said = hf("qwen3") | {"max_position_embeddings": 8056, "head_dim": 8, "rope_parameters": None}
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 1077}
    assert from_hf(said | {"rope_scaling": scaling}).max_model_len == 8056


def test_a_users_rope_stands_in_place_of_the_configs_under_either_name():
    """What a config says of RoPE beside the scaling, such as its theta, is kept: recipes leave it out."""
    flat = without(hf("qwen3"), "rope_parameters", "rope_scaling", "rope_theta") | {
        "max_position_embeddings": 40
    }
    old = flat | {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 9.0}}
    new = flat | {"rope_parameters": {"rope_type": "linear", "factor": 9.0, "rope_theta": 77.0}}
    want = from_hf(flat | {"rope_theta": 77.0, "rope_scaling": QWENS})
    assert want.max_model_len == 128
    for said in (old, new):
        for key in ("rope_scaling", "rope_parameters"):
            assert from_hf(said, {key: QWENS}) == want
            assert from_hf(said, {key: None}) == from_hf(flat | {"rope_theta": 77.0})
        both = {"rope_scaling": QWENS, "rope_theta": 5.0}
        assert from_hf(said, both) == from_hf(flat | both)
        assert from_hf(said, {"max_position_embeddings": 8}).max_model_len == 72
    inside = hf("qwen2_5_vl")
    assert from_hf(inside, {"text_config": {"rope_scaling": QWENS}}).max_model_len == 128


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "qwen3",
            {"max_positions": 8},
            "hf_overrides: key='max_positions' must be a field of the model's conf",
        ),
        ("qwen3", {"rope_scaling": [4]}, r"rope_scaling=\[4\] must be a JSON object or null"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor='4' must be a number > 0"),
        ("qwen2_5_vl", {"rope_scaling": QWENS}, "key='rope_scaling' must be one of text_config, tie_word_e"),
        ("qwen2_5_vl", {"text_config": {"rope": 1}}, "hf_overrides: key='rope' must be a field of the model"),
        (
            "olmo3",
            {"rope_theta": 5.0},
            "rope_theta must be left out: rope_parameters has one for each kind of",
        ),
    ],
)
def test_an_override_that_would_change_nothing_is_refused(name, overrides, message):
    with pytest.raises(InputError, match=message):
        from_hf(hf(name), overrides)


@pytest.fixture
def moe():
    return loading.open_checkpoint(GOLDENS / "families" / "qwen3_moe").model(LoadAs(jnp.dtype("float32")))


def test_an_expert_that_no_token_chose_is_not_computed(moe, monkeypatch):
    """Tokens that pad the batch choose no expert either."""
    computed = collections.Counter()
    call = experts.ExpertLinear.__call__

    def counted(self, x, layer, expert):
        jax.debug.callback(lambda e: computed.update([int(e)]), expert)
        return call(self, x, layer, expert)

    monkeypatch.setattr(experts.ExpertLinear, "__call__", counted)
    mlp = moe.layers.mlp
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32)), jnp.float32)
    is_padding = jnp.array([False, True, True, True])
    weights, by_token = mlp.choose(x, 0)
    jax.block_until_ready(mlp(x, 0, is_padding))
    jax.effects_barrier()
    chosen = np.flatnonzero(weights[0])
    assert len(chosen) == 2
    assert sorted(by_token[0].tolist()) == chosen.tolist()
    assert computed == {int(expert): 2 for expert in chosen}  # gate and up, and down
    everyone = np.flatnonzero(np.any(weights > 0, axis=0))
    assert len(everyone) > 2, "the others would have chosen more"


def test_a_tokens_experts_add_up_alike_in_any_company(moe):
    mlp = moe.layers.mlp
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 32)), jnp.float32)
    nobody = jnp.zeros(8, bool)
    together, _ = mlp(x, 1, nobody)
    for row in range(8):
        alone, _ = mlp(x, 1, jnp.arange(8) != row)
        np.testing.assert_array_equal(alone[row], together[row])


def program(config):
    """Return the lowered text of one pass."""
    model = decoder.abstract(config, LoadAs(jnp.dtype("float32"), loop_over_layers=True))
    graphdef, params = nnx.split(model)
    cache = jax.eval_shape(lambda: model.create_cache(5, 8))
    positions = np.arange(32, dtype=np.int32)
    batch = batch_of(np.arange(1, 5, dtype=np.int32), positions, 8, 8)

    def run(params, cache):
        return nnx.merge(graphdef, params)(jnp.asarray(positions), jnp.asarray(positions), cache, batch)

    return str(jax.make_jaxpr(run)(params, cache))


@pytest.mark.parametrize("name", ["gemma3_text", "smollm3", "gpt_oss", "glm4_moe"])
def test_a_program_does_not_grow_with_the_number_of_layers(name):
    """One model has layers of several kinds in a period."""
    config = from_hf(hf(name))
    deeper = dataclasses.replace(config, layers=config.layers * 3)
    assert program(config).count(" = ") == program(deeper).count(" = ")
