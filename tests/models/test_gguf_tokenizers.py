"""Tokenizers of GGUF files beside those they were made from, over texts in several languages."""

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from jaxpaged.checks import InputError
from jaxpaged.models.files.gguf import (
    ends as gguf_ends,
)
from jaxpaged.models.files.gguf import (
    file as gguf_file,
)
from jaxpaged.models.files.gguf import (
    tokenizers as gguf_tokenizers,
)
from jaxpaged.models.files.gguf.reader import read_header
from jaxpaged.models.files.gguf.words import words_of

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 miles, isn't it? I'LL see 3.14159!",
    "  two spaces   three\n\n\nlines\r\nand\ttabs \t mixed ",
    "Größenwahnsinnige Füße überqueren 1.000 Straßen; die Katze schläft auf dem Dach, die Katze.",
    "L'été dernier, j'ai mangé des crêpes à l'île d'Oléron -- c'était délicieux, l'été.",
    "Широкая электрификация южных губерний даст мощный толчок подъёму сельского хозяйства.",
    "日本語の文章です。東京都は日本の首都です。東京都の人口は多い。",
    "مرحبا بالعالم، كيف حالك اليوم؟ العالم كبير",
    "हिन्दी में एक वाक्य, हिन्दी भाषा सुंदर है।",
    "def f(x_1, y=[0]):\n    return {'a': x_1 ** 2, \"b\": y}  # comment",
    "emoji 👩‍👩‍👧 🇩🇪 ½ ² ① Ⅷ e\u0301 caf\u00e9",
    " ",
    "",
]


