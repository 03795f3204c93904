"""The engine's steps in one compiled program, with a model that computes nothing, and a clock that the
roofline moves on.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.memory import block_pool, block_table, kv_cache
from jaxpaged.memory.grouping import Grouping
from jaxpaged.memory.policies import Policy
from jaxpaged.models.constant import VOCAB_SIZE, ConstantModel
from jaxpaged.research.lab.decoders import Decoder
from jaxpaged.research.lab.loop import limited_pool
from jaxpaged.research.lab.serving.roofline import Roofline, seconds_of_step
from jaxpaged.step import scheduler
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import EngineState, Phase, Rows, create_state, place_requests
from jaxpaged.step.step import step

MOST_STEPS = 32  # steps in one call; the host looks at the blocks between calls
STARTED, FIRST_TOKEN, FINISHED = range(3)
NEVER = jnp.inf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Report:
    """Report of the steps of one call."""

    seconds: Float[Array, ""]  # seconds that passed in the model
    moments: Float[Array, "3 rows"]  # of STARTED and so on, since the call began; or NEVER
    phase: Int[Array, " rows"]
    num_hit_tokens: Int[Array, " rows"]
    num_free: Int[Array, ""]  # blocks
    num_cached: Int[Array, ""]  # held blocks whose content can be found
    counters: Int[Array, " counters"]  # by `step.state.Counter`
    status: Int[Array, ""]


@functools.partial(
    jax.jit,
    static_argnames=("policy", "num_blocks", "block_size", "num_rows", "max_model_len", "grouping"),
)
def create(
    num_usable: Int[Array, ""],
    *,
    policy: Policy,
    num_blocks: int,
    block_size: int,
    num_rows: int,
    max_model_len: int,
    grouping: Grouping,
) -> EngineState:
    """Create an engine's state without requests and with `num_usable` blocks; the arrays are of
    `num_blocks`.
    """
    pool, status = limited_pool(num_usable, policy, num_blocks, block_size)
    tables = block_table.create(
        pool,
        num_rows,
        cdiv(max_model_len, block_size),
        block_size,
        grouping.num_groups,
        grouping.first_blocks(block_size),
    )
    nothing = kv_cache.create(0, num_blocks, block_size, 1, 1, ConstantModel.dtype)  # no layers
    return replace(create_state(tables, nothing, max_model_len, VOCAB_SIZE), status=status)


@functools.partial(jax.jit, donate_argnames="state")
def submit(
    state: EngineState,
    request: Rows,
    row: Int[Array, " 1"],
    content: Int[Array, " ids"],
    first: Int[Array, ""],
    block_size: Int[Array, ""],
) -> EngineState:
    """Put a request, one line of NumPy rows, into a free row; the state is donated.

    Its token ids are those of its content, from `content[first]` on, each for `block_size` tokens: equal
    content is equal tokens. Nobody looks at them but the prefix cache.
    """
    place = jnp.arange(state.rows.token_ids.shape[1], dtype=jnp.int32)
    token_ids = content.at[first + place // block_size].get(mode="clip")
    return place_requests(state, replace(request, token_ids=token_ids[None]), row)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def run(
    state: EngineState,
    until: Float[Array, ""],
    watermark_blocks: Int[Array, ""],
    peak: Roofline,
    decoder: Decoder,
    *,
    config: StepConfig,
) -> tuple[EngineState, Report]:
    """Step until all rows are done, at most MOST_STEPS times; or until so many seconds have passed, and a row
    is free for the request that comes then. The state is donated.
    """
    model, config = ConstantModel(), replace(config, watermark_blocks=watermark_blocks)
    type Carry = tuple[EngineState, Float[Array, ""], Float[Array, "3 rows"], Int[Array, ""]]

    def goes_on(carry: Carry) -> Bool[Array, ""]:
        state, clock, _, num_steps = carry
        is_due = (clock >= until) & jnp.any(state.rows.free)
        return scheduler.any_work(state.rows) & ~is_due & (num_steps < MOST_STEPS)

    def one_step(carry: Carry) -> Carry:
        before, clock, moments, num_steps = carry
        state, decision = step(model, before, config)
        rows, former = state.rows, before.rows
        finishes = (rows.phase == Phase.FINISHED) & (former.phase != Phase.FINISHED)
        # A finished row holds no blocks any more: all of its tokens but the last were computed.
        seq_lens = jnp.where(finishes, rows.num_tokens - 1, state.tables.seq_lens)
        most_new = config.num_tiles * PREFILL_TILE + config.max_num_seqs
        num_new = decision.plan.num_new_tokens
        end = clock + seconds_of_step(num_new, seq_lens, peak, decoder, most_new=most_new)
        begins = (former.num_tokens == rows.prompt_lens) & (rows.num_tokens > rows.prompt_lens)
        happens = jnp.stack([decision.admitted, begins, finishes])
        when = jnp.where(happens, jnp.stack([clock, end, end])[:, None], NEVER)
        return state, end, jnp.minimum(moments, when), num_steps + 1

    never = jnp.full((3, state.tables.max_seqs), NEVER, jnp.float32)
    start = (state, jnp.float32(0), never, jnp.int32(0))
    state, seconds, moments, _ = lax.while_loop(goes_on, one_step, start)
    pool = state.tables.pool
    return state, Report(
        seconds=seconds,
        moments=moments,
        phase=state.rows.phase,
        num_hit_tokens=state.rows.num_hit_tokens,
        num_free=pool.num_free,
        num_cached=block_pool.num_cached(pool),
        counters=state.counters,
        status=state.status,
    )
