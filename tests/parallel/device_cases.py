"""Equal bits on any number of devices: `test_in_a_process.py` runs these in a process that has several."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine.driver import Driver
from jaxpaged.lora import LoRARequest
from jaxpaged.models import loading
from jaxpaged.models.config import LayerKind
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.families import deepseek
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.quantised.on_load import OnLoad
from jaxpaged.models.shards import Shard, Shards
from jaxpaged.models.weights import StoredWeights, random_weights
from jaxpaged.parallel.mesh import BY_SHARD, ON_EACH, assembled, mesh_of, on_each_shard
from jaxpaged.sampling_params import SamplingParams
from tests import tiny, tiny_latents
from tests.marks import slow_and_nightly
from tests.models.test_decoder import COVERING, GOLDENS, LLAMAS, batch_of
from tests.parallel.cases import collectives, compiled

# Optimised programs alone show whether products are rounded before they are added.
pytestmark = [
    pytest.mark.skipif(len(jax.devices()) < 8, reason="needs the process of test_in_a_process.py"),
    pytest.mark.usefixtures("optimized"),
]

# Eight shares of heads and columns; on eight devices pairs of them share a KV head.
CONFIG = dataclasses.replace(tiny.CONFIG, num_q_heads=8, num_kv_heads=4, intermediate_size=256)
KINDS = (LayerKind(sliding_window=16), LayerKind())
OF_KINDS = dataclasses.replace(CONFIG, layers=KINDS)
LATENTS = dataclasses.replace(tiny_latents.config(), num_q_heads=8, intermediate_size=256)
LATENT_NAMES = {"names": deepseek.names_of_halves(LATENTS)}
SHORT = {"max_model_len": 100}
NGRAMS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}


def driver_of(config, size, sums=8, names=NAMES, **options):
    """Make a driver of random weights on so many devices."""
    weights = random_weights(config, names, 0)

    def load(load_as):
        quantisation = OnLoad(load_as.quantization) if load_as.quantization else None
        return Decoder(StoredWeights(config, names, weights, load_as, quantisation))

    options |= {"tensor_parallel_size": size, "tensor_parallel_sums": sums}
    return Driver(EngineConfig(**tiny.DEFAULTS | options), config, load, adapter_names=names)


def answers_of(driver, adapter=None):
    """Answer prompts greedily and drawn; return tokens and log-probabilities, of prompts as well."""
    prompts = tiny.prompts([5, 33, 50, 12, 60, 40])
    prompts[2] = prompts[2][:10] * 5  # drafts are right at times
    greedy = SamplingParams(max_tokens=24, temperature=0, logprobs=2, prompt_logprobs=1)
    drawn = dataclasses.replace(greedy, temperature=1.5, seed=3, top_p=0.8)
    ids = []
    for i, prompt in enumerate(prompts):
        request = adapter if i % 2 else None
        admitted = driver.door.admit(prompt, drawn if i in (2, 4) else greedy, lora_request=request)
        for each in tiny.numbered(admitted):
            driver.add(each)
            ids.append(each.request_id)
    found = tiny.drain(driver)
    return [(found[i].token_ids, found[i].scores, found[i].prompt_scores) for i in ids]


@pytest.mark.parametrize(
    ("config", "sizes", "options"),
    [
        pytest.param(
            CONFIG, (2, 8), NGRAMS | tiny.SMALL | SHORT, id="drafts, few blocks", marks=pytest.mark.slow
        ),
        pytest.param(
            CONFIG, (4,), {"dtype": "bfloat16"} | tiny.SWAP, id="bfloat16", marks=pytest.mark.nightly
        ),
        pytest.param(CONFIG, (2, 4, 8), {"quantization": "int8"}, id="int8", marks=pytest.mark.nightly),
        pytest.param(CONFIG, (4,), {"quantization": "int4"}, id="int4", marks=pytest.mark.nightly),
        pytest.param(LATENTS, (2, 8), LATENT_NAMES | NGRAMS, id="latents", marks=pytest.mark.nightly),
        pytest.param(
            OF_KINDS, (4,), SHORT | {"num_blocks": 1 + 28}, id="kinds of layers", marks=pytest.mark.nightly
        ),
        pytest.param(
            CONFIG, (2,), {"data_parallel_size": 2} | NGRAMS, id="replicas", marks=pytest.mark.nightly
        ),
    ],
)
def test_answers_have_the_same_bits_on_any_number_of_devices(config, sizes, options):
    alone = answers_of(driver_of(config, 1, **options))
    for size in sizes:
        driver = driver_of(config, size, **options)
        assert answers_of(driver) == alone, size
        assert (driver.stats.num_accepted_tokens > 0) == ("speculative_config" in options)


@pytest.mark.nightly
def test_answers_of_experts_have_the_same_bits_on_any_number_of_devices():
    checkpoint = loading.open_checkpoint(GOLDENS / "families/qwen2_moe")
    config = dataclasses.replace(widened(checkpoint.config), vocab_size=tiny.CONFIG.vocab_size)
    drivers = [driver_of(config, size, 4, checkpoint.names) for size in (1, 2, 4)]
    alone, *others = [answers_of(driver) for driver in drivers]
    assert others == [alone, alone]


@pytest.mark.nightly
def test_other_sums_have_other_bits():
    """The answers above are of a model in which the order of sums shows."""
    answers = [answers_of(driver_of(CONFIG, 8, sums)) for sums in (8, "ordered")]
    assert answers[0] != answers[1]


@pytest.mark.slow
def test_adapters_have_the_same_bits_on_any_number_of_devices(tmp_path):
    rng, tensors = np.random.default_rng(0), {}
    hidden, q, kv = CONFIG.hidden_size, 8 * CONFIG.head_dim, 4 * CONFIG.head_dim
    modules = {"self_attn.q_proj": (hidden, q), "self_attn.v_proj": (hidden, kv)}
    modules |= {"self_attn.o_proj": (q, hidden), "mlp.down_proj": (CONFIG.intermediate_size, hidden)}
    for layer in range(CONFIG.num_layers):
        for module, (inputs, outputs) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((3, inputs), np.float32) * inputs**-0.5
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((outputs, 3), np.float32) * 0.3
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6}))
    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    request = LoRARequest("drawn", 1, tmp_path)
    alone, on_four = (answers_of(driver_of(CONFIG, size, **options), request) for size in (1, 4))
    assert on_four == alone
    plain = answers_of(driver_of(CONFIG, 1))
    assert [i for i in range(6) if plain[i] != alone[i]] == [1, 3, 5]


def logits_of(config, load, size, sums, token_ids, dtype):
    """Return the logits of a prompt on so many devices; positions and tokens are no constants."""

    def load_shard(number):
        shard = Shard(config, Shards(size, sums), number)
        return load(LoadAs(jnp.dtype(dtype), shard=shard, loop_over_layers=True))

    graphdef, params = nnx.split(assembled(mesh_of(size), load_shard))
    num_blocks, block_size, tile_len = len(token_ids) // 4, 4, 8

    def run(params, token_ids, positions, table):
        model = nnx.merge(graphdef, params)
        batch = batch_of(table, positions, tile_len, block_size)
        batch = dataclasses.replace(batch, implementation="native")
        cache = model.create_cache(num_blocks + 1, block_size)
        return model.logits(model(token_ids, positions, cache, batch)[0])

    table = 1 + np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    positions = np.arange(len(token_ids), dtype=np.int32)
    function = on_each_shard(run, mesh_of(size), (BY_SHARD, ON_EACH, ON_EACH, ON_EACH), ON_EACH)
    return np.asarray(jax.jit(function)(params, token_ids, positions, table))


def widened(config):
    """Return a golden's config with columns enough for whole vectors in each share."""
    experts = config.experts and dataclasses.replace(
        config.experts,
        shared_size=128 if config.experts.shared_size else 0,
        dense_size=128 if config.experts.dense_size else 0,
    )
    kinds = tuple(dataclasses.replace(kind, intermediate_size=None) for kind in config.layers)
    return dataclasses.replace(config, intermediate_size=128, layers=kinds, experts=experts)


