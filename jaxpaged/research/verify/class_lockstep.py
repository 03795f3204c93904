"""Somebody's allocator class and its generation's oracle, driven through one history side by side.

Both stand behind the same face (`generations`), so that a row, a block and a refusal are the same on either
side. What the generation's class does not define (a fork of what is not there) is not asked of it.

A double free has a rule in each generation, and `free_twice` asks for it. A manager takes no notice of a
sequence that was freed already. The allocators of v0 and v063 raise for a block that nobody holds. V1's pool
raises nothing, but counts below zero and queues no block twice. A class may raise where vLLM's does not.
"""

import functools
from collections.abc import Callable
from typing import Any

from jaxpaged.research.verify import hints
from jaxpaged.research.verify.generations import FREE_PROFILES, Refused, V0Oracle, V063Oracle, V1Oracle
from jaxpaged.research.verify.history import MAX_BLOCKS, NUM_BLOCKS, Disagreement, History, Unusable

# The face of each generation, given the class that stands behind it.
GENERATIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "v0": (V0Oracle, "manager"),
    "v063": (functools.partial(V063Oracle, null_block=False), "manager"),
    "v1": (functools.partial(V1Oracle, profile=FREE_PROFILES["lru"]), "pool"),
    "v1_split": (functools.partial(V1Oracle, profile=FREE_PROFILES["lru_split"]), "pool"),
}
# What the class behind a face is asked for; a bar separates names of which one is enough.
NEEDED = {
    "manager": (
        "can_allocate", "allocate", "append_slot|append_slots", "fork", "swap_out", "swap_in", "can_swap_in",
        "free", "get_block_table", "get_num_free_gpu_blocks", "get_num_free_cpu_blocks",
    ),
    "pool": (
        "get_new_blocks", "free_blocks", "touch", "evict_blocks", "cache_full_blocks", "get_cached_block",
        "reset_prefix_cache", "get_num_free_blocks", "blocks", "null_block",
    ),
}  # fmt: skip
OF_MANAGERS = {
    "append",
    "fork",
    "free",
    "free_twice",
    "free_host",
    "swap_out",
    "swap_in",
    "can_allocate",
    "reset",
}
OF_POOLS = (OF_MANAGERS - {"can_allocate"}) | {
    "truncate", "window", "admit", "commit", "touch", "evict", "reset_cache",
}  # fmt: skip
# A refused call may leave a manager half changed, so these verbs are tried on a copy of the oracle.
MAY_BE_REFUSED = {"append", "admit", "swap_out", "swap_in", "reset_cache"}


