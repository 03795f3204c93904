"""vLLM's names, and what each of its options and fields comes to here: one table for every door.

- `names.json`: the names with their defaults, and since when vLLM has them; written by `make.py` from vLLM's
  source distributions.
- `table.py`: the judgement of each name that is not served, kept by hand.
- `judge.py`: reads both for the doors: Python's options, `SamplingParams`, HTTP fields and JSON lines.
- `flags.py`: takes vLLM's flags out of a command line.

Imports nothing heavy; the names are read from their file when a door first meets one that is not its own.
"""
