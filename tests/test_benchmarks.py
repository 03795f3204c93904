"""Promises of the benchmarks that can be tested without timing anything."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import check_kernels, device, paper, record, vllm_examples
from jaxpaged.research.verify.cases.decode import case
from pallas_kernels import layouts, ops
from tests.kernels import checks
from tests.lab.tracing import conversations, write

FOLDER = Path(__file__).parents[1] / "benchmarks"


def test_a_benchmark_with_flags_is_imported_by_no_other():
    """absl's flags are one to a process: two modules may not both define --out."""
    trees = {file.stem: ast.parse(file.read_text()) for file in FOLDER.glob("*.py")}
    with_flags = {name for name, tree in trees.items() if "DEFINE_" in ast.unparse(tree)}
    assert {"check_kernels", "decode_attention", "decode_shapes", "step_overhead"} <= with_flags
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("benchmarks"):
                _, _, module = str(node.module).partition(".")
                assert not with_flags & ({module} if module else {alias.name for alias in node.names}), name


# A machine with a GPU may lack what gpu.sh does not ask for: all packages but the named and what these need.
HIDING = """
import importlib.abc, importlib.metadata, re, sys
def needed(names):
    known, todo = set(), [*names]
    while todo:
        name = re.sub("[-_.]+", "-", todo.pop()).lower()
        if name not in known:
            known.add(name)
            try:
                requires = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            todo += [re.match("[A-Za-z0-9._-]+", r)[0] for r in requires if "extra ==" not in r]
    return known
kept = needed(NEEDED)
modules = importlib.metadata.packages_distributions()
hidden = {m for m, d in modules.items() if not {re.sub("[-_.]+", "-", x).lower() for x in d} & kept}
hidden -= {m for m in hidden if m.startswith("_")} | {"jaxpaged", "pallas_kernels"}
class Hiding(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hiding())
"""


@pytest.fixture
def hiding(tmp_path):
    """Return folders for PYTHONPATH that hide all packages which gpu.sh does not ask for."""
    [line] = [x for x in (FOLDER / "gpu.sh").read_text().splitlines() if x.startswith("needs ")]
    names = ["absl-py" if name == "absl" else name for name in line.split()[1:]]
    folder = tmp_path / "hiding"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDING.replace("NEEDED", repr(names)))
    return f"{folder}{os.pathsep}{FOLDER.parent}"


