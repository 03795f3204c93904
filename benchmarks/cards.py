"""Floors and modelled times of decode steps and prompts on NVIDIA cards, by arithmetic alone.

    python -m benchmarks.cards

The figures of the cards are in `pallas_kernels.gpu.targets`. A floor is all bytes at the published bandwidth,
or all products at the published peak. The models of a decode step and of a prompt add the cost of the
kernel's own units of work and programs. Nothing here was measured: the constants below are assumptions.
"""

import dataclasses
import heapq
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from absl import app

from pallas_kernels.gpu import targets
from pallas_kernels.gpu.decode.attention import default_partitioning
from pallas_kernels.gpu.prompt import program
from pallas_kernels.gpu.targets import CARDS, Card, Multiply
from pallas_kernels.gpu.tuning import POLYNOMIAL_INSTRUCTIONS
from pallas_kernels.ops.ragged import TILE_LEN
from pallas_kernels.support import Arrays, Options

REACHED = 0.885  # share of the published bandwidth that a copy reaches; 4.25 of 4.8 TB/s on an H200
LATENCY_S = 1e-6  # from a fetch to its tile, under load
TILE_KV = 64  # tokens
PROGRAMS = 2  # on each multiprocessor
IN_FLIGHT = 0.55  # of a multiprocessor's shared memory, in tiles under way
MERGE_S, MERGED = 0.8e-6, 4  # to merge so many partitions of a row
LAUNCH_S = 3e-6
# Of a multiprocessor in a cycle: bytes of its shared memory, and bytes that it fetches from the GPU's cache
# (5,120 for an A100's 108).
SHARED_BYTES, FETCHED_BYTES = 128, 47
SCORE_STEPS = 3.5  # of a score besides its exponent: scale and subtract, maximum, sum, half a conversion
# The share of products and softmax that is hidden behind the other, whichever is shorter. With two consumers
# half: near what FlashAttention-2 and 3 have published. With tcgen05 another warp starts the products.
OVERLAP: dict[Multiply, float] = {"wgmma": 0.5, "mma.sync": 0.5, "tcgen05": 1.0}
START_S = 2e-6  # of a program: until its first scores, and from its last sums to its output in memory


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


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A causal prompt in bfloat16 with Llama-3.1-8B's heads."""

    num_tokens: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    def floor_s(self, card: Card) -> float:
        """Return the seconds of the two products in one layer at the published peak."""
        return 4 * self.num_q_heads * self.head_dim * self.num_tokens**2 / 2 / card.flops

    def problem(self, card: Card) -> program.Problem:
        """Return the problem as the kernel has it on a card: the rows of a program, and its tiles of keys."""
        cache = jax.ShapeDtypeStruct((1, 64, self.num_kv_heads, self.head_dim), jnp.bfloat16)
        q = jax.ShapeDtypeStruct((1, TILE_LEN, self.num_q_heads, self.head_dim), jnp.bfloat16)
        arrays: Any = q, cache, cache, q, q
        options = Options(scale=1.0)
        with mock.patch.object(targets, "compiled_for", return_value=card.target):
            return program.make_problem(Arrays(*arrays), options, in_registers=True, is_interpreted=False)

    def tile_s(self, card: Card, p: program.Problem) -> float:
        """Return the modelled seconds of a program's tile of keys.

        A part of the shorter of products and softmax is hidden behind the longer. Tiles are fetched
        meanwhile. For mma.sync each warp reads a tile from shared memory for its 16 rows.
        """
        rows, keys = p.num_warpgroups * p.warpgroup_rows, p.tile_kv
        lanes = 64 if card.capability == "8.0" else 128  # float32 operations in a cycle
        tile_bytes = 2 * keys * self.head_dim * 2
        products = 4 * rows * keys * self.head_dim / card.core_flops
        if p.multiply == "mma.sync":
            products = max(products, rows / 16 * tile_bytes / SHARED_BYTES)
        share = 1 / p.one_by_polynomial_in if p.one_by_polynomial_in else 0
        steps = SCORE_STEPS + share * POLYNOMIAL_INSTRUCTIONS
        if not p.has_tensor_memory:  # there sums are seldom scaled, elsewhere once a tile
            steps += self.head_dim / keys
        softmax = rows * keys * ((1 - share) / card.target.core_exponents + steps / lanes)
        cycles = max(products, softmax) + (1 - OVERLAP[p.multiply]) * min(products, softmax)
        return max(cycles, tile_bytes / FETCHED_BYTES) / card.clock

    def modelled_s(self, card: Card) -> float:
        """Return the modelled seconds of a prompt's attention in one layer.

        A multiprocessor has one program at a time, and takes the next one when that ends, those with the most
        keys first.
        """
        p = self.problem(card)
        tile_s, free = self.tile_s(card, p), [0.0] * card.num_cores
        for first in reversed(range(0, self.num_tokens, p.tile_len)):
            num_tiles = -(-min(first + p.tile_len, self.num_tokens) // p.tile_kv)
            for _ in range(self.num_kv_heads * p.num_chunks):
                heapq.heapreplace(free, free[0] + START_S + num_tiles * tile_s)
        return max(free) + LAUNCH_S


SHAPES = Decode(8, 32768), Decode(256, 1126)
PROMPT = Prompt(8192)


def table() -> str:
    """Return the table as Markdown, in microseconds a layer."""
    decode = [f"decode {shape}" for shape in SHAPES]
    shapes = " | ".join(f"{shape}: floor / model" for shape in [*decode, f"prompt of {PROMPT.num_tokens}"])
    lines = [f"| card | target | {shapes} |", "| --- " * (3 + len(SHAPES)) + "|"]
    for card in CARDS:
        times = [f"{s.floor_s(card) * 1e6:,.0f} / {s.modelled_s(card) * 1e6:,.0f}" for s in (*SHAPES, PROMPT)]
        lines.append(f"| {' | '.join([card.name, card.target.architecture, *times])} |")
    return "\n".join(lines)


def main(_: list[str]) -> None:
    """Run as a module."""
    print(table())


if __name__ == "__main__":
    app.run(main)
