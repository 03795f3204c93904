"""/v1/messages over plain HTTP: blocks, events, stops, errors, and what is refused."""

import json

import pytest

from jaxpaged.serve.message_prompts import ConversationReader
from jaxpaged.serve.message_schemas import MessagesRequest
from tests.serve.conftest import serving
from tests.serve.test_guards import through

ASKED = {"model": "tiny", "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": "ab"}]}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
SAID = '<think>hm</think>I ask.<tool_call>{"name": "f", "arguments": {"k": [1, "é"]}}</tool_call>'
CONTENT = [("thinking", "hm"), ("text", "I ask."), ("tool_use", {"k": [1, "é"]})]


def post(served, body, path="/v1/messages"):
    return served.http.post(path, json=body)


def events(served, body):
    """Return the events of a stream: their names agree with their types."""
    told = []
    for block in post(served, body | {"stream": True}).text.strip().split("\n\n"):
        name, data = block.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def joined(told):
    """Return the content that a stream's deltas come to, checking the order of its events."""
    content = []
    for event in told:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(dict(event["content_block"]) | {"json": "", "is_open": True})
        elif event["type"] == "content_block_delta":
            block, delta = content[event["index"]], event["delta"]
            assert block["is_open"]
            kind = delta["type"]
            for field, name in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                block[name] = block.get(name, "") + delta[field] if field in delta else block.get(name, "")
            assert kind.split("_")[0] in ("text", "thinking", "signature", "input")
            block["signature"] = delta.get("signature", block.get("signature"))
        elif event["type"] == "content_block_stop":
            content[event["index"]]["is_open"] = False
    assert not any(block["is_open"] for block in content)
    return content


def test_a_message_has_thinking_text_and_calls_whole_and_streamed(served, says, monkeypatch):
    monkeypatch.setattr(served.service.chat_prompts, "reasoning_parser", "qwen3")
    says(SAID)
    asked = ASKED | {"tools": [TOOL], "max_tokens": 12}
    post(served, asked)  # so that all that follow find as much of the prompt
    reply = post(served, asked)
    whole = reply.json()
    assert reply.headers["request-id"] == whole["id"].removeprefix("msg-")
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    fields = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    assert [(block["type"], block[fields[block["type"]]]) for block in whole["content"]] == CONTENT
    assert whole["content"][0]["signature"]
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    told = events(served, asked)
    assert [event["type"] for event in told[:3]] == ["message_start", "ping", "content_block_start"]
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    begun, content = told[0]["message"], joined(told)
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
    assert (content[0]["thinking"], content[1]["text"]) == ("hm", "I ask.")
    assert content[0]["signature"] == whole["content"][0]["signature"]
    assert content[2]["input"] == {}
    assert json.loads(content[2]["json"]) == {"k": [1, "é"]}
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert told[-2]["usage"] == whole["usage"]
    hidden = post(served, asked | {"thinking": {"type": "disabled"}}).json()
    assert [block["type"] for block in hidden["content"]] == ["text", "tool_use"]
    one = SAID + SAID[SAID.index("<tool_call>") :]
    says(one)
    for choice, num in (({"type": "auto"}, 2), ({"type": "auto", "disable_parallel_tool_use": True}, 1)):
        content = post(served, asked | {"tool_choice": choice}).json()["content"]
        assert [block["type"] for block in content].count("tool_use") == num
    says(SAID[: SAID.index("1")])
    assert post(served, asked).json()["content"][2]["input"] == {"arguments": '{"k": ['}


def test_the_template_gets_a_conversation_as_from_chat_completions(served):
    """Both routes are asked for the same conversation; both count the same tokens."""
    call = {"name": "f", "arguments": '{"k": 1}'}
    chat = [
        {"role": "system", "content": ["S", "T"]},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "x",
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        {"role": "user", "content": "b"},
    ]
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"k": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]}
    turn = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "x"}, used]
    body = ASKED | {
        "system": [{"type": "text", "text": "S"}, {"type": "text", "text": "T"}],
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "ab"}]},
            {"role": "assistant", "content": [*turn, {"type": "redacted_thinking", "data": "?"}]},
            {"role": "user", "content": [result, {"type": "text", "text": "b"}]},
        ],
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    asked = {"messages": chat, "tools": tools, "max_tokens": 4, "return_token_ids": True, "temperature": 0}
    want = served.http.post("/v1/chat/completions", json=asked).json()
    got = post(served, body).json()
    usage = got["usage"]
    inputs = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    num = len(want["prompt_token_ids"])
    assert sum(usage[name] for name in inputs) == num
    assert got["content"][0]["text"] == want["choices"][0]["message"]["content"]
    assert usage["cache_read_input_tokens"] == (num - 1) // 8 * 8
    counted = {name: value for name, value in body.items() if name not in ("max_tokens", "temperature")}
    assert post(served, counted, "/v1/messages/count_tokens").json() == {"input_tokens": num}
    without = post(served, counted | {"tool_choice": {"type": "none"}}, "/v1/messages/count_tokens").json()
    assert without["input_tokens"] == num - len(served.llm.tokenizer.encode("<tool_call>f;"))


