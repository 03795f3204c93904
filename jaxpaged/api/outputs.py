"""Outputs: what a user gets back. Names are vLLM's."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxpaged.engine.handle import RequestMetrics, sum_of_drafts
from jaxpaged.engine.request import Delta, Request, Score
from jaxpaged.lora import LoRARequest
from jaxpaged.step.channels import CHANNELS, Per, SamplingMask
from jaxpaged.step.state import FinishReason
from jaxpaged.text.vocabulary import Names, Vocabulary, vocabulary_of
from jaxpaged.vllm_names.methods import missing

FinishedBy = Literal["stop", "length", "abort", "error"]
FINISH_REASONS: dict[FinishReason, FinishedBy | None] = {
    FinishReason.NONE: None,
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


@dataclasses.dataclass(frozen=True)
class Logprob:
    """The model's log-probability of a token, before temperature and filters (natural logarithm)."""

    logprob: float
    rank: int | None = None  # rank among all tokens of the vocabulary, from 1, the likeliest
    # Text of the token, with the space before a word. A token that ends within a character has "", and the
    # token that completes the character has all of it. None without a tokenizer, or where no text was wanted.
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    index: int  # which of the prompt's answers
    text: str  # up to a stop string; special tokens left out
    token_ids: list[int]  # a stop token included, which `text` leaves out
    cumulative_logprob: float | None = None  # where `SamplingParams.logprobs` is not None
    # For each place of the answer, by token id: of the token itself, and of the likeliest, in order.
    logprobs: list[dict[int, Logprob]] | None = None
    # None while there is more to come. "error": the grammar of a structured output could not be followed any
    # further; the log says why. What there is of the text follows it.
    finish_reason: FinishedBy | None = None
    stop_reason: int | str | None = None  # the stop string or `stop_token_ids` token that ended it
    # For each place of the answer: the version of the weights that sampled it (`LLM.weight_version`).
    weight_versions: list[int] | None = None
    sampling_mask: SamplingMask | None = None  # with the engine option `return_sampling_mask`
    # Experts of the prompt's tokens and the answer's but the last, [tokens, layers, experts], in the order of
    # their scores; with the engine option `enable_return_routed_experts`.
    routed_experts: np.ndarray | None = dataclasses.field(default=None, compare=False)
    # Values of channels (`step.channels`) that have no field here, by name.
    channels: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    def finished(self) -> bool:
        return self.finish_reason is not None

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError` that names a replacement for a field of vLLM's."""
        raise missing("CompletionOutput", name)


@dataclasses.dataclass(frozen=True)
class BeamSearchSequence:
    """An answer that a beam search has found."""

    tokens: list[int]  # the prompt's, and the answer's with the token that ended it
    logprobs: list[dict[int, Logprob]]  # for each place of the answer, of the candidates for it
    cum_logprob: float
    text: str | None  # of all tokens, special ones included; None without a tokenizer
    finish_reason: FinishedBy
    stop_reason: int | None  # the token that ended it
    lora_request: LoRARequest | None = None  # the adapter it was found with

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError` that names a replacement for a field of vLLM's."""
        raise missing("BeamSearchSequence", name)