class ClassLockstep(History):
    """One history of a user's class of this generation, run beside its oracle."""

    def __init__(self, generation: str, theirs: Callable[..., Any], block_size: int, path: str = "") -> None:
        made_with = {"as": generation, "path": path, "block_size": block_size}
        super().__init__(made_with, f"{generation}-{path.rpartition(':')[2]}", save=False)
        self.block_size, self.generation = block_size, generation
        face, name = GENERATIONS[generation]
        of_sizes = functools.partial(face, block_size, NUM_BLOCKS, NUM_BLOCKS, MAX_BLOCKS)
        self.oracle: Any = of_sizes()
        self.theirs: Any = of_sizes(**{name: functools.partial(self._made, theirs, NEEDED[name])})
        self.compare("the start")

    def _made(self, theirs: Callable[..., Any], needed: tuple[str, ...], *sizes: Any) -> Any:
        """Make an object of a user's class, as vLLM does of its own.

        Raises: Unusable if that fails, or if a method is missing.
        """
        try:
            made = theirs(*sizes)
        except Exception as error:  # whatever a user's constructor raises
            reason = hints.raised(error)
            raise Unusable(f"the class cannot be constructed with {sizes}: {reason}") from error
        for names in needed:
            if not any(hasattr(made, name) for name in names.split("|")):
                what = f"what the class constructs, a {type(made).__name__},"
                raise Unusable(f"{what} has no {names.replace('|', ' or ')}")
        return made

    @property
    def keeps_content(self) -> bool:
        return self.generation.startswith("v1")

    def has(self, verb: str) -> bool:
        return verb in (OF_POOLS if self.keeps_content else OF_MANAGERS)

    def step(self, verb: str, *args: Any) -> bool:
        """Do one verb on both sides, unless the oracle's class does not define it there, and compare."""
        done = getattr(self, verb)(*args)
        self.compare(verb)
        return done

    def shown(self) -> str:
        return str({row: self.theirs.table(row) for row in sorted(self.theirs.tokens)})

    # The verbs, by the names and arguments of `Lockstep`.

    def append(self, num_new_tokens: list[int], token: int) -> bool:
        def do(face: Any) -> dict[str, str]:
            copied: dict[str, str] = {}
            for row, num in enumerate(num_new_tokens):
                if num:
                    copied |= hints.copies(f"copy {{}} for row {row}", face.append(row, [token] * num))
            return copied

        room = MAX_BLOCKS * self.block_size
        lens = [len(self.oracle.tokens.get(row, ())) + num for row, num in enumerate(num_new_tokens)]
        if any(length > room for length in lens):
            return False
        return self._on_both("append", do)

    def fork(self, sources: list[int], destinations: list[int]) -> bool:
        pairs = list(zip(sources, destinations, strict=True))
        taken = set(self.oracle.tokens)
        if any(a not in self.oracle.device_rows() or b in taken for a, b in pairs) or len(pairs) > len(
            set(destinations)
        ):
            return False
        return self._on_both("fork", lambda face: [face.fork(a, b) for a, b in pairs])

    def free(self, rows: list[int]) -> bool:
        return self._each("free", self._there(rows), lambda face, row: face.free(row))

    def free_twice(self, row: int) -> bool:
        """Free a row's blocks too often, on copies, and then the row twice, where that is defined."""
        if row not in self.oracle.device_rows():
            return False
        self._over_free(row)
        return self._on_both("free_twice", lambda face: face.free_twice(row))

    def _over_free(self, row: int) -> None:
        theirs = self._theirs("free_twice", self.theirs.trial)
        try:
            got = theirs.over_free(row)
        except Exception:  # refusing a block that is free already is as strict as vLLM, or stricter
            return
        freed = "a block is freed once more than it is held, without an error, and"
        try:
            want = self.oracle.trial().over_free(row)
        except Exception as error:
            if got:
                raise Disagreement(f"{freed} there must be one, {type(error).__name__} in vLLM") from error
            return
        if difference := hints.difference(got, want):
            raise Disagreement(f"{freed} {difference}")

    def free_host(self, rows: list[int]) -> bool:
        return self._each(
            "free", [r for r in rows if r in self.oracle.on_host], lambda face, row: face.free(row)
        )

    def reset(self) -> bool:
        rows = sorted(self.oracle.on_host) + self.oracle.device_rows()
        return self._each("free", rows, lambda face, row: face.free(row))

    def truncate(self, num_tokens: list[int]) -> bool:
        for row, num in enumerate(num_tokens):
            held = len(self.oracle.tokens.get(row, ())) if self._there([row]) else 0
            skipped = self.oracle.table(row).count(0) * self.block_size if held else 0
            if num > held or 0 < held - num < skipped:
                return False
        rows = [row for row, num in enumerate(num_tokens) if num]
        return self._each("truncate", rows, lambda face, row: face.truncate(row, num_tokens[row]))

    def window(self, num_skipped_tokens: list[int]) -> bool:
        rows = [row for row, num in enumerate(num_skipped_tokens) if num >= self.block_size]
        if not self._have(rows, num_skipped_tokens):
            return False
        return self._each("window", rows, lambda face, row: face.window(row, num_skipped_tokens[row]))

    def swap_out(self, rows: list[int]) -> bool:
        rows = self._there(rows)
        return not rows or self._on_both(
            "swap_out", lambda face: hints.copies("copy {}", face.swap_out(rows))
        )

    def swap_in(self, rows: list[int]) -> bool:
        rows = [row for row in rows if row in self.oracle.on_host]
        if rows and hasattr(self.oracle, "can_swap_in"):
            self._on_both("can_swap_in", lambda face: face.can_swap_in(rows))
        return not rows or self._on_both("swap_in", lambda face: hints.copies("copy {}", face.swap_in(rows)))

    def can_allocate(self, num_tokens: int) -> bool:
        return self._on_both("can_allocate", lambda face: face.can_allocate(num_tokens))

    # Verbs of the prefix cache.

    def admit(self, row: int, tokens: list[int], salt: int) -> bool:
        if row in self.oracle.tokens:
            return False
        self._on_both("lookup", lambda face: hints.entries("hit {}", face.hits(tokens, salt)))
        return self._on_both("admit", lambda face: face.admit(row, tokens, salt))

    def commit(self, num_tokens: list[int]) -> bool:
        rows = [row for row, num in enumerate(num_tokens) if num]
        if not self._have(rows, num_tokens):
            return False
        return self._each("commit", rows, lambda face, row: face.commit(row, num_tokens[row]))

    def touch(self, block_ids: list[int]) -> bool:
        if not self._known(block_ids):
            return False
        self._on_both("touch", lambda face: face.touch(block_ids))
        self.compare("touch")
        return self._on_both("free", lambda face: face.untouch(block_ids))

    def evict(self, block_ids: list[int]) -> bool:
        return self._known(block_ids) and self._on_both("evict", lambda face: face.evict(block_ids))

    def reset_cache(self) -> bool:
        return self._on_both("reset_cache", lambda face: face.reset_cache())

    def _there(self, rows: list[int]) -> list[int]:
        return [row for row in rows if row in self.oracle.device_rows()]

    def _have(self, rows: list[int], num_tokens: list[int]) -> bool:
        """Return whether each row exists and has the given number of tokens."""
        there = self._there(rows)
        return there == rows and all(num_tokens[row] <= len(self.oracle.tokens[row]) for row in rows)

    def _known(self, block_ids: list[int]) -> bool:
        return all(0 <= block_id < NUM_BLOCKS for block_id in block_ids)

    def _each(self, verb: str, rows: list[int], do: Callable[[Any, int], Any]) -> bool:
        for row in rows:
            self._on_both(verb, functools.partial(lambda row, face: do(face, row), row))
        return True

    def _on_both(self, verb: str, do: Callable[[Any], Any]) -> bool:
        """Run a verb on both sides or on neither, and compare results; a verb that may be refused runs on
        copies first.
        """
        oracle = self.oracle.trial() if verb in MAY_BE_REFUSED else self.oracle
        try:
            want = do(oracle)
        except Refused as refused:
            copy = self._theirs(verb, self.theirs.trial)
            try:
                do(copy)
            except Exception:  # whichever it has for that
                return False
            raise Disagreement(f"{verb} is done, and must be refused: {refused.status.name}") from None
        got = self._theirs(verb, lambda: do(self.theirs))
        sides = [answer if isinstance(answer, dict) else {"the answer": answer} for answer in (got, want)]
        if difference := hints.difference(*sides):
            raise Disagreement(f"{verb}: {difference}")
        self.oracle = oracle
        return True

    def _theirs(self, verb: str, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Disagreement:
            raise
        except Exception as error:  # whatever a user's class raises
            reason = error.status.name if isinstance(error, Refused) else hints.raised(error)
            raise Disagreement(f"{verb} fails, where the oracle does not: {reason}") from error

    def compare(self, verb: str) -> None:
        """Compare everything that the generation's class shows of itself."""
        want = self._seen(self.oracle)
        got = self._theirs(f"what is seen after {verb}", lambda: self._seen(self.theirs))
        if difference := hints.difference(got, want):
            raise Disagreement(f"after {verb}, {difference}")

    def _seen(self, face: Any) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for row in sorted(face.tokens):
            seen |= hints.entries(f"entry {{}} of row {row}'s block table", face.table(row))
        free = zip(("free blocks", "free blocks on the host"), face.num_free(), strict=True)
        seen |= {f"the number of {where}": num for where, num in free}
        if self.keeps_content:
            for on_host in (False, True):
                where = " on the host" if on_host else ""
                # The null block's counts mean nothing: vLLM lets them drift.
                counts = hints.entries(
                    f"the number of holders of block {{}}{where}", face.ref_counts(on_host)
                )
                seen |= dict(list(counts.items())[1:])
            seen |= face.blocks_by_content()
        return seen
