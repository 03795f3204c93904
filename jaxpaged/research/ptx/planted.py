"""Faults that are planted in a kernel's text, one at a time, to see whether the machine finds them."""

import re
from collections.abc import Iterator

# What is planted, the text that it changes, and what is put there.
FAULTS: dict[str, tuple[str, str]] = {
    "a barrier of a warpgroup removed": (r"bar\.sync\s+%r\d+, 128;", ""),
    "a barrier of the block removed": (r"bar\.sync\s+0;", ""),
    "a wait for an mbarrier removed": (r"\{[^{}]*mbarrier\.(?:test|try)_wait[^{}]*\}", ""),
    "bytes to come not said": (r"mbarrier\.arrive\.expect_tx[^;]*;", ""),
    "a proxy fence removed": (r"fence\.proxy\.async[^;]*;", ""),
    "a fence of the GPU removed": (r"fence\.acq_rel\.gpu;", ""),
    "an atomic that is relaxed": (r"atom\.acq_rel\.gpu", "atom.relaxed.gpu"),
    "wgmma.fence removed": (r"wgmma\.fence[^;]*;", ""),
    "wgmma.wait_group removed": (r"wgmma\.wait_group[^;]*;", ""),
    "wgmma.commit_group removed": (r"wgmma\.commit_group[^;]*;", ""),
    "a wait for bulk stores removed": (r"cp\.async\.bulk\.wait_group[^;]*;", ""),
    "an arrival of copies removed": (r"cp\.async\.mbarrier\.arrive[^;]*;", ""),
    "ldmatrix not transposed": (r"(ldmatrix\.sync\.aligned\.m8n8\.x\d)\.trans", r"\1"),
    "stmatrix not transposed": (r"(stmatrix\.sync\.aligned\.m8n8\.x\d)\.trans", r"\1"),
    "a swizzle's xor made or": (r"xor\.b32(\s)", r"or.b32\1"),
    "lanes 8 away exchanged for 16": (r"(shfl\.sync\.bfly\.b32[^;]*?), 16, ", r"\1, 8, "),
}


def planted(text: str, what: str) -> Iterator[str]:
    """Yield the text with this fault at each of its places in turn."""
    pattern, put = FAULTS[what]
    for match in re.finditer(pattern, text):
        yield text[: match.start()] + match.expand(put) + text[match.end() :]
