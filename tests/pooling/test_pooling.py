"""Vectors, classes and scores are transformers', in any company; an oracle says what hidden states become."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged import LLM
from jaxpaged.api.vllm_helpers import PoolerConfig
from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.models import loading
from jaxpaged.pooling import head
from jaxpaged.pooling.llm import Pooling
from jaxpaged.pooling.outputs import PoolingParams
from reference import pooling as oracle

GOLDENS = Path(__file__).parents[1] / "goldens" / "pooling"
CAUSAL, CLASSIFIER = GOLDENS / "qwen3", GOLDENS / "qwen3_classifier"
GOLDEN = json.loads((CAUSAL / "golden.json").read_text())
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
# Float32 in other orders of sums, over two layers: ten times what is seen.
CLOSE = {"rtol": 0, "atol": 2e-5}


def pooling(path=CAUSAL, pooler_config=None, overrides=None, **options):
    checkpoint = loading.open_checkpoint(path)
    config = EngineConfig(**{"dtype": "float32", "max_num_seqs": 4, "block_size": 8} | options)
    return Pooling(config, checkpoint, head.read(checkpoint, pooler_config, overrides))


@pytest.fixture(scope="module")
def embedder():
    return pooling()


@pytest.fixture(scope="module")
def reranker():
    return pooling(overrides=RERANKER)


def set_head(model, head):
    """Put another head over the same compiled model."""
    model.engine.head = head
    model.engine._weights.cache_clear()


def with_head(model, **changes):
    """Return the vectors of the same compiled model with another head."""
    before = model.engine.head
    set_head(model, dataclasses.replace(before, **changes))
    try:
        return [out.outputs.embedding for out in model.embed(GOLDEN["texts"])]
    finally:
        set_head(model, before)


def test_vectors_are_those_of_transformers(embedder):
    found = embedder.embed(GOLDEN["texts"])
    assert [out.prompt_token_ids for out in found] == GOLDEN["token_ids"], (
        "with the end that the tokenizer adds"
    )
    np.testing.assert_allclose([out.outputs.embedding for out in found], GOLDEN["last"], **CLOSE)
    assert found[0].outputs.hidden_size == 32
    np.testing.assert_allclose(with_head(embedder, method="MEAN"), GOLDEN["mean"], **CLOSE)
    np.testing.assert_allclose(with_head(embedder, method="CLS", normalise=False), GOLDEN["first"], **CLOSE)


def test_what_is_made_of_hidden_states_is_the_oracles(embedder):
    texts = GOLDEN["texts"]
    each = [
        out.outputs.data
        for out in embedder.encode(texts, PoolingParams(use_activation=False), pooling_task="token_embed")
    ]
    assert [its.shape for its in each] == [(len(ids), 32) for ids in GOLDEN["token_ids"]]
    for method in oracle.METHODS:
        plain = [oracle.pooled(hidden, method) for hidden in each]
        np.testing.assert_allclose(with_head(embedder, method=method, normalise=False), plain, **CLOSE)
        found = with_head(embedder, method=method)
        np.testing.assert_allclose(found, [oracle.normalised(vector) for vector in plain], **CLOSE)


def test_a_text_has_the_same_bits_in_any_company(embedder):
    """Alone, beside others that share its passes, in another row, and in a wave of its own."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 32, n).tolist() for n in (3, 33, 70, 1, 32, 100, 5, 31, 64)]
    for method in ("LAST", "MEAN"):
        set_head(embedder, dataclasses.replace(embedder.engine.head, method=method))
        together = [out.outputs.embedding for out in embedder.embed(prompts)]
        assert [embedder.embed(prompt)[0].outputs.embedding for prompt in prompts] == together
        assert [out.outputs.embedding for out in embedder.embed(prompts[::-1])] == together[::-1]
    set_head(embedder, dataclasses.replace(embedder.engine.head, method="LAST"))


