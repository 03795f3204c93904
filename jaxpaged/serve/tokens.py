"""/tokenize and /detokenize, as vLLM has them."""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxpaged.checks import InputError, checked_int
from jaxpaged.serve.json_route import JsonRoute
from jaxpaged.serve.replies import reply
from jaxpaged.serve.schemas import DetokenizeRequest, TokenizeRequest
from jaxpaged.serve.service import service_of

router = APIRouter(route_class=JsonRoute)
MAX_INLINE = 4_000  # tokens: more are converted in another thread


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Answer with the tokens of a `prompt`, or of `messages` as the chat template renders them."""
    service = service_of(request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InputError("the body must have either a prompt or messages")
    if body.messages is not None:
        rendered = await service.chat_prompts.render(
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=bool(body.add_special_tokens),
            kwargs=body.chat_template_kwargs,
        )
        ids = rendered["prompt_token_ids"]
    elif body.prompt:
        ids = await service.llm.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        ids = []
    tokenizer = service.llm.tokenizer

    def answer() -> Response:
        return reply(
            {
                "count": len(ids),
                "max_model_len": service.max_model_len,
                "tokens": ids,
                "token_strs": tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
            }
        )

    return await asyncio.to_thread(answer) if len(ids) > MAX_INLINE else answer()


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    tokenizer = service.llm.tokenizer
    if tokenizer is None:
        raise InputError("the model has no tokenizer")
    last = service.llm.engine.door.model_config.vocab_size - 1
    for token in {min(body.tokens), max(body.tokens)} if body.tokens else ():
        checked_int("token", token, f"a token id, an int in [0, {last + 1})", 0, last)
    if len(body.tokens) > MAX_INLINE:
        text = await asyncio.to_thread(tokenizer.decode, body.tokens)
    else:
        text = tokenizer.decode(body.tokens)
    return reply({"prompt": text})
