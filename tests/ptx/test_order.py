"""Order: what is not waited for is a race, what never comes is a deadlock, what PTX forbids is a fault."""

import numpy as np
import pytest

from jaxpaged.research.ptx.faults import Fault
from tests.ptx.texts import run

WORDS = np.arange(256, dtype=np.uint32)
ONE_WORD = [((64,), np.uint32)]

# Each thread stores a word, and reads that of the thread 32 further on.
EXCHANGE = """
    mul.lo.u32 %r1, %r0, 4;
    st.shared.b32 [%r1], %r0;
    BARRIER
    xor.b32 %r2, %r1, DISTANCE;
    ld.shared.b32 %r3, [%r2];
    add.s64 %rd1, %rd0, %rd50;
    st.global.b32 [%rd1], %r3;
"""


@pytest.mark.parametrize(
    ("distance", "barrier", "is_right"),
    [(128, "bar.sync 0;", True), (128, "bar.sync 1, 64;", True), (128, "", False),
     (128, "bar.warp.sync -1;", False),
     (4, "bar.warp.sync -1;", True), (4, "", False), (0, "", True)],
)  # fmt: skip
def test_threads_that_exchange_words_need_a_barrier(distance, barrier, is_right):
    ran = run(
        EXCHANGE.replace("BARRIER", barrier).replace("DISTANCE", str(distance)), [], ONE_WORD, threads=64
    )
    assert (not ran.races) == is_right
    if is_right:
        np.testing.assert_array_equal(ran.outputs[0], np.arange(64) ^ distance // 4)


COPY = """
    mul.lo.u32 %r1, %r0, 16;
    mul.wide.u32 %rd10, %r0, 16;
    add.s64 %rd11, %rd0, %rd10;
    cp.async.cg.shared.global [%r1], [%rd11], 16;
    WAIT
    xor.b32 %r2, %r1, 16;
    ld.shared.v4.b32 {%r3, %r4, %r5, %r6}, [%r2];
    add.s64 %rd12, %rd1, %rd10;
    st.global.v4.b32 [%rd12], {%r3, %r4, %r5, %r6};
"""
COMMITTED = "cp.async.commit_group;"


@pytest.mark.parametrize(
    ("wait", "is_right"),
    [(f"{COMMITTED} cp.async.wait_group 0; bar.sync 0;", True), ("cp.async.wait_all; bar.sync 0;", True),
     ("bar.sync 0;", False), (f"{COMMITTED} cp.async.wait_group 1; bar.sync 0;", False)],
)  # fmt: skip
def test_copies_come_when_they_are_waited_for(wait, is_right):
    ran = run(COPY.replace("WAIT", wait), [WORDS], [((256,), np.uint32)], threads=64, lateness=0.99)
    assert (not ran.races) == is_right
    if is_right:
        np.testing.assert_array_equal(ran.outputs[0].reshape(64, 4), WORDS.reshape(64, 4)[np.arange(64) ^ 1])


TENSOR = """
    setp.eq.u32 %p1, %r0, 0;
    mov.b32 %r1, 256;
    @%p1 mbarrier.init.shared.b64 [%r1], 1;
    FENCE
    bar.sync 0;
    mov.b32 %r2, 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], BYTES;
    @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd0], 256, [%r1];
    WAIT
    mul.lo.u32 %r5, %r0, 4;
    ld.shared.b32 %r6, [%r5];
    add.s64 %rd2, %rd1, %rd50;
    st.global.b32 [%rd2], %r6;
"""
POLL = "poll: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra poll;"
INIT = "fence.mbarrier_init.release.cluster;"


def bulk(fence=INIT, num_bytes=256, wait=POLL):
    text = TENSOR.replace("FENCE", fence).replace("BYTES", str(num_bytes)).replace("WAIT", wait)
    return run(text, [WORDS[:64]], ONE_WORD, threads=64, lateness=0.9)


def test_a_bulk_copy_is_seen_by_who_waits_for_its_barrier():
    ran = bulk()
    assert not ran.races
    np.testing.assert_array_equal(ran.outputs[0], WORDS[:64])


def test_a_bulk_copy_that_is_not_waited_for_is_a_race():
    assert any("not ordered" in race for race in bulk(wait="").races)


def test_a_barrier_needs_a_fence_before_the_asynchronous_proxy_uses_it():
    assert any("proxy" in race for race in bulk(fence="").races)


def test_bytes_that_never_add_up_are_a_deadlock():
    with pytest.raises(Fault, match="deadlock"):
        bulk(num_bytes=512)


STORE = """
    mul.lo.u32 %r1, %r0, 4;
    st.shared.b32 [%r1], %r0;
    FENCE
    bar.sync 0;
    setp.eq.u32 %p1, %r0, 0;
    mov.b32 %r2, 0;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2], 256;
    cp.async.bulk.commit_group;
    WAIT
    AGAIN
"""
AGAIN = "bar.sync 0; st.shared.b32 [%r1], 0;"


@pytest.mark.parametrize(
    ("fence", "wait", "again", "what"),
    [("fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group 0;", AGAIN, None),
     ("fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read 0;", AGAIN, None),
     ("", "cp.async.bulk.wait_group 0;", "", "without a proxy fence"),
     ("fence.proxy.async.shared::cta;", "", AGAIN + "cp.async.bulk.wait_group 0;",
      "a write to what is read")],
)  # fmt: skip
def test_a_bulk_store_reads_late(fence, wait, again, what):
    text = STORE.replace("FENCE", fence).replace("WAIT", wait).replace("AGAIN", again)
    ran = run(text, [], ONE_WORD, threads=64, lateness=0.95)
    assert [race for race in ran.races if what is None or what not in race] == []
    assert bool(ran.races) == (what is not None)
    if what is None:
        np.testing.assert_array_equal(ran.outputs[0], np.arange(64))


def test_a_warp_may_not_end_before_its_bulk_store_has_read():
    with pytest.raises(Fault, match="ends before its bulk store"):
        run(STORE.replace("FENCE", "fence.proxy.async;").replace("WAIT", "").replace("AGAIN", ""),
            [], ONE_WORD, threads=64, lateness=1.0)  # fmt: skip


# Each of two blocks writes its part, and counts; the last reads both parts.
LAST = """
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %rd10, %r1, 256;
    add.s64 %rd11, %rd0, %rd10;
    add.s64 %rd11, %rd11, %rd50;
    st.global.b32 [%rd11], %r0;
    RELEASE
    bar.sync 0;
    setp.eq.u32 %p1, %r0, 0;
    mov.b32 %r3, 0;
    @%p1 ATOM %r3, [%rd1], 1;
    @%p1 st.shared.b32 [0], %r3;
    bar.sync 0;
    ld.shared.b32 %r3, [0];
    ACQUIRE
    setp.ne.u32 %p2, %r3, 1;
    @%p2 bra end;
    add.s64 %rd12, %rd0, %rd50;
    ld.global.b32 %r4, [%rd12];
    ld.global.b32 %r5, [%rd12+256];
    add.u32 %r6, %r4, %r5;
    add.s64 %rd13, %rd2, %rd50;
    st.global.b32 [%rd13], %r6;
    end:
"""
FENCE = "fence.acq_rel.gpu;"


@pytest.mark.parametrize(
    ("release", "atom", "acquire", "is_right"),
    [
        (FENCE, "atom.acq_rel.gpu.global.inc.u32", FENCE, True),
        (
            "",
            "atom.acq_rel.gpu.global.inc.u32",
            "",
            True,
        ),  # the barrier orders the block, the atomic the blocks
        (
            FENCE,
            "atom.relaxed.gpu.global.inc.u32",
            FENCE,
            False,
        ),  # another thread fenced than the one that counts
        # Fences of the counting thread itself, a barrier before the first and after the second.
        ("bar.sync 0; " + FENCE, "atom.relaxed.gpu.global.inc.u32", FENCE + " bar.sync 0;", True),
        ("bar.sync 0; " + FENCE, "atom.relaxed.gpu.global.inc.u32", FENCE, False),
        ("", "atom.relaxed.gpu.global.inc.u32", "", False),
        ("", "atom.release.gpu.global.inc.u32", "", False),
        ("fence.acq_rel.cta;", "atom.relaxed.gpu.global.inc.u32", "fence.acq_rel.cta;", False),
    ],
)
def test_the_last_block_sees_the_others_by_release_and_acquire(release, atom, acquire, is_right):
    text = LAST.replace("RELEASE", release).replace("ATOM", atom).replace("ACQUIRE", acquire)
    text = text.replace("[0]", "[%r90]").replace("%r1, %ctaid.x;", "%r1, %ctaid.x; mov.b32 %r90, 0;", 1)
    buffers = [((128,), np.uint32), ((1,), np.uint32), ((64,), np.uint32)]
    ran = run(text, [], buffers, threads=64, grid=2, written=True)
    assert (not ran.races) == is_right, ran.races
    np.testing.assert_array_equal(ran.outputs[2], 2 * np.arange(64))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("ld.global.b32 %r1, [%rd1];", "nothing has written"),
        ("st.global.b32 [%rd0], %r0;", "which is an input"),
        ("add.s64 %rd2, %rd0, 4096; ld.global.b32 %r1, [%rd2];", "is in no buffer"),
        ("add.s64 %rd2, %rd0, 2; ld.global.b32 %r1, [%rd2];", "must be aligned"),
        ("mov.b32 %r1, 1024; ld.shared.b32 %r2, [%r1];", "is outside of"),
        ("setp.eq.u32 %p1, %r0, 3; @%p1 bar.sync 0;", "by lanes"),
        ("bar.sync 1, 64;", "deadlock"),
        ("setp.lt.u32 %p1, %r0, 3; @%p1 shfl.sync.bfly.b32 %r1, %r0, 16, 31, -1;", "lane that is not there"),
        ("unheard.of.b32 %r1, %r2;", "no instruction"),
        ("mov.b32 %r1, 64; mbarrier.init.shared.b64 [%r1], 1; bar.sync 0; "
         "mbarrier.arrive.shared.b64 _, [%r1], 2;", "more arrivals"),
    ],
)  # fmt: skip
def test_what_ptx_forbids_is_a_fault(body, why):
    with pytest.raises(Fault, match=why):
        run(body, [WORDS], ONE_WORD)


def test_lanes_that_parted_meet_again():
    """Each half of a warp takes its own way, and a shuffle after them needs all lanes."""
    body = """
        setp.lt.u32 %p1, %r0, 16;
        @%p1 bra left;
        mul.lo.u32 %r1, %r0, 2;
        bra.uni meet;
    left:
        mul.lo.u32 %r1, %r0, 3;
    meet:
        shfl.sync.bfly.b32 %r2, %r1, 16, 31, -1;
        add.s64 %rd1, %rd0, %rd50;
        st.global.b32 [%rd1], %r2;
    """
    lane = np.arange(32)
    want = np.where(lane < 16, 3 * lane, 2 * lane)[lane ^ 16]
    np.testing.assert_array_equal(run(body, [], [((32,), np.uint32)]).outputs[0], want)
