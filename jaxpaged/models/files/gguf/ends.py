"""Tokens of GGUF files that end an answer, found as llama.cpp finds them: by name in the header, and by text.

Files name one or two of them, but chat models end a turn with others: without these an answer never stops.
"""

from collections.abc import Mapping
from pathlib import Path

import gguf

from jaxpaged.models.files.gguf.reader import TOKENS, GgufFile, field

SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # defaults for files without these fields
NAMES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
TEXTS = {
    *(
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<end_of_turn>",
    ),
    *("<turn|>", "<|tool_response>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "[e~["),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<|file_sep|>"),
}
# Texts that may be ordinary tokens in some vocabularies. The first is HTML in Qwen's.
TEXTS_OF_CONTROL = {
    *("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<PAD>", "[PAD]", "<REPO>", "<reponame>"),
}
# Texts that end no answer if the vocabulary has all texts of a set: harmony's <|end|> ends a message only.
NO_END = {
    "<|end|>": ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"}),
    "</s>": ({"<|tool_response>"},),
}


def end_tokens(reader: GgufFile, path: Path) -> list[int]:
    """Return the ids of the tokens that end an answer; an id that is none of the vocabulary's is left out."""
    tokens: list[str] = field(reader, path, TOKENS)
    defaults = SENTENCEPIECE_IDS if field(reader, path, "tokenizer.ggml.model", "") == "llama" else {}
    named = [special_id(reader, path, name, defaults) for name in NAMES]
    named += [i for i in field(reader, path, "tokenizer.ggml.eos_token_ids", []) if 0 <= i < len(tokens)]
    end_ids = {i for i, token in enumerate(tokens) if token in TEXTS} | {i for i in named if i is not None}
    types = field(reader, path, "tokenizer.ggml.token_type", [])
    ordinary = (gguf.TokenType.NORMAL, gguf.TokenType.UNUSED)
    end_ids |= {i for i, kind in enumerate(types) if tokens[i] in TEXTS_OF_CONTROL and kind not in ordinary}
    texts = {tokens[i]: i for i in end_ids}
    for text, others in NO_END.items():
        if text in texts and any(texts.keys() >= each for each in others):
            end_ids.discard(texts[text])
    return sorted(end_ids)


def special_id(reader: GgufFile, path: Path, name: str, defaults: Mapping[str, int]) -> int | None:
    """Return the id that a file gives a special token, else its default; None without either."""
    size = len(field(reader, path, TOKENS))
    for token_id in (field(reader, path, f"tokenizer.ggml.{name}_token_id", -1), defaults.get(name, -1)):
        if 0 <= token_id < size:
            return int(token_id)
    return None
