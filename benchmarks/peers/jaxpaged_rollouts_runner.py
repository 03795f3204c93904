"""Times rounds of rollouts with our own engine, in the same way as its peers."""

import harness  # type: ignore[import-not-found]  # the file beside this one


def main() -> None:
    """Load the model and measure it."""
    options = harness.start("Time jaxpaged's rollouts.")

    from safetensors.numpy import load_file

    import jaxpaged

    llm = jaxpaged.LLM(
        options.model,
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        max_model_len=max(512, options.max_model_len),
    )
    sample = harness.sampler(llm, jaxpaged.SamplingParams)
    weights = load_file(options.model / "model.safetensors")

    def new_weights(factor: float) -> dict[str, object]:
        return {name: array * array.dtype.type(factor) for name, array in weights.items()}

    harness.measure_rollouts(
        "jaxpaged", jaxpaged.__version__, options, sample, new_weights, llm.update_weights
    )


if __name__ == "__main__":
    main()
