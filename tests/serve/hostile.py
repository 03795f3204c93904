"""Bodies of 4 MiB that once held up everybody: what each is full of, where it goes, and what it gets.

Whoever finds another adds a line.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

SIZE = 4 * 2**20
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"


class Hostile(NamedTuple):
    path: str
    make: Callable[[], bytes]
    status: int  # of the answer
    told: str = ""  # in the answer


def filled(before: str, item: str, after: str, *, last: str | None = None) -> Callable[[], bytes]:
    """Return a maker of a body of nearly `SIZE` bytes, full of one item; the last item may be another."""

    def make() -> bytes:
        room = SIZE - len(before.encode()) - len(after.encode()) - len((last or "").encode()) - 2
        items = [item] * (room // (len(item.encode()) + 1))
        return (before + ",".join([*items, last or item][1:]) + after).encode()

    return make


def numbered(before: str, item: str, after: str) -> Callable[[], bytes]:
    """Return a maker of a body of nearly `SIZE` bytes of items that differ: each has its own number."""

    def make() -> bytes:
        num = (SIZE - len(before) - len(after) - 2) // (len(item % 999_999) + 1)
        return (before + ",".join(item % (999_999 - i) for i in range(num)) + after).encode()

    return make


def text(before: str, part: str, after: str) -> Callable[[], bytes]:
    """Return a maker of a body of nearly `SIZE` bytes with one long text."""

    def make() -> bytes:
        room = SIZE - len(before.encode()) - len(after.encode()) - 2
        return (before + part * (room // len(part.encode())) + after).encode()

    return make


def opened(before: str, field: str) -> str:
    return "{" + before + f'"{field}":['


ASKED = '"prompt":"ab","max_tokens":2,'
SAID = '"messages":[{"role":"user","content":"x"}],"max_tokens":2,'
BODIES: dict[str, Hostile] = {
    "prompts {}": Hostile(COMPLETIONS, filled('{"prompt":[', "{}", "]}"), 400, "objects and lists"),
    "prompts [{}]": Hostile(COMPLETIONS, filled('{"prompt":[', "[{}]", "]}"), 400, "objects and lists"),
    "prompts of which the last is none": Hostile(
        COMPLETIONS, filled('{"prompt":[', "123456789", "]}", last='"a"'), 400, "prompt"
    ),
    "prompts null": Hostile(COMPLETIONS, filled('{"prompt":[', "null     ", "]}"), 400, "prompt"),
    "prompts of texts": Hostile(COMPLETIONS, filled('{"prompt":[', '"a"', "]}"), 400, "texts"),
    "prompts of long texts": Hostile(
        COMPLETIONS, filled('{"prompt":[', '"' + "a b " * 1000 + '"', "]}"), 400, "must ask for at most"
    ),
    "prompts of one token": Hostile(COMPLETIONS, filled('{"prompt":[', "[7]", "]}"), 400, "objects"),
    "prompts as ids": Hostile(COMPLETIONS, filled('{"prompt":[', "1", "]}"), 400, "values"),
    "prompts as longer ids": Hostile(COMPLETIONS, filled('{"prompt":[', "12345678", "]}"), 400, "tokens"),
    "prompts as numbers of 4300 digits": Hostile(
        COMPLETIONS, filled('{"prompt":[', "1" * 4300, "]}"), 400, "prompt"
    ),
    "a prompt of one letter": Hostile(COMPLETIONS, text('{"prompt":"', "a", '"}'), 400, "characters"),
    "a prompt of words": Hostile(COMPLETIONS, text('{"prompt":"', "a b ", '"}'), 400, "characters"),
    "a prompt of escapes": Hostile(COMPLETIONS, text('{"prompt":"', "\\u0141", '"}'), 400, "characters"),
    "a prompt of backslashes": Hostile(COMPLETIONS, text('{"prompt":"', "\\\\", '"}'), 400, "characters"),
    "a prompt of spaces": Hostile("/tokenize", text('{"prompt":"', " ", '"}'), 400, "characters"),
    "messages 1": Hostile(CHAT, filled('{"messages":[', "1", "]}"), 400, "values"),
    "blocks {}": Hostile(
        MESSAGES,
        filled('{"max_tokens":2,"messages":[{"role":"user","content":[', "{}", "]}]}"),
        400,
        "objects",
    ),
    "a long system": Hostile(
        MESSAGES,
        text('{"max_tokens":2,"system":"', "ab ", '","messages":[{"role":"user","content":"x"}]}'),
        400,
        "characters",
    ),
    "messages {}": Hostile(CHAT, filled('{"messages":[', "{}", "]}"), 400, "objects and lists"),
    "messages of nothing": Hostile(
        CHAT, filled('{"messages":[', '{"role":"user","content":""}', "]}"), 400, "objects and lists"
    ),
    "messages, few and long": Hostile(
        CHAT,
        filled('{"max_tokens":2,"messages":[', json.dumps({"role": "user", "content": "a b" * 500}), "]}"),
        400,
        "characters",
    ),
    "parts": Hostile(
        CHAT, filled('{"messages":[{"content":[', '{"type":"text","text":"a"}', "]}]}"), 400, "objects"
    ),
    "tools": Hostile(
        CHAT,
        filled(opened(SAID, "tools"), '{"type":"function","function":{"name":"f"}}', "]}"),
        400,
        "objects and lists",
    ),
    "tools, few and long": Hostile(
        CHAT,
        filled(
            opened(SAID, "tools"),
            json.dumps({"type": "function", "function": {"name": "f" * 6000}}),
            '],"tool_choice":"none"}',
        ),
        200,
    ),
    "template arguments": Hostile(
        CHAT, numbered("{" + SAID + '"chat_template_kwargs":{', '"k%d":1', "}}"), 400, "texts"
    ),
    "input 1": Hostile(RESPONSES, filled('{"input":[', "1", "]}"), 400, "values"),
    "input {}": Hostile(RESPONSES, filled('{"input":[', "{}", "]}"), 400, "objects and lists"),
    "metadata": Hostile(
        RESPONSES, numbered('{"input":"x","metadata":{', '"k%d":"' + "v" * 100 + '"', "}}"), 400, "metadata"
    ),
    "stop tokens as texts": Hostile(
        COMPLETIONS, filled(opened(ASKED, "stop_token_ids"), '"' + "7" * 40 + '"', "]}"), 400, "entries"
    ),
    "stop tokens": Hostile(COMPLETIONS, filled(opened(ASKED, "stop_token_ids"), "7", "]}"), 400, "values"),
    "allowed tokens": Hostile(
        COMPLETIONS, filled(opened(ASKED, "allowed_token_ids"), "7               ", "]}"), 200
    ),
    "allowed tokens of many answers": Hostile(
        COMPLETIONS,
        filled(opened(ASKED + '"n":1000,', "allowed_token_ids"), "7               ", "]}"),
        200,
    ),
    "stop strings": Hostile(COMPLETIONS, numbered(opened(ASKED, "stop"), '"zq%d"', "]}"), 400, "texts"),
    "stop strings, fewer": Hostile(
        COMPLETIONS, numbered(opened(ASKED, "stop"), '"%d' + "z" * 99 + '"', "]}"), 400, "stop has"
    ),
    "a long stop string": Hostile(
        COMPLETIONS, text("{" + ASKED + '"stop":["', "zq", '"]}'), 400, "characters"
    ),
    "bad words": Hostile(COMPLETIONS, numbered(opened(ASKED, "bad_words"), '"zq%d"', "]}"), 400, "texts"),
    "bad words, fewer": Hostile(
        COMPLETIONS, numbered(opened(ASKED, "bad_words"), '"%d' + "z" * 99 + '"', "]}"), 400, "bad_words has"
    ),
    "a long bad word": Hostile(
        COMPLETIONS, text("{" + ASKED + '"bad_words":["', "ab ", '"]}'), 400, "characters"
    ),
    "biases": Hostile(
        COMPLETIONS, numbered("{" + ASKED + '"logit_bias":{', '"%d": 1.0' + " " * 30, "}}"), 400, "logit_bias"
    ),
    "fields": Hostile(COMPLETIONS, numbered("{" + ASKED, '"k%d":1' + " " * 30, "}"), 400, "fields"),
    "a field of lists": Hostile(COMPLETIONS, filled(opened(ASKED, "x"), "[]", "]}"), 400, "objects"),
    "a field of numbers": Hostile(COMPLETIONS, filled(opened(ASKED, "x"), "0.12345678", "]}"), 400, "x has"),
    "a field of digits": Hostile(COMPLETIONS, text("{" + ASKED + '"x":0.', "1", "}"), 200),
    "a salt": Hostile(COMPLETIONS, text("{" + ASKED + '"cache_salt":"', "s", '"}'), 400, "characters"),
    "a model": Hostile(COMPLETIONS, text("{" + ASKED + '"model":"', "m", '"}'), 400, "characters"),
    "a kind of format": Hostile(
        COMPLETIONS, text("{" + ASKED + '"response_format":{"type":"', "m", '"}}'), 400, "response_format"
    ),
    "tokens": Hostile("/detokenize", filled('{"tokens":[', "7         ", "]}"), 200),
    "tokens of which the last is none": Hostile(
        "/detokenize", filled('{"tokens":[', "7         ", "]}", last="97"), 400, "token=97"
    ),
    "brackets": Hostile(COMPLETIONS, lambda: b"[" * SIZE, 400, "levels"),
    "objects": Hostile(COMPLETIONS, lambda: b'{"a":' * (SIZE // 5), 400, "levels"),
    "quotes": Hostile(COMPLETIONS, lambda: b'"' * SIZE, 400, "texts"),
    "spaces": Hostile(COMPLETIONS, lambda: b" " * SIZE, 400, "JSON"),
    "UTF-16": Hostile(COMPLETIONS, lambda: ("Ģ" + "[" * (SIZE // 2 - 2)).encode("utf-16"), 400, "UTF-8"),
    "no text": Hostile(COMPLETIONS, lambda: b'"' + b"\xff" * (SIZE - 2) + b'"', 400, "UTF-8"),
}