def test_a_wave_holds_what_the_cache_does(embedder):
    size = 8
    texts = [embedder.engine.admit([3] * n, PoolingParams()) for n in (128, 1, 1, 1, 1, 1)]
    assert [len(wave) for wave in embedder.engine.waves(texts)] == [4, 2], "as many as there are rows"
    embedder.engine.num_blocks, before = 1 + 128 // size + 1, embedder.engine.num_blocks
    assert [len(wave) for wave in embedder.engine.waves(texts)] == [2, 4], (
        "and as many as there are blocks for"
    )
    embedder.engine.num_blocks = before


def test_scores_of_vectors_are_their_cosines(embedder):
    texts = GOLDEN["texts"]
    want = np.array(GOLDEN["last"]) @ np.array(GOLDEN["last"]).T
    found = embedder.score(texts[0], texts)
    np.testing.assert_allclose([out.outputs.score for out in found], want[0], **CLOSE)
    found = embedder.score(texts, texts[::-1])
    np.testing.assert_allclose([out.outputs.score for out in found], np.diag(want[:, ::-1]), **CLOSE)
    with pytest.raises(InputError, match=r"^data_1 has 2 texts, must have one, or as many as data_2"):
        embedder.score(texts[:2], texts)


def test_a_reranker_of_two_tokens_gives_the_second_ones_chance(reranker):
    texts = GOLDEN["texts"]
    found = [out.outputs.probs for out in reranker.classify(texts)]
    np.testing.assert_allclose(np.array(found)[:, 0], GOLDEN["yes"], **CLOSE)
    [found] = reranker.score("the quick brown f", ["ox"])
    assert found.prompt_token_ids == GOLDEN["token_ids"][1], "both texts, and one end"
    np.testing.assert_allclose(found.outputs.score, GOLDEN["yes"][1], **CLOSE)
    [logit] = reranker.classify(texts[1], PoolingParams(use_activation=False))[0].outputs.probs
    np.testing.assert_allclose(found.outputs.score, oracle.sigmoid(np.array(logit)), rtol=1e-6)


def test_classes_are_those_of_transformers(tmp_path):
    golden = json.loads((CLASSIFIER / "golden.json").read_text())
    model = pooling(CLASSIFIER)
    found = model.classify(golden["token_ids"])
    assert found[0].outputs.num_classes == 3
    np.testing.assert_allclose([out.outputs.probs for out in found], golden["probs"], **CLOSE)
    logits = model.encode(golden["token_ids"], PoolingParams(use_activation=False), pooling_task="classify")
    np.testing.assert_allclose(oracle.softmax(logits[2].outputs.data), golden["probs"][2], **CLOSE)
    with pytest.raises(
        InputError, match=r"^pooling_task='embed' must be 'classify' or 'token_embed': .* classes$"
    ):
        model.embed([[3]])
    with pytest.raises(InputError, match=r"^num_labels=3 must be 1 for scores"):
        model.score("a", "b")


def test_a_directory_of_sentence_transformers_says_how(tmp_path):
    """Tensors without the prefix, as such files have them; the modules' word for pooling and length."""
    folder = Path(shutil.copytree(CAUSAL, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): x for name, x in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    prefix = "sentence_transformers.models."
    modules = [
        {"type": f"{prefix}Transformer", "path": ""},
        {"type": f"{prefix}Pooling", "path": "1_Pooling"},
    ]
    (folder / "1_Pooling").mkdir()

    def read(said, modules=modules):
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
        found = head.read(loading.open_checkpoint(folder))
        return found.method, found.normalise

    said = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "include_prompt": True}
    assert head.is_for_pooling(folder) is False
    assert read(said | {"pooling_mode_mean_tokens": True}) == ("MEAN", False)
    assert head.is_for_pooling(folder) is True
    with_length = [*modules, {"type": f"{prefix}Normalize", "path": "2_Normalize"}]
    assert read(said | {"pooling_mode_lasttoken": True}, with_length) == ("LAST", True)
    assert read({"pooling_mode": "lasttoken"}, with_length) == ("LAST", True)
    for wrong, its_modules, why in (
        ({"pooling_mode_max_tokens": True}, modules, "pooling_mode=['max_tokens'] must be one of lasttoken"),
        ({}, modules, "pooling_mode=[] must be one of"),
        ({}, [*modules, {"type": "x.Dense", "path": "3"}], "pooling_mode=[]"),
        (said, [{"type": "x.Dense", "path": "3"}], "a module of type 'Dense' is not served"),
        (said, [{"type": "x.Pooling", "path": "../.."}], "path of a module='../..' must be inside"),
        (said, {"type": 3}, "modules.json cannot be read"),
    ):
        with pytest.raises(InputError) as error:
            read(wrong, its_modules)
        assert str(error.value).startswith(f"model={str(folder)!r}: {why}")
    read(said | {"pooling_mode_lasttoken": True}, with_length)
    found = pooling(folder).embed(GOLDEN["texts"])
    np.testing.assert_allclose([out.outputs.embedding for out in found], GOLDEN["last"], **CLOSE)


