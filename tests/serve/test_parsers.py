"""Answers as models write them, each read the same however it is cut. Written by hand from chat templates."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.serve.parsers import REASONING_PARSERS, TOOL_PARSERS, detected
from jaxpaged.serve.parsers.base import Source
from jaxpaged.serve.parsers.values import ParameterTypes
from jaxpaged.serve.tools import Form, ReasoningTokens, ToolDeltas


@dataclasses.dataclass(frozen=True)
class Case:
    """Text that a model writes, and its meaning."""

    form: str | None
    text: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    reads: str | None = None  # the parser of reasoning
    prompt: str = ""
    begun: str = ""


def tool(name, **properties):
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TEXT, INT, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TOOLS = [
    tool("f", a=TEXT, n=INT, on=FLAG, many={"type": "array"}, some={"anyOf": [TEXT, {"type": "null"}]}),
    tool("g", any={"enum": ["x", 3]}),
]
DS_ALL, DS_ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS, DS_SEP, DS_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI_ALL, KIMI_ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI, KIMI_ARGS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

CASES = [
    Case(
        "hermes",
        'Well. <tool_call>\n{"name": "f", "arguments": {"a b": "}\\"x", "n": [1, {}]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"q": 1}, "name": "g"}</tool_call> bye <tool',
        "Well.  bye <tool",
        (("f", '{"a b": "}\\"x", "n": [1, {}]}'), ("g", '{"q": 1}')),
    ),
    Case("hermes", "<tool_call> no JSON </tool_call>", "<tool_call> no JSON </tool_call>"),
    Case("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>'),
    Case("hermes", '\n<tool_call>{"name": "f"}</tool_call>\n', "", (("f", "{}"),)),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", (("f", '{"a": 1'),)),
    Case("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", (("f", '{"a": 1}'),)),
    Case("hermes", '{"name": "f", "arguments": {}} < 3\n', '{"name": "f", "arguments": {}} < 3\n'),
    # A brace too few, or two, and what stands for no arguments.
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>x', "x", (("f", '{"a": 1}'),)),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}\n</tool_call>',
        "",
        (("f", '{"a": {"b": 1}\n'),),
    ),
    Case("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", (("f", "{}"),)),
    Case("hermes", '<tool_call>{"arguments": "", "name": "f"}</tool_call>', "", (("f", "{}"),)),
    # Text between calls, and the lines around it; two objects between two marks; a mark that is text.
    Case(
        "hermes",
        '<tool_call>{"name": "f"}</tool_call>\nthen\n<tool_call>{"name": "g"}\n{"name": "h"}</tool_call>',
        "\nthen",
        (("f", "{}"), ("g", "{}"), ("h", "{}")),
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}\n<tool_call>{"name": "g"}</tool_call>',
        "",
        (("f", "{}"), ("g", "{}")),
    ),
    Case("hermes", "<tool_call> \n\t <", "<tool_call> \n\t <"),
    Case("hermes", '<tool_call> <tool_call>{"name": "f"}</tool_call>', "<tool_call> ", (("f", "{}"),)),
    Case(
        "llama3_json",
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}\n',
        "",
        (("f", '{"x": 1}'), ("g", "{}")),
    ),
    Case(
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": true}}',
        "",
        (("f", '{"x": true}'),),
    ),
    Case("llama3_json", '{"name": "Bob", "age": 3} is', '{"name": "Bob", "age": 3} is'),
    Case("llama3_json", 'It is {"name": "f", "parameters": {}}', 'It is {"name": "f", "parameters": {}}'),
    Case("llama3_json", " \n {} \n", " \n {} \n"),
    Case("llama3_json", '{"name": "f", "parameters": null}', "", (("f", "{}"),)),
    Case(
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": "]"}}]',
        "",
        (("f", '{"x": 1}'), ("g", '{"y": "]"}')),
    ),
    Case(
        "mistral",
        'Sure[TOOL_CALLS]f{"x": {"a": 1}}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{"y": 2}',
        "Sure",
        (("f", '{"x": {"a": 1}}'), ("g", '{"y": 2}')),
    ),
    Case("mistral", "[TOOL_CALLS]?? [TOOL", "[TOOL_CALLS]?? [TOOL"),
    Case(
        "qwen3_coder",
        'On it.\n<tool_call>\n<function=f>\n<parameter=a>\nif x < 3:\n\tsay("é")\n\n</parameter>\n'
        "<parameter=n>\n"
        '7\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n<parameter=many>\n[1, {"b": 2}]\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "On it.\n",
        (
            ("f", '{"a": "if x < 3:\\n\\tsay(\\"é\\")\\n", "n": 7, "on": true, "many": [1, {"b": 2}]}'),
            ("g", "{}"),
        ),
    ),
    Case(
        "qwen3_coder",
        "<function=f>\n<parameter=n>\nten\n</parameter>\n</function>",
        "",
        (("f", '{"n": "ten"}'),),
    ),
    Case(
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=some>\nnull\n</function>\n</tool_call> .",
        " .",
        (("f", '{"a": "1", "some": null}'),),
    ),
    Case("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nhel\n", "", (("f", '{"a": "hel'),)),
    Case("qwen3_coder", "<tool_call> that is <function", "<tool_call> that is <function"),
    Case(
        "glm45",
        'Well.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x "y"\n</arg_value>\n<arg_key>n</arg_key>\n'
        "<arg_value>5</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
        "Well.\n",
        (("f", '{"a": "x \\"y\\"\\n", "n": 5}'), ("g", "{}")),
    ),
    Case(
        "glm45",
        "<tool_call>f<arg_key>on</arg_key><arg_value>false</arg_value><arg_key>some</arg_key><arg_value>1</arg_value>"
        "</tool_call><tool_call>g<arg_key>any</arg_key><arg_value>3</arg_value></tool_call>",
        "",
        (("f", '{"on": false, "some": "1"}'), ("g", '{"any": 3}')),
    ),
    Case("glm45", "<tool_call>f<arg_key>many</arg_key><arg_value>[1", "", (("f", '{"many": [1'),)),
    Case("glm45", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>"),
    Case(
        "deepseek_v3",
        f'Two.{DS_ALL}{DS}function{DS_SEP}f\n```json\n{{"a": "`"}}\n```{DS_END}\n{DS}function{DS_SEP}g\n'
        f"```json\n{{}}\n```{DS_END}{DS_ALL_END}",
        "Two.",
        (("f", '{"a": "`"}'), ("g", "{}")),
    ),
    Case(
        "deepseek_v31",
        f'{DS_ALL}{DS}f{DS_SEP}{{"a": 1}}{DS_END}{DS}function{DS_SEP}{{"b": 2}}{DS_END}{DS_ALL_END}',
        "",
        (("f", '{"a": 1}'), ("function", '{"b": 2}')),
    ),
    Case("deepseek_v3", f"{DS}function{DS_SEP}no", f"{DS}function{DS_SEP}no"),
    Case("deepseek_v3", f'{DS}function{DS_SEP}f\n```json\n{{"a": ', "", (("f", '{"a": '),)),
    Case(
        "kimi_k2",
        f'Ok {KIMI_ALL}{KIMI}functions.f:0{KIMI_ARGS}{{"a": 1}}{KIMI_END}{KIMI}functions.g.h:1{KIMI_ARGS}{{}}'
        f"{KIMI_END}{KIMI_ALL_END}",
        "Ok ",
        (("f", '{"a": 1}'), ("g.h", "{}")),
    ),
    Case("kimi_k2", f"{KIMI_ALL}{KIMI}functions.f", f"{KIMI}functions.f"),
    Case(
        "openai",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>analysis<|message|>More.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I ask.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": "<"}<|call|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>  <|call|>",
        "I ask.",
        (("f", '{"a": "<"}'), ("g", "{}")),
        "Think.\nMore.",
        "openai_gptoss",
    ),
    Case(
        None,
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>"
        "Yes <b>.<|return|>",
        "Yes <b>.",
        (),
        "Hm",
        "openai_gptoss",
    ),
    Case(None, "<|channel|>analysis<|message|>Hm", "", (), "Hm", "openai_gptoss"),
    Case(None, "<|channel|>final<|mess", "", (), "", "openai_gptoss"),
    Case(
        "pythonic",
        '[f(a="x ]\\"", n=-3, many=[1, {"b": None}]), g.h(on=true)]',
        "",
        (("f", '{"a": "x ]\\"", "n": -3, "many": [1, {"b": null}]}'), ("g.h", '{"on": true}')),
    ),
    Case("pythonic", "[f(1)] and [g()]", "[f(1)] and [g()]"),
    Case("pythonic", '[f(a="x', '[f(a="x'),
    Case(None, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Yes.\n", (), "Hm.\n\nSo.", "qwen3"),
    Case(None, "No </think> here", "No </think> here", (), "", "qwen3"),
    Case(None, "Hm</think>\nYes", "Yes", (), "Hm", "qwen3", "user: a\nassistant: <think>\n"),
    Case(None, "m\n</think>\nYes", "Yes", (), "m", "qwen3", "assistant: <think>\nH", "<think>\nH"),
    Case(None, "es", "es", (), "", "deepseek_r1", "assistant: <think>H</think>Y", "<think>H</think>Y"),
    Case(None, "<think>Hm</th", "", (), "Hm</th", "qwen3"),
    Case(None, "Hm\n</think>\n\nYes", "Yes", (), "Hm", "deepseek_r1"),
    Case(None, "<think>Hm", "", (), "Hm", "deepseek_r1"),
    Case(None, "Yes", "Yes", (), "", "deepseek_r1", "assistant: <think>\n\n</think>\n\n"),
    Case(
        "kimi_k2",
        f"Hm\n{KIMI_ALL}{KIMI}functions.f:3{KIMI_ARGS}{{}}{KIMI_END}{KIMI_ALL_END}",
        "",
        (("f", "{}"),),
        "Hm",
        "kimi_k2",
        "assistant<think>",
    ),
    Case(
        "hermes",
        '<think>\n<tool_call> no\n</think>\n\n<tool_call>{"name": "f"}</tool_call>',
        "",
        (("f", "{}"),),
        "<tool_call> no",
        "qwen3",
    ),
]


def told(case, fragments):
    """Return an answer's content, calls and reasoning, parsed from fragments in two ways that must agree."""
    form = Form(calls=case.form, reasoning=case.reads, tools=TOOLS, prompt=case.prompt, begun=case.begun)
    deltas, content, reasoning, streamed = ToolDeltas(form), "", "", {}
    for i, fragment in enumerate(fragments):
        for delta in deltas.feed(fragment, is_last=i == len(fragments) - 1):
            content += delta.get("content", "")
            reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                name, arguments = streamed.get(call["index"], ("", ""))
                function = call["function"]
                streamed[call["index"]] = (name or function["name"], arguments + function["arguments"])
    calls = tuple((c["function"]["name"], c["function"]["arguments"]) for c in deltas.calls)
    assert tuple(streamed[i] for i in range(len(streamed))) == calls
    assert deltas.reasoning == reasoning
    return content, calls, reasoning


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.form or case.reads}-{CASES.index(case)}")
def test_what_a_model_writes_is_read_as_it_is_meant(case):
    want = (case.content, case.calls, case.reasoning)
    assert told(case, [case.text]) == want
    assert told(case, [*case.text]) == want


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_no_cut_and_no_mistake_of_a_model_makes_stream_and_whole_differ(data):
    """Texts of the cases with fragments exchanged, left out and told twice, cut anywhere."""
    case = data.draw(st.sampled_from(CASES))
    text = case.text
    for _ in range(data.draw(st.integers(0, 3))):
        i, j = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        text = data.draw(
            st.sampled_from([text[:i] + text[j:], text[:j] + text[i:], text[:i] + "\n" + text[i:]])
        )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    fragments = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = told(case, [text])
    assert told(case, fragments) == told(case, [*text, ""]) == whole
    if case.form in ("qwen3_coder", "glm45", "pythonic"):
        for _, arguments in whole[1]:
            assert arguments == "" or arguments[0] == "{"


