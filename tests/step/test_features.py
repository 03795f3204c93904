"""Features: optional fields of rows and state."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged.config import EngineConfig
from jaxpaged.engine import capacity
from jaxpaged.engine.setup import Setup
from jaxpaged.memory import kv_cache
from jaxpaged.step.channels import CHANNELS
from jaxpaged.step.feature_values import DraftSizes
from jaxpaged.step.features import FEATURES, NO_FEATURES, Features
from jaxpaged.step.state import EngineState, create_state, create_tables
from tests import tiny

SIZES = dict.fromkeys(FEATURES) | {"drafts": DraftSizes(3, past_tokens=8), "grammars": 64}
ON = Features.on(
    channels=tuple((name, jax.ShapeDtypeStruct((2, 1), jnp.uint8)) for name in CHANNELS), **SIZES
)


def arrays_of(features: Features) -> set[str]:
    """Return the paths of all arrays of a state with these features."""

    def create() -> EngineState:
        tables = create_tables(8, 2, 2, 4, prefix_caching=False)
        nothing = kv_cache.create(0, 0, 1, 1, 1, jnp.dtype("float32"))
        return create_state(tables, nothing, 8, 32, on=features)

    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(create))
    return {jax.tree_util.keystr(path) for path, _ in leaves}


def test_each_feature_adds_arrays_and_one_that_is_off_none():
    basic = arrays_of(NO_FEATURES)
    for name, size in SIZES.items():
        if FEATURES[name].option:
            assert arrays_of(Features.on(**{name: size})) > basic, name
            off = {other: its for other, its in SIZES.items() if other != name}
            assert arrays_of(Features.on(channels=ON.channels, **off)) < arrays_of(ON), name
    for channel in ON.channels:
        assert arrays_of(Features.on(channels=(channel,))) > basic, channel
        others = tuple(other for other in ON.channels if other != channel)
        assert arrays_of(dataclasses.replace(ON, channels=others)) < arrays_of(ON), channel


def test_bytes_of_the_state_count_the_adapter_of_each_row():
    """Check what was left out once."""
    with_adapters = {**tiny.DEFAULTS, "enable_lora": True}
    setups = [Setup(EngineConfig(**options), tiny.CONFIG) for options in (tiny.DEFAULTS, with_adapters)]
    (of_rows, of_block), (more, same) = map(capacity.state_bytes, setups)
    assert (more - of_rows, same) == (4 * setups[0].config.num_rows, of_block)