def test_a_vector_may_be_shorter_where_the_model_is_trained_for_it(embedder):
    texts = GOLDEN["texts"]
    with pytest.raises(InputError, match=r"^prompt 0: dimensions=8 must be None or one of \[32\], that"):
        embedder.embed(texts, PoolingParams(dimensions=8))
    before = embedder.engine.head
    for sizes, right, wrong in (((8, 16), 8, 9), (None, 9, 33)):
        embedder.engine.head = dataclasses.replace(before, dimensions=sizes)
        found = embedder.embed(texts, PoolingParams(dimensions=right))
        want = [oracle.normalised(np.array(vector[:right])) for vector in GOLDEN["last"]]
        np.testing.assert_allclose([out.outputs.embedding for out in found], want, **CLOSE)
        with pytest.raises(InputError, match=rf"^prompt 0: dimensions={wrong} must be None or "):
            embedder.embed(texts, PoolingParams(dimensions=wrong))
    embedder.engine.head = before


def test_long_texts_are_cut_only_where_it_is_asked_for(embedder):
    long = [3] * 200
    with pytest.raises(InputError, match=r"^the prompt has 200 tokens, must have at most max_model_len=128"):
        embedder.embed([long])
    assert len(embedder.embed([long], PoolingParams(truncate_prompt_tokens=-1))[0].prompt_token_ids) == 128
    ids = [*long, 4, 5]
    assert embedder.embed([ids], PoolingParams(truncate_prompt_tokens=2))[0].prompt_token_ids == [4, 5]


