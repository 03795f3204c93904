"""The API as the openai client and plain HTTP see it; what is answered is what `LLM` answers."""

import asyncio
import concurrent.futures
import json
import re
from contextlib import aclosing

import openai
import pytest

from jaxpaged import InputError, SamplingParams
from jaxpaged.engine.texts import TextError
from jaxpaged.serve.chat_prompts import ChatPrompts
from jaxpaged.serve.options import ServerOptions
from jaxpaged.vllm_names.judge import known_names
from tests import tiny

PROMPT = "ab c12"


def answers(llm, prompts, **params):
    """Return the answers of `LLM.generate`: the texts, tokens and scores that the server must give."""
    results = llm.llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    return [answer for result in results for answer in result.outputs]


def events(response):
    """Return a stream's events, parsed; check that the last one ends the stream."""
    lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_models_are_listed_with_their_length(served):
    [model] = served.openai.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "jaxpaged")
    assert model.max_model_len == tiny.CONFIG.max_model_len
    assert served.openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        served.openai.models.retrieve("huge")


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_come_in_four_forms_and_are_answered_as_by_llm(served, stream):
    ids = served.llm.tokenizer.encode(PROMPT)
    for prompt, each in (
        (PROMPT, [PROMPT]),
        ([PROMPT, "zz"], [PROMPT, "zz"]),
        (ids, [ids]),
        ([ids, [5, 6, 7]], [ids, [5, 6, 7]]),
    ):
        want = answers(served.llm, each, max_tokens=6, temperature=0)
        got = served.openai.completions.create(
            model="tiny", prompt=prompt, max_tokens=6, temperature=0, stream=stream
        )
        texts = [""] * len(want)
        for chunk in got if stream else [got]:
            assert chunk.object == "text_completion"
            assert chunk.id.startswith("cmpl-")
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [answer.text for answer in want]


def test_n_answers_to_each_of_two_prompts_have_their_places(served):
    asked = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 5}
    got = served.openai.completions.create(model="tiny", prompt=[PROMPT, "zz"], **asked)
    want = answers(served.llm, [PROMPT, "zz"], **asked)
    assert [choice.index for choice in got.choices] == [*range(6)]
    assert [choice.text for choice in got.choices] == [answer.text for answer in want]
    assert got.usage.completion_tokens == sum(len(answer.token_ids) for answer in want)
    prompt_tokens = sum(len(served.llm.tokenizer.encode(prompt)) for prompt in (PROMPT, "zz"))
    assert got.usage.prompt_tokens == prompt_tokens
    assert got.usage.total_tokens == prompt_tokens + got.usage.completion_tokens


def test_a_stop_string_ends_an_answer_and_is_told(served):
    [whole] = answers(served.llm, [PROMPT], max_tokens=20, temperature=0, ignore_eos=True)
    stop = whole.text[4:6]
    got = served.http.post(
        "/v1/completions",
        json={"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stop": [stop], "ignore_eos": True},
    ).json()
    [choice] = got["choices"]
    assert choice["text"] == whole.text.partition(stop)[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert got["model"] == "tiny"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_logprobs_cover_prompt_and_answer(served, stream):
    asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": True}
    body = asked | {"model": "tiny", "stream": stream, "return_token_ids": True}
    reply = served.http.post("/v1/completions", json=body)
    chunks = events(reply) if stream else [reply.json()]
    text, told = "", {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in chunks:
        [choice] = chunk["choices"]
        text += choice["text"]
        for name in told:
            told[name] += choice["logprobs"][name]
    [result] = served.llm.llm.generate(
        [PROMPT],
        SamplingParams(max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=2),
        use_tqdm=False,
    )
    [answer] = result.outputs
    assert text == PROMPT + answer.text
    ids = [*result.prompt_token_ids, *answer.token_ids]
    want = [*result.prompt_logprobs, *answer.logprobs]
    assert told["token_logprobs"] == [e and e[i].logprob for i, e in zip(ids, want, strict=True)]
    assert told["tokens"] == [served.llm.tokenizer.decode([i]) for i in ids]
    widths = [len(name) if name in text else 0 for name in told["tokens"]]
    assert told["text_offset"] == [sum(widths[:i]) for i in range(len(ids))]
    for token, top, entries in zip(ids[1:], told["top_logprobs"][1:], want[1:], strict=True):
        likeliest = [e for e in entries.values() if e.rank <= 2]
        assert {e.decoded_token: e.logprob for e in [*likeliest, entries[token]]} == top
    assert told["top_logprobs"][0] is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            TextError(7, ValueError("no text")),
            "the text of request 7 could not be made .*ValueError: no text",
        ),
        (RuntimeError("mine"), "RuntimeError: the server's log says more"),
    ],
    ids=["text", "unexpected"],
)
def test_an_error_in_one_answer_is_told_to_its_client_alone(served, monkeypatch, error, message):
    stream = served.llm.stream

    async def broken(prompts, request_id):
        async with aclosing(stream(prompts, request_id)) as outputs:
            async for each in outputs:
                yield each
                raise error

    asked = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
    with monkeypatch.context() as patched:
        patched.setattr(served.llm, "stream", broken)
        whole = served.http.post("/v1/completions", json=asked)
        streamed = served.http.post("/v1/completions", json=asked | {"stream": True}).text
    assert whole.status_code == 500
    [last] = re.findall('data: ({"error".*)', streamed)
    for told in (whole.json()["error"], json.loads(last)["error"]):
        assert (told["type"], told["code"]) == ("InternalServerError", 500)
        assert re.search(message, told["message"])
    served.wait_for_silence()
    assert served.http.post("/v1/completions", json=asked).status_code == 200


