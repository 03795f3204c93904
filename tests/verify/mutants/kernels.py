"""Ten bugs that kernels have had."""

from tests.verify.mutants import Mutant

SOUND = "tests/verify/mutants/sound"


def _attention(name: str, right: str, wrong: str, *, in_parts: bool = False) -> Mutant:
    function, op = ("paged_attention_in_parts", "v2") if in_parts else ("paged_attention", "v1")
    return Mutant(name, SOUND, "attention.py", right, wrong, f"attention:{function}", f"paged_attention_{op}")


def _cache(name: str, right: str, wrong: str, op: str) -> Mutant:
    return Mutant(name, SOUND, "cache.py", right, wrong, f"cache:{op}", op)


MUTANTS = [
    _attention("window off by one", "t > length - 1 - sliding", "t >= length - 1 - sliding"),
    _attention("a table entry too many", "-(-length // block_size)", "length // block_size + 1"),
    _attention("heads of a group apart", "head // group_size", "head % num_kv_heads"),
    _attention("slopes from the front", "(t - (length - 1))", "t"),
    _attention("cap without its division", "np.tanh(s / f32(soft_cap))", "np.tanh(s)"),
    _attention("a sink only in the sum", "out * rescale[:, None]\n    return", "out\n    return"),
    _attention("one scale for all heads", "reshape(v_scale, (-1, 1))", "reshape(v_scale, (-1, 1))[:1]"),
    _attention("parts not rescaled", "out = out * rescale[:, None] + np", "out = out + np", in_parts=True),
    _cache("truncated instead of rounded", "np.rint(new)", "new", "reshape_and_cache"),
    _cache("copies not in order", "= origin[source]", "= source", "copy_blocks"),
]
