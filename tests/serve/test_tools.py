"""Calls of tools, and reasoning, as the openai client gets them."""

import dataclasses

import openai
import pytest

from jaxpaged.serve.parsers.base import Text
from jaxpaged.serve.response_items import Items
from tests.serve.test_parsers import CASES

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_the_client_gets_parallel_calls_whole_and_streamed(served, says):
    case = CASES[0]
    text, content, calls = case.text, case.content, [*case.calls]
    assert served.service.chat_prompts.parser == case.form, "by the template"
    says(text)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "tools": [TOOL]}
    asked |= {"max_tokens": 60}
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
    with pytest.raises(openai.BadRequestError, match="without structured_outputs_mib"):
        served.openai.chat.completions.create(
            model="tiny", messages=asked["messages"], tools=[TOOL], tool_choice="required"
        )


@pytest.fixture
def reasons(served, monkeypatch):
    """Make the server read reasoning as Qwen3 writes it."""
    monkeypatch.setattr(served.service.chat_prompts, "reasoning_parser", "qwen3")


def test_reasoning_is_told_beside_the_content_and_changes_no_count(served, says, reasons):
    says("<think>\nab ab\n</think>\n\nyes")
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 60}
    asked |= {"extra_body": {"ignore_eos": True}, "logprobs": True}
    served.openai.chat.completions.create(**asked)  # so that all that follow find as much of the prompt
    whole = served.openai.chat.completions.create(**asked)
    [choice] = whole.choices
    message = choice.message
    assert (message.content, message.reasoning_content, message.reasoning) == ("yes", "ab ab", "ab ab")
    assert whole.usage.completion_tokens == len(choice.logprobs.content) == 60
    num = len(served.llm.tokenizer.encode("ab ab", add_special_tokens=False))
    assert whole.usage.completion_tokens_details.reasoning_tokens == num
    content, reasoning, usage, num_scored = "", ["", ""], None, 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in served.openai.chat.completions.create(**asked, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for i, name in enumerate(("reasoning_content", "reasoning")):
                reasoning[i] += getattr(choice.delta, name, None) or ""
            num_scored += len(choice.logprobs.content) if choice.logprobs else 0
    assert (content, reasoning, usage, num_scored) == ("yes", ["ab ab"] * 2, whole.usage, 60)
    without = asked | {"extra_body": {"include_reasoning": False, "ignore_eos": True}}
    hidden = served.openai.chat.completions.create(**without)
    [choice] = hidden.choices
    assert choice.message.content == "yes"
    assert not hasattr(choice.message, "reasoning_content")
    assert hidden.usage.completion_tokens_details.reasoning_tokens == num
    says("<think>ab")
    [choice] = served.openai.chat.completions.create(**asked).choices
    assert (choice.message.content, choice.message.reasoning_content) == (None, "ab")


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}
SAID = (
    "<think>\nhm\n</think>\n\nI ask.\n"
    '<tool_call>{"name": "f", "arguments": {"k": 1}}</tool_call>\n'
    '<tool_call>{"name": "f"}</tool_call>'
)


def test_a_response_has_reasoning_text_and_calls_as_items_whole_and_streamed(served, says, reasons):
    says(SAID)
    asked = {"model": "tiny", "input": "ab", "max_output_tokens": 60, "tools": [FUNCTION]}
    whole = served.openai.responses.create(**asked)
    told = [*served.openai.responses.create(**asked, stream=True)]
    last = told[-1].response
    for response in (whole, last):
        reasoning, message, first, second = response.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm")
        assert (message.type, message.content[0].text, response.output_text) == (
            "message",
            "I ask.\n",
            "I ask.\n",
        )
        assert [(c.type, c.name, c.arguments) for c in (first, second)] == [
            ("function_call", "f", '{"k": 1}'),
            ("function_call", "f", "{}"),
        ]
        assert first.call_id != second.call_id
        assert {item.status for item in response.output} == {response.status} == {"completed"}
        assert response.tools[0].name == "f"
        assert response.usage.output_tokens_details.reasoning_tokens == len("hm")
    assert [each.sequence_number for each in told] == [*range(len(told))]
    kinds = [each.type.removeprefix("response.") for each in told]
    part = [
        "output_item.added",
        "content_part.added",
        "{}.delta",
        "{}.done",
        "content_part.done",
        "output_item.done",
    ]
    call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    once = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
    calls = [kind.format("function_call_arguments") for kind in call]
    texts = [kind.format(name) for name in ("reasoning_text", "output_text") for kind in part]
    assert once == ["created", "in_progress", *texts, *calls, *calls, "completed"]
    for index, item in enumerate(last.output):
        its = [e for e in told if getattr(e, "output_index", None) == index]
        assert its[0].item.id == its[-1].item.id == item.id
        assert {e.item_id for e in its if hasattr(e, "item_id")} == {item.id}
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(e.delta for e in its if e.type.endswith(".delta")) == text
        [done] = [e for e in its if e.type.endswith(("text.done", "arguments.done"))]
        assert getattr(done, "arguments", None) or done.text == text
        assert its[-1].item == item


