"""Make a tiny model of each family, in families/, and what transformers computes for it.

Run once, with Python 3.11, torch 2.13.0 (CPU) and transformers 5.23.0 (from seed_oss on, 5.24.0):
    python tests/goldens/make_families.py [name ...]
Each folder gets config.json, model.safetensors (in float16, which all numbers were rounded to beforehand) and
golden.json: token ids, the logits after every third of them, and the greedy answer, with the smallest gap
between its two best logits. All is computed in float32.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from family_variants import EXPERTS, HALF_WINDOWED, LLAMA4, OWN_SIZES, SIZES, TINY
from family_variants import VARIANTS as OLDER
from hybrid_variants import HYBRID
from latent_variants import LATENT
from make_tiny_llamas import greedy
from newer_variants import NEWER
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Mistral4ForCausalLM

HERE = Path(__file__).parent / "families"
VARIANTS = OLDER | NEWER | HYBRID | LATENT
MODEL_TYPES = {"falcon_grouped": "falcon", "falcon_alibi": "falcon", "gpt_neox_sequential": "gpt_neox"}
MODEL_TYPES |= {"cohere_normed": "cohere", "stablelm_parallel": "stablelm"}
MODEL_TYPES |= {"granitemoehybrid_experts": "granitemoehybrid", "laguna_elements": "laguna"}
MODEL_TYPES |= {"cohere2_moe_rms": "cohere2_moe", "gpt_bigcode_heads": "gpt_bigcode"}
MODEL_TYPES |= {f"granitemoehybrid_{name}": "granitemoehybrid" for name in ("states", "both")}
MODEL_TYPES |= {"deepseek_v2_lite": "deepseek_v2", "deepseek_v3_plain": "deepseek_v3"}
MODEL_TYPES |= {"nemotron_h_experts": "nemotron_h", "falcon_h1_normed": "falcon_h1"}
MODEL_TYPES |= dict.fromkeys(("gemma4_large", "gemma4_experts"), "gemma4_text")
# Models of text and images: what is inside, and as small a vision part as there may be.
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
CLIP = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 16}
QWEN3_VISION = {**QWEN_VISION, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
TEXT = {**TINY, "head_dim": 8}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
AXES["partial_rotary_factor"] = 0.5
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"model_type": "gemma3_text", **TEXT, **HALF_WINDOWED, "query_pre_attn_scalar": 24},
        {"model_type": "siglip_vision_model", **CLIP},
    ),
    "mistral3": (
        {"model_type": "mistral", **TEXT, "sliding_window": None},
        {"model_type": "pixtral", **CLIP},
    ),
    "llama4": (
        {"model_type": "llama4_text", **LLAMA4},
        {
            "hidden_size": 8,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 8,
            "projector_input_dim": 8,
            "projector_output_dim": 8,
        },
    ),
    "gemma4": (
        {"model_type": "gemma4_text", **VARIANTS["gemma4_large"], "pad_token_id": 0},
        {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 8,
        },
    ),
    "cohere2_vision": (
        {"model_type": "cohere2_moe", **NEWER["cohere2_moe"], "shared_expert_combination_strategy": "sum"},
        {"model_type": "siglip_vision_model", **CLIP},
    ),
    "llava": ({"model_type": "llama", **TEXT}, {"model_type": "clip_vision_model", **CLIP}),
    "internvl": (
        {"model_type": "qwen3", **TEXT},
        {**CLIP, "image_size": [28, 28], "patch_size": [14, 14], "use_mask_token": False},
    ),
    "qwen2_vl": (
        {**TINY, "hidden_size": 32, "rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 8, "num_heads": 1, "hidden_size": 32},
    ),
    "qwen2_5_vl": (
        {**TINY, "hidden_size": 32, "rope_parameters": MROPE},
        {**QWEN_VISION, "out_hidden_size": 32},
    ),
    "qwen3_vl": ({**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}}, QWEN3_VISION),
    "qwen3_5": ({**HYBRID["qwen3_5_text"], "rope_parameters": AXES}, QWEN3_VISION),
    "qwen3_5_moe": ({**HYBRID["qwen3_5_moe_text"], "rope_parameters": AXES}, QWEN3_VISION),
    "qwen3_vl_moe": (
        {**TEXT, **EXPERTS, "num_experts": 5, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        QWEN3_VISION,
    ),
}
UNTIED = ("mistral3", "internvl")
SEEDS = {
    "mixtral": 100,
    "gemma3n_text": 104,
    "granitemoehybrid": 100,
    "qwen3_next": 301,
    "deepseek_v2": 401,
    "deepseek_v2_lite": 402,
    "deepseek_v3": 110,
    "deepseek_v3_plain": 111,
    "glm4_moe_lite": 112,
    "mistral4": 113,
    "minicpm3": 114,
    "mamba2": 501,
}  # where the answer would hang on a rounding
IMPLEMENTATIONS = {"falcon_alibi": "sdpa"}  # its eager attention adds the slopes twice
# Those that came last, in their order: the seeds of the others stay what they were.
ADDED = ("llama4_text", "llama4", "gemma3n_text", "gemma4_text", "gemma4_large", "gemma4", "gemma4_experts")
LAST = ("bamba",)
# Those of layers by type: behind all others.
BY_TYPE = ("nemotron_h", "nemotron_h_experts", "falcon_h1", "falcon_h1_normed", "jamba", "mamba")
BY_TYPE += ("falcon_mamba", "mamba2", "olmo_hybrid", "minimax")
ADDED += (
    *NEWER,
    "cohere2_vision",
    *(each for each in HYBRID if each not in LAST + BY_TYPE),
    "qwen3_5",
    "qwen3_5_moe",
)
ADDED += (*LAST, *LATENT, *BY_TYPE)
# Models of transformers 5.24 that need an image; their decoder does not.
NEEDS_IMAGES = ("llama4",)
NUM_TOKENS, EVERY = 40, 3


def main(names: list[str]) -> None:
    first = [name for name in (*VARIANTS, *WRAPPERS) if name not in ADDED]
    for seed, name in enumerate([*first, *ADDED]):
        if not names or name in names:
            torch.manual_seed(SEEDS.get(name, seed))
            write(name, wrapped(name) if name in WRAPPERS else made(name, VARIANTS[name]))
    if not names or "gemma3n" in names:
        wrap_gemma3n()
    if not names or "mimo_v2" in names:
        fuse_mimo()
    if not names or "kimi_k2" in names:
        rename_kimi()


def fuse_mimo() -> None:
    """Write MiMo V2 Flash's model as MiMo V2.5 has it: transformers has no such type."""
    inside, folder = HERE / "mimo_v2_flash", HERE / "mimo_v2"
    folder.mkdir(exist_ok=True)
    said = json.loads((inside / "config.json").read_text())
    ropes, heads = said.pop("rope_parameters"), said["num_key_value_heads"]
    sliding = [int(kind == "sliding_attention") for kind in said.pop("layer_types")]
    said |= {
        "model_type": "mimo_v2",
        "architectures": ["MiMoV2ForCausalLM"],
        "attention_projection_layout": "fused_qkv",
        "hybrid_layer_pattern": sliding,
        "moe_layer_freq": [int(kind == "sparse") for kind in said.pop("mlp_layer_types")],
        "layernorm_epsilon": said.pop("rms_norm_eps"),
        "swa_num_attention_heads": said["num_attention_heads"],
        "swa_num_key_value_heads": 2 * heads,
        "swa_head_dim": said["head_dim"],
        "swa_v_head_dim": said["v_head_dim"],
        "sliding_window": said["sliding_window"] - 1,
        "sliding_window_size": said["sliding_window"] - 1,
        "rope_theta": ropes["full_attention"]["rope_theta"],
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": ropes["full_attention"]["partial_rotary_factor"],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    (folder / "config.json").write_text(json.dumps(said, indent=2))
    tensors = load_file(inside / "model.safetensors")
    for key in [key for key in tensors if ".q_proj." in key]:
        names = [key.replace("q_proj", f"{x}_proj") for x in "qkv"]
        parts = [tensors.pop(name).unflatten(0, (heads, -1)) for name in names]
        tensors[key.replace("q_proj", "qkv_proj")] = torch.cat(parts, dim=1).flatten(0, 1).contiguous()
    tensors["visual.patch_embed.weight"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "golden.json").write_text((inside / "golden.json").read_text())


def rename_kimi() -> None:
    """Write DeepSeek V3's model without groups as Kimi K2 has it: transformers has no such type."""
    inside, folder = HERE / "deepseek_v3_plain", HERE / "kimi_k2"
    folder.mkdir(exist_ok=True)
    said = json.loads((inside / "config.json").read_text())
    ropes = said.pop("rope_parameters")
    said |= {"model_type": "kimi_k2", "rope_theta": ropes["rope_theta"], "rope_scaling": None}
    said |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    (folder / "config.json").write_text(json.dumps(said, indent=2))
    for name in ("model.safetensors", "golden.json"):
        (folder / name).write_bytes((inside / name).read_bytes())


def wrap_gemma3n() -> None:
    """Write Gemma 3n's text model as the model of text, images and sound has it: that needs timm."""
    inside, folder = HERE / "gemma3n_text", HERE / "gemma3n"
    folder.mkdir(exist_ok=True)
    config = AutoConfig.for_model("gemma3n", text_config=json.loads((inside / "config.json").read_text()))
    config.save_pretrained(folder)
    its = load_file(inside / "model.safetensors").items()
    tensors = {key.replace("model.", "model.language_model.", 1): value for key, value in its}
    tensors |= {f"model.{part}.weight": torch.zeros(1) for part in ("vision_tower", "audio_tower")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "golden.json").write_text((inside / "golden.json").read_text())


def made(name: str, variant: dict[str, Any]) -> torch.nn.Module:
    model_type = MODEL_TYPES.get(name, name)
    sizes = {} if model_type in OWN_SIZES else SIZES
    few = {"vocab_size": SIZES["vocab_size"], "initializer_range": 0.25, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, **few | sizes | variant)
    attention = IMPLEMENTATIONS.get(name, "eager")
    if name == "mistral4":  # it is the decoder inside of mistral3, and no class of its own by its type
        config._attn_implementation = attention
        return Mistral4ForCausalLM(config).eval()
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def wrapped(name: str) -> torch.nn.Module:
    text, vision = WRAPPERS[name]
    untied = {"tie_word_embeddings": False} if name in UNTIED else {}
    parts = {"text_config": {**SIZES, **text}, "vision_config": vision}
    config = AutoConfig.for_model(
        name,
        **parts,
        **untied,
        image_token_id=60,
        **(
            {"video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57}
            if "qwen" in name
            else {}
        ),
    )
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()


def write(name: str, model: torch.nn.Module) -> None:
    is_less_one = name.startswith("gemma") and not name.startswith(("gemma3n", "gemma4"))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            shake(parameter_name, parameter, is_less_one=is_less_one)
            parameter.copy_(parameter.half().float())
        for buffer_name, buffer in model.named_buffers():
            if "correction_bias" in buffer_name or "expert_bias" in buffer_name:
                buffer.normal_(std=0.2).copy_(buffer.half().float())
            if "layer_scalar" in buffer_name:
                buffer.normal_(mean=1.0, std=0.2).copy_(buffer.half().float())
        # The last few stand for images, where there are some.
        largest = SIZES["vocab_size"] - (4 if name in WRAPPERS else 0)
        token_ids = torch.randint(0, largest, (1, NUM_TOKENS))
        decoder = model.language_model if name in NEEDS_IMAGES else model
        logits = decoder(token_ids, use_cache=False).logits[0]
        answer, smallest_gap = greedy(decoder, token_ids)
        if name == "cohere2_vision":  # transformers' wrapper forgets what its text model multiplies by
            scale = model.config.text_config.logit_scale
            logits, smallest_gap = logits * scale, smallest_gap * scale
    folder = HERE / name
    model.half().save_pretrained(folder)
    if name == "qwen3_vl_moe":
        turn_experts(folder / "model.safetensors")
    if name == "olmo_hybrid":
        divide_convolutions(folder / "model.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)
    golden = {
        "token_ids": token_ids[0].tolist(),
        "every": EVERY,
        "logits": [[round(v, 5) for v in row] for row in logits[::EVERY].tolist()],
        "answer": answer,
        "smallest_gap": round(smallest_gap, 6),
    }
    (folder / "golden.json").write_text(json.dumps(golden))
    print(name, f"{smallest_gap:.4f}", f"{logits.abs().max():.2f}")


def turn_experts(file: Path) -> None:
    """Store experts as published models have them, inputs first; transformers reads both forms."""
    tensors = load_file(file)
    turned = {key: value.mT.contiguous() for key, value in tensors.items() if ".experts." in key}
    save_file(tensors | turned, file, metadata={"format": "pt"})


def divide_convolutions(file: Path) -> None:
    """Divide convolutions of q, k and v by their channels, as published models have them: transformers reads
    this form, and writes three equal parts. It also renames a norm of layers with attention.
    """
    tensors = load_file(file)
    for first in [key for key in tensors if key.endswith("q_conv1d.weight")]:
        names = [first.replace("q_conv", f"{x}_conv") for x in "qkv"]
        sizes = [len(tensors[name.replace("conv1d", "proj")]) for name in names]
        parts = torch.cat([tensors[name] for name in names]).split(sizes)
        tensors |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    for last in [key for key in tensors if key.endswith("post_feedforward_layernorm.weight")]:
        name = last.replace("post_feedforward", "post_attention")
        tensors[name] = tensors.pop(last.replace("post_feedforward_layernorm", "feedforward_layer_norm"))
    save_file(tensors, file, metadata={"format": "pt"})


def shake(name: str, parameter: torch.nn.Parameter, *, is_less_one: bool) -> None:
    """Give everything a value that matters: norms and biases begin as ones and zeros."""
    if name.endswith("A_log"):
        parameter.uniform_(-2.0, 1.0)
        return
    if name.endswith("dt_bias"):
        parameter.normal_(mean=-1.0, std=0.5)
        return
    is_norm = parameter.ndim == 1 and "bias" not in name and "sinks" not in name
    if is_norm:
        parameter.normal_(mean=0.0 if is_less_one else 1.0, std=0.2)
    elif parameter.ndim == 1 or name.endswith("_bias"):
        parameter.normal_(std=0.2)
    elif parameter.std() < 0.01 or parameter.std() > 0.5:
        parameter.normal_(std=0.25)


if __name__ == "__main__":
    main(sys.argv[1:])
