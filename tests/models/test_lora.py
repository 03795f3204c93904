"""Adapters from PEFT's files: with each kind of module names against PEFT, and those that do not fit."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged import LoRARequest
from jaxpaged.checks import InputError
from jaxpaged.models import adapter_slots, loading, lora, weights
from jaxpaged.models.families import WRAPPER_OF
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.load_as import LoadAs
from reference import model as reference_model
from tests import tiny, tiny_lora
from tests.models.test_decoder import GOLDENS, TOLERANCE, assert_equal, paged_logits

ADAPTED = sorted(folder.name for folder in (GOLDENS / "lora").iterdir())
FLOAT32 = jnp.dtype("float32")
FRONT = "base_model.model"
LAYER = f"{FRONT}.model.layers.0"
Q_A, Q_B = (f"{LAYER}.self_attn.q_proj.lora_{side}.weight" for side in "AB")


@pytest.mark.parametrize("uses_native", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ADAPTED)
def test_a_model_with_an_adapter_is_the_one_that_peft_merges_it_into(name, uses_native, monkeypatch):
    """The adapter is in the second of two slots; without one the bits are the model's own."""
    monkeypatch.setenv("JAXPAGED_NATIVE", str(int(uses_native)))
    checkpoint = loading.open_checkpoint(GOLDENS / "families" / name)
    stored = json.loads((GOLDENS / "lora" / name / "golden.json").read_text())
    model, names = checkpoint.model(LoadAs(FLOAT32)), checkpoint.module_names
    before = paged_logits(model, stored["token_ids"], 4, 8)
    assert np.abs(before[:: stored["every"]] - stored["logits"]).max() > 100 * TOLERANCE
    lora.make_room(model, names, num_adapters=2, rank=9)
    request = LoRARequest(name, 1, GOLDENS / "lora" / name)
    adapter_slots.put(model, lora.read(request, checkpoint.config, names, 9, FLOAT32), 1)
    assert_equal(paged_logits(model, stored["token_ids"], 4, 8, adapter=2), stored)
    np.testing.assert_array_equal(paged_logits(model, stored["token_ids"], 4, 8, adapter=0), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "front"), [("glm4", "model"), ("internvl", "model.language_model"), ("qwen3_vl", "model")]
)
def test_an_adapter_is_found_by_the_names_of_modules_and_put_in_the_decoders_order(name, front, tmp_path):
    """RoPE may turn neighbours, and the decoder may lie inside of another model. NumPy merges it here."""
    rng, checkpoint = np.random.default_rng(0), loading.open_checkpoint(GOLDENS / "families" / name)
    tensors = {key: np.asarray(x, np.float32) for key, x in checkpoint.load_weights().items()}
    merged, its = dict(tensors), {}
    for key in (key for key in tensors if key.endswith(("q_proj.weight", "k_proj.weight", "o_proj.weight"))):
        if "layers" not in key or "vision" in key:
            continue
        outputs, inputs = tensors[key].shape
        a, b = (
            rng.normal(size=(2, inputs)).astype(np.float32),
            rng.normal(size=(outputs, 2)).astype(np.float32),
        )
        merged[key] = tensors[key] + b @ a / 4
        module = f"base_model.model.{front}.layers.{key.partition('.layers.')[2].removesuffix('.weight')}"
        its |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 0.5}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    save_file(its, tmp_path / "adapter_model.safetensors")
    model, token_ids = checkpoint.model(LoadAs(FLOAT32)), list(range(20))
    lora.make_room(model, checkpoint.module_names, num_adapters=1, rank=2)
    request = LoRARequest("it", 1, tmp_path)
    adapter_slots.put(model, lora.read(request, checkpoint.config, checkpoint.module_names, 2, FLOAT32), 0)
    by_role = weights.by_role(checkpoint.config, checkpoint.names, merged)
    want = reference_model.logits(checkpoint.config, by_role, token_ids)
    got = paged_logits(model, token_ids, 4, 8, adapter=1)
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=TOLERANCE)


