"""Cost of compiling grammars for vocabularies of several kinds: states, bytes of tables and processor time.

    python -m benchmarks.grammars --tokenizer DIRECTORY --out benchmarks/results/grammars-cpu.jsonl
    python -m benchmarks.grammars --tekken tekken_240911.json

`byte level` is the vocabulary of a GPT-2-style tokenizer. `128256` is that one with pairs of its tokens, up
to the size of Llama 3's. `sentencepiece` is trained on this repository's text, with byte fallback. `tekken`
is a vocabulary of Mistral's, such as the 131,072 tokens that the package mistral-common has.
"""

import base64
import gc
import io
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import sentencepiece
from absl import app, flags

from benchmarks.record import ROOT, Results, start
from jaxpaged.grammar.compile import Constraint
from jaxpaged.grammar.machine import byte_machine
from jaxpaged.grammar.nodes import GrammarError, Limits
from jaxpaged.grammar.vocabulary import TokenBytes, token_bytes
from jaxpaged.text.vocabulary import BYTE, Vocabulary

TOKENIZER = flags.DEFINE_string("tokenizer", None, "directory of a GPT-2-style tokenizer")
TEKKEN = flags.DEFINE_string("tekken", None, "file of a vocabulary of Mistral's")
ROUNDS = flags.DEFINE_integer("rounds", 3, "measurements of each grammar")
OUT = flags.DEFINE_string("out", None, "file to append result lines to")

LARGE = 128_256
_ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "kind": {"enum": ["person", "company", "other"]},
        "price": {"type": "number", "minimum": 0, "maximum": 1000, "multipleOf": 0.01},
        "mail": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "kind", "price"],
}
_SHAPES = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, **{side: {"type": "number"} for side in sides}},
            "required": ["kind", *sides],
        }
        for kind, sides in (("circle", ["radius"]), ("box", ["width", "height"]), ("line", ["length"]))
    ]
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "choice": {"choice": ["positive", "negative", "neutral"]},
    "regex": {"regex": r"\d{3}-\d{4}|[a-z]+@[a-z]+\.com"},
    "order": {"json": _ORDER},
    "oneOf": {"json": _SHAPES},
    "40 characters": {"json": {"type": "string", "maxLength": 40}},
    "4 items": {"json": {"type": "array", "items": _SHAPES, "maxItems": 4}},
    "patternProperties": {
        "json": {
            "type": "object",
            "patternProperties": {"^x-": {"type": "string"}, "^[0-9]+$": {"type": "integer"}},
            "propertyNames": {"maxLength": 12},
        }
    },
    "any object": {"json_object": True},
}


def byte_level(directory: str) -> TokenBytes:
    """Return the tokens of a GPT-2-style tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return token_bytes(Vocabulary(tokenizer), len(tokenizer), [tokenizer.eos_token_id])


def tekken(path: str) -> TokenBytes:
    """Return the tokens of a vocabulary of Mistral's: control tokens first, then one for each rank."""
    read = json.loads(Path(path).read_text())
    size, num_control = (read["config"][f"default_{name}"] for name in ("vocab_size", "num_special_tokens"))
    ranked = sorted(read["vocab"], key=lambda entry: entry["rank"])[: size - num_control]
    raw = [b""] * num_control + [base64.b64decode(entry["token_bytes"]) for entry in ranked]
    end = 2  # `</s>`, behind `<unk>` and `<s>`, in all of Mistral's
    return TokenBytes(tuple(raw), (end,))


def enlarged(tokens: TokenBytes, size: int) -> TokenBytes:
    """Return tokens with pairs of them up to a size, as more merges would give."""
    first = [raw for raw in tokens.raw if raw]
    known = set(first)
    found = list(tokens.raw)
    for one, other in itertools.product(first[256:4096], first[256:1024]):
        if len(found) == size:
            break
        if one + other not in known:
            known.add(one + other)
            found.append(one + other)
    assert len(found) == size
    return TokenBytes(tuple(found), tokens.eos_ids)


def trained(size: int) -> TokenBytes:
    """Return the tokens of a SentencePiece model with byte fallback, trained on this repository's text."""
    lines = [
        line
        for folder in ("docs", "jaxpaged")
        for path in sorted((ROOT / folder).rglob("*.*"))
        if path.suffix in (".md", ".py")
        for line in Path(path).read_text().splitlines()
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=size,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    its = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    raw = []
    for token in range(its.get_piece_size()):
        name = its.id_to_piece(token)
        byte = BYTE.fullmatch(name)
        text = b"" if its.is_control(token) or its.is_unknown(token) else name.replace("▁", " ").encode()
        raw.append(bytes([int(byte[1], 16)]) if byte else text)
    return TokenBytes(tuple(raw), (its.eos_id(),))


def machine_seconds(fields: dict[str, Any]) -> float:
    """Return the processor time of a grammar's machine over bytes, of the first node within the limits."""
    begin = time.process_time()
    for node, _ in Constraint(fields, Limits()).nodes():
        try:
            byte_machine(node, Limits())
            break
        except GrammarError:
            continue
    return time.process_time() - begin


def main(argv: list[str]) -> None:
    start(argv)
    results = Results("grammars", OUT.value)
    kinds = {}
    if TOKENIZER.value:
        small = byte_level(TOKENIZER.value)
        kinds = {"byte level": small, "128256": enlarged(small, LARGE), "sentencepiece": trained(8000)}
    if TEKKEN.value:
        kinds["tekken"] = tekken(TEKKEN.value)
    for kind, tokens in kinds.items():
        begin = time.process_time()
        assert tokens.trie is not None
        trie = time.process_time() - begin
        results.put({"vocabulary": kind, "tokens": len(tokens.raw), "tree s": round(trie, 3)})
        for name, fields in GRAMMARS.items():
            took = []
            for _ in range(ROUNDS.value):
                gc.collect()
                begin = time.process_time()
                made = Constraint(fields, Limits()).automaton(tokens)
                took.append(time.process_time() - begin)
            results.put(
                {
                    "vocabulary": kind,
                    "grammar": name,
                    "s": round(statistics.median(took), 3),
                    "machine s": round(machine_seconds(fields), 3),
                    "states": made.num_states,
                    "classes": made.next_state.shape[1],
                    "masks": len(made.masks),
                    "table MB": round(made.nbytes / 1e6, 2),
                }
            )


if __name__ == "__main__":
    app.run(main)
