"""GGUF files of each architecture, written as llama.cpp's converter does, against what they were made of."""

import dataclasses

import gguf
import numpy as np
import pytest

from jaxpaged.models import gguf_file, loading
from jaxpaged.models.weights import by_role
from tests.models.test_decoder import GOLDENS
from tests.tiny_gguf import add_sizes

ARCHITECTURES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
# What these files do not say, beside the layers' kinds: llama.cpp knows it by the architecture.
UNSAID = {"layers": (), "attention_scale": 1.0}


def tensors_of(checkpoint):
    """By llama.cpp's names; Gemma's norms are stored with the one that is added to them."""
    weights = checkpoint.load_weights()
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[checkpoint.path.name].upper()]
    theirs = gguf.TensorNameMap(architecture, checkpoint.config.num_layers)
    for name, weight in weights.items():
        found = theirs.get_name(name, try_suffixes=(".weight", ".bias"))
        more = float(checkpoint.path.name.startswith("gemma") and name.endswith("norm.weight"))
        yield found, np.asarray(weight, np.float32) + np.float32(more)


def write(path, checkpoint):
    c = checkpoint.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[checkpoint.path.name])
    add_sizes(writer, c)
    if c.attention_soft_cap is not None:
        writer.add_attn_logit_softcapping(c.attention_soft_cap)
    if c.logit_soft_cap is not None:
        writer.add_final_logit_softcapping(c.logit_soft_cap)
    if any(kind.sliding_window for kind in c.layers):
        writer.add_sliding_window(12)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(c.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * c.vocab_size)
    writer.add_token_merges([])
    writer.add_eos_token_id(2)
    for name, tensor in tensors_of(checkpoint):
        writer.add_tensor(name, tensor)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_is_the_model_it_was_made_of(tmp_path, name):
    directory = loading.open_checkpoint(GOLDENS / "families" / name)
    path = tmp_path / "a.gguf"
    write(path, directory)
    reader = gguf_file.open_file(path)
    config, names = gguf_file.model_config(reader, path), gguf_file.names(reader, path)
    assert config.norm_eps == np.float32(directory.config.norm_eps)  # the file has no wider type
    config = dataclasses.replace(config, norm_eps=directory.config.norm_eps)
    said, same = (dataclasses.asdict(c) | UNSAID for c in (config, directory.config))
    assert {key: value for key, value in said.items() if value != same[key]} == {}
    assert config.layers[0].rope == directory.config.layers[0].rope
    if name.startswith(("gemma2", "gemma3")):
        assert [kind.sliding_window for kind in config.layers[:2]] == [12, None if name == "gemma2" else 12]
    want = by_role(directory.config, directory.names, directory.load_weights())
    found = by_role(config, names, gguf_file.load_weights(reader, path))
    assert found.keys() == want.keys()
    for role, weight in want.items():
        np.testing.assert_allclose(found[role], weight, rtol=0, atol=1e-6, err_msg=role)