def written(path, architecture, model, tokens, types, **more):
    """Write a GGUF file of a tokenizer alone."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        if value is not None:
            getattr(writer, f"add_{name}")(*(value if isinstance(value, tuple) else (value,)))
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    return gguf_tokenizers.tokenizer(gguf_file.open_file(path), path)


def test_chat_templates_that_a_file_names_are_read(tmp_path):
    """llama.cpp writes those of a tokenizer_config.json with several, such as one for tools."""
    path, tokens = tmp_path / "a.gguf", ["<unk>", "<s>", "</s>", "a"]
    for said, want in (
        (None, ""),
        ("{{ 1 }}", "{{ 1 }}"),
        (
            [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ tools }}"}],
            {"default": "{{ 1 }}", "tool_use": "{{ tools }}"},
        ),
        ([{"name": "rag", "template": "{{ documents }}"}], {"rag": "{{ documents }}"}),
    ):
        made = written(
            path, "llama", "llama", tokens, [2, 3, 3, 1], token_scores=([0.0] * 4,), chat_template=said
        )
        assert made.chat_template == want


def learned(normalizer, pre_tokenizer, special, alphabet):
    """Learn a byte-pair tokenizer of the texts. Return its tokens in order, and its merges."""
    made = Tokenizer(models.BPE())
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS[:-4] * 2, trainer)
    vocab = made.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def with_bytes(tokens, merges):
    return Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )


SPECIAL = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
TYPES = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]


def sentencepiece(tmp_path, architecture, **more):
    """Write a tokenizer of Llama's kind: the file has scores in the place of merges."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokens = learned(spaces, pre_tokenizers.Split("▁", "merged_with_next"), SPECIAL, [])
    types = [*TYPES, *[gguf.TokenType.NORMAL] * (len(tokens) - len(TYPES))]
    scores = [-float(i) for i in range(len(tokens))]
    options = {"token_scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0} | more
    return tokens, written(tmp_path / "a.gguf", architecture, "llama", tokens, types, **options)


def pieces(tokens, ids, order):
    return [
        (token[:cut], token[cut:])
        for token in order
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in ids and token[cut:] in ids and token not in SPECIAL
    ]


def test_sentencepiece_with_scores_reads_as_its_merges(tmp_path):
    tokens, made = sentencepiece(tmp_path, "llama")
    plain = with_bytes(tokens, pieces(tokens, set(tokens), tokens))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    for text in TEXTS:
        assert made.encode(text) == [1, *plain.encode(text).ids], text
        assert made.decode(made.encode(text), skip_special_tokens=True) == text
    assert made.encode("a</s>b")[-2:] != made.encode("ab")[-2:]
    assert 2 in made.encode("a</s>b")


def test_scores_decide_which_merge_is_first(tmp_path):
    """Two merges could begin; the one with the higher score does."""
    tokens = [*SPECIAL, "a", "b", "c", "ab", "bc"]
    types = [*TYPES, *[gguf.TokenType.NORMAL] * 5]
    for scores, want in (((-1, -2), ["ab", "c"]), ((-2, -1), ["a", "bc"])):
        all_scores = [0.0] * len(SPECIAL) + [-10.0] * 3 + [float(score) for score in scores]
        options = {"token_scores": all_scores, "add_space_prefix": False, "add_bos_token": False}
        made = written(tmp_path / "a.gguf", "llama", "llama", tokens, types, **options)
        assert made.tokenize("abc") == want


def test_gemma_has_no_space_in_front_and_merges_by_number(tmp_path):
    tokens = [*SPECIAL, "a", "b", "c", "▁", "ab", "bc", "  ", "▁▁▁"]
    types = [*TYPES, *[gguf.TokenType.NORMAL] * 8]
    options = {"token_scores": [0.0] * len(tokens), "bos_token_id": 1}
    made = written(tmp_path / "a.gguf", "gemma3", "llama", tokens, types, **options)
    assert made.tokenize("abc  a") == ["ab", "c", "▁▁", "a"]
    assert made.encode("a   b") == [1, tokens.index("a"), tokens.index("▁▁▁"), tokens.index("b")]
    assert made.decode(made.encode("a   b é")[1:]) == "a   b é"


def test_words_are_cut_as_in_the_tokenizers_the_models_were_trained_with(tmp_path):
    cut = {
        "llama-bpe": pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated"),
        "qwen2": Qwen2Tokenizer(vocab={}, merges=[])._tokenizer.pre_tokenizer,
    }
    for name, theirs in cut.items():
        ours = words_of(name).cut()[0]
        for text in TEXTS:
            want = [span for _, span in theirs.pre_tokenize_str(text)]
            assert [span for _, span in ours.pre_tokenize_str(text)] == want, (name, text)


# As the models' own tokenizers cut them.
CUT = {
    "falcon": ("It's 12345, (ok)...", ["It", "'", "s", "Ġ", "123", "45", ",", "Ġ", "(", "ok", ")..."]),
    "bloom": ("It's 12345, (ok)... no", ["It's", "Ġ12345", ",Ġ(", "ok", ")...", "Ġno"]),
    "tekken": ("It's aPlan 12, ok/\n", ["It", "'s", "Ġa", "Plan", "Ġ", "1", "2", ",", "Ġok", "/Ċ"]),
    "gpt-4o": ("It's aPlan 12, ok/\n", ["It's", "Ġa", "Plan", "Ġ", "12", ",", "Ġok", "/Ċ"]),
    "qwen35": ("ko\u0301s 12, (é)\n", ["koÌģs", "Ġ", "1", "2", ",", "Ġ(", "Ã©", ")Ċ"]),
    "viking": ("no 12, x", ["no", "Ġ", "1", "2", ",", "Ġx"]),
    "seed-coder": ("It's 12,\n\nok", ["It", "'s", "Ġ", "1", "2", ",", "ĊĊ", "ok"]),
    "deepseek-llm": ("It's 12, ok\n日本1", ["It", "'", "s", "Ġ", "1", "2", ",", "Ġok", "Ċ", "æĹ¥æľ¬", "1"]),
    "deepseek-coder": ("f(x) 12日本\n", ["f", "(", "x", ")", "Ġ", "1", "2", "æĹ¥æľ¬", "Ċ"]),
    "deepseek-v3": ("It's 12345,日本ok", ["It", "'s", "Ġ", "123", "45", ",", "æĹ¥æľ¬", "ok"]),
    "refact": ("It's 12345,  ok", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", ",", "Ġ", "Ġok"]),
}


@pytest.mark.parametrize("pre", CUT)
def test_words_of_other_models(tmp_path, pre):
    text, words = CUT[pre]
    assert [word for word, _ in words_of(pre).cut().pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("pre", "want"), [("llama-bpe", ["abc"]), ("tekken", ["abc"]), ("gpt-2", ["ab", "c"])]
)
def test_a_word_that_is_a_token_needs_no_merges(tmp_path, pre, want):
    options = {"token_merges": ["a b"], "tokenizer_pre": pre}
    made = written(tmp_path / "a.gguf", "llama", "gpt2", ["a", "b", "c", "ab", "abc"], [1] * 5, **options)
    assert made.tokenize("abc") == want


@pytest.mark.parametrize(
    ("architecture", "pre"), [("gptneox", "default"), ("mpt", "mpt"), ("llama", "olmo"), ("gpt2", "gpt-2")]
)
def test_accents_are_joined_as_in_gpt_neox(tmp_path, architecture, pre):
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), "ab"]
    options = {"token_merges": ["a b"], "tokenizer_pre": pre}
    made = written(tmp_path / "a.gguf", architecture, "gpt2", tokens, [1] * len(tokens), **options)
    vocab = {token: i for i, token in enumerate(tokens)}
    theirs = GPTNeoXTokenizer(vocab=vocab, merges=[("a", "b")])
    for text in TEXTS:
        assert (made.encode(text) == theirs.encode(text)) == (pre != "gpt-2" or "\u0301" not in text)


