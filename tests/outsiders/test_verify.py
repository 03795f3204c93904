"""`jaxpaged verify layout` and `verify policy`: sound parts pass, planted bugs are told in a sentence."""

import jax.numpy as jnp
import pytest

from jaxpaged import cli
from jaxpaged.checks import InputError
from jaxpaged.contracts import RankedQueue, Ranking
from jaxpaged.research.verify import layouts as of_layouts
from jaxpaged.research.verify import policies as of_policies
from pallas_kernels.layouts import LAYOUTS
from tests.marks import slow_and_nightly
from tests.outsiders import policy
from tests.outsiders.layout import ColumnsOfK, SixBits

CASE = of_layouts.Case(4, 2, 16, "float32")
slow = pytest.mark.slow


class MixesHeads(ColumnsOfK):
    def read(self, *arguments):
        k, v = super().read(*arguments)
        return k, jnp.flip(v, axis=-2)


class OneTokenLate(ColumnsOfK):
    def write(self, arrays, sizes, k, v, slots):
        new = super().write(arrays, sizes, k, v, slots)
        late = slots // sizes.block_size * sizes.block_size + (slots + 1) % sizes.block_size
        return new | {"v": super().write(arrays, sizes, k, v, late)["v"]}


class TouchesTheNextBlock(ColumnsOfK):
    def write(self, arrays, sizes, k, v, slots):
        new = super().write(arrays, sizes, k, v, slots)
        beyond = jnp.minimum(slots // sizes.block_size + 3, sizes.num_blocks - 1)
        return new | {"v": new["v"].at[beyond, 0].set(1)}


class StatesTooMuch(SixBits):
    tolerance = 1.0


class StatesTooLittle(SixBits):
    tolerance = 2.0**-9


class StatesNothing(SixBits):
    tolerance = None


class WrongShape(ColumnsOfK):
    def arrays(self, num_blocks, block_size, *others):
        return super().arrays(num_blocks + 1, block_size, *others)


class Unhashable(ColumnsOfK):
    __hash__ = None


class ForgetsNan(ColumnsOfK):
    """V of a block is scaled by a sum over it, which sees slots that were never written."""

    def read(self, arrays, *others):
        k, v = super().read(arrays, *others)
        return k, v + 0 * jnp.sum(v, axis=-3, keepdims=True)


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (MixesHeads, r"V of slot \d+ \(block \d+, offset \d\), head \d, channel \d+ reads .* and must be"),
        (OneTokenLate, r"V of slot \d+ \(block \d+, offset \d\), head \d, channel \d+ reads"),
        (TouchesTheNextBlock, "call 1 of write.* changes 'v' in "),
        (StatesTooMuch, "tolerance = 1 is more than 16 times the error of 0.01"),
        (StatesTooLittle, r"[KV] of slot \d+ .* and must be .*, to within"),
        (StatesNothing, r"[KV] of slot \d+ .* reads"),
        (WrongShape, r"array 'k' of shape \(10, 2, 16, 4\) must begin with num_blocks=9"),
        (Unhashable, "it must be hashable"),
        (ForgetsNan, "V of slot .* reads nan and must be"),
    ],
)
def test_a_planted_bug_of_a_layout_is_told_in_a_sentence(layout, sentence):
    with pytest.raises(of_layouts.Broken, match=sentence) as told:
        of_layouts.check(layout(), CASE)
    assert "\n" not in str(told.value)


def test_sound_layouts_pass_one_case():
    assert of_layouts.check(ColumnsOfK(), CASE) == 0
    assert 0 < of_layouts.check(SixBits(), CASE) <= SixBits.tolerance


@slow
@pytest.mark.parametrize("name", [*LAYOUTS, "tests.outsiders.layout:SixBits"])
def test_the_command_passes_sound_layouts(name, capsys):
    assert cli.main(["verify", "layout", name]) == 0
    assert " 0 failed" in capsys.readouterr().out


def looks_at_others(queue, block_ids, is_first, now):
    """Rank by a sum over the call, which one block alone does not have."""
    return jnp.sum(queue.note(RankedQueue.HITS, block_ids)) + 0 * now, now


def by_the_queues_clock(queue, block_ids, is_first, now):
    """Rank by the queue's clock, which stands still within a call."""
    return 0 * now, 0 * now - queue.now


class FirstInFirstOut(policy.Oracle):
    """Another policy's oracle."""

    def take(self):
        return self.empty.pop(0) if self.empty else self.free_blocks.pop(0)


@slow
@pytest.mark.parametrize(
    ("ranking", "oracle"),
    [
        (Ranking(looks_at_others), None),
        pytest.param(Ranking(by_the_queues_clock), None, marks=pytest.mark.nightly),
        (policy.FOUND_LAST, FirstInFirstOut),
    ],
)
def test_a_planted_bug_of_a_policy_is_told_in_a_sentence(ranking, oracle):
    report = of_policies.verify_policy(ranking, oracle, traces=6)
    assert not report.ok
    assert "\n" not in report.broken
    assert "takes block" in report.broken or "finds block" in report.broken


@slow
def test_sound_policies_pass():
    assert of_policies.verify_policy(policy.FOUND_LAST, policy.Oracle, traces=4, requests=24).ok
    assert of_policies.verify_policy(policy.FOUND_LAST, traces=3, requests=16).ok


@pytest.mark.parametrize("name", slow_and_nightly(["lru", "sieve", "s3fifo", "lfu"], ["lfu"]))
def test_our_policies_pass_by_the_command(name, capsys):
    assert cli.main(["verify", "policy", name]) == 0
    assert "compared with" in capsys.readouterr().out


def test_what_cannot_be_verified_is_refused(capsys):
    assert cli.main(["verify", "layout", "nothing:here"]) != 0
    assert "kv_layout='nothing:here' must be" in capsys.readouterr().err
    with pytest.raises(InputError, match="policy='json:dumps' must be one of lru, .*, not function"):
        of_policies.verify_policy("json:dumps")