def test_every_parser_has_cases_and_its_line_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs/guides/chat.md").read_text()
    assert {name for name in (*TOOL_PARSERS, *REASONING_PARSERS) if f"`{name}`" not in text} == set()
    families = {TOOL_PARSERS[case.form] for case in CASES if case.form}
    assert families == set(TOOL_PARSERS.values())
    assert {REASONING_PARSERS[case.reads] for case in CASES if case.reads} == set(REASONING_PARSERS.values())


def test_ids_are_the_models_own_where_it_has_some_and_fit_its_template():
    def ids(case):
        deltas = ToolDeltas(Form(calls=case.form))
        list(deltas.feed(case.text, is_last=True))
        return [call["id"] for call in deltas.calls]

    kimi = next(case for case in CASES if case.form == "kimi_k2")
    assert ids(kimi) == ["functions.f:0", "functions.g.h:1"]
    first, second = [case for case in CASES if case.form == "mistral"][:2]
    assert all(len(each) == 9 for each in ids(first))
    assert ids(second)[1] == "abcdefghi"
    assert ids(CASES[0])[0].startswith("call_")


@pytest.mark.parametrize(
    "form", ["hermes", "mistral", "qwen3_coder", "glm45", "deepseek_v3", "kimi_k2", "openai"]
)
def test_long_arguments_arrive_whole_and_the_cost_is_linear(form, monkeypatch):
    """Arguments of 100,000 characters come whole and in fragments. No character is read twice."""
    add, waiting = Source.add, []

    def adds(source, text):
        add(source, text)
        waiting.append(len(source._text) - len(text))

    monkeypatch.setattr(Source, "add", adds)
    value = "x{}\"'<\\n" * 12_500
    arguments = json.dumps({"a": value})
    text = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>',
        "mistral": f"[TOOL_CALLS]f{arguments}",
        "qwen3_coder": f"<function=f><parameter=a>\n{value}\n</parameter></function>",
        "glm45": f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>",
        "deepseek_v3": f"{DS}function{DS_SEP}f\n```json\n{arguments}\n```{DS_END}",
        "kimi_k2": f"{KIMI}functions.f:0{KIMI_ARGS}{arguments}{KIMI_END}",
        "openai": f"<|channel|>commentary to=functions.f<|message|>{arguments}<|call|>",
    }[form]
    for size in (len(text), 16):
        fragments = [text[i : i + size] for i in range(0, len(text), size)]
        content, [(name, got)], _ = told(Case(form, text, ""), fragments)
        assert (content, name, json.loads(got)) == ("", "f", {"a": value})
    assert max(waiting) < 64


