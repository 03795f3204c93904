"""OpenAI class of LlamaIndex against a server of ours at port 8000: answers, streams, tools.

pip install llama-index-llms-openai-like
jaxpaged serve --structured-outputs-mib 64 --tool-call-parser hermes --chat-template TEMPLATE_WITH_TOOLS
"""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"It is sunny in {city}."


llm = OpenAILike(
    model="smollm2", api_base=URL, api_key="none", is_chat_model=True, is_function_calling_model=True,
    temperature=0, max_tokens=60,
)  # fmt: skip
message = [ChatMessage(role="user", content="Say hello.")]
print("chat:", repr(llm.chat(message).message.content[:60]))
parts = [part.delta for part in llm.stream_chat(message)]
assert "".join(part or "" for part in parts) == llm.chat(message).message.content
print("stream:", len(parts), "parts of the same text")
weather = FunctionTool.from_defaults(get_weather)
answer = llm.chat_with_tools([weather], user_msg="Weather in Paris?", tool_required=True)
[call] = llm.get_tool_calls_from_response(answer)
print("tool:", call.tool_name, sorted(call.tool_kwargs))
