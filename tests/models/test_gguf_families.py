"""GGUF files of each architecture, written as llama.cpp's converter does, against what they were made of."""

import dataclasses
import json

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.models import families, loading
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.files.gguf import file as gguf_file
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.names import layers_with
from jaxpaged.models.ropes import LinearScaling, LongScaling, YarnScaling
from jaxpaged.models.weights import StoredWeights, by_role
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
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "ernie4_5": "ernie4_5",
    "olmoe": "olmoe",
    "cohere": "command-r",
    "cohere_normed": "command-r",
    "cohere2": "cohere2",
    "glm4": "glm4",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "stablelm": "stablelm",
    "stablelm_parallel": "stablelm",
    "arcee": "arcee",
    "nemotron": "nemotron",
    "hunyuan_v1_dense": "hunyuan-dense",
    "glm4_moe": "glm4moe",
    "dots1": "dots1",
    "minimax_m2": "minimax-m2",
    "qwen2_moe": "qwen2moe",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
}
INTERLEAVED = ("llama", "mixtral", "granite", "smollm3", "arcee", "granitemoe", "granitemoeshared")
# What is read of these is read of another, too.
LIKE_OTHERS = {
    *("cohere", "granitemoe", "stablelm_parallel", "hunyuan_v1_dense", "arcee", "olmoe", "seed_oss"),
    *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
}
GRANITES = ("granite", "granitemoe", "granitemoeshared")
# The tiny models differ here from all real ones, of which llama.cpp knows it by the architecture.
UNSAID = {"qwen3_moe": {"renormalise": True}, "gpt_oss": {"glu_limit": 7.0}}
# These have no window in the file.
WINDOWLESS = ("qwen2", "starcoder2", "dots1")


def tensors_of(checkpoint):
    """Return a checkpoint's tensors under llama.cpp's names and in its forms."""
    name, c, weights = checkpoint.path.name, checkpoint.config, dict(checkpoint.load_weights())
    theirs = gguf.get_tensor_name_map(architecture(name), c.num_layers)
    for stored, each in weights.items():
        full, weight = checkpoint.names.name_of(stored), np.asarray(each, np.float32)
        if ".experts." in full or "_linear." in full or full.startswith(checkpoint.names.ignored):
            continue
        if full.endswith("e_score_correction_bias"):
            yield f"blk.{full.split('.')[2]}.exp_probs_b.bias", weight
            continue
        if name.startswith(("gemma", "nemotron")) and full.endswith("norm.weight"):
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
    for layer in layers_with(c, "experts") if c.experts else ():
        for part, weight in experts_of(name, weights, layer, c.experts.num_experts):
            yield f"blk.{layer}.{part}", np.ascontiguousarray(weight, np.float32)


def experts_of(name, weights, layer, num_experts):
    """Return the gate, up and down weights of a layer's experts, each role in one tensor."""
    if name.startswith("granitemoe"):
        for module, ending in (("block_sparse_moe", "exps"), ("shared_mlp", "shexp")):
            prefix = f"model.layers.{layer}.{module}"
            if f"{prefix}.input_linear.weight" in weights:
                gate, up = np.split(weights[f"{prefix}.input_linear.weight"], 2, axis=-2)
                down = weights[f"{prefix}.output_linear.weight"]
                for part, weight in (("gate", gate), ("up", up), ("down", down)):
                    yield f"ffn_{part}_{ending}.weight", weight
        return
    if name == "qwen3_vl_moe":
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up = np.split(weights[f"{prefix}.gate_up_proj"].swapaxes(1, 2), 2, axis=1)
        yield "ffn_gate_exps.weight", gate
        yield "ffn_up_exps.weight", up
        yield "ffn_down_exps.weight", weights[f"{prefix}.down_proj"].swapaxes(1, 2)
        return
    if name != "gpt_oss":
        parts = dict.fromkeys(("mixtral", "minimax_m2"), ("block_sparse_moe", "w1 w3 w2"))
        module, parts = parts.get(name, ("mlp", "gate_proj up_proj down_proj"))
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


