"""Lines of `jaxpaged verify ptx`: what each launch of a file gave."""

import dataclasses
import zipfile
from collections.abc import Iterator
from pathlib import Path

from jaxpaged.checks import InputError
from jaxpaged.research.ptx import launch
from jaxpaged.research.ptx.faults import Fault

POLLS = ("bra", "mbarrier.test_wait", "mbarrier.try_wait")  # how often depends on the order of warps


@dataclasses.dataclass(frozen=True)
class Line:
    """Line of a report, and whether its check has passed."""

    text: str
    is_right: bool


def lines(path: str, num_seeds: int, *, has_counts: bool = False) -> Iterator[Line]:
    """Run each launch of a file with some seeds. Raises `InputError` if there is no such file."""
    try:
        launches = launch.load(Path(path))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"file={path!r} must be a file of launches: {error}") from error
    for one in launches:
        for seed in range(num_seeds):
            title = f"{one.name} on {one.target}, seed {seed}"
            try:
                outcome = launch.run(one, seed=seed)
            except Fault as fault:
                yield Line(f"FAULT {title}: {fault}", False)
                continue
            verdict = "right" if outcome.is_right else "RACES" if outcome.races else "WRONG"
            counts = outcome.counts
            yield Line(
                f"{verdict} {title}: error {outcome.error:.2e}, {outcome.share:.2f} of what is allowed; "
                f"{counts.steps} instructions of warps; wavefronts {dict(counts.wavefronts)}, "
                f"least {dict(counts.least_wavefronts)}; sectors {dict(counts.sectors)}",
                outcome.is_right,
            )
            yield from (Line(f"    {race}", False) for race in outcome.races)
            if has_counts and seed == 0:
                for (role, name), number in sorted(counts.instructions.items()):
                    if not name.startswith(POLLS):
                        yield Line(f"    warpgroup {role}: {number} {name}", True)
