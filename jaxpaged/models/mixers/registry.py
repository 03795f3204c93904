"""Mixers by their descriptions: the one line that a new mixer adds."""

from collections.abc import Callable
from typing import Any

from jaxpaged.models.mixers.gated_delta import GatedDelta, GatedDeltaMixer
from jaxpaged.models.mixers.lightning import Lightning, LightningMixer
from jaxpaged.models.mixers.mamba1 import Mamba1, Mamba1Mixer
from jaxpaged.models.mixers.mamba2 import Mamba2, Mamba2Mixer
from jaxpaged.models.mixers.short_convolution import ShortConvolution, ShortConvolutionMixer
from jaxpaged.models.weights import Weights

MIXERS: dict[type, Callable[[Weights, Any], Any]] = {
    GatedDelta: GatedDeltaMixer,
    Lightning: LightningMixer,
    Mamba1: Mamba1Mixer,
    Mamba2: Mamba2Mixer,
    ShortConvolution: ShortConvolutionMixer,
}


def mixer_of(weights: Weights) -> Any:
    """Return the mixer of a model's state layers; None where it has none."""
    description = weights.config.mixer
    return None if description is None else MIXERS[type(description)](weights, description)