@pytest.mark.parametrize("echo", [False, True])
def test_places_of_several_answers_with_stop_strings_go_on_from_chunk_to_chunk(served, echo):
    """Tokens of a stop string lie where they would if it had not been cut."""
    [first, *_] = answers(served.llm, [PROMPT], max_tokens=12, n=3, seed=3, ignore_eos=True)
    asked = {"prompt": [PROMPT, "zz"], "max_tokens": 12, "n": 3, "seed": 3, "ignore_eos": True}
    asked |= {"logprobs": 1, "echo": echo, "stop": [first.text[6:8]], "return_token_ids": True}
    whole = served.http.post("/v1/completions", json=asked).json()["choices"]
    assert whole[0]["stop_reason"] == first.text[6:8]
    told = {choice["index"]: [] for choice in whole}
    for chunk in events(served.http.post("/v1/completions", json=asked | {"stream": True})):
        for choice in chunk["choices"]:
            told[choice["index"]] += choice["logprobs"]["text_offset"]
    for choice in whole:
        places, names = (choice["logprobs"][name] for name in ("text_offset", "tokens"))
        assert told[choice["index"]] == places
        for place, name in zip(places, names, strict=True):
            if place + len(name) <= len(choice["text"]) and name != "<|end|>":
                assert choice["text"][place:].startswith(name)


def test_an_echo_alone_is_scored_and_nothing_is_added(served):
    asked = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    got = served.http.post("/v1/completions", json=asked).json()
    [choice] = got["choices"]
    assert choice["text"] == PROMPT
    assert len(choice["logprobs"]["tokens"]) == got["usage"]["prompt_tokens"]
    assert got["usage"]["completion_tokens"] == 0


MESSAGES = [{"role": "user", "content": "ab"}]


def test_chat_whole_and_streamed_are_what_the_template_leads_to(served):
    prompt = "user:ab;assistant:"
    [want] = answers(served.llm, [prompt], max_tokens=8, temperature=0, logprobs=2)
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 2}
    whole = served.openai.chat.completions.create(**asked)
    [choice] = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", want.text)
    assert choice.finish_reason == want.finish_reason
    assert [each.logprob for each in choice.logprobs.content] == [
        entries[token].logprob for token, entries in zip(want.token_ids, want.logprobs, strict=True)
    ]
    for each, entries in zip(choice.logprobs.content, want.logprobs, strict=True):
        by_rank = sorted((e for e in entries.values() if e.rank <= 2), key=lambda e: e.rank)
        assert [top.logprob for top in each.top_logprobs] == [e.logprob for e in by_rank]
        assert bytes(each.bytes).decode() == each.token
    stream = served.openai.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    first, *middle, last = stream
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == want.text
    assert middle[-1].choices[0].finish_reason == want.finish_reason
    assert not any(chunk.choices[0].finish_reason for chunk in middle[:-1])
    assert last.choices == []
    assert last.usage == whole.usage
    scores = [each for chunk in middle for each in chunk.choices[0].logprobs.content]
    assert scores == choice.logprobs.content


def test_a_stream_of_n_has_a_first_chunk_a_reason_and_usage_for_each(served):
    asked = {"messages": MESSAGES, "n": 3, "seed": 1, "max_tokens": 5, "stream": True}
    asked["ignore_eos"] = True
    asked |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = events(served.http.post("/v1/chat/completions", json=asked))
    assert chunks[-1]["usage"]["completion_tokens"] == 15
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    for index in range(3):
        its = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert its[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in its if c["finish_reason"]] == ["length"]


