"""Calls of tools: read from text however it is cut, and told as the openai client expects them."""

import dataclasses
import json

import openai
import pytest

from jaxpaged.serve import tools
from jaxpaged.serve.tools import ToolDeltas

# What a model writes; the text beside the calls; the calls.
CASES = [
    (
        "hermes",
        'Well. <tool_call>\n{"name": "f", "arguments": {"a b": "}\\"x", "n": [1, {}]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"q": 1}, "name": "g"}</tool_call> bye <tool',
        "Well.  bye <tool",
        [("f", '{"a b": "}\\"x", "n": [1, {}]}'), ("g", '{"q": 1}')],
    ),
    ("hermes", "<tool_call> no JSON </tool_call>", "<tool_call> no JSON </tool_call>", []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '{"name": "f", "arguments": {}} < 3', '{"name": "f", "arguments": {}} < 3', []),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": true}}',
        "",
        [("f", '{"x": true}')],
    ),
    ("llama3_json", '{"name": "Bob", "age": 3} is', '{"name": "Bob", "age": 3} is', []),
    ("llama3_json", 'It is {"name": "f", "parameters": {}}', 'It is {"name": "f", "parameters": {}}', []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": "]"}}]',
        "",
        [("f", '{"x": 1}'), ("g", '{"y": "]"}')],
    ),
    (
        "mistral",
        'Sure[TOOL_CALLS]f{"x": {"a": 1}}[TOOL_CALLS]g[ARGS]{"y": 2}',
        "Sure",
        [("f", '{"x": {"a": 1}}'), ("g", '{"y": 2}')],
    ),
    ("mistral", "[TOOL_CALLS]?? [TOOL", "[TOOL_CALLS]?? [TOOL", []),
    ("hermes", "<tool_call> \n\t <", "<tool_call> \n\t <", []),
    ("llama3_json", " \n {} \n", " \n {} \n", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_read_the_same_however_the_text_is_cut(form, text, content, calls):
    for size in (1, 2, 3, 7, 1000):
        deltas, told, streamed = ToolDeltas(form), "", {}
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        for i, piece in enumerate(pieces):
            for delta in deltas.feed(piece, is_last=i == len(pieces) - 1):
                told += delta.get("content", "")
                for call in delta.get("tool_calls", ()):
                    name, arguments = streamed.get(call["index"], ("", ""))
                    function = call["function"]
                    streamed[call["index"]] = (name or function["name"], arguments + function["arguments"])
        assert told == content
        assert [streamed[i] for i in range(len(streamed))] == calls
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in deltas.calls] == calls
        assert all((len(c["id"]) == 9) == (form == "mistral") for c in deltas.calls)


LONG = json.dumps({"text": "x " * 100_000, "n": [*range(20)]})


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {LONG}}}</tool_call>'),
        ("hermes", f'<tool_call>{{"arguments": {LONG}, "name": "f"}}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {json.dumps(LONG)}}}</tool_call>'),
        ("llama3_json", f'{{"name": "f", "parameters": {LONG}}}'),
        ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {LONG}}}]'),
        ("mistral", f"[TOOL_CALLS]f{LONG}"),
    ],
)
def test_long_arguments_arrive_whole_in_linear_time(form, text, monkeypatch):
    """What is inside of a string or between brackets is read in one piece."""
    pieces, takes = [], tools._Value.takes
    monkeypatch.setattr(tools._Value, "takes", lambda self, run: pieces.append(run) or takes(self, run))
    for size in (10_000, len(text)):
        pieces.clear()
        deltas, told = ToolDeltas(form), []
        for i in range(0, len(text), size):
            told += deltas.feed(text[i : i + size], is_last=i + size >= len(text))
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in deltas.calls] == [("f", LONG)]
        assert not any("content" in delta for delta in told)
        assert len(pieces) < 200


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def says(served, monkeypatch):
    """Makes the model say a text: the engine's own outputs, with their texts exchanged."""
    stream = served.llm.stream

    def speak(text):
        async def scripted(prompts, request_id):
            left, count = text, prompts[0].requests[0].params.max_tokens
            size = -(-len(text) // count)
            async for i, output in stream(prompts, request_id):
                [answer] = output.outputs
                piece, left = left[: size * len(answer.token_ids)], left[size * len(answer.token_ids) :]
                reason = "stop" if answer.finish_reason else None
                answer = dataclasses.replace(answer, text=piece, finish_reason=reason)
                yield i, dataclasses.replace(output, outputs=[answer])

        monkeypatch.setattr(served.llm, "stream", scripted)

    return speak


def test_the_client_gets_parallel_calls_whole_and_streamed(served, says):
    form, text, content, calls = CASES[0]
    assert served.service.chat_prompts.parser == form, "by the template"
    says(text)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "tools": [TOOL]}
    asked |= {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
    [choice] = served.openai.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == content
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == calls
    told, streamed, reasons = "", {}, []
    for chunk in served.openai.chat.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        told += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or ():
            if call.id:
                streamed[call.index] = [call.function.name, ""]
            streamed[call.index][1] += call.function.arguments
    assert (told, reasons) == (content, ["tool_calls"])
    assert [tuple(streamed[i]) for i in range(2)] == calls
    [one] = served.openai.chat.completions.create(**asked, parallel_tool_calls=False).choices
    assert [c.function.name for c in one.message.tool_calls] == ["f"]
    [none] = served.openai.chat.completions.create(**asked, tool_choice="none").choices
    assert none.message.tool_calls is None
    assert none.message.content == text


def test_tools_reach_the_template_unless_they_are_not_to_be_used(served):
    asked = {"messages": [{"role": "user", "content": "ab"}], "tools": [TOOL], "max_tokens": 1}
    for more, want in (({}, "<tool_call>f;user"), ({"tool_choice": "none"}, "user:ab")):
        body = asked | more | {"return_token_ids": True}
        ids = served.http.post("/v1/chat/completions", json=body).json()["prompt_token_ids"]
        assert served.llm.tokenizer.decode(ids).startswith(want)
    with pytest.raises(openai.BadRequestError, match="needs structured outputs"):
        served.openai.chat.completions.create(
            model="tiny", messages=asked["messages"], tools=[TOOL], tool_choice="required"
        )
