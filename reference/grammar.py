"""Languages of bytes, followed one byte at a time by derivatives: what a grammar's tables must agree with.

A language is a tuple. Its derivative by a byte is the language of all that may follow that byte. No table,
no automaton, no token: so a token is allowed exactly if the derivative by its bytes has any text in it.

    NONE                        no text at all
    EMPTY                       the empty text
    ("chars", ranges, lead)     a character of ranges ((first, last), ...), whose UTF-8 began with `lead`
    ("then", one, other)        one text behind another
    ("either", {languages})     a text of any
    ("repeat", one, least, most)    from `least` to `most` texts one after another; None: any number
    ("both", one, other)        a text that is in both
    ("minus", one, other)       a text that is in the first only
    ("multiple", modulus, places, is_whole, rest, digits)
                                the rest of a decimal without a sign, whose value x 10**places is a multiple.
                                `rest` is what its digits so far leave. `digits` counts those of its fraction:
                                None before the point, "begun" before any, "zero" behind a first 0, -1 where
                                no more count
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

Language = tuple[Any, ...]
NONE: Language = ("none",)
EMPTY: Language = ("empty",)


def chars(*ranges: tuple[int, int], lead: bytes = b"") -> Language:
    """Return the language of one character of these ranges of code points, behind its first bytes `lead`."""
    first, last = _begun(lead)
    left = [(max(low, first), min(high, last)) for low, high in ranges]
    # Surrogates are no characters, and have no UTF-8.
    if all(low > high or (low >= 0xD800 and high <= 0xDFFF) for low, high in left):
        return NONE
    return ("chars", ranges, lead)


def text(value: str) -> Language:
    """Return the language of one text."""
    return sequence(chars((ord(letter), ord(letter))) for letter in value)


def then(one: Language, other: Language) -> Language:
    if NONE in (one, other):
        return NONE
    if one == EMPTY:
        return other
    return one if other == EMPTY else ("then", one, other)


def sequence(parts: Iterable[Language]) -> Language:
    return functools.reduce(lambda behind, part: then(part, behind), reversed(list(parts)), EMPTY)


def either(parts: Iterable[Language]) -> Language:
    languages: set[Language] = set()
    for part in parts:
        languages |= part[1] if part[0] == "either" else {part}
    languages.discard(NONE)
    if len(languages) < 2:
        return next(iter(languages), NONE)
    return ("either", frozenset(languages))


def repeat(one: Language, minimum: int, maximum: int | None) -> Language:
    if maximum == 0 or one == EMPTY:
        return EMPTY
    if one == NONE:
        return NONE if minimum else EMPTY
    return one if minimum == maximum == 1 else ("repeat", one, minimum, maximum)


def both(one: Language, other: Language) -> Language:
    return NONE if NONE in (one, other) else ("both", one, other)


def minus(one: Language, other: Language) -> Language:
    return one if NONE in (one, other) else ("minus", one, other)


def multiple(modulus: int, places: int, is_whole: bool) -> Language:
    """Return the language of decimals whose value x 10**places is a multiple of `modulus`."""
    return ("multiple", modulus, places, is_whole, 0, "begun")


def has_text(language: Language) -> bool:
    """Return whether any text is in a language, by looking for its end if no other way tells."""
    kind = language[0]
    if kind == "then":
        return has_text(language[1]) and has_text(language[2])
    if kind == "either":
        return any(map(has_text, language[1]))
    if kind == "repeat":
        return language[2] == 0 or has_text(language[1])
    if kind not in ("both", "minus", "multiple"):
        return language != NONE
    seen, waiting = {language}, [language]
    while waiting:
        now = waiting.pop()
        if accepts_nothing_more(now):
            return True
        new = {after(now, byte) for byte in range(256)} - seen - {NONE}
        seen |= new
        waiting += new
    return False


def accepts_nothing_more(language: Language) -> bool:
    """Return whether the empty text is in the language: whether a text may end here."""
    kind = language[0]
    if kind == "then":
        return accepts_nothing_more(language[1]) and accepts_nothing_more(language[2])
    if kind == "either":
        return any(map(accepts_nothing_more, language[1]))
    if kind == "repeat":
        return language[2] == 0 or accepts_nothing_more(language[1])
    if kind == "both":
        return accepts_nothing_more(language[1]) and accepts_nothing_more(language[2])
    if kind == "minus":
        return accepts_nothing_more(language[1]) and not accepts_nothing_more(language[2])
    if kind == "multiple":
        _, modulus, places, _, rest, digits = language
        if digits in ("begun", 0):
            return False
        used = places if digits == -1 else digits if isinstance(digits, int) else 0
        return rest * 10 ** (places - used) % modulus == 0
    return kind == "empty"


@functools.lru_cache(maxsize=1 << 16)
def after(language: Language, byte: int) -> Language:
    """Return the language of the texts that may follow one byte."""
    kind = language[0]
    if kind == "chars":
        return _after_char(language[1], language[2] + bytes([byte]))
    if kind == "then":
        behind_first = then(after(language[1], byte), language[2])
        if not accepts_nothing_more(language[1]):
            return behind_first
        return either([behind_first, after(language[2], byte)])
    if kind == "either":
        return either(after(part, byte) for part in language[1])
    if kind == "repeat":
        _, one, minimum, maximum = language
        left = repeat(one, max(minimum - 1, 0), None if maximum is None else maximum - 1)
        return then(after(one, byte), left)
    if kind == "both":
        return both(after(language[1], byte), after(language[2], byte))
    if kind == "minus":
        return minus(after(language[1], byte), after(language[2], byte))
    if kind == "multiple":
        return _after_digit(language, chr(byte))
    return NONE


def after_all(language: Language, raw: bytes) -> Language:
    """Return the language of the texts that may follow these bytes; `NONE` if they begin no text."""
    for byte in raw:
        language = after(language, byte)
    return language


def allowed_tokens(language: Language, raw_of: Sequence[bytes], eos_ids: Iterable[int]) -> set[int]:
    """Return the ids of all tokens that a text of the language may go on with; `b""` is no token's text."""
    ends = set(eos_ids)
    allowed = {
        token
        for token, raw in enumerate(raw_of)
        if raw and token not in ends and has_text(after_all(language, raw))
    }
    return allowed | (ends if accepts_nothing_more(language) else set())


