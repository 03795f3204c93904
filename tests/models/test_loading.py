"""Models from directories and GGUF files: what is read, and what is refused with which sentence."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from jaxpaged.checks import InputError
from jaxpaged.models import loading
from jaxpaged.models.families import from_hf
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.files import safetensors_files
from jaxpaged.models.files.gguf import file as gguf_file
from jaxpaged.models.layers import rope_frequencies
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.ropes import LinearScaling
from jaxpaged.models.weights import by_role, random_weights
from tests import tiny
from tests.tiny_gguf import write_gguf

GOLDENS = Path(__file__).parents[1] / "goldens"
CONFIG = tiny.CONFIG


def test_a_gguf_file_gives_the_config_and_the_weights_it_was_made_of(tmp_path):
    checkpoint = loading.open_checkpoint(write_gguf(tmp_path / "tiny.gguf"))
    assert checkpoint.config.eos_token_ids == (0,)
    for field in (
        "hidden_size",
        "num_q_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "tie_word_embeddings",
    ):
        assert getattr(checkpoint.config, field) == getattr(CONFIG, field), field
    found = by_role(checkpoint.config, checkpoint.names, checkpoint.load_weights())
    assert found.keys() == tiny.reference_weights().keys()
    for role, weight in tiny.reference_weights().items():
        np.testing.assert_array_equal(found[role], weight, err_msg=role)


def test_a_gguf_tokenizer_reads_digits_merges_and_special_tokens(tmp_path):
    tokenizer = loading.open_checkpoint(write_gguf(tmp_path / "tiny.gguf")).tokenizer
    assert tokenizer.tokenize("ab 12<|end|>") == ["ab", "Ġ", "1", "2", "<|end|>"]
    ids = tokenizer.encode("ab 12<|end|>")
    assert tokenizer.decode(ids) == "ab 12<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab 12"
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "user:ab<|end|>"
    )


def test_a_directory_without_tokenizer_has_none():
    checkpoint = loading.open_checkpoint(GOLDENS / "gqa_tied")
    assert checkpoint.tokenizer is None
    assert checkpoint.config.eos_token_ids == (2,)
    assert checkpoint.config.tie_word_embeddings


def test_generation_config_says_where_to_stop(tmp_path):
    shutil.copytree(GOLDENS / "gqa_tied", tmp_path, dirs_exist_ok=True)
    for said, eos in (([2, 7], (2, 7)), (5, (5,)), (None, (2,))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
        assert loading.open_checkpoint(tmp_path).config.eos_token_ids == eos


def test_bfloat16_and_sharded_safetensors_are_read(tmp_path):
    import ml_dtypes

    save_file({"a": np.arange(3).astype(ml_dtypes.bfloat16)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": np.ones((2, 2), np.float16)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"a": np.ones(1), "c": np.ones(1)}, tmp_path / "consolidated.safetensors")  # of somebody else's
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "config.json").write_text((GOLDENS / "gqa_tied" / "config.json").read_text())
    weights = loading.open_checkpoint(tmp_path).load_weights()
    assert weights.keys() == {"a", "b"}
    assert weights["a"].astype(np.float32).tolist() == [0, 1, 2]
    assert weights["b"].shape == (2, 2)


WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_experts_of_a_layer_may_lie_in_one_tensor(tmp_path, family):
    """Published files of Qwen 3.5 have them so; the weights are those of files with one for each expert."""
    folder = GOLDENS / "families" / family
    tensors = load_file(folder / "model.safetensors")
    of_experts = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    found = {match[0]: match.groups() for match in map(of_experts.fullmatch, tensors) if match}
    apart = {found[name]: tensors.pop(name) for name in found}
    for stem, _, _ in [*apart]:
        num = sum(place[0] == stem for place in apart) // 3
        both = [np.concatenate([apart[stem, f"{i}", half] for half in ("gate", "up")]) for i in range(num)]
        tensors[f"{stem}.gate_up_proj"] = np.stack(both)
        tensors[f"{stem}.down_proj"] = np.stack([apart[stem, f"{i}", "down"] for i in range(num)])
    shutil.copy(folder / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    before, after = (loading.open_checkpoint(each) for each in (folder, tmp_path))
    models = (each.model(LoadAs(jnp.dtype("float32"))) for each in (before, after))
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(model) for model in models))
    del tensors[f"{stem}.down_proj"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"experts\.0\.down_proj"):
        loading.open_checkpoint(tmp_path).model(LoadAs(jnp.dtype("float32")))


def test_shards_and_indices_that_people_have(tmp_path, caplog):
    """Shards without an index; a single file beside an index, and beside one whose files are gone."""
    (tmp_path / "config.json").write_text((GOLDENS / "gqa_tied" / "config.json").read_text())
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, shard in enumerate(shards):
        save_file({f"w{i}": np.full(2, i, np.float32)}, tmp_path / shard)
    read = safetensors_files.load(tmp_path)
    assert {name: read[name].tolist() for name in read} == {"w0": [0, 0], "w1": [1, 1]}
    save_file({"w0": np.full(2, 7, np.float32)}, tmp_path / WEIGHTS)
    index = {"weight_map": {"w0": shards[0], "w1": shards[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert safetensors_files.load(tmp_path).keys() == {"w0", "w1"}
    assert "the index's files are read" in caplog.text
    (tmp_path / shards[1]).unlink()
    assert safetensors_files.load(tmp_path)["w0"].tolist() == [7, 7]
    assert f"model.safetensors is read, for model.safetensors.index.json names {shards[1]}" in caplog.text


def test_a_tied_head_may_be_there_alone_or_differ(tmp_path, caplog):
    shutil.copytree(GOLDENS / "gqa_tied", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / WEIGHTS)
    table = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {"lm_head.weight": table}, tmp_path / WEIGHTS)
    alone = loading.open_checkpoint(tmp_path)
    assert alone.config.tie_word_embeddings
    got, want = (
        by_role(each.config, each.names, each.load_weights())
        for each in (alone, loading.open_checkpoint(GOLDENS / "gqa_tied"))
    )
    assert got.keys() == want.keys()
    np.testing.assert_array_equal(got["embedding.weight"], table)
    assert "differ" not in caplog.text
    head = np.array(table)
    head[-1, -1] += 1
    save_file(tensors | {"model.embed_tokens.weight": table, "lm_head.weight": head}, tmp_path / WEIGHTS)
    untied = loading.open_checkpoint(tmp_path)
    found = by_role(untied.config, untied.names, untied.load_weights())
    np.testing.assert_array_equal(found["lm_head.weight"], head)
    np.testing.assert_array_equal(found["embedding.weight"], table)
    assert "'model.embed_tokens.weight' and 'lm_head.weight' differ: the head is the latter" in caplog.text
    save_file({"lm_head.weight": table}, tmp_path / WEIGHTS)
    with pytest.raises(InputError, match="the weights lack 'model.norm.weight"):
        loading.open_checkpoint(tmp_path).model(LoadAs(jnp.dtype("float32")))


def test_an_opt_s_table_may_be_called_the_head(tmp_path):
    """The file of opt-125m does so, with and without the family's prefix."""
    folder = GOLDENS / "families" / "opt"
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / WEIGHTS)
    for prefix in ("model.", ""):
        renamed = {
            name.replace("model.decoder.embed_tokens", "lm_head"): its for name, its in tensors.items()
        }
        renamed = {name.removeprefix("" if prefix else "model."): its for name, its in renamed.items()}
        save_file(renamed, tmp_path / WEIGHTS)
        checkpoint = loading.open_checkpoint(tmp_path)
        found = by_role(checkpoint.config, checkpoint.names, checkpoint.load_weights())
        np.testing.assert_array_equal(found["embedding.weight"], tensors["model.decoder.embed_tokens.weight"])


