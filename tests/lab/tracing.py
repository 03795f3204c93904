"""Small traces for tests, in the formats that `jaxpaged.research.lab.traces` reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 64  # tokens of a hash id


def conversations(num_requests: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """Make turns of conversations, each of which repeats the turns before and adds to them.

    Some of them share how they begin, some lengths are whole blocks, some prompts are asked twice.
    """
    rng = np.random.default_rng(seed)
    fresh = iter(range(10, 10**9))
    talks: list[list[int]] = [[0], [0, 1], []]
    lines = []
    for number in range(num_requests):
        if rng.random() < 0.3:
            talks.append([[], [0], [0, 1], [2]][int(rng.integers(4))])
        which = int(rng.integers(max(0, len(talks) - 6), len(talks)))
        if rng.random() > 0.1:
            talks[which] = talks[which] + [next(fresh) for _ in range(int(rng.integers(1, 4)))]
        ids = talks[which] or [3]
        tail = BLOCK if rng.random() < 0.3 else int(rng.integers(1, BLOCK))
        if tail < BLOCK:
            ids = [*ids[:-1], next(fresh)]  # a part of a block is content of its own
        lines.append(
            {
                "timestamp": 250 * number,
                "input_length": BLOCK * (len(ids) - 1) + tail,
                "output_length": int(rng.integers(1, 90)),
                "hash_ids": ids,
                "block_size": BLOCK,
            }
        )
    return lines


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)
