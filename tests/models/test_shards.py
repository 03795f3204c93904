"""Reading one shard of a model's tensors: its own numbers, once, and no others."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from jaxpaged.checks import InputError
from jaxpaged.models import loading
from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.decoder import Decoder, abstract
from jaxpaged.models.files import safetensors_files
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.names import in_expert, in_layer, num_weights
from jaxpaged.models.quantised import checkpoints as quantised_checkpoints
from jaxpaged.models.quantised.codes import QuantisedWeight
from jaxpaged.models.ropes import Rope
from jaxpaged.models.shards import Shard, Shards
from jaxpaged.models.weights import AbstractWeights, StoredWeights
from tests import tiny_gguf, tiny_states
from tests.models.test_decoder import GOLDENS


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama", 2), ("llama", 4), ("gpt2", 2), ("gpt2", 4), ("phi3", 2), ("phi3", 4), ("glm4_moe", 2)],
)
def test_a_shard_reads_its_own_numbers_alone(name, size):
    """Each number of the files is another, so what a shard has of them can be told; all else is made NaN,
    which is refused where it is seen."""
    checkpoint = loading.open_checkpoint(GOLDENS / "families" / name)
    numbered, count = {}, 1
    for key, tensor in checkpoint.load_weights().items():
        numbered[key] = np.arange(count, count + tensor.size, dtype=np.float32).reshape(tensor.shape)
        count += tensor.size
    assert count < 2**24
    times = np.zeros(count, int)
    for number in range(size):
        shard = Shard(checkpoint.config, Shards(size), number)
        its = leaves(checkpoint, numbered, shard)
        mine = np.unique(np.concatenate([leaf.reshape(-1) for leaf in its])).astype(int)
        times[mine] += 1
        poisoned = {key: np.where(np.isin(x, mine), x, np.nan) for key, x in numbered.items()}
        for leaf, again in zip(its, leaves(checkpoint, poisoned, shard), strict=True):
            np.testing.assert_array_equal(leaf, again)
        shapes = jax.tree.leaves(
            nnx.state(abstract(checkpoint.config, LoadAs(jnp.dtype("float32"), shard=shard)))
        )
        assert [x.shape for x in shapes] == [x.shape for x in its]
    for key, tensor in numbered.items():
        here = times[tensor.astype(int)]
        kv = size // checkpoint.config.num_kv_heads if key.endswith(("k_proj.weight", "v_proj.weight")) else 1
        if key.endswith(("_proj.weight", "lm_head.weight", "c_fc.weight", "w1.weight", "w2.weight")):
            joined = {1, size // 2} if "qkv" in key else {kv}
            assert {*np.unique(here)} == joined, key
    assert times[1:].min() > 0  # and together they read all


class Counted:
    """A tensor in a file that keeps count of the numbers that are read; what only looks is a view."""

    def __init__(self, values, seen=None):
        self.values, self.seen = values, np.zeros(values.shape, bool) if seen is None else seen
        self.shape, self.dtype, self.ndim = values.shape, values.dtype, values.ndim

    def _view(self, change):
        seen = change(self.seen)
        if seen.size == 0 or np.shares_memory(seen, self.seen):
            return Counted(change(self.values), seen)
        return change(np.asarray(self))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, key):
        return self._view(lambda x: x[key])

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def reshape(self, *shape):
        return self._view(lambda x: x.reshape(*shape))

    @property
    def T(self):
        return self._view(np.transpose)

    @property
    def size(self):
        return self.values.size

    def astype(self, dtype, copy=True):
        return np.asarray(self, dtype)

    def __array__(self, dtype=None, copy=None):
        self.seen[...] = True
        return np.array(self.values, dtype)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("gpt_neox", None), ("gpt_oss", None), ("phi3", None), ("llama", "int8"), ("gpt_neox", "fp8")],
)
def test_half_of_a_file_is_read_for_half_of_a_model(name, quantization, monkeypatch):
    """Some forms put rows in another order. What is quantised on load is read with all its inputs, for a
    scale is of a row's numbers.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a tensor here is no array
    checkpoint = loading.open_checkpoint(GOLDENS / "families" / name)
    config, names, dtype = checkpoint.config, checkpoint.names, jnp.dtype("float32")
    files = {key: np.array(tensor, np.float32) for key, tensor in checkpoint.load_weights().items()}
    tensors = {key: Counted(tensor) for key, tensor in files.items()}
    shard = Shard(config, Shards(2), 1)
    parts = StoredWeights(
        config, names, tensors, LoadAs(dtype, shard=shard), checkpoint.quantisation(quantization)
    )
    again = StoredWeights(
        config, names, files, LoadAs(dtype, shard=shard), checkpoint.quantisation(quantization)
    )
    num_split = 0
    for role in [*in_layer(config), *in_expert(config), "lm_head.weight"]:
        for one, its in zip(weights_of(parts, role), weights_of(again, role), strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, its)
        stem, _, ending = role.removeprefix("experts.").rpartition(".")
        if stem not in ("qkv", "o", "gate_up", "up", "down", "lm_head") or role not in shapes_of(config):
            continue
        for template in names.pieces(role):
            seen = [its.seen for key, its in tensors.items() if matches(template, key)]
            is_whole = stem in ("o", "down") and (quantization is not None or ending == "bias")
            rest = 0 if shard.number and ending == "bias" and stem in ("o", "down") else 1
            want = rest if is_whole else 0.5
            for x in seen:  # a vocabulary may be odd
                assert x.mean() == pytest.approx(want, abs=0.6 / len(x)), template
            num_split += want == 0.5
    assert num_split >= 4


