"""Bounds of the texts in a request, counted before any is tokenized or searched for.

Imports nothing heavy.
"""

from collections.abc import Collection

from jaxpaged.checks import InputError, shown

MAX_STOPS = 64  # each is searched for behind every token
MAX_STOP_CHARS = 16_384  # characters of all stop strings of a request
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 65_536  # characters of all bad words of a request
MAX_STOP_TOKENS = 1024


def check_texts(name: str, texts: Collection[str], max_texts: int, max_chars: int) -> None:
    """Check that there are at most `max_texts` texts, of at most `max_chars` characters together.

    Raises `InputError`.
    """
    if len(texts) > max_texts:
        raise InputError(f"{name} has {len(texts)} texts, must have at most {max_texts}")
    num_chars = sum(map(len, texts))
    if num_chars > max_chars:
        first = shown(next(iter(texts)))
        raise InputError(
            f"{name}=[{first}, ...] has {num_chars} characters, must have at most {max_chars} in all"
        )
