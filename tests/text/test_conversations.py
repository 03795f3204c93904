"""Conversations read by one rule, and written for templates that take them in their own ways."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from jaxpaged.checks import InputError
from jaxpaged.text.conversations import read_items, read_messages
from jaxpaged.text.templates import render


class Tokenizer:
    """A chat template with transformers' own rendering, and nothing else."""

    def __init__(self, chat_template):
        self.chat_template = chat_template

    def apply_chat_template(self, messages, *, chat_template=None, tokenize=False, **options):
        [text], _ = render_jinja_template([messages], chat_template=chat_template, **options)
        return text


# How well-known templates write the arguments of a call, in as few words as show it.
EACH = (
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}<"
)
END = ">{% endfor %};{% endfor %}"
FORMS = {
    "qwen3": "{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}",
    "hermes": "{{ a | tojson }}",
    "mistral": "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{{ c.function | tojson }}",
    "llama": "{% for k, v in a | items %}{{ k }}={{ v }},{% endfor %}",
    "glm": "{% for k, v in a.items() %}{{ k }}={{ v }},{% endfor %}",
    "qwen3.6": "{% for k in a %}{{ k }}={{ a[k] }},{% endfor %}",
    "deepseek": "{{ 'f ' + a }}",
    "prints": "{{ a }}",
}
BROKEN = '{"k": "hel'
WRITTEN = {
    "qwen3": ('{"k": "v"}', BROKEN),
    "hermes": ('{"k": "v"}', json.dumps(BROKEN)),
    "mistral": ('{"name": "f", "arguments": {"k": "v"}}', json.dumps({"name": "f", "arguments": BROKEN})),
    "llama": ("k=v,", f"arguments={BROKEN},"),
    "glm": ("k=v,", f"arguments={BROKEN},"),
    "qwen3.6": ("k=v,", f"arguments={BROKEN},"),
    "deepseek": ('f {"k": "v"}', f"f {BROKEN}"),
    "prints": ('{"k": "v"}', BROKEN),
}


def asked(*arguments):
    """Return a conversation with a call for each of these arguments."""
    calls = [{"id": "abcdefghi", "function": {"name": "f", "arguments": each}} for each in arguments]
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "b", "tool_call_id": "abcdefghi"},
    ]


@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_written_as_the_template_reads_them_and_text_as_text(form):
    """Arguments that are no JSON are our own answer, cut by max_tokens: they must not be refused for ever."""
    tokenizer = Tokenizer(EACH + FORMS[form] + END)
    right, broken = WRITTEN[form]
    for arguments in ('{"k": "v"}', {"k": "v"}):
        text = render(tokenizer, asked(arguments), add_generation_prompt=False)
        assert text == f"user:a;assistant:<{right}>;tool:b;"
    text = render(tokenizer, asked('{"k": "v"}', BROKEN), add_generation_prompt=False)
    assert text == f"user:a;assistant:<{right}><{broken}>;tool:b;"


@pytest.mark.parametrize("arguments", ["", None, "null", "{}", {}])
def test_what_says_no_arguments_is_an_empty_object(arguments):
    [_, message, _] = read_messages(asked(arguments))
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "arguments", ["[1]", "7", '"a"', '{"a": NaN}', "[" * 100_000, '{"a": ' + "1" * 5000 + "}"]
)
def test_what_is_no_object_stays_the_text_that_it_is(arguments):
    [_, message, _] = read_messages(asked(arguments))
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_developer_is_told_as_such_to_templates_that_name_one_and_as_system_to_others():
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": "a"}]
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    assert render(Tokenizer(plain), messages) == "system:be;user:a;"
    named = plain + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert render(Tokenizer(named), messages) == "developer:be;user:a;!"


PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}?{% endif %};{% endfor %}"
LOOPING = (
    "{% for m in messages %}{{ m.role }}:{% for p in m['content'] %}[{{ p.text }}]{% endfor %};{% endfor %}"
)
PARTS = [{"type": "text", "text": "x"}, "y", {"type": "input_text", "text": "z"}]


@pytest.mark.parametrize(
    ("message", "plain", "looping"),
    [
        ({"role": "user", "content": PARTS}, "user:x\ny\nz;", "user:[x][y][z];"),
        ({"role": "user", "content": []}, "user:;", "user:;"),
        ({"role": "assistant", "content": None}, "assistant:;", "assistant:;"),
        ({"role": "assistant", "tool_calls": None}, "assistant:;", "assistant:;"),
        ({"role": "assistant", "content": "x", "tool_calls": []}, "assistant:x;", "assistant:[x];"),
        ({"role": "assistant", "content": None, "refusal": "no"}, "assistant:no;", "assistant:[no];"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "refusal": None},
            "assistant:no;",
            "assistant:[no];",
        ),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{"}},
            "assistant:?;",
            "assistant:;",
        ),
        ({"role": "function", "name": "f", "content": "7"}, "tool:7;", "tool:[7];"),
    ],
)
def test_contents_are_texts_or_parts_as_the_template_has_them(message, plain, looping):
    assert render(Tokenizer(PLAIN), [message]) == plain
    assert render(Tokenizer(LOOPING), [message]) == looping
    if isinstance(message.get("content"), str):
        wants = render(Tokenizer("{{ messages[0].content }}"), [message], content_format="openai")
        assert wants == str([{"type": "text", "text": message["content"]}])


