"""Make tiny pooling models, in pooling/, and what transformers computes with them.

Run once, with Python 3.11, torch 2.13.0 (CPU) and transformers 5.24.0: python tests/goldens/make_pooling.py
`qwen3` is a causal model with a tied table and a tokenizer of letters, in the form of Qwen3-Embedding and
Qwen3-Reranker; `qwen3_classifier` a Qwen3ForSequenceClassification of three classes. All is in float32.
"""

import json
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

HERE = Path(__file__).parent / "pooling"
TOKENS = ["<pad>", "<end>", "no", "yes", *string.ascii_lowercase, " ", "."]
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
TEXTS = ["a", "the quick brown fox", "jumps over the lazy dog. " * 3]


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer with a token for each letter, and an end token as Qwen3-Embedding's."""
    fast = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.post_processor = processors.TemplateProcessing(
        single="$A <end>", pair="$A $B <end>", special_tokens=[("<end>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<end>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def rounded(model: torch.nn.Module) -> torch.nn.Module:
    """Round a model's numbers to float16."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            parameter.copy_(parameter.half().float())
    return model.eval()


def save(model: torch.nn.Module, folder: Path, golden: dict) -> None:
    model.half().save_pretrained(folder)
    model.float()
    (folder / "golden.json").write_text(json.dumps(golden))
    (folder / "generation_config.json").unlink(missing_ok=True)


def main() -> None:
    torch.manual_seed(0)
    folder = HERE / "qwen3"
    tokenizer = write_tokenizer(folder)
    causal = rounded(Qwen3ForCausalLM(Qwen3Config(**SIZES)))
    golden: dict = {"texts": TEXTS, "token_ids": [], "last": [], "mean": [], "first": [], "yes": []}
    with torch.no_grad():
        for text in TEXTS:
            ids = tokenizer(text)["input_ids"]
            hidden = causal.model(torch.tensor([ids])).last_hidden_state[0]
            logits = causal(torch.tensor([ids])).logits[0, -1]
            golden["token_ids"].append(ids)
            golden["last"].append(torch.nn.functional.normalize(hidden[-1], dim=0).tolist())
            golden["mean"].append(torch.nn.functional.normalize(hidden.mean(0), dim=0).tolist())
            golden["first"].append(hidden[0].tolist())
            golden["yes"].append(torch.softmax(logits[[2, 3]], 0)[1].item())
    save(causal, folder, golden)

    classifier = rounded(
        Qwen3ForSequenceClassification(Qwen3Config(**SIZES, num_labels=3, architectures=None))
    )
    golden = {"token_ids": golden["token_ids"], "probs": []}
    with torch.no_grad():
        for ids in golden["token_ids"]:
            golden["probs"].append(torch.softmax(classifier(torch.tensor([ids])).logits[0], 0).tolist())
    save(classifier, HERE / "qwen3_classifier", golden)


if __name__ == "__main__":
    main()
