"""Tokenizers from GGUF files, as transformers has them for the same models.

Two kinds, by `tokenizer.ggml.model`: "gpt2" are byte-pairs with their merges, cut into words first as
`tokenizer.ggml.pre` says; "llama" are SentencePiece's byte-pairs, whose merges follow from the vocabulary.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxpaged.checks import InputError
from jaxpaged.models import hf
from jaxpaged.models.gguf_file import field

SPACE = "\u2581"  # stands for a space in SentencePiece's tokens

# Patterns of words, of which the tokenizers' models were trained on each.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"[{_UPPER}]*[{_LOWER}]+", f"[{_UPPER}]+[{_LOWER}]*")]
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {
    "llama-bpe": rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",
    "gpt-4o": "|".join([*(f"{word}{_ENDINGS}?" for word in _CASED), r"\p{N}{1,3}", _CASED_REST]),
    "tekken": "|".join([*_CASED, r"\p{N}", _CASED_REST]),
    "bloom": r" ?[^(\s|.,!?…。\x{ff0c}、।\x{06d4}،)]+",
}
SAME = dict.fromkeys(("llama3", "llama-v3", "dbrx", "smaug-bpe"), "llama-bpe")
WHOLE = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word that is a token needs no merges
COMPOSED = ("qwen2", "olmo", "mpt")  # accents are joined with their letters first
DIGITS = ("smollm", "starcoder", "refact")  # each digit is a word; all else as in GPT-2
PLAIN = ("gpt-2", "default", "olmo", "mpt")
FALCON = "falcon"


def tokenizer(reader: gguf.GGUFReader, path: Path) -> Any:
    """A transformers tokenizer of the file's vocabulary, with its special tokens and chat template."""
    kind = field(reader, path, "tokenizer.ggml.model")
    tokens: list[str] = field(reader, path, "tokenizer.ggml.tokens")
    if kind == "gpt2":
        made = _byte_pairs(reader, path, tokens)
    elif kind == "llama":
        is_gemma = str(field(reader, path, "general.architecture")).startswith("gemma")
        made = _gemma(reader, path, tokens) if is_gemma else _sentencepiece(reader, path, tokens)
    else:
        raise InputError(f"model={str(path)!r}: tokenizer {kind!r} must be 'gpt2' or 'llama'")
    _add_tokens(made, reader, path, tokens)
    return _with_special_tokens(made, reader, path, tokens, adds_bos=kind == "llama")


def _byte_pairs(reader: gguf.GGUFReader, path: Path, tokens: list[str]) -> Tokenizer:
    split = field(reader, path, "tokenizer.ggml.pre", "default")
    words = _words(path, split)
    merges = [tuple(merge.split(" ", 1)) for merge in field(reader, path, "tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab=_ids(tokens), merges=merges, ignore_merges=split in WHOLE))
    made.pre_tokenizer = words
    is_neox = field(reader, path, "general.architecture") == "gptneox"
    made.normalizer = normalizers.NFC() if is_neox or split in COMPOSED else None
    made.decoder = decoders.ByteLevel()
    return made


def _words(path: Path, split: str) -> Any:
    """How text is cut into words before any merge."""
    as_in_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split in PLAIN:
        return as_in_gpt2
    if split in DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_in_gpt2])
    if split == FALCON:
        threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")
        marks, digits = pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits()
        return pre_tokenizers.Sequence([marks, as_in_gpt2, digits, threes])
    words = WORDS.get(SAME.get(split, split))
    if words is None:
        known = ", ".join(map(repr, (*PLAIN, *DIGITS, FALCON, *WORDS, *SAME)))
        raise InputError(
            f"model={str(path)!r}: tokenizer 'gpt2' with pre-tokenizer {split!r} must be 'gpt2' with one of "
            f"{known}"
        )
    cut = pre_tokenizers.Split(Regex(words), behavior="isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(reader: gguf.GGUFReader, path: Path, tokens: list[str]) -> Tokenizer:
    """Merges by the tokens' scores; a space is put before a text."""
    scores: list[float] = field(reader, path, "tokenizer.ggml.scores")
    order = sorted(range(len(tokens)), key=lambda i: -scores[i])
    made = _with_bytes(tokens, order)
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    has_prefix = bool(field(reader, path, "tokenizer.ggml.add_space_prefix", True))
    if has_prefix:
        spaces.insert(0, normalizers.Prepend(SPACE))
    made.normalizer = normalizers.Sequence(spaces)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if has_prefix else []))
    return made


def _gemma(reader: gguf.GGUFReader, path: Path, tokens: list[str]) -> Tokenizer:
    """Merges in the vocabulary's order, whatever the scores; tokens of spaces are stored as such."""
    tokens[:] = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    made = _with_bytes(tokens, range(len(tokens)))
    made.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def _with_bytes(tokens: list[str], order: Sequence[int]) -> Tokenizer:
    """Characters that no token has become the tokens of their bytes."""
    ids = _ids(tokens)
    merges = [pair for i in order for pair in _pairs(tokens[i], ids)]
    unknown = "<unk>" if "<unk>" in ids else None
    return Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )


def _pairs(token: str, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """All pairs of tokens that make this one, the one with the longest first part first."""
    for cut in range(len(token) - 1, 0, -1):
        if token[:cut] in ids and token[cut:] in ids:
            yield token[:cut], token[cut:]


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _add_tokens(made: Tokenizer, reader: gguf.GGUFReader, path: Path, tokens: list[str]) -> None:
    """Those that are found whole in a text: control tokens, which are special, and users' own."""
    types = field(reader, path, "tokenizer.ggml.token_type")
    for special, token_type in ((True, gguf.TokenType.CONTROL), (False, gguf.TokenType.USER_DEFINED)):
        made.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind == token_type
            ]
        )


def _with_special_tokens(
    made: Tokenizer, reader: gguf.GGUFReader, path: Path, tokens: list[str], *, adds_bos: bool
) -> Any:
    def token(name: str) -> str | None:
        token_id = field(reader, path, f"tokenizer.ggml.{name}_token_id", -1)
        return tokens[token_id] if 0 <= token_id < len(tokens) else None

    bos = token("bos")
    if field(reader, path, "tokenizer.ggml.add_bos_token", adds_bos) and bos is not None:
        made.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    return hf.import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=bos,
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        chat_template=field(reader, path, "tokenizer.chat_template", ""),
        clean_up_tokenization_spaces=False,
    )
