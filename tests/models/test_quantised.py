"""Models whose weights stay quantised: the same numbers as their oracle's, natively and by XLA."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.checks import InputError
from jaxpaged.models import layers, loading
from jaxpaged.models.decoder import Decoder, abstract
from jaxpaged.models.files.gguf import blocks as gguf_blocks
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.quantised.codes import packed
from jaxpaged.models.quantised.on_load import OnLoad
from jaxpaged.models.weights import StoredWeights, by_role
from reference import model as reference_model
from reference import quantisation, quantised_checkpoints
from tests.models.test_decoder import GOLDENS, TOLERANCE, paged_logits
from tests.tiny_gguf import write_gguf

FLOAT32 = jnp.dtype("float32")
TOKENS = list(range(5, 31))
# Queries and keys of one kind beside values of another, which is not the same in both layers; what is left
# out is float32, for its rows are no whole blocks.
FORMATS = {
    "token_embd": "Q8_0",
    "attn_q": "Q4_0",
    "attn_k": "Q4_0",
    "blk.0.attn_v": "Q8_0",
    "blk.1.attn_v": "Q5_1",
    "ffn_gate": "Q4_1",
    "ffn_up": "Q5_0",
}
each_form = pytest.mark.parametrize("use_native", ["1", "0"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return loading.open_checkpoint(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", kinds=FORMATS))


@each_form
def test_a_gguf_file_s_weights_are_kept_as_they_are(checkpoint, use_native, monkeypatch):
    """Layers in a loop, in groups by how they are kept, and one by one."""
    monkeypatch.setenv("JAXPAGED_NATIVE", use_native)
    wide, kept = (checkpoint.model(LoadAs(FLOAT32, how)) for how in (None, "gguf"))
    got = paged_logits(kept, TOKENS, 8, 13)
    np.testing.assert_allclose(got, paged_logits(wide, TOKENS, 8, 13), atol=TOLERANCE, rtol=TOLERANCE)
    dtypes = [leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(kept))]
    # Of native products a segment of several layers is one array.
    assert dtypes.count("uint32") == (1 + 2 * 2 + 2 if use_native == "1" else 1 + 2 * (2 + 2))
    assert kept.lm_head is None


@each_form
def test_layers_of_several_kinds_are_found_in_their_groups(use_native, monkeypatch):
    monkeypatch.setenv("JAXPAGED_NATIVE", use_native)
    rng = np.random.default_rng(0)
    weights = [
        packed(
            [(gguf_blocks.FORMATS[kind], gguf_blocks.quantised(rng.random((40, 64)), kind, "a"))], 64, FLOAT32
        )
        for kind in ("Q8_0", "Q4_0", "Q4_0", "Q8_0")
    ]

    def each(*numbers, groups=()):
        return layers.Each(len(numbers), lambda: iter([weights[i] for i in numbers]), groups)

    groups = [([0, 3], each(0, 3)), ([1, 2], each(1, 2))]
    linear = layers.Linear(each(0, 1, 2, 3, groups=groups), together=True)
    x = jnp.asarray(rng.random((3, 64), np.float32))
    for i, weight in enumerate(weights):
        np.testing.assert_array_equal(linear(x, jnp.int32(i)), layers.quantised_product(x, weight))


@each_form
@pytest.mark.parametrize("how", ["gguf", "int4"])
def test_a_models_shapes_are_known_before_it_is_read(checkpoint, how, use_native, monkeypatch):
    monkeypatch.setenv("JAXPAGED_NATIVE", use_native)
    shapes = nnx.split(
        abstract(checkpoint.config, LoadAs(FLOAT32), checkpoint.names, checkpoint.quantisation(how))
    )
    built = nnx.split(checkpoint.model(LoadAs(FLOAT32, how)))
    assert jax.tree.structure(shapes) == jax.tree.structure(built)
    for want, got in zip(*map(jax.tree.leaves, (shapes, built)), strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)


def quantised_weights(checkpoint, how):
    """Return the oracle's weights, those of products quantised and dequantised."""
    found = by_role(checkpoint.config, checkpoint.names, checkpoint.load_weights())
    if how == "fp8":
        roles = ("qkv", "o", "gate_up", "down", "embedding", "lm_head")
        chosen = {role for role in found if role.endswith(".weight") and role.split(".")[-2] in roles}
        return found | {role: quantised_checkpoints.as_e4m3(found[role]) for role in chosen}
    kinds = dict.fromkeys(("qkv", "o", "gate_up", "down"), quantisation.ON_LOAD[how])
    kinds |= dict.fromkeys(("embedding", "lm_head"), "Q8_0")
    for role, weight in found.items():
        kind = kinds.get(role.split(".")[-2]) if role.endswith(".weight") else None
        if kind is not None:
            blocks = quantisation.quantise(np.pad(weight, ((0, 0), (0, -weight.shape[1] % 32))), kind)
            found[role] = quantisation.dequantise(blocks, kind)[:, : weight.shape[1]]
    return found


@each_form
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("gqa_tied", "int8"),
        ("families/qwen2", "int4"),
        ("families/qwen3_moe", "int4"),
        pytest.param("families/qwen2", "fp8", marks=pytest.mark.slow),
        pytest.param("families/glm4_moe", "int8", marks=pytest.mark.slow),
    ],
)
def test_a_model_quantised_on_load(name, how, use_native, monkeypatch):
    """Inputs that are no whole groups; tied and untied heads; biases; experts."""
    monkeypatch.setenv("JAXPAGED_NATIVE", use_native)
    checkpoint = loading.open_checkpoint(GOLDENS / name)
    weights = quantised_weights(checkpoint, how)
    want = reference_model.logits(checkpoint.config, weights, TOKENS)
    got = paged_logits(checkpoint.model(LoadAs(FLOAT32, how)), TOKENS, 8, 13)
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
def test_what_cannot_be_kept_or_quantised(checkpoint):
    directory = loading.open_checkpoint(GOLDENS / "gqa_tied")
    with pytest.raises(
        InputError, match="quantization='gguf' must be None, int8, int4 or fp8 for a model that"
    ):
        directory.model(LoadAs(FLOAT32, "gguf"))
    huge = {name: 1e9 * np.asarray(weight) for name, weight in directory.load_weights().items()}
    with pytest.raises(InputError, match=r"weight 'embedding.weight' has NaN or infinity in it"):
        Decoder(StoredWeights(directory.config, directory.names, huge, LoadAs(FLOAT32), OnLoad("int8")))
    blocks = np.array([0, 0x7C, *[0] * 32], np.uint8)[None]  # an infinite scale
    with pytest.raises(InputError, match=r"weight 'a' has NaN or infinity in it"):
        gguf_blocks.rows(blocks, "Q8_0", "a")
    assert (
        {*gguf_blocks.FORMATS} == {*quantisation.BLOCKS} <= {kind.name for kind in gguf.GGMLQuantizationType}
    )
