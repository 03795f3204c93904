"""Tokenizers from GGUF files, as transformers has them for the same models.

Two kinds, by `tokenizer.ggml.model`: "gpt2" are byte-pairs with their merges, cut into words first as
`tokenizer.ggml.pre` says; "llama" are SentencePiece's byte-pairs, whose merges follow from the vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxpaged.checks import InputError, check, shown
from jaxpaged.models.files import hf
from jaxpaged.models.files.gguf.ends import SENTENCEPIECE_IDS, end_tokens, special_id
from jaxpaged.models.files.gguf.reader import TOKENS, GgufFile, field
from jaxpaged.models.files.gguf.words import NAMES, Words, words_of

TEMPLATE = "tokenizer.chat_template"
SPACE = "\u2581"  # stands for a space in SentencePiece's tokens


def tokenizer(reader: GgufFile, path: Path) -> Any:
    """Return a transformers tokenizer of the file's vocabulary, with its special tokens and chat template."""
    kind = field(reader, path, "tokenizer.ggml.model")
    tokens: list[str] = list(field(reader, path, TOKENS))
    if kind == "gpt2":
        words = _words(reader, path)
        made, defaults, adds_bos = _byte_pairs(reader, path, tokens, words), {}, words.adds_bos
    elif kind == "llama":
        is_gemma = str(field(reader, path, "general.architecture")).startswith("gemma")
        made = _gemma(reader, path, tokens) if is_gemma else _sentencepiece(reader, path, tokens)
        defaults, adds_bos = SENTENCEPIECE_IDS, True
    else:
        raise InputError(f"model={str(path)!r}: tokenizer {shown(kind)} must be 'gpt2' or 'llama'")
    _add_tokens(made, reader, path, tokens)
    return _with_special_tokens(made, reader, path, tokens, defaults, adds_bos=adds_bos)


def _byte_pairs(reader: GgufFile, path: Path, tokens: list[str], words: Words) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in field(reader, path, "tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab=_ids(tokens), merges=merges, ignore_merges=words.whole))
    made.pre_tokenizer = words.cut()
    is_neox = field(reader, path, "general.architecture") == "gptneox"
    made.normalizer = normalizers.NFC() if is_neox else words.normalizer()
    made.decoder = decoders.ByteLevel()
    return made


def _words(reader: GgufFile, path: Path) -> Words:
    """Return how text is cut into words before any merge. Raises `InputError` for an unknown way."""
    name = field(reader, path, "tokenizer.ggml.pre", "default")
    words = words_of(name)
    if words is None:
        known = ", ".join(map(repr, NAMES))
        raise InputError(
            f"model={str(path)!r}: tokenizer 'gpt2' with pre-tokenizer {shown(name)} must be 'gpt2' with one "
            f"of {known}"
        )
    return words


def _sentencepiece(reader: GgufFile, path: Path, tokens: list[str]) -> Tokenizer:
    """Make a tokenizer that merges by the tokens' scores and puts a space before a text."""
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


def _gemma(reader: GgufFile, path: Path, tokens: list[str]) -> Tokenizer:
    """Make a tokenizer that merges in the vocabulary's order; tokens of spaces are stored as such."""
    tokens[:] = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    made = _with_bytes(tokens, range(len(tokens)))
    made.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def _with_bytes(tokens: list[str], order: Sequence[int]) -> Tokenizer:
    """Make a tokenizer that splits characters without a token into the tokens of their bytes."""
    ids = _ids(tokens)
    merges = [pair for i in order for pair in _pairs(tokens[i], ids)]
    unknown = "<unk>" if "<unk>" in ids else None
    return Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )


def _pairs(token: str, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Return all pairs of tokens that make this one, the one with the longest first part first."""
    for cut in range(len(token) - 1, 0, -1):
        if token[:cut] in ids and token[cut:] in ids:
            yield token[:cut], token[cut:]


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _add_tokens(made: Tokenizer, reader: GgufFile, path: Path, tokens: list[str]) -> None:
    """Add what is found whole in a text: control tokens and ends, which are special, and users' own."""
    types: Sequence[int] = field(reader, path, "tokenizer.ggml.token_type", [])
    types = types or [gguf.TokenType.NORMAL] * len(tokens)
    ends = set(end_tokens(reader, path))
    special = [kind == gguf.TokenType.CONTROL or i in ends for i, kind in enumerate(types)]
    for is_special in (True, False):
        made.add_tokens(
            [
                AddedToken(token, special=is_special, normalized=False)
                for token, kind, is_marked in zip(tokens, types, special, strict=True)
                if is_marked == is_special and (is_special or kind == gguf.TokenType.USER_DEFINED)
            ]
        )


def _chat_template(reader: GgufFile, path: Path) -> str | dict[str, str]:
    """Return the file's chat template; where it names others, such as one for tools, all by their names."""
    default: str = field(reader, path, TEMPLATE, "")
    templates = {"default": default} if default else {}
    for name in reader.fields:
        if name.startswith(f"{TEMPLATE}.") and (text := field(reader, path, name, "")):
            templates[name.removeprefix(f"{TEMPLATE}.")] = text
    for name, text in templates.items():
        check(f"model={str(path)!r}: chat template {name!r}", text, "a text", isinstance(text, str))
    return default if templates.keys() <= {"default"} else templates


def _with_special_tokens(
    made: Tokenizer,
    reader: GgufFile,
    path: Path,
    tokens: list[str],
    defaults: Mapping[str, int],
    *,
    adds_bos: bool,
) -> Any:
    def token(name: str) -> str | None:
        token_id = special_id(reader, path, name, defaults)
        return None if token_id is None else tokens[token_id]

    bos, eos = token("bos"), token("eos")
    first = bos if field(reader, path, "tokenizer.ggml.add_bos_token", adds_bos) else None
    last = eos if field(reader, path, "tokenizer.ggml.add_eos_token", False) else None
    around = [each for each in (first, last) if each is not None]
    if around:
        single = " ".join(each for each in (first, "$A", last) if each is not None)
        made.post_processor = TemplateProcessing(
            single=single,
            pair=f"{single} {single.replace('$A', '$B')}",
            special_tokens=[(each, tokens.index(each)) for each in around],
        )
    return hf.import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=bos,
        eos_token=eos,
        unk_token=token("unknown"),
        pad_token=token("padding"),
        chat_template=_chat_template(reader, path),
        clean_up_tokenization_spaces=False,
    )
