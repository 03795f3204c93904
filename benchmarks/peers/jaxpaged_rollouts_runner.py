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
    weights = load_file(options.model / "model.safetensors")

    def params(request: harness.Request, seed: int) -> jaxpaged.SamplingParams:
        return jaxpaged.SamplingParams(
            n=request.num_answers,
            temperature=1.0,
            seed=seed,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )

    def generate(requests: list[harness.Request]) -> list[list[list[int]]]:
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        asked = [params(request, seed) for seed, request in enumerate(requests)]
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]

    def new_weights(factor: float) -> dict[str, object]:
        return {name: array * array.dtype.type(factor) for name, array in weights.items()}

    harness.measure_rollouts(
        "jaxpaged", jaxpaged.__version__, options, generate, new_weights, llm.update_weights
    )


if __name__ == "__main__":
    main()
