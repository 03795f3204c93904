"""Pre-tokenizers of GGUF files (`tokenizer.ggml.pre`): how text is cut into words before any merge.

llama.cpp has a name for each tokenizer that it has met; many names stand for one way to cut.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

# Patterns that split text into words, one for each group of tokenizers.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"[{_UPPER}]*[{_LOWER}]+", f"[{_UPPER}]+[{_LOWER}]*")]
_CASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_LLAMA = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_QWEN35 = f"{_ENDINGS}|{_MARKED}|{_SPACES}"
_SEED = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_GPT_4O = "|".join([*(f"{word}{_ENDINGS}?" for word in _CASED), r"\p{N}{1,3}", _CASED_REST])
_TEKKEN = "|".join([*_CASED, r"\p{N}", _CASED_REST])
_BLOOM = r" ?[^(\s|.,!?…。\x{ff0c}、।\x{06d4}،)]+"
# DeepSeek splits in several steps. Its first model lists letters as ranges of code points.
_CHINESE = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
_EAST_ASIAN = r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_DEEPSEEK_V3 = (
    r"[!\x22#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK_LETTERS = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d "
    "1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 "
    "2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 "
    "2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e "
    "ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb "
    "10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_DEEPSEEK_MARKS = "21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002"


def _as_in_gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _bytes() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _digits() -> Any:
    """Cut out each digit; all else as in GPT-2."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _as_in_gpt2()])


def _falcon() -> Any:
    threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")
    marks, digits = pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits()
    return pre_tokenizers.Sequence([marks, _as_in_gpt2(), digits, threes])


def _by(*patterns: str, digits: bool = False) -> Callable[[], Any]:
    """Return what lets one pattern after another cut out words; with `digits` each digit last."""

    def cut() -> Any:
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
        return pre_tokenizers.Sequence([*steps, _bytes()])

    return cut


def _class(ranges: str) -> str:
    """Return a class of characters, of ranges of code points in hexadecimal."""
    ends = (each.split("-") for each in ranges.split())
    return "[" + "".join("-".join(rf"\x{{{end}}}" for end in each) for each in ends) + "]"


def _deepseek_llm() -> Any:
    words = rf"\s?{_class(_DEEPSEEK_LETTERS)}+", rf"\s?{_class(_DEEPSEEK_MARKS)}+"
    return _by(r"[\r\n]", *words, r"\s+$", _EAST_ASIAN, digits=True)()


@dataclasses.dataclass(frozen=True)
class Words:
    """A way to cut a text into words, and what goes with it in the tokenizers that have it."""

    cut: Callable[[], Any]  # makes the pre-tokenizer
    whole: bool = False  # a word that is a token needs no merges
    adds_bos: bool = False  # default for files without the field
    is_composed: bool = False  # accents are joined with their letters first

    def normalizer(self) -> Any:
        return normalizers.NFC() if self.is_composed else None


WORDS = {
    "gpt-2": Words(_as_in_gpt2),
    "olmo": Words(_as_in_gpt2, is_composed=True),
    "smollm": Words(_digits),
    "command-r": Words(_digits, is_composed=True),
    "falcon": Words(_falcon),
    "llama-bpe": Words(_by(_LLAMA), whole=True, adds_bos=True),
    "dbrx": Words(_by(_LLAMA)),
    "qwen2": Words(_by(_QWEN), is_composed=True),
    "stablelm2": Words(_by(_QWEN)),
    "qwen35": Words(_by(_QWEN35), is_composed=True),
    "seed-coder": Words(_by(_SEED)),
    "gpt-4o": Words(_by(_GPT_4O)),
    "tekken": Words(_by(_TEKKEN), whole=True, adds_bos=True),
    "bloom": Words(_by(_BLOOM)),
    "viking": Words(_by(_BLOOM, r"\p{N}")),
    "deepseek-llm": Words(_deepseek_llm),
    "deepseek-coder": Words(_by(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, digits=True)),
    "deepseek-v3": Words(_by(r"\p{N}{1,3}", _CHINESE, _DEEPSEEK_V3)),
}
_ALIASES: dict[str, Sequence[str]] = {
    "gpt-2": (
        *("default", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion"),
        *("granite-docling", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "modern-bert"),
    ),
    "olmo": ("mpt",),
    "smollm": ("starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
    "llama-bpe": (
        "llama3",
        "llama-v3",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
    ),
    "dbrx": ("smaug-bpe", "glm4", "chatglm-bpe"),
    "qwen2": ("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"),
    "stablelm2": ("hunyuan", "solar-open", "grok-2"),
    "gpt-4o": ("llama4", "kanana2", "talkie", "minimax-m2"),
    "bloom": ("poro-chat", "gpt3-finnish"),
    "deepseek-v3": ("hunyuan-dense", "joyai-llm", "hy_v4"),
}
NAMES = {name: name for name in WORDS} | {each: name for name, all_ in _ALIASES.items() for each in all_}


def words_of(name: str) -> Words | None:
    """Return how a tokenizer of this `tokenizer.ggml.pre` cuts words; None for an unknown name."""
    return WORDS[NAMES[name]] if name in NAMES else None
