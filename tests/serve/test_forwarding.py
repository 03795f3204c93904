"""Tests of requests that one process receives and another answers."""

import asyncio
import json
from contextlib import aclosing

import pytest

from jaxpaged.serve import forwarding

TURNS = [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "y"}]


def keys(**body):
    return forwarding.keys(json.dumps(body).encode())


def test_prompts_that_begin_alike_have_their_first_keys_in_common():
    ids = [*range(40)]
    assert len(keys(prompt=ids)) == 2
    assert keys(prompt=[*ids, 1]) == keys(prompt=ids) == keys(prompt=[ids, [1]]) == keys(prompt=ids, n=2)
    assert keys(prompt="a" * 150) == keys(prompt=["a" * 170]) == keys(prompt="a" * 170 + "b")[:2]
    first, longer = keys(messages=TURNS[:1]), keys(messages=TURNS + TURNS)
    assert first
    assert longer[: len(first)] == first
    assert keys(input="a" * 150) == keys(prompt="a" * 150)


@pytest.mark.parametrize("other", [{"model": "m"}, {"cache_salt": "s"}, {"tools": [{}]}])
def test_what_is_not_shared_has_other_keys(other):
    assert not {*keys(messages=TURNS)} & {*keys(messages=TURNS, **other)}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": {}}'])
def test_what_is_no_prompt_has_no_keys(body):
    assert forwarding.keys(body) == []


@pytest.mark.parametrize("prompt", [1, [1e999, 2], [1, "a"], [10**30], [[]], {}])
def test_nor_has_a_mistake(prompt):
    assert keys(prompt=prompt) == []


def test_to_close_an_answer_is_to_go_as_a_client():
    seen = []

    async def app(scope, receive, send):
        seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode(), "more_body": True})
        try:
            seen.append((await receive())["type"])
        finally:
            seen.append("closed")

    async def go():
        async with aclosing(forwarding.answered(app, {"type": "http", "path": "/x"}, b"body")) as answer:
            messages = await anext(answer)
        return [message["type"] for message in messages], messages[-1]["body"]

    assert asyncio.run(go()) == (["http.response.start", "http.response.body"], b"/x")
    assert seen[0] == b"body"
    assert seen[-1] == "closed"


def test_an_answer_that_ends_is_whole_and_an_error_is_raised():
    async def app(scope, receive, send):
        for i in range(5):
            await send({"n": i})
            await asyncio.sleep(0)
        raise KeyError(scope["path"])

    numbers = []

    async def go():
        async for messages in forwarding.answered(app, {"path": "p"}, b""):
            numbers.extend(message["n"] for message in messages)

    with pytest.raises(KeyError, match="p"):
        asyncio.run(go())
    assert numbers == [*range(5)]
