"""Times our own engine, in the same way as its peers. `--model` is what `jaxpaged.LLM` takes."""

import harness  # type: ignore[import-not-found]  # the file beside this one


def main() -> None:
    """Load the model and measure it. Every run begins with an empty prefix cache, if there is one."""
    flags = {"--prefix-caching": "share the blocks of equal prompt beginnings (the peers do not)"}
    options = harness.start("Time jaxpaged on a workload.", flags)

    import jaxpaged

    is_quantised = options.dtype in harness.QUANTISED
    llm = jaxpaged.LLM(
        options.model,
        dtype="bfloat16" if is_quantised else options.dtype,
        quantization="gguf" if is_quantised else None,
        max_num_seqs=options.max_num_seqs,
        max_model_len=max(1024, options.max_model_len),
        enable_prefix_caching=options.extra.prefix_caching,
        structured_outputs_mib=64 if any(request.json_schema for request in options.requests) else 0,
    )

    def structure(schema: str | None) -> jaxpaged.StructuredOutputsParams | None:
        return (
            None
            if schema is None
            else jaxpaged.StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        )

    def generate(requests: list[harness.Request]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        params = [
            jaxpaged.SamplingParams(
                temperature=0,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                structured_outputs=structure(request.json_schema),
            )
            for request in requests
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    harness.measure("jaxpaged", jaxpaged.__version__, options, generate, llm.reset_prefix_cache)


if __name__ == "__main__":
    main()
