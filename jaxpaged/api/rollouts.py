"""Methods of a model that a training loop holds: new weights, pauses, sleep. Names are vLLM's."""

from collections.abc import Collection
from typing import Any

from flax import nnx

from jaxpaged.engine.engine import Engine


class RolloutMethods:
    """The part of `LLM` for training loops."""

    engine: Engine

    @property
    def weight_version(self) -> int:
        """Version of the weights: 0 for those that were loaded, then as `update_weights` says."""
        return self.engine.weight_version

    @property
    def weights(self) -> nnx.State:
        """Weights as the engine keeps them: packed for its kernels, without adapters.

        The arrays are the engine's own, not copies. They must not be donated, nor deleted.
        """
        return self.engine.weights

    def update_weights(self, weights: Any, *, version: int | None = None) -> int:
        """Put new weights in the place of old ones, all or none, and return their version.

        weights: a mapping of names to arrays, with mappings inside or without, or an iterable of pairs. The
            names are those of Hugging Face's model, or of roles such as "layers.0.qkv.weight"; any of them
            may be left out. Arrays are NumPy's, JAX's, or others' that have `__dlpack__`. Their shapes are
            the model's; their types, any floats, become the engine's. Or a state like `weights`, all of it,
            whose arrays are shared without a copy where they lie as the engine's do.
        version: the new version, above the present one; None: the next.

        No program is compiled, and what does not change is not copied. All cached prefixes are forgotten.
        Requests under way go on with the new weights: their K and V are computed anew, their tokens stay,
        and `CompletionOutput.weight_versions` says which weights sampled each. Adapters stay. Quantised
        weights are quantised as they were when the model was loaded. Raises `InputError`, and changes
        nothing, for names, shapes or types that are not the model's, and while a beam search runs.
        """
        return self.engine.update_weights(weights, version)

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume_generation`."""
        return self.engine.is_paused

    def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Let nothing run until `resume_generation`; requests that come wait.

        mode: "abort" ends what is in flight, with the tokens that it has; "wait" waits until it has ended;
            "keep" freezes it: it goes on when generation is resumed.
        clear_cache: forget all cached prefixes; without effect with "keep".
        """
        self.engine.pause(mode, clear_cache=clear_cache)

    def resume_generation(self) -> None:
        """Let requests run again. Raises `InputError` while the engine sleeps."""
        self.engine.resume()

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps; True until all that `sleep` took is there again."""
        return self.engine.is_sleeping

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause generation, and give memory back to others; the compiled programs stay.

        level: 0 gives nothing back. 1 drops the cache, and keeps the weights in the host's memory: on a CPU
            they stay where they are. 2 drops both.
        mode: what becomes of requests in flight, as in `pause_generation`. Kept ones are computed anew.
        """
        self.engine.sleep(level, mode)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take memory again, and resume generation when all is there.

        tags: "weights", "kv_cache", "scheduling", or several; None: all. Weights that level 2 dropped are
            read from the model's files, and are a new version. Or `update_weights` brings all of them before.
        """
        self.engine.wake_up(tags)

    def release_kv_cache_memory(self) -> None:
        """Give back the memory of K and V, and keep the weights; `wake_up(tags=["kv_cache"])` takes it again.

        Raises `InputError` unless generation is paused, and all memory is there.
        """
        self.engine.release_kv_cache()
