"""Bamba: Mamba-2 in most layers, attention in some, a feed-forward part in all."""

from jaxpaged.checks import check, is_int
from jaxpaged.models.config import STATE, LayerKind, ModelConfig
from jaxpaged.models.families import llama, mamba_fields
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import BY_CHANNEL, Names

FEED_FORWARD = f"{llama.LAYER}.feed_forward"


def read_bamba(f: Fields) -> ModelConfig:
    """Read Bamba: which layers have attention is said by their numbers."""
    same, num_layers = llama.common(f), f.size("num_hidden_layers")
    places = f.get("attn_layer_indices") or []
    rule = f"null, or a list of numbers of layers, from 0 to {num_layers - 1}"
    is_list = isinstance(places, list) and all(is_int(place) and 0 <= place < num_layers for place in places)
    check("model config: attn_layer_indices", places, rule, is_list)
    full = LayerKind(rope=f.rope(same["head_dim"], part=0.5))
    layers = tuple(full if layer in places else STATE for layer in range(num_layers))
    mixer = mamba_fields.read(f)
    return ModelConfig(**same, **llama.biases(f), layers=layers, mixer=mixer if STATE in layers else None)


# Weights beside those of the mixer.
TABLE = {
    **llama.TABLE,
    "norm": "model.final_layernorm",
    "mlp_norm": f"{llama.LAYER}.pre_ff_layernorm",
    "gate_up": (f"{FEED_FORWARD}.gate_proj", f"{FEED_FORWARD}.up_proj"),
    "down": f"{FEED_FORWARD}.down_proj",
}
NAMES = Names(
    table={**TABLE, **mamba_fields.table(f"{llama.LAYER}.mamba")},
    forms={"mixer.conv.weight": BY_CHANNEL},
)
BAMBA = Family(
    model_type="bamba",
    models="Bamba 9B",
    read=read_bamba,
    names=lambda config: NAMES,
    defaults={
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
)
