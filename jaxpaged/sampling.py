"""Sampling: logits to tokens, with every option batched. One row may be greedy while its neighbour
samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxpaged import row_sums
from jaxpaged.arithmetic import cdiv
from jaxpaged.config import LogprobsMode
from jaxpaged.sampling_filters import filtered, ordered
from jaxpaged.sampling_params import MAX_LOGPROBS
from jaxpaged.sampling_state import LogitRules, SamplingState

# Tokens of a row, and edits, that one turn of a loop looks at: the time follows their number.
TOKENS_AT_ONCE = 256
EDITS_AT_ONCE = 32
# A token is drawn in two steps: one of the vocabulary's groups of so many neighbours, then one in it.
DRAWN_GROUP = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """Tokens behind which new ones are chosen. Row i of a batch has those of line `row[i]`."""

    row: Int[Array, " rows"]
    prompt_lens: Int[Array, " rows"]
    num_tokens: Int[Array, " rows"]  # prompt and answer so far
    token_ids: Int[Array, "lines max_model_len"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """Scores that the model itself gives tokens, before any option: natural logarithms of probabilities."""

    logprob: Float[Array, "*n"]  # of the token that was chosen
    rank: Int[Array, "*n"]  # its place among all, 1 the likeliest, equal ones by id
    top_ids: Int[Array, "*n num_top"]  # the likeliest tokens, in order; -1 where the vocabulary is smaller
    top_logprobs: Float[Array, "*n num_top"]


def sample(
    logits: Float[Array, "rows vocab"],
    options: SamplingState,
    positions: Int[Array, " rows"],
    edit: Callable[[Float[Array, "rows vocab"]], Float[Array, "rows vocab"]] = lambda logits: logits,
) -> Int[Array, " rows"]:
    """Choose one token a row. A row's draw depends only on its seed and on `positions`, the new token's
    position.

    edit: returns the logits changed by the rules of the rows that have some.

    A batch in which no row samples or has rules costs an argmax; one in which no row filters, only the draws.
    A row whose largest logit is not finite, because nothing is allowed or the model has failed, is greedy.
    """
    samples = options.temperature > 0

    def choose() -> Int[Array, " rows"]:
        changed = lax.cond(jnp.any(options.has_rules), lambda: edit(logits), lambda: logits)
        greedy = likeliest(changed)

        def draw() -> Int[Array, " rows"]:
            largest = jnp.max(changed, axis=1)
            kept = filtered(changed, largest, options)
            keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(
                options.seed, positions
            )
            return jnp.where(samples & jnp.isfinite(largest), _drawn(kept, keys), greedy)

        return lax.cond(jnp.any(samples), draw, lambda: greedy)

    return lax.cond(jnp.any(samples | options.has_rules), choose, lambda: likeliest(logits))


def _drawn(logits: Float[Array, "rows vocab"], keys: Key[Array, " rows"]) -> Int[Array, " rows"]:
    """Draw a token a row by `softmax` of logits whose largest is 0, from two random numbers of the row's
    key.

    By inversion of the distribution in two steps: first a group of DRAWN_GROUP tokens, then a token in it.
    Gumbel's trick would need a random number for each token.
    """
    num_rows, vocab = logits.shape
    padding = ((0, 0), (0, -vocab % DRAWN_GROUP))
    weights = jnp.exp(jnp.pad(logits, padding, constant_values=-jnp.inf))
    weights = weights.reshape(num_rows, -1, DRAWN_GROUP)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    group = _inverted(row_sums.total(weights)[..., 0], uniform[:, 0])
    in_group = jnp.take_along_axis(weights, group[:, None, None], axis=1)[:, 0]
    return group * DRAWN_GROUP + _inverted(in_group, uniform[:, 1])


def _inverted(weights: Float[Array, "rows n"], uniform: Float[Array, " rows"]) -> Int[Array, " rows"]:
    """Return the first index with a positive weight up to which the weights exceed this fraction of their
    sum.
    """
    up_to = jnp.cumsum(weights, axis=1)
    exceeds = (up_to > (uniform * up_to[:, -1])[:, None]) & (weights > 0)
    num_places = weights.shape[1]
    first = jnp.min(jnp.where(exceeds, jnp.arange(num_places, dtype=jnp.int32), num_places), axis=1)
    return jnp.where(first < num_places, first, likeliest(weights))  # should rounding leave none


def edited(
    logits: Float[Array, "rows vocab"], rules: LogitRules, applies: Bool[Array, " rows"], context: Context
) -> Float[Array, "rows vocab"]:
    """Return the logits changed by the rules of the rows to which they apply. `rules` and `context` have
    the same lines.

    Rules that none of these rows has are skipped. The other rows' logits stay as they are, to the bit.
    """
    row = context.row
    restricted = applies & rules.is_restricted[row]
    waits = applies & (context.num_tokens < rules.least_num_tokens[row])
    num_edits = jnp.where(applies, rules.num_edits[row], 0)
    penalties = (rules.presence_penalty[row], rules.frequency_penalty[row], rules.repetition_penalty[row])
    is_penalised = applies & ((penalties[0] != 0) | (penalties[1] != 0) | (penalties[2] != 1))

    def bar(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows vocab"]:
        vocab = logits.shape[1]
        barred = restricted[:, None] & ~has_token(rules.allowed[row], vocab)
        barred |= waits[:, None] & has_token(rules.stop_tokens[row], vocab)
        return jnp.where(barred, -jnp.inf, logits)

    for is_asked, change in (
        (restricted | waits, bar),
        (num_edits > 0, lambda logits: _add_edits(logits, rules, num_edits, context)),
        (is_penalised, lambda logits: _penalise(logits, penalties, is_penalised, context)),
    ):
        logits = lax.cond(jnp.any(is_asked), change, lambda logits: logits, logits)
    return logits


def _add_edits(
    logits: Float[Array, "rows vocab"], rules: LogitRules, num_edits: Int[Array, " rows"], context: Context
) -> Float[Array, "rows vocab"]:
    """Add each edit's value to its token's logit, where the answer ends with the edit's prefix."""
    row, vocab = context.row[:, None], logits.shape[1]

    def add_some(i: Int[Array, ""], logits: Float[Array, "rows vocab"]) -> Float[Array, "rows vocab"]:
        place = i * EDITS_AT_ONCE + jnp.arange(EDITS_AT_ONCE, dtype=jnp.int32)[None]
        prefix = rules.edit_prefix.at[row, place].get(mode="clip")
        in_use = place < num_edits[:, None]
        type Carry = tuple[Int[Array, ""], Bool[Array, "rows edits_at_once"]]

        def compare(carry: Carry) -> Carry:
            """Compare the ids so many tokens back, in the edits and in the answer."""
            back, matches = carry
            wanted = rules.edit_ids.at[row, jnp.maximum(place - back, 0)].get(mode="clip")
            position = context.num_tokens - back
            has = context.token_ids.at[context.row, jnp.maximum(position, 0)].get(mode="clip")
            same = (wanted == has[:, None]) & (position >= context.prompt_lens)[:, None]
            return back + 1, matches & (same | (prefix < back))

        longest = jnp.max(jnp.where(in_use, prefix, 0))
        _, matches = lax.while_loop(lambda carry: carry[0] <= longest, compare, (jnp.int32(1), in_use))
        ids = jnp.where(matches, rules.edit_ids.at[row, place].get(mode="clip"), vocab)
        values = rules.edit_values.at[row, place].get(mode="clip")
        return logits.at[jnp.arange(ids.shape[0])[:, None], ids].add(values, mode="drop")

    return lax.fori_loop(0, cdiv(jnp.max(num_edits), EDITS_AT_ONCE), add_some, logits)