def test_ends_that_are_no_tokens_end_nothing(caplog):
    said = json.loads((GOLDENS / "gqa_tied" / "config.json").read_text())
    assert from_hf(said | {"eos_token_id": [3, 10**12, -1]}).eos_token_ids == (3,)
    assert "[1000000000000, -1] is no token of" in caplog.text


def test_the_tokenizer_s_own_end_ends_an_answer(tmp_path):
    """The config's token does, too, as in vLLM. It may be too large for this vocabulary."""
    shutil.copytree(GOLDENS / "gqa_tied", tmp_path, dirs_exist_ok=True)
    for tokens, want in ((["a", "</s>"], (1, 2)), ([*map(str, range(999)), "</s>"], (2,))):
        made = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, "a")),
            eos_token="</s>",
        )
        made.save_pretrained(tmp_path)
        assert loading.open_checkpoint(tmp_path).config.eos_token_ids == want
        assert loading.open_checkpoint(GOLDENS / "gqa_tied", tokenizer=tmp_path).config.eos_token_ids == want


def test_what_a_config_says_twice_of_rope(caplog):
    """Transformers takes `rope_scaling` before `rope_parameters`, and the config's own original length."""
    said = json.loads((GOLDENS / "gqa_tied" / "config.json").read_text()) | {"max_position_embeddings": 512}
    parameters, scaling = {"rope_theta": 77.0, "rope_type": "default"}, {"type": "linear", "factor": 4.0}
    rope = from_hf(said | {"rope_parameters": parameters, "rope_scaling": scaling}).layers[0].rope
    assert (rope.theta, rope.scaling) == (77.0, LinearScaling(4.0))
    assert "rope_scaling={'type': 'linear', 'factor': 4.0} goes before rope_parameters=" in caplog.text
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for change, want in (({}, 512), ({"original_max_position_embeddings": 128}, 128)):
        scaled = from_hf(said | {"rope_parameters": {"rope_theta": 1e4} | llama3} | change)
        assert scaled.layers[0].rope.scaling.original_max_len == want


