"""Requests for `jaxpaged bench throughput`: drawn by a seed, or from a file that is there."""

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.checks import InputError, check, checked_int, shown
from jaxpaged.inputs import PromptType, TokensPrompt

# What vLLM's benchmarks leave out of conversations, in tokens.
LEAST_TOKENS = 4
MOST_PROMPT_TOKENS = 1024
MOST_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Sample:
    """One request: it is answered with exactly `output_len` tokens, for the model's end is ignored."""

    prompt: PromptType
    prompt_len: int
    output_len: int


class Words:
    """The tokens that prompts are drawn from: all but special ones."""

    def __init__(self, tokenizer: Any, vocab_size: int, seed: int) -> None:
        special = set(getattr(tokenizer, "all_special_ids", None) or ())
        self._ids = np.array([i for i in range(vocab_size) if i not in special] or [0])
        self.rng = np.random.default_rng(seed)

    def draw(self, count: int) -> list[int]:
        tokens: list[int] = self._ids[self.rng.integers(0, len(self._ids), count)].tolist()
        return tokens

    def length(self, mean: int, ratio: float) -> int:
        """Return a length between (1 - ratio) and (1 + ratio) times the mean, at least 1."""
        return int(self.rng.integers(max(1, int(mean * (1 - ratio))), int(mean * (1 + ratio)) + 1))


def make(args: argparse.Namespace, llm: Any, num_prompts: int, seed: int) -> list[Sample]:
    """Return so many requests of the dataset that `args` name; fewer with `--no-oversample` and a small file.

    Raises `InputError`.
    """
    words = Words(llm.tokenizer, llm.engine.door.model_config.vocab_size, seed)
    if args.dataset_name == "random":
        return _random(args, words, num_prompts)
    if args.dataset_name == "prefix_repetition":
        return _prefix_repetition(args, words, num_prompts)
    path, rng = Path(args.dataset_path), random.Random(seed)
    candidates = (
        _sharegpt(args, path, llm, rng) if args.dataset_name == "sharegpt" else _custom(args, path, llm, rng)
    )
    samples = [sample for sample, _ in zip(candidates, range(num_prompts), strict=False)]
    check("--dataset-path", str(path), "a file with at least one request that can be used", bool(samples))
    if len(samples) < num_prompts and not args.no_oversample:
        samples += rng.choices(samples, k=num_prompts - len(samples))
    return samples


def _random(args: argparse.Namespace, words: Words, num_prompts: int) -> list[Sample]:
    prefix, (of_input, of_output) = words.draw(args.random_prefix_len), args.random_range_ratio
    return [
        _of_tokens(
            prefix + words.draw(words.length(args.random_input_len, of_input)),
            words.length(args.random_output_len, of_output),
        )
        for _ in range(num_prompts)
    ]


def _prefix_repetition(args: argparse.Namespace, words: Words, num_prompts: int) -> list[Sample]:
    count = args.prefix_repetition_num_prefixes
    prefixes = [words.draw(args.prefix_repetition_prefix_len) for _ in range(count)]
    samples = [
        _of_tokens(
            prefixes[i % count] + words.draw(args.prefix_repetition_suffix_len),
            args.prefix_repetition_output_len if args.output_len is None else args.output_len,
        )
        for i in range(num_prompts)
    ]
    order = words.rng.permutation(num_prompts)
    return [samples[i] for i in order]


def _of_tokens(prompt: list[int], output_len: int) -> Sample:
    return Sample(TokensPrompt(prompt_token_ids=prompt), len(prompt), output_len)


def _sharegpt(args: argparse.Namespace, path: Path, llm: Any, rng: random.Random) -> Iterator[Sample]:
    """Yield first turns, each with as many tokens to answer as the second turn has, in a seed's order."""
    entries = _parsed(path, path_text(path))
    check(
        "--dataset-path", str(path), "a JSON list of objects with 'conversations'", isinstance(entries, list)
    )
    turns = [_two_turns(entry) for entry in entries]
    talks = [each for each in turns if each is not None]
    rng.shuffle(talks)
    for prompt, answer in talks:
        prompt_len = _num_tokens(llm, prompt)
        output_len = args.output_len
        if output_len is None:
            output_len = _num_tokens(llm, answer)
            if output_len < LEAST_TOKENS:
                continue
        if LEAST_TOKENS <= prompt_len <= MOST_PROMPT_TOKENS and prompt_len + output_len <= MOST_TOKENS:
            yield Sample(prompt, prompt_len, output_len)


def _num_tokens(llm: Any, text: str) -> int:
    return len(llm.get_tokenizer().encode(text.encode("utf-8", "replace").decode()))


def _two_turns(entry: Any) -> tuple[str, str] | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    first, second = texts
    return (first, second) if isinstance(first, str) and isinstance(second, str) else None


def _custom(args: argparse.Namespace, path: Path, llm: Any, rng: random.Random) -> Iterator[Sample]:
    """Yield the prompts of JSON lines, by the chat template if the model has one, in a seed's order."""
    lines = [(number, line) for number, line in enumerate(path_text(path).split("\n"), 1) if line.strip()]
    rng.shuffle(lines)
    uses_template = not args.skip_chat_template and bool(getattr(llm.tokenizer, "chat_template", None))
    fixed = args.custom_output_len if args.output_len is None else args.output_len
    for number, line in lines:
        try:
            value = _parsed(path, line)
            prompt = value.get("prompt") if isinstance(value, dict) else None
            check("prompt", prompt, "a text that is not empty", isinstance(prompt, str) and prompt != "")
            assert isinstance(prompt, str)
            output_len = value.get("output_tokens") if fixed is None else fixed
            rule = "an int >= 1 (or give --custom-output-len)"
            output_len = checked_int("output_tokens", output_len, rule, 1)
        except InputError as error:
            raise InputError(f"--dataset-path {str(path)!r}, line {number}: {error}") from error
        if uses_template:
            made = llm.render_chat([{"role": "user", "content": prompt}])
            yield Sample(made, len(made["prompt_token_ids"]), output_len)
        else:
            yield Sample(prompt, _num_tokens(llm, prompt), output_len)


def path_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises `InputError`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"--dataset-path {str(path)!r} cannot be read: {error}") from error


def _parsed(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"--dataset-path {str(path)!r} must be JSON: {error}, in {shown(text[:80])}"
        ) from error


def check_lengths(samples: Sequence[Sample], max_model_len: int) -> None:
    """Check that each request fits into the model's length with its answer. Raises `InputError`."""
    longest = max(samples, key=lambda sample: sample.prompt_len + sample.output_len)
    needed = longest.prompt_len + longest.output_len
    rule = f"at least {needed}, prompt and answer of the longest request"
    check("max_model_len", max_model_len, rule, needed <= max_model_len)
