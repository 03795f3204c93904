"""Texts for drafts to be measured on: code to be repeated with a change, and open questions."""

import base64
import calendar
import colorsys
import difflib
import heapq
import inspect
import json
import statistics
import string
import textwrap
from collections.abc import Callable
from typing import Any

FUNCTIONS: list[Callable[..., Any]] = [
    textwrap.dedent, textwrap.indent, textwrap.shorten, textwrap.fill,
    statistics.mean, statistics.median, statistics.harmonic_mean, statistics.fmean,
    inspect.getdoc, inspect.cleandoc, inspect.getmodulename, inspect.isabstract,
    json.dumps, json.loads, json.load, json.dump,
    calendar.monthrange, calendar.timegm, calendar.weekday, calendar.isleap,
    colorsys.rgb_to_hsv, colorsys.hsv_to_rgb, colorsys.rgb_to_yiq, colorsys.yiq_to_rgb,
    heapq.merge, heapq.nsmallest, difflib.context_diff, string.capwords,
    base64.b32decode, base64.encodebytes, difflib.get_close_matches, difflib.ndiff,
]  # fmt: skip
QUESTIONS = [
    f"{ask} {about}."
    for ask in ("Explain to a child", "Write a short story about", "List five facts about", "Argue against")
    for about in ("the sea", "electric trains", "sleeping late", "old books")
] + [
    f"{ask} {about}."
    for ask in ("Write a letter to", "Describe a day of", "Invent a name for", "Plan a party for")
    for about in ("a lighthouse keeper", "a young baker", "my neighbour", "a lost cat")
]


def edits() -> list[str]:
    """Return prompts whose answers mostly repeat them."""
    sources = (textwrap.dedent(inspect.getsource(function))[:900] for function in FUNCTIONS)
    return [f"Repeat this code, with the name of the function changed to `f`:\n\n{code}" for code in sources]