@pytest.mark.parametrize(
    "pre", ["default", "smollm", "llama-bpe", "qwen2", "gpt-4o", "tekken", "falcon", "bloom", "mpt"]
)
def test_byte_pairs_read_as_the_tokenizer_they_were_made_of(tmp_path, pre):
    cut = words_of(pre).cut()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens = learned(None, cut, ["<|end|>"], alphabet)
    ids = set(tokens)
    merges = [(t[:i], t[i:]) for t in tokens for i in range(1, len(t)) if t[:i] in ids and t[i:] in ids]
    types = [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)]
    options = {"token_merges": [" ".join(pair) for pair in merges], "tokenizer_pre": pre}
    made = written(tmp_path / "a.gguf", "qwen2", "gpt2", tokens, types, **options)
    plain = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    plain.pre_tokenizer, plain.decoder = cut, decoders.ByteLevel()
    is_composed = pre in ("qwen2", "mpt")
    plain.normalizer = normalizers.NFC() if is_composed else None
    for text in TEXTS:
        assert made.encode(text) == plain.encode(text).ids
        composed = text.replace("e\u0301", "é") if is_composed else text
        assert made.decode(made.encode(text)) == composed
    assert made.encode("a<|end|>")[-1] == 0


@pytest.mark.parametrize(
    ("alias", "name"),
    [("deepseek-r1-qwen", "qwen2"), ("falcon3", "llama-bpe"), ("pixtral", "llama3"), ("lfm2", "llama-bpe")],
)
def test_many_names_stand_for_one_way_to_cut(tmp_path, alias, name):
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), "12", "23", "123", "<s>"]
    options = {"token_merges": ["1 2", "12 3"], "bos_token_id": len(tokens) - 1}
    types = [*[gguf.TokenType.NORMAL] * (len(tokens) - 1), gguf.TokenType.CONTROL]
    made = [
        written(tmp_path / f"{pre}.gguf", "llama", "gpt2", tokens, types, **options | {"tokenizer_pre": pre})
        for pre in (alias, name)
    ]
    for text in TEXTS:
        assert made[0].encode(text) == made[1].encode(text)


