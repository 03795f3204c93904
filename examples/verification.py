"""Verification: a kernel and an allocator against their oracles, right ones and ones with a planted bug.

Run it from the checkout with `python -m examples.verification`, or cell by cell in an editor. `--out` names
the folder for the picture.
"""

# %% A kernel of one's own: paged attention in plain NumPy. `bug` plants a window that is off by one.
import argparse
import functools

import matplotlib
import numpy as np

from jaxpaged.research.verify import Terms, verify_allocator, verify_kernel
from tests.verify.mutants.sound import pool

matplotlib.use("Agg")
import matplotlib.pyplot as plt

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="docs/drawings")
args, _ = parser.parse_known_args()


def attention(
    q, k_cache, v_cache, block_tables, seq_lens, *, scale=None, sliding_window=None, soft_cap=None, bug=0
):
    """Compute each row's attention, head by head, from its last token to its cached tokens."""
    out = np.zeros_like(q)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    heads_a_group = q.shape[1] // k_cache.shape[2]
    for row in np.flatnonzero(seq_lens):
        length = int(seq_lens[row])
        blocks = block_tables[row, : -(-length // k_cache.shape[1])]
        k, v = (x[blocks].reshape(-1, *x.shape[2:])[:length].astype(np.float32) for x in (k_cache, v_cache))
        first = 0 if sliding_window is None else max(0, length - sliding_window - bug)
        for head in range(q.shape[1]):
            scores = k[first:, head // heads_a_group] @ q[row, head].astype(np.float32) * factor
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ v[first:, head // heads_a_group]
    return out


# %% Run all cases of the operation. The function has no ALiBi slopes and others: such cases are "not served".
terms = Terms(arrays="numpy")
report = verify_kernel(attention, "paged_attention_v1", terms)
print(report)
assert report.ok

# %% The planted bug is found, and made as small as it can be.
wrong = verify_kernel(
    functools.partial(attention, bug=1), "paged_attention_v1", terms, name="examples.verification:attention"
)
print(wrong)
assert not wrong.ok
assert wrong.smallest.sliding_window is not None

# %% An allocator of one's own: pure functions over a stack of free blocks (the policy "lifo").
# `tests/verify/mutants/sound/pool.py` is one.
found = verify_allocator(pool, "policy", policy="lifo", histories=40)
print(found)
assert found.ok

# %% A planted bug: a fork forgets to count the new holder. A short history that shows it is printed.


class WrongPool:
    """Allocator whose fork forgets to count the new holder of each block."""

    create, append, free, observe = (
        staticmethod(f) for f in (pool.create, pool.append, pool.free, pool.observe)
    )

    @staticmethod
    def fork(state, sources, destinations, mask):
        """Fork as the right one does, and put the old counts back."""
        new, info = pool.fork(state, sources, destinations, mask)
        new.ref_count[:] = state.ref_count
        return new, info


found = verify_allocator(
    WrongPool, "policy", policy="lifo", histories=40, name="examples.verification:WrongPool"
)
print(found)
assert not found.ok

# %% Draw each case's worst error, in units of the allowed one.
outcomes = [each for each in report.outcomes if each.worst is not None]
figure, axes = plt.subplots(figsize=(8, 0.2 * len(outcomes) + 1), layout="constrained")
axes.barh([str(each.case) for each in outcomes], [each.worst for each in outcomes])
axes.axvline(1, color="tab:red")
axes.set(xlabel="worst error, in units of what is allowed", xlim=(0, 1.05))
axes.tick_params(axis="y", labelsize=7)
figure.savefig(f"{args.out}/verification.png", dpi=110)
