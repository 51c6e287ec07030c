"""OpenAI's Agents SDK with its default model class: with_openai_agents.py URL MODEL"""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=f"{URL}/v1", api_key="any"), use_for_tracing=False)
asked = []


class Place(BaseModel):
    place: str


@function_tool
def weather(place):
    """The weather in a place."""
    asked.append(place)
    return "sunny"


async def main():
    agent = Agent(name="forecaster", instructions="Be terse.", model=MODEL, tools=[weather])
    result = await Runner.run(agent, "What is the weather in Oslo?")
    assert result.final_output
    assert len(asked) == 1

    stream = Runner.run_streamed(agent, "What is the weather in Oslo?")
    kinds = [event.type async for event in stream.stream_events()]
    assert "run_item_stream_event" in kinds
    assert stream.final_output
    assert len(asked) == 2

    typed = Agent(name="geographer", model=MODEL, output_type=Place)
    assert isinstance((await Runner.run(typed, "Where?")).final_output, Place)

    triage = Agent(name="triage", model=MODEL, handoffs=[agent])
    handed = await Runner.run(triage, "What is the weather in Oslo?")
    assert handed.last_agent is agent


asyncio.run(main())