def test_a_template_tells_how_its_model_writes():
    """If a template has signs of several forms, the one with the most is meant."""
    for name, text in (
        ("hermes", "within <tool_call></tool_call> tags"),
        ("qwen3_coder", "<tool_call>\n<function=name>"),
        ("glm45", "<tool_call>{function-name}\n<arg_key>"),
        ("openai", "<|start|>assistant<|channel|>final<|message|>"),
        ("kimi_k2", KIMI_ALL),
        ("deepseek_v3", f"{DS_ALL}{DS}function{DS_SEP}"),
        (None, "{{ messages }}"),
    ):
        assert detected(TOOL_PARSERS, text) == name


def test_plain_text_arguments_have_the_types_that_a_reference_or_a_constant_gives():
    parameters = {
        "$defs": {
            "level": {"type": "integer"},
            "name": {"type": "string"},
            "base": {"properties": {"tags": {"type": "array"}}},
        },
        "allOf": [{"$ref": "#/$defs/base"}],
        "properties": {
            "level": {"$ref": "#/$defs/level"},
            "name": {"$ref": "#/$defs/name"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/level"}, {"type": "null"}]},
            "five": {"const": 5},
            "loop": {"$ref": "#/properties/loop"},
            "far": {"$ref": "https://elsewhere"},
        },
    }
    types = ParameterTypes([{"function": {"name": "f", "parameters": parameters}}])
    written = {"level": "2", "name": '{"x": 1}', "maybe": "3", "five": "5", "tags": '["a"]', "loop": "1"}
    right = {"level": 2, "name": '{"x": 1}', "maybe": 3, "five": 5, "tags": ["a"], "loop": "1", "far": "1"}
    written["far"] = "1"
    assert {name: json.loads(types.json("f", name, text)) for name, text in written.items()} == right


class Letters:
    """Tokenizer of letters, with a token for each mark of reasoning."""

    marks = ("<think>", "</think>")

    def encode(self, text, add_special_tokens=False):
        return [self.marks.index(text)] if text in self.marks else [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(self.marks[i] if i < len(self.marks) else chr(i) for i in ids)


@pytest.mark.parametrize("reads", ["qwen3", "deepseek_r1", "kimi_k2"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 99])
def test_letters_that_look_like_the_end_of_reasoning_end_nothing(reads, size):
    """A constraint begins behind the token: what is behind the letters alone is no answer."""
    tokenizer, content, reasoning = Letters(), "", ""
    ids = [0, *map(ord, "The mark </think> and </think>, "), 1, *map(ord, "yes</think>")]
    reasoned = ReasoningTokens(reads, tokenizer)
    deltas = ToolDeltas(Form(reasoning=reads), reasoned)
    for at in range(0, len(ids), size):
        its = ids[at : at + size]
        reasoned.note_tokens(its)
        for delta in deltas.feed(tokenizer.decode(its), is_last=at + size >= len(ids)):
            content += delta.get("content", "")
            reasoning += delta.get("reasoning_content", "")
    assert content == "yes</think>"
    assert reasoning.removeprefix("<think>") == "The mark </think> and </think>, "
    assert reasoned.num == len("The mark </think> and </think>, ")
