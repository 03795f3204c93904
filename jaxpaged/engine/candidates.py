"""Candidates: tokens that a request gives to be scored behind places of its prompt."""

from jaxpaged.checks import InputError, check, checked_int
from jaxpaged.config import EngineConfig
from jaxpaged.sampling_params import SamplingParams


def check_told(params: SamplingParams, prompt_len: int, vocab_size: int, config: EngineConfig) -> None:
    """Raise `InputError` if what a request wants told of its prompt is not for it, the model or the engine:
    candidates, or the first token whose experts are told.
    """
    start, rule = (
        params.routed_experts_prompt_start,
        "0 without enable_return_routed_experts, the engine's option",
    )
    check("routed_experts_prompt_start", start, rule, start == 0 or config.enable_return_routed_experts)
    rule = f"at most {prompt_len}, the prompt's length"
    check("routed_experts_prompt_start", start, rule, start <= prompt_len)
    ids, most = params.prompt_logprob_token_ids, config.max_prompt_logprob_token_ids
    if ids is None:
        return
    rule = "None without max_prompt_logprob_token_ids, the engine's option"
    check("prompt_logprob_token_ids", ids, rule, most > 0)
    start, name = params.prompt_logprob_start or 0, "prompt_logprob_token_ids"
    want = max(prompt_len - 1 - start, 0)
    if len(ids) != want:
        raise InputError(
            f"{name} has {len(ids)} lines, must have {want}, one for each token of the prompt behind place "
            f"prompt_logprob_start={start}"
        )
    rule = f"at most max_prompt_logprob_token_ids={most}"
    check(f"number of ids in a line of {name}", ids.shape[1], rule, ids.shape[1] <= most)
    rule = f"-1 or a token id, an int in [0, {vocab_size})"
    checked_int(f"{name}: token", int(ids.max()), rule, -1, vocab_size - 1)
