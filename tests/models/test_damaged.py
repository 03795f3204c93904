"""Damaged and strange model directories: each is one line and exit code 2, and code that lies in one is not
run.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged import cli
from jaxpaged.models import loading
from jaxpaged.models.files import hf

GOOD = Path(__file__).parents[1] / "goldens" / "gqa_tied"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.0.mlp.up_proj.weight"

type Damage = Callable[[Path], object]


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n"


def text(name: str, content: str | bytes) -> Damage:
    """Write a file with this content."""
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def config(**changes: object) -> Damage:
    """Write a config with some fields replaced."""
    return text("config.json", json.dumps(json.loads((GOOD / "config.json").read_text()) | changes))


def generation(**fields: object) -> Damage:
    return text("generation_config.json", json.dumps(fields))


def weights(**changes: np.ndarray | None) -> Damage:
    """Write weights of which some are replaced or missing."""

    def damage(folder: Path) -> None:
        changed = load_file(folder / WEIGHTS) | changes
        save_file({name: value for name, value in changed.items() if value is not None}, folder / WEIGHTS)

    return damage


def index(content: object) -> Damage:
    return text(INDEX, json.dumps(content))


def nan(value: float, dtype: type = np.float32) -> np.ndarray:
    array = load_file(GOOD / WEIGHTS)[UP].astype(dtype)
    array[-1, -1] = value
    return array


def in_order(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


OWN_CODE = """
import pathlib
pathlib.Path(__file__).with_name("has_run").touch()
"""

CASES: dict[str, tuple[Damage, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "must contain a config.json"),
    "config is half": (text("config.json", "{"), "config.json cannot be read as JSON: "),
    "config is a list": (text("config.json", "[]"), "config.json must be a JSON object"),
    "config is null": (text("config.json", "null"), "config.json must be a JSON object"),
    "config is no text": (text("config.json", b"\xff\xfe"), "config.json cannot be read as JSON: "),
    "config is endless": (
        text("config.json", b" " * (2**26 + 1)),
        "config.json has 67108865 bytes, must have",
    ),
    "config is deep": (text("config.json", "[" * 100_000), "config.json cannot be read as JSON: "),
    "no family": (text("config.json", "{}"), "model_type=None must be one of 'llama', 'mistral', "),
    "another family": (config(model_type="bert"), "model_type='bert' must be one of 'llama', 'mistral', "),
    "family is a list": (
        config(model_type=["llama"]),
        "model_type=['llama'] must be one of 'llama', 'mistral', ",
    ),
    "a size is text": (config(hidden_size="24"), "hidden_size='24' must be an int >= 1"),
    "a size is missing": (config(vocab_size=None), "vocab_size must be given"),
    "a size is broken": (config(num_hidden_layers=1.5), "num_hidden_layers=1.5 must be an int >= 1"),
    "a size is zero": (config(vocab_size=0), "vocab_size=0 must be an int >= 1"),
    "a size is huge": (config(intermediate_size=10**30), "intermediate_size=1000"),
    "heads do not divide": (
        config(num_key_value_heads=4),
        "num_q_heads=6 must be a multiple of num_kv_heads=4",
    ),
    "eps is text": (config(rms_norm_eps="x"), "rms_norm_eps='x' must be a number > 0"),
    "tied is text": (config(tie_word_embeddings="yes"), "tie_word_embeddings='yes' must be True or False"),
    "activation": (config(hidden_act="mish"), "hidden_act='mish' must be one of silu, "),
    "rope is a list": (config(rope_parameters=[1]), "rope_parameters=[1] must be a JSON object or null"),
    "rope's kind": (
        config(rope_parameters={"rope_theta": 1e4, "rope_type": "ntk"}),
        "rope_type='ntk' must be 'default', 'dynamic', 'linear', 'llama3', 'yarn' or 'longrope'",
    ),
    "rope is half": (config(rope_parameters={"rope_type": "llama3"}), "factor must be given"),
    "rope's theta": (config(rope_parameters={"rope_theta": "1e4"}), "rope_theta='1e4' must be a number > 0"),
    "a part is rotated": (
        config(partial_rotary_factor=0.5),
        "partial_rotary_factor=0.5 must be 1 or left out",
    ),
    "q and k are normed": (config(use_qk_norm=True), "use_qk_norm=True must be False or left out"),
    "eos is text": (config(eos_token_id="</s>"), "eos_token_id='</s>' must be a token id"),
    "quantised": (
        config(quantization_config={"quant_method": "mxfp4"}),
        "quant_method='mxfp4' must be another for a model that is not gpt-oss: one of awq, gptq, ",
    ),
    "a Llama's window": (config(sliding_window=12), "sliding_window=12 must be null for model_type 'llama'"),
    "no window": (
        config(model_type="mistral", sliding_window=0),
        "sliding_window=0 must be None or an int >= 1",
    ),
    "two minds on a window": (
        config(model_type="mistral", sliding_window=12, use_sliding_window=False),
        "use_sliding_window=False contradicts sliding_window=12: remove",
    ),
    "layers of two kinds": (
        config(model_type="mistral", layer_types=["full_attention", "sliding_attention"]),
        "layer_types must all be 'sliding_attention' with sliding_window=4096",
    ),
    "layers of another kind": (
        config(layer_types=["sliding_attention"] * 2),
        "layer_types must all be 'full_attention' with sliding_window=None",
    ),
    "layer kinds are a number": (config(layer_types=2), "layer_types must all be 'full_attention' with"),
    "generation config is half": (
        text("generation_config.json", "{"),
        "generation_config.json cannot be read as",
    ),
    "generation config is a list": (
        text("generation_config.json", "[]"),
        "generation_config.json must be a JSON",
    ),
    "generation's eos": (generation(eos_token_id=[3, "4"]), "eos_token_id='4' must be a token id"),
    "a pointer for a config": (
        text("config.json", LFS),
        "config.json is a Git LFS pointer",
    ),
    "a pointer for weights": (
        text(WEIGHTS, LFS),
        "model.safetensors is a Git LFS pointer",
    ),
    "a pointer for a tokenizer": (text("tokenizer.model", LFS), "tokenizer.model is a Git LFS pointer"),
    "of MLX": (
        config(quantization={"group_size": 64, "bits": 4}),
        "config.json: quantization={'group_size': 64, 'bits': 4} is MLX's form of quantised weights",
    ),
    "of MLX, said twice": (
        config(quantization_config={"group_size": 64, "bits": 4}),
        "must be taken from a file in AWQ, GPTQ, fp8 or GGUF: without quant_method it is MLX's",
    ),
    "two ropes in layers of two kinds": (
        config(
            model_type="gemma3_text",
            rope_parameters={"full_attention": {"rope_theta": 1e4}},
            rope_scaling={"rope_type": "linear", "factor": 2.0},
        ),
        "rope_scaling={'rope_type': 'linear', 'factor': 2.0} must be {} or left out",
    ),
    "generation's options": (
        generation(temperature="hot"),
        "generation_config.json: temperature='hot' must be a number >= 0",
    ),
    "tokenizer is half": (text("tokenizer.json", "{"), "its tokenizer cannot be read: "),
    "tokenizer is empty": (text("tokenizer.json", "{}"), "its tokenizer cannot be read: "),
    "tokenizer is code": (
        in_order(
            text("tokenizer.model", "?"),
            text("own_code.py", OWN_CODE),
            text(
                "tokenizer_config.json",
                json.dumps({"auto_map": {"AutoTokenizer": ["own_code.Own", None]}, "tokenizer_class": "Own"}),
            ),
        ),
        "its tokenizer is code of its own (auto_map), which is never run",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "must contain .safetensors files"),
    "weights of PyTorch": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        "must contain .safetensors files: pytorch_model.bin is of another form, which is not read",
    ),
    "GGUF files alone": (
        lambda folder: (folder / "config.json").unlink() or (folder / "a.gguf").touch(),
        "must contain a config.json: it holds GGUF files, of which model names one, such as",
    ),
    "its makers' own form": (
        lambda folder: (folder / "config.json").rename(folder / "params.json"),
        "must contain a config.json: it holds a model in its makers' own form (params.json), ",
    ),
    "a shard too few": (
        lambda folder: (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors"),
        "model-00002-of-00002.safetensors is missing of 2 shards",
    ),
    "weights are half": (
        text(WEIGHTS, (GOOD / WEIGHTS).read_bytes()[:-100]),
        "model.safetensors cannot be read: ",
    ),
    "weights are nothing": (text(WEIGHTS, b""), "model.safetensors cannot be read: "),
    "several files, which?": (
        lambda folder: (
            [shutil.copy(folder / WEIGHTS, folder / f"{i}.safetensors") for i in "ab"]
            and (folder / WEIGHTS).unlink()
        ),
        "must have model.safetensors.index.json: it has 2 .safetensors files",
    ),
    "index is half": (text(INDEX, "{"), "model.safetensors.index.json cannot be read as JSON: "),
    "index is empty": (index({}), "model.safetensors.index.json must have a weight_map"),
    "index leads away": (
        index({"weight_map": {UP: "../model.safetensors"}}),
        "names the file '../model.safetensors', must be a .safetensors file in the same directory",
    ),
    "index names no file": (index({"weight_map": {UP: 7}}), "names the file 7, must be a .safetensors"),
    "a shard is missing": (
        in_order(
            lambda folder: (folder / WEIGHTS).rename(folder / "a.safetensors"),
            index({"weight_map": {UP: "b.safetensors"}}),
        ),
        "b.safetensors cannot be read: ",
    ),
    "a shard lacks a tensor": (index({"weight_map": {"x": WEIGHTS}}), "lacks 'x', which the index names"),
    "a weight is missing": (
        weights(**{UP: None}),
        f"the weights lack '{UP}', which the model config asks for",
    ),
    "a weight too many": (
        weights(**{"model.layers.0.self_attn.q_norm.weight": np.ones(4, np.float32)}),
        "weight 'model.layers.0.self_attn.q_norm.weight' is none that the model config asks for",
    ),
    "one bias of several": (
        weights(**{"model.layers.0.self_attn.q_proj.bias": np.ones(24, np.float32)}),
        "weight 'model.layers.0.self_attn.q_proj.bias' is none that the model config asks for",
    ),
    "another shape": (
        weights(**{UP: np.ones((2, 2), np.float32)}),
        f"weight '{UP}' has shape (2, 2), must be",
    ),
    "NaN": (weights(**{UP: nan(np.nan)}), f"weight '{UP}' has NaN or infinity in it"),
    "infinity": (weights(**{UP: nan(-np.inf)}), f"weight '{UP}' has NaN or infinity in it"),
    "NaN in bfloat16": (
        weights(**{UP: nan(np.nan, ml_dtypes.bfloat16)}),
        f"weight '{UP}' has NaN or infinity",
    ),
    "fp8": (weights(**{UP: nan(1, ml_dtypes.float8_e4m3fn)}), "float8"),
    "int8": (weights(**{UP: nan(1, np.int8)}), f"weight '{UP}' has type int8, must be float32, bfloat16 or"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_directory_is_one_line_and_exit_code_2(name, tmp_path, capsys):
    damage, message = CASES[name]
    shutil.copytree(GOOD, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("gradients.npz"))
    damage(tmp_path)
    assert cli.main(["generate", "--model", str(tmp_path), "--prompt", "a"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxpaged: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "has_run").exists()


def test_what_changes_nothing_is_no_damage(tmp_path):
    """A head that is tied and stored all the same, tables of RoPE's, neutral fields, somebody else's code."""
    shutil.copytree(GOOD, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("gradients.npz"))
    spare = {
        "lm_head.weight": load_file(GOOD / WEIGHTS)["model.embed_tokens.weight"],
        **{
            f"model.layers.0.self_attn.rotary_emb.{name}": np.ones(2)
            for name in ("inv_freq", "cos_cached", "sin_cached")
        },
    }
    neutral = {
        "partial_rotary_factor": 1.0,
        "use_qk_norm": False,
        "num_local_experts": 1,
        "auto_map": {"a": "b.C"},
    }
    in_order(weights(**spare), config(**neutral))(tmp_path)
    before, after = loading.open_checkpoint(GOOD), loading.open_checkpoint(tmp_path)
    assert after.config == before.config
    from jaxpaged.models.weights import check_weights

    check_weights(after.config, after.names, after.load_weights())


def test_the_models_own_sampling_defaults_are_read(tmp_path):
    shutil.copytree(GOOD, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("gradients.npz"))
    generation(temperature=0.6, top_k=None, max_new_tokens=7, do_sample=True, pad_token_id=3)(tmp_path)
    assert loading.open_checkpoint(tmp_path).sampling_defaults == {"temperature": 0.6, "max_tokens": 7}


def test_an_object_is_read_whatever_its_encoding_says(tmp_path):
    (tmp_path / "a.json").write_text('{"a": "ü"}', encoding="utf-8")
    assert hf.read_object(tmp_path / "a.json") == {"a": "ü"}
    (tmp_path / "a.json").write_text('{"a": "ü"}', encoding="utf-8-sig")
    assert hf.read_object(tmp_path / "a.json") == {"a": "ü"}
