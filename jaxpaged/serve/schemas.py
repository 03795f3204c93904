"""Requests of clients, field by field: OpenAI's fields, and those of vLLM's that this engine has.

null stands for a field that is not given. A field that vLLM knows and this engine lacks must ask for nothing,
by the table in `jaxpaged.vllm_names`. A field that vLLM does not know either is ignored, as vLLM does.
"""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model, model_validator

from jaxpaged.checks import InputError, is_int
from jaxpaged.sampling_params import FROM_MODEL, RequestOutputKind, SamplingParams
from jaxpaged.serve.bounds import first_error_only
from jaxpaged.text.templates import template_kwargs
from jaxpaged.vllm_names.judge import FIELD_NAMES, passes

Count = int | None


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, data: Any) -> Any:
        """Drop fields that are null, but for `max_tokens`, where null means no limit."""
        if not isinstance(data, dict) or None not in data.values():
            return data
        return {name: value for name, value in data.items() if value is not None or name == "max_tokens"}

    @model_validator(mode="after")
    def _refuse_others(self) -> Self:
        """Raise `InputError` for a field that would change the answer, and is not served."""
        for name, value in (self.model_extra or {}).items():
            passes(name, value, FIELD_NAMES, {"n": getattr(self, "n", None)})
        return self


class ModelRequest(Body):
    """A request to a model."""

    model: str | None = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return first_error_only(handler(source))


class QueuedRequest(ModelRequest):
    """A request that gets answers: from which model, and before and beside whom."""

    priority: int = 0
    cache_salt: str | None = None
    kv_cache_ttl: float | None = None


class StreamOptions(Body):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False

    @property
    def asks(self) -> bool:
        """Whether any of them is on."""
        return bool(self.include_usage or self.continuous_usage_stats)


# The fields that `SamplingParams` has for requests of all kinds, each with what it is where it is not given.
OPTIONS: dict[str, Any] = {
    name: (kind, option.default) if kind is bool else (kind | None, None)
    for name, option in SamplingParams.__dataclass_fields__.items()
    if (kind := option.metadata.get("field")) is not None
}
_OptionFields: Any = create_model("_OptionFields", __base__=QueuedRequest, **OPTIONS)


class SamplingRequest(_OptionFields):
    """Sampling options that all kinds of requests share; None for the model's or the engine's own default."""

    stream: bool | None = False

    def params(
        self, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, **more: Any
    ) -> SamplingParams:
        """Return the engine's; what is not given is as the model's makers have it. Raises `InputError`."""
        given = {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}
        same = {name: getattr(defaults, name) for name in FROM_MODEL}
        kind = RequestOutputKind.DELTA
        return SamplingParams.from_optional(
            **same | given | {"max_tokens": max_tokens, "logprobs": logprobs, "output_kind": kind} | more
        )

    @property
    def cuts(self) -> str | None:
        """The end at which a prompt that is too long is cut off; None: it is refused."""
        return None if self.truncate_prompt_tokens is None else self.truncation_side or "left"


class TextRequest(SamplingRequest):
    """A request for completions, of a prompt or a conversation."""

    max_tokens: Count = None
    max_completion_tokens: Count = None
    n: int | None = 1
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = False
    return_weight_versions: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    routed_experts_prompt_start: int = 0

    def params(
        self, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, **more: Any
    ) -> SamplingParams:
        """Return the engine's, as `SamplingRequest.params` does."""
        if self.stream_options is not None and self.stream_options.asks and not self.stream:
            raise InputError("stream_options must be left out unless stream is true")
        completion_fields = {
            name: getattr(self, name) for name in ("n", "prompt_logprobs", "routed_experts_prompt_start")
        }
        return super().params(defaults, max_tokens=max_tokens, logprobs=logprobs, **completion_fields | more)

    @property
    def most_tokens(self) -> int | None:
        """New tokens of an answer at most; None: as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Usage in every chunk."""
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


Prompts = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[list[int]], Field(min_length=1)]
)


class CompletionRequest(TextRequest):
    prompt: Prompts
    max_tokens: Count = 16
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        if isinstance(self.prompt, str) or is_int(self.prompt[0]):
            return [self.prompt]  # type: ignore[list-item]  # a list of ints is one prompt
        return [*self.prompt]


class ChatRequest(TextRequest):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    echo: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = True
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template beside the messages."""
        return template_kwargs(self.chat_template_kwargs, self.reasoning_effort, self.documents)


class ResponsesRequest(SamplingRequest):
    input: Annotated[str, Field(min_length=1)] | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    background: bool | None = False
    truncation: str | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    reasoning: dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template beside the messages."""
        effort = (self.reasoning or {}).get("effort")
        return template_kwargs(self.chat_template_kwargs, None if effort is None else str(effort))


class UnloadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1)]


class LoadAdapterRequest(UnloadAdapterRequest):
    lora_path: Annotated[str, Field(min_length=1)]
    load_inplace: bool | None = None


class TokenizeRequest(ModelRequest):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # None: yes for a prompt, no for messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(ModelRequest):
    tokens: list[int]
