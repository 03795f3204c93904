"""Changes of a decoder's weights: what an update gives, in the form in which the loader keeps it.

A decoder is made of `ChangedWeights` by the loader's own code. Each of its arrays is then a `Change`, or a
`StackChange` for a weight of all layers.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxpaged.checks import InputError, shown
from jaxpaged.models.change import Change, New
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.names import (
    Names,
    Shape,
    every_weight,
    in_expert,
    stored_pieces,
    stored_shapes,
)
from jaxpaged.models.quantised.codes import Quantisation, SegmentSpec
from jaxpaged.models.weights import StoredWeights, Weights, check_form


class Given(Mapping[str, Any]):
    """The arrays of an update by the decoder's names for them, checked; nothing of them is copied yet.

    A name is one of Hugging Face's, or a role's: "layers.0.qkv.weight", "layers.0.experts.1.down.weight",
    "norm.weight". Raises `InputError` for a name that the model lacks or that comes twice, for a wrong shape,
    and for what is no array of floats.

    arrays: NumPy's, JAX's, or others' that have `__dlpack__`.
    """

    def __init__(self, config: ModelConfig, names: Names, arrays: Iterable[tuple[str, Any]]) -> None:
        stored, roles = _wanted(config, names)
        self.missing: list[str] = []  # names of Hugging Face of what is not given
        self._arrays: dict[str, Any] = {}
        head: tuple[str, Any] | None = None
        for said, value in arrays:
            name = _known(said, names, stored, roles)
            if name is None and _is_head(said, config, names):
                head = said, as_array(said, value)
                continue
            if name is None and names.is_spare(said):
                continue
            if name is None:
                raise InputError(f"weight {said!r} is none that the model has")
            if name in self._arrays:
                raise InputError(f"weight {said!r} must come once: it is there under another name")
            array = as_array(said, value)
            check_form(said, array, stored[name] if name in stored else roles[name][0])
            self._arrays[name] = array
        if head is not None:
            self._take_head(config, names, stored, *head)
        for role, (_, pieces) in roles.items():
            given = [piece for piece in pieces if piece in self._arrays]
            if role in self._arrays and given not in ([], [role]):
                raise InputError(f"weight {given[0]!r} must come once: it is a part of {role!r}")
            if role not in self._arrays:
                self.missing += [piece for piece in pieces if piece not in self._arrays]

    def _take_head(
        self, config: ModelConfig, names: Names, stored: Mapping[str, Shape], said: str, array: Any
    ) -> None:
        """Take a tied model's head, which is its embedding: as that, or beside it if it is equal."""
        [embedding] = names.pieces("embedding.weight")
        check_form(said, array, stored[embedding])
        other = self._arrays.get(embedding, self._arrays.get("embedding.weight"))
        if other is None:
            self._arrays[embedding] = array
        elif other is not array and not np.array_equal(np.asarray(other), np.asarray(array)):
            raise InputError(f"weight {said!r} must equal {embedding!r}: the model has one table for both")

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class ChangedWeights(StoredWeights):
    """The weights that an update gives, by their roles; a `Change` in the place of each.

    given: as `Given` has them.
    """

    def __init__(
        self,
        config: ModelConfig,
        names: Names,
        given: Mapping[str, Any],
        load_as: LoadAs,
        quantisation: Quantisation | None = None,
    ) -> None:
        Weights.__init__(self, config, names, load_as, quantisation)
        self._given = given

    def _experts(self, role: str, shape: Shape, layer: int, num_experts: int) -> Iterator[Any]:
        segments = self._expert_segments(role, shape, num_experts)
        for expert in range(num_experts):
            yield self._made(role, shape, segments, layer=layer, expert=expert)

    def _made(self, role: str, shape: Shape, segments: tuple[SegmentSpec, ...] | None, **numbers: int) -> Any:
        whole_role, quantised = self._source(role), segments is not None
        nothing = Change(shape, self.dtype, is_quantised=quantised)
        stored = list(stored_pieces(self._whole, self._names, whole_role, shape, **numbers))
        name = role_name(whole_role, **numbers)
        if name in self._given and name not in dict(stored):
            given = self._given[name]

            def form() -> New:
                return New(self._formed(role, [np.asarray(given)], segments))

            return dataclasses.replace(nothing, make=form, is_whole=True, source=given)
        there = [name for name, _ in stored if name in self._given]
        if not there:
            return nothing
        lacking = [name for name, _ in stored if name not in self._given]
        if quantised and lacking:
            raise InputError(
                f"weight {lacking[0]!r} must come with {there[0]!r}: they are quantised together"
            )
        make = functools.partial(self._new, role, stored, None if lacking else segments, numbers)
        is_as_stored = not lacking and len(stored) == 1 and self._is_as_stored(role, there[0])
        source = self._given[there[0]] if is_as_stored else None
        return dataclasses.replace(nothing, make=make, is_whole=not lacking, source=source)

    def _new(
        self,
        role: str,
        stored: list[tuple[str, Shape]],
        segments: tuple[SegmentSpec, ...] | None,
        numbers: Mapping[str, int],
    ) -> New:
        """Make what is given of a weight's pieces; those that are not given stay as they are."""
        layer, given_pieces = numbers.get("layer"), [self._piece(name, numbers) for name, _ in stored]
        pieces = [
            np.zeros(piece_shape, self.dtype) if piece is None else np.asarray(piece)
            for piece, (_, piece_shape) in zip(given_pieces, stored, strict=True)
        ]
        made = self._joined(role, pieces, segments, layer)
        if all(piece is not None for piece in given_pieces):
            return New(made)
        masks = [
            np.full(piece_shape, piece is not None, self.dtype)
            for piece, (_, piece_shape) in zip(given_pieces, stored, strict=True)
        ]
        is_new: Any = self._joined(role, masks, None, layer)
        return New(made, is_new)

    def _is_as_stored(self, role: str, name: str) -> bool:
        """Return whether a weight's numbers are those of this piece, in the same order."""
        names = self._names
        return role not in names.forms and names.of_layers is None and name not in self._of_all_experts

    def _piece(self, name: str, numbers: Mapping[str, int]) -> Any:
        """Return what is given of a piece, None if nothing; of all experts in one tensor, one's own."""
        piece = self._given.get(name)
        if piece is None or "expert" not in numbers or name not in self._of_all_experts:
            return piece
        return np.asarray(piece)[numbers["expert"]]

    @functools.cached_property
    def _of_all_experts(self) -> set[str]:
        """Names of tensors that have all experts of a layer."""
        templates = [
            name
            for role in in_expert(self._whole)
            for name in self._names.pieces(role)
            if "{expert}" not in name
        ]
        return {name.format(layer=i) for name in templates for i in range(self._whole.num_layers)}


