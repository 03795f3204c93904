"""nanochat: norms without weights, also of the embedding and behind RoPE, which turns the other way."""

import numpy as np

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Form, Names, Pieces, Shape

UNWEIGHED = dict.fromkeys(
    ("embedding_norm.weight", "norm.weight", "attention_norm.weight", "mlp_norm.weight"), 1.0
)


def _same(config: ModelConfig, shape: Shape) -> Shape:
    return shape


def _turned_back(config: ModelConfig, pieces: Pieces) -> Pieces:
    """Return queries and keys with the halves of each head exchanged: so RoPE turns the usual way."""
    q, k, v = pieces
    half = config.head_dim // 2

    def exchanged(x: np.ndarray) -> np.ndarray:
        heads = x.reshape(-1, 2, half, *x.shape[1:])
        return heads[:, ::-1].reshape(x.shape)

    return [exchanged(q), exchanged(k), v]


_FORM = Form(_same, _turned_back)
NAMES = Names(
    table=llama.TABLE | {"up": f"{llama.LAYER}.mlp.fc1", "down": f"{llama.LAYER}.mlp.fc2"},
    forms={"qkv.weight": _FORM, "qkv.bias": _FORM},
    filled=UNWEIGHED,
)


def read_nanochat(f: Fields) -> ModelConfig:
    same = llama.common(f)
    bias = f.flag("attention_bias")
    cap = f.get("final_logit_softcapping", 15.0)
    if f.is_null("final_logit_softcapping"):
        cap = None
    return ModelConfig(
        **same,
        embedding_norm=True,
        qk_norm="plain",
        norm_after_rope=True,
        qkv_bias=bias,
        o_bias=bias,
        gated=False,
        logit_soft_cap=None if cap is None else f.positive("final_logit_softcapping", 15.0),
        layers=uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"])),
    )


NANOCHAT = Family(
    model_type="nanochat",
    models="nanochat",
    read=read_nanochat,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 2048, "hidden_act": "relu2", "intermediate_size": 8192},
)