@pytest.mark.parametrize(
    "name",
    [
        "awq",
        "fp8_block",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("compressed_int4", "gptq_8bit")),
    ],
)
def test_half_of_a_quantised_file_is_read_for_half_of_a_model(name, monkeypatch):
    """Groups that the split cuts through are read whole."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a tensor here is no array
    folder = GOLDENS / "quantised" / name
    checkpoint = loading.open_checkpoint(folder)
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    config, names, dtype = checkpoint.config, checkpoint.names, jnp.dtype("float32")
    tensors = {key: Counted(np.array(tensor)) for key, tensor in safetensors_files.load(folder).items()}
    files = quantised_checkpoints.Tensors(tensors, said, config, names)
    parts = StoredWeights(
        config, names, files, LoadAs(dtype, shard=Shard(config, Shards(2), 1)), files.quantisation()
    )
    for role in ("qkv.weight", "o.weight", "gate_up.weight", "down.weight"):
        for _ in weights_of(parts, role):
            pass
    codes = (".qweight", ".weight_packed", "_proj.weight")
    seen = {key: its.seen.mean() for key, its in tensors.items() if key.endswith(codes)}
    assert len(seen) >= 14
    # Half of the 96 inputs of down is no whole number of groups.
    assert all(mean == 0.5 or (mean > 0.5 and "down" in key) for key, mean in seen.items()), seen


def shapes_of(config):
    return {**in_layer(config), **in_expert(config), "lm_head.weight": None}


def matches(template, key):
    pattern = re.escape(template).replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"\d+")
    return re.fullmatch(pattern, key) is not None


def leaves(checkpoint, tensors, shard):
    parts = StoredWeights(
        checkpoint.config, checkpoint.names, tensors, LoadAs(jnp.dtype("float32"), shard=shard)
    )
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(Decoder(parts)))]


def test_a_shard_of_a_vocabulary_that_is_not_divided_has_rows_of_zeros():
    config = loading.open_checkpoint(GOLDENS / "families" / "llama").config
    widths = [
        (len(Shard(small, Shards(4), i).slices("lm_head.weight", [np.zeros((5, 3))])), i)
        for small in [dataclasses.replace(config, vocab_size=5, eos_token_ids=())]
        for i in range(4)
    ]
    assert widths == [(1, 0), (1, 1), (1, 2), (0, 3)]
    last = Shard(dataclasses.replace(config, vocab_size=5, eos_token_ids=()), Shards(4), 3)
    assert last.padding("lm_head.weight") == 2


def test_widths_that_the_shards_do_not_divide_are_refused_and_a_heads_bias_is_cut_as_its_weight_is():
    config = loading.open_checkpoint(GOLDENS / "families" / "qwen2_moe").config
    odd = dataclasses.replace(config, experts=dataclasses.replace(config.experts, shared_size=13))
    with pytest.raises(InputError, match="=2 must be a divisor of the model's shared_size=13"):
        Shard(odd, Shards(2), 0)
    config = loading.open_checkpoint(GOLDENS / "families" / "dots1").config
    odd = dataclasses.replace(config, experts=dataclasses.replace(config.experts, dense_size=25))
    with pytest.raises(InputError, match="=2 must be a divisor of the model's dense_size=25"):
        Shard(odd, Shards(2), 0)
    config = loading.open_checkpoint(GOLDENS / "families" / "phimoe").config
    last = Shard(config, Shards(4), 3)
    for role, piece in (("lm_head.weight", np.zeros((61, 3))), ("lm_head.bias", np.zeros(61))):
        assert len(last.slices(role, [piece])[0]) + last.padding(role) == 16
        assert last.padding(role) == 3


OTHERS = ["compressed_fp8", "compressed_int4", "compressed_w8a8", "gptq_8bit"]


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("quantised/awq", None),
        ("quantised/fp8_block", None),
        pytest.param("mxfp4", None, marks=pytest.mark.slow),
        ("families/llama", "int4"),
        ("gguf", "gguf"),
        *(pytest.param(f"quantised/{name}", None, marks=pytest.mark.slow) for name in OTHERS),
        pytest.param("families/llama", "fp8", marks=pytest.mark.slow),
        pytest.param("families/qwen3_moe", "int8", marks=pytest.mark.slow),
    ],
)
def test_quantised_weights_are_cut_where_they_lie(name, quantization, tmp_path):
    """A shard's numbers are the whole weight's, also where a group of inputs is cut through."""
    if name == "gguf":
        kinds = {
            "attn_q.": "Q4_0",
            "attn_k.": "Q8_0",
            "ffn_gate": "Q5_0",
            "ffn_up": "Q5_0",
            "token_embd": "Q8_0",
        }
        folder = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", kinds=kinds)
    else:
        folder = GOLDENS / name
    checkpoint = loading.open_checkpoint(folder)
    quantisation = checkpoint.quantisation(quantization)
    config, names, dtype = checkpoint.config, checkpoint.names, jnp.dtype("float32")
    tensors, num_quantised = checkpoint.load_weights(), 0
    whole = StoredWeights(config, names, tensors, LoadAs(dtype), quantisation)
    for number in range(2):
        shard = Shard(checkpoint.config, Shards(2), number)
        load_as = LoadAs(dtype, shard=shard)
        parts = StoredWeights(config, names, tensors, load_as, quantisation)
        shapes = AbstractWeights(config, load_as, names, quantisation)
        for role in [*in_layer(checkpoint.config), *in_expert(checkpoint.config), "lm_head.weight"]:
            all_, its, like = (list(weights_of(from_, role)) for from_ in (whole, parts, shapes))
            if role == "lm_head.weight" and all_[0] is None:
                all_ = [whole.get("embedding.weight")]
            num_quantised += isinstance(its[0], QuantisedWeight)
            for one, mine, shape in zip(all_, its, like, strict=True):
                taken = np.concatenate(shard.slices(role, [widened(one)]))
                np.testing.assert_array_equal(widened(mine)[: len(taken)], taken, err_msg=role)
                assert len(mine.shape) < 2 or mine.shape[0] == len(taken) + shard.padding(role)
                assert jax.tree.map(np.shape, mine) == jax.tree.map(np.shape, shape)
    least = 2 if name == "mxfp4" else 2 + bool(checkpoint.config.experts)
    assert num_quantised >= 2 * least


def weights_of(parts, role):
    if role == "lm_head.weight":
        return [parts.get(role)]
    if role.startswith("experts."):
        return parts.of_experts(role, range(parts.config.num_layers))
    return parts.each(role)


def widened(weight):
    """Return a weight's numbers, with its inputs in their order."""
    if not isinstance(weight, QuantisedWeight):
        return np.asarray(weight)
    assert weight.orders == (None,) * len(weight.segments)
    return np.concatenate([segment.widened() for segment in weight.segments])[:, : weight.in_features]


