"""deploy/cells.cfg: which cell a request goes to."""

import asyncio
import re
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from app.local.redis_server import LOOPBACK, free_port
from tests.e2e.conftest import small_cluster
from tests.e2e.test_haproxy import Replica, haproxy
from tests.eventually import eventually
from tests.redis_servers import require_binary

CONFIG = Path(__file__).parents[2] / "deploy" / "cells.cfg"
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
UNSERVED = b"425 Too Early"
SYSTEM = {"role": "system", "content": "Be brief. " * 800}


@asynccontextmanager
async def in_front_of(ports, folder):
    """A client of the balancer in front of cells that listen on these ports."""
    lines = (f"    server cell{n} {LOOPBACK}:{port}\n" for n, port in enumerate(ports))
    config, port = folder / "cells.cfg", free_port()
    config.write_text(CONFIG.read_text() + "".join(lines))
    url = f"http://{LOOPBACK}:{port}"
    async with haproxy(config, port), httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
async def cells():
    """Two, each of which answers with its port."""
    async with AsyncExitStack() as stack:
        pair = [Replica(), Replica()]
        for cell in pair:
            await cell.start()
            stack.push_async_callback(cell.die)
        yield pair


@pytest.fixture
async def client(cells, tmp_path):
    async with in_front_of([cell.port for cell in cells], tmp_path) as client:
        yield client


def chat(number, turns, *, system=True):
    """A conversation with so many answers."""
    said = [SYSTEM] if system else []
    said.append({"role": "user", "content": f"question {number} " * 100})
    for turn in range(turns):
        said.append({"role": "assistant", "content": f"answer {number} {turn}"})
        said.append({"role": "user", "content": f"more {turn}"})
    return said


def path_of(body):
    return "/v1/responses" if "input" in body else COMPLETIONS if "prompt" in body else CHATS


async def cell_of(client, body, **headers):
    answer = await client.post(path_of(body), json=body, headers=headers)
    assert answer.status_code == 200
    return answer.text


def in_form(form, said):
    """The members of a request that say a conversation in one of the forms that APIs have."""
    if form == "ids":
        return {"prompt": [ord(letter) for message in said for letter in message["content"]]}
    name, _, is_parts = form.partition(" of ")
    if not is_parts:
        return {name: said}
    return {name: [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in said]}


@pytest.mark.parametrize("form", ["messages", "messages of parts", "input", "input of parts"])
async def test_the_turns_of_a_conversation_share_a_cell_and_conversations_share_cells(
    client, cells, form
):
    await check_cells(client, cells, form, system=True)


async def test_prompts_of_token_ids_share_a_cell_by_how_they_begin(client, cells):
    await check_cells(client, cells, "ids", system=False)


async def check_cells(client, cells, form, *, system):
    """Raises AssertionError unless a conversation stays in one cell, and each cell has some."""
    chosen = Counter()
    for number in range(12):
        turns = [
            {"model": "m"} | in_form(form, chat(number, turn, system=system)) | {"n": turn}
            for turn in range(3)
        ]
        [cell] = {await cell_of(client, turn) for turn in turns}
        chosen[cell] += 1
    assert chosen.keys() == {str(cell.port) for cell in cells}


@pytest.mark.parametrize("named", ["header", "session_id", "prompt_cache_key"])
async def test_a_named_session_goes_before_what_is_said(client, named):
    async def ask(session, number):
        body = {"model": "m", "messages": chat(number, 0)}
        if named == "header":
            return await cell_of(client, body, **{"X-Session-ID": session})
        return await cell_of(client, body | {named: session})

    chosen = [{await ask(f"s{session}", number) for number in range(8)} for session in range(12)]
    assert all(len(cells) == 1 for cells in chosen)
    assert len(set.union(*chosen)) == 2


async def test_a_cell_gets_little_more_than_its_share_of_one_hot_session(client, cells):
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for _ in range(16):
            headers = {"X-Session-ID": "hot"}
            group.create_task(client.post("/hold", json={}, headers=headers))

        async def held():
            return sorted(cell.held for cell in cells)

        # The bound of its half is 12; without one it would have all 16.
        assert await eventually(held, lambda seen: sum(seen) == 16) == [4, 12]
        for cell in cells:
            cell.go.set()


async def test_a_cell_that_has_no_room_is_not_the_last_word(client, cells):
    body = {"model": "m", "messages": chat(0, 0)}
    usual = await cell_of(client, body)
    full, other = sorted(cells, key=lambda cell: str(cell.port) != usual)
    full.refuses = UNSERVED
    assert await cell_of(client, body) == str(other.port)
    full.refuses = b""
    assert await cell_of(client, body) == usual
    full.refuses = other.refuses = UNSERVED
    assert (await client.post(CHATS, json=body)).status_code == 503
    full.refuses = other.refuses = UNSERVED + b"\r\nx-status: 429"
    answer = await client.post(CHATS, json=body)
    assert answer.status_code == 429
    assert "x-status" not in answer.headers


@pytest.mark.parametrize("status", [b"502 Bad Gateway", b"503 Busy", b"429 Busy", b"504 Late"])
async def test_what_a_cells_engines_had_is_carried_out_by_no_other_cell(client, cells, status):
    for cell in cells:
        cell.refuses = status
    answer = await client.post(CHATS, json={"model": "m", "messages": chat(0, 0)})
    assert answer.status_code == int(status[:3])
    assert sum(cell.num_bodies for cell in cells) == 1


async def test_a_cell_that_is_gone_is_replaced_by_the_next(client, cells):
    body = {"model": "m", "messages": chat(0, 0)}
    usual = await cell_of(client, body)
    gone, other = sorted(cells, key=lambda cell: str(cell.port) != usual)
    await gone.die()
    assert await cell_of(client, body) == str(other.port)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/route", "/v1/requests/r1~a/prefill_complete", "/find_best_worker"),
        *("/v1/%72oute", "/%76%31/route?a=b", "/v1%2Froute", "/v1/re%71uests/r/release"),
    ],
)
async def test_reservations_are_made_at_a_cell(client, path):
    answer = await client.post(path, json={"token_ids": [1, 2, 3]})
    assert answer.status_code == 501
    assert answer.json()["error"]["code"] == "one_cell_only"


async def decisions_of(cluster):
    async with httpx.AsyncClient() as own:
        scraped = await own.get(f"{cluster.routers[0].url}/metrics")
    counted = re.findall(r"kvroute_decisions_total{.*} ([0-9.]+)", scraped.text)
    return sum(map(float, counted))


@pytest.mark.slow
async def test_two_real_cells_keep_conversations_apart_and_stand_in_for_each_other(tmp_path):
    require_binary("haproxy")
    with (
        small_cluster(num_workers=1, num_replicas=1) as first,
        small_cluster(num_workers=1, num_replicas=1) as second,
    ):
        ports = [int(cluster.balancer_url.rpartition(":")[2]) for cluster in (first, second)]
        async with in_front_of(ports, tmp_path) as client:

            async def turn(number, turns):
                body = {"model": first.model, "messages": chat(number, turns, system=False)}
                answer = await client.post(CHATS, json=body | {"max_tokens": 2})
                assert answer.status_code == 200, answer.text
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert isinstance(cached, int)
                return cached

            for number in range(8):
                assert await turn(number, 0) < 100
            for number in range(8):
                assert await turn(number, 1) > 100
            assert 0 < await decisions_of(first) < 16
            first.workers[0].process.kill()
            for number in range(8, 16):
                await turn(number, 0)