def _after_digit(language: Language, letter: str) -> Language:
    _, modulus, places, is_whole, rest, digits = language
    if letter == "." and digits in (None, "zero") and not is_whole:
        return ("multiple", modulus, places, is_whole, rest, 0)
    if letter not in "0123456789" or digits == "zero":
        return NONE
    if digits == places:  # what follows is too small to count
        return ("multiple", modulus, places, is_whole, rest, -1) if _ends(language, letter) else NONE
    if digits == -1:
        return language if letter == "0" else NONE
    rest = (10 * rest + int(letter)) % modulus
    if digits == "begun":
        digits = "zero" if letter == "0" else None
    elif digits is not None:
        digits += 1
    return ("multiple", modulus, places, is_whole, rest, digits)


def _ends(language: Language, letter: str) -> bool:
    return letter == "0" and language[4] % language[1] == 0


def _after_char(ranges: Any, lead: bytes) -> Language:
    length = _length(lead[0])
    if length == 0 or (len(lead) > 1 and not 0x80 <= lead[-1] <= 0xBF):
        return NONE
    left = chars(*ranges, lead=lead)
    if left == NONE or len(lead) < length:
        return left
    point, _ = _begun(lead)
    return NONE if 0xD800 <= point <= 0xDFFF else EMPTY


def _length(first: int) -> int:
    """Return the bytes of a character whose first byte this is; 0 if no character begins so."""
    for length, (low, high) in enumerate([(0, 0x7F), (0xC2, 0xDF), (0xE0, 0xEF), (0xF0, 0xF4)], start=1):
        if low <= first <= high:
            return length
    return 0


def _begun(lead: bytes) -> tuple[int, int]:
    """Return the first and the last code point whose UTF-8 begins so; (1, 0) if none does."""
    if not lead:
        return 0, 0x10FFFF
    length = _length(lead[0])
    if length == 0:
        return 1, 0
    bits = lead[0] if length == 1 else lead[0] & (0x7F >> length)
    for byte in lead[1:]:
        bits = bits << 6 | byte & 0x3F
    missing = 6 * (length - len(lead))
    low, high = bits << missing, (bits + 1 << missing) - 1
    least = (0, 0x80, 0x800, 0x10000)[length - 1]
    return max(low, least), min(high, 0x10FFFF)
