"""Where workers are, by address and port."""

import asyncio
from dataclasses import replace

import pytest

from app.gateway.endpoints import Endpoints
from tests.fake_worker import worker_info


def at(*addresses):
    return [replace(worker_info(f"w{n}"), address=address) for n, address in enumerate(addresses)]


@pytest.mark.parametrize("address", ["http://10.0.0.9:99999", "http://[::1", "http://a..b:80"])
async def test_a_worker_at_no_address_is_left_out(address):
    bad, good = at(address, "http://10.0.0.1:80")
    assert await Endpoints().of([bad, good]) == {good.key: "10.0.0.1:80"}


async def test_names_that_nobody_answers_for_are_waited_for_together(monkeypatch):
    num_asked = 0

    async def hangs(*_, **__):
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(600)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", hangs)
    *lost, good = at(*(f"http://lost{n}:80" for n in range(30)), "http://10.0.0.1:80")
    endpoints = Endpoints()
    async with asyncio.timeout(6):
        for _ in range(3):
            assert await endpoints.of([*lost, good]) == {good.key: "10.0.0.1:80"}
    assert num_asked == 30
