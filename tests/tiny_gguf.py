"""The tiny model as a GGUF file with a tokenizer and a chat template: all that the command line needs."""

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

from jaxpaged.models.config import ModelConfig
from tests.tiny import CONFIG, weights


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return q or k as llama.cpp's converter stores it: RoPE's pairs side by side."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def add_sizes(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Write the sizes that every architecture's header has; of several RoPEs the slowest is written."""
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    dense_size = config.experts.dense_size if config.experts is not None else 0
    writer.add_feed_forward_length(dense_size or config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_q_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    if config.head_dim * config.num_q_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
    if config.norm == "rms":
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    thetas = [kind.rope.theta for kind in config.layers if kind.rope is not None]
    if thetas:
        writer.add_rope_freq_base(max(thetas))


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    without: str = "",
    extra: str = "",
    sliding_window: int | None = None,
    kinds: Mapping[str, str] | None = None,
    also: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    tensors_a_part: int = 0,
) -> Path:
    """Write the tiny model as a GGUF file, with a byte-level vocabulary, and return its path.

    `kinds` maps a part of a tensor's name to its kind of block; other tensors are float32. `also` adds to the
    header. With `tensors_a_part` there are several files, and the path is that of the first.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_part)
    add_sizes(writer, CONFIG)
    if sliding_window is not None:
        writer.add_sliding_window(sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = [chr(c) for c in range(33, 33 + CONFIG.vocab_size - 3)]
    writer.add_token_list(["<|end|>", "Ġ", "ab", *letters])
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (CONFIG.vocab_size - 1)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}")
    for name, weight in weights().items():
        if "q_proj" in name:
            weight = interleaved(weight, CONFIG.num_q_heads)
        if "k_proj" in name:
            weight = interleaved(weight, CONFIG.num_kv_heads)
        tensor = name.replace("model.layers.", "blk.").replace("model.embed_tokens", "token_embd")
        tensor = tensor.replace("model.norm", "output_norm")
        for ours, theirs in {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }.items():
            tensor = tensor.replace(ours, theirs)
        kind = next((kind for part, kind in (kinds or {}).items() if part in tensor), "F32")
        if tensor != without:
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(tensor, gguf.quantize(weight, raw), raw_dtype=raw)
    if extra:
        writer.add_tensor(extra, np.full(4, 2, np.float32))
    also(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not tensors_a_part else min(path.parent.glob(f"{path.stem}-*-of-*.gguf"))
