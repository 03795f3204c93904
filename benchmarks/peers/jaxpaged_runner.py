"""Times our own engine, in the same way as its peers. `--model` is what `jaxpaged.LLM` takes."""

from typing import Any

import harness  # type: ignore[import-not-found]  # the file beside this one


def main() -> None:
    """Load the model and measure it. Every run begins with an empty prefix cache, if there is one."""
    flags = {
        "--prefix-caching": "share the blocks of equal prompt beginnings (the peers do not)",
        "--ngram": "draft from a request's own text",
        "--suffix": "draft by what mostly followed there",
        "--draft": f"draft by {harness.DRAFT} in the model's folder",
    }
    options = harness.start("Time jaxpaged on a workload.", flags)

    import jaxpaged

    drafts, batch = _drafts(options), options.max_num_seqs
    is_quantised = options.dtype in harness.QUANTISED
    llm = jaxpaged.LLM(
        options.model,
        dtype="bfloat16" if is_quantised else options.dtype,
        quantization="gguf" if is_quantised else None,
        # Drafts take slots that no answer needs.
        max_num_seqs=batch if drafts is None else batch + min(harness.NGRAM_DRAFTS * batch, 16),
        speculative_config=drafts,
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

    def counts() -> tuple[int, int]:
        stats = llm.engine.stats
        return stats.num_draft_tokens, stats.num_accepted_tokens

    its_counts = None if drafts is None else counts
    harness.measure("jaxpaged", jaxpaged.__version__, options, generate, llm.reset_prefix_cache, its_counts)


def _drafts(options: harness.Options) -> dict[str, Any] | None:
    """Return `speculative_config`."""
    if options.extra.ngram:
        return harness.NGRAM | {"method": "ngram", "num_speculative_tokens": harness.NGRAM_DRAFTS}
    if options.extra.suffix:
        return {"method": "suffix", "num_speculative_tokens": harness.NGRAM_DRAFTS}
    if not options.extra.draft:
        return None
    model = str(options.model.parent / harness.DRAFT)
    return {"model": model, "quantization": "gguf", "num_speculative_tokens": harness.NUM_DRAFTS}


if __name__ == "__main__":
    main()