def test_a_mistral_is_read_with_its_window_or_without(tmp_path):
    hf = json.loads((GOLDENS / "mistral_window" / "config.json").read_text())
    assert loading.open_checkpoint(GOLDENS / "mistral_window").config.sliding_window == 12
    for change, window in (
        ({"sliding_window": None}, None),
        ({"sliding_window": None, "use_sliding_window": False}, None),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 12),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 2}, None),
    ):
        assert from_hf(hf | change).sliding_window == window
    # What a config does not say is what transformers takes then: Mistral 7B's numbers.
    for name in ("sliding_window", "num_key_value_heads", "max_position_embeddings"):
        del hf[name]
    config = from_hf(hf | {"num_attention_heads": 16})
    assert (config.sliding_window, config.num_kv_heads, config.max_model_len) == (4096, 8, 131072)


def test_a_llama_has_no_window():
    hf = json.loads((GOLDENS / "gqa_tied" / "config.json").read_text())
    assert from_hf(hf).sliding_window is None
    assert from_hf(hf | {"sliding_window": 12, "use_sliding_window": False}).sliding_window is None


@pytest.mark.parametrize(("key", "window"), [(None, None), (0, None), (12, 12)])
def test_a_gguf_file_may_name_a_window(tmp_path, key, window):
    path = write_gguf(tmp_path / "tiny.gguf", sliding_window=key)
    assert loading.open_checkpoint(path).config.sliding_window == window


