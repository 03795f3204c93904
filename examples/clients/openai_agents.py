"""An agent of the package openai-agents with a tool, against a server of ours at port 8000.

pip install openai-agents
jaxpaged serve --structured-outputs-mib 64 --tool-call-parser hermes --chat-template TEMPLATE_WITH_TOOLS
"""

import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
set_tracing_disabled(True)
calls = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    calls.append(city)
    return f"It is sunny in {city[:40]}."


client = AsyncOpenAI(base_url=URL, api_key="none")
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    # The tool is forced at first: a model of 135M parameters would not call one by itself.
    settings = ModelSettings(tool_choice="get_weather", temperature=0, max_tokens=60)
    model = kind("smollm2", client)
    agent = Agent(
        "weather", instructions="Be brief.", tools=[get_weather], model=model, model_settings=settings
    )
    answer = Runner.run_sync(agent, "What is the weather in Paris?", max_turns=3)
    print(kind.__name__, "called with", calls[-1][:40], "->", repr(answer.final_output[:80]))
    assert calls
    calls.clear()
