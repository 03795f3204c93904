"""Weights that safetensors files have in few bits: as those who make them read them, and the oracle."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxpaged.checks import InputError
from jaxpaged.models import loading
from jaxpaged.models.files import safetensors_files
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.quantised import mxfp4
from jaxpaged.models.quantised.checkpoints import Module, read
from jaxpaged.models.quantised.codes import TensorSlice, packed, wide
from jaxpaged.models.weights import by_role
from pallas_kernels.quantised import Quantised
from reference import model as reference_model
from reference import quantised_checkpoints as oracle
from tests.models.test_decoder import GOLDENS, TOLERANCE, paged_logits

FLOAT32 = jnp.dtype("float32")
QUANTISED = GOLDENS / "quantised"
NAMED = sorted(path.name for path in QUANTISED.iterdir())
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
FP8 = {"quant_method": "fp8"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int"}


def compressed(**weights):
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return said | {"config_groups": {"group_0": {"weights": {"num_bits": 4} | weights}}}


def dequantised(tensors, said):
    """Dequantise a module's weight by the oracle."""
    match said["quant_method"]:
        case "auto-round":
            if "awq" in said.get("packing_format", ""):
                return oracle.awq(tensors)
            v1 = "packing_format" not in said or "gptq" in said["packing_format"]
            return oracle.gptq(tensors, said["bits"], said["group_size"], zero_is_less_one=v1)
        case "awq":
            return oracle.awq(tensors)
        case "gptq":
            v1 = said.get("checkpoint_format") != "gptq_v2"
            return oracle.gptq(tensors, said["bits"], said["group_size"], zero_is_less_one=v1)
    if "weight_packed" in tensors:
        [group] = said["config_groups"].values()
        return oracle.packed(tensors, group["weights"]["num_bits"])
    codes, zeros = tensors["weight"], tensors.get("weight_zero_point")
    codes = codes if codes.dtype == np.int8 else oracle.e4m3(codes.view(np.uint8))
    scales = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"]
    return oracle.scaled(codes, scales, zeros, said.get("weight_block_size"))


def modules(tensors):
    """Return the tensors of each product by the module's name."""
    found = {}
    for name in tensors:
        stem, _, ending = name.rpartition(".")
        found.setdefault(stem, {})[ending] = np.asarray(tensors[name])
    return {stem: its for stem, its in found.items() if len(its) > 1}


@pytest.mark.parametrize("name", NAMED)
def test_a_file_s_weights_mean_what_its_makers_say(name, monkeypatch):
    """The oracle in NumPy agrees, and so does the decoder, which keeps them quantised."""
    folder = QUANTISED / name
    checkpoint = loading.open_checkpoint(folder)
    golden = json.loads((folder / "golden.json").read_text())
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    wide = checkpoint.load_weights()
    its_modules = modules(safetensors_files.load(folder))
    assert len(its_modules) == 2 * (6 if name == "compressed_int4" else 7)
    for stem, tensors in its_modules.items():
        np.testing.assert_array_equal(wide[f"{stem}.weight"], dequantised(tensors, said), err_msg=stem)
    weights = by_role(checkpoint.config, checkpoint.names, wide)
    want, tokens = np.array(golden["logits"]), golden["token_ids"]
    got = reference_model.logits(checkpoint.config, weights, tokens)[:: golden["every"]]
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=TOLERANCE)
    monkeypatch.setenv("JAXPAGED_NATIVE", "0" if name in ("gptq", "compressed_fp8") else "1")
    model = checkpoint.model(LoadAs(FLOAT32))
    got = paged_logits(model, tokens, 8, 13)[:: golden["every"]]
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=TOLERANCE)
    layers = model.layers
    assert [layers.attention.qkv.is_quantised, layers.attention.o.is_quantised] == [True, True]
    assert [layers.mlp.up.is_quantised, layers.mlp.down.is_quantised] == [True, name != "compressed_int4"]


def words(rng, *shape):
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def scales(rng, *shape, dtype="float16"):
    return (0.02 * rng.standard_normal(shape)).astype(dtype)