PART = "{% for p in its %}{{ p.text }}{% endfor %}"
# How templates reach the parts of a message m, beside a loop over its content.
REACHES = {
    "macro": "{% macro say(its) %}" + PART + "{% endmacro %}|{{ say(m.content) }}",
    "variable": "|{% set its = m['content'] %}" + PART,
    "namespace": "{% set ns = namespace(c=[]) %}|{% set ns.c = m.content %}{% set its = ns.c %}" + PART,
    "get": "|{% for p in m.get('content') %}{{ p['text'] | trim }}{% endfor %}",
    "filter": "|{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}",
    "number": "|{{ m['content'][0]['text'] }}",
    "first": "|{{ (m.content | first).text | upper }}",
    "type": "|{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}",
    "sum": "|{% set its = [] + m.content %}" + PART,  # which fails with a text
}


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool", "all"])
def test_no_text_is_lost_however_a_template_reaches_it(reach, role):
    """Each role by itself: a system message may be reached by its first part, all others as texts."""
    before, _, said = REACHES[reach].partition("|")
    if role != "all":
        said = "{% if m.role == '" + role + "' %}" + said + "{% else %}{{ '' + m.content }}{% endif %}"
    tokenizer = Tokenizer(before + "{% for m in messages %}{{ m.role }}:" + said + ";{% endfor %}")
    turns = {"system": "be", "user": "a", "assistant": "b", "tool": "c"}
    want = "".join(f"{role}:{text};" for role, text in turns.items()).lower()
    for content in (str, lambda text: [{"type": "text", "text": text}]):
        messages = [{"role": role, "content": content(text)} for role, text in turns.items()]
        assert render(tokenizer, messages).lower() == want


@pytest.mark.parametrize(
    "shown", ["{{ m.content }}", "{{ m | tojson }}", "{{ m.content | tojson | tojson }}"]
)
def test_a_text_is_no_list_that_is_written_as_such(shown):
    """A content of which neither form comes out as a text is given as one."""
    refuses = "{% if m.content is string and m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = Tokenizer("{% for m in messages %}" + shown + refuses + "{% endfor %}")
    assert "type" not in render(tokenizer, [{"role": "user", "content": "x"}])
    with pytest.raises(InputError, match="refuses them: no"):
        render(tokenizer, asked("{}"))


def test_what_one_clients_variables_do_to_a_template_is_no_other_clients():
    """Without `mode` the template writes nothing: what suits it is found with each client's own."""
    by_mode = (
        "{% for m in messages %}{% if mode == 'parts' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% elif mode == 'text' %}{{ '' + m.content }}{% endif %}{% endfor %}"
    )
    tokenizer, user = Tokenizer(by_mode), [{"role": "user", "content": "hello"}]
    for mode in ("parts", "text", "parts"):
        assert render(tokenizer, user, kwargs={"mode": mode}) == "hello"


@pytest.mark.parametrize(
    "template",
    [
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}{{ m.tool_calls }}",
        "<{{ m.tool_calls[0].function.arguments | tojson }}>",
    ],
)
def test_calls_in_one_message_are_several_messages_for_a_template_that_takes_one(template):
    """Llama 3.1's refuses two calls, which its model makes; that of gpt-oss forgets the second."""
    text = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}" + template
    tokenizer = Tokenizer(text + "{% endif %};{% endfor %}")
    [user, call, output] = asked('{"k": 1}')
    second = call["tool_calls"][0] | {"id": "2", "function": {"name": "f", "arguments": {"k": 2}}}
    several = [
        user,
        call | {"content": "x", "tool_calls": [*call["tool_calls"], second]},
        {"role": "tool", "content": "two", "tool_call_id": "2"},
        output,
        user,
    ]
    got = render(tokenizer, several)
    alone = [call | {"content": "x"}, output, call | {"tool_calls": [second]}, several[2]]
    assert got == render(tokenizer, [user, *alone, user])
    places = [
        got.index(each) for each in ("x", '"k": 1' if '"k": 1' in got else "'k': 1", "tool:b", "tool:two")
    ]
    assert places == sorted(places)