def test_inputs_in_an_order_of_their_own_are_not_cut():
    checkpoint = loading.open_checkpoint(GOLDENS / "quantised" / "gptq")
    shard = Shard(checkpoint.config, Shards(2), 0)
    with pytest.raises(
        InputError,
        match=r"^tensor_parallel_size=2 must be 1 for 64 .* without, or have the model on each device",
    ):
        checkpoint.model(LoadAs(jnp.dtype("float32"), shard=shard))


def test_an_eighth_of_llama_3_1_70b_fits_an_h200(monkeypatch):
    """Judged by shapes: an eighth of all weights in bfloat16, and seven eighths of an embedding more."""
    monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    config = ModelConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_q_heads=64,
        num_kv_heads=8,
        head_dim=128,
        layers=uniform(80, rope=Rope(theta=5e5, dim=128)),
        max_model_len=131072,
    )
    model = abstract(config, LoadAs(jnp.dtype("bfloat16"), shard=Shard(config, Shards(8), 0)))
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(model)))
    table, norms = 2 * config.vocab_size * config.hidden_size, 2 * 161 * config.hidden_size
    assert num_bytes == (2 * num_weights(config) - table - norms) / 8 + table + norms
    assert num_bytes / 1e9 == pytest.approx(19.5, abs=0.05)
    per_token = 80 * 2 * model.config.num_kv_heads * 128 * 2  # K and V of one head
    assert (0.9 * 141e9 - num_bytes) / per_token > 2.6e6


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (tiny_states.DELTA, "=3 must be a divisor of the 8 key_heads of gated_delta"),
        (tiny_states.MAMBA, "=3 must be a divisor of the 2 groups of mamba2"),
        (tiny_states.CONVOLUTION, "=3 must be a divisor of the 32 channels of short_convolution"),
        (tiny_states.MAMBA_1, "=3 must be 1 with layers of mamba1"),
        (tiny_states.LIGHTNING, "=3 must be 1 with layers of lightning"),
    ],
)
def test_mixers_that_devices_cannot_divide_are_refused(mixer, message):
    with pytest.raises(InputError, match=f"tensor_parallel_size{message}"):
        mixer.divided(3)