FACTOR = ("llama.rope.scaling.factor", 4.0)
TYPE = ("llama.rope.scaling.type", "none")
SCALINGS = {
    "a factor of no type is linear": ([FACTOR], LinearScaling(4.0)),
    "old files": ([("llama.rope.scale_linear", 2.0)], LinearScaling(2.0)),
    "the newer name goes first": ([FACTOR, ("llama.rope.scale_linear", 2.0)], LinearScaling(4.0)),
    "none": ([FACTOR, TYPE], None),
    "linear of no factor": ([("llama.rope.scaling.type", "linear")], None),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_a_gguf_file_s_scaling_of_positions(tmp_path, name):
    said, want = SCALINGS[name]

    def also(writer):
        for key, value in said:
            (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)

    path = write_gguf(tmp_path / "tiny.gguf", also=also)
    assert loading.open_checkpoint(path).config.layers[0].rope.scaling == want


def test_a_scaling_beside_a_factor_for_each_frequency(tmp_path):
    def also(writer):
        writer.add_float32(*FACTOR)

    checkpoint = loading.open_checkpoint(
        write_gguf(tmp_path / "a.gguf", extra="rope_freqs.weight", also=also)
    )
    assert checkpoint.config.layers[0].rope.scaling.short_factors == (8.0,) * 4


def test_a_gguf_file_in_parts_is_read_by_its_first(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tensors_a_part=8)
    assert path.name == "tiny-00001-of-00003.gguf"
    checkpoint = loading.open_checkpoint(path)
    assert [file.name for file in checkpoint.files] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    found = by_role(checkpoint.config, checkpoint.names, checkpoint.load_weights())
    for role, weight in tiny.reference_weights().items():
        np.testing.assert_array_equal(found[role], weight, err_msg=role)
    second, third = checkpoint.files[1:]
    with pytest.raises(InputError, match="is part 2 of 3: give the first, tiny-00001-of-00003.gguf"):
        loading.open_checkpoint(second)
    shutil.copy(third, second)
    with pytest.raises(
        InputError, match=r"tiny-00002-of-00003.gguf must be part 2 of 3, its header says part 3"
    ):
        loading.open_checkpoint(path)
    second.unlink()
    with pytest.raises(InputError, match="first of 3 parts: tiny-00002-of-00003.gguf must lie beside it"):
        loading.open_checkpoint(path)
    with pytest.raises(InputError, match="first of 3 parts: it must be called NAME-00001-of-00003.gguf"):
        loading.open_checkpoint(path.rename(tmp_path / "mine.gguf"))


@pytest.mark.parametrize("name", ["nowhere/at/all", "./missing", "missing.gguf", "llama", ""])
def test_a_model_that_is_nowhere_is_refused(name):
    with pytest.raises(InputError, match=f"model={name!r} must be "):
        loading.open_checkpoint(name)


def test_a_hub_id_without_a_network_is_refused_with_the_reason(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        InputError, match=r"model='owner/name' must be .* LocalEntryNotFoundError: cannot reach the hub$"
    ):
        loading.open_checkpoint("owner/name")


def test_a_hub_id_is_loaded_from_its_snapshot(monkeypatch):
    import huggingface_hub

    def snapshot(name, *, allow_patterns, ignore_patterns, **kwargs):
        files = ["config.json", "model.safetensors", "consolidated.00.safetensors", "original/params.json"]
        files += ["original/consolidated.safetensors", "pytorch_model.bin"]
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        assert [*huggingface_hub.utils.filter_repo_objects(files, **patterns)] == files[:2]
        return str(GOLDENS / "gqa_tied")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert loading.open_checkpoint("owner/name").config.hidden_size == 24


def test_a_gguf_of_another_architecture_is_refused(tmp_path):
    path = write_gguf(tmp_path / "mamba.gguf", architecture="mamba")
    with pytest.raises(InputError, match="general.architecture='mamba' must be one of 'llama', 'qwen2'"):
        loading.open_checkpoint(path)


@pytest.mark.parametrize("keep", [0, 3, 100, 0.5, 0.99])
def test_a_damaged_gguf_file_is_refused(tmp_path, keep):
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(whole[: keep if keep == 0 or keep >= 1 else int(keep * len(whole))])
    with pytest.raises(InputError, match=r"damaged.gguf' must be a whole GGUF file|cannot be read"):
        loading.open_checkpoint(damaged).model(LoadAs(jnp.dtype("float32")))


def test_text_of_a_gguf_file_that_is_not_utf_8_is_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"l\xffama", 1))
    with pytest.raises(InputError, match="general.architecture of the GGUF file must be readable: Unicode"):
        loading.open_checkpoint(path)