@dataclasses.dataclass(frozen=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]  # the best first; as many as the search is wide, if there are


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None  # None where the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    # For each place of the prompt, as `CompletionOutput.logprobs`; None for the first token, which nothing
    # tells.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    lora_request: LoRARequest | None = None  # the adapter it was answered with
    # Log-probabilities of `SamplingParams.prompt_logprob_token_ids`, float32 [lines, ids]; -inf for -1.
    prompt_token_id_logprobs: np.ndarray | None = dataclasses.field(default=None, compare=False)
    # Values of channels (`step.channels`) by place of the prompt that have no field here, by name.
    channels: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError` that names a replacement for a field of vLLM's."""
        raise missing("RequestOutput", name)


def request_output(
    request: Request,
    prompt: str | None,
    answers: Sequence[Delta],
    metrics: Sequence[RequestMetrics],
    tokenizer: Any,
    *,
    finished: bool,
    prompt_token_ids: list[int] | None = None,
    names: dict[int, Names] | None = None,
) -> RequestOutput:
    """Return the `RequestOutput` of a prompt, with the text of each answer or of its newest part.

    `request` is that for the first answer, `metrics` those of all; `prompt_token_ids` the prompt's, where
    they have been made a list before; `names`, where answers come in parts, what names tokens of each, by
    its index: what is not there is added.
    """
    vocabulary = vocabulary_of(tokenizer) if tokenizer is not None and request.params.detokenize else None
    if names is None:
        names = {}
    token_ids: list[int] = request.prompt_token_ids.tolist() if prompt_token_ids is None else prompt_token_ids
    prompt_scores = next((answer.prompt_scores for answer in answers if answer.index == 0), None)
    return RequestOutput(
        request_id=str(request.request_id),
        prompt=prompt,
        prompt_token_ids=token_ids,
        prompt_logprobs=None
        if prompt_scores is None
        else _logprobs(token_ids, prompt_scores, _names(vocabulary)),
        outputs=[
            _completion(answer, names.setdefault(answer.index, Names(vocabulary)) if vocabulary else None)
            for answer in answers
        ],
        finished=finished,
        metrics=_of_all(metrics),
        num_cached_tokens=max((a.num_hit_tokens for a in answers if a.index == 0), default=0),
        lora_request=request.adapter.request if request.adapter else None,
        **_places(answers),
    )


def beam_search_output(request: Request, beams: Sequence[Delta], tokenizer: Any) -> BeamSearchOutput:
    """Return the best answers of a search's rows; of equal scores, one that has ended goes first."""
    assert request.beams is not None
    vocabulary = None if tokenizer is None else vocabulary_of(tokenizer)
    penalty = request.beams.length_penalty
    prompt: list[int] = request.prompt_token_ids.tolist()

    def order(delta: Delta) -> tuple[float, bool, int]:
        assert delta.beam is not None
        goes_on = delta.finish_reason is not FinishReason.STOP
        length = np.float32(len(prompt) + len(delta.token_ids) - (not goes_on))
        score = np.float32(delta.beam.cum_logprob) * length ** np.float32(-penalty)
        return -float(score), goes_on, delta.beam.rank

    answers = [delta for delta in beams if delta.beam is not None and delta.beam.cum_logprob > -math.inf]
    sequences = []
    for delta in sorted(answers, key=order)[: request.beams.beam_width]:
        tokens = prompt + delta.token_ids
        has_ended = delta.finish_reason is FinishReason.STOP
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                logprobs=_logprobs(delta.token_ids, delta.scores or [], _names(vocabulary)),  # type: ignore[arg-type]  # none of these is None
                cum_logprob=delta.beam.cum_logprob if delta.beam else -math.inf,
                text=None if tokenizer is None else tokenizer.decode(tokens),
                finish_reason=FINISH_REASONS[delta.finish_reason] or "length",
                stop_reason=tokens[-1] if has_ended else None,
                lora_request=request.adapter.request if request.adapter else None,
            )
        )
    return BeamSearchOutput(sequences)


def _names(vocabulary: Vocabulary | None) -> Names | None:
    return None if vocabulary is None else Names(vocabulary)


def _completion(answer: Delta, names: Names | None) -> CompletionOutput:
    scores = answer.scores
    return CompletionOutput(
        index=answer.index,
        text=answer.text or "",
        token_ids=answer.token_ids,
        cumulative_logprob=None if scores is None else sum(score.logprob for score in scores),
        logprobs=None if scores is None else _logprobs(answer.token_ids, scores, names),  # type: ignore[arg-type]  # none of these is None
        finish_reason=FINISH_REASONS[answer.finish_reason],
        stop_reason=answer.stop_reason,
        weight_versions=list(answer.weight_versions),
        **_values(answer),
    )


def _values(answer: Delta) -> dict[str, Any]:
    """Return the fields of `CompletionOutput` that channels fill in."""
    values = {
        name: CHANNELS[name].output(each)
        for name, each in answer.channels.items()
        if CHANNELS[name].per is not Per.PLACE
    }
    fields = {field.name for field in dataclasses.fields(CompletionOutput)}
    others = {name: each for name, each in values.items() if name not in fields}
    return {name: each for name, each in values.items() if name in fields} | {"channels": others}


def _places(answers: Sequence[Delta]) -> dict[str, Any]:
    """Return the fields of `RequestOutput` that channels by place of the prompt fill in."""
    values = {
        name: CHANNELS[name].output(each)
        for answer in reversed(answers)
        for name, each in answer.channels.items()
        if CHANNELS[name].per is Per.PLACE
    }
    fields = {field.name for field in dataclasses.fields(RequestOutput)}
    others = {name: each for name, each in values.items() if name not in fields}
    return {name: each for name, each in values.items() if name in fields} | {"channels": others}


def _of_all(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    """Merge the metrics of a prompt's answers: arrival, first token, last token and draft counts."""
    first = [each.first_token_time for each in metrics if each.first_token_time is not None]
    begun = [each.first_scheduled_time for each in metrics if each.first_scheduled_time is not None]
    ends = [each.finished_time for each in metrics]
    return RequestMetrics(
        arrival_time=metrics[0].arrival_time,
        first_token_time=min(first, default=None),
        finished_time=None if None in ends else max(end for end in ends if end is not None),
        first_scheduled_time=min(begun, default=None),
        num_fetched_tokens=metrics[0].num_fetched_tokens,
        speculative_decoding=sum_of_drafts([each.speculative_decoding for each in metrics]),
    )


def _logprobs(
    token_ids: Sequence[int], scores: Sequence[Score | None], names: Names | None
) -> list[dict[int, Logprob] | None]:
    made: list[dict[int, Logprob] | None] = []
    for token, score in zip(token_ids, scores, strict=True):
        if score is None:
            if names is not None:
                names.of(token, [])
            made.append(None)
            continue
        top = [(other, logprob, rank) for rank, (other, logprob) in enumerate(score.top, 1)]
        entries = [(token, score.logprob, score.rank), *top]
        others = [other for other, _, _ in entries]
        named = [None] * len(entries) if names is None else names.of(token, others)
        made.append(
            {
                other: Logprob(logprob, rank, name)
                for (other, logprob, rank), name in zip(entries, named, strict=True)
            }
        )
    return made
