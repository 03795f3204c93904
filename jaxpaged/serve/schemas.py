"""What clients may ask, field by field: OpenAI's, and vLLM's that this engine has. Others are ignored."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler

from jaxpaged.checks import InputError, is_int
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.serve.bounds import first_error_only

Number = float | None
Count = int | None

# Fields that ask for tokens to be chosen by a grammar, which this engine does not do.
STRUCTURED = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "structural_tag",
)


class Asked(BaseModel):
    """A request's body. Unknown fields are allowed, and kept where one asks for what is not there."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return first_error_only(handler(source))


class Queued(Asked):
    """A request that gets answers: from which model, and before and beside whom."""

    priority: int = 0
    cache_salt: str | None = None


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Sampled(Queued):
    """What chooses tokens, the same for all kinds of requests; None for the model's or the engine's own."""

    max_tokens: Count = None
    n: int | None = 1
    temperature: Number = None
    top_p: Number = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: Number = None
    repetition_penalty: Number = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False

    SAME: ClassVar[tuple[str, ...]] = (
        "n",
        "temperature",
        "top_p",
        "stop",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "allowed_token_ids",
        "bad_words",
    )

    def params(
        self, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, **more: Any
    ) -> SamplingParams:
        """The engine's; what is not given is as the model's makers have it. Raises `InputError`."""
        self.refuse_missing()
        given = {name: value for name in self.SAME if (value := getattr(self, name)) is not None}
        own = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        same = {name: getattr(defaults, name) for name in own}
        return SamplingParams.from_optional(
            **same
            | given
            | {
                "max_tokens": max_tokens,
                "seed": seed_of(self.seed),
                "logprobs": logprobs,
                "prompt_logprobs": self.prompt_logprobs,
                "output_kind": RequestOutputKind.DELTA,
            }
            | more
        )

    def refuse_missing(self) -> None:
        """Raise `InputError` for what would change the answer, and is not there."""
        extra = self.model_extra or {}
        for name in STRUCTURED:
            if extra.get(name) is not None:
                raise InputError(f"{name}: structured outputs are not supported yet: leave it out")
        kind = extra.get("response_format")
        if kind is not None and (kind.get("type") if isinstance(kind, Mapping) else kind) != "text":
            raise InputError("response_format must be {'type': 'text'}: others are not supported yet")
        for name, neutral in (("best_of", self.n), ("use_beam_search", False), ("suffix", "")):
            if extra.get(name) not in (None, neutral):
                raise InputError(f"{name} is not supported: leave it out")
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options must be left out unless stream is true")

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Usage in every chunk."""
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


def seed_of(seed: int | None) -> int | None:
    """A seed of the engine's for any 64-bit number: by its last 32 bits. None and -1 ask for none."""
    if seed is None or seed == -1 or not -(2**63) <= seed < 2**63:
        return seed  # what is no seed is refused later, by its name
    return seed % 2**32


Prompts = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[list[int]], Field(min_length=1)]
)


class CompletionRequest(Sampled):
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


class ChatRequest(Sampled):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count = None
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


class ResponsesRequest(Queued):
    input: Annotated[str, Field(min_length=1)] | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count = None
    temperature: Number = None
    top_p: Number = None
    stream: bool | None = False
    store: bool | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    background: bool | None = False
    truncation: str | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_k: int | None = None
    seed: int | None = None


class UnloadAdapterRequest(BaseModel):
    lora_name: Annotated[str, Field(min_length=1)]


class LoadAdapterRequest(UnloadAdapterRequest):
    lora_path: Annotated[str, Field(min_length=1)]


class TokenizeRequest(Asked):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # of a prompt: yes, of messages: no
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Asked):
    tokens: list[int]