def write(path, checkpoint, quantised=(), beyond=None):
    c, name = checkpoint.config, checkpoint.path.name
    writer = gguf.GGUFWriter(path, ARCHITECTURES[name])
    # Files have the length before the scaling, as configs have.
    said = json.loads((checkpoint.path / "config.json").read_text())
    length = said.get("max_position_embeddings", c.max_model_len)
    add_sizes(writer, dataclasses.replace(c, max_model_len=length))
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
        add_routing(writer, name, c.experts)
    if name.startswith("cohere"):
        writer.add_logit_scale(1 / c.logit_divisor)
    if name.startswith("stablelm"):
        writer.add_parallel_residual(c.parallel)
    if name == "exaone4":
        writer.add_sliding_window_pattern([kind.sliding_window is not None for kind in c.layers])
    if name in GRANITES:
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
    if beyond:
        writer.add_uint32(f"{ARCHITECTURES[name]}.block_count", c.num_layers + 1)
        writer.add_nextn_predict_layers(1)
    for tensor, values in [*tensors_of(checkpoint), *(beyond or {}).items()]:
        if tensor.endswith(quantised or "none"):
            raw = gguf.quantize(values, gguf.GGMLQuantizationType.MXFP4)
            writer.add_tensor(tensor, raw, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(tensor, values)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()


def add_routing(writer, name, experts):
    if name in ("qwen2_moe", "granitemoeshared"):
        writer.add_expert_shared_feed_forward_length(experts.shared_size)
    if experts.scoring == "sigmoid":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(experts.renormalise)
    if experts.dense_layers:
        writer.add_leading_dense_block_count(len(experts.dense_layers))
        writer.add_expert_shared_count(2)
        writer.add_expert_weights_scale(experts.scale)
        writer.add_expert_group_count(experts.num_groups)
        writer.add_expert_group_used_count(experts.num_chosen_groups)


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
    """Return the description that a file of the model has: its numbers have 32 bits."""
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


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else []) for name in ARCHITECTURES],
)
def test_a_gguf_file_is_the_model_it_was_made_of(tmp_path, name):
    directory = loading.open_checkpoint(GOLDENS / "families" / name)
    path = tmp_path / "a.gguf"
    write(path, directory)
    config, found = read(path)
    want = as_file_says(name, directory.config)
    if name in ("gemma3_text", "cohere2"):  # that one layer in six, or in four, sees all: there are too few
        assert config.layers == (directory.config.layers[0],) * directory.config.num_layers
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
    """Experts as in gpt-oss are dequantised or kept; tensors of other types are dequantised."""
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
    model = Decoder(StoredWeights(config, names, tensors, LoadAs(jnp.dtype("float32")), quantisation))
    experts = model.layers.mlp.gate_up, model.layers.mlp.down
    kept = [{linear.is_quantised for linear in each.linears} for each in experts]
    assert kept == [{True}, {False}]
    tokens = list(range(5, 31))
    got, want = paged_logits(model, tokens, 8, 13), reference_model.logits(config, found, tokens)
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=TOLERANCE)


def test_all_that_have_a_gguf_architecture_are_tested():
    assert set(ARCHITECTURES.values()) == set(families.ARCHITECTURES)


@pytest.mark.parametrize(("name", "architecture"), [("olmo3", "olmo2"), ("cohere2", "cohere2")])
def test_one_layer_in_four_sees_all(name, architecture, tmp_path, monkeypatch):
    """OLMo 3 has OLMo 2's architecture, and a window; it scales the RoPE of the fourth layers alone."""
    monkeypatch.setitem(ARCHITECTURES, name, architecture)
    directory, path = loading.open_checkpoint(GOLDENS / "families" / name), tmp_path / "a.gguf"
    sliding, full = directory.config.layers
    config = dataclasses.replace(directory.config, layers=(*[sliding] * 3, full))
    write(path, dataclasses.replace(directory, config=config))
    found = gguf_file.model_config(gguf_file.open_file(path), path)
    assert rounded(dataclasses.asdict(found)) == rounded(dataclasses.asdict(config))


