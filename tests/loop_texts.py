"""Hashes of the compiled loop's text: what a change of the engine's host side must leave as they are.

    python -m tests.loop_texts > before; CHANGE; python -m tests.loop_texts | diff before -

One line for each setting. The loop is lowered from what a driver holds, and neither compiled nor run.
"""

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

if __name__ == "__main__":  # before JAX looks for devices
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ["JAX_PLATFORMS"] = "cpu"

from jaxpaged.engine.driver import Driver
from jaxpaged.models.config import LayerKind
from jaxpaged.step import loop
from tests import tiny, tiny_lora


def _groups(_: Path) -> Driver:
    config = tiny.mixed(LayerKind(), LayerKind(sliding_window=12))
    return tiny.driver(lambda load_as: tiny.load(load_as, config), config)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
TOLD = {"enable_trace_replay": True, "return_sampling_mask": True, "max_prompt_logprob_token_ids": 2}
SETTINGS: dict[str, Callable[[Path], Driver]] = {
    "plain": lambda _: tiny.driver(**TOLD),
    "adapters": tiny_lora.driver,
    "beams": lambda _: tiny.driver(**tiny.SWAP),  # with what they rest on: masks of grammars
    "groups": _groups,
    "two devices": lambda _: tiny.driver(tensor_parallel_size=2),
    "drafts": lambda _: tiny.driver(speculative_config=NGRAM),
}


def text_of(driver: Driver) -> str:
    """Return the text of a driver's loop, lowered, without the names of the state's fields."""
    device = driver.device
    arguments = device.params, device.state, loop.limits(1), np.bool_(False)
    lowered = loop.run.lower(device.graphdef, *arguments, config=driver.step_config, mesh=driver.setup.mesh)
    return re.sub(r'jax.result_info = "[^"]*"', "", lowered.as_text())


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Let drivers be made without a compiled loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "compile", lambda self: None)
        yield


def main() -> None:
    with uncompiled(), tempfile.TemporaryDirectory() as folder:
        for name, make in SETTINGS.items():
            text = text_of(make(Path(folder)))
            print(f"{hashlib.sha256(text.encode()).hexdigest()[:16]} {len(text):8} {name}", flush=True)


if __name__ == "__main__":
    main()
