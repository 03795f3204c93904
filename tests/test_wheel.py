"""A wheel, installed alone in a fresh environment, answers from the command line and from Python."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests import tiny
from tests.marks import slow_and_nightly
from tests.tiny_gguf import write_gguf

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys, jaxpaged
assert "site-packages" in jaxpaged.__file__, jaxpaged.__file__
llm = jaxpaged.LLM(sys.argv[1], num_blocks=65, max_num_seqs=4, max_num_batched_tokens=68)
[result] = llm.generate([[5, 6]], jaxpaged.SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
print(result.outputs[0].token_ids)
"""
ORACLES = """
import importlib.util
import numpy as np
from jaxpaged.research.verify import verify_kernel
from jaxpaged.research.verify.oracles import cache_ops, engine
assert "site-packages" in cache_ops.__file__, cache_ops.__file__
assert importlib.util.find_spec("reference") is None
assert verify_kernel(cache_ops.copy_blocks, "copy_blocks").ok
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("installed", slow_and_nightly(["its own", "those of here"], ["those of here"]))
def test_a_wheel_on_its_own_answers(installed, tmp_path):
    """Run it in another directory with nothing on the path, out of reach of the source tree.

    The packages that it needs are installed as it names them, or read where they are installed already.
    """
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "wheels", ROOT, cwd=tmp_path)
    [wheel] = (tmp_path / "wheels").glob("jaxpaged-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    binaries = tmp_path / "venv" / "bin"
    pip = [binaries / "pip", "install", "--quiet", "--disable-pip-version-check"]
    if installed == "those of here":
        pip.append("--no-deps")
        [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
        # A folder that such a file names comes last, and files like it in that folder are not read: so the
        # source tree, which is installed there by one, stays out of reach.
        (packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(*pip, wheel, cwd=tmp_path)
    model = write_gguf(tmp_path / "tiny.gguf")
    want = tiny.reference_answer((5, 6), 3)
    assert json.loads(run(binaries / "python", "-c", PROGRAM, model, cwd=tmp_path)) == want
    (tmp_path / "prompts").write_text(json.dumps({"prompt_token_ids": [5, 6]}))
    arguments = ["generate", "--model", model, "--prompts-file", "prompts", "--max-tokens", "3", "--json"]
    arguments += ["--num-blocks=65", "--max-num-seqs=4", "--max-num-batched-tokens=68"]  # compiled before
    answer = json.loads(run(binaries / "jaxpaged", *arguments, cwd=tmp_path))
    assert answer["token_ids"] == want
    run(binaries / "python", "-c", ORACLES, cwd=tmp_path)
    assert run(binaries / "jaxpaged", "--version", cwd=tmp_path).startswith("jaxpaged ")