def shuffled(rng, num_inputs, group):
    return rng.permutation(np.arange(num_inputs) // group).astype(np.int32)


def e4m3_codes(rng, *shape):
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    return np.where(codes & 127 == 127, 0, codes).astype(np.uint8).view("float8_e4m3fn")


def symmetric(rng, num_groups, num_outputs, bits):
    """Return words of zero points, stored less one."""
    return np.full((num_groups, num_outputs * bits // 32), 0x77777777 if bits == 4 else 0x7F7F7F7F, np.int32)


# 40 outputs and 96 inputs.
CASES = {
    "awq, a group for all": (
        AWQ | {"group_size": -1},
        lambda r: {"qweight": words(r, 96, 5), "qzeros": words(r, 1, 5), "scales": scales(r, 1, 40)},
    ),
    "gptq, version 2": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        lambda r: {"qweight": words(r, 12, 40), "qzeros": words(r, 3, 5), "scales": scales(r, 3, 40)},
    ),
    "gptq, a last group of half, bfloat16": (
        GPTQ | {"group_size": 64},
        lambda r: {
            "qweight": words(r, 12, 40),
            "qzeros": words(r, 2, 5),
            "scales": scales(r, 2, 40, dtype="bfloat16"),
        },
    ),
    "gptq, symmetric, in an order": (
        GPTQ | {"sym": True, "desc_act": True},
        lambda r: {
            "qweight": words(r, 12, 40),
            "qzeros": symmetric(r, 3, 40, 4),
            "scales": scales(r, 3, 40),
            "g_idx": shuffled(r, 96, 32),
        },
    ),
    "gptq, 8 bits, with zero points": (
        GPTQ | {"bits": 8},
        lambda r: {"qweight": words(r, 24, 40), "qzeros": words(r, 3, 10), "scales": scales(r, 3, 40)},
    ),
    "auto-round, of AWQ": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False},
        lambda r: {"qweight": words(r, 96, 5), "qzeros": words(r, 3, 5), "scales": scales(r, 3, 40)},
    ),
    "auto-round, of GPTQ": (
        AUTO_ROUND | {"sym": True},
        lambda r: {
            "qweight": words(r, 12, 40),
            "qzeros": symmetric(r, 3, 40, 4),
            "scales": scales(r, 3, 40),
        },
    ),
    "auto-round, its own": (
        AUTO_ROUND | {"packing_format": "auto_round", "bits": 8, "sym": False},
        lambda r: {"qweight": words(r, 24, 40), "qzeros": words(r, 3, 10), "scales": scales(r, 3, 40)},
    ),
    "modelopt, by tensor": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        lambda r: {
            "weight": e4m3_codes(r, 40, 96),
            "weight_scale": scales(r, 1, dtype="float32").reshape(()),
            "input_scale": scales(r, 1),
        },
    ),
    "fbgemm, by output": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        lambda r: {"weight": e4m3_codes(r, 40, 96), "weight_scale": scales(r, 40, 1, dtype="float32")},
    ),
    "compressed, symmetric, in an order": (
        compressed(),
        lambda r: {
            "weight_packed": words(r, 40, 12),
            "weight_scale": scales(r, 40, 3),
            "weight_g_idx": shuffled(r, 96, 32),
            "weight_shape": np.array([40, 96]),
        },
    ),
    "compressed, 8 bits, a scale an output": (
        compressed(num_bits=8),
        lambda r: {
            "weight_packed": words(r, 40, 24),
            "weight_scale": scales(r, 40, 1, dtype="bfloat16"),
            "weight_zero_point": words(r, 10, 1),
            "weight_shape": np.array([40, 96]),
        },
    ),
    "compressed, bytes with zero points": (
        compressed(num_bits=8) | {"format": "int-quantized"},
        lambda r: {
            "weight": r.integers(-128, 128, (40, 96)).astype(np.int8),
            "weight_scale": scales(r, 40, 1, dtype="bfloat16"),
            "weight_zero_point": r.integers(-128, 128, (40, 1)).astype(np.int8),
            "input_scale": scales(r, 1),
        },
    ),
    "fp8, a scale for all": (
        FP8 | {"activation_scheme": "static"},
        lambda r: {"weight": e4m3_codes(r, 40, 96), "weight_scale": scales(r, 1, dtype="float32")},
    ),
    "fp8, blocks that are not whole": (
        FP8 | {"weight_block_size": [32, 64]},
        lambda r: {"weight": e4m3_codes(r, 40, 96), "weight_scale_inv": scales(r, 2, 2, dtype="float32")},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_weight_is_the_oracle_s(case):
    """Each number, dequantised, and as it is kept."""
    said, draw = CASES[case]
    tensors = draw(np.random.default_rng(0))
    want = dequantised(tensors, said)
    module = Module("a", {f"a.{ending}": tensor for ending, tensor in tensors.items()})
    kind, rows = read(said).found(module, (40, 96), said)
    whole = rows(TensorSlice.whole((40, 96)))
    weight = packed([(kind, whole)], 96, FLOAT32)
    [segment], [order] = weight.segments, weight.orders
    got = np.asarray(segment.widened())[:, :96]
    np.testing.assert_array_equal(got if order is None else got[:, np.argsort(order)], want)
    assert np.unique(want).size > 200
    size = kind.group_size if kind.group_size < 96 else 8
    for outputs in (np.arange(9, 20), np.array([33, 5, 6])):
        found = wide(kind, rows(TensorSlice(outputs, slice(0, 96))), 96)
        np.testing.assert_array_equal(found, want[outputs])
        if not kind.has_order:
            for inputs in (slice(0, size), slice(size, 96)):
                found = wide(kind, rows(TensorSlice(outputs, inputs)), inputs.stop - inputs.start)
                np.testing.assert_array_equal(found, want[outputs][:, inputs])


def fp8_module(rng, num_outputs, num_inputs):
    return {
        "weight": e4m3_codes(rng, num_outputs, num_inputs),
        "weight_scale": scales(rng, 1, dtype="float32") / 10,
    }


def test_experts_and_layers_that_differ(tmp_path):
    """Experts in fp8, each with a scale; where queries of one layer are not quantised, none are."""
    shutil.copytree(GOLDENS / "families" / "qwen3_moe", tmp_path, dirs_exist_ok=True)
    rng, said = np.random.default_rng(0), {"quant_method": "fp8", "activation_scheme": "dynamic"}
    tensors = {}
    for name, tensor in safetensors_files.load(tmp_path).items():
        stem = name.rpartition(".")[0]
        if "_proj" in stem and "layers.0.self_attn.q_proj" not in stem:
            for part, its in fp8_module(rng, *tensor.shape).items():
                tensors[f"{stem}.{part}"] = its
        else:
            tensors[name] = np.asarray(tensor)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    checkpoint = loading.open_checkpoint(tmp_path)
    weights = by_role(checkpoint.config, checkpoint.names, checkpoint.load_weights())
    for stem, its in modules(tensors).items():
        if "experts.3.down" in stem:
            layer = stem.split(".")[2]
            want = dequantised(its, said)
            np.testing.assert_array_equal(weights[f"layers.{layer}.experts.3.down.weight"], want)
    model = checkpoint.model(LoadAs(FLOAT32))
    shapes = checkpoint.abstract(LoadAs(FLOAT32))
    assert jax.tree.structure(nnx.split(model)) == jax.tree.structure(nnx.split(shapes))
    kept = [linear.is_quantised for linear in (*model.layers.mlp.down.linears, model.layers.attention.qkv)]
    assert kept == [True] * (len(kept) - 1) + [False]
    tokens = list(range(5, 31))
    want = reference_model.logits(checkpoint.config, weights, tokens)
    np.testing.assert_allclose(paged_logits(model, tokens, 8, 13), want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
def test_a_gpt_oss_as_it_is_published(monkeypatch):
    """Experts in MXFP4 stay so, and mean what transformers says; natively and by XLA."""
    folder = GOLDENS / "mxfp4"
    checkpoint = loading.open_checkpoint(folder)
    golden, raw = json.loads((folder / "golden.json").read_text()), safetensors_files.load(folder)
    wide, stem = checkpoint.load_weights(), "model.layers.1.mlp.experts.gate_up_proj"
    for expert in (0, 3):
        its = (raw[f"{stem}_{ending}"][expert] for ending in ("blocks", "scales"))
        np.testing.assert_array_equal(wide[f"{stem}.{expert}"], oracle.mxfp4(*its))
    weights = by_role(checkpoint.config, checkpoint.names, wide)
    want, tokens = np.array(golden["logits"]), golden["token_ids"]
    got = reference_model.logits(checkpoint.config, weights, tokens)[:: golden["every"]]
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=TOLERANCE)
    for use_native in "10":
        monkeypatch.setenv("JAXPAGED_NATIVE", use_native)
        model = checkpoint.model(LoadAs(FLOAT32))
        got = paged_logits(model, tokens, 8, 13)[:: golden["every"]]
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=TOLERANCE)
        experts = nnx.state((model.layers.mlp.gate_up, model.layers.mlp.down))
        kept = [leaf for leaf in jax.tree.leaves(experts, is_leaf=is_quantised) if is_quantised(leaf)]
        assert {(its.bits, its.is_float) for its in kept} == {(4, True)}
    shapes = checkpoint.abstract(LoadAs(FLOAT32))
    assert jax.tree.structure(nnx.split(model)) == jax.tree.structure(nnx.split(shapes))


