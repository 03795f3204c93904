"""Times Hugging Face transformers: batched `generate`, or with `--continuous` its continuous batching.

`generate` pads every prompt of a batch on the left to the longest, and goes on until the row that wants most
tokens has them; tokens beyond what a row asked for are work done, and not counted. More requests than
`max_num_seqs` run as batches one after the other.
"""

import harness  # type: ignore[import-not-found]  # the file beside this one

_CONTINUOUS = "use continuous batching (a paged cache) instead of generate"


def main() -> None:
    """Load the model and measure it in the mode asked for."""
    options = harness.start("Time transformers on a workload.", {"--continuous": _CONTINUOUS})

    import torch
    import transformers

    torch.set_num_threads(harness.NUM_THREADS)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).eval()

    if options.extra.continuous:
        _measure_continuous(model, options)
    else:
        _measure_generate(model, options)


def _measure_generate(model, options: harness.Options) -> None:  # type: ignore[no-untyped-def]
    import torch
    import transformers

    # Both must be empty: what the call's own config leaves open is filled in from the model's.
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=0
    )

    def generate_batch(requests: list[harness.Request]) -> list[list[int]]:
        width = max(len(request.prompt_token_ids) for request in requests)
        token_ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(token_ids)
        for row, request in enumerate(requests):
            token_ids[row, width - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
            mask[row, width - len(request.prompt_token_ids) :] = 1
        out = model.generate(
            input_ids=token_ids,
            attention_mask=mask,
            max_new_tokens=max(request.max_tokens for request in requests),
        )
        return [out[row, width:][: request.max_tokens].tolist() for row, request in enumerate(requests)]

    def generate(requests: list[harness.Request]) -> list[list[int]]:
        token_ids: list[list[int]] = []
        for first in range(0, len(requests), options.max_num_seqs):
            token_ids += generate_batch(requests[first : first + options.max_num_seqs])
        return token_ids

    harness.measure("transformers", transformers.__version__, options, generate)


def _measure_continuous(model, options: harness.Options) -> None:  # type: ignore[no-untyped-def]
    import transformers

    page_size = 32
    longest = -(-options.max_model_len // page_size)  # pages of the longest sequence
    batching = transformers.ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=max(512, options.max_num_seqs * longest),
        max_batch_tokens=512,
        max_requests_per_batch=options.max_num_seqs,
        allow_block_sharing=False,
        auto_switch_to_flash=False,
        use_cuda_graph=False,
    )
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    context = model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=batching
    )
    with context as manager:

        def generate(requests: list[harness.Request]) -> list[list[int]]:
            names = [
                manager.add_request(
                    request.prompt_token_ids, max_new_tokens=request.max_tokens, eos_token_id=-1
                )
                for request in requests
            ]
            token_ids: dict[str, list[int]] = {}
            while len(token_ids) < len(requests):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped: see its error above")
                if result is not None and result.error is not None:
                    raise RuntimeError(f"transformers failed on {result.request_id}: {result.error}")
                if result is not None and result.is_finished():
                    token_ids[result.request_id] = result.generated_tokens
            return [token_ids[name] for name in names]

        harness.measure("transformers-continuous", transformers.__version__, options, generate)


if __name__ == "__main__":
    main()
