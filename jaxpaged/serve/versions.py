"""Versions of the weights that sampled an answer's tokens, as spans of equal ones."""

from collections.abc import Sequence
from typing import Any


class VersionSpans:
    """The spans of one answer, which grow with its tokens. Versions only rise."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # version, first token
        self._num_tokens = 0

    def add(self, versions: Sequence[int]) -> None:
        """Append the versions of further tokens."""
        if versions and not (self._spans and self._spans[-1][0] == versions[-1]):
            last = self._spans[-1][0] if self._spans else None
            for place, version in enumerate(versions, self._num_tokens):
                if version != last:
                    self._spans.append((version, place))
                    last = version
        self._num_tokens += len(versions)

    def written(self) -> list[dict[str, Any]]:
        """Return the spans as vLLM writes them: a version, which is a text there, of tokens [start, end)."""
        ends = [start for _, start in self._spans[1:]] + [self._num_tokens]
        return [
            {"version": str(version), "start": start, "end": end}
            for (version, start), end in zip(self._spans, ends, strict=True)
        ]
