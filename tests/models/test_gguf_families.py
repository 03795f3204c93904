"""GGUF files of each architecture, written as llama.cpp's converter does, against what they were made of."""

import dataclasses

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.models import families, gguf_file, loading
from jaxpaged.models.config import LinearScaling, LongScaling, YarnScaling
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.weights import Parts, by_role
from reference import model as reference_model
from tests.models.test_decoder import GOLDENS, TOLERANCE, paged_logits
from tests.tiny_gguf import add_sizes, interleaved

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
    "falcon": "falcon",
    "falcon_grouped": "falcon",
    "gpt_neox": "gptneox",
    "gpt_neox_sequential": "gptneox",
    "gpt2": "gpt2",
    "bloom": "bloom",
    "mpt": "mpt",
}
INTERLEAVED = ("llama", "mixtral", "granite", "smollm3")
# The tiny models differ here from all real ones, of which llama.cpp knows it by the architecture.
UNSAID = {"qwen3_moe": {"renormalise": True}, "gpt_oss": {"glu_limit": 7.0}}
# These have no window in the file.
WINDOWLESS = ("qwen2", "starcoder2")


def tensors_of(checkpoint):
    """By llama.cpp's names, and in its forms."""
    name, c, weights = checkpoint.path.name, checkpoint.config, dict(checkpoint.load_weights())
    theirs = gguf.get_tensor_name_map(architecture(name), c.num_layers)
    for full, each in weights.items():
        weight = np.asarray(each, np.float32)
        if ".experts." in full:
            continue
        if name.startswith("gemma") and full.endswith("norm.weight"):
            weight = weight + np.float32(1)
        for part, num_heads in (("q_proj", c.num_q_heads), ("k_proj", c.num_kv_heads)):
            if name in INTERLEAVED and part in full:
                weight = interleaved(weight, num_heads)
        if "query_key_value" in full:
            per_head = weight.reshape(c.num_kv_heads, -1, c.head_dim, *weight.shape[1:])
            cuts = np.split(per_head, [per_head.shape[1] - 2, per_head.shape[1] - 1], axis=1)
            weight = np.concatenate([cut.reshape(-1, *weight.shape[1:]) for cut in cuts])
        if name == "gpt2" and weight.ndim == 2 and ".h." in full:
            weight = weight.T
        if full.endswith("sinks"):
            full += ".weight"
        if name == "bloom":
            full = full.removeprefix("transformer.")
        found = theirs.get_name(full, try_suffixes=(".weight", ".bias"))
        assert found is not None, full
        yield found, np.ascontiguousarray(weight)
    for layer in range(c.num_layers if c.experts else 0):
        for part, weight in experts_of(name, weights, layer, c.experts.num_experts):
            yield f"blk.{layer}.{part}", np.ascontiguousarray(weight, np.float32)


def experts_of(name, weights, layer, num_experts):
    """Gates, ups and downs of all experts of a layer, each in one tensor."""
    if name != "gpt_oss":
        parts = {
            "mixtral": ("block_sparse_moe", "w1 w3 w2"),
            "qwen3_moe": ("mlp", "gate_proj up_proj down_proj"),
        }
        module, parts = parts[name]
        for ours, theirs in zip(parts.split(), ("gate", "up", "down"), strict=True):
            each = [f"model.layers.{layer}.{module}.experts.{i}.{ours}.weight" for i in range(num_experts)]
            yield f"ffn_{theirs}_exps.weight", np.stack([weights[one] for one in each])
        return
    prefix = f"model.layers.{layer}.mlp.experts"
    for ending, stored in (("weight", ""), ("bias", "_bias")):
        gate_up, down = weights[f"{prefix}.gate_up_proj{stored}"], weights[f"{prefix}.down_proj{stored}"]
        yield f"ffn_gate_exps.{ending}", gate_up[..., ::2].swapaxes(1, -1)
        yield f"ffn_up_exps.{ending}", gate_up[..., 1::2].swapaxes(1, -1)
        yield f"ffn_down_exps.{ending}", down.swapaxes(1, -1)


def architecture(name):
    return next(key for key, its in gguf.MODEL_ARCH_NAMES.items() if its == ARCHITECTURES[name])


def write(path, checkpoint, quantised=()):
    c, name = checkpoint.config, checkpoint.path.name
    writer = gguf.GGUFWriter(path, ARCHITECTURES[name])
    add_sizes(writer, c)
    add_rope(writer, c)
    if c.attention_soft_cap is not None:
        writer.add_attn_logit_softcapping(c.attention_soft_cap)
    if c.logit_soft_cap is not None:
        writer.add_final_logit_softcapping(c.logit_soft_cap)
    if any(kind.sliding_window for kind in c.layers) and name not in WINDOWLESS:
        writer.add_sliding_window(12)
    if c.experts is not None:
        writer.add_expert_count(c.experts.num_experts)
        writer.add_expert_used_count(c.experts.num_chosen)
        writer.add_expert_feed_forward_length(c.intermediate_size)
    if name == "granite":
        writer.add_embedding_scale(c.embedding_scale)
        writer.add_residual_scale(c.residual_scale)
        writer.add_attention_scale(c.attention_scale)
        writer.add_logit_scale(c.logit_divisor)
    if name.startswith("gpt_neox"):
        writer.add_parallel_residual(c.parallel)
    if name == "mpt":
        writer.add_clamp_kqv(c.qkv_clip)
        writer.add_max_alibi_bias(8.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(c.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * c.vocab_size)
    writer.add_token_merges([])
    writer.add_eos_token_id(2)
    for tensor, values in tensors_of(checkpoint):
        if tensor.endswith(quantised or "none"):
            raw = gguf.quantize(values, gguf.GGMLQuantizationType.MXFP4)
            writer.add_tensor(tensor, raw, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(tensor, values)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()


def add_rope(writer, config):
    rope = next((kind.rope for kind in config.layers if kind.rope), None)
    if rope is not None and rope.dim != config.head_dim:
        writer.add_rope_dimension_count(rope.dim)
    for scaling in {kind.rope.scaling for kind in config.layers if kind.rope and kind.rope.scaling}:
        if isinstance(scaling, LongScaling):
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_len)
            writer.add_rope_scaling_attn_factors(scaling.attention_factor)
            for kind in ("short", "long"):
                factors = getattr(scaling, f"{kind}_factors")
                writer.add_tensor(f"rope_factors_{kind}.weight", np.asarray(factors, np.float32))
        if isinstance(scaling, LinearScaling | YarnScaling):
            kind = "YARN" if isinstance(scaling, YarnScaling) else "LINEAR"
            writer.add_rope_scaling_type(gguf.RopeScalingType[kind])
            writer.add_rope_scaling_factor(scaling.factor)
        if isinstance(scaling, YarnScaling):
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_len)


