"""The door of the engine: checks what is asked for, in the thread that asks, and makes it requests."""

import collections
import dataclasses
import functools
import hashlib
import math
import threading
from collections.abc import Collection, Sequence
from typing import Any, TypedDict, TypeGuard, Unpack

import numpy as np

from jaxpaged.checks import (
    InputError,
    check,
    check_salt,
    checked_int,
    checked_number,
    is_int,
    is_int_type,
    shown,
)
from jaxpaged.config import EngineConfig
from jaxpaged.contracts.block_stores import MOST_KEPT_SECONDS
from jaxpaged.contracts.processors import words_of
from jaxpaged.engine.adapters import Adapter, Adapters
from jaxpaged.engine.arena import Grammar
from jaxpaged.engine.dead_ends import dead_end
from jaxpaged.engine.grammars import Grammars
from jaxpaged.engine.partial_rollouts import check_replay, continued
from jaxpaged.engine.request import Request
from jaxpaged.lora import LoRARequest
from jaxpaged.memory.sizing import CacheSize
from jaxpaged.models.config import ModelConfig
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.sampling_state import MAX_EDITS, Edit
from jaxpaged.step import channels
from jaxpaged.step.config import StepConfig
from jaxpaged.structured_outputs import BEGINNINGS
from jaxpaged.text.limits import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_STOP_CHARS, MAX_STOPS, check_texts

INT32_RULE = "an int in [-2**31, 2**31)"


class RequestOptions(TypedDict, total=False):
    """Options of a request beside its prompt and parameters."""

    priority: int  # lower is served first, with scheduling_policy="priority"
    cache_salt: str | None  # requests share cached blocks only if their salts are equal
    lora_request: LoRARequest | None  # the adapter; None: the model alone
    kv_cache_ttl: float | None  # seconds for which tiers keep the prompt's blocks; 0: no longer