@pytest.mark.parametrize(
    ("pre", "says", "want"),
    [
        ("llama-bpe", {}, [1, 2]),
        ("tekken", {}, [1, 2]),
        ("llama-bpe", {"add_bos_token": False}, [2]),
        ("qwen2", {}, [2]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [1, 2, 0]),
        ("llama-bpe", {"bos_token_id": 99}, [2]),
    ],
)
def test_a_text_begins_and_ends_as_llama_cpp_has_it(tmp_path, pre, says, want):
    options = {"token_merges": ["a a"], "tokenizer_pre": pre, "bos_token_id": 1, "eos_token_id": 0} | says
    tokens, types = ["<e>", "<s>", "a", "aa"], [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 2
    made = written(tmp_path / "a.gguf", "llama", "gpt2", tokens, types, **options)
    assert made.encode("a") == want


def test_sentencepiece_ids_that_a_file_does_not_say(tmp_path):
    _, made = sentencepiece(tmp_path, "llama", bos_token_id=None, eos_token_id=None)
    assert (made.encode("a")[0], made.eos_token) == (1, "</s>")


ENDS = {
    "by name": ("abcdef", {"eos_token_id": 0, "eot_token_id": 2, "eom_token_id": 4}, "ace"),
    "several": ("abcd", {"eos_token_id": 0, "array": ("tokenizer.ggml.eos_token_ids", [1, 3, 99])}, "abd"),
    "Gemma": (["<eos>", "<end_of_turn>", "a"], {"eos_token_id": 0}, ["<eos>", "<end_of_turn>"]),
    "a turn of plain type": (["<end_of_turn>", "a"], {"eos_token_id": 1}, ["<end_of_turn>", "a"]),
    "Llama 3": (["<|eom_id|>", "<|eot_id|>", "a"], {}, ["<|eom_id|>", "<|eot_id|>"]),
    "Phi": (["<|end|>", "<|endoftext|>", "<|call|>"], {}, ["<|end|>", "<|endoftext|>", "<|call|>"]),
    "harmony": (["<|end|>", "<|return|>", "<|call|>"], {"eot_token_id": 0}, ["<|return|>", "<|call|>"]),
    "Qwen, whose </s> is HTML": (["<|im_end|>", "</s>", "a"], {"eos_token_id": 99}, ["<|im_end|>"]),
}


@pytest.mark.parametrize("name", ENDS)
def test_tokens_that_end_an_answer(tmp_path, name):
    tokens, says, want = ENDS[name]
    tokens = [*tokens, "x", "y", "xy"]
    is_plain = [len(token) < 3 or token == "</s>" or "plain" in name for token in tokens]
    types = [gguf.TokenType.NORMAL if plain else gguf.TokenType.CONTROL for plain in is_plain]
    options = {"token_merges": ["x y"], "tokenizer_pre": "gpt-2"} | says
    made = written(tmp_path / "a.gguf", "llama", "gpt2", tokens, types, **options)
    reader = read_header(tmp_path / "a.gguf")
    assert [tokens[i] for i in gguf_ends.end_tokens(reader, tmp_path / "a.gguf")] == list(want)
    if "turn" in name:  # a turn's end is found whole in a text, and is not part of an answer's
        assert made.decode(made.encode("<end_of_turn>"), skip_special_tokens=True) == ""


def test_what_is_no_known_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="tokenizer 't5' must be 'gpt2' or 'llama'"):
        written(tmp_path / "a.gguf", "llama", "t5", ["a"], [1])
    with pytest.raises(InputError, match="pre-tokenizer 'nobody-s' must be 'gpt2' with one of"):
        written(
            tmp_path / "b.gguf", "llama", "gpt2", ["a"], [1], tokenizer_pre="nobody-s", token_merges=["a a"]
        )
