"""LangChain's and LlamaIndex's OpenAI classes against a server of ours: answers, streams, tools, JSON.

pip install langchain-openai llama-index-llms-openai-like
jaxpaged serve --structured-outputs-mib 64 --tool-call-parser hermes --chat-template TEMPLATE_WITH_TOOLS
"""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
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
print("LangChain, chat:", repr(chat.invoke("Say hello.").content[:60]))
parts = [part.content for part in chat.stream("Say hello.")]
assert "".join(parts) == chat.invoke("Say hello.").content
print("LangChain, stream:", len(parts), "parts of the same text")
print("LangChain, completion:", repr(OpenAI(**OPTIONS).invoke("The capital of France is")[:60]))
[call] = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Paris?").tool_calls
print("LangChain, tool:", call["name"], sorted(call["args"]))
print("LangChain, structured:", chat.with_structured_output(City).invoke("Paris"))

llm = OpenAILike(
    model="smollm2", api_base=URL, api_key="none", is_chat_model=True, is_function_calling_model=True,
    temperature=0, max_tokens=60,
)  # fmt: skip
message = [ChatMessage(role="user", content="Say hello.")]
print("LlamaIndex, chat:", repr(llm.chat(message).message.content[:60]))
parts = [part.delta for part in llm.stream_chat(message)]
assert "".join(part or "" for part in parts) == llm.chat(message).message.content
print("LlamaIndex, stream:", len(parts), "parts of the same text")
print("LlamaIndex, structured:", llm.as_structured_llm(City).complete("Paris").raw)