class Salts:
    """Numbers for the salts of the prefix cache: the same for the same salt, and no two for different ones.

    Of very many salts only the last ones used are remembered, each by its SHA-256 digest. One that comes back
    gets another number: what was cached under it is not found any more.
    """

    MOST = 2**16

    def __init__(self) -> None:
        self._numbers: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self._last = 0  # of 2**32 - 1; by then what was cached under the first ones is long forgotten
        self._lock = threading.Lock()

    def number(self, salt: str | None, adapter: int = 0) -> int:
        """Return the number of a salt, an int32; 0 for none.

        The number of an adapter counts like a salt: what is computed with it is found with it alone.
        """
        if salt is None and not adapter:
            return 0
        label = f"{adapter}:" if salt is None else f"{adapter}={salt}"
        key = hashlib.sha256(label.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            number = self._numbers.pop(key, None)
            if number is None:
                self._last = self._last % (2**32 - 1) + 1
                number = (self._last + 2**31) % 2**32 - 2**31
            self._numbers[key] = number
            if len(self._numbers) > self.MOST:
                self._numbers.popitem(last=False)
        return number


@dataclasses.dataclass(frozen=True)
class Door:
    """The check of all requests: knows the engine's fixed sizes, and refuses what could never run. For any
    thread.
    """

    config: EngineConfig
    model_config: ModelConfig
    max_model_len: int
    cache_size: CacheSize
    step_config: StepConfig
    tokenizer: Any = None  # for `bad_words`
    salts: Salts = dataclasses.field(default_factory=Salts)
    adapters: Adapters | None = None  # None: requests have none
    grammars: Grammars | None = None  # None: requests have no structured outputs

    def admit(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        continue_from: Any = None,
        **options: Unpack[RequestOptions],
    ) -> list[Request]:
        """Return a request for each of the prompt's `params.n` answers, to be queued together.

        continue_from: tokens of the answers that are known, as `LLM.generate` takes them.

        The requests have a copy of `params`, which may be changed afterwards. Raises `InputError`.
        """
        check("sampling_params", params, "a SamplingParams", isinstance(params, SamplingParams))
        params, max_logprobs = params.clone(), self.config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            check(name, value, f"at most max_logprobs={max_logprobs}", value is None or value <= max_logprobs)
        given = {"is_enabled": self.config.enable_trace_replay, "has_begun": continue_from is not None}
        check_replay(params, self.model_config.vocab_size, **given)
        first = self._first(prompt_token_ids, params, **options)
        self._check_blocks(first)
        others = range(1, params.n)
        made = [first, *(first.another(params, i) for i in others)]
        return (
            made
            if continue_from is None
            else continued(made, continue_from, self.model_config.vocab_size, self.tokenizer)
        )

    def admit_search(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: BeamSearchParams,
        **options: Unpack[RequestOptions],
    ) -> list[Request]:
        """Return the requests of a beam search, a row each, to be queued together. Raises `InputError`."""
        check("params", params, "a BeamSearchParams", isinstance(params, BeamSearchParams))
        width, max_width = params.beam_width, self.config.max_num_seqs
        check("beam_width", width, f"at most max_num_seqs={max_width}", width <= max_width)
        as_sampled = SamplingParams(
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            temperature=0,
            logprobs=2 * width,
            detokenize=False,
            structured_outputs=params.structured_outputs,
        )
        first = self._first(prompt_token_ids, as_sampled, **options)
        if first.grammar is not None and self.grammars is not None:
            first = dataclasses.replace(first, grammar=self.grammars.for_search(first.grammar, width))
        first = dataclasses.replace(first, beams=params, arguments=())
        self._check_blocks(first)
        return [first.row_of_search(i) for i in range(first.group_size)]

    def _first(
        self,
        prompt_token_ids: Any,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        kv_cache_ttl: float | None = None,
    ) -> Request:
        """Check a prompt and what is asked for with it. Return the request for its first answer."""
        prompt = self._prompt(self._cut(prompt_token_ids, params))
        channels.check_request(params, len(prompt), self.model_config.vocab_size, self.config)
        max_num_tokens, trace = self.max_model_len, params.trace_decode_token_ids
        for max_tokens in (params.max_tokens, None if trace is None else len(trace)):
            if max_tokens is not None:
                max_num_tokens = min(len(prompt) + max_tokens, max_num_tokens)
        self._check_tokens(params)
        if self.step_config.sampler is not None:
            self.step_config.sampler.check_request(params)
        processors, extra = self.step_config.processors, params.extra_args
        check("extra_args", extra, "None without logits_processors", bool(processors) or not extra)
        check_texts("stop", params.stop or (), MAX_STOPS, MAX_STOP_CHARS)
        check_texts("bad_words", params.bad_words or (), MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        for name in ("stop", "bad_words"):
            has_text = self.tokenizer is not None or not getattr(params, name)
            check(name, getattr(params, name), "None for a model without a tokenizer", has_text)
        priority = checked_int("priority", priority, INT32_RULE, -(2**31))
        if self.config.scheduling_policy == "fcfs":
            check("priority", priority, "0 unless scheduling_policy is 'priority'", priority == 0)
        check_salt("cache_salt", cache_salt)
        if kv_cache_ttl is not None:
            kept = kv_cache_ttl if self.config.kv_offloading_size is None else None
            check("kv_cache_ttl", kept, "None without kv_offloading_size", kept is None)
            rule = f"a number from 0 to {MOST_KEPT_SECONDS}, in seconds"
            kv_cache_ttl = checked_number("kv_cache_ttl", kv_cache_ttl, rule, 0, MOST_KEPT_SECONDS)
        adapter = self._adapter(lora_request)
        eos = () if params.ignore_eos or trace is not None else self.model_config.eos_token_ids
        edits = self._edits(params)
        stops = {*eos, *(params.stop_token_ids or ())}
        self._check_choice(params, edits, stops)
        grammar, asked = self.compile_grammar(params), params.structured_outputs
        return Request(
            prompt_token_ids=prompt,
            params=params.of_answer(0),
            priority=priority,
            salt=self.salts.number(cache_salt, adapter.number if adapter else 0),
            stop_token_ids=tuple(sorted(stops)),
            eos_token_ids=eos,
            edits=edits,
            max_num_tokens=max_num_tokens,
            adapter=adapter,
            cache_salt=cache_salt,
            kv_cache_ttl=None if kv_cache_ttl is None else ((len(prompt), kv_cache_ttl),),
            arguments=words_of(processors, extra, params),
            grammar=grammar,
            grammar_opens=None if grammar is None or asked is None else grammar.opens(asked),
        )

    def must_read(self, lora_request: LoRARequest | None) -> TypeGuard[LoRARequest]:
        """Check whether a request's adapter would have to be read from disk."""
        return (
            isinstance(lora_request, LoRARequest)
            and self.adapters is not None
            and not self.adapters.has(lora_request)
        )

    def _adapter(self, lora_request: LoRARequest | None) -> Adapter | None:
        if lora_request is None:
            return None
        check("lora_request", lora_request, "None without enable_lora", self.adapters is not None)
        assert self.adapters is not None
        return self.adapters.get(lora_request)

    def must_compile(self, params: SamplingParams) -> bool:
        """Check whether a request's grammar would have to be compiled."""
        asked = getattr(params, "structured_outputs", None)
        return asked is not None and self.grammars is not None and not self.grammars.has(asked)

    def compile_grammar(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar of a request, compiled if it has to be; None if it asks for none.

        Raises `InputError`.
        """
        if params.structured_outputs is None:
            return None
        return self.checked_grammars(params).get(params.structured_outputs).for_one()

    def checked_grammars(self, params: SamplingParams) -> Grammars:
        """Return the grammars of an engine that has them. Raises `InputError`."""
        asked, eos = params.structured_outputs, self.model_config.eos_token_ids
        rule = "None without structured_outputs_mib, the device's memory for them (64, say), and a tokenizer"
        check("structured_outputs", asked, rule, self.grammars is not None)
        rule = "None for a model without an end-of-sequence token, which a complete answer ends with"
        check("structured_outputs", asked, rule, bool(eos))
        vocab_size = self.model_config.vocab_size
        rule = f"a token id, an int in [0, {vocab_size})"
        for name in BEGINNINGS:
            if (token := getattr(asked, name)) is not None:
                checked_int(f"structured_outputs.{name}", token, rule, 0, vocab_size - 1)
        assert self.grammars is not None
        return self.grammars

    def checked_prompt(self, prompt_token_ids: Any, cache_salt: str | None) -> np.ndarray:
        """Return the prompt as int32 if it and the salt could be a request's. Raises `InputError`."""
        check_salt("cache_salt", cache_salt)
        return self._prompt(prompt_token_ids)

    def _prompt(self, token_ids: Any) -> np.ndarray:
        """Return the prompt as int32. A long one is passed over twice: once for its types, once for its
        values.
        """
        if isinstance(token_ids, np.ndarray):
            ok = token_ids.ndim == 1 and np.issubdtype(token_ids.dtype, np.integer)
            check("prompt_token_ids", token_ids, "a list of token ids", bool(ok))
        else:
            ok = isinstance(token_ids, Sequence) and not isinstance(
                token_ids, str | bytes | bytearray | memoryview
            )
            check("prompt_token_ids", token_ids, "a list of token ids", ok)
        if len(token_ids) == 0:
            raise InputError("the prompt must have at least one token")
        if len(token_ids) >= self.max_model_len:
            raise InputError(
                f"the prompt has {len(token_ids)} tokens, must have less than "
                f"max_model_len={self.max_model_len}"
            )
        rule = f"a token id, an int in [0, {self.model_config.vocab_size})"
        if not isinstance(token_ids, np.ndarray) and not all(map(is_int_type, set(map(type, token_ids)))):
            wrong = next(token for token in token_ids if not is_int(token))
            raise InputError(f"prompt token={shown(wrong)} must be {rule}")
        for token in (min(token_ids), max(token_ids)):
            checked_int("prompt token", token, rule, 0, self.model_config.vocab_size - 1)
        return np.array(token_ids, np.int32)

    def _cut(self, token_ids: Any, params: SamplingParams) -> Any:
        """Cut a prompt by `truncate_prompt_tokens`. What is no list of ids is returned as it is."""
        max_tokens = params.truncate_prompt_tokens
        if max_tokens is None or not hasattr(token_ids, "__len__"):
            return token_ids
        longest = self.max_model_len - 1
        rule = f"-1, or less than max_model_len={self.max_model_len}"
        check("truncate_prompt_tokens", max_tokens, rule, max_tokens <= longest)
        max_tokens = longest if max_tokens == -1 else max_tokens
        if len(token_ids) <= max_tokens:
            return token_ids
        return token_ids[:max_tokens] if params.cuts == "right" else token_ids[len(token_ids) - max_tokens :]

    def _check_choice(self, params: SamplingParams, edits: Sequence[Edit], stops: Collection[int]) -> None:
        """Raise `InputError` if an answer might come to where no token may follow."""
        words = [
            [each.token_id for each in edits[i - edit.prefix : i + 1]]
            for i, edit in enumerate(edits)
            if edit.value == -math.inf
        ]
        allowed = params.allowed_token_ids or range(self.model_config.vocab_size)
        barred_end = dead_end(allowed, words, stops, params.min_tokens, params.max_tokens)
        if barred_end is not None:
            where = (
                f"behind the answer's tokens {shown([*barred_end])}" if barred_end else "as an answer's first"
            )
            bars = ["bad_words bar some"] if words else []
            if len(barred_end) < params.min_tokens:
                bars.append(f"min_tokens={params.min_tokens} bars those that end an answer")
            name = "the vocabulary"
            if params.allowed_token_ids is not None:
                name = f"allowed_token_ids={shown([*params.allowed_token_ids])}"
            raise InputError(f"{name} must have a token to choose {where}: {' and '.join(bars)}")

    def _check_blocks(self, request: Request) -> None:
        check_blocks(request, self.step_config, self.cache_size)

    def _check_tokens(self, params: SamplingParams) -> None:
        last = self.model_config.vocab_size - 1
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            tokens = getattr(params, name) or (0,)
            for token in (min(tokens), max(tokens)):
                checked_int(f"{name}: token", token, f"a token id, an int in [0, {last + 1})", 0, last)

    def _edits(self, params: SamplingParams) -> tuple[Edit, ...]:
        """Return the edits of `logit_bias` and `bad_words`: the last token of a word is barred after the
        others.
        """
        bias, words = params.logit_bias or {}, params.bad_words or ()
        tokens_of = _bad_words(self.tokenizer, tuple(words)) if words else ()
        count, rule = len(bias) + sum(map(len, tokens_of)), f"at most {MAX_EDITS}"
        check("number of tokens in logit_bias and bad_words", count, rule, count <= MAX_EDITS)
        edits = [Edit(token, value) for token, value in bias.items()]
        for word in tokens_of:
            edits += [Edit(token, 0.0) for token in word[:-1]]
            edits.append(Edit(word[-1], -math.inf, len(word) - 1))
        return tuple(edits)


@functools.lru_cache(maxsize=16)  # of a request with many prompts, once for all
def _bad_words(tokenizer: Any, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word as it begins a text; and as it stands behind a space, if that is one
    token for another, and not a token for the space. Raises `InputError`.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        if not bare:
            raise InputError(f"bad_words: word={shown(word)} must have at least one token")
        sequences.append(bare)
        if spaced and len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return tuple(sequences)


def check_blocks(request: Request, step_config: StepConfig, cache_size: CacheSize) -> None:
    """Raise `InputError` if the blocks of some size class would not do for a request that ran alone."""
    # An answer's last token is never written to the cache.
    block_size, prompt_len = cache_size.block_size, len(request.prompt_token_ids)
    needs = step_config.blocks_by_class(request.max_num_tokens - 1, block_size)
    shares = step_config.shared_by_class(prompt_len, block_size)
    what = f"max_tokens={request.params.max_tokens}"
    width = 1
    if request.beams is not None:  # which share the blocks that the prompt fills, if they keep them
        width = request.beams.beam_width
        what += f" and beam_width={width}"
    sizes = cache_size.blocks_by_class
    for size_class, (alone, shared, size) in enumerate(zip(needs, shares, sizes, strict=True)):
        need = alone + (width - 1) * (alone - shared)
        if need > size - 1:
            of_class = f" of size class {size_class}" if len(sizes) > 1 else ""
            raise InputError(
                f"the prompt of {prompt_len} tokens with {what} needs {need} blocks{of_class} "
                f"of {block_size} tokens, but num_blocks={size} leaves {size - 1} for use"
            )
