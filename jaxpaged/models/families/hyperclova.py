"""HyperCLOVA X: Granite with norms of what comes out of attention and feed-forward, too."""

import dataclasses

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

NAMES = Names(
    table=llama.TABLE
    | {"attention_out_norm": f"{llama.LAYER}.post_norm1", "mlp_out_norm": f"{llama.LAYER}.post_norm2"}
)


def read_hyperclova(f: Fields) -> ModelConfig:
    """Read HyperCLOVA X, whose factor of logits multiplies; Granite's divides."""
    config = llama.read_granite(f)
    scale = f.get("attention_multiplier")
    return dataclasses.replace(
        config,
        attention_scale=None if scale is None else config.attention_scale,
        logit_divisor=1 / config.logit_divisor,
        norm_place="both" if f.flag("use_post_norm", True) else "before",
    )


HYPERCLOVAX = Family(
    model_type="hyperclovax",
    models="HyperCLOVA X SEED, text only",
    read=read_hyperclova,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 2048},
)