def _penalise(
    logits: Float[Array, "rows vocab"],
    penalties: tuple[Float[Array, " rows"], Float[Array, " rows"], Float[Array, " rows"]],
    applies: Bool[Array, " rows"],
    context: Context,
) -> Float[Array, "rows vocab"]:
    """Apply the penalties. With c the number of times the answer has a token, and m = 1 if prompt or
    answer has it:

        logit' = (logit / r if logit > 0 else logit * r, if m else logit) - frequency * c - presence * (c > 0)

    Tokens are counted anew in each step: nothing has to be kept consistent when a request is preempted.
    """
    vocab, line = logits.shape[1], jnp.arange(logits.shape[0])[:, None]
    presence, frequency, repetition = (
        jnp.where(applies, penalty, none) for penalty, none in zip(penalties, (0, 0, 1), strict=True)
    )
    num_tokens = jnp.where(applies, context.num_tokens, 0)
    first = jnp.where(repetition == 1, context.prompt_lens, 0)  # the others do not concern the prompt
    first = jnp.min(jnp.where(applies, first, context.token_ids.shape[1]))
    type Carry = tuple[Int[Array, "rows vocab"], Bool[Array, "rows vocab"]]

    def count_some(i: Int[Array, ""], carry: Carry) -> Carry:
        counts, occurs = carry
        position = i * TOKENS_AT_ONCE + jnp.arange(TOKENS_AT_ONCE, dtype=jnp.int32)[None]
        token = context.token_ids.at[context.row[:, None], position].get(mode="clip")
        token = jnp.where(position < num_tokens[:, None], token, vocab)
        answered = jnp.where(position >= context.prompt_lens[:, None], token, vocab)
        return counts.at[line, answered].add(1, mode="drop"), occurs.at[line, token].set(True, mode="drop")

    counts, occurs = lax.fori_loop(
        first // TOKENS_AT_ONCE,
        cdiv(jnp.max(num_tokens), TOKENS_AT_ONCE),
        count_some,
        (jnp.zeros(logits.shape, jnp.int32), jnp.zeros(logits.shape, bool)),
    )
    repeated = jnp.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
    less = frequency[:, None] * counts + jnp.where(counts > 0, presence[:, None], 0)
    return jnp.where(occurs, repeated, logits) - less