def test_a_conversation_may_be_of_parts_and_calls_and_goes_on(served):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
        {"role": "assistant", "content": "yes"},
    ]
    body = {"messages": messages, "add_generation_prompt": False, "return_token_strs": True}
    got = served.http.post("/tokenize", json=body).json()
    text = served.http.post("/detokenize", json={"tokens": got["tokens"]}).json()["prompt"]
    # The tiny tokenizer knows no line feed.
    assert text == "user:ab;assistant:(f [('a', 1)]);tool:7;assistant:yes;"
    assert got["count"] == len(got["tokens"]) == len(got["token_strs"])
    assert got["max_model_len"] == 128
    continued = body | {"continue_final_message": True}
    got = served.http.post("/tokenize", json=continued).json()
    assert served.llm.tokenizer.decode(got["tokens"]).endswith("assistant:yes")
    plain = served.http.post("/tokenize", json={"prompt": PROMPT}).json()
    assert plain["tokens"] == served.llm.tokenizer.encode(PROMPT)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", {"prompt": "a", "model": "no"}, 404, "the model 'no' does not exist"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            400,
            "must be {'type': 'text', 'text': ...}: of models of images",
        ),
        ("completions", {}, 400, "prompt: Field required"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature=-1.0 must be"),
        ("completions", {"prompt": "a", "max_tokens": "x"}, 400, "max_tokens"),
        ("completions", {"prompt": [1, 97]}, 400, "prompt token=97 must be a token id"),
        ("completions", {"prompt": "a" * 4000}, 400, "characters"),
        ("completions", {"prompt": "a", "n": 5000}, 400, "5000 answers"),
        ("completions", {"prompt": "a", "kv_cache_ttl": 5}, 400, "None without kv_offloading_size"),
        (
            "completions",
            {"prompt": "a", "guided_json": {}},
            400,
            "None; use structured_outputs={'json': ...}",
        ),
        ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix='b', an option of vLLM's"),
        ("completions", {"prompt": "a", "priority": 3}, 400, "priority=3 must be 0"),
        ("completions", {"prompt": "a", "routed_experts_prompt_start": 1}, 400, "_start=1 must be 0 with"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("completions", {"prompt": "\ud800"}, 400, "unicode"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0.content=None"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs"),
        (
            "chat/completions",
            {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}},
            400,
            "'tools' must be left out",
        ),
        ("chat/completions", {"messages": MESSAGES, "chat_template": "x"}, 400, "--chat-template"),
        (
            "chat/completions",
            {"messages": MESSAGES, "response_format": {"type": "json_object"}},
            400,
            "None without structured_outputs_mib",
        ),
        ("chat/completions", {"messages": MESSAGES, "tool_choice": "required"}, 400, "tools=()"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{"type": "x"}]}, 400, "tools.0="),
        ("responses", {"input": "a", "previous_response_id": "r"}, 400, "previous_response_id"),
        ("completions", {"prompt": "a", "prompt_embeds": "AAAA"}, 400, "prompt_embeds='AAAA', an option of"),
        ("completions", {"prompt": "a", "best_of": 2}, 400, "best_of=2, an option of vLLM's"),
        ("completions", {"prompt": "a", "regex": "a+"}, 400, "regex='a+', an option of other servers"),
        ("completions", {"prompt": "a", "truncate_prompt_tokens": 128}, 400, "less than max_model_len=128"),
        ("completions", {"prompt": "a", "allowed_token_ids": [0], "min_tokens": 1}, 400, "allowed_token_ids"),
        ("chat/completions", {"messages": MESSAGES, "functions": [{"name": "f"}]}, 400, "use tools"),
        ("chat/completions", {"messages": MESSAGES, "modalities": ["text", "audio"]}, 400, "modalities="),
        ("responses", {"input": "a", "structured_outputs": {"regex": "a"}}, 400, "structured_outputs="),
        ("responses", {"input": "a", "prompt": {"id": "p"}}, 400, "prompt is not supported"),
        ("responses", {"input": "a", "tools": [{"type": "x"}]}, 400, "tools.0.type='x' must"),
        ("responses", {"input": [{"type": "x"}]}, 400, "input.0.type='x' must be one of message"),
        ("responses", {"input": "a", "include": ["x"]}, 400, "include.0='x' must be one of message.output"),
        ("responses", {"input": "a", "top_logprobs": 21}, 400, "top_logprobs=21 must be an int in [0, 20]"),
        ("responses", {"input": "a", "tool_choice": "required"}, 400, "given where tool_choice"),
        ("nothing", {}, 404, "Not Found"),
    ],
)
def test_a_mistake_is_told_in_openais_form(served, path, body, status, message):
    reply = served.http.post(
        f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert message in error["message"]


ECHOED = (
    "reasoning",
    "tools",
    "text",
    "tool_choice",
    "metadata",
    "user",
    "temperature",
    "top_p",
    "logit_bias",
)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_what_is_no_number_of_json_is_refused_at_each_route_before_any_work(served, number):
    """Fields are echoed, and JSON has no such numbers to echo."""
    begun = {
        "responses": {"input": "a"},
        "completions": {"prompt": "a"},
        "chat/completions": {"messages": MESSAGES},
    }
    bodies = [(f"/v1/{path}", body | {name: {"x": "?"}}) for path, body in begun.items() for name in ECHOED]
    bodies += [("/tokenize", {"prompt": "a", "x": ["?"]}), ("/detokenize", {"tokens": ["?"]})]
    bodies += [("/v1/completions", {"prompt": "a", "kv_cache_ttl": "?", "stream": True})]
    for path, body in bodies:
        content = json.dumps(body).replace('"?"', number)
        got = served.http.post(path, content=content, headers={"content-type": "application/json"})
        assert got.status_code == 400
        assert got.json()["error"]["message"].startswith(f"the body must be JSON: {number} is ")


def test_all_of_vllms_fields_at_their_defaults_or_null_change_nothing(served):
    """Each route as vLLM's own clients may ask it: with every field that it has."""
    for path, title, needed, unasked in (
        ("v1/completions", "CompletionRequest", {"prompt": "ab"}, {"temperature": 0, "max_tokens": 4}),
        ("v1/chat/completions", "ChatCompletionRequest", {"messages": MESSAGES}, {"max_tokens": 4}),
        ("v1/responses", "ResponsesRequest", {"input": "ab"}, {"max_output_tokens": 4}),
        ("tokenize", "TokenizeRequest", {"prompt": "ab"}, {}),
        ("tokenize", "TokenizeRequest", {"messages": MESSAGES}, {}),
        ("detokenize", "DetokenizeRequest", {"tokens": [5]}, {}),
    ):
        fields = known_names()["names"][title]
        given = {name: field["default"] for name, field in fields.items() if "default" in field}
        asked = unasked | {"temperature": 0} | needed
        told = []
        for body in (asked, given | asked, dict.fromkeys(given.keys() - {"max_tokens"}) | asked):
            reply = served.http.post(f"/{path}", json=body)
            assert reply.status_code == 200, (path, reply.text)
            got = reply.json()
            for details in ("prompt_tokens_details", "input_tokens_details"):
                (got.get("usage") or {}).pop(details, None)  # of cached tokens: whether it was asked before
            told.append([got.get(key) for key in ("choices", "usage", "tokens", "prompt")])
            told[-1].append([each["content"] for each in got.get("output", [])])
        assert told[1:] == told[:1] * 2, path


def test_the_template_is_told_an_effort_and_documents(served):
    def told(**more):
        asked = {"messages": MESSAGES, "max_completion_tokens": 1, "return_token_ids": True} | more
        reply = served.http.post("/v1/chat/completions", json=asked).json()
        return served.llm.tokenizer.decode(reply["prompt_token_ids"])

    plain = "user:ab;assistant:"
    assert told(reasoning_effort=None, documents=None) == plain
    assert told(reasoning_effort="low") == "effort:lowTrue;" + plain
    assert told(reasoning_effort="none") == "effort:noneFalse;" + plain
    kwargs = {"enable_thinking": 7, "reasoning_effort": "high"}
    assert told(reasoning_effort="low", chat_template_kwargs=kwargs) == "effort:low7;" + plain
    assert told(documents=[{"title": "t", "text": "d1"}, {"text": "d2"}]) == (
        "document:d1;document:d2;" + plain
    )
    asked = {"input": "ab", "reasoning": {"effort": "low"}, "max_output_tokens": 1}
    usage = served.http.post("/v1/responses", json=asked).json()["usage"]
    assert usage["input_tokens"] == len(served.llm.tokenizer.encode("effort:lowTrue;" + plain))
    prompts = ChatPrompts(served.llm, ServerOptions(chat_template="{{ messages[0].content }}"))
    with pytest.raises(InputError, match="^documents: the model's chat template has no place for them"):
        asyncio.run(prompts.render(MESSAGES, kwargs={"documents": [{"text": "d"}]}))


@pytest.mark.parametrize(("side", "kept"), [(None, slice(-5, None)), ("right", slice(0, 5))])
def test_a_long_prompt_is_cut_where_that_is_asked_for(served, side, kept):
    """Text, token ids and conversations, also such as no context holds; -1 leaves room for a token."""
    text = "".join(chr(33 + i % 90) for i in range(700)) + "ab"
    cut = {"truncate_prompt_tokens": 5, "truncation_side": side}
    asked = {"max_tokens": 2, "temperature": 0, "return_token_ids": True}
    ids = served.llm.tokenizer.encode(text)
    for path, prompt, want in (
        ("completions", {"prompt": text}, ids),
        ("completions", {"prompt": text, "add_special_tokens": False}, ids),
        ("completions", {"prompt": ids}, ids),
        ("completions", {"prompt": ids[:3]}, ids[:3]),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": text}]},
            served.llm.tokenizer.encode(f"user:{text};assistant:"),
        ),
    ):
        got = served.http.post(f"/v1/{path}", json=asked | cut | prompt).json()
        assert got.get("prompt_token_ids", got["choices"][0].get("prompt_token_ids")) == want[kept]
        assert got["usage"]["prompt_tokens"] == min(5, len(want))
    got = served.http.post("/v1/completions", json=asked | {"prompt": text, "truncate_prompt_tokens": -1})
    assert (got.json()["usage"]["prompt_tokens"], got.json()["usage"]["completion_tokens"]) == (127, 1)


