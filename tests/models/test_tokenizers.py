"""Tokenizers of directories: ids as their files have them, and chat templates wherever these lie."""

import io
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from jaxpaged.checks import InputError
from jaxpaged.models.files import hf

GOLDENS = Path(__file__).parents[1] / "goldens"
SPACE = "\u2581"
FORMS = {  # how the parts of a tokenizer.json treat spaces
    "replace": (normalizers.Replace(" ", SPACE), None),
    "prepend": (normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]), None),
    "never": (None, pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)),
    "first": (None, pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)),
    "lower": (normalizers.Lowercase(), pre_tokenizers.Digits(individual_digits=True)),
}


@pytest.mark.parametrize("form", FORMS)
def test_token_ids_are_the_files_own_whatever_class_it_names(tmp_path, form):
    """Classes of transformers 5 make normalizers, pre-tokenizers and decoders of their own.

    Where there is a tokenizer.json, transformers 5 leaves `add_bos_token` to it, too.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), SPACE, *"hiH7x\n"]
    tokens += [f"{SPACE}h", f"{SPACE}hi", f"{SPACE}x", "<|end|>"]
    merges = [(SPACE, "h"), (f"{SPACE}h", "i"), (SPACE, "x")]
    vocab = {token: i for i, token in enumerate(tokens)}
    own = Tokenizer(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    normalizer, cut = FORMS[form]
    if normalizer is not None:
        own.normalizer = normalizer
    if cut is not None:
        own.pre_tokenizer = cut
    own.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    own.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in ("</s>", "<|end|>")])
    own.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text((GOLDENS / "gqa_tied" / "config.json").read_text())
    for name in ("LlamaTokenizerFast", "LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer"):
        for said in ({}, {"legacy": True, "add_bos_token": False, "bos_token": "<s>"}):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name} | said))
            found = hf.tokenizer(tmp_path)
            for text in ("hi", " hi", "h\nhi  x 77", "hi<|end|>Hi", "\u00e9"):
                want = own.encode(text, add_special_tokens=False).ids
                assert found.encode(text, add_special_tokens=False) == want, name
                assert found.decode(want) == own.decode(want, skip_special_tokens=False), name
                assert found.encode(text) == own.encode(text).ids == [vocab["<s>"], *want]
            if name.startswith("Llama"):  # the class has these where the files say nothing
                assert (found.bos_token, found.eos_token, found.unk_token) == ("<s>", "</s>", "<unk>")
            assert len(found) == len(tokens)


def test_the_chat_template_of_a_processor_is_found(tmp_path):
    """Wrappers have theirs there. A tokenizer's own goes first, as here there are no images to process."""
    tokens = Tokenizer(WordLevel({"a": 0}, "a"))
    PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((GOLDENS / "gqa_tied" / "config.json").read_text())
    named = [{"name": "default", "template": "b"}, {"name": "tool_use", "template": "c"}]
    for name in ("processor_config.json", "chat_template.json"):
        for said, want in (
            ("t", "t"),
            (named, {"default": "b", "tool_use": "c"}),
            ({"default": "d"}, {"default": "d"}),
        ):
            (tmp_path / name).write_text(json.dumps({"chat_template": said, "processor_class": "P"}))
            assert hf.tokenizer(tmp_path).chat_template == want
    for wrong in (3, {"default": 3}, [{"name": "default"}]):
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(
            InputError, match="chat_template.json: chat_template=.* must be a text, or texts by name"
        ):
            hf.tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("own")
    assert hf.tokenizer(tmp_path).chat_template == "own"


def test_a_tokenizer_model_alone_is_read(tmp_path):
    """One of SentencePiece, as Llama 2 and Mistral 7B first came with."""
    import sentencepiece

    texts, written = ["the quick brown fox jumps over the lazy dog", "Grüße und Küsse"], io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 5),
        model_writer=written,
        model_type="bpe",
        vocab_size=290,
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}'
    )
    (tmp_path / "config.json").write_text((GOLDENS / "gqa_tied" / "config.json").read_text())
    ours, theirs = (
        hf.tokenizer(tmp_path),
        sentencepiece.SentencePieceProcessor(model_proto=written.getvalue()),
    )
    for text in [*texts, "the Grüße é"]:
        assert ours.encode(text) == [theirs.bos_id(), *theirs.encode(text)]
        assert ours.decode(ours.encode(text), skip_special_tokens=True) == text