def has_token(tokens: UInt32[Array, "*n words"], vocab: int) -> Bool[Array, "*n vocab"]:
    """Return sets of tokens as masks over the vocabulary. Bit t % 32 of word t // 32 stands for token t."""
    bits = (tokens[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(*tokens.shape[:-1], -1)[..., :vocab].astype(bool)


def is_in(token_ids: Int[Array, " n"], tokens: UInt32[Array, " words"]) -> Bool[Array, " n"]:
    """Return whether each token is in the set; a negative one is in none."""
    bits = tokens.at[token_ids // 32].get(mode="clip") >> (token_ids % 32).astype(jnp.uint32)
    return (token_ids >= 0) & (bits & 1).astype(bool)


def is_among(token_ids: Int[Array, " rows"], tokens: UInt32[Array, "rows words"]) -> Bool[Array, " rows"]:
    """Return whether each row's token is in the row's set."""
    word = jnp.take_along_axis(tokens, token_ids[:, None] // 32, axis=1)[:, 0]
    return ((word >> (token_ids % 32).astype(jnp.uint32)) & 1).astype(bool)


def in_bits(mask: Bool[Array, "rows vocab"]) -> UInt32[Array, "rows words"]:
    """Return masks over the vocabulary as sets of tokens; `has_token` reads them."""
    bits = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % 32))).reshape(mask.shape[0], -1, 32)
    return jnp.sum(bits.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32), axis=2, dtype=jnp.uint32)


def support(
    logits: Float[Array, "rows vocab"],
    options: SamplingState,
    edit: Callable[[Float[Array, "rows vocab"]], Float[Array, "rows vocab"]],
) -> Bool[Array, "rows vocab"]:
    """Return the tokens that a row's token is chosen from: those that its rules and filters leave.

    Of a greedy row, and of one in which nothing can be drawn, only the likeliest is left. `edit` as in
    `sample`.
    """
    changed = lax.cond(jnp.any(options.has_rules), edit, lambda logits: logits, logits)
    largest = jnp.max(changed, axis=1)
    draws = (options.temperature > 0) & jnp.isfinite(largest)
    is_left = filtered(changed, largest, options) > -jnp.inf
    is_likeliest = jnp.arange(logits.shape[1]) == likeliest(changed)[:, None]
    return jnp.where(draws[:, None], is_left, is_likeliest)


class Told(NamedTuple):
    """Values that scores are made of, in place of the model's logits."""

    values: Float[Array, "rows vocab"]
    are_logits: Bool[Array, " rows"]  # rows whose scores are the values themselves


def reported_values(
    mode: LogprobsMode,
    logits: Float[Array, "rows vocab"],
    options: SamplingState,
    edit: Callable[[Float[Array, "rows vocab"]], Float[Array, "rows vocab"]],
    searches: Bool[Array, " rows"],
) -> Told:
    """Return the values that `score` takes under a mode of `EngineConfig.logprobs_mode`; `edit` as in
    `sample`.

    Processed ones are those of the distribution that a row's token is drawn from: after its rules, divided
    by its temperature, minus infinity for the tokens that its filters exclude. A greedy row's are after its
    rules. Rows of beam searches keep the model's own log-probabilities, by which beams are ranked.
    """
    values = logits
    if mode.startswith("processed"):
        changed = lax.cond(jnp.any(options.has_rules), edit, lambda logits: logits, logits)
        largest = jnp.max(changed, axis=1)
        draws = (options.temperature > 0) & jnp.isfinite(largest)
        drawn_from = filtered(changed, largest, options)
        if mode == "processed_logits":
            scaled = changed / jnp.where(draws, options.temperature, 1)[:, None]
            drawn_from = jnp.where(drawn_from == -jnp.inf, -jnp.inf, scaled)
        values = jnp.where((searches | ~draws)[:, None], changed, drawn_from)
    return Told(values, ~searches if mode.endswith("logits") else jnp.zeros_like(searches))


