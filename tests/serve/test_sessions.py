"""Sessions of ten turns over one engine with tiers: cached tokens, rewritten histories, and pins."""

import dataclasses
import re

import pytest

from jaxpaged.api.async_llm import AsyncLLM
from tests import tiny, tiny_gguf
from tests.serve.conftest import serving, soon

pytestmark = pytest.mark.slow

OPTIONS = {"max_model_len": 1024, "num_blocks": 1 + 400, "max_num_batched_tokens": 4 + 256}
OPTIONS |= {"reuse_answers": True, "kv_offloading_size": 0.01, "enable_trace_replay": True}
CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
# Reasoning is written while no user has spoken since, as by the templates of Qwen3; or always.
TEMPLATE = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for t in tools or [] %}<tools>{{ t.function.name }}<|end|>{% endfor %}"
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content and (KEEPS or loop.index0 > ns.last) %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
).replace("CALL", f"<tool_call>{CALL}</tool_call>")
PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    longer = dataclasses.replace(tiny.CONFIG, max_model_len=1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf, "CONFIG", longer)
        path = tiny_gguf.write_gguf(tmp_path_factory.mktemp("sessions") / "tiny.gguf")
    made = AsyncLLM(str(path), **tiny.DEFAULTS | {"structured_outputs_mib": 0} | OPTIONS)
    yield made
    made.shutdown()


@pytest.fixture
def writes(engine, monkeypatch):
    """Let the model write a text, letter by letter, and the end: "ab" in two tokens, not in its own."""
    admit, stream, script = engine.admit, engine.stream, []

    async def scripted(prompt, params, **more):
        trace = [engine.tokenizer.encode(letter)[0] for letter in script[-1]]
        return await admit(prompt, dataclasses.replace(params, trace_decode_token_ids=(*trace, 0)), **more)

    async def ended(*args):
        async for i, output in stream(*args):
            [answer] = output.outputs
            if answer.finish_reason:
                text = answer.text.removesuffix("<|end|>")
                answer = dataclasses.replace(answer, finish_reason="stop", text=text)
            yield i, dataclasses.replace(output, outputs=[answer])

    monkeypatch.setattr(engine, "admit", scripted)
    monkeypatch.setattr(engine, "stream", ended)
    return script.append


def inputs(usage):
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[name] for name in names)


def session(served, writes, num_turns, first, **more):
    """Yield the messages of a session, in which users and tools speak in turn, and its usage."""
    messages, previous = [{"role": "user", "content": first}], None
    for turn in range(num_turns):
        calls = turn % 2 == 0
        call = f'<tool_call>{{"name": "f", "arguments": {{"k": {turn}}}}}</tool_call>'
        writes(f"<think>ab{turn}</think>I.ab{turn}{call if calls else ''}")
        body = {"max_tokens": 150, "messages": messages, "tools": [TOOL]} | more
        body |= {"diagnostics": {"previous_message_id": previous}} if turn % 3 else {}
        said = served.http.post("/v1/messages", json=body).json()
        assert said.get("stop_reason") == ("tool_use" if calls else "end_turn"), said
        yield said
        previous = said["id"]
        result = [
            {"type": "tool_result", "tool_use_id": said["content"][-1].get("id"), "content": f"ab{turn}"}
        ]
        answer = {"role": "user", "content": result if calls else f"goon.{turn}"}
        messages = [*messages, {"role": "assistant", "content": said["content"]}, answer]


def test_each_turn_finds_all_full_blocks_of_the_turn_before(engine, writes):
    """Check that cached tokens are all full blocks of the prompt before and its answer, but the last token.

    The tokenizer would cut the answers otherwise.
    """
    template = TEMPLATE.replace("KEEPS", "true")
    with serving(
        engine, chat_template=template, reasoning_parser="qwen3", tool_call_parser="hermes"
    ) as served:
        before = None
        for said in session(served, writes, 10, "abab"):
            usage = said["usage"]
            assert said["diagnostics"] is None
            assert [block["type"] for block in said["content"]][:2] == ["thinking", "text"]
            if before is not None:
                computed = inputs(before) + before["output_tokens"] - 1
                assert usage["cache_read_input_tokens"] == computed // 8 * 8
            before = usage
        assert inputs(before) > 400
        assert served.service.turns.num_compared == 9


