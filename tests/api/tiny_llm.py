"""The tiny model for `LLM`: options, parameters and the oracle's answer."""

from tests import tiny

GREEDY = tiny.greedy(6)


# Few and small shapes, for quick compiling.
OPTIONS = tiny.DEFAULTS | {"max_logprobs": 4}


def reference_answer(token_ids: list[int]) -> list[int]:
    """Return the oracle's greedy answer, cut after the model's end-of-sequence token 0."""
    answer = tiny.reference_answer(tuple(token_ids), 6)
    return answer[: answer.index(0) + 1] if 0 in answer else answer