def score(
    logits: Float[Array, "rows vocab"],
    token_ids: Int[Array, " rows"],
    num_top: Int[Array, " rows"],
    temperature: Float[Array, " rows"] | None = None,
    as_they_are: Bool[Array, " rows"] | None = None,
) -> Scores:
    """Score tokens by `softmax(logits / temperature)`, and the likeliest tokens, too, if any row wants
    some.

    as_they_are: rows whose scores are `logits / temperature`, not the logarithms of shares; None: no row's.
    """
    num_rows, vocab = logits.shape
    divisor = 1 if temperature is None else temperature[:, None]
    total = row_sums.logsumexp(logits / divisor)
    if as_they_are is not None:
        total = jnp.where(as_they_are[:, None], 0, total)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    is_before = jnp.arange(vocab) < token_ids[:, None]
    rank = 1 + jnp.sum((logits > chosen) | ((logits == chosen) & is_before), axis=1, dtype=jnp.int32)

    def top() -> tuple[Int[Array, "rows num_top"], Float[Array, "rows num_top"]]:
        zero_is_zero = jnp.where(logits == 0, 0, logits)  # to `top_k` one with a sign is less
        ids = lax.platform_dependent(
            zero_is_zero,
            cpu=lambda logits: lax.top_k(logits, min(MAX_LOGPROBS, vocab))[1],
            default=lambda logits: first_ranked(logits, min(MAX_LOGPROBS, vocab)),
        )
        values = jnp.take_along_axis(logits, ids, axis=1)
        beyond = ((0, 0), (0, MAX_LOGPROBS - ids.shape[1]))
        return jnp.pad(ids, beyond, constant_values=-1), jnp.pad(values / divisor - total, beyond)

    nothing = no_scores(num_rows)
    top_ids, top_logprobs = lax.cond(
        jnp.any(num_top > 0), top, lambda: (nothing.top_ids, nothing.top_logprobs)
    )
    return Scores((chosen / divisor - total)[:, 0], rank, top_ids, top_logprobs)


def score_candidates(
    logits: Float[Array, "rows vocab"], token_ids: Int[Array, "rows n"]
) -> Float[Array, "rows n"]:
    """Return the log-probabilities of given tokens of each row, as `score` has them; -inf for token -1."""
    total = row_sums.logsumexp(logits)
    values = jnp.take_along_axis(logits, jnp.maximum(token_ids, 0), axis=1) - total
    return jnp.where(token_ids < 0, -jnp.inf, values)


def first_ranked(logits: Float[Array, "rows vocab"], num: int) -> Int[Array, "rows num"]:
    """Return the `num` tokens with the largest logits, largest first, and of equal ones the lower id
    first.

    The same as `lax.top_k`, one token after the other: on a GPU `top_k` is a call that no CUDA graph can
    hold.
    """
    row = jnp.arange(logits.shape[0])
    type Found = tuple[Int[Array, "rows vocab"], Int[Array, "rows num"]]

    def find_one(i: Int[Array, ""], carry: Found) -> Found:
        left, ids = carry
        best = jnp.argmax(left, axis=1).astype(jnp.int32)
        return left.at[row, best].set(jnp.iinfo(jnp.int32).min), ids.at[:, i].set(best)

    start = (ordered(logits), jnp.zeros((logits.shape[0], num), jnp.int32))
    return lax.fori_loop(0, num, find_one, start)[1]


def no_scores(*shape: int) -> Scores:
    """Return arrays of this shape for scores, with none in them."""
    return Scores(
        logprob=jnp.zeros(shape, jnp.float32),
        rank=jnp.zeros(shape, jnp.int32),
        top_ids=jnp.full((*shape, MAX_LOGPROBS), -1, jnp.int32),
        top_logprobs=jnp.zeros((*shape, MAX_LOGPROBS), jnp.float32),
    )


def likeliest(logits: Float[Array, "rows vocab"]) -> Int[Array, " rows"]:
    """Return the first token with the largest logit.

    An argmax as two plain reductions, which XLA's CPU code runs ten times as fast.
    """
    vocab = logits.shape[-1]
    is_largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    first = jnp.min(jnp.where(is_largest, jnp.arange(vocab, dtype=jnp.int32), vocab), axis=-1)
    return jnp.minimum(first, vocab - 1)  # of a row of NaN, where nothing equals the largest