def role_name(role: str, layer: int | None = None, expert: int | None = None) -> str:
    """Return the name of a role's weight: with its layer and expert, where it has some."""
    if layer is None:
        return role
    return f"layers.{layer}.{role}" if expert is None else f"layers.{layer}.experts.{expert}.{_bare(role)}"


def _bare(role: str) -> str:
    return role.removeprefix("experts.")


type Roles = dict[str, tuple[Shape, list[str]]]  # by name, the shape, and the names of the pieces


def _wanted(config: ModelConfig, names: Names) -> tuple[dict[str, Shape], Roles]:
    """Return the shapes of all tensors by Hugging Face's names, and all weights by their roles' names."""
    roles: Roles = {}
    for role, shape, numbers in every_weight(config):
        pieces = [name for name, _ in stored_pieces(config, names, role, shape, **numbers)]
        roles[role_name(role, **numbers)] = shape, pieces
    return dict(stored_shapes(config, names)), roles


def _known(said: str, names: Names, stored: Mapping[str, Shape], roles: Roles) -> str | None:
    """Return the model's name for a weight; None if it has none."""
    candidates = [name for name in (said, names.name_of(said), f"{names.prefix}{said}") if name in stored]
    return candidates[0] if candidates else said if said in roles else None


def _is_head(said: str, config: ModelConfig, names: Names) -> bool:
    """Return whether a name is that of a head which is the embedding's table."""
    [head] = names.pieces("lm_head.weight") if config.tie_word_embeddings else [""]
    return bool(head) and names.name_of(said) in (head, names.prefix + head)


def as_array(name: str, value: Any) -> Any:
    """Return a value as an array of NumPy or JAX, without a copy where there is none to make.

    Raises `InputError` for what is no array, and for one that was deleted, as donated ones are.
    """
    if isinstance(value, jax.Array) and value.is_deleted():
        raise InputError(f"weight {name!r} is an array that was deleted or donated, must be there")
    if isinstance(value, np.ndarray | jax.Array):
        return value
    if not hasattr(value, "__dlpack__"):
        raise InputError(f"weight {name!r} is of type {type(value).__name__}, must be an array")
    try:
        return np.asarray(jax.dlpack.from_dlpack(value))
    except Exception as error:  # of any library
        reason = " ".join(str(error).split())
        raise InputError(f"weight {name!r} must be an array that DLPack can hand over: {reason}") from error


def named(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of an update: a mapping, with mappings inside or without, or pairs.

    The names of a mapping inside are joined by dots. Raises `InputError` for what is neither.
    """
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                yield from named(value, f"{name}.")
            else:
                yield name, value
        return
    if not isinstance(tree, Iterable) or isinstance(tree, str | bytes | np.ndarray | jax.Array):
        raise InputError(f"weights={shown(tree)} must be a mapping of names to arrays, pairs, or a pytree")
    for pair in tree:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
        if not is_pair:
            raise InputError(f"weights: {shown(pair)} must be a pair of a name and an array")
        yield pair[0], pair[1]
