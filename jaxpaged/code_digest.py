"""A digest of what a function from outside computes: its code, its constants, and all that it can reach.

Kept programs are found by it, so that one that was compiled for another function, or for an earlier version,
is never run. What cannot be described has no digest, and its programs are not kept.
"""

import dis
import enum
import functools
import hashlib
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpaged.disk_cache import known_modules

MOST_PARTS = 20_000  # functions, classes and values that are looked at


class Indescribable(Exception):
    """A part that no digest can tell from another."""


def digest_of(*parts: Any) -> str | None:
    """Return the digest of functions, classes and values; None if it could not tell them from others.

    Functions of packages that jaxpaged needs, such as JAX, count by their names, for other keys know their
    versions. A function that imports others' modules while it runs has no digest. What it finds by computed
    names is not followed.
    """
    walk = _Walk()
    try:
        for part in parts:
            walk.add(part)
    except Indescribable:
        return None
    return walk.hash.hexdigest()


# The digests of parts from outside, by their names, when they were last given.
_last: dict[str, str | None] = {}


def trace_anew_if_changed(name: str, digest: str | None) -> None:
    """Clear JAX's caches if the parts of this name had another digest when last given, or have none.

    JAX finds what it has traced by a function's identity. A helper that is replaced leaves that as it is,
    so the former helper would run. Call it before the parts are traced.
    """
    if name in _last and (digest is None or digest != _last[name]):
        jax.clear_caches()
    _last[name] = digest


class _Walk:
    """A walk over all that some parts can reach, each once."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        # Each object's number and the object: an id is only its own while it lives.
        self.seen: dict[int, tuple[int, Any]] = {}

    def add(self, value: Any) -> None:
        """Add a value and all that it can reach. Raises `Indescribable`."""
        if isinstance(value, _PLAIN):
            return self.note(type(value).__qualname__, repr(value))
        if id(value) in self.seen:
            return self.note("again", self.seen[id(value)][0])
        self.seen[id(value)] = len(self.seen), value
        if len(self.seen) > MOST_PARTS:
            raise Indescribable
        describe = next((describe for kinds, describe in _DESCRIBED if isinstance(value, kinds)), _Walk.other)
        return describe(self, value)

    def note(self, *words: object) -> None:
        """Add words to the digest."""
        for word in words:
            text = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")
            self.hash.update(len(text).to_bytes(8, "little") + text)

    def function(self, value: types.FunctionType) -> None:
        self.note("function", value.__module__, value.__qualname__)
        if _is_known(value.__module__):
            return
        self.add((value.__defaults__, value.__kwdefaults__))
        for cell in value.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # a cell without contents
                self.note("empty")
        self.code(value.__code__, value.__globals__)

    def code(self, code: types.CodeType, reachable: dict[str, Any]) -> None:
        self.note("code", code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant, reachable)
            else:
                self.add(constant)
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME" and not _is_known(str(instruction.argval)):
                raise Indescribable
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval in reachable:
                self.note(instruction.argval)
                self.add(reachable[instruction.argval])

    def module(self, value: types.ModuleType) -> None:
        self.note("module", value.__name__)
        if not _is_known(value.__name__):
            members = {name: each for name, each in vars(value).items() if not name.startswith("__")}
            self.add(members)

    def kind(self, value: type) -> None:
        self.note("class", value.__module__, value.__qualname__)
        if _is_known(value.__module__):
            return
        for base in value.__bases__:
            self.add(base)
        skipped = ("__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl")
        added = ("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__annotations__")
        for name, each in vars(value).items():
            if name not in (*skipped, *added) and not name.startswith("__annotat"):
                self.note(name)
                self.add(each)

    def method(self, value: Any) -> None:
        self.note(type(value).__name__)
        for name in ("__func__", "fget", "func", "__self__"):
            if (inner := getattr(value, name, None)) is not None:
                self.add(inner)

    def partial(self, value: functools.partial[Any]) -> None:
        self.note("partial")
        self.add((value.func, value.args, value.keywords))

    def sequence(self, value: Any) -> None:
        self.note(type(value).__qualname__, len(value))
        for each in value:
            self.add(each)

    def mapping(self, value: Any) -> None:
        self.note("mapping", len(value))
        for key, each in value.items():
            self.add(key)
            self.add(each)

    def unordered(self, value: Any) -> None:
        self.note("set", *sorted(map(repr, value)))

    def array(self, value: Any) -> None:
        whole = np.asarray(value)
        self.note("array", whole.shape, whole.dtype, whole.tobytes())

    def builtin(self, value: Any) -> None:
        module = getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__
        if not _is_known(str(module)):
            raise Indescribable
        self.note("builtin", module, getattr(value, "__qualname__", type(value).__qualname__))

    def other(self, value: Any) -> None:
        """Add a value of any other type: a known one by name, a wrapper by the wrapped value, an object by
        class and attributes.
        """
        module, name = (getattr(value, each, None) for each in ("__module__", "__name__"))
        if isinstance(module, str) and isinstance(name, str) and _is_known(module):
            return self.note("known", module, name)
        self.note(type(value).__qualname__)
        if callable(inner := getattr(value, "__wrapped__", None)):  # under jax.jit, for one
            return self.add(inner)
        if not hasattr(value, "__dict__") or any(
            getattr(kind, "__slots__", ()) for kind in type(value).__mro__
        ):
            raise Indescribable
        self.add(type(value))
        return self.add(vars(value))


def _is_known(module: str | None) -> bool:
    """Return whether a module's version is part of every key of a kept program."""
    return module is not None and module.partition(".")[0] in known_modules() and module != "__main__"


_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(...), np.dtype, np.generic, enum.Enum)
# How each kind of value is described; the first that fits.
_DESCRIBED: tuple[tuple[Any, Callable[[_Walk, Any], None]], ...] = (
    (types.FunctionType, _Walk.function),
    (types.ModuleType, _Walk.module),
    (type, _Walk.kind),
    ((types.MethodType, staticmethod, classmethod, property, functools.cached_property), _Walk.method),
    (functools.partial, _Walk.partial),
    ((tuple, list), _Walk.sequence),
    ((dict, types.MappingProxyType), _Walk.mapping),
    ((set, frozenset), _Walk.unordered),
    ((np.ndarray, jax.Array), _Walk.array),
    ((types.BuiltinFunctionType, types.GenericAlias, types.UnionType, np.ufunc), _Walk.builtin),
)
