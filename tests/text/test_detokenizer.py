"""Streamed text: whole characters as soon as they are sure, and joined the text of the whole."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from jaxpaged.engine.request import Delta
from jaxpaged.engine.texts import Texts
from jaxpaged.models import loading
from jaxpaged.models.files import hf
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.text.detokenizer import Detokenizer, _Run

LETTERS = "añ漢字🙂👩‍👩‍👧‍👦é ش नमस्ते\n\tẞ🏴󠁧󠁢󠁥󠁮󠁧󠁿x1 "


class Foreign:
    """A tokenizer that the tokenizers library does not run."""

    def __init__(self, tokenizer):
        self.decode, self.all_special_ids = tokenizer.decode, tokenizer.all_special_ids
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens


@pytest.fixture(scope="module")
def byte_level():
    return loading.open_checkpoint("smollm2").tokenizer


SPM = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "none": None,
    "byte_level": decoders.ByteLevel(),
    "byte_fallback": decoders.Sequence([*SPM, decoders.Strip(" ", 1, 0)]),
    "byte_fallback_unstripped": decoders.Sequence(SPM),
    "metaspace": decoders.Metaspace(prepend_scheme="first"),
    "wordpiece": decoders.WordPiece(prefix="##", cleanup=True),
    # Whose text the tokenizer has to be asked for.
    "ctc": decoders.CTC(pad_token="a", word_delimiter_token="▁"),
    "fused_first": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]),
}
PIECES = ["▁", "▁a", "b", "▁the", "é", "漢", "▁▁", "🙂", "\ufffd", ".", "'s", "##n", "ĠÃ©", "\n"]


def made(decoder):
    """Make a small tokenizer with byte tokens; ids beyond its own have no name, as in a padded vocabulary."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    bpe = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if decoder is not None:
        bpe.decoder = decoder
    bpe.add_special_tokens(["<s>", "</s>"])
    fast = hf.import_transformers().PreTrainedTokenizerFast
    return fast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def byte_fallback():
    """Make a tokenizer like SentencePiece's: a space before the first word, and bytes for text without a
    token.
    """
    return made(DECODERS["byte_fallback"])


def some_ids(rng, tokenizer, length):
    """Draw token ids: half of them bytes, some of these within characters, a few special ones, some without a
    name.
    """
    ids = []
    while len(ids) < length:
        kind = rng.random()
        if kind < 0.2:
            ids += [3 + byte for byte in rng.choice("é漢🙂a ").encode()]
        elif kind < 0.4:
            ids.append(rng.randrange(3, 259))
        elif kind < 0.5:
            ids.append(rng.randrange(3))
        else:
            ids.append(rng.randrange(259, len(tokenizer)) if kind < 0.93 else len(tokenizer) + 3)
    return ids


@pytest.mark.parametrize("kind", DECODERS)
def test_any_tokens_one_by_one_have_the_text_of_the_tokenizers_own_decode(kind):
    """Behind a prompt, the text is what the tokens add to the prompt's text."""
    tokenizer, rng = made(DECODERS[kind]), random.Random(0)
    for n in range(300):
        skips = bool(n % 3)
        prompt = some_ids(rng, tokenizer, rng.choice([0, 1, 5]))
        # A prompt's last run of bytes is its own.
        prompt += [260] if prompt else []
        ids = some_ids(rng, tokenizer, rng.choice([2, 6, 20]))
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skips, prompt_token_ids=prompt)
        text = "".join(detokenizer.add([token]) for token in ids) + detokenizer.add([], is_last=True)
        before, whole = (tokenizer.decode(each, skip_special_tokens=skips) for each in (prompt, prompt + ids))
        assert before + text == whole, tokenizer.convert_ids_to_tokens(prompt + ids)


def test_what_waits_is_not_decoded_again(byte_level, byte_fallback, monkeypatch):
    """Counted in tokens that the tokenizer decodes, and characters that are joined."""
    num_decoded = num_joined = 0

    def counted(decode):
        def count(token_ids, **options):
            nonlocal num_decoded
            num_decoded += len(token_ids)
            return decode(token_ids, **options)

        return count

    def ahead(run):
        nonlocal num_joined
        num_joined += len(run._ahead)
        return "".join(run._ahead)

    monkeypatch.setattr(_Run, "ahead", property(ahead))
    for tokenizer, waiting in (
        (byte_fallback, 3 + 97),  # a run of bytes
        (byte_fallback, 1),  # special
        (byte_fallback, len(byte_fallback) + 3),  # without a name
        (byte_level, byte_level.convert_tokens_to_ids("ð")),  # the first byte of four
        (byte_level, 0),
    ):
        foreign = Foreign(tokenizer)
        foreign.decode = counted(tokenizer.decode)
        for each in (tokenizer, foreign):
            num_decoded = num_joined = 0
            texts = Texts(each, SamplingParams(stop=["never"]))
            for _ in range(4000):
                texts(Delta(1, [waiting], None, 0))
            assert num_decoded <= 12 * 4000, "in each token's turn a few at most"
            assert num_joined <= 4000
            assert len(texts._text) + len(texts._searched) < 20


def test_stop_strings_are_found_in_bytes_and_where_bytes_turn_out_to_be_none(byte_fallback):
    """Stop strings are looked for in what is known after each token: the whole characters among its bytes."""
    rng, num_stopped = random.Random(0), 0
    for _ in range(300):
        ids = some_ids(rng, byte_fallback, 30)
        stop = [rng.choice(["a🙂", "b", "\ufffd\ufffd", "é ", "漢漢", " a"]) for _ in range(2)]
        texts, got = Texts(byte_fallback, SamplingParams(stop=stop)), []
        for token in ids:
            got.append(texts(Delta(1, [token], None, 0)))
            if got[-1].finish_reason:
                break
        count, text = len(ids), None
        for n in range(1, len(ids) + 1):
            known = byte_fallback.decode(ids[:n], skip_special_tokens=True)
            last = [token for token in ids[:n] if 3 <= token < len(byte_fallback) or not token][-1:]
            if last and 3 <= last[0] < 259 and known.endswith("\ufffd"):
                continue  # the run is wrong, or not whole: it is known when it is, or has ended
            if found := [known.find(each) for each in stop if each in known]:
                count, text = n, known[: min(found)]
                break
        if not got[-1].finish_reason:
            assert text is None
            continue
        num_stopped += 1
        assert len(got) == count
        assert "".join(delta.text for delta in got) == text
    assert num_stopped > 100
    # An "a" that turned out to be none, before what is settled in its place.
    texts = Texts(byte_fallback, SamplingParams(stop=["a\ufffd"]))
    deltas = [texts(Delta(1, [token], None, 0)) for token in (3 + ord("a"), 3 + 255, 261)]
    assert ["".join(delta.text for delta in deltas), deltas[-1].stop_reason] == ["\ufffd" * 2, None]


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
        assert Detokenizer(tokenizer).add(token_ids, is_last=True) == want


def test_text_comes_as_soon_as_it_is_sure(byte_level):
    token_ids = byte_level.encode("Hello, 漢🙂 world")
    detokenizer = Detokenizer(byte_level)
    texts = [detokenizer.add([token]) for token in token_ids]
    assert texts[:2] == ["Hello", ","]
    assert "🙂" in texts, "all of it with its last token"
    assert texts[-1] == " world"
    assert detokenizer.add([], is_last=True) == ""
