"""Calls of a driver to its devices, which all processes of a model make."""

from jaxpaged.parallel.calls import SharedCalls
from jaxpaged.sampling_state import LogitRules, SamplingState
from jaxpaged.step.automata import GrammarRows
from jaxpaged.step.state import Beams, Rows

# The dataclasses that calls to other processes have among their arrays.
CALL_CLASSES = Rows, SamplingState, LogitRules, Beams, GrammarRows
# Their arguments are host arrays.
CALLS = SharedCalls(
    *("_forget_prefixes", "_abort_arrivals", "_dispatch", "_put_adapter", "_place", "_write_chunk"),
    *(
        "write_automaton",
        "write_mask_lines",
        "_write_candidates",
        "_routed_of",
        "_put_weights",
        "_release",
        "_restore",
        "look",
    ),
)
