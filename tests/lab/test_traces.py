"""Traces: what is read of each format, how prompts are cut into blocks, and a sentence for each mistake."""

import json

import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.research.lab import traces
from tests.lab.tracing import conversations, write

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 9]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_mooncake_lines_are_read_with_ids_of_512_tokens(tmp_path):
    later = GOOD | {"timestamp": 1505, "input_length": 1024, "hash_ids": [7, 2**80], "more": None}
    trace = traces.read(write(tmp_path / "trace.jsonl", [GOOD, later]))
    assert (trace.format, trace.block_size, trace.num_requests) == ("mooncake", 512, 2)
    np.testing.assert_array_equal(trace.arrival_s, [0, 1.5])
    np.testing.assert_array_equal(trace.input_lens, [600, 1024])
    np.testing.assert_array_equal(trace.output_lens, [3, 3])
    first, second, again, third = trace.content
    assert again == first
    assert len({first, second, third}) == 3


def test_azures_columns_are_read_and_share_nothing(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(AZURE + "2023-11-16 18:17:03.9799600,40,10\n2023-11-16 18:17:04.4799600,33,0\n")
    trace = traces.read(str(file))
    assert (trace.format, trace.content) == ("azure", None)
    np.testing.assert_allclose(trace.arrival_s, [0, 0.5], atol=1e-6)
    cut = traces.blocks(trace, 16)
    np.testing.assert_array_equal(cut.num_findable, [2, 2])
    assert len(set(cut.symbols.tolist())) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        (AZURE, "has no requests"),
        ("nothing\n", "line 1: must be a JSON object, or the header TIMESTAMP"),
        ('{"timestamp": 1', r"line 1: must be a JSON object \("),
        (json.dumps(GOOD) + "\n[1]\n", r"line 2: must be a JSON object, not \[1\]"),
        (json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1}), "line 1: hash_ids is missing"),
        (json.dumps(GOOD | {"input_length": 0}), "line 1: input_length=0 must be an int >= 1"),
        (json.dumps(GOOD | {"output_length": 1.5}), "line 1: output_length=1.5 must be an int >= 0"),
        (
            json.dumps(GOOD | {"timestamp": "now"}),
            "line 1: timestamp='now' must be a number of ms, from 0 to ",
        ),
        (json.dumps(GOOD | {"timestamp": 10**400}), "must be a number of ms, from 0 to "),
        (json.dumps(GOOD | {"hash_ids": [1]}), "line 1: hash_ids .* in blocks of 512 needs 2, not 1"),
        (json.dumps(GOOD | {"hash_ids": ["a", 1]}), r"line 1: hash_ids=\['a', 1\] must be a list of ints"),
        (f"{json.dumps(GOOD)}\n\n{json.dumps(GOOD | {'timestamp': 4})}", "line 3: timestamp runs backwards"),
        (f"{json.dumps(GOOD)}\n{json.dumps(GOOD | {'block_size': 300})}", "line 2: block_size=300 must be"),
        (AZURE + "today,1,2\n", "line 2: TIMESTAMP='today' must be a date"),
        (AZURE + "2023-11-16 18:17:03,1\n", "line 2: must have the 3 columns of the header, not 2"),
        (AZURE + "2023-11-16 18:17:03,many,2\n", "line 2: ContextTokens='many' must be an int >= 1"),
        (AZURE + "2023-11-16 18:17:03,1,2\n2023-11-16 18:17:02,1,2\n", "line 3: TIMESTAMP runs backwards"),
    ],
)
def test_what_is_wrong_in_a_trace_is_one_sentence_with_its_line(tmp_path, text, message):
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        traces.read(str(file))
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match="trace .*nowhere.* cannot be read"):
        traces.read(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_blocks_are_the_same_where_their_tokens_and_all_before_are(tmp_path, block_size, partial):
    """Against tokens written out: each id stands for 64 of them."""
    lines = conversations(60)
    trace = traces.read(write(tmp_path / "trace.jsonl", lines))
    cut = traces.blocks(trace, block_size, partial=partial)
    symbol_of: dict[tuple[int, ...], int] = {}
    for r, line in enumerate(lines):
        length = line["input_length"]
        tokens = [1000 * each + i for each in line["hash_ids"] for i in range(64)][:length]
        num_full = length // block_size
        assert cut.num_held[r] == -(-length // block_size)
        assert cut.num_findable[r] == (cut.num_held[r] if partial else num_full)
        assert cut.num_lookup[r] == (cut.num_held[r] if partial else (length - 1) // block_size)
        found = cut.symbols[cut.starts[r] : cut.starts[r] + cut.num_findable[r]]
        for i, symbol in enumerate(found.tolist()):
            assert symbol_of.setdefault(tuple(tokens[: (i + 1) * block_size]), symbol) == symbol
    assert len(set(symbol_of.values())) == len(symbol_of) == cut.num_distinct


def test_a_block_size_that_cuts_ids_unevenly_is_refused(tmp_path):
    trace = traces.read(write(tmp_path / "trace.jsonl", conversations(3)))
    with pytest.raises(InputError, match="block_size=48 must divide the trace's own 64 tokens"):
        traces.blocks(trace, 48)
