"""Make tiny Llamas with quantised weights, in quantised/, and what transformers computes for them.

Run once, with Python 3.11, torch 2.13.0 (CPU), transformers 5.23.0, and beside them, without what they depend
on, autoawq 0.2.9, auto-gptq 0.7.1, and compressed-tensors 0.20.0 with loguru:
    python tests/goldens/make_quantised.py [name ...]
Codes are the nearest to random weights. These libraries pack them, and they, not we, make numbers of them
again, with which transformers computes in float32. Each folder gets config.json, model.safetensors and
golden.json: token ids, and the logits after every third of them.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

HERE = Path(__file__).parent / "quantised"
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "eos_token_id": 2,
}
NUM_TOKENS, EVERY, GROUP, BLOCK = 40, 3, 32, 32
Made = tuple[dict[str, torch.Tensor], torch.Tensor]  # a module's tensors, and the weight that they mean


def bare(package: str) -> None:
    """Let modules of a package be imported without what its first file imports."""
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    assert spec is not None
    module = types.ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[package] = module


def ranges(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and largest value of each output and group, [outputs, groups]; zero is included."""
    parts = weight.split(group, dim=1)
    least = torch.stack([part.amin(dim=1) for part in parts], dim=1)
    most = torch.stack([part.amax(dim=1) for part in parts], dim=1)
    return least.clamp(max=0), most.clamp(min=0)


def awq(name: str, weight: torch.Tensor) -> Made:
    bare("awq")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    least, most = ranges(weight, GROUP)
    scales = ((most - least) / 15).half().float()
    zeros = torch.round(-least / scales).clamp(0, 15)
    inside = within_codes(weight, scales, zeros, torch.arange(weight.shape[1]) // GROUP, 4)
    linear = WQLinear_GEMM.from_linear(as_linear(inside), 4, GROUP, scales=scales.T, zeros=zeros.T)
    tensors = {name: getattr(linear, name) for name in ("qweight", "qzeros", "scales")}
    args = linear.qweight, linear.qzeros, linear.scales.float()
    return tensors, dequantize_gemm(*args, 4, GROUP).T


def gptq(name: str, weight: torch.Tensor) -> Made:
    """Pack with groups of inputs that are not neighbours, and with a bias that the model does not have."""
    order = torch.randperm(weight.shape[1])
    g_idx = torch.empty_like(order)
    g_idx[order] = torch.arange(weight.shape[1]) // GROUP
    least, most = ranges(weight[:, order], GROUP)
    scales = ((most - least) / 15).half().float()
    zeros = torch.round(-least / scales).clamp(1, 15)
    tensors, made = auto_gptq(weight, scales, zeros, g_idx, bits=4, group=GROUP)
    if name.endswith("down_proj"):
        tensors["bias"] = torch.zeros(len(weight)).half()
    return tensors, made


def gptq_8bit(name: str, weight: torch.Tensor) -> Made:
    """Pack without zero points, and with a last group that is not whole."""
    least, most = ranges(weight, 2 * GROUP)
    scales = (torch.maximum(most, -least) / 127).half().float()
    g_idx = torch.arange(weight.shape[1]) // (2 * GROUP)
    zeros = torch.full_like(scales, 128)
    return auto_gptq(weight, scales, zeros, g_idx, bits=8, group=2 * GROUP)


def auto_gptq(
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    g_idx: torch.Tensor,
    bits: int,
    group: int,
) -> Made:
    bare("auto_gptq")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    linear = QuantLinear(bits, group, weight.shape[1], len(weight), bias=False)
    inside = within_codes(weight, scales, zeros, g_idx, bits)
    linear.pack(as_linear(inside), scales, zeros, g_idx.int())
    names = ("qweight", "qzeros", "scales", "g_idx")
    tensors = {name: getattr(linear, name).clone() for name in names}
    tensors["scales"] = tensors["scales"].half()
    linear.autogptq_cuda_available = False
    return tensors, linear(torch.eye(weight.shape[1])).T


def compressed(args: dict[str, Any], name: str) -> Any:
    def make(module: str, weight: torch.Tensor) -> Made:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
        group = args.get("group_size") or weight.shape[1]
        scale, zero = calculate_qparams(*ranges(weight, group), scheme.weights)
        given = {"weight": weight, "weight_scale": scale.bfloat16().float(), "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(name)
        tensors = compressor.compress(given, scheme)
        made = compressor.decompress(dict(tensors), scheme)["weight"]
        tensors["weight_scale"] = tensors["weight_scale"].bfloat16()
        if args["symmetric"]:
            tensors.pop("weight_zero_point", None)
        return tensors, made

    return make


def fp8_block(name: str, weight: torch.Tensor) -> Made:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    config: Any = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK))
    quantizer = types.SimpleNamespace(quantization_config=config)
    tensors = Fp8Quantize(quantizer).convert({"weight": weight})
    made = Fp8Dequantize(quantizer)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"])
    return tensors, made


