"""Fragments, transposition and swizzles, as PTX's document says them, in loops over lanes and elements."""

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.texts import registers, run, stored, words

RNG = np.random.default_rng(0)
TYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
}


def left(k, bits, i):
    """Return row and column of element i of A in each lane: section "Matrix fragments for mma.m16n8k..."."""
    lane = np.arange(32)
    group, member = lane // 4, lane % 4
    if (k, bits) == (8, 16):
        return group + 8 * (i >= 2), member * 2 + (i & 1)
    if bits == 16:
        upper = (0 <= i < 2) or (4 <= i < 6)
        return group + 8 * (not upper), member * 2 + (i & 1) + 8 * (i >= 4)
    if k == 16:
        return group + 8 * (i >= 4), member * 4 + (i & 3)
    upper = (0 <= i < 4) or (8 <= i < 12)
    return group + 8 * (not upper), member * 4 + (i & 3) + 16 * (i >= 8)


def right(k, bits, i):
    lane = np.arange(32)
    group, member = lane // 4, lane % 4
    if bits == 16:
        return member * 2 + (i & 1) + 8 * (i >= 2), group
    return member * 4 + (i & 3) + 16 * (i >= 4), group


def packed(matrix, where, count):
    """Return the words of each lane's elements, [words, 32]."""
    elements = np.stack([matrix[where(i)] for i in range(count)], 1)  # [32, count]
    return np.ascontiguousarray(np.ascontiguousarray(elements).view(np.uint32).T)


