"""For a bug report: an engine's state in a file, and what it does from there, step by step.

    replay.report(engine, "report.npz")      # or llm.engine; while it runs, or after it has stopped

    python -m jaxpaged.research.replay report.npz     # which requests run or give way, and their blocks

The file has everything of an `EngineState` but K and V: so it has the requests' tokens. Look before you
send it.

What is faithful: the step is the engine's own, and all it decides depends on small integers that the file
has. Of an answer's tokens scheduling sees only which are stop tokens, and in the prefix cache which contents
are equal. So without K and V a stand-in answers: with the tokens that the file has for a request (`answers`),
else with one that is no stop token. Where none are recorded, a replay may differ from the first step in which
the real answer has a stop token, or is equal, or is not, to another that is looked up. Log-probabilities mean
nothing. A request still queued on the host takes a row before the first step in which one is free; the engine
gives it one between two runs, which may be some steps later, and may be another row.
"""

from jaxpaged.research.replay.dump import Dump, Event, dump, load, report
from jaxpaged.research.replay.stepper import Step, replay, with_model

__all__ = ["Dump", "Event", "Step", "dump", "load", "replay", "report", "with_model"]
