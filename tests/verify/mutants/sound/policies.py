"""The policy of vLLM V1 since 0.24, written down once more."""

from jaxpaged.memory.policies import Policy, Sweep, lowest_first, to_head, to_tail

CACHED = Sweep(to_tail, last_block_first=True, content=True)
UNCACHED = Sweep(to_head, content=False)
SPLIT = Policy("split again", lowest_first, (CACHED, UNCACHED), keeps_content=True)