@pytest.mark.parametrize(
    ("kind", "k"),
    [("f16", 16), ("f16", 8), ("bf16", 16), ("bf16", 8), ("e4m3", 32), ("e5m2", 32), ("s8", 32), ("s8", 16)],
)
def test_mma_multiplies_what_the_fragments_say(kind, k):
    dtype, is_integer = TYPES[kind], kind == "s8"
    draw = (lambda *s: RNG.integers(-128, 128, s)) if is_integer else (lambda *s: RNG.standard_normal(s))
    a, b = draw(16, k).astype(dtype), draw(k, 8).astype(dtype)
    c = draw(16, 8).astype(np.int32 if is_integer else np.float32)
    bits = 8 * np.dtype(dtype).itemsize
    a_words = packed(a, lambda i: left(k, bits, i), 16 * k // 32)
    b_words = packed(b, lambda i: right(k, bits, i), 8 * k // 32)
    lane = np.arange(32)

    def sums(i):
        return lane // 4 + 8 * (i >= 2), lane % 4 * 2 + (i & 1)

    c_words = packed(c, sums, 4)
    result = "s32" if is_integer else "f32"
    operands = [registers(40, 4), registers(1, len(a_words)), registers(10, len(b_words)), registers(20, 4)]
    body = "\n".join([
        words(1, len(a_words), 0), words(10, len(b_words), 1), words(20, 4, 2),
        f"mma.sync.aligned.m16n8k{k}.row.col.{result}.{kind}.{kind}.{result} {', '.join(operands)};",
        stored(40, 4, 3),
    ])  # fmt: skip
    [got] = run(body, [a_words, b_words, c_words], [((4, 32), c.dtype)]).outputs
    wanted = a.astype(np.float64) @ b.astype(np.float64) + c
    for i in range(4):
        np.testing.assert_array_equal(got[i], wanted[sums(i)].astype(c.dtype))


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix_are_each_others_reverse(trans, count):
    """Thread t has elements 2 (t % 4) and the next of row t / 4; of column t / 4 if transposed."""
    tiles = RNG.integers(0, 2**16, (count, 8, 8)).astype(np.uint16)
    rows = np.zeros((32, 4), np.uint32)
    rows[: 8 * count] = np.ascontiguousarray(tiles).view(np.uint32).reshape(-1, 4)
    names = registers(40, count)
    body = f"""
        mul.lo.u32 %r1, %r0, 16;
        mul.wide.u32 %rd10, %r0, 16;
        add.s64 %rd10, %rd10, %rd0;
        ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd10];
        st.shared.v4.b32 [%r1], {{%r2, %r3, %r4, %r5}};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {names}, [%r1];
        add.u32 %r1, %r1, 512;
        stmatrix.sync.aligned.m8n8.x{count}.shared.b16 [%r1], {names};
        bar.warp.sync -1;
        ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r1];
        mul.wide.u32 %rd10, %r0, 16;
        add.s64 %rd10, %rd10, %rd2;
        @%p1 st.global.v4.b32 [%rd10], {{%r2, %r3, %r4, %r5}};
        {stored(40, count, 1)}
    """.replace("@%p1", f"setp.lt.u32 %p1, %r0, {8 * count}; @%p1")
    ran = run(body, [rows], [((count, 32), np.uint32), ((count, 8, 8), np.uint16)])
    for n in range(count):
        tile = tiles[n].T if trans else tiles[n]
        for t in range(32):
            low, high = tile[t // 4, 2 * (t % 4)], tile[t // 4, 2 * (t % 4) + 1]
            assert ran.outputs[0][n, t] == int(low) | int(high) << 16
        np.testing.assert_array_equal(ran.outputs[1][n], tile)
    assert not ran.races


def placed(matrix, line, *, units_across=1):
    """Return the bytes of a matrix [rows, bytes of a line]: in each 8 lines 16-byte units are permuted.

    PTX's document draws unit u of line l at u xor l for lines of 128 bytes, at u xor (l / 2) for 64, and at
    u xor (l / 4) for 32.
    """
    rows = len(matrix)
    units = matrix.reshape(rows, line // 16, 16)
    out = np.zeros_like(units)
    for row in range(rows):
        for unit in range(line // 16):
            out[row, unit ^ ((row * line // 128) % (line // 16))] = units[row, unit]
    return out.reshape(-1)


@pytest.mark.parametrize("line", [32, 64, 128])
@pytest.mark.parametrize("start", [(0, 0), (-3, 0), (30, 8)])
def test_a_tensor_copy_swizzles_and_fills_with_zeros(line, start):
    """A box that begins before the tensor, or ends behind it, has zeros there."""
    columns = line // 2
    tensor = RNG.integers(1, 2**16, (33, columns)).astype(np.uint16)
    body = f"""
        setp.eq.u32 %p1, %r0, 0;
        mov.b32 %r1, 8192;
        @%p1 mbarrier.init.shared.b64 [%r1], 1;
        fence.mbarrier_init.release.cluster;
        bar.sync 0;
        mov.b32 %r2, {start[1]};
        mov.b32 %r3, {start[0]};
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {8 * line};
        mov.b32 %r4, 0;
        @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
            [%r4], [%rd40, {{%r2, %r3}}], [%r1];
    wait:
        mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
        @!%p2 bra wait;
        mul.lo.u32 %r5, %r0, {line // 4};
        {
        "".join(
            f'''ld.shared.b32 %r{10 + n}, [%r5+{4 * n}];
        '''
            for n in range(line // 16)
        )
    }
        mul.wide.u32 %rd10, %r5, 1;
        add.s64 %rd10, %rd10, %rd1;
        {
        "".join(
            f'''st.global.b32 [%rd10+{4 * n}], %r{10 + n};
        '''
            for n in range(line // 16)
        )
    }
    """
    maps = [
        {
            "buffer": 0,
            "element": 2,
            "sizes": (33, columns),
            "strides": (columns, 1),
            "box": (8, columns),
            "swizzle": line,
        }
    ]
    ran = run(body, [tensor], [((8 * line,), np.uint8)], maps=maps, shared=8200)
    box = np.zeros((8, columns), np.uint16)
    for r in range(8):
        for c in range(columns):
            if 0 <= start[0] + r < 33 and start[1] + c < columns:
                box[r, c] = tensor[start[0] + r, start[1] + c]
    np.testing.assert_array_equal(ran.outputs[0], placed(box.view(np.uint8), line))
    assert not ran.races


@pytest.mark.parametrize(
    ("from_registers", "trans_a", "trans_b"),
    [
        (False, False, False),
        (False, False, True),
        (False, True, False),
        (True, False, False),
        (True, False, True),
    ],
)
def test_wgmma_multiplies_swizzled_tiles(from_registers, trans_a, trans_b):
    """A [64, 16] and B [16, 64] of lines of 128 bytes; a transposed one has its lines along m or n."""
    a, b = (RNG.standard_normal(s).astype(np.float16) for s in ((64, 16), (16, 64)))

    def tile(lines):  # [lines, elements]: 64 a line
        wide = np.zeros((len(lines), 64), np.float16)
        wide[:, : lines.shape[1]] = lines
        return placed(np.ascontiguousarray(wide).view(np.uint8), 128)

    a_bytes, b_bytes = tile(a.T if trans_a else a), tile(b if trans_b else b.T)
    memory = np.zeros(16384, np.uint8)
    memory[: len(a_bytes)], memory[8192 : 8192 + len(b_bytes)] = a_bytes, b_bytes
    a_words = np.stack([
        packed(a[16 * w : 16 * w + 16], lambda i: left(16, 16, i), 8) for w in range(4)
    ])  # fmt: skip
    thread = "\n".join(
        f"ld.global.b32 %r3, [%rd10+{512 * n}]; st.shared.b32 [%r2+{512 * n}], %r3;" for n in range(32)
    )
    high = (1 << 62) | (64 << 32) | (1 << 16)
    operand = registers(4, 4) if from_registers else "%rd20"
    flags = f"1, 1, {int(trans_b)}" if from_registers else f"1, 1, {int(trans_a)}, {int(trans_b)}"
    body = f"""
        mul.lo.u32 %r2, %r0, 4;
        add.s64 %rd10, %rd0, %rd50;
        {thread}
        mov.b64 %rd20, {high};
        mov.b64 %rd21, {high + 512};
        shr.u32 %r8, %r0, 5;
        mul.wide.u32 %rd11, %r8, 512;
        add.s64 %rd11, %rd11, %rd1;
        mov.u32 %r9, %laneid;
        mul.wide.u32 %rd12, %r9, 4;
        add.s64 %rd11, %rd11, %rd12;
        {"".join(f"ld.global.b32 %r{4 + n}, [%rd11+{128 * n}];" for n in range(4))}
        fence.proxy.async.shared::cta;
        bar.sync 0;
        setp.ne.b32 %p1, 0, 0;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16
            {registers(40, 32)}, {operand}, %rd21, %p1, {flags};
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        {stored(40, 32, 2)}
    """
    ran = run(body, [memory, a_words], [((32, 128), np.float32)], threads=128, shared=16384)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    for i in range(32):
        for t in range(128):
            row = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2)
            column = 8 * (i // 4) + 2 * (t % 4) + i % 2
            assert ran.outputs[0][i, t] == np.float32(wanted[row, column])
    assert not ran.races