def is_quantised(leaf):
    return isinstance(leaf, Quantised)


def test_parts_of_mxfp4_and_what_is_none():
    """A share reads its own outputs and inputs, and no more; damaged tensors are one sentence."""
    rng = np.random.default_rng(0)
    blocks, exponents = rng.integers(0, 256, (2, 12, 4, 16)), rng.integers(120, 130, (2, 12, 4))
    tensors = {"a_blocks": blocks.astype(np.uint8), "a_scales": exponents.astype(np.uint8)}
    quantisation, want = mxfp4.Tensors(tensors).quantisation(), oracle.mxfp4(blocks[1], exponents[1])
    for outputs, inputs in ((np.array([3, 9, 4]), slice(0, 128)), (np.arange(12), slice(32, 96))):
        rows = quantisation._rows_of("a.1", (12, 128), TensorSlice(outputs, inputs))
        found = wide(mxfp4.MXFP4, rows, inputs.stop - inputs.start)
        np.testing.assert_array_equal(found, want[outputs][:, inputs])
    wrong = {
        r"the weights lack 'a_scales', which quantization_config": {"a_scales": None},
        r"'a_scales' is uint8 and \(2, 12, 3\), must be uint8 and \(2, 12, 4\)": {
            "a_scales": tensors["a_scales"][..., :3]
        },
        r"'a_scales' has NaN in it": {"a_scales": np.full((2, 12, 4), 255, np.uint8)},
    }
    for message, change in wrong.items():
        its = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        with pytest.raises(InputError, match=message):
            mxfp4.Tensors(its)["a.0"]


