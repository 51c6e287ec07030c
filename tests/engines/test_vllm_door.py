"""Chats with a real vLLM through the front door: see `make test-vllm`."""

import asyncio
import random
from contextlib import ExitStack

import httpx
import pytest

from app.door.answer.events import usage_in
from tests.door.conftest import replica, until_serving
from tests.door.test_answers import counted, events
from tests.e2e.engines import agent
from tests.engines.vllm_server import ANSWER_S, BLOCK, MODEL, behind_a_door, vllm_servers
from tests.eventually import eventually
from tests.tokens.capture import agents

CHATS, TURNS = 100, 3
_TEXT = "the quick brown fox jumps over a lazy dog and says hello to each of you"
WORDS = _TEXT.split()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]

LONG = 1500
"""Tokens of an answer that is not over before its engine is killed."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]


def text(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def test_predicted_overlap_is_what_vllm_reports_and_answers_are_its_own(
    one_redis_server, tmp_path
):
    rng = random.Random(4)
    systems = [{"role": "system", "content": text(rng, 60)} for _ in range(4)]
    async with behind_a_door(one_redis_server.url, tmp_path) as (door, direct):
        replies = {}

        async def until_published(body):
            """Returns the number of full blocks of a prompt and its answer, whose last token has no
            KV."""
            tokens = [*body["prompt_token_ids"], *body["choices"][0]["token_ids"][:-1]]
            route = {"token_ids": tokens, "reserve": False, "explain": True}

            async def held():
                found = (await door.post("/v1/route", json=route)).json().get("candidates", ())
                return sum(found[0]["overlap_blocks"].values()) if found else 0

            full = len(tokens) // BLOCK
            await eventually(held, lambda blocks: blocks >= full, within_s=ANSWER_S)

        async def ask(messages, **more):
            asked = {"model": MODEL, "messages": messages, "max_tokens": 8} | more
            asked |= {"temperature": 0, "return_token_ids": True}
            answer = await door.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 200, answer.text
            body = answer.json()
            usage = body["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            # The last token is always computed, and with it its block.
            stated = int(answer.headers["x-kvroute-overlap"].partition("/")[0])
            most = (usage["prompt_tokens"] - 1) // BLOCK
            own = (await direct.post("/v1/chat/completions", json=asked)).json()
            reply = body["choices"][0]["message"]["content"]
            assert reply == own["choices"][0]["message"]["content"]
            assert usage["prompt_tokens"] == own["usage"]["prompt_tokens"]
            replies[str(asked)] = reply
            await until_published(body)
            return reply, min(stated, most), cached // BLOCK

        async def rendered_here():
            await ask([{"role": "user", "content": "hello"}])
            return await counted(door, f'tokens_from_total{{model="{MODEL}",source="router"}}')

        await eventually(rendered_here, lambda number: number > 0, within_s=ANSWER_S)
        differences = []
        for number in range(CHATS):
            messages = [rng.choice(systems)]
            more = {"tools": TOOLS, "tool_choice": "none"} if number % 3 == 0 else {}
            for _ in range(TURNS):
                messages = [*messages, {"role": "user", "content": text(rng, 20)}]
                reply, stated, cached = await ask(messages, **more)
                messages = [*messages, {"role": "assistant", "content": reply or "yes"}]
                if stated != cached:
                    differences.append(f"chat {number}: {stated} stated, {cached} cached")
        assert differences == []
        # So the answer to another prompt would have been seen.
        assert len(set(replies.values())) == len(replies) >= CHATS * TURNS
        sources = {
            source: await counted(door, f'tokens_from_total{{model="{MODEL}",source="{source}"}}')
            for source in ("router", "engine")
        }
        assert sources["router"] >= CHATS * TURNS
        # Only while the tokenizer was read.
        assert sources["engine"] <= 2


async def test_messages_and_responses_are_cached_as_predicted_and_answered_as_by_vllm_alone(
    one_redis_server, tmp_path
):
    rng = random.Random(5)
    # They share nothing, so that the index has heard of what came before by the time it counts.
    systems = [text(rng, 60) for _ in range(2)]
    async with behind_a_door(one_redis_server.url, tmp_path) as (door, direct):
        replies = {}

        async def ask(path, asked):
            asked = {"model": MODEL, "temperature": 0} | asked
            answer = await door.post(path, json=asked)
            assert answer.status_code == 200, answer.text
            own = await direct.post(path, json=asked)
            reply = answer_in(answer.json())
            assert reply == answer_in(own.json())
            replies[f"{path} {asked}"] = reply
            return reply

        async def counts():
            names = (
                f'tokens_from_total{{model="{MODEL}",source="router"}}',
                f'cached_compared_tokens_total{{model="{MODEL}",worker="a:0"}}',
                f'tokens_total{{kind="cached",model="{MODEL}"}}',
            )
            return [await counted(door, name) for name in names]

        async def rendered_here():
            await ask("/v1/messages", {"messages": [said("hello")], "max_tokens": 4})
            return (await counts())[0]

        await eventually(rendered_here, bool, within_s=ANSWER_S)
        for _ in range(20):
            items = [said(text(rng, 20))]
            for _ in range(TURNS):
                asked = {"messages": items, "system": systems[0], "max_tokens": 8}
                await ask("/v1/messages", asked)
                asked = {"input": items, "instructions": systems[1], "max_output_tokens": 8}
                reply = await ask("/v1/responses", asked)
                answer = {"role": "assistant", "content": reply or "yes"}
                items = [*items, answer, said(text(rng, 20))]
        # So the answer to another prompt would have been seen.
        assert len(set(replies.values())) == len(replies) > 20 * TURNS * 2
        rendered, compared, cached = await counts()
        assert rendered >= 20 * TURNS * 2
        assert compared > cached > 0
        labels = f'model="{MODEL}",worker="a:0"'
        assert await counted(door, f"cached_apart_tokens_total{{{labels}}}") == 0


async def test_what_coding_agents_send_has_the_ids_here_that_vllm_gives_it(
    one_redis_server, tmp_path
):
    url = one_redis_server.url
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    async with behind_a_door(url, tmp_path, more=flags) as (door, direct):
        for path, sent in agents():
            asked = {name: value for name, value in sent.items() if name != "stream_options"}
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            asked |= {"model": MODEL, "stream": False, limit: 1}
            answer = await door.post(path, json=asked)
            assert answer.status_code == 200, answer.text
            assert "x-kvroute-tokens" not in answer.headers
            own = usage_in((await direct.post(path, json=asked)).content)
            routed = usage_in(answer.content)
            assert own is not None
            assert routed is not None
            assert routed.prompt == own.prompt
            # Of what vLLM makes of it itself, it has all in its cache; the last token is always
            # computed.
            assert own.cached == (own.prompt - 1) // BLOCK * BLOCK
        labels = f'model="{MODEL}",source="router"'
        assert await counted(door, f"tokens_from_total{{{labels}}}") == len(agents())


@pytest.mark.parametrize("is_chat", [True, False])
async def test_a_stream_whose_vllm_is_killed_says_what_one_left_alone_would_have(
    one_redis_server, tmp_path, is_chat
):
    rng = random.Random(6)
    url = one_redis_server.url
    with ExitStack() as stack:
        engines = stack.enter_context(vllm_servers(tmp_path, "a", "b", blocks=2000))
        for name, engine in zip("ab", engines, strict=True):
            stack.enter_context(agent(engine.url, url, tmp_path / f"memory-{name}", name))
        async with (
            replica(url, migrate=True) as door,
            httpx.AsyncClient(timeout=ANSWER_S) as direct,
        ):
            await until_serving(door, 2)
            begun_at = []
            asked = {"model": MODEL, "temperature": 0, "max_tokens": LONG}
            asked |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
            path = "/v1/chat/completions" if is_chat else "/v1/completions"

            def body():
                words = text(rng, 60)
                return asked | ({"messages": [said(words)]} if is_chat else {"prompt": words})

            async def stream(http, body, seen, url=""):
                """Text and usage."""
                got = ""
                async with http.stream("POST", url + path, json=body) as answer:
                    if http is door:
                        begun_at.append(answer.headers["x-kvroute-worker"])
                    async for piece in answer.aiter_text():
                        got += piece
                        if got.count("data:") > 20:
                            seen.set()
                    found = events(got)
                    choices = [choice for one in found for choice in one["choices"]]
                    told = [c["delta"].get("content") if is_chat else c["text"] for c in choices]
                    return "".join(filter(None, told)), found[-1]["usage"]

            async def rendered_here():
                await stream(door, body() | {"max_tokens": 2}, asyncio.Event())
                return await counted(door, f'tokens_from_total{{model="{MODEL}",source="router"}}')

            await eventually(rendered_here, bool, within_s=ANSWER_S)
            bodies = [body() for _ in range(6)]
            seen = [asyncio.Event() for _ in bodies]
            asking = asyncio.gather(
                *(stream(door, one, is_seen) for one, is_seen in zip(bodies, seen, strict=True))
            )
            for is_seen in seen:
                await is_seen.wait()
            killed = "ab".index(begun_at[-1][0])
            engines[killed].kill()
            left = engines[1 - killed].url
            answers = await asking
            assert len({told for told, _ in answers}) == len(bodies)
            for one, (told, usage) in zip(bodies, answers, strict=True):
                alone, counts = await stream(direct, one, asyncio.Event(), left)
                assert told == alone
                assert usage["completion_tokens"] == LONG
                assert usage["prompt_tokens"] == counts["prompt_tokens"]
                # Neither does one go on alike that lost what came before, or repeat itself.
                half = told[: len(told) // 2]
                lost = one | ({"messages": [said(half)]} if is_chat else {"prompt": half})
                lost_told, _ = await stream(direct, lost, asyncio.Event(), left)
                assert not lost_told.startswith(told[len(half) :][:20])
                assert half[:20] != told[len(half) :][:20]
            assert await counted(door, f'migrations_total{{model="{MODEL}"}}') > 0


def said(content):
    return {"role": "user", "content": content}


def answer_in(body):
    """The text of a message or a response."""
    [block] = body["output"][0]["content"] if "output" in body else body["content"]
    return str(block["text"])


async def test_a_burst_of_texts_to_tokenize_costs_a_vllm_no_lease(one_redis_server, tmp_path):
    rng = random.Random(7)
    texts = [text(rng, 4000) for _ in range(1000)]
    async with (
        behind_a_door(one_redis_server.url, tmp_path, answer_timeout_s=ANSWER_S) as (door, direct),
        httpx.AsyncClient(
            base_url=direct.base_url, timeout=ANSWER_S, limits=httpx.Limits(max_connections=None)
        ) as many,
    ):
        [before] = (await door.get("/v1/workers")).json()["workers"]
        loop = asyncio.get_running_loop()
        longest_s = 0.0

        async def look_at_health():
            nonlocal longest_s
            while True:
                asked_s = loop.time()
                await direct.get("/health")
                longest_s = max(longest_s, loop.time() - asked_s)
                await asyncio.sleep(0.1)

        async def tokenize(words):
            answer = await many.post("/tokenize", json={"model": MODEL, "prompt": words})
            assert answer.status_code == 200, answer.text
            return int(answer.json()["count"])

        looking = asyncio.create_task(look_at_health())
        burst = asyncio.gather(*(tokenize(words) for words in texts))
        while not burst.done():
            listed = (await door.get("/v1/workers")).json()["workers"]
            assert [one["incarnation"] for one in listed] == [before["incarnation"]]
            asked = {"model": MODEL, "prompt": text(rng, 30), "max_tokens": 2}
            answer = await door.post("/v1/completions", json=asked, timeout=ANSWER_S)
            assert answer.status_code == 200, answer.text
        assert min(await burst) >= 4000
        looking.cancel()
        assert longest_s > 3.0, "else it proves nothing: a lease lasts for 3 s"