def test_responses_whole_and_streamed_are_the_same(served):
    [want] = answers(served.llm, ["system:be;user:ab;assistant:"], max_tokens=7, temperature=0)
    asked = {"model": "tiny", "input": "ab", "instructions": "be", "max_output_tokens": 7, "temperature": 0}
    whole = served.openai.responses.create(**asked)
    assert whole.output_text == want.text
    assert whole.status == ("completed" if want.finish_reason == "stop" else "incomplete")
    assert whole.usage.output_tokens == len(want.token_ids)
    assert whole.usage.output_tokens_details.reasoning_tokens == 0
    again = served.openai.responses.create(**asked | {"input": "ab" + "ab" * 30})
    of_input = again.usage.input_tokens_details
    num_full = again.usage.input_tokens // 8 * 8
    assert of_input.cached_tokens + of_input.cache_write_tokens == num_full
    assert served.openai.responses.create(**asked | {"input": "ab" * 31}).usage.input_tokens_details == (
        of_input.model_copy(update={"cached_tokens": num_full, "cache_write_tokens": 0})
    )
    items = [{"role": "developer", "content": "be"}]
    items += [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ab"}]}]
    stream = served.openai.responses.create(**asked | {"input": items, "instructions": None}, stream=True)
    told = [*stream]
    assert [each.sequence_number for each in told] == [*range(len(told))]
    assert [told[0].type, told[-1].type] == ["response.created", f"response.{whole.status}"]
    assert "".join(e.delta for e in told if e.type == "response.output_text.delta") == want.text
    assert told[-1].response.output_text == want.text
    assert told[-1].response.usage == whole.usage


def test_ids_and_versions_are_told(served):
    http = served.http
    assert http.get("/health", headers={"x-request-id": "my.id"}).headers["x-request-id"] == "my.id"
    made = http.get("/health", headers={"x-request-id": "not an id"}).headers["x-request-id"]
    assert len(made) == 32
    assert http.get("/version").json() == {"version": "0.1.0"}
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/ping").status_code == http.post("/ping", json={}).status_code == 200
    named = http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "q"}).json()
    assert named["id"] == "cmpl-q"


def test_answers_under_load_are_those_alone_bit_for_bit(served):
    prompts = tiny.prompts([3, 40, 9, 60, 17, 5, 33, 21], seed=4)
    params = [{"max_tokens": 20, "temperature": i % 2, "seed": i, "logprobs": 1} for i in range(8)]
    alone = [answers(served.llm, [p], **a)[0] for p, a in zip(prompts, params, strict=True)]

    def ask(i):
        asked = params[i % 8] | {"prompt": prompts[i % 8], "return_token_ids": True}
        [choice] = served.http.post("/v1/completions", json=asked).json()["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for i, (token_ids, scores) in enumerate(pool.map(ask, range(32))):
            want = alone[i % 8]
            assert token_ids == want.token_ids
            assert scores == [e[t].logprob for t, e in zip(want.token_ids, want.logprobs, strict=True)]
