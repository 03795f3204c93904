"""Quantised checkpoints that are not served: each mistake has one sentence."""

import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.models import loading
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.quantised.checkpoints import Module, Tensors, read
from jaxpaged.models.quantised.codes import TensorSlice
from tests import tiny
from tests.models.test_quantised_checkpoints import (
    AUTO_ROUND,
    AWQ,
    FLOAT32,
    FP8,
    GPTQ,
    QUANTISED,
    compressed,
    fp8_module,
)

REFUSED = {
    "of a method that nobody knows": (
        {"quant_method": "bitsandbytes"},
        "quant_method='bitsandbytes' must be one of",
    ),
    "no object": (4, "quant_method=4 must be one of awq, gptq, auto-round, fp8, fbgemm_fp8, modelopt, comp"),
    "auto-round of 2 bits": (AUTO_ROUND | {"bits": 2}, "bits=2 must be 4 or 8"),
    "auto-round in floats": (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type='mx_fp' must be 'int'"),
    "auto-round for others": (
        AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"},
        "packing_format='auto_round:llm_compressor' must be 'auto_round:auto_gptq'",
    ),
    "modelopt in NVFP4": (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}},
        "quant_algo='NVFP4' must be 'FP8' or 'FP8_PER_CHANNEL_PER_TOKEN'",
    ),
    "awq of 3 bits": (AWQ | {"bits": 3}, "bits=3 must be 4"),
    "awq, packed otherwise": (AWQ | {"version": "gemv"}, "version='gemv' must be 'gemm'"),
    "gptq of 3 bits": (GPTQ | {"bits": 3}, "bits=3 must be 4 or 8"),
    "gptq for Marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' must be 'gptq'"),
    "fp8 of 5 bits of an exponent": (FP8 | {"fmt": "e5m2"}, "fmt='e5m2' must be 'e4m3'"),
    "fp8, no block": (FP8 | {"weight_block_size": [128]}, r"weight_block_size=\[128\] must be two ints"),
    "2:4": (compressed() | {"format": "marlin-24"}, "format='marlin-24' must be 'pack-quantized'"),
    "2:4 beside int4": (
        compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config's format='sparse-24-bitmask' must be 'dense' or left out: 2:4 sparse",
    ),
    "rotations": (
        compressed() | {"transform_config": {"R1": {}}},
        "transform_config={'R1': {}} must be left out",
    ),
    "nvfp4 in a group": (
        compressed() | {"config_groups": {"a": {"format": "nvfp4-pack-quantized", "weights": {}}}},
        "config_groups: a: format='nvfp4-pack-quantized' must be",
    ),
    "3 bits": (compressed(num_bits=3), "config_groups: group_0: weights: num_bits=3 must be 4 or 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_is_not_served(name):
    said, message = REFUSED[name]
    with pytest.raises(InputError, match=f"^quantization_config: {message}"):
        read(said)


GOOD = {"qweight": (12, 40), "qzeros": (3, 5), "scales": (3, 40)}
BROKEN = {
    "without scales": ({"scales": None}, "the weights lack 'a.scales', which quantization_config asks for"),
    "of 3 bits": ({"qweight": (9, 40)}, r"'a.qweight' has shape \(9, 40\), must be \(12, 40\) or \(24, 40\)"),
    "of another type": ({"qweight": np.zeros((12, 40))}, "'a.qweight' has type float64, must be int32"),
    "zero points of others": ({"qzeros": (3, 4)}, r"'a.qzeros' has shape \(3, 4\), must be \(3, 5\)"),
    "groups of 19": (
        {"scales": (5, 40), "qzeros": (5, 5)},
        "'a.scales' has 5 groups of 96 inputs, must have",
    ),
    "infinite": ({"scales": np.full((3, 40), np.inf, np.float16)}, "'a.scales' has NaN or infinity in it"),
    "an order": (
        {"g_idx": np.arange(96, dtype=np.int32) % 3},
        "'a.g_idx' must name neighbours, where desc_act",
    ),
    "groups that differ": ({"g_idx": np.zeros(96, np.int32)}, "'a.g_idx' must name groups of 32 inputs each"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_weight_that_is_not_the_config_s(name):
    change, message = BROKEN[name]
    tensors = {}
    for ending, its in (GOOD | change).items():
        if isinstance(its, tuple):
            its = np.zeros(its, np.float16 if ending == "scales" else np.int32)
        if its is not None:
            tensors[f"a.{ending}"] = its
    with pytest.raises(InputError, match=message):
        read(GPTQ).found(Module("a", tensors), (40, 96), GPTQ)[1](TensorSlice.whole((40, 96)))


def test_what_else_is_refused():
    checkpoint = loading.open_checkpoint(QUANTISED / "gptq_8bit")
    with pytest.raises(InputError, match="quantization='int8' must be None for a model whose weights are"):
        checkpoint.model(LoadAs(FLOAT32, "int8"))
    rng, weights = np.random.default_rng(0), tiny.weights()
    stem = "model.layers.0.self_attn.o_proj"
    its = {f"{stem}.{ending}": tensor for ending, tensor in fp8_module(rng, 32, 48).items()}
    its[f"{stem}.weight"] = np.full((32, 48), 0x7F, np.uint8).view("float8_e4m3fn")
    with pytest.raises(InputError, match=f"weight '{stem}.weight' has NaN"):
        Tensors(weights | its, FP8, tiny.CONFIG, NAMES)[f"{stem}.weight"]
    its[f"{stem}.weight_scale"] = np.ones((32, 5), np.float32)
    with pytest.raises(
        InputError, match=rf"weight '{stem}.weight_scale' has shape \(32, 5\), must be one number"
    ):
        Tensors(weights | its, FP8, tiny.CONFIG, NAMES).quantisation().segments(
            "o.weight", (32, 48), [(f"{stem}.weight", (32, 48))]
        )
    symmetric_said = GPTQ | {"sym": True}
    tensors = {f"a.{ending}": np.zeros(shape, np.int32) for ending, shape in GOOD.items()}
    tensors["a.scales"] = np.ones(GOOD["scales"], np.float16)
    with pytest.raises(InputError, match="weight 'a.qzeros' must mean 8 throughout, where sym is true"):
        read(symmetric_said).found(Module("a", tensors), (40, 96), symmetric_said)[1](
            TensorSlice.whole((40, 96))
        )
