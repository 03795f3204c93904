"""Instructions on registers: integers, floating-point numbers, bits, comparisons, exchanges in a warp."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpaged.research.ptx import rounding
from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.memory import PARAMETERS
from jaxpaged.research.ptx.program import Instruction
from jaxpaged.research.ptx.registers import LANES, TYPES, Array, names_of

if TYPE_CHECKING:
    from jaxpaged.research.ptx.machine import Machine, Step
    from jaxpaged.research.ptx.warps import Warp

Function = Callable[..., Array]
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
FLOATS = {"f16", "f32", "f64"}
COMPARISONS: dict[str, Function] = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal},
    **{"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}
LOGIC: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compile_function(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of an instruction that computes each lane's result from the lane's own operands."""
    function, kinds, result = _function(one)
    put = machine.operands.setter(one.operands[0])
    gets = [machine.operands.value(a, kind) for a, kind in zip(one.operands[1:], kinds, strict=True)]
    dtype = TYPES[result]

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        put(warp, lanes, np.asarray(function(*(get(warp) for get in gets))).astype(dtype, copy=False))

    return step


def _function(one: Instruction) -> tuple[Function, list[str], str]:
    """Return an instruction's function, the types of its operands, and the result's."""
    parts, kind = one.parts, one.parts[-1]
    name, is_float = parts[0], kind in FLOATS
    if "sat" in parts or any(mode in parts for mode in ("rz", "rm", "rp")):
        raise Fault(f"no instruction {one}")
    flush = rounding.flushed if "ftz" in parts else lambda x: x
    if kind in ("f16x2", "bf16x2", "bf16"):
        return _packed(name, kind, one)
    if kind == "f32x2":
        pairs: dict[str, Function] = {
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "fma": rounding.fma,
        }

        def halves(*values: Array) -> Array:
            return np.asarray(pairs[name](*(np.ascontiguousarray(x).view(np.float32) for x in values))).view(
                np.uint64
            )

        return halves, [kind] * (3 if name == "fma" else 2), kind
    simple: dict[str, Function] = {
        **{"add": np.add, "sub": np.subtract, "neg": np.negative, "abs": np.abs},
        **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert},
    }
    if name in simple:
        many = 1 if name in ("neg", "abs", "not") else 2
        return lambda *x: flush(simple[name](*map(flush, x))), [kind] * many, kind
    if name in ("min", "max"):
        smaller: Any = np.minimum if name == "min" else np.maximum
        if is_float and "NaN" not in parts:
            smaller = np.fmin if name == "min" else np.fmax
        return (lambda *x: _reduced(smaller, *map(flush, x))), [kind] * (len(one.operands) - 1), kind
    if name == "mul" and not is_float:
        return _integer_product(parts, kind)
    if name == "mad" and not is_float:
        product, _, result = _integer_product(parts, kind)
        wide = TYPES[result]
        return (lambda a, b, c: product(a, b).astype(wide) + c), [kind, kind, result], result
    if name == "mul":
        return (lambda a, b: flush(flush(a) * flush(b))), [kind] * 2, kind
    if name in ("fma", "mad"):
        return (lambda a, b, c: flush(rounding.fma(flush(a), flush(b), flush(c)))), [kind] * 3, kind
    if name == "div":
        return (lambda a, b: flush(a / b) if is_float else _quotient(a, b)), [kind] * 2, kind
    if name == "rem":
        return (lambda a, b: a - _quotient(a, b) * b), [kind] * 2, kind
    if name in ("shl", "shr"):
        return _shift(name), [kind, "u32"], kind
    if name == "selp":
        return _chosen, [kind, kind, "pred"], kind
    approximate: dict[str, Function] = {
        **{"ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "sqrt": np.sqrt, "tanh": np.tanh},
        **{"sin": np.sin, "cos": np.cos, "rsqrt": lambda x: 1 / np.sqrt(x)},
    }
    if name in approximate and kind in ("f32", "f64"):
        wide_result = approximate[name]
        return (lambda x: flush(wide_result(flush(x).astype(np.float64)).astype(TYPES[kind]))), [kind], kind
    if name == "copysign":
        return (lambda a, b: np.copysign(b, a)), [kind] * 2, kind
    bits: dict[str, tuple[Function, int]] = {
        "prmt": (_permuted, 3),
        "shf": (_funnel(parts), 3),
        "lop3": (_lookup, 4),
        "bfe": (_field(kind), 3),
    }
    bits |= {"popc": (lambda x: np.bitwise_count(x), 1), "brev": (_reversed, 1), "bfi": (_inserted, 4)}
    bits |= {"clz": (_leading_zeros, 1)}
    if name in bits:
        function, many = bits[name]
        kinds = [kind] * many
        if name in ("bfe", "bfi"):
            kinds[-2:] = ["u32", "u32"]
        return function, kinds, "u32" if name in ("popc", "clz") else kind
    raise Fault(f"no instruction {one}")


def _chosen(a: Array, b: Array, is_first: Array) -> Array:
    chosen: Array = np.where(is_first, a, b)
    return chosen


def _reduced(function: Any, *values: Array) -> Array:
    result = values[0]
    for value in values[1:]:
        result = function(result, value)
    return result


def _packed(name: str, kind: str, one: Instruction) -> tuple[Function, list[str], str]:
    """Return a function of pairs of 16-bit numbers, each rounded once."""
    functions: dict[str, tuple[Function, int]] = {
        **{"add": (np.add, 2), "sub": (np.subtract, 2), "mul": (np.multiply, 2), "neg": (np.negative, 1)},
        **{"fma": (lambda a, b, c: a * b + c, 3), "abs": (np.abs, 1)},
        "max": (np.maximum if "NaN" in one.parts else np.fmax, 2),
        "min": (np.minimum if "NaN" in one.parts else np.fmin, 2),
        "tanh": (np.tanh, 1),
        "ex2": (np.exp2, 1),
    }
    if name not in functions:
        raise Fault(f"no instruction {one}")
    function, many = functions[name]
    is_half = kind == "f16x2"

    def numbers(x: Array) -> Array:
        words = np.ascontiguousarray(x).view(np.uint16)
        return words.view(np.float16).astype(np.float64) if is_half else rounding.wide_bfloat16(words)

    def packed(*values: Array) -> Array:
        result = function(*map(numbers, values))
        bits = rounding.to_float16(result) if is_half else rounding.to_bfloat16(result)
        return bits if kind == "bf16" else bits.view(np.uint32)

    return packed, [kind] * many, kind


def _integer_product(parts: list[str], kind: str) -> tuple[Function, list[str], str]:
    if "wide" in parts:
        wide = TYPES[WIDE[kind]]
        return (lambda a, b: a.astype(wide) * b.astype(wide)), [kind] * 2, WIDE[kind]
    if "hi" in parts:
        bits = 8 * np.dtype(TYPES[kind]).itemsize
        if bits == 64:
            return _high_product, [kind] * 2, kind
        double = TYPES[WIDE[kind]]
        return (lambda a, b: (a.astype(double) * b.astype(double)) >> double(bits)), [kind] * 2, kind
    return np.multiply, [kind] * 2, kind


def _high_product(a: Array, b: Array) -> Array:
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    mask = (1 << 64) - 1
    return np.array([((x * y) >> 64) & mask for x, y in pairs], np.uint64).view(a.dtype)


def _quotient(a: Array, b: Array) -> Array:
    """Divide towards zero; by zero the result is all ones."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient < 0) & (quotient * safe != a))
    return np.where(
        b == 0, a.dtype.type(0) - a.dtype.type(1) if a.dtype.kind == "i" else ~a.dtype.type(0), quotient
    )


def _shift(name: str) -> Function:
    def shifted(value: Array, count: Array) -> Array:
        bits = 8 * value.dtype.itemsize
        within = np.minimum(count, bits - 1).astype(value.dtype)
        result = value << within if name == "shl" else value >> within
        if name == "shl" or value.dtype.kind == "u":
            result = np.where(count >= bits, value.dtype.type(0), result)
        return result

    return shifted


def _permuted(a: Array, b: Array, selector: Array) -> Array:
    """Choose 4 of 8 bytes, each copied, or replaced by its sign."""
    both = np.stack([np.ascontiguousarray(x).view(np.uint8).reshape(32, 4) for x in (a, b)], 1).reshape(32, 8)
    result = np.zeros((32, 4), np.uint8)
    for n in range(4):
        chosen = (selector >> np.uint32(4 * n)) & np.uint32(15)
        byte = both[LANES, (chosen & np.uint32(7)).astype(np.int64)]
        result[:, n] = np.where(chosen & np.uint32(8), np.where(byte & 0x80, 0xFF, 0), byte)
    return result.view(np.uint32)[:, 0]


def _funnel(parts: list[str]) -> Function:
    def shifted(low: Array, high: Array, count: Array) -> Array:
        both = high.astype(np.uint64) << np.uint64(32) | low
        count = np.minimum(count, 32) if "clamp" in parts else count & np.uint32(31)
        if "l" in parts:
            return ((both << count.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
        return (both >> count.astype(np.uint64)).astype(np.uint32)

    return shifted


def _lookup(a: Array, b: Array, c: Array, table: Array) -> Array:
    result = np.zeros(32, np.uint32)
    for n in range(8):
        if int(table[0]) >> n & 1:
            result |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    return result


def _field(kind: str) -> Function:
    bits = 64 if kind.endswith("64") else 32

    def extracted(a: Array, start: Array, length: Array) -> Array:
        first, size = start & np.uint32(255), length & np.uint32(255)
        result = []
        for x, p, n in zip(a.tolist(), first.tolist(), size.tolist(), strict=True):
            value = ((x & ((1 << bits) - 1)) >> min(p, bits)) & ((1 << n) - 1)
            if kind.startswith("s") and n:
                sign = (x >> min(p + n - 1, bits - 1)) & 1
                value |= -sign << n if sign else 0
            result.append(value & ((1 << bits) - 1))
        return np.array(result, np.uint64).astype(f"u{bits // 8}").view(a.dtype)

    return extracted


def _inserted(a: Array, b: Array, start: Array, length: Array) -> Array:
    first = np.minimum(start & np.uint32(255), 63).astype(np.uint64)
    size = np.minimum(length & np.uint32(255), 63).astype(np.uint64)
    mask = ((np.uint64(1) << size) - np.uint64(1)) << first
    return ((b.astype(np.uint64) & ~mask) | ((a.astype(np.uint64) << first) & mask)).astype(b.dtype)


def _reversed(x: Array) -> Array:
    bits = np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(32, -1), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(x.dtype)[:, 0]


def _leading_zeros(x: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    return np.array([bits - value.bit_length() for value in x.tolist()], np.uint32)


def compile_comparison(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of setp: a comparison, combined with another predicate if there is one, and its
    negation.
    """
    parts, kind = one.parts, one.parts[-1]
    names = one.operands[0].split("|")
    puts = [machine.operands.setter(name) for name in names]
    a, b = (machine.operands.value(operand, kind) for operand in one.operands[1:3])
    is_float = kind in FLOATS
    compare, is_unordered = parts[1], False
    if compare in ("num", "nan"):
        function: Function = lambda x, y: np.isnan(x) | np.isnan(y)  # noqa: E731
        is_negated = compare == "num"
    else:
        is_negated = False
        is_unordered = is_float and compare.endswith("u") and compare[:-1] in COMPARISONS
        function = COMPARISONS[compare[:-1] if is_unordered else compare]
    has_order = is_float and compare not in ("num", "nan")
    other, other_is_negated, combine = None, False, None
    if len(one.operands) > 3:
        text = one.operands[3]
        other_is_negated = text.startswith("!")
        other = machine.operands.value(text.lstrip("!"), "pred")
        combine = LOGIC[parts[2]]

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        x, y = a(warp), b(warp)
        result = function(x, y)
        if has_order:
            nan = np.isnan(x) | np.isnan(y)
            result = result | nan if is_unordered else result & ~nan
        if is_negated:
            result = ~result
        results = [result, ~result]
        if other is not None and combine is not None:
            known = ~other(warp) if other_is_negated else other(warp)
            results = [combine(each, known) for each in results]
        for put, each in zip(puts, results, strict=False):
            put(warp, lanes, each)

    return step


def compile_move(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of mov and cvta, also to and from vectors of parts of a register."""
    operands, kind, source, target = machine.operands, one.parts[-1], one.operands[1], one.operands[0]
    if source in machine.program.parameters:
        put = operands.setter(target)
        address = np.full(32, PARAMETERS, np.uint64)
        return lambda warp, lanes, here: put(warp, lanes, address)
    size = np.dtype(TYPES[kind]).itemsize
    if target.startswith("{"):
        puts, get = [operands.setter(name) for name in names_of(target)], operands.value(source, kind)
        width = size // len(puts)

        def unpack(warp: "Warp", lanes: Array, here: Array) -> None:
            parts = np.ascontiguousarray(get(warp)).view(f"u{width}").reshape(32, -1)
            for n, put in enumerate(puts):
                put(warp, lanes, parts[:, n].copy())

        return unpack
    put = operands.setter(target)
    if source.startswith("{"):
        names = names_of(source)
        width = size // len(names)
        gets = [operands.value(name, f"b{8 * width}") for name in names]

        def pack(warp: "Warp", lanes: Array, here: Array) -> None:
            parts = np.stack([get(warp).view(f"u{width}") for get in gets], 1)
            put(warp, lanes, np.ascontiguousarray(parts).view(f"u{size}")[:, 0])

        return pack
    get = operands.value(source, kind)
    return lambda warp, lanes, here: put(warp, lanes, get(warp))


def compile_exchange(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of shfl.sync; a lane that is read must take part. A lane must be there to be read."""
    names, mode = one.operands[0].split("|"), one.parts[2]
    puts = [machine.operands.setter(name) for name in names]
    a, b, clamp = (
        machine.operands.value(x, kind)
        for x, kind in zip(one.operands[1:4], ("b32", "u32", "u32"), strict=True)
    )
    if mode not in ("bfly", "idx", "up", "down"):
        raise Fault(f"no instruction {one}")

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        by, limits = b(warp).astype(np.int64) & 31, clamp(warp).astype(np.int64)
        segment = limits >> 8 & 31
        last = (LANES & segment) | (limits & 31 & ~segment)
        if mode == "bfly":
            source = LANES ^ by
        elif mode == "idx":
            source = (LANES & segment) | (by & ~segment)
        else:
            source = LANES - by if mode == "up" else LANES + by
        is_inside = source >= last if mode == "up" else source <= last
        source = np.where(is_inside, source, LANES)
        if not lanes[source[lanes]].all():
            raise Fault(f"{one} from a lane that is not there")
        puts[0](warp, lanes, a(warp)[source])
        if len(puts) > 1:
            puts[1](warp, lanes, is_inside)

    return step


def compile_vote(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of vote.sync, redux.sync and activemask."""
    kind, put = one.parts[0], machine.operands.setter(one.operands[0])
    mode = one.parts[2] if len(one.parts) > 2 else ""
    operand = one.operands[1].lstrip("!") if len(one.operands) > 1 else "0"
    get = machine.operands.value(operand, "pred" if kind == "vote" else one.parts[-1])
    is_negated = len(one.operands) > 1 and one.operands[1].startswith("!")
    reductions: dict[str, Any] = {
        **{"add": np.add, "min": np.minimum, "max": np.maximum},
        **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    }

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        if kind == "activemask":
            put(warp, lanes, np.full(32, (1 << LANES[lanes]).sum(), np.uint32))
            return
        values = get(warp)[lanes]
        if kind == "redux":
            put(warp, lanes, np.full(32, reductions[mode].reduce(values), values.dtype))
            return
        values = ~values if is_negated else values
        if mode == "ballot":
            put(warp, lanes, np.full(32, (1 << LANES[lanes][values]).sum(), np.uint32))
            return
        votes = {"all": values.all(), "any": values.any(), "uni": values.all() or not values.any()}
        put(warp, lanes, np.full(32, votes[mode]))

    return step


def compile_election(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of elect.sync: one open lane is chosen, always the same."""
    number, chosen = (machine.operands.setter(name) for name in one.operands[0].split("|"))

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        lane = next(lane for lane in np.roll(LANES, -machine.chosen_lane) if lanes[lane])
        number(warp, lanes, np.full(32, lane, np.uint32))
        chosen(warp, lanes, lane == LANES)

    return step
