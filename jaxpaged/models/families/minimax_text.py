"""MiniMax Text-01: lightning attention in some layers, softmax attention in others, experts in all."""

import numpy as np

from jaxpaged.checks import check
from jaxpaged.models.config import STATE, Experts, Factors, LayerKind, ModelConfig
from jaxpaged.models.families import llama, mixtral
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.mixers.lightning import Lightning
from jaxpaged.models.names import Names, Pieces, reordered

MIXER = f"{llama.LAYER}.self_attn"


def read_minimax_text(f: Fields) -> ModelConfig:
    """Read MiniMax Text-01: what a norm gives goes on as the residual, times a factor."""
    same, num_layers = llama.common(f), f.size("num_hidden_layers")
    check("model config: hidden_act", same["activation"], "'silu'", same["activation"] == "silu")
    f.only("sliding_window", None)
    full = LayerKind(rope=f.rope(same["head_dim"], part=1.0))
    types = ["linear_attention" if i % 2 else "full_attention" for i in range(num_layers)]
    layers = f.layer_kinds(types, full=full, others={"linear_attention": STATE})
    places = [i for i, kind in enumerate(layers) if kind.has_state]
    num_heads = same["num_q_heads"]
    mixer = Lightning(
        num_heads=num_heads,
        head_dim=same["head_dim"],
        log_decays=tuple(_log_decays(num_heads, i, num_layers) for i in places),
        out_scale=f.positive("linear_attn_beta_factor", 1.0),
    )
    return ModelConfig(
        **same,
        layers=layers,
        mixer=mixer if places else None,
        normed_residual=True,
        factors=Factors(
            attention_out=f.positive("full_attn_beta_factor", 1.0),
            attention_residual=f.positive("full_attn_alpha_factor", 1.0),
            mixer_residual=f.positive("linear_attn_alpha_factor", 1.0),
            down=f.positive("mlp_beta_factor", 1.0),
            mlp_residual=f.positive("mlp_alpha_factor", 1.0),
        ),
        experts=Experts(
            num_experts=f.size("num_local_experts", f.size("num_experts", 8)),
            num_chosen=f.size("num_experts_per_tok", 2),
            renormalise=True,
        ),
    )


def _log_decays(num_heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    """Return the decays of a layer's heads: each head's is a power of the first's, less in later layers."""
    factor = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return tuple(-(2.0 ** (-8 * (head + 1) / num_heads)) * factor for head in range(num_heads))


def _by_part(config: ModelConfig, weight: np.ndarray) -> Pieces:
    """Reorder each head's q, k and v to all of q, all of k, and all of v."""
    heads = weight.reshape(config.num_q_heads, 3, config.head_dim, -1)
    return [heads[:, part].reshape(-1, weight.shape[1]) for part in range(3)]


NAMES = Names(
    table={
        **mixtral.NAMES.table,
        "mixer.in": f"{MIXER}.qkv_proj",
        "mixer.gate": f"{MIXER}.output_gate",
        "mixer.norm": f"{MIXER}.norm",
        "mixer.out": f"{MIXER}.out_proj",
    },
    forms={"mixer.in.weight": reordered(_by_part)},
    spare=("slope_rate", "query_decay", "key_decay", "diagonal_decay"),
)
MINIMAX = Family(
    model_type="minimax",
    models="MiniMax Text-01, in transformers' form",
    read=read_minimax_text,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
)
