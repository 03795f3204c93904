"""A pooling model as a server: what the openai client and Cohere's form of asking get."""

import asyncio
import base64
import json
import threading
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from jaxpaged import LLM
from jaxpaged.pooling.encoding import (
    EMBED_DTYPES,
    ENDIANNESS,
    MetadataItem,
    build_metadata_items,
    from_bytes,
    to_bytes,
)
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.pooling_app import create_pooling_app
from jaxpaged.serve.replies import ApiError
from jaxpaged.serve.server import Server, bind, url

GOLDENS = Path(__file__).parents[1] / "goldens" / "pooling"
SIZES = {"dtype": "float32", "max_num_seqs": 4, "block_size": 8}
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


class Served:
    """A server over one of the models, in a thread."""

    def __init__(self, folder, **options):
        self.pooling = LLM(GOLDENS / folder, **SIZES, runner="pooling", **options).pooling
        chosen, ready = ServerOptions(port=0, max_queue=1), threading.Event()
        self.bound = bind(chosen)
        app = create_pooling_app(self.pooling, "tiny", chosen)
        self.service, self.server = app.state.service, Server(app, chosen, ready.set)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.bound]}, daemon=True)
        self.thread.start()
        assert ready.wait(30)
        self.http = httpx.Client(base_url=url(chosen, self.bound), timeout=30)

    def post(self, path, status=200, **body):
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def close(self):
        self.http.close()
        self.server.should_exit = True
        self.thread.join(30)
        self.bound.close()
        self.service.shutdown()


@pytest.fixture(scope="module")
def embedder():
    served = Served("qwen3")
    yield served
    served.close()


@pytest.fixture(scope="module")
def reranker():
    served = Served("qwen3", hf_overrides=RERANKER)
    yield served
    served.close()


TEXTS = ["the quick brown fox", "a"]


def test_the_openai_client_gets_the_models_vectors(embedder):
    """The client asks for base64 by itself."""
    client = openai.OpenAI(base_url=f"{embedder.http.base_url}/v1", api_key="none", max_retries=0)
    want = [out.outputs.embedding for out in embedder.pooling.embed(TEXTS)]
    found = client.embeddings.create(model="tiny", input=TEXTS)
    assert [each.embedding for each in found.data] == [np.float32(each).tolist() for each in want]
    assert found.usage.prompt_tokens == found.usage.total_tokens == 20 + 2
    found = client.embeddings.create(model="tiny", input=[[3, 4], [5]], encoding_format="float")
    assert [each.embedding for each in found.data] == [
        out.outputs.embedding for out in embedder.pooling.embed([[3, 4], [5]])
    ]
    assert len(client.embeddings.create(model="tiny", input=[3, 4]).data) == 1
    assert [model.id for model in client.models.list().data] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="dimensions=8 must be None or one of"):
        client.embeddings.create(model="tiny", input="a", dimensions=8)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="another", input="a")
    client.close()


def test_a_texts_tokens_have_vectors_of_their_own(embedder):
    found = embedder.post("/pooling", input="a", task="token_embed", encoding_format="base64")
    array = np.frombuffer(base64.b64decode(found["data"][0]["data"]), "<f4").reshape(2, 32)
    [want] = embedder.pooling.encode("a", pooling_task="token_embed")
    np.testing.assert_array_equal(array, want.outputs.data)
    plain = embedder.post("/pooling", input="a", task="token_embed", use_activation=False)
    assert np.abs(np.linalg.norm(plain["data"][0]["data"], axis=1) - 1).max() > 0.1


