"""Bodies of Anthropic's Messages API, field by field, with vLLM's additional sampling options."""

from typing import Annotated, Any

from pydantic import Field

from jaxpaged.checks import InputError, shown
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serve.schemas import SamplingRequest
from jaxpaged.text.templates import template_kwargs

# Fields of Anthropic's that would change the answer and are not served, each with its rule.
REFUSED = {
    "container": "left out: code runs at the client",
    "mcp_servers": "left out: tools run at the client",
}
THINKING = ("enabled", "adaptive", "between_tools", "disabled")


class MessagesRequest(SamplingRequest):
    """A conversation with tools; of `/v1/messages/count_tokens`, too, which has no `max_tokens`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self, *, counts: bool = False) -> None:
        """Raise `InputError` for a field that is missing, or that asks for what is not served.

        counts: whether the request only counts tokens.
        """
        for name, rule in REFUSED.items():
            value = (self.model_extra or {}).get(name)
            if value:
                raise InputError(f"{name}={shown(value)} must be {rule}")
        edits = (self.context_management or {}).get("edits")
        keeps = {"type": "clear_thinking_20251015", "keep": "all"}
        if edits and (not isinstance(edits, list) or any(edit != keeps for edit in edits)):
            raise InputError(f"context_management.edits={shown(edits)} must keep all: clients edit histories")
        if self.max_tokens is None and not counts:
            raise InputError("max_tokens=None must be an int >= 0")
        if self.max_tokens == 0 and self.stream:
            raise InputError("stream=True must be left out with max_tokens=0, which has no answer")
        kind = (self.thinking or {}).get("type")
        if self.thinking is not None and kind not in THINKING:
            raise InputError(f"thinking.type={shown(kind)} must be one of {', '.join(THINKING)}")

    @property
    def is_without_answer(self) -> bool:
        """Whether the prompt is only computed, for the caches."""
        return self.max_tokens == 0

    @property
    def includes_thinking(self) -> bool:
        """Whether reasoning is reported."""
        thinking = self.thinking or {}
        return thinking.get("type") != "disabled" and thinking.get("display") != "omitted"

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template beside the messages.

        `thinking` sets `enable_thinking`; `output_config.effort` sets `reasoning_effort`.
        """
        effort = (self.output_config or {}).get("effort")
        kwargs = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            kwargs = {"enable_thinking": self.thinking.get("type") != "disabled"} | kwargs
        return template_kwargs(kwargs, None if effort is None else str(effort))

    @property
    def response_format(self) -> dict[str, Any] | None:
        """Format of the answer's text, in the form of chat completions. Raises `InputError`."""
        asked = (self.output_config or {}).get("format")
        if asked is None:
            return None
        kind = asked.get("type") if isinstance(asked, dict) else asked
        if kind != "json_schema":
            raise InputError(f"output_config.format.type={shown(kind)} must be 'json_schema'")
        return {"type": "json_schema", "json_schema": {"schema": asked.get("schema")}}

    @property
    def previous_message_id(self) -> str | None:
        """Id of the message before, in the same session, as the client names it. Raises `InputError`."""
        name = (self.diagnostics or {}).get("previous_message_id")
        if name is not None and not isinstance(name, str):
            raise InputError(f"diagnostics.previous_message_id={shown(name)} must be a string or null")
        return name

    def params(
        self, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, **more: Any
    ) -> SamplingParams:
        """Return the engine's, as `SamplingRequest.params` does; `stop_sequences` are stop strings, too."""
        given = (self.stop,) if isinstance(self.stop, str) else (self.stop or ())
        if self.stop_sequences:
            more["stop"] = [*given, *self.stop_sequences]
        return super().params(defaults, max_tokens=max_tokens, logprobs=logprobs, **more)
