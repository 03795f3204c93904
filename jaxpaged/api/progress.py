"""Progress of a call of `LLM`, for its bar."""

import dataclasses
import time

from jaxpaged.engine.request import Delta


@dataclasses.dataclass
class Progress:
    """Counts of a call's tokens so far; both speeds are over its whole time."""

    prompt_lens: dict[int, int]  # of requests without an answer so far
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    start: float = dataclasses.field(default_factory=time.perf_counter)

    def after(self, delta: Delta) -> str:
        """Count a delta's tokens, and return the speeds after it, for people."""
        self.num_prompt_tokens += self.prompt_lens.pop(delta.request_id, 0)
        self.num_new_tokens += len(delta.token_ids)
        return speeds(time.perf_counter() - self.start, self.num_prompt_tokens, self.num_new_tokens)


def speeds(seconds: float, num_prompt_tokens: int, num_new_tokens: int) -> str:
    """Return both speeds, in tokens a second, for people."""
    prompt, new = (n / (seconds or 1) for n in (num_prompt_tokens, num_new_tokens))
    return f"prompt {prompt:.0f} tok/s, generated {new:.0f} tok/s"
