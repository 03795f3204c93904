"""Control flow: where lanes of a warp that parted at a branch meet again."""

from jaxpaged.research.ptx.program import Program

ENDS = {"ret", "exit"}
NOWHERE = -2  # lanes that part never meet again: every way ends


def meeting_points(program: Program) -> dict[int, int]:
    """Return, for each guarded branch, the first instruction that all paths from it reach.

    It is the branch's immediate post-dominator, by the usual iteration over basic blocks.
    """
    code = program.code
    size = len(code)
    starts = {0, *program.labels.values()}
    starts |= {at + 1 for at, one in enumerate(code) if one.parts[0] in ENDS | {"bra"}}
    firsts = sorted(start for start in starts if start < size)
    number = {first: block for block, first in enumerate(firsts)}
    lasts = [after - 1 for after in [*firsts[1:], size]]
    end = len(firsts)
    next_blocks = []
    for block, last in enumerate(lasts):
        one = code[last]
        kind = one.parts[0]
        ways = set()
        if kind == "bra":
            ways.add(number.get(program.labels[one.operands[0]], end))
        elif kind in ENDS:
            ways.add(end)
        if kind not in ENDS | {"bra"} or one.guard is not None:
            ways.add(block + 1)
        next_blocks.append(ways)
    everything = set(range(end + 1))
    after = [everything] * end + [{end}]  # blocks that every way from a block comes to, itself too
    has_changed = True
    while has_changed:
        has_changed = False
        for block in reversed(range(end)):
            new = {block} | set.intersection(*(after[way] for way in next_blocks[block]))
            if new != after[block]:
                after[block], has_changed = new, True
    points = {}
    for block, last in enumerate(lasts):
        if code[last].parts[0] == "bra" and code[last].guard is not None:
            nearest = max(after[block] - {block}, key=lambda other: len(after[other]))
            points[last] = NOWHERE if nearest == end else firsts[nearest]
    return points
