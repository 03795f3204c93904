"""OpenAI classes of LangChain against a server of ours at port 8000: answers, streams, tools, JSON.

pip install langchain-openai
jaxpaged serve --structured-outputs-mib 64 --tool-call-parser hermes --chat-template TEMPLATE_WITH_TOOLS
"""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
OPTIONS = {"base_url": URL, "api_key": "none", "model": "smollm2", "temperature": 0, "max_tokens": 60}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    is_capital: bool


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"It is sunny in {city}."


chat = ChatOpenAI(**OPTIONS)
print("chat:", repr(chat.invoke("Say hello.").content[:60]))
parts = [part.content for part in chat.stream("Say hello.")]
assert "".join(parts) == chat.invoke("Say hello.").content
print("stream:", len(parts), "parts of the same text")
print("completion:", repr(OpenAI(**OPTIONS).invoke("The capital of France is")[:60]))
[call] = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Paris?").tool_calls
print("tool:", call["name"], sorted(call["args"]))
print("structured:", chat.with_structured_output(City).invoke("Paris"))
