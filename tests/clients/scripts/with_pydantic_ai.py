"""Pydantic AI, with all three APIs: with_pydantic_ai.py URL MODEL"""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:]
openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="any")
anthropic = AnthropicProvider(base_url=URL, api_key="any")
MODELS = (
    OpenAIChatModel(MODEL, provider=openai),
    OpenAIResponsesModel(MODEL, provider=openai),
    AnthropicModel(MODEL, provider=anthropic),
)


class Place(BaseModel):
    place: str


async def check(model):
    agent = Agent(model, instructions="Be terse.")
    whole = await agent.run("hello")
    assert whole.output
    async with agent.run_stream("hello") as stream:
        assert await stream.get_output() == whole.output

    assert isinstance((await Agent(model, output_type=Place).run("hello")).output, Place)

    asked = []

    @agent.tool_plain
    def weather(place):
        """The weather in a place."""
        asked.append(place)
        return "sunny"

    assert (await agent.run("What is the weather in Oslo?")).output
    assert len(asked) == 1


async def main():
    for model in MODELS:
        await check(model)


asyncio.run(main())
