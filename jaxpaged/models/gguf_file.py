"""Config, weights and tokenizer from one GGUF file, without PyTorch.

The `gguf` package parses the file and dequantises; here its names and orders become Hugging Face's.

llama.cpp keeps no sliding window for this architecture: a file that it made of a Mistral does not say that
the model has one, and a token then sees all before it, here as there. A window that a file does name is used.
"""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.models import hf
from jaxpaged.models.config import ModelConfig

ARCHITECTURE = "llama"

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class _Reader(gguf.GGUFReader):
    """Sees its mapped file as a plain array: slices of `np.memmap` take thrice as long, and a vocabulary has
    a quarter of a million.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if isinstance(value, np.memmap) else value)


def open_file(path: Path) -> gguf.GGUFReader:
    """Parse the file's header. Raises `InputError` if it is not a whole GGUF file of a known architecture."""
    try:
        reader = _Reader(path)
    except Exception as error:  # the reader has no error of its own: whatever parsing stumbled on
        raise InputError(
            f"model={str(path)!r} must be a whole GGUF file: {type(error).__name__}: {error}"
        ) from error
    architecture = _field(reader, path, "general.architecture")
    if architecture != ARCHITECTURE:
        raise InputError(
            f"model={str(path)!r}: general.architecture={architecture!r} must be {ARCHITECTURE!r}: "
            "no other family is supported"
        )
    return reader


def model_config(reader: gguf.GGUFReader, path: Path) -> ModelConfig:
    def number(name: str, default: float | None = None) -> Any:
        return _field(reader, path, f"{ARCHITECTURE}.{name}", default)

    tensors = {tensor.name for tensor in reader.tensors}
    num_q_heads = number("attention.head_count")
    hidden_size = number("embedding_length")
    eos = _field(reader, path, "tokenizer.ggml.eos_token_id", -1)
    eot = _field(reader, path, "tokenizer.ggml.eot_token_id", -1)
    kind = _field(reader, path, f"{ARCHITECTURE}.rope.scaling.type", "none")
    if kind != "none":
        raise InputError(f"model={str(path)!r}: rope.scaling.type={kind!r} must be 'none'")
    return ModelConfig(
        vocab_size=len(_field(reader, path, "tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=number("feed_forward_length"),
        num_layers=number("block_count"),
        num_q_heads=num_q_heads,
        num_kv_heads=number("attention.head_count_kv", num_q_heads),
        head_dim=number("attention.key_length", hidden_size // num_q_heads),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base", 10000.0),
        max_model_len=number("context_length"),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        sliding_window=number("attention.sliding_window", 0) or None,
        eos_token_ids=tuple(sorted({i for i in (eos, eot) if i >= 0})),
    )


def load_weights(reader: gguf.GGUFReader, path: Path) -> dict[str, np.ndarray]:
    """All tensors dequantised to float32, under their Hugging Face names and in Hugging Face's order."""
    heads = {
        "self_attn.q_proj": _field(reader, path, f"{ARCHITECTURE}.attention.head_count"),
        "self_attn.k_proj": _field(reader, path, f"{ARCHITECTURE}.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        if name is None:
            raise InputError(
                f"model={str(path)!r}: tensor {tensor.name!r} is not one a {ARCHITECTURE} model has"
            )
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except (ValueError, NotImplementedError) as error:
            raise InputError(
                f"model={str(path)!r}: tensor {tensor.name!r} cannot be read: {error}"
            ) from error
        for projection, num_heads in heads.items():
            if projection in name:
                values = _from_interleaved(values, num_heads)
        weights[name] = values
    return weights


def tokenizer(reader: gguf.GGUFReader, path: Path) -> Any:
    """A transformers tokenizer made from the file's byte-pair vocabulary, merges and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = _field(reader, path, "tokenizer.ggml.model")
    split = _field(reader, path, "tokenizer.ggml.pre", "default")
    pre = {
        "smollm": [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ],
    }
    if kind != "gpt2" or split not in pre:
        raise InputError(
            f"model={str(path)!r}: tokenizer {kind!r} with pre-tokenizer {split!r} must be 'gpt2' with "
            f"one of {', '.join(map(repr, pre))}"
        )
    tokens: list[str] = _field(reader, path, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, path, "tokenizer.ggml.merges")]
    types = _field(reader, path, "tokenizer.ggml.token_type")
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(pre[split])
    bpe.decoder = decoders.ByteLevel()
    for special, token_type in ((True, gguf.TokenType.CONTROL), (False, gguf.TokenType.USER_DEFINED)):
        bpe.add_tokens(
            [
                AddedToken(t, special=special, normalized=False)
                for t, k in zip(tokens, types, strict=True)
                if k == token_type
            ]
        )

    def token(name: str) -> str | None:
        token_id = _field(reader, path, f"tokenizer.ggml.{name}_token_id", -1)
        return tokens[token_id] if 0 <= token_id < len(tokens) else None

    add_bos = bool(_field(reader, path, "tokenizer.ggml.add_bos_token", False))
    bos = token("bos")
    if add_bos and bos is not None:
        from tokenizers.processors import TemplateProcessing

        bpe.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    return hf.import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=bos,
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        chat_template=_field(reader, path, "tokenizer.chat_template", ""),
        clean_up_tokenization_spaces=False,
    )


def _field(reader: gguf.GGUFReader, path: Path, name: str, default: Any = None) -> Any:
    field = reader.fields.get(name)
    if field is not None:
        return field.contents()
    if default is None:
        raise InputError(f"model={str(path)!r}: the GGUF file lacks {name!r}")
    return default


def _hf_name(name: str) -> str | None:
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    return None


def _from_interleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF keeps RoPE's pairs side by side (0, 1), (2, 3), ...; Hugging Face half a head apart."""
    shape = values.shape
    return values.reshape(num_heads, -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
