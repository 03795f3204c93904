"""Ways to draft as constants of the compiled step, and what drafts cost there."""

import math

import jax

from jaxpaged.config import EngineConfig
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.names import num_weights, once
from jaxpaged.speculation import BY_MODEL, DRAFT_MODEL, GRAMMAR, Speculation
from jaxpaged.step.config import PARTS, AnyLookup, ByGrammar, ByModel, DraftCost, Lookup, SuffixLookup

# Tokens of a prompt that a model computes to draft, for each token that may still come. On a CPU they cost as
# much as the drafts of one token save, or more.
MOST_PROMPT_ON_A_CPU = 4
# A slot more, and a tile of a prompt, in parts of a step of one row. A CPU multiplies for as long as it reads
# weights with some eight rows. Elsewhere a slot costs the way of its sequence's K and V, here of some 2,000.
ROW_ON_A_CPU, ROW_OF_CODES_ON_A_CPU, ROW = 8, 16, 1
TILE_ON_A_CPU, TILE = 80, 10
# Time of a product with quantised weights, as a share of one without.
SHARES: dict[str | None, float] = {None: 1.0, "int8": 0.5, "fp8": 0.5}
SHARE_OF_FEWER_BITS = 0.25


def lookup_of(drafts: Speculation) -> AnyLookup:
    """Return the compiled step's constants for this way of drafting."""
    max_drafts = drafts.num_speculative_tokens
    if drafts.method == "ngram":
        assert drafts.prompt_lookup_max is not None
        assert drafts.prompt_lookup_min is not None
        return Lookup(max_drafts, drafts.prompt_lookup_max, drafts.prompt_lookup_min)
    if drafts.method in BY_MODEL:  # to a head prompts cost little
        is_dear = drafts.method == DRAFT_MODEL and jax.default_backend() == "cpu"
        return ByModel(max_drafts, MOST_PROMPT_ON_A_CPU if is_dear else None)
    if drafts.method == GRAMMAR:
        return ByGrammar(max_drafts)
    assert drafts.suffix_decoding_max_tree_depth is not None
    assert drafts.suffix_decoding_max_spec_factor is not None
    assert drafts.suffix_decoding_min_token_prob is not None
    return SuffixLookup(
        max_drafts,
        drafts.suffix_decoding_max_tree_depth,
        drafts.suffix_decoding_max_spec_factor,
        drafts.suffix_decoding_min_token_prob,
        drafts.past_tokens,
    )


def most_drafting(drafts: Speculation) -> int | None:
    """Return how many answers may run while drafts are made; None: any number."""
    by_model = drafts.method in BY_MODEL
    if drafts.disable_by_batch_size is None and by_model and jax.default_backend() == "cpu":
        return 1  # a CPU's time grows with each slot: beside others the second model costs more than it saves
    return drafts.disable_by_batch_size


def cost_of(config: EngineConfig, served: ModelConfig, draft: ModelConfig | None) -> DraftCost | None:
    """Return what drafts cost, by the weights that a token reads; None where nothing needs a bound.

    Forced text needs none: it is nearly always right.
    """
    drafts, is_cpu = config.speculative_config, jax.default_backend() == "cpu"
    if drafts is None or drafts.method == GRAMMAR:
        return None
    row = (ROW_ON_A_CPU if config.quantization is None else ROW_OF_CODES_ON_A_CPU) if is_cpu else ROW
    if draft is None:
        return DraftCost(row)
    share = _share(drafts.quantization) / _share(config.quantization)
    served_body, draft_body = _body(served), _body(draft)
    passes = share * (draft_body + _scores(draft)) / (served_body + _scores(served))
    tile = (TILE_ON_A_CPU if is_cpu else TILE) * draft_body / served_body
    return DraftCost(row, math.ceil(PARTS * passes), math.ceil(tile))


def _share(quantization: str | None) -> float:
    return SHARES.get(quantization, SHARE_OF_FEWER_BITS)


def _body(config: ModelConfig) -> int:
    """Return how many weights the layers have."""
    tables = ("embedding.", "lm_head.")
    return num_weights(config) - sum(
        math.prod(shape) for role, shape in once(config).items() if role.startswith(tables)
    )


def _scores(config: ModelConfig) -> int:
    """Return how many weights are read for the scores of the next token."""
    head = config.draft_head
    is_own = head is not None and head.own_lm_head
    return (head.num_choices if head is not None and is_own else config.vocab_size) * config.hidden_size
