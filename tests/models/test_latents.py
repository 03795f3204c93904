"""Latent attention in models and engines: what is refused, how files are read, and quantised products."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.checks import InputError
from jaxpaged.models import loading
from jaxpaged.models.families import from_hf
from jaxpaged.models.load_as import LoadAs
from jaxpaged.research.lab import decoders
from pallas_kernels import layouts
from tests import tiny, tiny_latents
from tests.models.test_decoder import GOLDENS, paged_logits, stored
from tests.models.test_families import hf, without


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": True}, "enable_lora=True must be False with latent attention"),
        (
            {"kv_cache_dtype": "int8"},
            "kv_layout='token_major' with kv_cache_dtype='int8' must be 'token_major' with 'auto' for",
        ),
        ({"kv_layout": "head_major"}, "kv_layout='head_major' with .* must be 'token_major' with 'auto' for"),
    ],
)
def test_options_that_latents_do_not_serve_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        tiny_latents.driver(**tiny.SMALL | options)


def test_other_models_have_no_cache_of_keys_alone():
    with pytest.raises(InputError, match="kv_layout=.* must go with latent attention: it has no place for"):
        tiny.driver(**tiny.SMALL, kv_layout=layouts.Latent())


def test_the_words_of_the_layout_make_it_again():
    words = layouts.words(layouts.Latent())
    assert words == {
        "kv_layout": "token_major",
        "kv_cache_dtype": "auto",
        "measures_scales": False,
        "keys_alone": True,
    }
    assert layouts.choose(**words) == layouts.Latent()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False must be True or left out"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 must be 4 or left out"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 must be even"),
        (
            "deepseek_v3",
            {"scoring_func": "softmax"},
            "scoring_func='softmax' must be 'sigmoid' or 'noaux_tc'",
        ),
        ("deepseek_v3", {"v_head_dim": 0}, "v_head_dim=0 must be an int >= 1"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' must be 'greedy' or 'group_lim"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True must be False or left out"),
        ("deepseek_v2", {"n_group": 3}, "groups of experts=3 must be a divisor of 8"),
        ("mistral4", {"qk_nope_head_dim": 12}, "the rotated part of a head=11 must be 8, qk_rope_head_dim"),
    ],
)
def test_what_is_another_arithmetic_is_refused(name, change, message):
    with pytest.raises(InputError, match=message):
        from_hf(hf(name) | change)


def test_older_configs_say_the_same():
    """`rope_scaling` and `rope_theta` beside the other fields, as the published files have them."""
    said = without(hf("deepseek_v3"), "rope_parameters")
    rope = dict(hf("deepseek_v3")["rope_parameters"])
    old = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": rope.pop("rope_type")}}
    assert from_hf(said | old) == from_hf(hf("deepseek_v3"))
    assert from_hf(hf("kimi_k2")) == from_hf(hf("deepseek_v3_plain"))


def test_scores_have_the_factor_of_yarn():
    """0.1 * 0.9 * log(4) + 1, squared, times the root of 6 + 8 coordinates."""
    config = from_hf(hf("deepseek_v3"))
    np.testing.assert_allclose(config.scale, 14**-0.5 * (0.09 * np.log(4) + 1) ** 2)
    np.testing.assert_allclose(from_hf(hf("deepseek_v3_plain")).scale, 14**-0.5)


def test_the_laboratory_counts_one_vector_a_token():
    """24 + 8 numbers of two bytes, in three layers."""
    assert decoders.of_config(hf("deepseek_v3")).kv_bytes == 3 * 2 * 32


@pytest.mark.slow
def test_products_with_latents_of_each_head_stay_unquantised():
    golden = stored("families/deepseek_v3")
    checkpoint = loading.open_checkpoint(GOLDENS / "families/deepseek_v3")
    float32 = jnp.dtype("float32")
    model = checkpoint.model(LoadAs(float32, "int8"))
    attention = model.layers.attention
    assert all(each.is_quantised for each in (attention.q_a, attention.q, attention.kv_a))
    assert attention.k_up.kernel.holding(0)[0].dtype == attention.v_up.kernel.holding(0)[0].dtype == float32
    logits = paged_logits(model, golden["token_ids"], 8, 8)[:: golden["every"]]
    want = np.array(golden["logits"])
    # Codes of 8 bits err by up to 1/254 of a group's largest number, in each of some 30 products.
    assert np.abs(logits - want).mean() < 0.05 * np.abs(want).max()


@pytest.mark.slow
def test_a_file_in_fp8_with_blocks_of_scales_is_its_numbers(tmp_path):
    """Products of each head are widened, others stay as they are: both are the numbers of the codes."""
    folder, block = GOLDENS / "families/deepseek_v3", 32
    said, codes, numbers = hf("deepseek_v3"), {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            codes[name] = numbers[name] = weight
            continue
        shape = tuple(-(-size // block) for size in weight.shape)
        scales = (0.001 + np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 4096).astype(
            np.float32
        )
        wide = np.kron(scales, np.ones((block, block), np.float32))[tuple(map(slice, weight.shape))]
        code = np.clip(weight.astype(np.float32) / wide, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        codes |= {name: code, f"{name.removesuffix('weight')}weight_scale_inv": scales}
        numbers[name] = code.astype(np.float32) * wide
    found = []
    quantised = {"quant_method": "fp8", "weight_block_size": [block, block]}
    for which, tensors, more in (("codes", codes, {"quantization_config": quantised}), ("wide", numbers, {})):
        path = tmp_path / which
        path.mkdir()
        (path / "config.json").write_text(json.dumps(said | more))
        save_file(
            {name: np.ascontiguousarray(its) for name, its in tensors.items()}, path / "model.safetensors"
        )
        model = loading.open_checkpoint(path).model(LoadAs(jnp.dtype("float32")))
        assert model.layers.attention.q.is_quantised == (which == "codes")
        found.append(paged_logits(model, stored("families/deepseek_v3")["token_ids"], 8, 8))
    np.testing.assert_allclose(*found, atol=2e-4, rtol=2e-4)
