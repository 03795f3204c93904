"""A head that drafts, on disk: its description read and checked, its weights not loaded yet."""

import dataclasses
from pathlib import Path

import numpy as np
from flax import nnx

from jaxpaged.checks import InputError
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.drafting.head import Head
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.names import Names, Tensors
from jaxpaged.models.quantised.on_load import on_load
from jaxpaged.models.weights import AbstractWeights, StoredWeights


@dataclasses.dataclass(frozen=True)
class StoredHead:
    """A head in a directory, which may be the served model's.

    targets: the token of the model's vocabulary that each of the head's choices is; None: they are the same.
    """

    path: Path
    config: ModelConfig
    names: Names
    tensors: Tensors
    quantization: str | None = None
    targets: np.ndarray | None = None

    def load(self, load_as: LoadAs) -> Head:
        """Load the head in this form. Raises `InputError` if the weights are not the config's."""
        quantisation = on_load(self.quantization)
        try:
            return Head(
                StoredWeights(self.config, self.names, self.tensors, load_as, quantisation), self.targets
            )
        except InputError as error:
            raise InputError(f"model={str(self.path)!r}: {error}") from error

    def abstract(self, load_as: LoadAs) -> Head:
        """Describe the head in this form by shapes for arrays; no weight is read."""
        weights = self.config, load_as, self.names, on_load(self.quantization)
        head: Head = nnx.eval_shape(lambda: Head(AbstractWeights(*weights), self.targets))
        return head