# Of all sums that a family may have: norms over all heads, experts with a shared one, sparse columns, ALiBi.
QUICK = ["families/olmo2"]
SLOW = [
    "families/gemma3n",
    "families/gpt_oss",
    "families/gemma4_experts",
    "families/mpt",
    "families/gpt_neox",
]
# Three heads; a gate for each head, and one for too few coordinates.
REFUSED = {"mha_biased", "families/laguna", "families/qwen3_5_moe"}
WIDE = [name for name in dict.fromkeys([*QUICK, *SLOW, *LLAMAS, *COVERING]) if name not in REFUSED]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *[(name, "float32") for name in QUICK],
        *slow_and_nightly(
            [
                (n, d)
                for n in WIDE
                for d in ("float32", "bfloat16")
                if (n, d) not in {(q, "float32") for q in QUICK}
            ],
            [(name, "float32") for name in SLOW],
        ),
    ],
)
def test_logits_of_a_family_have_the_same_bits_on_any_number_of_devices(name, dtype):
    checkpoint = loading.open_checkpoint(GOLDENS / name)
    config = widened(checkpoint.config)
    weights = random_weights(config, checkpoint.names, 0)

    def load(load_as):
        return Decoder(StoredWeights(config, checkpoint.names, weights, load_as))

    token_ids = np.asarray(tiny.prompts([40])[0], np.int32) % config.vocab_size
    sums = 4 if config.num_q_heads % 4 == 0 and name != "gqa_tied" else 2
    alone, *others = (logits_of(config, load, size, sums, token_ids, dtype) for size in (1, 2, sums))
    for other in others:
        np.testing.assert_array_equal(other, alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_sums": 1}, "=1 must be fast, ordered, or an int from 2 to 256"),
        ({"tensor_parallel_sums": "8"}, "='8' must be fast, ordered, or an int"),
        ({"tensor_parallel_sums": 4}, "=4 must be a divisor of the model's num_q_heads=6"),
        (
            {"tensor_parallel_sums": 2},
            "=2 must be a number of equal shares of the model's intermediate_size=48",
        ),
        (
            {"tensor_parallel_sums": 2, "tensor_parallel_size": 3},
            "tensor_parallel_size=3 must be 2, or a power of two that divides tensor_parallel_sums=2",
        ),
    ],
)
def test_sums_that_cannot_be_made_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        tiny.driver(**options)


def test_sums_are_refused_where_xla_computes_attention():
    with pytest.raises(InputError, match="=8 must be a text where our own kernels do not compute both"):
        driver_of(CONFIG, 1, attention="xla")


def test_the_exchange_moves_the_bytes_of_an_all_reduce():
    """A device sends its part of each slice, and then the sum of its own: (N - 1) / N of a summand each."""
    checkpoint = loading.open_checkpoint(GOLDENS / "mistral_window")
    config = widened(checkpoint.config)
    weights = random_weights(config, checkpoint.names, 0)

    def load(number):
        load_as = LoadAs(jnp.dtype("float32"), shard=Shard(config, Shards(4, 4), number))
        return Decoder(StoredWeights(config, checkpoint.names, weights, load_as))

    run, _ = compiled(assembled(mesh_of(4), load), 4, list(range(40)))
    assert collectives(run) == {"all-to-all": 2, "all-gather": 2 + 1}  # the logits' besides
    parts = f"f32[1,40,1,{config.hidden_size // 4}]"
    assert re.findall(r" = \(?(f32\[[\d,]*\]).* all-to-all\(", run.as_text()) == [parts] * 2