def test_a_template_that_looks_for_a_mark_in_a_content_gets_a_text():
    """DeepSeek R1's template does so, to leave reasoning out: it does not loop."""
    template = "{% set m = messages[0] %}{% if '</think>' in m.content %}!{% endif %}{{ 'a' + m['content'] }}"
    assert render(Tokenizer(template), [{"role": "user", "content": ["x"]}]) == "ax"


def test_the_template_for_tools_is_taken_of_several():
    several = {"default": PLAIN, "tool_use": "{{ tools | length }} tools", "other": "other"}
    messages = [{"role": "user", "content": "a"}]
    tool = {"type": "function", "function": {"name": "f"}}
    assert render(Tokenizer(several), messages) == "user:a;"
    assert render(Tokenizer(several), messages, tools=[tool]) == "1 tools"
    assert render(Tokenizer(several), messages, chat_template="other") == "other"
    for options in ({"tools": [tool]}, {"kwargs": {"documents": [{"title": "a", "text": "b"}]}}):
        with pytest.raises(InputError, match="the model's chat template has no place for them"):
            render(Tokenizer(PLAIN), messages, **options)


def test_a_template_that_asks_whether_content_is_none_gets_none_beside_calls():
    """DeepSeek's loses the calls of a message whose content is an empty text."""
    template = (
        "{% for m in messages %}{% if m['content'] is none %}{{ m.tool_calls | length }} calls"
        "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    assert render(Tokenizer(template), asked("{}")) == "a;1 calls;b;"


def test_reasoning_has_the_name_that_the_template_reads():
    for name in ("reasoning_content", "reasoning", "thinking"):
        message = {"role": "assistant", "content": "x", name: "hm"}
        for field in ("reasoning_content", "reasoning"):
            assert render(Tokenizer(f"{{{{ messages[0].{field} }}}}"), [message]) == "hm"
    [user, call, output] = asked("{}")
    gpt = (
        "{% set m = messages[1] %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{{ m.content }}{{ m.thinking }}"
    )
    told = call | {"content": "x", "reasoning": "hm"}
    assert render(Tokenizer(gpt), [user, told, output]) == "hm\nx"


def test_the_items_of_a_response_are_turns_of_messages():
    items = [
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I ask.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"k": 1}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": BROKEN},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "8"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": "x"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    f = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"k": 1}}}
    g = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": BROKEN}}
    assert read_items(items) == [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": ["a"]},
        {"role": "assistant", "content": ["I ask."], "reasoning": "hm", "tool_calls": [f, g]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "tool", "tool_call_id": "c2", "content": ["8"]},
        {"role": "assistant", "content": "one", "reasoning": "so"},
        {"role": "assistant", "content": "two"},
    ]


def test_reasoning_and_calls_of_one_turn_add_up_and_a_text_begins_another():
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "y"}
    first, second = read_items([thought, thought, call, call, said, call])
    assert (first["reasoning"], len(first["tool_calls"]), first["content"]) == ("x\nx", 2, None)
    assert (second.get("reasoning"), len(second["tool_calls"]), second["content"]) == (None, 1, "y")


CALL = {"function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (3, "messages.0=3 must be an object"),
        ({"content": "a"}, "messages.0.role=None must be a string"),
        ({"role": "user"}, "messages.0.content=None must be a string or a list of parts"),
        ({"role": "user", "content": {"text": "a"}}, "messages.0.content={'text': 'a'} must be"),
        (
            {"role": "user", "content": ["a", {"type": "image_url"}]},
            "messages.0.content.1={'type': 'image_url'} must",
        ),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages.0.content.0="),
        ({"role": "assistant", "refusal": 3}, "messages.0.refusal=3 must be a string or null"),
        ({"role": "assistant", "tool_calls": "f"}, "messages.0.tool_calls='f' must be a list of calls"),
        ({"role": "assistant", "tool_calls": [CALL, {}]}, "messages.0.tool_calls.1={} must be an object"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]},
            "messages.0.tool_calls.0.function.arguments=3 must be a text or an object",
        ),
    ],
)
def test_a_mistake_is_told_with_the_path_to_it(message, told):
    with pytest.raises(InputError, match="^" + told.replace("{", r"\{").replace("[", r"\[")):
        read_messages([message])


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (
            {"type": "item_reference", "id": "1"},
            "input.1.type='item_reference' must be one of message, function",
        ),
        ({"type": "function_call", "call_id": "c"}, "input.1.name=None must be a string"),
        ({"type": "function_call_output", "output": "7"}, "input.1.call_id=None must be a string"),
        ({"type": "function_call_output", "call_id": "c"}, "input.1.output=None must be"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input.1.content.0="),
        ("a", "input.1='a' must be an object"),
    ],
)
def test_a_mistake_in_an_item_too(item, told):
    with pytest.raises(InputError, match=f"^{told}"):
        read_items([{"role": "user", "content": "a"}, item])