def as_file_says(name, config):
    """The description that a file of the model has: its numbers have 32 bits."""
    said = dataclasses.asdict(config)
    if config.experts is not None:
        said["experts"] |= UNSAID.get(name, {})
    if name in WINDOWLESS:
        said["layers"] = [kind | {"sliding_window": None} for kind in said["layers"]]
    return rounded(said)


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def read(path):
    reader = gguf_file.open_file(path)
    config = gguf_file.model_config(reader, path)
    return config, by_role(config, gguf_file.names(reader, path), gguf_file.load_weights(reader, path))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_is_the_model_it_was_made_of(tmp_path, name):
    directory = loading.open_checkpoint(GOLDENS / "families" / name)
    path = tmp_path / "a.gguf"
    write(path, directory)
    config, found = read(path)
    want = as_file_says(name, directory.config)
    if name == "gemma3_text":  # four layers are not enough for the one in six that sees all
        assert config.layers == (directory.config.layers[0],) * 4
        want["layers"] = rounded(dataclasses.asdict(config))["layers"]
    if name in ("gemma2", "gemma3_text"):  # llama.cpp knows it by the number of layers
        want["attention_scale"] = 0.25
    assert rounded(dataclasses.asdict(config)) == want
    want = by_role(directory.config, directory.names, directory.load_weights())
    assert found.keys() == want.keys()
    for role, weight in want.items():
        np.testing.assert_allclose(found[role], weight, rtol=0, atol=1e-6, err_msg=role)


def test_gemma3s_sixth_layers_see_all_with_a_rope_of_their_own(tmp_path):
    directory, path = loading.open_checkpoint(GOLDENS / "families" / "gemma3_text"), tmp_path / "a.gguf"
    sliding, full = directory.config.layers[1:3]
    layers = (*[sliding] * 5, full)
    config = dataclasses.replace(directory.config, layers=layers)
    write(path, dataclasses.replace(directory, config=config))
    assert gguf_file.model_config(gguf_file.open_file(path), path).layers == layers


def test_experts_in_mxfp4(tmp_path):
    """As gpt-oss has them: dequantised, or kept as they are, and what has other types is not."""
    directory, path = loading.open_checkpoint(GOLDENS / "mxfp4"), tmp_path / "a.gguf"
    wide = by_role(directory.config, directory.names, directory.load_weights())
    weights = dict(directory.load_weights())
    for name in [name for name in weights if name.endswith("_proj.0")]:  # as files in bfloat16 have them
        stem = name.removesuffix(".0")
        weights[stem] = np.stack([weights.pop(f"{stem}.{i}").T for i in range(4)])
    gpt_oss = GOLDENS / "families" / "gpt_oss"
    directory = dataclasses.replace(directory, path=gpt_oss, load_weights=lambda: weights)
    write(path, directory, quantised=("gate_exps.weight", "up_exps.weight"))
    found = read(path)[1]
    for role, weight in wide.items():  # which had the numbers of MXFP4 before
        np.testing.assert_allclose(found[role], weight, rtol=0, atol=1e-6, err_msg=role)
    reader = gguf_file.open_file(path)
    config, names = gguf_file.model_config(reader, path), gguf_file.names(reader, path)
    tensors, quantisation = gguf_file.load_weights(reader, path), gguf_file.quantisation(reader)
    model = Decoder(Parts(config, names, tensors, jnp.dtype("float32"), quantisation))
    experts = model.layers.mlp.gate_up, model.layers.mlp.down
    kept = [{linear.is_quantised for linear in each.linears} for each in experts]
    assert kept == [{True}, {False}]
    tokens = list(range(5, 31))
    got, want = paged_logits(model, tokens, 8, 13), reference_model.logits(config, found, tokens)
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=TOLERANCE)


def test_all_that_have_a_gguf_architecture_are_tested():
    assert set(ARCHITECTURES.values()) == set(families.ARCHITECTURES)


def test_an_olmo3_in_a_file_of_olmo2s_architecture_is_refused(tmp_path):
    directory, path = loading.open_checkpoint(GOLDENS / "families" / "olmo2"), tmp_path / "a.gguf"
    layers = tuple(dataclasses.replace(kind, sliding_window=12) for kind in directory.config.layers)
    write(path, dataclasses.replace(directory, config=dataclasses.replace(directory.config, layers=layers)))
    with pytest.raises(InputError, match="sliding_window=12 must be None or left out"):
        read(path)
