"""Clients that people have: pointed at a replica, they work as they are."""

from __future__ import annotations

import asyncio
import json
import subprocess

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI

from tests.door.conftest import MODEL

QUESTION = [{"role": "user", "content": "What does a router do?"}]


@pytest.fixture
def base_url(door: httpx.AsyncClient) -> str:
    return f"{door.base_url}/v1".replace("//v1", "/v1")


async def test_the_openai_client(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="any") as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        whole = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            max_tokens=6,
        )
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 6
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
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
            await client.chat.completions.create(model="x", messages=QUESTION)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="input_ids"):
            await client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,  # type: ignore[arg-type]
                extra_body={"input_ids": [1]},
            )


async def test_langchain(base_url: str) -> None:
    model = ChatOpenAI(model=MODEL, base_url=base_url, api_key="any", max_tokens=5)  # type: ignore[arg-type,call-arg]
    whole = await model.ainvoke("What does a router do?")
    pieces = [str(chunk.content) async for chunk in model.astream("What does a router do?")]
    assert "".join(pieces) == whole.content
    assert len(str(whole.content).split()) == 5


async def test_curl(base_url: str) -> None:
    body = json.dumps({"model": MODEL, "messages": QUESTION, "max_tokens": 4})
    command = ["curl", "-s", f"{base_url}/chat/completions", "-d", body]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    assert len(json.loads(done.stdout)["choices"][0]["message"]["content"].split()) == 4