def test_a_template_that_drops_reasoning_is_told_with_its_token(engine, writes):
    template = TEMPLATE.replace("KEEPS", "false")
    with serving(
        engine, chat_template=template, reasoning_parser="qwen3", tool_call_parser="hermes"
    ) as served:
        before, lost = [], 0
        for said in session(served, writes, 10, "baba"):
            num_turn, usage, reason = (
                len(before),
                said["usage"],
                (said["diagnostics"] or {}).get("cache_miss_reason"),
            )
            if num_turn in (0, 1, 3, 5, 7, 9):  # a tool has spoken: the reasoning stays
                assert reason is None
            else:
                # A user has spoken: of the two answers since the last time no reasoning stays.
                place = inputs(before[max(num_turn - 2, 0)])
                computed = inputs(before[-1]) + before[-1]["output_tokens"] - 1
                missed = computed // 8 * 8 - place // 8 * 8
                assert (reason["type"], reason["changed_by"]) == ("messages_changed", "template")
                assert (reason["first_changed_token"], reason["cache_missed_input_tokens"]) == (place, missed)
                assert reason["text"].startswith(f"I.ab{num_turn - 2}")
                assert usage["cache_read_input_tokens"] == place // 8 * 8
                lost += missed
            before.append(usage)
        turns = served.service.turns
        assert (turns.num_rewritten, turns.num_missed_tokens) == (4, lost)
        metrics = served.http.get("/metrics").text
        assert f'jaxpaged:session_missed_tokens_total{{engine="0",model_name="tiny"}} {lost:.1f}' in metrics
        writes("x")
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
        body |= {"diagnostics": {"previous_message_id": "none"}}
        said = served.http.post("/v1/messages", json=body).json()
        assert said["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}


def test_breakpoints_pin_as_far_as_there_is_room(engine, writes):
    writes("x")
    hour, week = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral", "ttl": 604800}
    body = {
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s" * 32, "cache_control": hour}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u" * 32, "cache_control": week}]},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": "v" * 33},
        ],
        "cache_control": {"type": "ephemeral"},
    }
    template = TEMPLATE.replace("KEEPS", "true")
    with serving(engine, chat_template=template, max_pinned_tokens=400) as served:
        said = served.http.post("/v1/messages", json=body).json()
        usage, num = said["usage"], inputs(said["usage"])
        # Up to the next message's role.
        heads = [f"system:{'s' * 32}<|end|>user:"]
        heads.append(f"{heads[0]}{'u' * 32}<|end|>assistant:")
        first, second = (len(served.llm.tokenizer.encode(head)) // 8 * 8 for head in heads)
        whole = num // 8 * 8
        assert usage["cache_creation"]["kept"] == [
            {"input_tokens": first, "seconds": 3600},
            {"input_tokens": second, "seconds": 604800},
            {"input_tokens": whole, "seconds": 300},
        ]
        assert usage["cache_creation_input_tokens"] == whole
        assert usage["cache_creation"]["ephemeral_5m_input_tokens"] == whole - second
        assert usage["cache_creation"]["ephemeral_1h_input_tokens"] == 0, "a week is longer"
        assert usage["input_tokens"] == num - whole
        size = engine.engine.cache_size.bytes_by_class[0]
        soon(lambda: engine.engine.stats.tiers["host"].kept_bytes == whole // 8 * size)
        again = served.http.post("/v1/messages", json=body).json()["usage"]
        assert again["cache_read_input_tokens"] == whole
        assert again["cache_creation"]["ephemeral_5m_input_tokens"] == 0
        assert served.service.pins.num_tokens == whole
        other = {"max_tokens": 9, "messages": [{"role": "user", "content": "w" * 200}], "kv_cache_ttl": 60}
        kept = served.http.post("/v1/messages", json=other).json()["usage"]["cache_creation"]["kept"]
        assert kept == [{"input_tokens": 200 - whole, "seconds": 60}], "half of 400 is one client's"
        metrics = served.http.get("/metrics").text
        assert re.search(r"jaxpaged:pinned_tokens\{.*\} 200", metrics)
        completion = {"prompt": "z" * 80, "max_tokens": 2, "kv_cache_ttl": 60}
        assert served.http.post("/v1/completions", json=completion).status_code == 200
        assert served.service.pins.num_tokens == 200, "the bound is one for all routes"
        with served.http.stream("GET", "/page/events") as events:
            line = next(line for line in events.iter_lines() if line.startswith("data: "))
        assert '"pins":{"tokens":200,"max_tokens":400}' in line


def test_a_breakpoint_covers_a_history_that_the_template_writes_by_what_follows(engine, writes):
    """Templates drop reasoning before the last user's text, and some refuse messages without a user's."""
    writes("x")
    kept = {"cache_control": {"type": "ephemeral"}}
    asked = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r" * 32}
    body = {
        "max_tokens": 9,
        "tools": [TOOL],
        "system": [{"type": "text", "text": "s" * 32} | kept, {"type": "text", "text": "t" * 32}],
        "messages": [
            {"role": "user", "content": "u" * 32},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "h"}, asked]},
            {"role": "user", "content": [result | kept]},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": "v" * 33},
        ],
    }
    refusal = "{% endfor %}{% if ns.last < 0 %}{{ raise_exception('no user') }}{% endif %}"
    template = TEMPLATE.replace("KEEPS", "false").replace("{% endfor %}", refusal, 1)
    strict = "{% if '\x1f' in m.content %}{{ raise_exception('no') }}{% endif %}"
    refusing = TEMPLATE.replace("KEEPS", "false").replace("{% endfor %}", strict + "{% endfor %}", 1)
    with serving(engine, chat_template=refusing, max_pinned_tokens=800, **PARSERS) as served:
        reply = served.http.post("/v1/messages", json=body).json()
        assert reply["usage"]["cache_creation"]["kept"] == []
    with serving(engine, chat_template=template, max_pinned_tokens=800, **PARSERS) as served:
        reply = served.http.post("/v1/messages", json=body).json()
        spans = [span["input_tokens"] for span in reply["usage"]["cache_creation"]["kept"]]
        call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        heads = [f"<tools>f<|end|>system:{'s' * 32}"]
        heads.append(
            f"{heads[0]}{'t' * 32}<|end|>user:{'u' * 32}<|end|>assistant:{call}<|end|>tool:{'r' * 32}"
        )
        counts = [len(served.llm.tokenizer.encode(head)) for head in heads]
        assert all(count - 8 < span <= count + 16 for span, count in zip(spans, counts, strict=True))