def test_room_makes_the_kernel_known_to_programs_that_are_read_back(monkeypatch):
    """Which are called without being traced."""
    asked, model = [], tiny.load(LoadAs(FLOAT32))
    monkeypatch.setattr(lora.native, "serves", lambda dtype, *functions: asked.extend(functions))
    lora.make_room(model, NAMES, num_adapters=1, rank=1)
    assert asked == ["low_rank"]


def read(folder, max_rank=8, dtype=FLOAT32):
    return lora.read(LoRARequest("it", 1, folder), tiny.CONFIG, NAMES, max_rank, dtype)


@pytest.mark.parametrize(
    ("said", "changed", "message"),
    [
        ({"peft_type": "IA3"}, {}, r"adapter_config.json: peft_type='IA3' must be 'LORA'"),
        ({"use_dora": True}, {}, r"use_dora=True must be False: more is not supported"),
        ({"bias": "all"}, {}, r"bias='all' must be 'none': more is not supported"),
        ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save=\['lm_head'\] must be \[\]: more"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, r"must be one that leaves the model's weights alone"),
        ({"init_lora_weights": "lora_ga"}, {}, r"must be one that leaves the model's weights alone"),
        ({"kasa_config": {"beta": 1}}, {}, r"kasa_config={.*} must be None: more is not supported"),
        ({"r": 0}, {}, r"adapter_config.json: r=0 must be a positive int"),
        ({"lora_alpha": "2"}, {}, r"lora_alpha='2' must be a number"),
        ({"rank_pattern": {"(": 2}}, {}, r"rank_pattern has '\(', which is no pattern"),
        ({"rank_pattern": {"(?=q)": 2}}, {}, r"rank_pattern has '\(\?=q\)', which is no pattern"),
        ({"rank_pattern": {"q" * 1001: 2}}, {}, r"must have patterns of at most 1000 characters"),
        (
            {"alpha_pattern": {"[a-z]{1,900}": 2, "[b-z]{1,900}.{900}" * 19: 2}},
            {},
            r"which is no pattern: pattern too large",
        ),
        ({"rank_pattern": {f"{i}[a-z]{{1,900}}": 2 for i in range(100)}}, {}, r"too many patterns, or too l"),
        ({"rank_pattern": dict.fromkeys(map(str, range(1025)), 2)}, {}, r"has 1025 patterns, must have at m"),
        ({"rank_pattern": {"\ud800": 2}}, {}, r"which is no pattern: it must be Unicode text"),
        ({"rank_pattern": ["q_proj"]}, {}, r"rank_pattern=\['q_proj'\] must be an object"),
        # Python's `re` would look at it for longer than anybody waits.
        ({"rank_pattern": {"([a-z_.0-9]+)+X": 4, "q_proj": 4}}, {}, r"q_proj.lora_A has shape \(5, 32\)"),
        ({"rank_pattern": {"q_proj": 4}}, {}, r"q_proj.lora_A has shape \(5, 32\), must be \(4, 32\)"),
        ({"r": 9}, {}, r"the rank of 'model.layers.0.*'=9 must be at most max_lora_rank=8"),
        ({}, {Q_B: np.ones((47, 5), np.float32)}, r"q_proj.lora_B has shape \(47, 5\), must be \(48, 5\)"),
        ({}, {Q_B: np.full((48, 5), np.inf, np.float32)}, r"q_proj.lora_B has NaN or infinity in it"),
        ({}, {Q_B: np.ones((48, 5), np.int8)}, r"q_proj.lora_B has type int8, must be float32"),
        ({}, {Q_A: None}, r"'model.layers.0.self_attn.q_proj' lacks its lora_A"),
        (
            {},
            {"base_model.model.lm_head.lora_A.weight": np.ones((5, 32), np.float32)},
            r"'base_model.model.lm_head.lora_A.weight' must be lora_A or lora_B of down_proj, gate_proj, ",
        ),
        (
            {},
            {Q_A.replace("layers.0", "layers.2"): np.ones((5, 32), np.float32)},
            r"layers.2.* must be lora_A or lora_B of .*, v_proj in a layer of the model",
        ),
        ({}, dict.fromkeys(tiny_lora.tensors(0)), r"adapter_model.safetensors must have at least one tensor"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_in_one_sentence(tmp_path, said, changed, message):
    with pytest.raises(InputError, match=f"^lora_path='{tmp_path}': .*{message}"):
        read(tiny_lora.write(tmp_path, changed=changed, **said))


def test_modules_of_a_vision_tower_are_left_out_as_the_models_own_are(tmp_path, caplog):
    """Adapters of all linear layers of a wrapper have them; without the wrapper they are of another model."""
    wrapper, its = WRAPPER_OF["gemma3"].names(NAMES), tiny_lora.tensors(0)
    away = dict.fromkeys(its)
    inside = away | {
        name.replace(".model.layers", ".model.language_model.layers"): x for name, x in its.items()
    }
    tower = f"{FRONT}.model.vision_tower.encoder.layers.0.self_attn.q_proj"
    tower = {f"{tower}.lora_{side}.weight": np.ones((300, 2), np.float32) for side in "AB"}

    def found(names, changed, **said):
        folder = tiny_lora.write(tmp_path, changed=changed, **said)
        return lora.read(LoRARequest("it", 1, folder), tiny.CONFIG, names, 8, FLOAT32)

    alone = found(NAMES, {})
    for changed in (inside | tower, tower, inside):  # of the wrapper, or of its decoder alone
        for role, pair in found(wrapper, changed).items():
            for got, want in zip(pair, alone[role], strict=True):
                np.testing.assert_array_equal(got, want)
    assert "2 tensors are left out: base_model.model.model.vision_tower" in caplog.text
    unknown = {f"{FRONT}.model.x.lora_A.weight": np.ones((5, 32), np.float32)}
    for names, changed, message in (
        (NAMES, tower, "vision_tower.* must be lora_A or lora_B of"),
        (wrapper, inside | unknown, "model.x.* must be lora_A or lora_B of"),
        (wrapper, away | tower, "must have at least one tensor of the model's text part"),
    ):
        with pytest.raises(InputError, match=message):
            found(names, changed)


def test_a_directory_that_is_no_adapter_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"there must be a directory with adapter_config.json"):
        read(tmp_path / "nowhere")
    tiny_lora.write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"^lora_path=.*: adapter_model.safetensors cannot be read"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"^lora_path=.*: adapter_config.json must be a JSON object"):
        read(tmp_path)
    for wrong in ({"lora_name": ""}, {"lora_int_id": 0}, {"lora_path": 3}):
        with pytest.raises(InputError, match=f"^{next(iter(wrong))}="):
            LoRARequest(**{"lora_name": "it", "lora_int_id": 1, "lora_path": "x"} | wrong)


def test_what_is_read_does_not_depend_on_the_file_s_type(tmp_path):
    """bfloat16 in the file; and in bfloat16 each number is the nearest one."""
    tensors = tiny_lora.tensors(0)
    rounded = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    wide = tiny_lora.write(tmp_path / "wide", changed={n: x.astype(np.float32) for n, x in rounded.items()})
    narrow = tiny_lora.write(tmp_path / "narrow", changed=rounded)
    want, got = read(wide), read(narrow)
    for role, arrays in want.items():
        for mine, its in zip(arrays, got[role], strict=True):
            np.testing.assert_array_equal(mine, its)
    near = read(narrow, dtype=jnp.dtype("bfloat16"))
    np.testing.assert_array_equal(near["o"][0], want["o"][0].astype(ml_dtypes.bfloat16))