def test_a_system_block_for_billing_is_left_out(served):
    """Claude Code begins its system prompt with one, whose number changes with each request."""
    rest = [TEXT | {"text": "S"}, KEPT | {"text": "T"}]
    bodies = [{"messages": ASKED["messages"]}, {"messages": ASKED["messages"], "system": rest}]
    counts = [post(served, body, "/v1/messages/count_tokens").json() for body in bodies]
    bill = TEXT | {"text": "x-anthropic-billing-header: cc_version=2.1.42; cch=65abc;"}
    for blocks, want in (([bill], counts[0]), ([bill, *rest], counts[1]), ([*rest, bill], counts[1])):
        body = bodies[0] | {"system": blocks}
        assert post(served, body, "/v1/messages/count_tokens").json() == want
    places = ConversationReader(MessagesRequest(**bodies[0], system=[bill, KEPT, TEXT])).read().breakpoints
    assert [(place.num_messages, place.num_parts) for place in places] == [(0, 1)]


def test_an_answer_ends_for_a_reason(served):
    whole = post(served, ASKED).json()
    [block] = whole["content"]
    assert whole["stop_reason"] == "max_tokens"
    assert whole["usage"]["output_tokens"] == 4
    stop = block["text"][2]
    cut = post(served, ASKED | {"stop_sequences": [stop]}).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert cut["content"][0]["text"] == block["text"][: block["text"].index(stop)]
    eos = served.llm.engine.door.model_config.eos_token_ids[0]
    ended = post(served, ASKED | {"allowed_token_ids": [eos]}).json()
    assert (ended["stop_reason"], ended["content"]) == ("end_turn", [])
    full = post(served, ASKED | {"max_tokens": 500, "ignore_eos": True}).json()
    assert full["stop_reason"] == "model_context_window_exceeded"
    kept = post(served, ASKED | {"cache_control": {"type": "ephemeral"}}).json()["usage"]["cache_creation"]
    assert kept == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0, "kept": []}, "no tiers"
    warm = post(served, ASKED | {"max_tokens": 0}).json()
    assert (warm["content"], warm["usage"]["output_tokens"], warm["stop_reason"]) == ([], 0, "max_tokens")
    keeps = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert post(served, ASKED | {"context_management": keeps}).json()["content"] == whole["content"]
    begun = ASKED["messages"] + [{"role": "assistant", "content": block["text"][:2]}]
    assert post(served, ASKED | {"messages": begun, "max_tokens": 2}).json()["content"][0]["text"]


def user(*blocks):
    return {"messages": [{"role": "user", "content": [*blocks]}]}


