"""NVIDIA GPUs since Ampere: what each generation has for a kernel, and the cards of arithmetic.

`TARGETS` has one line for each compute capability, `CARDS` one for each card whose floor and model are
printed by `benchmarks/cards.py`. Our kernels are the default of a device that has a target. `jaxpaged info`
shows it. `compiled_for` is the target of the kernel that is being made.
"""

import dataclasses
import re
from typing import Any, Literal

Fetch = Literal["tma", "cp.async"]  # what brings a tile into shared memory
Multiply = Literal["wgmma", "mma.sync", "tcgen05"]  # the fastest instruction of products


@dataclasses.dataclass(frozen=True)
class Target:
    """A compute capability; sizes are bytes of shared memory, threads and registers of one multiprocessor.

    Source of the sizes: the CUDA C++ Programming Guide, technical specifications per compute capability; of
    the exponents, its arithmetic instructions; of a B300's, NVIDIA's article on Blackwell Ultra.
    """

    architecture: str  # as ptxas names it
    capability: str  # as JAX names it
    fetch: Fetch
    multiply: Multiply
    program_bytes: int  # the most that one program has
    core_bytes: int
    core_threads: int
    core_registers: int = 65536  # of 32 bits
    core_exponents: int = 16  # a cycle

    @property
    def converts_float8(self) -> bool:
        """Whether an instruction makes float16 of float8: since Ada."""
        return self.architecture not in ("sm_80", "sm_86")

    @property
    def kernel_multiply(self) -> Multiply:
        """The instruction of all kernels but that of prompts, which has `multiply` for heads that are short
        enough (`prompt.program.multiply_of`).
        """
        return "wgmma" if self.multiply == "wgmma" else "mma.sync"

    def __str__(self) -> str:
        prompts = "" if self.multiply == self.kernel_multiply else f", of prompts by {self.multiply}"
        return (
            f"{self.architecture}: tiles by {self.fetch}, products by {self.kernel_multiply}{prompts}, "
            f"{self.program_bytes // 1024} KiB a program"
        )


def _target(
    architecture: str,
    capability: str,
    fetch: Fetch,
    multiply: Multiply,
    kib: int,
    threads: int,
    **more: int,
) -> Target:
    return Target(architecture, capability, fetch, multiply, kib * 1024, (kib + 1) * 1024, threads, **more)


TARGETS = {
    target.capability: target
    for target in (
        _target("sm_80", "8.0", "cp.async", "mma.sync", 163, 2048),
        _target("sm_86", "8.6", "cp.async", "mma.sync", 99, 1536),
        _target("sm_89", "8.9", "cp.async", "mma.sync", 99, 1536),
        _target("sm_90a", "9.0", "tma", "wgmma", 227, 2048),
        _target("sm_100a", "10.0", "tma", "tcgen05", 227, 2048),
        _target("sm_103a", "10.3", "tma", "tcgen05", 227, 2048, core_exponents=32),
        _target("sm_120a", "12.0", "tma", "mma.sync", 99, 1536),
        _target("sm_121a", "12.1", "tma", "mma.sync", 99, 1536),
    )
}
HOPPER = TARGETS["9.0"]


def compiled_for() -> Target:
    """Return the target that Mosaic compiles for here; Hopper where there is no GPU, or an unknown one."""
    from jax.experimental.mosaic.gpu import utils

    return TARGETS.get(".".join(map(str, utils._infer_arch())), HOPPER)


def target_of(device: Any) -> Target | None:
    """Return the target of a JAX device; None for a CPU, or a GPU that is in no line of the table."""
    if device.platform != "gpu":
        return None
    return TARGETS.get(str(getattr(device, "compute_capability", "")))


@dataclasses.dataclass(frozen=True)
class Card:
    """A card's published figures; products are dense, of bfloat16 with sums in float32."""

    name: str
    capability: str
    num_cores: int  # multiprocessors
    memory_bytes: float
    bandwidth: float  # bytes a second
    flops: float  # a second
    core_flops: int  # of one multiprocessor, in a cycle
    source: str

    @property
    def clock(self) -> float:
        """The cycles a second for which the peak is published."""
        return self.flops / self.num_cores / self.core_flops

    def is_of(self, device_kind: str) -> bool:
        """Return whether JAX's name of a device is this card's. A smaller A100 has another bandwidth."""
        [word] = re.findall(r"[A-Z]+\d+|\d{4}", self.name.partition(" 80GB")[0])
        return bool(re.search(rf"\b{word}\b", device_kind)) and "40GB" not in device_kind

    @property
    def target(self) -> Target:
        """The target that the card's programs are compiled for."""
        return TARGETS[self.capability]


CARDS = (
    Card("A100 80GB SXM", "8.0", 108, 80e9, 2.039e12, 312e12, 2048, "NVIDIA A100 datasheet"),
    Card("L4", "8.9", 58, 24e9, 0.300e12, 121e12, 1024, "NVIDIA L4 datasheet (half of the sparse figure)"),
    Card("RTX 4090", "8.9", 128, 24e9, 1.008e12, 165.2e12, 512, "NVIDIA Ada architecture whitepaper"),
    Card(
        "H100 SXM",
        "9.0",
        132,
        80e9,
        3.35e12,
        989e12,
        4096,
        "NVIDIA H100 datasheet (half of the sparse figure)",
    ),
    Card(
        "H200 SXM",
        "9.0",
        132,
        141e9,
        4.8e12,
        989e12,
        4096,
        "NVIDIA H200 datasheet (half of the sparse figure)",
    ),
    Card(
        "B200",
        "10.0",
        148,
        180e9,
        8e12,
        2250e12,
        8192,
        "NVIDIA HGX B200 datasheet (half of the sparse figure)",
    ),
    Card("RTX 5090", "12.0", 170, 32e9, 1.792e12, 209.5e12, 512, "NVIDIA RTX Blackwell whitepaper"),
)


def card_of(device_kind: str) -> Card | None:
    """Return the card of JAX's name of a device; None if it is none of `CARDS`."""
    return next((card for card in CARDS if card.is_of(device_kind)), None)
