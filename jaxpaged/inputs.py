"""Forms of a prompt, under vLLM's names: what `LLM.generate` and others take. Imports nothing heavy."""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from jaxpaged.checks import check
from jaxpaged.compat import names_of

__all__ = ["PromptType", "TextPrompt", "TokensPrompt", "check_prompt_keys"]

# What a prompt that is a mapping may say, beside fields of vLLM's for inputs that are not text.
KEYS = ("prompt", "prompt_token_ids", "cache_salt", "kv_cache_ttl", "continue_from")
NOT_TEXT = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds", "token_type_ids")


# The first tokens of an answer that is to go on; with several answers, a list of such lists or None.
type Continued = Sequence[int] | Sequence[Sequence[int] | None]


class TextPrompt(TypedDict):
    """A prompt as text. Only prompts of the same `cache_salt` share blocks.

    Tiers below the device keep its blocks for `kv_cache_ttl` seconds.
    """

    prompt: str
    cache_salt: NotRequired[str | None]
    kv_cache_ttl: NotRequired[float | None]
    continue_from: NotRequired[Continued | None]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is its text, which is told back and not read."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]
    kv_cache_ttl: NotRequired[float | None]
    continue_from: NotRequired[Continued | None]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt


def check_prompt_keys(prompt: Any) -> None:
    """Check that a mapping has only the keys of a prompt; inputs other than text must be empty.

    Raises `InputError`.
    """
    for key, value in prompt.items():
        if key in NOT_TEXT:
            is_empty = value is None or (hasattr(value, "__len__") and len(value) == 0)
            check(key, value, "left out: inputs that are not text are not supported", is_empty)
        else:
            check("key of a prompt", key, f"one of {', '.join(KEYS)}", key in KEYS)


# Names that vLLM has here, and modules below: `compat` has both.
__path__: list[str] = []
__getattr__ = names_of("inputs")