def test_each_token_has_classes_and_a_pair_may_have_a_template(reranker):
    text = GOLDEN["texts"][0]
    classes, hidden = (
        reranker.encode(text, pooling_task=task)[0].outputs.data for task in ("token_classify", "token_embed")
    )
    plain = reranker.encode(text, PoolingParams(use_activation=False), pooling_task="token_embed")
    logits = plain[0].outputs.data @ reranker.engine.head.classifier.T
    np.testing.assert_allclose(classes, 1 / (1 + np.exp(-logits)), **CLOSE)
    assert hidden.shape == (len(classes), 32)
    [whole] = reranker.classify(text)
    np.testing.assert_allclose(classes[-1], whole.outputs.probs, **CLOSE)
    template = "{% for m in messages %}{{ 'a' if m.role == 'query' else 'b' }} {{ m.content }} {% endfor %}"
    [found] = reranker.score("the", ["dog"], chat_template=template)
    [want] = reranker.classify("a the b dog ")
    assert found.outputs.score == want.outputs.probs[0]
    assert found.prompt_token_ids == want.prompt_token_ids
    with pytest.raises(InputError, match="^chat_template cannot be rendered: .*: a reason"):
        reranker.score("the", ["dog"], chat_template="{{ raise_exception('a reason') }}")


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda model: model.score("a", "b", chat_template="a"), "chat_template='a' must be None for a"),
        (lambda model: model.encode("a", pooling_task="token_classify"), "pooling_task='token_classify'"),
        (lambda _: PoolingParams(late_chunking_params=3), "late_chunking_params=3 must be None: .*; use"),
        (lambda _: PoolingParams(extra_kwargs={"a": 1}), "extra_kwargs={'a': 1} must be None or {}"),
        (lambda _: pooling(pooler_config={"dimensions": 8}), "pooler_config: dimensions=8, .* use Pooling"),
        (lambda model: model.embed(""), "prompt='' must be a text that is not empty"),
        (lambda model: model.embed(["a", ""]), "prompt 1: prompt='' must be a text that is not empty"),
        (lambda model: model.embed([[]]), r"prompt=\[\] must be a list of token ids that is not empty"),
        (lambda model: model.embed([[1, 32]]), r"prompt token=32 must be a token id, an int in \[0, 32\)"),
        (lambda model: model.embed([[1.5]]), r"prompt=\[1.5\] must be a list of token ids"),
        (lambda model: model.embed(7), "prompts=7 must be a prompt or a list of prompts"),
        (lambda model: model.classify("a"), "pooling_task='classify' must be 'embed' or 'token_embed'"),
        (lambda model: model.encode("a", pooling_task="rank"), "pooling_task='rank' must be one of embed"),
        (lambda model: model.embed(["a", "b"], [None]), "pooling_params has 1 entries, must have one for"),
        (lambda model: model.embed("a", 3), "pooling_params=3 must be a PoolingParams"),
        (lambda _: PoolingParams(dimensions=0), "dimensions=0 must be None or a positive int"),
        (lambda _: PoolingParams(truncate_prompt_tokens=0), "truncate_prompt_tokens=0 must be None, -1 or"),
        (lambda _: pooling(tensor_parallel_size=2), "tensor_parallel_size=2 must be 1 with runner='pooling'"),
        (lambda _: pooling(num_blocks=8), "max_model_len=128 must be at most 56, the tokens that 8"),
        (lambda _: pooling(pooler_config={"pooling_type": "STEP"}), "pooling_type='STEP' must be one of"),
        (lambda _: pooling(overrides={"vocab_size": 3}), "hf_overrides: key='vocab_size' must be one of"),
        (
            lambda _: pooling(overrides=RERANKER | {"classifier_from_token": ["no", "maybe"]}),
            ".*: classifier_from_token='maybe' must be a token of the vocabulary",
        ),
        (
            lambda _: pooling(overrides={"architectures": ["Qwen3ForTokenClassification"]}),
            ".*: architectures='Qwen3ForTokenClassification' must be a causal model, or one that ends",
        ),
        (
            lambda _: pooling(overrides={"architectures": ["Qwen3ForSequenceClassification"]}),
            ".*: the weights lack 'score.weight', which a classifier has",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(ask, why, embedder):
    with pytest.raises(InputError, match=f"^{why}"):
        ask(embedder)


def test_llm_pools_what_is_made_for_it(embedder, tmp_path):
    """A generating model generates; each names the other's runner when it is asked for the other task."""
    shutil.copytree(CLASSIFIER, tmp_path / "classifier")
    llm = LLM(tmp_path / "classifier", dtype="float32", max_num_seqs=4, block_size=8, keep_programs=False)
    [found] = llm.classify([GOLDEN["token_ids"][1]])
    assert found.outputs.num_classes == 3
    with pytest.raises(InputError, match=r"^runner='pooling' must be 'generate' for a model to answer$"):
        llm.generate([[3]])
    options = {"dtype": "float32", "max_num_seqs": 4, "block_size": 8, "runner": "pooling"}
    llm = LLM(CAUSAL, **options, pooler_config=PoolerConfig(task="embed", seq_pooling_type="MEAN"))
    assert llm.llm_engine.vllm_config.model_config.hf_text_config.hidden_size == 32
    vectors = [out.outputs.embedding for out in llm.embed(GOLDEN["texts"])]
    np.testing.assert_allclose(vectors, GOLDEN["mean"], **CLOSE)
    assert len(llm.encode("a", pooling_task="token_embed")[0].outputs.data) == 2
    assert llm.score("a", "a")[0].outputs.score == pytest.approx(1)
    with pytest.raises(InputError, match=r"^pooler_config=.* must be None unless runner is 'pooling'$"):
        LLM(CAUSAL, pooler_config={"pooling_type": "MEAN"})
