"""Ten bugs that allocators have had, planted in the oracles themselves."""

from tests.verify.mutants import Mutant


def _v0(name: str, right: str, wrong: str) -> Mutant:
    path = "v0.block_manager:BlockSpaceManager"
    return Mutant(name, "reference", "v0/block_manager.py", right, wrong, path, "v0")


def _v063(name: str, file: str, right: str, wrong: str) -> Mutant:
    path = "v063.block_manager:SelfAttnBlockSpaceManager"
    return Mutant(name, "reference", f"v063/{file}.py", right, wrong, path, "v063")


def _v1(name: str, right: str, wrong: str, file: str = "block_pool") -> Mutant:
    return Mutant(name, "reference", f"v1/{file}.py", right, wrong, "v1.block_pool:BlockPool", "v1")


QUEUED = "in blocks:\n            self.append("
HIT = "== 0:\n                self.free_block"

MUTANTS = [
    _v0("a fork holds nothing", "+= 1\n        self.block_tables[", "+= 0\n        self.block_tables["),
    _v0("writes into what two share", "last_block.ref_count > 1", "last_block.ref_count > 2"),
    _v0("watermark off by one", "blocks() - num_required_blocks < ", "blocks() - num_required_blocks <= "),
    _v0("swapped blocks have one holder", "sum(block in table for table in tables.values())", "1"),
    _v063("freed to the wrong end", "allocator", "appendleft(block.block_id)", "append(block.block_id)"),
    _v063("copies told twice", "allocator", "self.copies, []", "2 * (self.copies,)"),
    _v1("a hit stays in the queue", HIT, HIT.replace("==", "<")),
    _v1("content outlives its block", "if self.enable_caching:\n", "if False:\n"),
    _v1("doubles go together", "if not isinstance(blocks, dict) or not blocks:", "if True:"),
    _v1("last freed, first taken", QUEUED, QUEUED.replace("blocks", "blocks[::-1]"), "kv_cache_utils"),
]
