"""`jaxpaged serve` and `jaxpaged bench serve` from the shell."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from jaxpaged import cli
from jaxpaged.commands.serve import KEY_VARIABLE, server_options
from jaxpaged.serve.options import ServerOptions

FAST = ["--max-num-seqs", "4", "--block-size", "8", "--dtype", "float32", "--max-num-batched-tokens", "132"]
FAST += ["--num-blocks", "65"]


def test_nothing_of_the_server_is_imported_unless_it_is_asked_for():
    check = """if True:
        import sys, jaxpaged.cli
        try:
            jaxpaged.cli.main(["serve", "--help"])
        except SystemExit:
            pass
        assert not {"jax", "fastapi", "uvicorn", "pydantic", "prometheus_client", "httpx"} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    for option in ("--max-queue", "--num-blocks", "--api-key", "--drain-seconds"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "missing", "message"),
    [
        (["serve"], "fastapi", "fastapi is missing: pip install 'jaxpaged[serve]'"),
        (["serve"], "prometheus_client", "prometheus-client is missing: pip install 'jaxpaged[serve]'"),
        (["bench", "serve"], "httpx", "httpx is missing: pip install 'jaxpaged[bench]'"),
        (["serve", "--port", "70000"], "", "port=70000 must be an int in [0, 65535]"),
        (["serve", "--max-queue", "-1"], "", "max_queue=-1 must be an int >= 0"),
        (["serve", "--num-blocks", "1"], "", "num_blocks=1 must be None or an int >= 2"),
        (["serve", "--chat-template", "/no/file"], "", "--chat-template '/no/file' cannot be read"),
        (["serve", "--tool-call-parser", "x"], "", "tool_call_parser='x' must be one of auto, deepseek_v3"),
        (
            ["serve", "--reasoning-parser", "x"],
            "",
            "reasoning_parser='x' must be one of auto, none, ",
        ),
        (["serve", "--allowed-origins", "[3]"], "", "allowed_origins='[3]' must be texts, JSON lists"),
        (["serve", "--nnodes", "2"], "", "nnodes=2, an option of vLLM's since"),
        (["serve", "--ssl-keyfile", "k"], "", "must be None or ''; use a proxy before the server"),
        (["serve", "--host", "256.0.0.1"], "", "host='256.0.0.1', port=8000 cannot be had"),
        (["bench", "serve", "--goodput", "ttft"], "", "--goodput 'ttft' must be one of ttft, tpot, e2e"),
        (["bench", "serve", "--rate", "0"], "", "rate=0.0 must be a number > 0"),
        (["bench", "serve", "--workload", "trace"], "", "--trace must be given with --workload trace"),
        (["bench", "serve", "--base-url", "http://127.0.0.1:9"], "", "does not list its models"),
    ],
)
def test_a_mistake_is_one_line(arguments, missing, message, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    assert cli.main(arguments) == 2
    _, err = capsys.readouterr()
    assert message in err
    assert len(err.splitlines()) == 1


def test_options_reach_the_server(monkeypatch, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ tools }}")
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    text = "serve --host ::1 --port 0 --served-model-name a b --max-queue 3 --drain-seconds 2 "
    text += f"--chat-template {tmp_path}/t.jinja --allowed-origins http://x --log-level error"
    args = cli.parser().parse_args(text.split())
    assert server_options(args) == ServerOptions(
        host="::1",
        port=0,
        api_keys=("secret",),
        served_model_names=("a", "b"),
        max_queue=3,
        drain_seconds=2.0,
        chat_template="{{ tools }}",
        allowed_origins=("http://x",),
        log_level="error",
    )
    args = cli.parser().parse_args(["serve", "--api-key", "x", "--api-key", "y"])
    assert server_options(args).api_keys == ("x", "y")
    text = """serve --allowed-origins ["http://x","y"] --lora-modules a=b {"name":"c","path":"d=e"}"""
    options = server_options(cli.parser().parse_args(text.split()))
    assert (options.allowed_origins, options.lora_modules) == (("http://x", "y"), ("a=b", "c=d=e"))


