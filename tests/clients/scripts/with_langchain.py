"""LangChain, with both APIs: with_langchain.py URL MODEL"""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
QUESTION = "What is the weather in Oslo?"


class Place(BaseModel):
    """A place."""

    place: str


@tool
def weather(place):
    """The weather in a place."""
    return f"sunny in {place}"


openai = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="any")
responses = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="any", use_responses_api=True)
anthropic = ChatAnthropic(model=MODEL, base_url=URL, api_key="any", max_tokens=1000)

for model in (openai, responses, anthropic):
    whole = model.invoke(QUESTION)
    assert whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == whole.text

    with_tools = model.bind_tools([weather])
    called = with_tools.invoke(QUESTION)
    (call,) = called.tool_calls
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert with_tools.invoke([HumanMessage(QUESTION), called, result]).text

    assert isinstance(model.with_structured_output(Place).invoke(QUESTION), Place)

embeddings = OpenAIEmbeddings(
    model=MODEL, base_url=f"{URL}/v1", api_key="any", check_embedding_ctx_length=False
)
first, other = embeddings.embed_documents(["a", "b"])
assert first != other