def header(path, architecture, order=gguf.GGUFEndian.LITTLE, **more):
    """Write the header of a model of six layers, with more keys; dots of their names are written as `__`."""
    writer = gguf.GGUFWriter(path, architecture, endianess=order)
    sizes = {"context_length": 128, "embedding_length": 32, "feed_forward_length": 48, "block_count": 6}
    heads = {"head_count": 4, "head_count_kv": 2, "key_length": 8, "layer_norm_rms_epsilon": 1e-6}
    said = sizes | {f"attention.{name}": value for name, value in heads.items()}
    for name, value in (said | {name.replace("__", "."): value for name, value in more.items()}).items():
        kinds = {
            bool: writer.add_bool,
            float: writer.add_float32,
            int: writer.add_uint32,
            str: writer.add_string,
        }
        kinds.get(type(value), writer.add_array)(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a"])
    writer.add_token_types([2, 3, 3, 1])
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    return path


def described(path):
    return gguf_file.model_config(gguf_file.open_file(path), path)


@pytest.mark.parametrize(
    ("said", "windows", "thetas"),
    [
        ({}, [8] * 5 + [None], {1e4, 1e6}),
        ({"attention__sliding_window_pattern": 2}, [8, None] * 3, {1e4, 1e6}),
        ({"attention__sliding_window_pattern": 0}, [8] * 6, {1e4}),
        (
            {"attention__sliding_window_pattern": [False, *[True] * 4, False, True]},
            [None, *[8] * 4, None],
            None,
        ),
        ({"rope__freq_base_swa": 5e3, "rope__freq_base": 7e5}, [8] * 5 + [None], {5e3, 7e5}),
        # Neutral, or what the model is without them.
        ({"attention__value_length": 8, "rope__dimension_count": 8}, [8] * 5 + [None], None),
        ({"attention__causal": True, "expert_count": 0, "logit_scale": 1.0}, [8] * 5 + [None], None),
        ({"attn_logit_softcapping": 50.0, "vision__block_count": 3, "vocab_size": 9}, [8] * 5 + [None], None),
    ],
)
def test_what_a_header_says_of_windows_and_rope_is_used(tmp_path, said, windows, thetas):
    more = {"attention__sliding_window": 8} | said
    config = described(header(tmp_path / "a.gguf", "gemma3", **more))
    assert [kind.sliding_window for kind in config.layers] == windows
    assert thetas is None or {kind.rope.theta for kind in config.layers} == thetas
    assert config.attention_soft_cap is None


@pytest.mark.parametrize(
    ("architecture", "name", "value", "rule"),
    [
        ("gemma3", "attention__sliding_window_pattern", [True], "a number, or 6 of which each says whether"),
        ("gemma3", "attention__value_length", 4, "8 or left out: anything else is another arithmetic"),
        ("gemma3", "attention__key_length_swa", 4, "8 or left out"),
        ("gemma3", "attention__shared_kv_layers", 2, "left out: anything else"),
        ("llama", "attention__causal", False, "True or left out"),
        ("llama", "rope__freq_base_swa", 5e3, "10000.0 or left out"),
        ("llama", "rope__dimension_count", 4, "8 or left out"),
        ("llama", "rope__scaling__attn_factor", 1.5, "1.0 or left out"),
        ("llama", "rope__scaling__yarn_log_multiplier", 0.5, "left out"),
        ("llama", "rope__scaling__unheard_of", 2, "left out"),
        ("llama", "expert_count", 8, "left out"),
        ("llama", "logit_scale", 0.25, "1.0 or left out"),
        ("llama", "attn_logit_softcapping", 30.0, "left out"),
        ("llama", "hidden_activation", "relu", "'silu' or 'swish' or left out"),
        ("llama", "nextn_predict_layers", 1, "left out"),
        ("qwen2", "attention__sliding_window", 8, "left out"),
    ],
)
def test_a_key_that_changes_the_arithmetic_is_not_passed_over(tmp_path, architecture, name, value, rule):
    path = header(tmp_path / "a.gguf", architecture, **({"attention__sliding_window": 8} | {name: value}))
    with pytest.raises(InputError, match=rf"{name.replace('__', '.')}=.* must be {rule}"):
        described(path)


def test_a_file_for_big_endian_machines_is_told_as_such(tmp_path):
    path = header(tmp_path / "a.gguf", "llama", gguf.GGUFEndian.BIG)
    with pytest.raises(InputError, match=r"a.gguf' must be little-endian: its byte order is big-endian"):
        gguf_file.open_file(path)


def test_blocks_that_predict_further_tokens_are_not_read(tmp_path):
    directory, path = loading.open_checkpoint(GOLDENS / "families" / "glm4_moe"), tmp_path / "a.gguf"
    write(path, directory, beyond={"blk.3.nextn.eh_proj.weight": np.ones((2, 32), np.float32)})
    config, found = read(path)
    assert config.num_layers == 3
    assert not any(role.startswith("layers.3") for role in found)


def test_a_scoring_of_experts_that_is_not_the_familys_is_refused(tmp_path, monkeypatch):
    directory, path = loading.open_checkpoint(GOLDENS / "families" / "dots1"), tmp_path / "a.gguf"
    monkeypatch.setattr(gguf.ExpertGatingFuncType.SIGMOID, "_value_", 1)
    write(path, directory)
    with pytest.raises(InputError, match="expert_gating_func=1 must be 2, a sigmoid"):
        read(path)
