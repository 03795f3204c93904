"""Common properties of decoders older than Llama: layer norms, no gate, one product for q, k and v."""

from typing import Any

from jaxpaged.models.fields import Fields
from jaxpaged.models.names import GROUPED_QKV

GROUPED = {"qkv.weight": GROUPED_QKV, "qkv.bias": GROUPED_QKV}
ALL_BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


def common(f: Fields, *, heads: str, hidden: str) -> dict[str, Any]:
    """Read the model's sizes; `heads` and `hidden` are the config's names of two of them."""
    num_heads, width = f.size(heads), f.size(hidden)
    return {
        "vocab_size": f.size("vocab_size"),
        "hidden_size": width,
        "num_q_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": width // num_heads,
        "tie_word_embeddings": f.flag("tie_word_embeddings", True),
        "eos_token_ids": f.token_ids(),
        "norm": "layer",
        "norm_bias": True,
        "gated": False,
    }
