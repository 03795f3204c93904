"""GPT-Neo: GPT-2 with a window in every other layer, and scores that are not scaled."""

from typing import Any

from jaxpaged.checks import check, is_int
from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.families.early import common
from jaxpaged.models.families.family import Family
from jaxpaged.models.families.gpt2 import LAYER
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

ATTENTION = f"{LAYER}.attn.attention"
NAMES = Names(
    prefix="transformer.",
    table={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
        "attention_norm": f"{LAYER}.ln_1",
        "qkv": tuple(f"{ATTENTION}.{x}_proj" for x in "qkv"),
        "o": f"{ATTENTION}.out_proj",
        "mlp_norm": f"{LAYER}.ln_2",
        "up": f"{LAYER}.mlp.c_fc",
        "down": f"{LAYER}.mlp.c_proj",
    },
    spare=("attn.attention.bias", "attn.attention.masked_bias"),
)


def read_gpt_neo(f: Fields) -> ModelConfig:
    f.alias(num_heads="num_attention_heads", num_layers="num_hidden_layers")
    same, num_layers = common(f, heads="num_heads", hidden="hidden_size"), f.size("num_layers")
    num_positions = f.size("max_position_embeddings", 2048)
    full, local = LayerKind(), LayerKind(sliding_window=f.size("window_size", 256))
    return ModelConfig(
        **same,
        intermediate_size=f.size("intermediate_size", 4 * same["hidden_size"]),
        max_model_len=num_positions,
        num_positions=num_positions,
        attention_scale=1.0,
        o_bias=True,
        mlp_bias=True,
        norm_eps=f.positive("layer_norm_epsilon", 1e-5),
        activation=f.activation("activation_function", "gelu_new"),
        layers=tuple(local if each == "local" else full for each in _types(f, num_layers)),
    )


def _types(f: Fields, num_layers: int) -> list[str]:
    """Return the layers' kinds, of which a file says how often which come: `[[["global", "local"], 6]]`."""
    said: Any = f.get("attention_types", [[["global", "local"], 12]])
    types: list[str] = []
    rule = f"a list of [kinds, times], 'global' and 'local' for {num_layers} layers in all"
    items: list[Any] = said if isinstance(said, list) else [None]
    for item in items:
        ok = isinstance(item, list) and len(item) == 2 and isinstance(item[0], list) and is_int(item[1])
        ok = ok and all(each in ("global", "local") for each in item[0]) and 0 <= item[1] <= num_layers
        check("model config: attention_types", said, rule, ok)
        types += item[0] * item[1]
    check("model config: attention_types", said, rule, len(types) == num_layers)
    return types


GPT_NEO = Family(
    model_type="gpt_neo",
    models="GPT-Neo 125M to 2.7B",
    read=read_gpt_neo,
    names=lambda config: NAMES,
)