def test_a_response_that_is_given_up_is_failed_and_one_that_is_cut_incomplete(served, monkeypatch):
    """Neither an abort nor an update of weights has `max_output_tokens` as its reason."""
    stream, asked = served.llm.stream, {"model": "tiny", "input": "ab", "max_output_tokens": 4}

    async def aborted(prompts, request_id):
        async for i, output in stream(prompts, request_id):
            [answer] = output.outputs
            answer = dataclasses.replace(answer, finish_reason=answer.finish_reason and ends)
            yield i, dataclasses.replace(output, outputs=[answer])

    monkeypatch.setattr(served.llm, "stream", aborted)
    for ends, status, reason in (("abort", "failed", None), ("length", "incomplete", "max_output_tokens")):
        whole = served.openai.responses.create(**asked)
        told = [*served.openai.responses.create(**asked, stream=True)]
        assert told[-1].type == f"response.{status}"
        for response in (whole, told[-1].response):
            assert response.status == status
            assert getattr(response.incomplete_details, "reason", None) == reason
            assert (response.error is not None) == (ends == "abort")
            assert response.output[-1].status == "incomplete"
            assert response.usage.output_tokens == 4


def test_a_response_goes_on_from_its_own_items_and_their_outputs(served, says, reasons):
    """The client's documentation does it so: all items of the output, then the calls' outputs."""
    says(SAID)
    asked = {"model": "tiny", "max_output_tokens": 60, "tools": [FUNCTION]}
    history = [{"role": "user", "content": "ab"}]
    first = served.openai.responses.create(input=history, **asked)
    history += [item.model_dump() for item in first.output]
    calls = [item for item in first.output if item.type == "function_call"]
    history += [{"type": "function_call_output", "call_id": c.call_id, "output": "7"} for c in calls]
    prompts = []
    tokenize = served.llm.tokenize

    async def noting(text, **options):
        prompts.append(text)
        return await tokenize(text, **options)

    served.llm.tokenize = noting
    try:
        second = served.openai.responses.create(input=history, **asked)
        messages = [
            {"role": "user", "content": "ab"},
            {
                "role": "assistant",
                "content": "I ask.\n",
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": c.call_id, "type": "function", "function": {"name": "f", "arguments": c.arguments}}
                    for c in calls
                ],
            },
            *[{"role": "tool", "tool_call_id": c.call_id, "content": "7"} for c in calls],
        ]
        served.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=60, tools=[TOOL])
    finally:
        del served.llm.tokenize
    assert second.status == "completed"
    assert prompts[0] == prompts[1] != ""
    assert prompts[0].endswith("I ask.\n(f [('k', 1)])(f []);tool:7;tool:7;assistant:")


def test_our_own_answer_that_was_cut_may_be_sent_back(served, says):
    """The call's arguments are no JSON."""
    says('<tool_call>{"name": "f", "arguments": {"k": "hel')
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "tools": [TOOL]}
    asked |= {"max_tokens": 20}
    [choice] = served.openai.chat.completions.create(**asked).choices
    [call] = choice.message.tool_calls
    assert call.function.arguments == '{"k": "hel'
    answer = {"role": "tool", "tool_call_id": call.id, "content": "no JSON"}
    messages = [*asked["messages"], choice.message, answer]
    assert served.openai.chat.completions.create(**asked | {"messages": messages}).choices


def test_top_logprobs_of_a_response_are_those_of_a_chat(served):
    asked = {"model": "tiny", "temperature": 0, "top_logprobs": 2}
    messages = [{"role": "user", "content": "ab"}]
    [choice] = served.openai.chat.completions.create(
        messages=messages, max_tokens=7, logprobs=True, **asked
    ).choices
    want = [each.model_dump() for each in choice.logprobs.content]
    include = ["message.output_text.logprobs"]
    asked |= {"input": "ab", "max_output_tokens": 7, "include": include}
    whole = served.openai.responses.create(**asked)
    told = [*served.openai.responses.create(**asked, stream=True)]
    for response in (whole, told[-1].response):
        assert [each.model_dump() for each in response.output[0].content[0].logprobs] == want
        assert response.top_logprobs == 2
    deltas = [each for e in told if e.type == "response.output_text.delta" for each in e.logprobs]
    assert [each.logprob for each in deltas] == [each["logprob"] for each in want][: len(deltas)]
    plain = served.openai.responses.create(model="tiny", input="ab", max_output_tokens=2)
    assert plain.output[0].content[0].logprobs == []


def test_tokens_without_a_text_that_they_could_go_with_are_scored_at_the_end():
    items = Items()
    told = [*items.add(iter([Text("a")]), [1]), *items.add(iter([]), [2, 3]), *items.end("completed")]
    assert [value["logprobs"] for kind, value in told if kind.startswith("output_text")] == [[1], [1, 2, 3]]
    assert items.output[0]["content"][0]["logprobs"] == [1, 2, 3]
