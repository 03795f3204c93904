"""Parsers of what models write: calls of tools, and reasoning before the answer. One file a form.

A new form is one new file here, with a class under `@tool_parser("name")` or `@reasoning_parser("name")`.
"""

import importlib
import pkgutil

from jaxpaged.serve.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, answer_parser, detected

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["REASONING_PARSERS", "TOOL_PARSERS", "answer_parser", "detected"]
