"""Random weights in place of a model's files, and the files' afterwards."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpaged import LLM, SamplingParams
from jaxpaged.checks import InputError
from jaxpaged.models import loading
from jaxpaged.models.load_as import LoadAs
from tests import tiny
from tests.tiny_gguf import write_gguf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def test_a_config_is_enough_and_a_seed_gives_the_same_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = loading.open_checkpoint(tmp_path)
    made = [
        jax.tree.leaves(nnx.state(checkpoint.drawn(seed).model(LoadAs(np.dtype("float32")))))
        for seed in (0, 0, 1)
    ]
    same = [all(np.array_equal(a, b) for a, b in zip(made[0], other, strict=True)) for other in made]
    assert same == [True, True, False]
    assert all(np.isfinite(leaf).all() for leaf in made[0])


def test_a_model_begins_with_dummy_weights_and_reloads_its_own(tmp_path):
    llm = LLM(write_gguf(tmp_path / "tiny.gguf"), load_format="dummy", **tiny.DEFAULTS)
    params, prompt = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), [5, 6, 7]

    def answer():
        return list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)

    own = tiny.reference_answer(tuple(prompt), 6)
    assert answer() != own
    assert llm.collective_rpc("reload_weights") == [None]
    assert answer() != own, "they are drawn again"
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
    llm.collective_rpc("reload_weights")
    assert answer() == own
    for method, given in (("sleep", ()), ("update_config", ({},)), ("reload_weights", ("path",))):
        with pytest.raises(InputError, match=f"method='{method}' must be 'reload_weights', or .* no workers"):
            llm.collective_rpc(method, args=given)
    llm.engine.close()
    with pytest.raises(InputError, match="load_format='tensorizer' must be one of auto, hf, "):
        LLM("nowhere", load_format="tensorizer")
