"""Structured outputs by all doors: `LLM`, and the server's response formats and forced calls."""

import json
import re

import httpx
import jsonschema
import pydantic
import pytest

from jaxpaged import SamplingParams, StructuredOutputsParams
from jaxpaged.api.async_llm import AsyncLLM
from jaxpaged.grammar.compile import Constraint
from jaxpaged.grammar.nodes import Limits
from jaxpaged.serve import opening
from jaxpaged.serve.parsers import TOOL_PARSERS, think
from jaxpaged.serve.replies import ApiError
from jaxpaged.serve.structured import forced, strict_calls
from tests import tiny, tiny_lora
from tests.grammar.languages import VOCABULARY, accepts
from tests.serve.conftest import ENGINE, serving, soon

MESSAGES = [{"role": "user", "content": "ab"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"x": {"enum": values}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
    for name, values in (("f", [True]), ("gg", [1, 2]))
]


class Answer(pydantic.BaseModel):
    """A small answer."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=4)
    ok: bool


@pytest.fixture(scope="module")
def llm(model):
    made = AsyncLLM(model, **ENGINE | tiny_lora.LORA)  # a program that others have, too
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def served(llm):
    with serving(llm) as made:
        yield made


def test_llm_answers_in_the_form_asked_for(llm):
    def ask(n=1, **constraint):
        params = SamplingParams(
            max_tokens=40,
            temperature=0.9,
            seed=4,
            n=n,
            logprobs=1,
            structured_outputs=StructuredOutputsParams(**constraint),
        )
        [result] = llm.llm.generate("ab c12", params, use_tqdm=False)
        return result.outputs

    answers = ask(n=6, choice=["yes", "no", "ab no"])
    assert {answer.text for answer in answers} <= {"yes", "no", "ab no"}
    assert len({answer.text for answer in answers}) > 1
    assert all(answer.finish_reason == "stop" for answer in answers)
    [answer] = ask(regex="[a-c]{3}x+y")
    assert re.fullmatch("[a-c]{3}x+y", answer.text)
    [answer] = ask(json=SCHEMA)
    value = json.loads(answer.text)
    assert value == {"a": value["a"], "b": value["b"]}
    assert value["a"] in (1, 22)
    forced = answer.logprobs[0][answer.token_ids[0]]
    assert forced.logprob == 0, "no other token may come"
    [same] = ask(json=json.dumps(SCHEMA))
    assert same.token_ids == answer.token_ids


SUM = 'start: term ("+" term)*\nterm: "a" | "(" start ")"\n'
TREE = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
    "required": ["a", "b"],
}


def test_what_is_recursive_is_followed_from_all_doors(llm, served):
    """A row beside them goes on; each of several answers has a place of its own."""
    pytest.importorskip("llguidance")
    bias = {str(llm.tokenizer.encode(each, add_special_tokens=False)[0]): 3.0 for each in ")]}"}
    asked = {"model": "tiny", "prompt": "ab", "max_tokens": 120, "seed": 3, "n": 3}
    its = {"structured_outputs": {"grammar": SUM}, "return_token_ids": True}
    choices = served.openai.completions.create(**asked, logit_bias=bias, extra_body=its).choices
    assert {choice.finish_reason for choice in choices} == {"stop"}
    for choice in choices:
        assert re.fullmatch("[a+()]+", choice.text)
        eval(choice.text.replace("a", "1"))
    assert len({choice.text for choice in choices}) > 1
    params = SamplingParams(
        **{"max_tokens": 120, "temperature": 1.0, "seed": 3, "n": 3},
        logit_bias={int(token): value for token, value in bias.items()},
        structured_outputs=StructuredOutputsParams(grammar=SUM),
    )
    free = SamplingParams(max_tokens=30, temperature=0)
    results = llm.llm.generate(["ab", "ab c"], [params, free], use_tqdm=False)
    assert [answer.text for answer in results[0].outputs] == [choice.text for choice in choices]
    [alone] = llm.llm.generate("ab c", free, use_tqdm=False)
    assert results[1].outputs[0].token_ids == alone.outputs[0].token_ids

    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": TREE}}
    asked = {"messages": MESSAGES, "response_format": form, "max_tokens": 120, "seed": 6, "logit_bias": bias}
    [choice] = served.http.post("/v1/chat/completions", json=asked).json()["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), TREE)


def test_the_openai_client_parses_what_a_pydantic_model_describes(served):
    asked = {"model": "tiny", "messages": MESSAGES, "response_format": Answer, "max_tokens": 120, "seed": 1}
    [choice] = served.openai.chat.completions.parse(**asked, logprobs=True, top_logprobs=2).choices
    assert isinstance(choice.message.parsed, Answer)
    assert choice.finish_reason == "stop"
    [response] = served.openai.responses.parse(
        model="tiny", input="ab", text_format=Answer, max_output_tokens=120
    ).output
    assert isinstance(response.content[0].parsed, Answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "gg"}}], ids=["required", "named"]
)
def test_a_forced_call_is_one(served, choice, stream):
    asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 5}
    asked |= {"max_tokens": 120, "parallel_tool_calls": False, "stream": stream}
    answer = served.openai.chat.completions.create(**asked)
    if stream:
        names, texts, reasons = [], "", []
        for chunk in answer:
            [part] = chunk.choices
            assert not part.delta.content
            reasons += [part.finish_reason] if part.finish_reason else []
            for call in part.delta.tool_calls or ():
                names += [call.function.name] if call.id else []
                texts += call.function.arguments
        [name], [reason] = names, reasons
    else:
        [part] = answer.choices
        [call] = part.message.tool_calls
        assert part.message.content is None
        name, texts, reason = call.function.name, call.function.arguments, part.finish_reason
    assert (name == "gg" or choice == "required", reason) == (
        True,
        "tool_calls" if choice == "required" else "stop",
    )
    assert json.loads(texts)["x"] in {"f": [True], "gg": [1, 2]}[name]


def test_a_response_has_formats_and_forced_calls_too(served):
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    made = served.openai.responses.create(model="tiny", input="ab", text=text, max_output_tokens=60)
    assert json.loads(made.output_text)["a"] in (1, 22)
    assert made.text.format.type == "json_schema"
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    named = {"type": "function", "name": "f"}
    made = served.openai.responses.create(model="tiny", input="ab", tools=tools, tool_choice=named)
    [call] = made.output
    assert (call.name, json.loads(call.arguments)) == ("f", {"x": True})


def test_a_message_has_formats_and_forced_calls_too(served):
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
    ]
    for choice, names in (({"type": "any"}, ("f", "gg")), ({"type": "tool", "name": "gg"}, ("gg",))):
        asked = {"messages": MESSAGES, "tools": tools, "max_tokens": 120, "tool_choice": choice, "seed": 5}
        asked["tool_choice"] = choice | {"disable_parallel_tool_use": True}
        made = served.http.post("/v1/messages", json=asked).json()
        [call] = made["content"]
        assert (call["name"] in names, made["stop_reason"]) == (True, "tool_use")
        assert call["input"]["x"] in {"f": [True], "gg": [1, 2]}[call["name"]]
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    asked = {"messages": MESSAGES, "max_tokens": 60, "output_config": output}
    [block] = served.http.post("/v1/messages", json=asked).json()["content"]
    assert json.loads(block["text"])["a"] in (1, 22)


STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]


def test_calls_of_strict_tools_follow_their_schemas(served):
    def allowed(tools, text, parallel=True):
        asked = strict_calls(TOOL_PARSERS["hermes"], tools, served.llm.tokenizer, parallel=parallel)
        made = Constraint({"structural_tag": asked.structural_tag}, Limits()).automaton(VOCABULARY)
        return accepts(made, VOCABULARY, text)

    def call(name, arguments):
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    assert allowed(STRICT, "No call: <tool_cal")
    assert allowed(STRICT, "I call." + call("f", '{"x": true}') + "\n" + call("gg", '{"x":2}'))
    for wrong in (call("f", '{"x": 1}'), call("gg", "{}"), call("h", "{}"), "<tool_call>", "<tool_call>{"):
        assert not allowed(STRICT, wrong)
    assert not allowed(STRICT, call("f", '{"x": true}') * 2, parallel=False)
    assert allowed([STRICT[0], TOOLS[1]], call("gg", '{"y": [{}]}'))
    for parser, tools in (("hermes", TOOLS), ("pythonic", STRICT), ("mistral", STRICT)):
        assert strict_calls(TOOL_PARSERS[parser], tools, served.llm.tokenizer, parallel=True) is None


def test_strict_tools_are_strict_beside_a_token_that_begins_every_text(served, monkeypatch):
    tokenizer = served.llm.tokenizer

    def encode(text, add_special_tokens=True):
        return [tokenizer.all_special_ids[0]] * add_special_tokens + former(text, add_special_tokens=False)

    former = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", encode)
    assert strict_calls(TOOL_PARSERS["hermes"], STRICT, tokenizer, parallel=True) is not None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_strict_tools_are_asked_for_by_the_server(served, monkeypatch, path):
    seen = []

    async def start(request, body, kind, prompts, params):
        seen.append(params)
        return await former(request, body, kind, prompts, params)

    former = served.service.start
    monkeypatch.setattr(served.service, "start", start)
    is_chat = path.endswith("completions")
    tools = [{"type": "function", **tool["function"]} for tool in STRICT] if not is_chat else STRICT
    body = ({"messages": MESSAGES} if is_chat else {"input": "ab"}) | {"model": "tiny"}
    asked = {"tools": tools, "max_tokens" if is_chat else "max_output_tokens": 4}
    for more, kind in (({}, "structural_tag"), ({"structured_outputs": {"choice": ["q"]}}, "choice")):
        reply = served.http.post(path, json=body | asked | more)
        assert reply.status_code == 200, reply.text
        assert seen[-1].structured_outputs.kind == kind
    wrong = {**tools[0], **({"function": {**STRICT[0]["function"]}} if is_chat else {})}
    (wrong["function"] if is_chat else wrong)["parameters"] = {"type": "object", "unique": True}
    reply = served.http.post(path, json=body | asked | {"tools": [wrong]})
    assert (reply.status_code, "unique" in reply.text) == (400, True)


def costly(number):
    """Return a request whose constraint takes all of the time that one may take: 5 s."""
    link = {"type": "string", "format": "uri", "maxLength": 100}
    properties = {f"link {i}": link for i in range(200)}
    schema = {"properties": properties, "additionalProperties": False, "title": f"{number}"}
    return {"prompt": "ab", "max_tokens": 2, "structured_outputs": {"json": schema}}


def test_costly_constraints_of_some_clients_hold_no_other(llm, served):
    """Requests that wait count as open. Those that are given up take their constraints along: by clients that
    go, by the time limit, by the end of the server.
    """

    def jobs():
        return len(llm.engine.door.grammars.under_way())

    cheap = {"prompt": "ab", "max_tokens": 9, "structured_outputs": {"choice": ["qq", "ww"]}}
    assert served.http.post("/v1/completions", json=cheap | {"structured_outputs": {"choice": ["q"]}})
    url = served.url
    gone = [httpx.Client(base_url=url, timeout=0.4) for _ in range(3)]
    for number, client in enumerate(gone):
        with pytest.raises(httpx.TimeoutException):
            client.post("/v1/completions", json=costly(number))
        client.close()
    soon(lambda: not served.service.num_open and not jobs())
    waiting = [tiny.start(served.http.post, "/v1/completions", json=costly(i)) for i in range(4, 7)]
    soon(lambda: served.service.num_open == 3 == jobs())
    assert served.http.post("/v1/completions", json=cheap).json()["choices"][0]["text"] in ("qq", "ww")
    assert jobs() == 3
    served.loop.call_soon_threadsafe(served.service.give_up, ApiError(503, "the server stops"))
    replies = [each.result(30) for each in waiting]
    assert [(each.status_code, each.json()["error"]["message"]) for each in replies] == [
        (503, "the server stops")
    ] * 3
    with serving(llm, max_queue=0, request_timeout_s=0.5, drain_seconds=0.1) as other:
        reply = other.http.post("/v1/completions", json=costly(7))
        assert (reply.status_code, reply.json()["error"]["type"]) == (504, "GatewayTimeoutError")
    with serving(llm, max_queue=0, drain_seconds=0.1) as other:
        waits = tiny.start(other.http.post, "/v1/completions", json=costly(8) | {"n": 4, "temperature": 1})
        soon(lambda: other.service.num_open == 4)
        assert other.http.post("/v1/completions", json=cheap).status_code == 429
        other.stop()
        reply = waits.result(30)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, 503)
    soon(lambda: not jobs())


def test_a_client_has_so_many_constraints_that_wait(llm, monkeypatch):
    monkeypatch.setattr(opening, "LEAST_CONSTRAINTS", 1)
    with serving(llm, max_queue=16, drain_seconds=0.1) as other:
        waits = [tiny.start(other.http.post, "/v1/completions", json=costly(i)) for i in (9, 10)]
        soon(lambda: other.service.num_open == 2)
        reply = other.http.post("/v1/completions", json=costly(11))
        assert (reply.status_code, "wait to be compiled" in reply.text) == (429, True)
        other.stop()
        assert [each.result(30).status_code for each in waits] == [503] * 2


def test_an_answer_that_cannot_be_followed_any_further_ends_with_an_error(served):
    pytest.importorskip("llguidance")
    names = [f"s{i}" for i in range(6)]  # each of them a way to read each part of the text
    rules = [
        f"s: /[a-z]/ | {' | '.join(f'{name} {name}' for name in names)}",
        *(f"{name}: s" for name in names),
    ]
    grammar = {"grammar": "\n".join(["start: s", *rules])}
    asked = {"max_tokens": 80, "min_tokens": 80, "structured_outputs": grammar}
    [choice] = served.http.post("/v1/completions", json={"prompt": "ab"} | asked).json()["choices"]
    assert choice["finish_reason"] == "error"
    assert re.fullmatch("[a-z]{16,}", choice["text"]), "nothing came unconstrained"
    metrics = served.http.get("/metrics").text
    assert re.search(r'request_success_total{.*finished_reason="error".*} 1.0', metrics)


BAD = {"type": "object", "properties": {"a": {"type": "array", "unique": True}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab", "structured_outputs": {"json": BAD}}),
        (
            "/v1/chat/completions",
            {
                "messages": MESSAGES,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}},
            },
        ),
        (
            "/v1/responses",
            {"input": "ab", "text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}},
        ),
        ("/v1/completions", {"prompt": "ab", "structured_outputs": {"grammar": "start: start"}}),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_place(served, path, body):
    reply = served.http.post(path, json={"model": "tiny"} | body)
    said = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert "#/properties/a" in said or "grammar" in said
    assert served.http.get("/health").status_code == 200


def test_a_completion_may_be_one_of_some_texts(served):
    more = {"structured_outputs": {"choice": ["q", "w"]}}
    made = served.openai.completions.create(model="tiny", prompt="ab", max_tokens=9, extra_body=more)
    assert made.choices[0].text in ("q", "w")


def test_the_form_begins_where_the_reasoning_ends_or_with_an_answer_that_has_none(served, monkeypatch):
    """The tiny model has no marks of one token: some that it has stand for them."""
    prompts = served.service.chat_prompts
    monkeypatch.setattr(prompts, "reasoning_parser", "qwen3")
    asked = {"messages": MESSAGES, "max_tokens": 50, "structured_outputs": {"choice": ["q", "w"]}}
    reply = served.http.post("/v1/chat/completions", json=asked)
    assert (reply.status_code, "its end '</think>' must be one token, and is" in reply.text) == (400, True)
    for name, mark in (("end_mark", "z"), ("END", "z")):
        monkeypatch.setattr(think.Qwen3 if name == "end_mark" else think, name, mark)
    reply = served.http.post("/v1/chat/completions", json=asked)
    said = "its beginning '<think>' must be one token, and is"
    assert (reply.status_code, said in reply.text) == (400, True)
    for name, mark in (("begin_mark", "k"), ("BEGIN", "k")):
        monkeypatch.setattr(think.Qwen3 if name == "begin_mark" else think, name, mark)
    begin, end = (served.llm.tokenizer.encode(mark, add_special_tokens=False)[0] for mark in "kz")

    def answer(**more):
        body = asked | {"seed": 2, "return_token_ids": True} | more
        choice = served.http.post("/v1/chat/completions", json=body).json()["choices"][0]
        return choice["message"], served.llm.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)

    # It reasons, it does not, its prompt begins the reasoning, the prompt ends it, a begun answer has none.
    message, text = answer(logit_bias={str(begin): 50.0, str(end): 49.0}, frequency_penalty=2)
    assert re.fullmatch("k[^z]*z[qw]", text)
    assert message["content"] in ("q", "w")
    message, text = answer(logit_bias={str(begin): -50.0, str(end): 50.0})
    assert (message["content"], message.get("reasoning_content")) == (text, None)
    assert text in ("q", "w")
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    for begun, form in (("k", "[^z]*z[qw]"), ("kaz", "[qw]"), ("a", "[qw]")):
        said = [*MESSAGES, {"role": "assistant", "content": begun}]
        _, text = answer(messages=said, **going_on, logit_bias={str(end): 4.0})
        assert re.fullmatch(form, text, re.DOTALL), begun


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"structured_outputs": {}}, "none is given"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "regex, choice are given"),
        ({"structured_outputs": {"x": 1}}, "structured_outputs: field='x' must be one of json,"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice=[] must be a list of 1 to 4096"),
        ({"response_format": {"type": "zz"}}, "response_format.type='zz' must be one of text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema=None must be a"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs must be left out beside response_format",
        ),
        ({"tool_choice": "required"}, "tools=() must be given where tool_choice is 'required'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "of one of tools"),
        (
            {"tools": TOOLS, "tool_choice": "some"},
            "tool_choice='some' must be 'none', 'auto', 'required', or",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_sentence(served, body, message):
    reply = served.http.post("/v1/chat/completions", json={"messages": MESSAGES} | body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


NUMBER = {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"]}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
}
BY_NAME = {"$defs": {"N": {"const": 1}}, "type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}}
FORCED = [  # parameters, right arguments, and wrong ones
    (
        {"type": "object", "properties": {"a": NUMBER, "b": {"$ref": "#/properties/a"}}},
        {"a": {"z": 1}, "b": {"z": 2}},
        {"b": 1},
    ),
    (TREE, {"v": 1, "next": {"v": 2, "next": None}}, {"v": 1, "next": [{"name": "f", "parameters": {}}]}),
    (BY_NAME, {"n": 1}, {"n": 2}),
    ({"type": "object", "properties": {}}, {}, {"x": 1}),
    (None, {}, {"x": 1}),
]


@pytest.mark.parametrize(("parameters", "right", "wrong"), FORCED)
def test_a_forced_call_has_arguments_by_its_own_schema(parameters, right, wrong):
    """What parameters refer to is in them, wherever they stand; a tool without any is called with {}."""
    tools = [
        {"type": "function", "function": {"name": "f"} | ({"parameters": parameters} if parameters else {})},
        {
            "type": "function",
            "function": {"name": "g", "parameters": {**BY_NAME, "$defs": {"N": {"const": 3}}}},
        },
    ]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        asked = forced(tools, choice, parallel=True)[2]
        made = Constraint({**json.loads(asked.key()), "max_depth": 3}, Limits()).automaton(VOCABULARY)
        for arguments, is_right in ((right, True), (wrong, False)):
            call = [{"name": "f", "parameters": arguments}] if choice == "required" else arguments
            assert accepts(made, VOCABULARY, json.dumps(call)) is is_right


@pytest.fixture
def reasoning_by_letters(served, monkeypatch):
    """Read reasoning between k and z: the tiny model has no marks of one token. Returns their tokens."""
    monkeypatch.setattr(served.service.chat_prompts, "reasoning_parser", "qwen3")
    for place, name, mark in (
        (think.Qwen3, "begin_mark", "k"),
        (think, "BEGIN", "k"),
        (think.Qwen3, "end_mark", "z"),
        (think, "END", "z"),
    ):
        monkeypatch.setattr(place, name, mark)
    return [served.llm.tokenizer.encode(mark, add_special_tokens=False)[0] for mark in "kz"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_its_form_behind_reasoning_and_without(served, reasoning_by_letters, stream):
    """What other engines get wrong: a text of the form told as reasoning, and one that escapes it there."""
    begin, end = reasoning_by_letters
    form = {"type": "json_schema", "name": "x", "schema": {"enum": ["q", "w"]}, "strict": True}
    asked = {"input": "ab", "text": {"format": form}, "max_output_tokens": 60, "seed": 2, "stream": stream}

    def answer(**more):
        reply = served.http.post("/v1/responses", json=asked | more)
        if not stream:
            made = reply.json()
        else:
            events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
            made = events[-1]["response"]
            for kind in ("reasoning_text", "output_text"):
                told = "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta")
                its = [i["content"][0]["text"] for i in made["output"] if i["content"][0]["type"] == kind]
                assert told == "".join(its)
        texts = {item["type"]: item["content"][0]["text"] for item in made["output"]}
        return made["status"], texts, made["usage"]["output_tokens_details"]["reasoning_tokens"]

    status, texts, num = answer(logit_bias={str(begin): 50.0, str(end): 49.0}, frequency_penalty=2)
    assert (status, texts["message"] in ('"q"', '"w"'), num > 0) == ("completed", True, True)
    assert re.fullmatch("[^z]*", texts["reasoning"], re.DOTALL)
    status, texts, num = answer(logit_bias={str(begin): -50.0, str(end): 50.0})
    assert (status, [*texts], num) == ("completed", ["message"], 0)
    assert texts["message"] in ('"q"', '"w"')