def test_modelopt_s_own_file_says_that_weights_are_in_fp8(tmp_path):
    """The config does not mention it, as in NVIDIA's older models; scales of caches are not read."""
    shutil.copytree(GOLDENS / "gqa_tied", tmp_path, dirs_exist_ok=True)
    said = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    rng, tensors = np.random.default_rng(0), {}
    for name, tensor in safetensors_files.load(GOLDENS / "gqa_tied").items():
        stem = name.removesuffix(".weight")
        if "_proj" not in stem:
            tensors[name] = np.asarray(tensor)
            continue
        its = fp8_module(rng, *tensor.shape) | {"input_scale": scales(rng, 1)}
        its |= {"k_scale": scales(rng, 1)} if "k_proj" in stem else {}
        its["weight_scale"] = its["weight_scale"].reshape(())
        tensors |= {f"{stem}.{part}": each for part, each in its.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = loading.open_checkpoint(tmp_path)
    assert checkpoint.quant_method == "modelopt"
    stem = "model.layers.1.mlp.up_proj"
    its = {part: tensors[f"{stem}.{part}"] for part in ("weight", "weight_scale")}
    np.testing.assert_array_equal(checkpoint.load_weights()[f"{stem}.weight"], dequantised(its, FP8))
    assert checkpoint.model(LoadAs(FLOAT32)).layers.mlp.up.is_quantised


def in_blocks(weight, block, chunks):
    """Return fp8 codes, a scale for each block, and what they mean; blocks begin anew in each chunk."""
    codes, found, wide = [], [], []
    for part in np.split(np.asarray(weight, np.float32), chunks):
        rows, columns = (-(-size // block) for size in part.shape)
        whole = np.pad(part, [(0, rows * block - part.shape[0]), (0, columns * block - part.shape[1])])
        its = np.abs(whole.reshape(rows, block, columns, block)).max((1, 3)) / 448 + 1e-9
        spread = np.kron(its, np.ones((block, block), np.float32))[: part.shape[0], : part.shape[1]]
        codes.append((part / spread).astype(ml_dtypes.float8_e4m3fn))
        found.append(its.astype(np.float32))
        wide.append(codes[-1].astype(np.float32) * spread.astype(np.float32))
    return np.concatenate(codes), np.concatenate(found), np.concatenate(wide)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_mimo_v2_in_fp8_with_a_fused_product(tmp_path, chunks):
    """Values are narrower than keys, so the decoder pads them, and keeps them wide. 68 outputs of a chunk are
    no whole blocks of 8.
    """
    source, block = GOLDENS / "families" / "mimo_v2", 8
    tensors, means = {}, {}
    for name, tensor in safetensors_files.load(source).items():
        stem = name.rpartition(".")[0]
        tensors[name] = means[name] = np.asarray(tensor)
        if name.endswith("_proj.weight"):
            its = in_blocks(tensor, block, chunks if "qkv" in name else 1)
            tensors[name], tensors[f"{stem}.weight_scale_inv"], means[name] = its
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    config = json.loads((source / "config.json").read_text())
    found = []
    for folder, its, more in (("fp8", tensors, {"quantization_config": said}), ("wide", means, {})):
        (tmp_path / folder).mkdir()
        save_file(its, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
        checkpoint = loading.open_checkpoint(tmp_path / folder)
        found.append(by_role(checkpoint.config, checkpoint.names, checkpoint.load_weights()))
        if more:
            model = checkpoint.model(LoadAs(FLOAT32))
    assert found[0].keys() == found[1].keys()
    for role, its in found[1].items():
        np.testing.assert_allclose(found[0][role], its, rtol=1e-5, atol=1e-7, err_msg=role)
    experts = model.layers.mlp.down.linears
    assert (model.layers.attention.qkv.is_quantised, experts[-1].is_quantised) == (False, True)
    tokens = list(range(5, 25))
    want = reference_model.logits(checkpoint.config, found[1], tokens)
    np.testing.assert_allclose(paged_logits(model, tokens, 8, 13), want, atol=TOLERANCE, rtol=TOLERANCE)