def test_what_runs_on_a_gpu_imports_only_what_is_asked_for(hiding):
    named = re.findall(r"step \d+ \S+ (\w+)", (FOLDER / "gpu.sh").read_text())
    modules = sorted({*named, "device", "record"})
    assert {"check_kernels", "decode_shapes", "products", "step_overhead"} <= {*modules}
    code = f"""
import importlib
from absl import flags
for name in {modules}:
    importlib.import_module("benchmarks." + name)
    for flag in list(flags.FLAGS):  # two modules may not both define --out
        delattr(flags.FLAGS, flag)
try:
    import re2
except ModuleNotFoundError:
    print("hidden")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": hiding, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "hidden\n", done.stderr[-2000:]


def test_a_step_that_hangs_keeps_what_was_measured(tmp_path):
    """A process that ignores to be ended is killed; the steps after it run."""
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh
case "$2" in benchmarks.*) ;; *) exit 0 ;; esac
module=$2
while [ $# -gt 0 ]; do [ "$1" = --out ] && echo "{\\"what\\": \\"$module\\"}" >> "$2"; shift; done
[ $module != benchmarks.decode_attention ] || { trap '' TERM; sleep 60; }
""")
    python.chmod(0o755)
    done = gpu_sh(tmp_path / "out", PYTHON=str(python), STEP_SECONDS="1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "gpu.sh: not done, wrong, or stopped: decode_attention"
    lines = (tmp_path / "out" / "first.jsonl").read_text().splitlines()
    order = [json.loads(line)["what"].removeprefix("benchmarks.") for line in lines]
    assert order[:3] == ["check_kernels", "decode_attention", "attention_peers"]
    assert order[-3:] == ["prompt_attention", "step_overhead", "check_kernels"]


def test_one_case_is_chosen_by_its_name():
    decode, of_tiles, products = check_kernels.chosen(["decode"], ["group_3"])
    assert (decode, of_tiles, products) == (["group_3"], [], [])
    with pytest.raises(ValueError, match=r"case=\['9x512x128xbfloat16'\] must be among"):
        check_kernels.chosen(["decode"], ["9x512x128xbfloat16"])


def gpu_sh(*arguments, **environment):
    return subprocess.run(
        ["sh", FOLDER / "gpu.sh", *map(str, arguments)],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_everything_for_a_gpu_runs_tiny_on_a_cpu(tmp_path, hiding):
    """Each mode's results are there, checked first, and in the table, with no package but those asked for."""
    done = gpu_sh(tmp_path, "--smoke", PYTHONPATH=hiding)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    found = {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in tmp_path.glob("*.jsonl")
    }
    assert set(found) == {"first", "decode", "prefill", "engine", "products"}
    rates = {"decode": "share_of_4.8_tb_per_s", "prefill": "share_of_790_tflops"}
    peers = {name: {"flash attention 3"} for name in rates} | {"products": {"cublas"}}
    for name, rate in (rates | {"products": "share_of_790_tflops"}).items():
        lines = found[name]
        checked = [i for i, line in enumerate(lines) if "ok" in line]
        timed = [i for i, line in enumerate(lines) if rate in line]
        assert min(checked) < min(timed)
        assert all(lines[i]["ok"] for i in checked)
        assert not [line for line in lines if line.get("what", "").startswith("jax") and rate not in line
                    and "skipped" not in line]  # fmt: skip
        assert {line.get("what") for line in lines} >= peers[name]
    assert [(line["model"], line.get("loop_over_layers")) for line in found["engine"]] == [
        ("constant", None),
        ("tiny", True),
    ]
    assert found["engine"][-1]["floor_tokens_per_s"] > found["engine"][-1]["tokens_per_s"]
    assert "share_of_790_tflops" in done.stdout.splitlines()[-1] + done.stdout


@pytest.mark.parametrize("mode", ["", "--products"])
def test_a_gpu_that_jax_does_not_use_is_a_failure(mode, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho NVIDIA H200\n")
    smi.chmod(0o755)
    done = gpu_sh(tmp_path / "out", *filter(None, [mode]), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "nvidia-smi lists NVIDIA H200, but JAX uses cpu, which is no NVIDIA GPU since Ampere" in line


def test_a_card_is_measured_by_its_own_peak(monkeypatch):
    def found(kind, capability):
        used = SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda: [used])
        monkeypatch.setattr(device.ptxas, "version", lambda: (12, 9, 86))
        peak = device.peak()
        return device.require_gpu()["target"], peak.share_of_bytes(1e12), peak.share_of_flops(1e14)

    for kind, capability, bandwidth, flops in (
        (
            "NVIDIA A100-SXM4-80GB",
            "8.0",
            {"share_of_2.039_tb_per_s": 0.4904},
            {"share_of_312_tflops": 0.3205},
        ),
        ("NVIDIA A100-SXM4-40GB", "8.0", {}, {}),
        ("NVIDIA L4", "8.9", {"share_of_0.3_tb_per_s": 3.3333}, {"share_of_121_tflops": 0.8264}),
        ("NVIDIA L40S", "8.9", {}, {}),
        ("NVIDIA H200", "9.0", {"share_of_4.8_tb_per_s": 0.2083}, {"share_of_790_tflops": 0.1266}),
    ):
        assert found(kind, capability)[1:] == (bandwidth, flops)
    with pytest.raises(SystemExit, match="JAX uses Tesla T4, which is no NVIDIA GPU since Ampere"):
        found("Tesla T4", "7.5")


def test_a_repeat_is_timed_by_its_kernels_alone():
    traced = [("copy", 9.0), ("my_kernel", 1.0), ("my_kernel", 2.0), ("copy", 9.0)] * 2
    assert device.by_repeat(traced, 2, 2, "kernel") == (1.5e-3, 1.5e-3)
    assert device.by_repeat(traced, 2, 2, "renamed") == (10.5e-3, 10.5e-3)
    with pytest.raises(RuntimeError, match="3 kernels were traced in repeats=2"):
        device.by_repeat(traced[:3], 2, 1, "")


def test_tables_have_a_line_for_each_result():
    lines = [
        {"what": "a", "us": 1.5, "gpu": "x"},
        {"what": "b", "ok": True},
        {"what": "long", "us": {"median": 2}},
    ]
    assert record.tables(lines) == "what  us\na     1.5\nlong  2\n\nwhat  ok\nb     True"


def test_a_papers_table_is_one_in_three_forms(tmp_path):
    rows = [
        {"layout": "a_b", "bytes_per_token": 23040, "error": 0.0, "perplexity": None, "kernels": ["xla"]},
        {
            "layout": "m:C%",
            "bytes_per_token": 6480,
            "error": 0.01234,
            "kernels": ["xla", "native"],
            "more": 1,
        },
    ]
    csv, markdown, latex = (file.read_text() for file in paper.write(str(tmp_path / "new" / "t"), rows))
    assert csv == "layout,bytes_per_token,error,kernels\na_b,23040,0.0,xla\nm:C%,6480,0.01234,xla native\n"
    assert markdown.splitlines() == [
        "| layout | bytes a token | error of K and V | read by |",
        "| --- | ---: | ---: | --- |",
        "| a_b | 23040 | 0.00e+00 | xla |",
        "| m:C% | 6480 | 1.23e-02 | xla, native |",
    ]
    assert latex.splitlines() == [
        r"\begin{tabular}{lrrl}",
        r"\toprule",
        r"layout & bytes a token & error of K and V & read by \\",
        r"\midrule",
        r"a\_b & 23040 & 0.00e+00 & xla \\",
        r"m:C\% & 6480 & 1.23e-02 & xla, native \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_errors_and_readers_are_those_of_the_layout():
    exact, whole = layouts.choose("token_major"), layouts.choose("int8_per_token")
    assert paper.error(exact, 64, 2, 64, jnp.dtype("float32")) == 0
    # Rounding to steps of 1/127 of a head's largest number, which is some 2.6: 2.6 / 127 / 12**0.5 = 0.0059.
    assert 0.004 < paper.error(whole, 64, 2, 64, jnp.dtype("float32")) < 0.008
    assert "mosaic_gpu" in paper.kernels(exact, 64, 64, jnp.dtype("bfloat16"))
    assert "mosaic_gpu" not in paper.kernels(exact, 1, 64, jnp.dtype("bfloat16"))
    assert "mosaic_gpu" not in paper.kernels(exact, 64, 48, jnp.dtype("bfloat16"))


@pytest.mark.nightly
def test_layouts_of_others_are_measured_by_name(tmp_path):
    """The table of a layout that lives outside, beside a built-in one."""
    (tmp_path / "outside.py").write_text(
        "from pallas_kernels.layouts.head_major import HeadMajor\n\n\nclass Mine(HeadMajor):\n    pass\n"
    )
    flags = ["--smoke", "--layouts=token_major,outside:Mine", "--block_sizes=16", f"--table={tmp_path / 't'}"]
    environment = os.environ | {"PYTHONPATH": f"{FOLDER.parent}:{tmp_path}"}
    command = [sys.executable, "-m", "benchmarks.layouts", *flags]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    head, *lines = (tmp_path / "t.csv").read_text().splitlines()
    assert head == "layout,bytes_per_token,error,tokens_per_s,kernels"
    assert [line.split(",")[0] for line in lines] == ["token_major", "outside:Mine"]


def test_a_wrong_kernel_is_not_ok(monkeypatch):
    """XLA stands in for the kernels, which a CPU does not have. One compilation serves both cases."""
    traced = []

    @functools.partial(jax.jit, static_argnames=checks.STATIC)
    def right(**arguments):
        traced.append(arguments)
        return ops.paged_attention_v1(**arguments | {"implementation": "xla"})

    def plus(error):
        return lambda **arguments: right(**arguments) + error

    def raising(**_):
        raise NotImplementedError("no such kernel")

    nan_in_padding = jnp.zeros((5, 1, 1)).at[4].set(jnp.nan)
    programs = {"right": right, "wrong": plus(0.1), "nan": plus(nan_in_padding), "none": raising}
    monkeypatch.setattr(checks, "PROGRAMS", programs)
    lines = check_kernels.check(("around_a_block", "one_token"), interpret=False)
    assert [line["ok"] for line in lines] == 2 * [True, False, False, False]
    assert len(traced) == 1
    refused = NotImplementedError("mosaic_gpu paged attention on sm_89 does not serve head_dim=256")
    assert check_kernels.failure(refused) == {"skipped": str(refused)}


def test_the_cases_are_served():
    assert all(checks.is_served(case(name)) for name in check_kernels.CASES)


@pytest.mark.nightly
def test_prompts_hit_more_where_they_are_routed_by_their_beginnings(tmp_path):
    trace = write(tmp_path / "trace.jsonl", conversations(60))
    command = [
        sys.executable,
        "-m",
        "benchmarks.routing",
        "--trace",
        trace,
        "--replicas=2",
        "--cache_tokens=8192",
    ]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=True)
    lines = {line["routing"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert [*lines] == ["in_turns", "load", "prefix_then_load"]
    assert all(sum(line["requests_by_replica"]) == 60 for line in lines.values())
    best = lines["prefix_then_load"]
    assert best["hit_rate"] > 1.2 * max(lines["in_turns"]["hit_rate"], lines["load"]["hit_rate"]) > 0
    assert min(best["requests_by_replica"]) > 10


SCRIPT = """import vllm
from vllm.config import PoolerConfig
    from vllm import LLM  # vllm
llm = LLM(model="facebook/opt-125m", chat_template="a/b")
MODEL_NAME = "Qwen/Qwen3-0.6B"
"""


def test_a_script_of_vllms_is_changed_in_its_imports_and_names_alone():
    ours = vllm_examples.with_our_imports(SCRIPT)
    assert ours.splitlines()[:3] == [
        "import jaxpaged as vllm",
        "from jaxpaged.config import PoolerConfig",
        "    from jaxpaged import LLM  # vllm",
    ]
    named = vllm_examples.with_names(ours, "smollm2")
    assert 'LLM(model="smollm2", chat_template="a/b")' in named
    assert 'MODEL_NAME = "smollm2"' in named


@pytest.mark.parametrize(
    ("code", "output", "judged"),
    [
        (0, "an answer", ("unchanged", "")),
        (None, "", ("fails", "it took too long")),
        (1, "Traceback\n  a\njaxpaged.checks.InputError: a=1 must be 2", ("refused", "a=1 must be 2")),
        (
            1,
            "ImportError: vLLM's a is not served: b (use c)",
            ("refused", "vLLM's a is not served: b (use c)"),
        ),
        (
            1,
            "ModuleNotFoundError: No module named 'lmcache'",
            ("package missing", "No module named 'lmcache'"),
        ),
        (1, "ImportError: cannot import name 'a'", ("fails", "ImportError: cannot import name 'a'")),
        (1, "TypeError: f() takes 1\nlast words", ("fails", "TypeError: f() takes 1")),
        (
            1,
            "openai.BadRequestError: Error code: 400 - {'error': {'message': 'no images', 'type': 'a'}}",
            ("refused", "no images"),
        ),
    ],
)
def test_a_scripts_end_is_judged_by_its_last_error(code, output, judged):
    assert vllm_examples.judged(code, output) == judged


def test_the_page_of_vllms_examples_tells_the_results():
    told = json.loads(vllm_examples.RESULTS.read_text())
    lines = told["results"]
    assert vllm_examples.PAGE.read_text() == vllm_examples.page(lines, told["version"])
    assert len({line["script"] for line in lines}) == len(lines) == 96
    assert {line["result"] for line in lines} <= vllm_examples.MEANINGS.keys()
    bare = re.compile(r"[\w.]*(ImportError|ModuleNotFoundError|AttributeError|TypeError)\b")
    assert [line for line in lines if line["result"] == "fails" and bare.match(line["reason"])] == []
