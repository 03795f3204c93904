"""Sound code, and what to change in it for a bug: the kit must find each.

A mutant is a line replaced in a file, and so shows what is wrong by itself. `planted` copies a folder,
changes it, and lets Python find it under a name of its own.
"""

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Mutant:
    """A bug: in `file` of `folder`, `right` becomes `wrong`; what is to be verified is `path` in the copy."""

    name: str
    folder: str
    file: str
    right: str
    wrong: str
    path: str  # module:name, from the folder on
    what: str  # the operation, or the generation
    source: str = ""  # OWNER/REPOSITORY#NUMBER of a public fix or report of a bug of the kind

    def __str__(self) -> str:
        return self.name


@contextmanager
def planted(mutant: Mutant, where: Path) -> Iterator[Any]:
    """Import what the mutant's path names, with the bug in it."""
    package = f"mutant_{mutant.name.replace(' ', '_')}"
    shutil.copytree(ROOT / mutant.folder, where / package)
    file = where / package / mutant.file
    text = file.read_text()
    assert text.count(mutant.right) == 1, f"{mutant}: {mutant.right!r} must be in {file.name} once"
    file.write_text(text.replace(mutant.right, mutant.wrong))
    sys.path.insert(0, str(where))
    try:
        module, _, name = mutant.path.partition(":")
        yield getattr(importlib.import_module(f"{package}.{module}"), name)
    finally:
        sys.path.remove(str(where))
        for loaded in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[loaded]
