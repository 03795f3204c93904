"""Adapters by name: listed, asked for as models, loaded and unloaded while others are answered."""

import dataclasses

import openai
import pytest

from jaxpaged import InputError, SamplingParams
from jaxpaged.api.async_llm import AsyncLLM
from jaxpaged.serve.options import ServerOptions
from tests import tiny_lora
from tests.serve.conftest import ENGINE, serving

ASKED = {"prompt": "ab c12", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def llm(model):
    made = AsyncLLM(model, **ENGINE | tiny_lora.LORA)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def served(llm, folder):
    first = tiny_lora.request(folder, 0)
    with serving(llm, lora_modules=(f"first={first.lora_path}",), enable_lora_updates=True) as made:
        yield made


def text(llm, seed):
    """Return the oracle's answer to the request."""
    ids = llm.tokenizer.encode(ASKED["prompt"])
    return llm.tokenizer.decode(tiny_lora.reference_answer(seed, ids, 6), skip_special_tokens=True)


def complete(served, model):
    return served.openai.completions.create(model=model, **ASKED)


@pytest.mark.slow
def test_llm_takes_one_for_all_or_one_each(llm, folder):
    """A GGUF file is tried, too: its names and the order of its heads are others."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    adapters = [dataclasses.replace(tiny_lora.request(folder, i), lora_int_id=50 + i) for i in (0, 1)]
    prompt = ASKED["prompt"]
    results = llm.llm.generate([prompt] * 3, params, lora_request=[*adapters, None], use_tqdm=False)
    assert [result.outputs[0].text for result in results] == [text(llm, seed) for seed in (0, 1, None)]
    assert [result.lora_request for result in results] == [*adapters, None]
    [chatted] = llm.llm.chat([{"role": "user", "content": "ab"}], params, lora_request=adapters[0])
    assert chatted.lora_request == adapters[0]
    assert llm.llm.list_loras() >= {50, 51}
    assert [llm.llm.remove_lora(i) for i in (50, 51, 51)] == [True, True, False]
    with pytest.raises(InputError, match="^prompt 1: lora_request=3 must be None or a LoRARequest$"):
        llm.llm.generate([prompt] * 2, params, lora_request=[None, 3])
    with pytest.raises(InputError, match="^lora_request has 1 entries, must have one for each of 2 prompts$"):
        llm.llm.generate([prompt] * 2, params, lora_request=[None])


def test_a_request_s_model_chooses_the_adapter(served):
    for model, seed in (("first", 0), ("tiny", None)):
        got = complete(served, model)
        assert (got.model, got.choices[0].text) == (model, text(served.llm, seed))
    chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4, "temperature": 0}
    said = {model: served.openai.chat.completions.create(model=model, **chat) for model in ("first", "tiny")}
    assert said["first"].model == "first"
    assert said["first"].choices[0].message.content != said["tiny"].choices[0].message.content
    base, first = served.openai.models.list().data
    assert (base.id, base.parent, first.id, first.parent) == ("tiny", None, "first", "tiny")
    assert served.openai.models.retrieve("first").root.endswith("adapter0")


def test_loaded_and_unloaded_while_serving(served, folder):
    path = tiny_lora.request(folder, 1).lora_path
    load, unload = (f"/v1/{verb}_lora_adapter" for verb in ("load", "unload"))

    def post(route, **body):
        reply = served.http.post(route, json=body)
        return reply.status_code, reply.text

    with pytest.raises(openai.NotFoundError, match="model 'second' does not exist"):
        complete(served, "second")
    assert post(load, lora_name="second", lora_path=path)[0] == 200
    assert complete(served, "second").choices[0].text == text(served.llm, 1)
    for name in ("second", "tiny"):
        status, said = post(load, lora_name=name, lora_path=path)
        assert (status, "must be a name that is not in use" in said) == (400, True)
    wrong = tiny_lora.write(folder / "wrong", r=9)
    status, said = post(load, lora_name="third", lora_path=str(wrong))
    assert (status, "at most max_lora_rank=8" in said) == (400, True)
    assert post(load, lora_name="third")[0] == 400
    assert [m.id for m in served.openai.models.list().data] == ["tiny", "first", "second"]
    assert post(unload, lora_name="second")[0] == 200
    assert post(unload, lora_name="second")[0] == 404
    with pytest.raises(openai.NotFoundError):
        complete(served, "second")


def test_unloaded_under_its_requests_it_answers_them_to_their_end(served, folder, brake):
    path = tiny_lora.request(folder, 2).lora_path
    body = {"lora_name": "short-lived", "lora_path": path}
    assert served.http.post("/v1/load_lora_adapter", json=body).status_code == 200
    hold = brake(served.llm.engine)
    stream = served.openai.completions.create(model="short-lived", stream=True, **ASKED)
    hold.allow(3)
    chunks = [next(stream)]
    assert served.http.post("/v1/unload_lora_adapter", json=body).status_code == 200
    hold.off()
    chunks += stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == text(served.llm, 2)


def test_loaded_in_place_it_answers_as_the_new_one(served, folder):
    """A trainer may write its adapter after each step. What cannot be read changes nothing."""
    paths = [str(tiny_lora.request(folder, seed).lora_path) for seed in (1, 2)]
    for path, status in ((paths[0], 200), ("nowhere", 400), (paths[1], 200)):
        body = {"lora_name": "trained", "lora_path": path, "load_inplace": True}
        assert served.http.post("/v1/load_lora_adapter", json=body).status_code == status
        seed = 2 if path == paths[1] else 1
        assert complete(served, "trained").choices[0].text == text(served.llm, seed)
    assert served.http.post("/v1/unload_lora_adapter", json=body).status_code == 200


def test_updates_are_off_unless_allowed(llm, folder):
    with serving(llm) as served:
        body = {"lora_name": "x", "lora_path": tiny_lora.request(folder, 0).lora_path}
        assert served.http.post("/v1/load_lora_adapter", json=body).status_code == 404


def test_what_is_wrong_is_said_before_it_serves(llm):
    for module in ("no-path", "=x", "x="):
        with pytest.raises(InputError, match=f"lora_modules={module!r} must be as in name=path"):
            ServerOptions(lora_modules=(module,))
    is_none = pytest.raises(InputError, match=r"^lora_path='nowhere': there must be a directory with")
    with is_none, serving(llm, lora_modules=("x=nowhere",)):
        pass