def test_a_process_tells_its_address_serves_and_ends_in_order(model):
    arguments = ["serve", "--model", model, *FAST, "--port", "0", "--host", "0.0.0.0"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxpaged", *arguments, "--served-model-name", "me"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"jaxpaged serves me at (http://0\.0\.0\.0:\d+)/v1, and .* at \1\n", line)
        assert found, line + process.stderr.read()
        url = found[1].replace("0.0.0.0", "127.0.0.1")
        body = {"prompt": "ab", "max_tokens": 100, "ignore_eos": True, "stream": True, "model": "me"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [each for each in lines if each][-1] == "data: [DONE]"
        assert process.wait(30) == 0
        out, err = process.communicate()
    finally:
        process.kill()
    assert out == ""
    warning, request = err.splitlines()
    assert "anybody who reaches 0.0.0.0 may use the model" in warning
    told = json.loads(request)
    assert (told["event"], told["level"], told["completion_tokens"]) == ("request", "info", 100)


def test_an_address_that_is_taken_is_told_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--model", "/no/such", "--port", port]) == 2
    assert "Address already in use" in capsys.readouterr().err


def bench(served, tmp_path, *arguments):
    base = ["bench", "serve", "--base-url", served.url, "--token-range", "3", "90", "--num-warmups", "1"]
    files = [tmp_path / name for name in ("lines", "requests", "plot.svg")]
    results = [f"--{name.stem}={name}" for name in files[1:]] + [f"--output={files[0]}"]
    lengths = ["--prompt-tokens", "4", "30", "--output-tokens", "5", "20"]
    assert cli.main([*base, *lengths, *results, *arguments]) == 0
    lines, requests = ([json.loads(line) for line in file.read_text().splitlines()] for file in files[:2])
    assert files[2].read_text().lstrip().startswith("<?xml")
    return lines, requests


def test_bench_closed_loop_sums_what_its_requests_say(served, tmp_path, capsys):
    levels = ["--concurrency", "1", "5", "--num-requests", "12"]
    lines, requests = bench(served, tmp_path, *levels, "--goodput", "ttft:60000", "e2e:0.001")
    assert [line["concurrency"] for line in lines] == [1, 5]
    for line in lines:
        its = [each for each in requests if each["concurrency"] == line["concurrency"]]
        assert (line["requests"], line["failed"], len(its)) == (12, 0, 12)
        assert line["output_tokens"] == sum(each["num_output_tokens"] for each in its)
        assert all(5 <= each["num_output_tokens"] <= 20 for each in its)
        ttft = sorted(1000 * (each["chunks_s"][0] - each["due_s"]) for each in its)
        assert abs(line["ttft_ms"]["p50"] - (ttft[5] + ttft[6]) / 2) < 0.01
        assert line["ttft_ms"]["p99"] <= line["e2e_ms"]["p99"]
        assert line["goodput"]["share"] == 0
        speed = line["output_tokens"] / max(each["ended_s"] for each in its)
        assert abs(line["output_tokens_per_s"] - speed) < 0.01 * speed
    most = [
        max(sum(a["sent_s"] <= b["sent_s"] < a["ended_s"] for a in its) for b in its)
        for its in ([r for r in requests if r["concurrency"] == n] for n in (1, 5))
    ]
    assert most == [1, 5]
    assert "1 clients:" in capsys.readouterr().out


def test_bench_open_loop_keeps_its_times_and_prefixes_are_shared(served, tmp_path):
    work = ["--workload", "shared-prefix", "--shared-tokens", "48", "--num-prefixes", "2"]
    lines, requests = bench(served, tmp_path, *work, "--rate", "40", "--num-requests", "20")
    [line] = lines
    assert line["failed"] == 0
    assert line["cached_tokens"] >= 16 * 48
    due = [each["due_s"] for each in requests]
    assert due == sorted(due)
    assert 0.2 < due[-1] < 1.5
    assert all(each["sent_s"] >= each["due_s"] - 0.01 for each in requests)


def test_bench_replays_a_trace(served, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 1000, 40, [1, 2]), (400, 1500, 80, [1, 2, 3]), (800, 512, 40, [1])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    work = ["--workload", "trace", "--trace", str(trace), "--length-scale", "0.05", "--rate", "4"]
    lines, requests = bench(served, tmp_path, *work)
    assert [each["num_prompt_tokens"] for each in requests] == [50, 75, 26]
    assert [each["num_output_tokens"] for each in requests] == [2, 4, 2]
    assert [each["due_s"] for each in requests] == [0, 0.1, 0.2]
    assert lines[0]["cached_tokens"] >= 48, "the second begins as the first"
