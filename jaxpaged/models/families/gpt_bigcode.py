"""GPT-BigCode: GPT-2 whose heads share one key and value."""

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families import gpt2
from jaxpaged.models.families.early import ALL_BIASES, GROUPED, common
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

# Of several KV heads each has its query, key and value side by side.
NAMES = Names(prefix="transformer.", table=gpt2.NAMES.table, forms=GROUPED, spare=gpt2.NAMES.spare)


def read_gpt_bigcode(f: Fields) -> ModelConfig:
    same = common(f, heads="n_head", hidden="n_embd")
    f.only("scale_attn_weights", True)
    f.only("add_cross_attention", False)
    num_positions = f.size("n_positions", 1024)
    return ModelConfig(
        **same | {"num_kv_heads": 1 if f.flag("multi_query", True) else same["num_q_heads"]},
        **ALL_BIASES,
        intermediate_size=f.size("n_inner", 4 * same["hidden_size"]),
        max_model_len=num_positions,
        num_positions=num_positions,
        norm_eps=f.positive("layer_norm_epsilon", 1e-5),
        activation=f.activation("activation_function", "gelu_pytorch_tanh"),
        layers=uniform(f.size("n_layer"), rope=None),
    )


GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    models="StarCoder 1, SantaCoder",
    read=read_gpt_bigcode,
    names=lambda config: NAMES,
)
