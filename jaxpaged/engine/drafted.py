"""A second model, or a head, beside the model that is served, to draft for it."""

import dataclasses
from collections.abc import Callable

from flax import nnx

from jaxpaged.engine import start
from jaxpaged.engine.setup import Setup
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder, abstract
from jaxpaged.models.drafting.head import Head
from jaxpaged.models.load_as import LoadAs
from jaxpaged.step.config import DraftCost

type Drafter = Decoder | Head


@dataclasses.dataclass(frozen=True)
class Draft:
    """A model or a head that drafts, not loaded yet.

    load: returns it in the form asked for.
    shapes: the same with shapes for arrays.
    cost: what its drafts cost; None: by its weights.
    """

    config: ModelConfig
    load: Callable[[LoadAs], Drafter]
    shapes: Callable[[LoadAs], Drafter] | None = None  # where it is a head, or its weights are quantised
    cost: DraftCost | None = None


def beside(
    draft: Draft | None, setup: Setup, load_model: Callable[[LoadAs], Decoder]
) -> Callable[[LoadAs], Decoder]:
    """Return what loads the model with the one that drafts for it, if there is one."""
    return load_model if draft is None else _joined(load_model, draft.load, setup)


def weights(draft: Draft, setup: Setup) -> nnx.State:
    """Load the weights of what drafts alone, onto the devices of a setup."""
    return nnx.state(start.load(setup, lambda _: draft.load(setup.draft_load_as)))


def shapes_beside(
    draft: Draft | None, setup: Setup, shapes: Callable[[LoadAs], Decoder] | None
) -> Callable[[LoadAs], Decoder] | None:
    """Return what describes the model with the one that drafts for it by shapes for arrays."""
    if draft is None:
        return shapes
    config = draft.config
    served_shapes = shapes or (lambda load_as: abstract(setup.whole, load_as))
    return _joined(served_shapes, draft.shapes or (lambda load_as: abstract(config, load_as)), setup)


def _joined(
    load_model: Callable[[LoadAs], Decoder], load_draft: Callable[[LoadAs], Drafter], setup: Setup
) -> Callable[[LoadAs], Decoder]:
    def load(load_as: LoadAs) -> Decoder:
        model = load_model(load_as)
        model.draft = nnx.data(load_draft(setup.draft_load_as))
        return model

    return load