def test_a_pointer_to_a_gguf_file_is_told_as_one(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n")
    with pytest.raises(InputError, match="a.gguf is a Git LFS pointer, not the file itself: fetch that with"):
        loading.open_checkpoint(path)


def test_a_gguf_file_with_missing_or_strange_tensors_is_refused(tmp_path):
    checkpoint = loading.open_checkpoint(write_gguf(tmp_path / "a.gguf", without="blk.1.ffn_up.weight"))
    with pytest.raises(InputError, match="the weights lack 'blk.1.ffn_up.weight'"):
        checkpoint.model(LoadAs(jnp.dtype("float32")))
    checkpoint = loading.open_checkpoint(write_gguf(tmp_path / "b.gguf", extra="blk.0.strange.weight"))
    with pytest.raises(InputError, match="weight 'blk.0.strange.weight' is none that the model config"):
        checkpoint.model(LoadAs(jnp.dtype("float32")))


def test_a_gguf_file_may_have_a_factor_for_each_frequency(tmp_path):
    """Files of Llama 3.1 have them."""
    checkpoint = loading.open_checkpoint(write_gguf(tmp_path / "a.gguf", extra="rope_freqs.weight"))
    rope = checkpoint.config.layers[1].rope
    plain = rope_frequencies(dataclasses.replace(rope, scaling=None), 64)[0]
    np.testing.assert_array_equal(rope_frequencies(rope, 64)[0], plain / 2)
    checkpoint.model(LoadAs(jnp.dtype("float32")))


def test_a_gguf_field_that_is_not_there_is_named(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    reader = gguf_file.open_file(path)
    del reader.fields["llama.block_count"]
    with pytest.raises(InputError, match="the GGUF file lacks 'llama.block_count'"):
        gguf_file.model_config(reader, path)


LOAD = """
import sys, jax.numpy as jnp
from pathlib import Path
from jaxpaged.models import loading
from jaxpaged.models.load_as import LoadAs

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

small, large, dtype, quantization = sys.argv[1:]
load_as = LoadAs(jnp.dtype(dtype), quantization or None)
loading.open_checkpoint(small).model(load_as)  # what a process takes once is there then
Path("/proc/self/clear_refs").write_text("5")  # from now on the peak is counted anew
before = resident("VmRSS")
model = loading.open_checkpoint(large).model(load_as)
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak")
def test_loading_takes_little_more_memory_than_the_weights(tmp_path):
    """Two files are read tensor by tensor; one tensor is a third as large as all others together.

    Each load has a process of its own, in which an array's memory goes back as soon as the array is freed:
    the peak is what the loader holds, not what the allocator keeps from before (7 MB were seen).
    """
    said = json.loads((GOLDENS / "gqa_tied" / "config.json").read_text())
    said |= {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    said |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 20000, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(said))
    drawn = random_weights(from_hf(said), NAMES, seed=0)
    size, largest = (f(w.size for w in drawn.values()) for f in (sum, max))
    shards = {"model-1.safetensors": list(drawn)[::2], "model-2.safetensors": list(drawn)[1::2]}
    for file, names in shards.items():
        save_file({name: drawn[name] for name in names}, tmp_path / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    # To quantise a tensor takes, beside itself, its blocks, and a byte for each code.
    for dtype, quantization, itemsize, tensors in (
        ("float32", "", 4, 1.1),
        ("bfloat16", "", 2, 1.1),
        ("bfloat16", "int8", 34 / 32, 1.6),
        ("bfloat16", "fp8", 34 / 32, 1.6),
    ):
        command = [sys.executable, "-c", LOAD, GOLDENS / "gqa_tied", tmp_path, dtype, quantization]
        peak = int(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        assert size * itemsize < peak < size * itemsize + tensors * 4 * largest, (dtype, quantization)
