"""Make the tiny EAGLE-3 heads of this folder, and what vLLM computes with them.

Run once, with Python 3.11 and vLLM 0.32.0 for CPUs:
    VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 python tests/goldens/make_eagle3.py
Each folder gets config.json, model.safetensors and golden.json: hidden states behind three layers, embeddings
of tokens, and what vLLM's head makes of them. Its attention is that of torch, for all tokens at once.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

HERE = Path(__file__).parent / "eagle3"
COMMON = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SERVED = COMMON | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "tie_word_embeddings": True}
HEAD = COMMON | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "draft_vocab_size": 40,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}
VARIANTS = {
    "plain": {},
    "normed": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "attention_bias": True,
    },
}
NUM_TOKENS = 9


def attended(self, q, k, v, *_, **__):
    """Return causal attention over all tokens."""
    n, groups = len(q), self.num_heads // self.num_kv_heads
    heads = (x.view(n, -1, self.head_size).transpose(0, 1) for x in (q, k, v))
    q, k, v = heads
    k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(0, 1).reshape(n, -1)


def shapes(said):
    """Return the shapes of a head's weights."""
    hidden, wide, q, kv = 24, 40, 32, 16
    found = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (40, hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.mlp.gate_proj.weight": (wide, hidden),
        "midlayer.mlp.up_proj.weight": (wide, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, wide),
    }
    if said.get("norm_before_fc"):
        found["input_norm.weight"] = (3 * hidden,)
    if said.get("attention_bias"):
        sizes = {"q": q, "k": kv, "v": kv, "o": hidden}
        found |= {f"midlayer.self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    return found


def main() -> None:
    """Make all heads."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    Attention.forward = attended
    served = Path(tempfile.mkdtemp())
    (served / "config.json").write_text(json.dumps(SERVED))
    table = torch.randn(61, 24)
    is_first = True
    for name, more in VARIANTS.items():
        said, folder = HEAD | more, HERE / name
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            key: torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2)
            + (1 if "norm" in key else 0)
            for key, shape in shapes(said).items()
        }
        chosen = torch.sort(torch.randperm(61)[:40]).values
        weights["d2t"] = chosen - torch.arange(40)
        weights["t2d"] = torch.isin(torch.arange(61), chosen)
        (folder / "config.json").write_text(json.dumps(said, indent=1))
        save_file(weights, folder / "model.safetensors")
        options = EngineArgs(
            model=str(served),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            speculative_config={"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3},
        ).create_engine_config()
        with set_current_vllm_config(options), torch.no_grad():
            if is_first:
                init_distributed_environment(1, 0, "tcp://127.0.0.1:29777", 0, "gloo")
                initialize_model_parallel(1, 1)
                is_first = False
            head = Eagle3LlamaForCausalLM(vllm_config=options)
            head.load_weights(iter(load_file(folder / "model.safetensors").items()))
            head.model.embed_tokens.weight[:61].copy_(table)  # it has rows of padding
            for module in head.modules():
                finish = getattr(getattr(module, "quant_method", None), "process_weights_after_loading", None)
                if finish is not None:
                    finish(module)
            taps = torch.randn(NUM_TOKENS, 72)
            tokens = torch.randint(0, 61, (NUM_TOKENS,))
            with set_forward_context(None, options):
                features = head.combine_hidden_states(taps)
                hidden, own = head(tokens, torch.arange(NUM_TOKENS), features)
                logits = head.compute_logits(hidden)
        told = {
            "taps": taps,
            "embedded": table[tokens],
            "features": features,
            "hidden": hidden,
            "own": own,
            "logits": logits[:, chosen],
        }
        golden = {key: [[round(x, 6) for x in row] for row in value.tolist()] for key, value in told.items()}
        (folder / "golden.json").write_text(json.dumps(golden | {"chosen": chosen.tolist()}))


if __name__ == "__main__":
    main()
