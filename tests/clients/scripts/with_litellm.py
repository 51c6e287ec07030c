"""LiteLLM as a client: with_litellm.py URL MODEL"""

import json
import sys

import litellm

URL, MODEL = sys.argv[1:]
USER = {"role": "user", "content": "What is the weather in Oslo?"}
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
OPENAI = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "any"}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "any", "max_tokens": 1000}

for server in (OPENAI, OPENAI | {"model": f"openai/{MODEL}"}, ANTHROPIC):
    whole = litellm.completion(**server, messages=[USER])
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens > 0
    chunks = [*litellm.completion(**server, messages=[USER], stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    called = litellm.completion(**server, messages=[USER], tools=[TOOL], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls
    assert isinstance(json.loads(call.function.arguments)["place"], str)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns = [USER, called.choices[0].message, result]
    assert litellm.completion(**server, messages=turns, tools=[TOOL]).choices[0].message.content

formed = litellm.completion(**OPENAI, messages=[USER], response_format=FORMAT)
assert isinstance(json.loads(formed.choices[0].message.content)["place"], str)
response = litellm.responses(**OPENAI | {"model": f"openai/{MODEL}"}, input="hello")
assert response.output[0].content[0].text
vectors = litellm.embedding(**OPENAI | {"model": f"openai/{MODEL}"}, input=["a", "b"]).data
assert vectors[0]["embedding"] != vectors[1]["embedding"]
