"""The command line: what it prints where, its exit codes, and one clear line for each mistake."""

import json
import subprocess
import sys

import pytest

from jaxpaged import cli
from jaxpaged.config import EngineConfig
from jaxpaged.engine.driver import Driver
from pallas_kernels import native
from tests.tiny_gguf import write_gguf

# Few and small shapes, for quick compiling; the same as in test_llm.py.
FAST = ["--max-num-seqs", "4", "--block-size", "8", "--dtype", "float32", "--max-num-batched-tokens", "68"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_gguf(tmp_path_factory.mktemp("cli") / "tiny.gguf"))


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


def test_json_prints_lines_in_input_order_and_nothing_else(model, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "c d"}\n\n{"messages": [{"role": "user", "content": "ab"}]}\n', encoding="utf-8"
    )
    code = cli.main(
        [
            "generate",
            "--model",
            model,
            *FAST,
            "--prompt",
            "zz",
            "--prompts-file",
            str(file),
            "--json",
            "--ignore-eos",
            "--max-tokens",
            "5",
        ]
    )
    assert code == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert [line["prompt"] for line in lines] == ["zz", "c d", "user:ab<|end|>"]
    for line in lines:
        assert set(line) == {"index", "prompt", "prompt_token_ids", "token_ids", "text", "finish_reason"}
        assert len(line["token_ids"]) == 5
        assert line["finish_reason"] == "length"


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
        ("--max-model-len 64 --attention xla", {"max_model_len": 64, "attention": "xla"}),
    ],
)
def test_engine_options_reach_the_engine(arguments, options):
    for command in ("generate", "info"):
        args = cli._parser().parse_args([command, *arguments.split()])
        assert cli._engine_options(args) == options
        EngineConfig(**options)


def test_info_prints_the_caches_size(model, capsys):
    assert cli.main(["info", "--model", model, *FAST, "--num-blocks", "33"]) == 0
    out = capsys.readouterr().out
    # 8 tokens x 2 layers x (K and V) x 2 heads x 8 x 4 bytes
    assert "33 blocks of 8 tokens, 2,048 bytes each: 256 tokens" in out
    assert "num_blocks was given" in out
    no_native = native.why_not("float32")
    for part in ("attention", "products"):
        chosen = f"xla: {no_native}" if no_native else "native: a CPU with AVX-512"
        assert f"{part:<14}{chosen}\n" in out
    assert "jax " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt: give --prompt or --prompts-file"),
        (["--prompt", ""], "--prompt '' must not be empty"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens=0 must be a positive int"),
        (["--prompt", "a", "--max-tokens", "-2"], "max_tokens=-2 must be a positive int"),
        (["--prompt", "a", "--max-tokens", "two"], "argument --max-tokens: invalid int value: 'two'"),
        (["--prompt", "a", "--temperature", "-1"], "temperature=-1.0 must be a number >= 0"),
        (["--prompt", "a", "--block-size", "0"], "block_size=0 must be a positive int"),
        (["--prompt", "a", "--num-blocks", "1"], "num_blocks=1 must be None or an int >= 2"),
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
        (["--prompt", "a b " * 60], "jaxpaged: the prompt has "),
        (["--prompt", "a", "--prompt", "a b " * 60], "jaxpaged: prompt 1: the prompt has "),
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
            "needs 8 blocks of 8 tokens, but num_blocks=2 leaves 1 for use",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(model, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(Driver, "_compile", lambda self: None)  # nothing is to run
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
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2: must be an object with either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": []}\n', "line 1: must be an object with either"),
        ('{"prompt": ""}\n', "line 1: prompt='' must be a non-empty string"),
        ('{"prompt": 5}\n', "line 1: prompt=5 must be a non-empty string"),
        ('{"messages": []}\n', "line 1: messages=[] must be a list with at least one message"),
        ('{"messages": [{"role": "user"}]}\n', "line 1: message {'role': 'user'} must have a 'role'"),
    ],
)
def test_a_bad_prompts_file_is_refused_with_the_line(model, content, message, tmp_path, capsys):
    file = tmp_path / "prompts"
    file.write_text(content, encoding="utf-8")
    assert cli.main(["generate", "--model", model, "--prompts-file", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_a_prompts_file_that_is_not_text_is_refused(model, tmp_path, capsys):
    file = tmp_path / "prompts"
    file.write_bytes(b"\xff\xfe\x00")
    assert cli.main(["generate", "--model", model, "--prompts-file", str(file)]) == 2
    assert "cannot be read" in capsys.readouterr().err
