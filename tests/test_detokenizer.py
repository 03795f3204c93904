"""Streamed text: whole characters as soon as they are sure, and joined the text of the whole."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from jaxpaged.detokenizer import Detokenizer, text_of
from jaxpaged.models import hf, loading

LETTERS = "añ漢字🙂👩‍👩‍👧‍👦é ش नमस्ते\n\tẞ🏴󠁧󠁢󠁥󠁮󠁧󠁿x1 "


class Foreign:
    """A tokenizer that the tokenizers library does not run."""

    def __init__(self, tokenizer):
        self.decode, self.all_special_ids = tokenizer.decode, tokenizer.all_special_ids
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens


@pytest.fixture(scope="module")
def byte_level():
    return loading.open_checkpoint("smollm2").tokenizer


@pytest.fixture(scope="module")
def byte_fallback():
    """As SentencePiece's are: a space before the first word, and a byte at a time for what has no token."""
    pieces = ["▁", "▁a", "b", "▁the", "é", "漢", "▁▁", "🙂"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    bpe = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bpe.add_special_tokens(["<s>", "</s>"])
    fast = hf.import_transformers().PreTrainedTokenizerFast
    return fast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("is_foreign", [False, True], ids=["", "foreign"])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_stream_joined_is_the_text_of_the_whole(kind, is_foreign, request):
    """Random tokens, most of which are no characters, and texts of many scripts; in pieces of any length."""
    tokenizer = request.getfixturevalue(kind)
    rng = random.Random(0)
    for n in range(400):
        if n % 2:
            token_ids = tokenizer.encode("".join(rng.choices(LETTERS, k=20)), add_special_tokens=False)
        else:
            token_ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 30))]
        detokenizer = Detokenizer(Foreign(tokenizer) if is_foreign else tokenizer)
        texts, at = [], 0
        while at < len(token_ids):
            step = rng.randint(1, 4)
            texts.append(detokenizer.add(token_ids[at : at + step]))
            at += step
            if n % 2:
                assert "\ufffd" not in texts[-1], "half a character"
        texts.append(detokenizer.add([], is_last=True))
        want = tokenizer.decode(token_ids, skip_special_tokens=True)
        assert "".join(texts) == want
        assert text_of(tokenizer, token_ids) == want


def test_text_comes_as_soon_as_it_is_sure(byte_level):
    token_ids = byte_level.encode("Hello, 漢🙂 world")
    detokenizer = Detokenizer(byte_level)
    texts = [detokenizer.add([token]) for token in token_ids]
    assert texts[:2] == ["Hello", ","]
    assert "🙂" in texts, "all of it with its last token"
    assert texts[-1] == " world"
    assert detokenizer.add([], is_last=True) == ""
