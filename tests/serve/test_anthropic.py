"""The official client of Anthropic's Messages API against the server, where it is installed."""

import json

import pytest

from tests.serve.test_messages import SAID, TOOL

anthropic = pytest.importorskip("anthropic")


@pytest.fixture
def client(served):
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=30) as made:
        yield made


ASKED = {"model": "tiny", "max_tokens": 60, "messages": [{"role": "user", "content": "ab"}]}
ASKED |= {"extra_body": {"temperature": 0}}


ALSO = ("id", "parsed_output")  # ids are new each time; the client adds the other one to streams


def contents(message):
    """Return the blocks of a message as they were sent."""
    return [{name: value for name, value in block if name not in ALSO} for block in message.content]


def test_the_client_gets_messages_whole_and_streamed(served, client, says, monkeypatch):
    monkeypatch.setattr(served.service.chat_prompts, "reasoning_parser", "qwen3")
    says(SAID)
    asked = ASKED | {"tools": [TOOL], "tool_choice": {"type": "auto"}}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "cache_control": {"type": "ephemeral"}}
    client.messages.create(**asked)  # so that all that follow find as much of the prompt
    whole = client.messages.create(**asked)
    thinking, text, call = whole.content
    assert (thinking.thinking, text.text, call.name, call.input) == ("hm", "I ask.", "f", {"k": [1, "é"]})
    assert whole.stop_reason == "tool_use"
    assert whole.usage.cache_read_input_tokens > 0
    with client.messages.stream(**asked) as stream:
        texts = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert texts == "I ask."
    assert contents(streamed) == contents(whole)
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    kinds = [event.type for event in client.messages.create(**asked, stream=True)]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}
    messages = [*ASKED["messages"], {"role": "assistant", "content": whole.content}]
    asked |= {"messages": [*messages, {"role": "user", "content": [result]}]}
    says("Seven.")
    after = client.messages.create(**asked)
    assert (after.content[0].text, after.stop_reason) == ("Seven.", "end_turn")
    rest = {name: asked[name] for name in ("model", "messages", "tools", "tool_choice")}
    usage = after.usage
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert client.messages.count_tokens(**rest).input_tokens == total


def test_the_client_gets_a_models_own_words_and_errors(client):
    whole = client.messages.create(**ASKED | {"max_tokens": 8})
    with client.messages.stream(**ASKED | {"max_tokens": 8}) as stream:
        assert stream.get_final_text() == whole.content[0].text
    with pytest.raises(anthropic.NotFoundError, match="the model 'gpt' does not exist") as error:
        client.messages.create(**ASKED | {"model": "gpt"})
    assert error.value.request_id == json.loads(error.value.response.text)["request_id"]
    with pytest.raises(anthropic.BadRequestError, match="temperature=-1.0 must be"):
        client.messages.create(**ASKED | {"extra_body": {"temperature": -1}})
