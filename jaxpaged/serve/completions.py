"""/v1/completions."""

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxpaged.api.async_llm import Admitted
from jaxpaged.api.prompts import Prompt
from jaxpaged.serve.chunks import ChunkWriter
from jaxpaged.serve.json_route import JsonRoute
from jaxpaged.serve.logprobs import CompletionLogprobs, TextOffsets, prompt_logprobs
from jaxpaged.serve.schemas import CompletionRequest
from jaxpaged.serve.service import Choice, Run, Service, service_of
from jaxpaged.serve.structured import constraint_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    service = service_of(request)
    writer = CompletionWriter(body, service)
    service.check_num_answers(len(body.prompts) * (body.n or 1))
    prompts: list[Prompt] = [
        await service.llm.tokenize(each, add_special_tokens=False, cuts=body.cuts)
        if isinstance(each, str) and not body.add_special_tokens
        else each
        for each in body.prompts
    ]
    prompt_top = body.prompt_logprobs
    if body.echo and body.logprobs is not None and prompt_top is None:
        prompt_top = body.logprobs
    params = body.params(
        service.defaults,
        # Asked for the prompt's echo alone, one token is made, and left out.
        max_tokens=1 if writer.is_echo_alone else body.most_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_top,
        structured_outputs=constraint_of(body, body.response_format),
    )
    run = await service.start(request, body, "cmpl", prompts, params)
    return await writer.respond(request, run)


class CompletionWriter(ChunkWriter[CompletionRequest]):
    """Writer of one request's completions."""

    object_name = "text_completion"

    def __init__(self, body: CompletionRequest, service: Service) -> None:
        super().__init__(body, service)
        self.is_echo_alone = bool(body.echo) and body.most_tokens == 0

    def whole(self, run: Run, choices: list[Choice]) -> dict[str, Any]:
        choices = [self._cut(choice) for choice in choices]
        if self.is_echo_alone:
            run.num_completion_tokens = 0
        written = [
            self._choice(run, choice, self._logprobs(run, choice.index), is_first=True) for choice in choices
        ]
        return self.chunk(run, written) | {"usage": self.usage(run)}

    async def chunks(self, run: Run) -> AsyncGenerator[dict[str, Any]]:
        logprobs = [self._logprobs(run, index) for index in range(run.times.num_answers)]
        begun: set[int] = set()
        async with aclosing(run.choices()) as news:
            async for choice in news:
                if self.is_echo_alone:
                    choice, run.num_completion_tokens = self._cut(choice), 0
                is_first = choice.index not in begun
                begun.add(choice.index)
                if not choice.is_empty or is_first or self._body.return_token_ids:
                    yield self.chunk(
                        run, [self._choice(run, choice, logprobs[choice.index], is_first=is_first)]
                    )

    def _logprobs(self, run: Run, index: int) -> CompletionLogprobs | None:
        """Return the writer of a choice's log-probabilities; None if none are asked for."""
        if self._body.logprobs is None:
            return None
        prompt = run.prompts[index // run.params.n]
        echo = self._echo(prompt) if self._body.echo else ""
        places = TextOffsets(self._service.llm.tokenizer, run.params, prompt.prompt_token_ids, echo)
        return CompletionLogprobs(self._names, self._body.logprobs, places)

    def _echo(self, prompt: Admitted) -> str:
        """Return the prompt's text."""
        if prompt.prompt is not None:
            return prompt.prompt
        tokenizer = self._service.llm.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(prompt.prompt_token_ids.tolist()))

    def _cut(self, choice: Choice) -> Choice:
        """Return a choice without its token where only the echo of the prompt was asked for."""
        if not self.is_echo_alone:
            return choice
        return dataclasses.replace(choice, texts=[], token_ids=[], logprobs=[], finish_reason="length")

    def _choice(
        self, run: Run, choice: Choice, logprobs: CompletionLogprobs | None, *, is_first: bool
    ) -> dict[str, Any]:
        body, prompt = self._body, run.prompts[choice.index // run.params.n]
        text, ids, each = choice.text, choice.token_ids, choice.logprobs
        prompt_ids: list[int] = prompt.prompt_token_ids.tolist() if is_first else []
        num_echoed = 0  # prompt tokens in the echo
        if body.echo and is_first:
            text, ids, num_echoed = self._echo(prompt) + text, prompt_ids + ids, len(prompt_ids)
            echo_logprobs = choice.prompt_logprobs
            each = [*(echo_logprobs if echo_logprobs is not None else [None] * num_echoed), *each]
        written: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.of(ids, each, num_echoed),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if body.prompt_logprobs is not None and is_first:
            written["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs)
        if body.return_token_ids:
            written["token_ids"] = choice.token_ids
            written["prompt_token_ids"] = prompt_ids if is_first else None
        if choice.finish_reason is not None:
            written |= self.fields_at_end(run, choice.index)
            if self.is_echo_alone and body.return_weight_versions:
                written["weight_versions"] = []
        return written
