"""OpenAI's own client: with_openai.py URL MODEL"""

import asyncio
import json
import sys

import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
USER = {"role": "user", "content": "What is the weather in Oslo?"}
PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather.", "parameters": PLACE, "strict": True}


class Place(BaseModel):
    place: str
    rainy: bool


def chats(client):
    whole = client.chat.completions.create(model=MODEL, messages=[USER])
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens > 0
    chunks = [*client.chat.completions.create(model=MODEL, messages=[USER], stream=True)]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == (
        whole.choices[0].message.content
    )
    several = client.chat.completions.create(model=MODEL, messages=[USER], n=2, max_tokens=3)
    assert [choice.index for choice in several.choices] == [0, 1]
    old = client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=3)
    assert len(old.choices) == 2


def tools(client):
    tools = [{"type": "function", "function": WEATHER}]
    for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
        said = client.chat.completions.create(
            model=MODEL, messages=[USER], tools=tools, tool_choice=choice
        )
        (call,) = said.choices[0].message.tool_calls
        assert isinstance(json.loads(call.function.arguments)["place"], str)
    with client.chat.completions.stream(model=MODEL, messages=[USER], tools=tools) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns = [USER, said.choices[0].message, result]
    assert (
        client.chat.completions.create(model=MODEL, messages=turns, tools=tools)
        .choices[0]
        .message.content
    )
    none = client.chat.completions.create(
        model=MODEL, messages=[USER], tools=tools, tool_choice="none"
    )
    assert none.choices[0].message.tool_calls is None


def objects(client):
    parsed = client.chat.completions.parse(model=MODEL, messages=[USER], response_format=Place)
    assert isinstance(parsed.choices[0].message.parsed, Place)
    free = client.chat.completions.create(
        model=MODEL, messages=[USER], response_format={"type": "json_object"}
    )
    assert isinstance(json.loads(free.choices[0].message.content), dict)
    response = client.responses.parse(model=MODEL, input="Where?", text_format=Place)
    assert isinstance(response.output_parsed, Place)


def responses(client):
    whole = client.responses.create(model=MODEL, input="hello", instructions="Be terse.")
    assert (whole.status, whole.output_text != "") == ("completed", True)
    with client.responses.stream(model=MODEL, input="hello", instructions="Be terse.") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == whole.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    tools = [{"type": "function", **WEATHER}]
    (call,) = client.responses.create(model=MODEL, input=[USER], tools=tools).output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = client.responses.create(model=MODEL, input=[USER, call, result], tools=tools)
    assert answer.output_text


def vectors(client):
    first, same, other = client.embeddings.create(model=MODEL, input=["a", "a", "b"]).data
    assert first.embedding == same.embedding != other.embedding


def errors(client):
    try:
        client.chat.completions.create(model=MODEL, messages=[USER], logprobs=True)
    except openai.BadRequestError as error:
        assert (error.param, error.type) == ("logprobs", "invalid_request_error")
    else:
        raise AssertionError("log probabilities are not given")
    try:
        client.chat.completions.create(model="no such model", messages=[USER])
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("there is no such model")


async def at_once():
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="any") as client:
        asked = [client.responses.create(model=MODEL, input=f"{n}") for n in range(8)]
        assert all(answer.output_text for answer in await asyncio.gather(*asked))


with openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0) as client:
    for part in (chats, tools, objects, responses, vectors, errors):
        part(client)
asyncio.run(at_once())