TEXT = {"type": "text", "text": "a"}
KEPT = TEXT | {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("more", "status", "kind", "message"),
    [
        ({"model": "gpt"}, 404, "not_found_error", "the model 'gpt' does not exist"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens=None must be an int >= 0"),
        (
            {"max_tokens": 0, "stream": True},
            400,
            "invalid_request_error",
            "must be left out with max_tokens=0",
        ),
        ({"messages": []}, 400, "invalid_request_error", "messages: "),
        ({"temperature": -1}, 400, "invalid_request_error", "temperature=-1"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers=[{'url': 'x'}] must be"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            400,
            "invalid_request_error",
            "context_management.edits=[{'type': 'clear_tool_uses_20250919'}] must keep all",
        ),
        ({"guided_json": {"a": 1}}, 400, "invalid_request_error", "guided_json"),
        ({"thinking": {"type": "hard"}}, 400, "invalid_request_error", "thinking.type='hard' must be one of"),
        ({"tool_choice": {"type": "x"}}, 400, "invalid_request_error", "tool_choice.type='x' must be one of"),
        ({"context_management": {"edits": 5}}, 400, "invalid_request_error", "edits=5 must keep all"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tools=None must be given where"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            400,
            "invalid_request_error",
            "tool_choice.name='g' must be the name of one of tools: f",
        ),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "yes"}},
            400,
            "invalid_request_error",
            "tool_choice.disable_parallel_tool_use='yes' must be true, false or left out",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w"}]},
            400,
            "invalid_request_error",
            "tools.0.type='web_search_20250305' must be 'custom'",
        ),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools.0.input_schema=None must be"),
        (user({"type": "image"}), 400, "invalid_request_error", "messages.0.content.0.type='image' must be"),
        (user({"type": "text"}), 400, "invalid_request_error", "messages.0.content.0={'type': 'text'}"),
        (user(TEXT, {"type": "tool_result"}), 400, "invalid_request_error", "content.1.tool_use_id=None"),
        (user(*[KEPT] * 5), 400, "invalid_request_error", "5 breakpoints are given, must be at most 4"),
        (
            user(TEXT | {"cache_control": {"type": "ephemeral", "ttl": "2h"}}),
            400,
            "invalid_request_error",
            "messages.0.content.0.cache_control.ttl='2h' must be '5m', '1h', or a number",
        ),
        (
            user(TEXT | {"cache_control": {"type": "x"}}),
            400,
            "invalid_request_error",
            "cache_control={'type'",
        ),
        ({"system": [{"type": "image"}]}, 400, "invalid_request_error", "system.0={'type': 'image'} must be"),
        ({"output_config": {"format": {"type": "x"}}}, 400, "invalid_request_error", "output_config.format"),
    ],
)
def test_a_mistake_is_one_sentence_in_anthropics_form(served, more, status, kind, message):
    reply = post(served, ASKED | more)
    body = reply.json()
    assert reply.status_code == status
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert message in body["error"]["message"]
    assert body["request_id"] == reply.headers["request-id"]


def test_keys_and_forms_of_errors(llm):
    """Where a key is needed, either header gives it. Other routes keep OpenAI's form."""
    asked = [
        ("POST", "/v1/messages", {"json": ASKED, "headers": headers})
        for headers in ({}, {"x-api-key": "b"}, {"authorization": "Bearer a"}, {"x-api-key": "c"})
    ]
    version = {"x-api-key": "a", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    asked += [("POST", "/v1/messages", {"json": ASKED, "headers": version})]
    asked += [("GET", "/v1/messages", {"headers": version}), ("GET", "/v1/models", {"headers": version})]
    asked += [("POST", "/v1/completions", {"json": {}, "headers": {"x-api-key": "a"}})]
    named = ASKED | {"diagnostics": {"previous_message_id": "msg-first"}}
    for key, body in (("a", ASKED), ("a", named), ("b", named)):
        headers = {"x-api-key": key, "x-request-id": "first"}
        asked += [("POST", "/v1/messages", {"json": body, "headers": headers})]
    replies = through(llm, asked, api_keys=("a", "b"))
    assert [reply.status_code for reply in replies] == [401, 200, 200, 401, 200, 405, 200, 400, *[200] * 3]
    missing = {"cache_miss_reason": {"type": "previous_message_not_found"}}
    assert [reply.json()["diagnostics"] for reply in replies[8:]] == [None, None, missing], "keys share none"
    assert replies[0].json()["error"] == {"type": "authentication_error", "message": "invalid x-api-key"}
    assert replies[5].json()["error"]["type"] == "invalid_request_error"
    assert replies[7].json()["error"]["type"] == "BadRequestError"


def test_a_full_queue_and_a_stop_are_told_in_anthropics_form(llm, monkeypatch):
    with serving(llm, max_queue=0) as served:
        monkeypatch.setattr(served.service, "num_open", 4)
        reply = post(served, ASKED)
        assert (reply.status_code, reply.json()["error"]["type"]) == (429, "rate_limit_error")
        assert reply.headers["retry-after"] == "1"
        monkeypatch.setattr(served.service, "num_open", 0)
        stream = served.llm.stream

        async def breaks(prompts, request_id):
            async for each in stream(prompts, request_id):
                yield each
                raise RuntimeError

        monkeypatch.setattr(served.llm, "stream", breaks)
        told = events(served, ASKED)
        assert told[0]["type"] == "message_start"
        assert told[-1]["error"]["type"] == "api_error"
        reply = post(served, ASKED)
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "api_error")


def test_a_reader_who_leaves_ends_the_answer(served):
    asked = ASKED | {"max_tokens": 100, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", "/v1/messages", json=asked) as reply:
        assert next(reply.iter_lines()) == "event: message_start"
    served.wait_for_silence()
    assert not served.service.num_open
