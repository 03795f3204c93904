"""Methods of vLLM's that a loaded model has beside asking it: profiles, caches, versions of weights."""

import os
from typing import Any

import jax

from jaxpaged.checks import InputError, check
from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.vllm_names.methods import check_arguments


class VllmMethods:
    """Base of `LoadedModel` and `LLMEngine`: methods by vLLM's names that need the engine alone."""

    engine: Engine
    config: EngineConfig
    profile_directory = ""  # for traces; of `profiler_config={"torch_profiler_dir": ...}`
    _is_updating = False  # between `start_weight_update` and `finish_weight_update`

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of devices of all replicas, or of one replica."""
        replicas = self.config.data_parallel_size if include_dp else 1
        return self.config.tensor_parallel_size * replicas

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return "generate" alone; a pooling model has its own list."""
        return ("generate",)

    def start_profile(self, profile_prefix: str | None = None, **others: Any) -> None:
        """Begin a trace of JAX's profiler, for TensorBoard or Perfetto, in the directory for profiles.

        `profiler_config={"torch_profiler_dir": DIR}` says the directory, and `profile_prefix` one below it.
        Raises `InputError` without a directory, for vLLM's choice of steps, and where a trace runs already.
        """
        check_arguments("LLM.start_profile", others)
        rule = "an object with torch_profiler_dir, for start_profile"
        check("profiler_config", None, rule, bool(self.profile_directory))
        prefix = "" if profile_prefix is None else profile_prefix
        check("profile_prefix", prefix, "None or a name", isinstance(prefix, str) and os.sep not in prefix)
        try:
            jax.profiler.start_trace(os.path.join(self.profile_directory, prefix))
        except RuntimeError as error:
            raise InputError(f"start_profile must come when no trace runs: {error}") from error

    def stop_profile(self) -> None:
        """End the trace, and write it. Raises `InputError` where none runs."""
        try:
            jax.profiler.stop_trace()
        except RuntimeError as error:
            raise InputError(f"stop_profile must come after start_profile: {error}") from error

    def reset_mm_cache(self) -> None:
        """Do nothing: there is no cache of images, for prompts are of text."""

    def reset_encoder_cache(self) -> None:
        """Do nothing: there is no cache of an encoder, for prompts are of text."""

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget the prefixes of former requests; False, and nothing happens, while any is unfinished.

        With `reset_running_requests` those that run wait again, and are computed anew with the tokens that
        they have; what tiers have stays then. Raises `InputError` while a beam search runs, and for
        `reset_connector`: `reset_prefix_cache` without it makes tiers forget, too.
        """
        check("reset_connector", reset_connector, "False: blocks in tiers are kept", not reset_connector)
        return self.engine.reset_prefix_cache(restarts=reset_running_requests)

    def get_weight_version(self) -> int:
        """Return the version of the weights: see `LLM.weight_version`."""
        return self.engine.weight_version

    def start_weight_update(self) -> None:
        """Begin an update of weights by calls of `update_weights`, each of which takes effect at once.

        Raises `InputError` while one has begun.
        """
        if self._is_updating:
            raise InputError("start_weight_update must come after finish_weight_update of the one before")
        self._is_updating = True

    def finish_weight_update(self, weight_version: int | None = None) -> None:
        """End an update of weights; `weight_version`, if given, is the version of the new weights.

        Raises `InputError` where none has begun, and for a version below the present one.
        """
        if not self._is_updating:
            raise InputError("finish_weight_update must come after start_weight_update")
        if weight_version is not None:
            self.update_weight_version(weight_version)
        self._is_updating = False

    def update_weight_version(self, new_version: int) -> None:
        """Set the version of the weights, an int or its digits: the present one, or above it.

        A new version is an update without weights: cached prefixes are forgotten. Raises `InputError`.
        """
        rule = "an int, or its digits"
        text = str(new_version)
        is_whole = isinstance(new_version, int | str) and not isinstance(new_version, bool)
        check("new_version", new_version, rule, is_whole and text.isascii() and text.isdecimal())
        if int(text) != self.engine.weight_version:
            self.engine.update_weights({}, int(text))
