"""Engines at the addresses that a name has."""

import asyncio
import random
import socket
from functools import partial
from urllib.parse import urlsplit

import pytest

from app.core.errors import ConfigError
from tests.eventually import eventually
from tests.workers.discovery.fleets import engines, running, settings, until_live
from workers.discovery import dns
from workers.discovery.fleet import Absences
from workers.discovery.source import source_of


async def test_engines_come_and_go_with_the_addresses_of_a_name(redis, tmp_path, monkeypatch):
    monkeypatch.setattr(dns, "LOOK_S", 0.02)
    known = ["127.0.0.1"]
    asked = asyncio.Event()

    async def getaddrinfo(name, port, family, **_):
        assert name == "vllm.test"
        assert known is None or family == socket.AF_INET
        asked.set()
        if known is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in known]

    async with engines(1) as (a,):
        port = urlsplit(a.url).port
        process = settings(engine_dns=f"vllm.test:{port}")
        # No name server can be asked for names of a test's own.
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        look = partial(dns.addresses, *dns.name_and_port(process.engine_dns))
        async with running(redis, tmp_path, partial(dns.follow, process, look)) as fleet:
            await until_live(redis, f"127.0.0.1-{port}")
            # Nobody knows the name: that says nothing of the engines.
            known = None
            for _ in range(3):
                asked.clear()
                await asked.wait()
            assert fleet.followers.keys() == {f"127.0.0.1-{port}"}
            await until_live(redis, f"127.0.0.1-{port}")
            known = ["127.0.0.2"]
            await until_live(redis)


OLD, NEW = socket.AF_INET, socket.AF_INET6
NONE, LATER = socket.gaierror(socket.EAI_NODATA, "none"), socket.gaierror(socket.EAI_AGAIN, "later")


@pytest.mark.parametrize(
    ("known", "found"),
    [
        ({OLD: "10.0.0.1", NEW: "fd00::1"}, {("10.0.0.1", 80)}),
        ({OLD: NONE, NEW: "fd00::1"}, {("fd00::1", 80)}),
        ({OLD: LATER, NEW: "fd00::1"}, LATER),
        ({OLD: NONE, NEW: NONE}, NONE),
    ],
    ids=["both", "newer", "nobody says whether it has the older", "none"],
)
async def test_an_engine_with_an_address_of_each_family_is_one(known, found, monkeypatch):
    async def getaddrinfo(*_, family, **__):
        if isinstance(answer := known[family], OSError):
            raise answer
        return [(family, socket.SOCK_STREAM, 6, "", (answer, 80))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    if isinstance(found, OSError):
        with pytest.raises(OSError, match=found.args[1]):
            await dns.addresses("vllm.test", 80)
    else:
        assert await dns.addresses("vllm.test", 80) == found


async def test_a_name_server_that_gives_8_of_20_addresses_ends_no_engine():
    process = settings(engine_dns="vllm.test:80")
    absences = Absences((await source_of(process)).gone_s)
    at = {key: dns.engine_at(process, key, 80) for key in (f"10.0.0.{i}" for i in range(20))}
    absences.note(at, 0.0)
    chance = random.Random(7)
    for number in range(1000):
        told = {key: at[key] for key in chance.sample([*at], 8)}
        absences.note(told, number * dns.LOOK_S)
        assert absences.lacking.keys() | told.keys() == at.keys()


def test_without_a_port_it_is_a_name_of_records():
    assert dns.name_and_port("_http._tcp.vllm.models.svc") == ("_http._tcp.vllm.models.svc", None)


@pytest.mark.parametrize("odd", [("10.0.0.2", 0), ("fe80::1%eth0", 80), ("a" * 300, 80)], ids=str)
async def test_a_place_at_which_no_engine_can_be_leaves_the_others(odd):
    told = []

    async def places():
        return {("10.0.0.1", 80), odd}

    following = asyncio.create_task(
        dns.follow(
            settings(engine_dns="x"), places, lambda members: told.append({*members.engines})
        )
    )
    await eventually(lambda: asyncio.sleep(0, told))
    following.cancel()
    assert told == [{"10.0.0.1-80"}]


@pytest.mark.parametrize(
    "text",
    ["", "vllm:", "vllm:0", "vllm:x", ":8000", "vllm:65536", "vllm:\u00b2", f"vllm:{'9' * 5000}"],
)
def test_a_port_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"--engine-dns: needs NAME:PORT, or .*, got"):
        dns.name_and_port(text)


def test_an_address_of_version_6_is_a_worker_too():
    engine = dns.engine_at(settings(), "fd00::1", 8000)
    assert engine.settings.worker_id == "fd00--1-8000"
    assert engine.settings.engine_url == "http://[fd00::1]:8000"
