"""Floors and modelled times of decode steps and prompts on NVIDIA cards, by arithmetic alone.

    python -m benchmarks.cards

The figures of the cards are in `pallas_kernels.gpu.targets`. A floor is all bytes at the published bandwidth,
or all products at the published peak. The model of a decode step adds the cost of the kernel's own units of
work and programs. Nothing here was measured: the constants below are assumptions.
"""

import dataclasses

from absl import app

from pallas_kernels.gpu.decode.attention import default_partitioning
from pallas_kernels.gpu.targets import CARDS, Card

REACHED = 0.885  # share of the published bandwidth that a copy reaches; 4.25 of 4.8 TB/s on an H200
LATENCY_S = 1e-6  # from a fetch to its tile, under load
TILE_KV = 64  # tokens
PROGRAMS = 2  # on each multiprocessor
IN_FLIGHT = 0.55  # of a multiprocessor's shared memory, in tiles under way
MERGE_S, MERGED = 0.8e-6, 4  # to merge so many partitions of a row
LAUNCH_S = 3e-6


@dataclasses.dataclass(frozen=True)
class Decode:
    """A decode step of rows of equal length, in bfloat16 with Llama-3.1-8B's heads."""

    num_rows: int
    num_tokens: int
    num_kv_heads: int = 8
    group_size: int = 4
    head_dim: int = 128

    def __str__(self) -> str:
        return f"{self.num_rows} x {self.num_tokens}"

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's K and V for one kv head."""
        return 2 * self.head_dim * 2

    def floor_s(self, card: Card) -> float:
        """Return the seconds to read the rows' cache once at the published bandwidth."""
        return self.num_rows * self.num_tokens * self.num_kv_heads * self.token_bytes / card.bandwidth

    def partition_tokens(self, first: int | None = None) -> list[int]:
        """Return the tokens of a row's partitions, as the kernel cuts it.

        first: the shortest partition; None: the kernel's own.
        """
        columns = -(-self.group_size // 8) * 8
        rule = default_partitioning(self.num_kv_heads, columns)
        size = first or rule.tokens
        while -(-self.num_tokens // size) > rule.max_partitions:
            size *= 2
        return [min(size, self.num_tokens - start) for start in range(0, self.num_tokens, size)]

    def modelled_s(self, card: Card, first: int | None = None) -> float:
        """Return the modelled seconds of a step's attention in one layer.

        Programs take units of work in turn. Those that still have work share the bandwidth, each up to what
        its ring of tiles has in flight. A row's last program then merges its partitions.
        """
        parts = self.partition_tokens(first)
        kept = 2 * self.head_dim * 8 * 4 if len(parts) > 1 else 0  # partial results, written and read
        row = [-(-t // TILE_KV) * TILE_KV * self.token_bytes + kept for t in parts]
        units = [size for size in row for _ in range(self.num_kv_heads)] * self.num_rows
        programs = min(card.num_cores * PROGRAMS, len(units))
        merges = [0] * programs
        if len(parts) > 1:
            for last in range(len(row) * self.num_kv_heads, len(units) + 1, len(row) * self.num_kv_heads):
                for head in range(self.num_kv_heads):
                    merges[(last - self.num_kv_heads + head) % programs] += -(-len(parts) // MERGED)
        in_flight = card.target.core_bytes * IN_FLIGHT / PROGRAMS
        alone, shared = in_flight / LATENCY_S, card.bandwidth * REACHED
        now = done = end = 0.0
        work = sorted((sum(units[g::programs]), merges[g]) for g in range(programs))
        for finished, (size, count) in enumerate(work):
            now += (size - done) / min(alone, shared / (programs - finished))
            done = size
            end = max(end, now + count * MERGE_S)
        return end + LAUNCH_S


def prompt_floor_s(card: Card, num_tokens: int, num_q_heads: int = 32, head_dim: int = 128) -> float:
    """Return the seconds of a causal prompt's two products in one layer at the published peak."""
    return 4 * num_q_heads * head_dim * num_tokens**2 / 2 / card.flops


SHAPES = Decode(8, 32768), Decode(256, 1126)
PROMPT = 8192  # tokens


def table() -> str:
    """Return the table as Markdown, in microseconds a layer."""
    decode = " | ".join(f"decode {shape}: floor / model" for shape in SHAPES)
    lines = [f"| card | target | {decode} | prompt of {PROMPT}: floor |", "| --- " * (3 + len(SHAPES)) + "|"]
    for card in CARDS:
        times = [f"{s.floor_s(card) * 1e6:,.0f} / {s.modelled_s(card) * 1e6:,.0f}" for s in SHAPES]
        prompt = f"{prompt_floor_s(card, PROMPT) * 1e6:,.0f}"
        lines.append(f"| {' | '.join([card.name, card.target.architecture, *times, prompt])} |")
    return "\n".join(lines)


def main(_: list[str]) -> None:
    """Run as a module."""
    print(table())


if __name__ == "__main__":
    app.run(main)
