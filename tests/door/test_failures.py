"""Workers that fail, clients that hang up, and what is left of their requests: nothing."""

import asyncio
import errno
import logging
import signal
import socket

import httpx
import pytest
from aiohttp import web

from app.http.server import listen
from tests.door import conftest
from tests.door.conftest import MODEL, completing, replica, until_serving, worker, worker_here
from tests.door.test_answers import chat, counted
from tests.eventually import eventually
from tests.fake_worker import KEYS


async def nothing_reserved(redis, within_s=10.0):
    async def reserved():
        return int(await redis.hlen(KEYS["reservations"]))

    await eventually(reserved, lambda number: number == 0, within_s=within_s)


async def running_on(url):
    async with httpx.AsyncClient() as http:
        lines = (await http.get(f"{url}/metrics")).text.splitlines()
    name = 'kvroute_engine_requests{state="running"}'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def test_a_worker_killed_before_the_first_byte_costs_no_request(one_redis_server, redis):
    url = one_redis_server.url
    with worker(url, "a", speedup=1) as first, worker(url, "b", speedup=1):
        async with replica(url) as door:
            await until_serving(door, 2)
            asked = [
                door.post("/v1/chat/completions", json=chat(f"{n}", max_tokens=100))
                for n in range(60)
            ]
            answers = asyncio.gather(*asked)
            await eventually(lambda: running_on(first.url), lambda number: number > 0)
            first.popen.send_signal(signal.SIGKILL)
            assert {answer.status_code for answer in await answers} == {200}
            assert await counted(door, f'retries_total{{model="{MODEL}"}}') > 0
            await nothing_reserved(redis)


async def test_a_stream_whose_worker_dies_ends_with_an_error_and_without_done(
    one_redis_server, redis
):
    url = one_redis_server.url
    with worker(url, "a", speedup=1) as only:
        async with replica(url) as door:
            await until_serving(door, 1)
            asked = chat("long", stream=True, max_tokens=500, ignore_eos=True)
            text = ""
            async with door.stream("POST", "/v1/chat/completions", json=asked) as answer:
                async for piece in answer.aiter_text():
                    if not text:
                        only.popen.send_signal(signal.SIGKILL)
                    text += piece
            assert '"code":"worker_failed"' in text.split("data: ")[-2]
            assert text.endswith("data: [DONE]\n\n")
            labels = f'code="200",model="{MODEL}",outcome="cut"'
            assert await counted(door, f"requests_total{{{labels}}}") == 1
            await nothing_reserved(redis)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_hangs_up_stops_the_engine_and_leaves_nothing_reserved(
    one_redis_server, redis, streams
):
    url = one_redis_server.url
    async with worker_here(url, "a", speedup=1) as only, replica(url) as door:
        await until_serving(door, 1)
        asked = chat("long", stream=streams, max_tokens=2000, ignore_eos=True)
        began = asyncio.Event()

        async def ask():
            async with door.stream("POST", "/v1/chat/completions", json=asked) as answer:
                async for _ in answer.aiter_text():
                    began.set()

        asking = asyncio.create_task(ask())
        await eventually(lambda: running_on(only), lambda number: number == 1)
        if streams:
            # An engine runs a request before the answer begins, whose status is then not told yet.
            await asyncio.wait_for(began.wait(), 30.0)
        asking.cancel()
        await eventually(lambda: running_on(only), lambda number: number == 0)
        await nothing_reserved(redis)
        code = 200 if streams else 499
        outcome = "left_after_token" if streams else "left_before_token"
        labels = f'code="{code}",model="{MODEL}",outcome="{outcome}"'
        await eventually(
            lambda: counted(door, f"requests_total{{{labels}}}"), lambda number: number == 1
        )


@pytest.mark.parametrize(
    ("client_is", "outcome"),
    [("stalled", "client_stalled"), ("gone", "left_after_token"), ("slow", "ok")],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_client_that_does_not_take_all_of_a_whole_answer_is_not_ok(
    one_redis_server, redis, monkeypatch, path, client_is, outcome
):
    def listen_with_little_room(*where):
        listening = listen(*where)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listening

    async def complete(request):
        return web.json_response({"choices": [{"text": "x" * 900_000}], "object": "list"})

    monkeypatch.setattr(conftest, "listen", listen_with_little_room)
    url, stalled_s = one_redis_server.url, 60.0 if client_is == "gone" else 0.2
    async with (
        completing(redis, "w", complete, path=path),
        replica(url, stalled_s=stalled_s) as door,
    ):
        await until_serving(door, 1)
        body = b'{"model":"m","prompt":"x","input":"x"}'
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", door.base_url.port))
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(client, head.encode() + body)
            assert (await loop.sock_recv(client, 12)).endswith(b"200")
            left = 900_000 if client_is == "slow" else 0
            while left > 0:
                left -= len(await loop.sock_recv(client, 4096))
                await asyncio.sleep(0.003)
            await nothing_reserved(redis)
            if client_is == "gone":
                client.close()
            labels = f'code="200",model="m",outcome="{outcome}"'
            await eventually(
                lambda: counted(door, f"requests_total{{{labels}}}"), lambda number: number == 1
            )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("says_length", [True, False])
async def test_a_whole_answer_that_breaks_off_does_not_end_as_if_that_were_all(
    one_redis_server, redis, path, says_length
):
    async def breaks_off(request):
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        answer.content_length = 2_000_000 if says_length else None
        await answer.prepare(request)
        await answer.write(b'{"choices": [{"text": "' + b"x" * 1_500_000)
        assert request.transport is not None
        request.transport.close()
        return answer

    async with (
        completing(redis, "w", breaks_off, path=path) as _,
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await door.post(path, json={"model": "m", "prompt": "x", "input": "x"})
        labels = 'code="200",model="m",outcome="cut"'
        await eventually(
            lambda: counted(door, f"requests_total{{{labels}}}"), lambda number: number == 1
        )
        await nothing_reserved(redis)


async def test_a_client_that_reads_nothing_is_cut_off(one_redis_server, redis, caplog):
    url = one_redis_server.url
    with worker(url, "a", speedup=1000), socket.socket() as client:
        async with replica(url, stalled_s=0.5) as door:
            await until_serving(door, 1)
            asked = chat("x", stream=True, max_tokens=60_000, ignore_eos=True)
            body = httpx.Request("POST", "http://x", json=asked).content
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", door.base_url.port))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}"
            await loop.sock_sendall(client, f"{head}\r\n\r\n".encode() + body)
            labels = f'code="200",model="{MODEL}",outcome="client_stalled"'
            await eventually(
                lambda: counted(door, f"requests_total{{{labels}}}"),
                lambda number: number == 1,
                within_s=30.0,
            )
            await nothing_reserved(redis)

            async def is_reset():
                return client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

            await eventually(is_reset, lambda error: error == errno.ECONNRESET)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