def within_codes(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, g_idx: torch.Tensor, bits: int
) -> torch.Tensor:
    """Clip a weight to what the codes can represent: packers do not check it."""
    least, most = (0 - zeros) * scales, (2**bits - 1 - zeros) * scales
    return weight.clamp(least[:, g_idx], most[:, g_idx])


def as_linear(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return linear


def config_of(args: dict[str, Any], name: str, **options: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": args, "input_activations": None}
    options = {"ignore": ["lm_head"], **options}
    group |= {key: options.pop(key) for key in tuple(options) if key == "input_activations"}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
    } | options


INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq"}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
    "gptq": (gptq, GPTQ | {"bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}),
    "gptq_8bit": (gptq_8bit, GPTQ | {"bits": 8, "group_size": 2 * GROUP, "desc_act": False, "sym": True}),
    "compressed_int4": (
        compressed(INT4, "pack-quantized"),
        config_of(INT4, "pack-quantized", ignore=["lm_head", "re:.*down_proj"]),
    ),
    "compressed_w8a8": (
        compressed(INT8, "int-quantized"),
        config_of(INT8, "int-quantized", input_activations=INT8 | {"strategy": "token", "dynamic": True}),
    ),
    "compressed_fp8": (compressed(FLOAT8, "float-quantized"), config_of(FLOAT8, "float-quantized")),
    "fp8_block": (fp8_block, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
}
KEPT = {"compressed_int4": "down_proj"}
TIED = ("awq", "fp8_block")


def main(names: list[str]) -> None:
    for seed, name in enumerate(VARIANTS):
        if not names or name in names:
            make(name, seed)


def make(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    quantise, said = VARIANTS[name]
    config = LlamaConfig(**SIZES, tie_word_embeddings=name in TIED)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter.normal_(mean=1.0, std=0.2)
            module = key.removesuffix(".weight")
            if key.endswith("_proj.weight") and not module.endswith(KEPT.get(name, "no module")):
                its, wide = quantise(module, parameter.data.clone())
                assert (wide - parameter).abs().max() < 0.1 * parameter.abs().max(), key
                parameter.copy_(wide)
                tensors |= {f"{module}.{ending}": tensor.contiguous() for ending, tensor in its.items()}
            else:
                parameter.copy_(parameter.half().float())
                tensors[key] = parameter.half().clone()
        token_ids = torch.randint(0, SIZES["vocab_size"], (1, NUM_TOKENS))
        logits = model(token_ids, use_cache=False).logits[0]
    folder = HERE / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    written = json.loads(config.to_json_string()) | {"model_type": "llama", "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(written, indent=2))
    golden = {
        "token_ids": token_ids[0].tolist(),
        "every": EVERY,
        "logits": [[round(v, 5) for v in row] for row in logits[::EVERY].tolist()],
    }
    (folder / "golden.json").write_text(json.dumps(golden))
    print(
        name, f"{logits.abs().max():.2f}", {key: tuple(its.shape) for key, its in list(tensors.items())[:5]}
    )


if __name__ == "__main__":
    main(sys.argv[1:])
