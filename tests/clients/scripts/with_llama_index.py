"""LlamaIndex: with_llama_index.py URL MODEL"""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
QUESTION = "What is the weather in Oslo?"


class Place(BaseModel):
    """A place."""

    place: str


def weather(place):
    """The weather in a place."""
    return f"sunny in {place}"


llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="any",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=8192,
)
whole = llm.chat([ChatMessage(role="user", content=QUESTION)])
assert whole.message.content
pieces = [*llm.stream_chat([ChatMessage(role="user", content=QUESTION)])]
assert pieces[-1].message.content == whole.message.content

tool = FunctionTool.from_defaults(weather)
called = llm.chat_with_tools([tool], user_msg=QUESTION)
(call,) = llm.get_tool_calls_from_response(called)
assert weather(**call.tool_kwargs).startswith("sunny")
said = llm.predict_and_call([tool], user_msg=QUESTION)
assert "sunny" in str(said)

assert isinstance(llm.as_structured_llm(Place).complete(QUESTION).raw, Place)

embedding = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="any")
assert embedding.get_text_embedding("a") != embedding.get_text_embedding("b")