def test_numbers_come_in_each_type_and_order_of_bytes(embedder):
    want = np.asarray([out.outputs.embedding for out in embedder.pooling.embed(TEXTS)], np.float32)
    for dtype in EMBED_DTYPES:
        for order in ENDIANNESS:
            asked = {"input": TEXTS, "embed_dtype": dtype, "endianness": order}
            expected = want.astype(EMBED_DTYPES[dtype])
            found = embedder.post("/v1/embeddings", **asked, encoding_format="base64")["data"]
            arrays = [from_bytes(base64.b64decode(each["embedding"]), (-1,), dtype, order) for each in found]
            np.testing.assert_array_equal(arrays, expected)
            whole = embedder.http.post("/v1/embeddings", json=asked | {"encoding_format": "bytes"})
            bare = embedder.http.post("/pooling", json=asked | {"encoding_format": "bytes_only"})
            told = json.loads(whole.headers["metadata"])["data"]
            places = [MetadataItem(**each) for each in told]
            known = build_metadata_items(dtype, order, want.shape[1:], len(want))
            assert (whole.content, told) == (bare.content, json.loads(json.dumps([vars(x) for x in known])))
            assert "metadata" not in bare.headers
            arrays = [from_bytes(bare.content[x.start : x.end], x.shape, dtype, order) for x in places]
            np.testing.assert_array_equal(arrays, expected)
    assert to_bytes([1.0], "bfloat16", "big") == b"\x3f\x80"
    assert to_bytes([1.0], "bfloat16", "little") == b"\x80\x3f"


def test_scores_and_ranks(embedder, reranker):
    for served in (embedder, reranker):
        want = [out.outputs.score for out in served.pooling.score("the", ["a", "the", "dog"])]
        found = served.post("/v1/score", text_1="the", text_2=["a", "the", "dog"])
        assert [each["score"] for each in found["data"]] == want
        assert served.post("/score", queries="the", documents=["a", "the", "dog"])["data"] == found["data"]
        asked = {"query": "the", "documents": ["a", {"text": "the"}, "dog"]}
        ranks = served.post("/v1/rerank", **asked)["results"]
        assert [each["relevance_score"] for each in ranks] == sorted(want, reverse=True)
        assert {each["index"]: each["relevance_score"] for each in ranks} == dict(enumerate(want))
        assert served.post("/v2/rerank", **asked, top_n=1)["results"] == ranks[:1]
    assert ranks[0]["document"]["text"] in ("a", "the", "dog")
    found = reranker.post("/classify", input=TEXTS)["data"]
    assert [(each["label"], each["num_classes"]) for each in found] == [("LABEL_0", 1)] * 2


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"input": ""}, "prompt='' must be a text that is not empty"),
        ("/v1/embeddings", {"input": {"a": 1}}, "input"),
        ("/v1/embeddings", {"input": [[99]]}, "prompt token=99 must be a token id"),
        ("/v1/embeddings", {}, "input: Field required"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/classify", {"input": "a"}, "pooling_task='classify' must be 'embed'"),
        ("/score", {"text_1": "a"}, "the body must have text_1 and text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "data_1 has 2 texts, must have one"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents.0 must be a text"),
        ("/pooling", {"input": "a", "normalize": True, "use_activation": False}, "must not contradict"),
    ],
)
def test_a_mistake_is_400(path, body, said, embedder):
    assert said in embedder.post(path, status=400, **body)["error"]["message"]


def test_who_watches_it_is_told(embedder):
    before = embedder.http.get("/metrics").text
    embedder.post("/v1/embeddings", input=TEXTS)
    after = embedder.http.get("/metrics").text

    def value(text, name):
        return float(next(line for line in text.splitlines() if line.startswith(f"{name}{{")).split()[-1])

    assert value(after, "vllm:prompt_tokens_total") - value(before, "vllm:prompt_tokens_total") == 22
    assert value(after, "vllm:request_success_total") - value(before, "vllm:request_success_total") == 2
    assert embedder.http.get("/health").status_code == 200
    assert embedder.http.get("/v1/models").json()["data"][0]["max_model_len"] == 128
    assert embedder.post("/v1/completions", status=404, prompt="a")["error"]["code"] == 404


def test_no_more_wait_than_may(embedder):
    """Two of three at once find room: one runs, one waits."""
    service, gate = embedder.service, threading.Event()

    async def ask():
        return await asyncio.gather(
            *(service.run(lambda: [gate.wait(30)]) for _ in range(3)), return_exceptions=True
        )

    async def asked():
        several = asyncio.create_task(ask())
        while len(service.open_requests) < 2:
            await asyncio.sleep(0.001)
        service.metrics.note, before = (lambda found: None), service.metrics.note
        gate.set()
        found = await several
        service.metrics.note = before
        return found

    found = asyncio.run(asked())
    refused = [each for each in found if isinstance(each, ApiError)]
    assert [each.status for each in refused] == [429]
    assert found.count([True]) == 2
