"""Clients that people have: pointed at a replica, they work as they are.

Each test imports its own, as every test process loads this file, and they take three seconds.
"""

import asyncio
import json
import subprocess

import pytest

from app.door.answer_request import COUNT_TOKENS
from tests.door.conftest import MODEL, replica, sick_worker, until_serving
from tests.door.test_answers import counted
from tests.e2e.engines import agent_here
from tests.eventually import eventually
from tests.fakes.engine import fake_engine
from workers.engines.sim.text import FOLDER

QUESTION_TEXT = "What does a router do?"
QUESTION = [{"role": "user", "content": QUESTION_TEXT}]


@pytest.fixture
def base_url(door):
    return f"{door.base_url}/v1".replace("//v1", "/v1")


@pytest.fixture
async def spoken(one_redis_server, tmp_path):
    """A door to an engine that speaks every API, with an agent beside it."""
    url = one_redis_server.url
    async with (
        fake_engine(models=[MODEL], tokenizer=str(FOLDER)) as engine,
        agent_here(engine.url, url, tmp_path, "e"),
        replica(url) as door,
    ):
        await until_serving(door, 1)
        yield door


async def test_the_openai_client(base_url):
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key="any") as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        whole = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=6,
        )
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 6
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        old = await client.completions.create(model=MODEL, prompt="once", max_tokens=3)
        assert len(old.choices[0].text.split()) == 3
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="x", messages=QUESTION)
        with pytest.raises(openai.BadRequestError, match="input_ids"):
            await client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                extra_body={"input_ids": [1]},
            )


async def test_the_anthropic_client(spoken):
    import anthropic

    url = str(spoken.base_url)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:

        async def ask(text):
            return await client.messages.create(
                model=MODEL,
                max_tokens=6,
                system="You are terse. " * 40,
                messages=[{"role": "user", "content": text}],
            )

        whole = await ask(QUESTION_TEXT)
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 6)
        async with client.messages.stream(
            model=MODEL,
            max_tokens=6,
            system=[{"type": "text", "text": "You are terse. " * 40}],
            messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION_TEXT}]}],
        ) as stream:
            final = await stream.get_final_message()
        assert final.content[0].text == whole.content[0].text
        assert len(whole.content[0].text.split()) == 6
        cached = await eventually(lambda: ask(QUESTION_TEXT), _is_cached)
        assert cached.usage.input_tokens < whole.usage.input_tokens
        labels = f'model="{MODEL}",source="router"'
        assert await counted(spoken, f"tokens_from_total{{{labels}}}") > 0
        rows = (await spoken.get("/metrics")).text.splitlines()
        apart = [row for row in rows if row.startswith("kvroute_door_cached_apart_tokens_total")]
        assert apart
        assert all(row.endswith(" 0.0") for row in apart)
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(
                model="x", max_tokens=1, messages=[{"role": "user", "content": "x"}]
            )


async def test_the_anthropic_client_counts_tokens(spoken):
    import anthropic

    url = str(spoken.base_url)
    weather = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
    messages = [{"role": "user", "content": QUESTION_TEXT}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:
        for more in ({}, {"system": "You are terse."}, {"system": "You are.", "tools": [weather]}):
            asked = {"model": MODEL, "messages": messages, **more}
            said = await client.messages.create(**asked, max_tokens=1)
            count = await client.messages.count_tokens(**asked)
            assert count.input_tokens == _prompt_tokens(said.usage)
        routed = f'request_seconds_count{{model="{MODEL}"}}'
        assert await counted(spoken, routed) == 3  # nothing was routed to count
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.count_tokens(model="x", messages=messages)
        with pytest.raises(anthropic.BadRequestError, match="chat_template"):
            await client.messages.count_tokens(**asked, extra_body={"chat_template": "x"})


def _prompt_tokens(usage):
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_a_worker_counts_tokens_where_they_are_not_known_here(one_redis_server, redis):
    async with (
        sick_worker(redis, "a", engine="sglang 0.5") as engine,
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)
        asked = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        answer = await door.post(COUNT_TOKENS, json=asked)
        assert (answer.status_code, answer.json()) == (200, {"input_tokens": len("hello")})
        assert [heard.body for heard in engine.heard] == [asked]


def _is_cached(answer):
    return (answer.usage.cache_read_input_tokens or 0) > 0


async def test_curl(base_url):
    body = json.dumps({"model": MODEL, "messages": QUESTION, "max_tokens": 4})
    command = ["curl", "-s", f"{base_url}/chat/completions", "-d", body]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    assert len(json.loads(done.stdout)["choices"][0]["message"]["content"].split()) == 4
