"""Engines at the addresses that a name has, or where its SRV records say that they are."""

import asyncio
import random
import socket
import sys
from functools import partial
from urllib.parse import urlsplit

import pytest
from dns import rcode
from dns.name import Name

from app.core.errors import ConfigError, MissingPackage
from tests.cancelling import cancel_often
from tests.eventually import eventually
from tests.workers.discovery.fleets import engines, running, settings, until_live
from tests.workers.discovery.name_server import name_server
from workers.discovery import dns
from workers.discovery.engine import Absences
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
        look = dns.look_of(process.engine_dns)
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
        dns.look_of(text)


def test_an_address_of_version_6_is_a_worker_too():
    engine = dns.engine_at(settings(), "fd00::1", 8000)
    assert engine.settings.worker_id == "fd00--1-8000"
    assert engine.settings.engine_url == "http://[fd00::1]:8000"


NAME = "_http._tcp.vllm.models.svc"
KNOWN = f"{NAME}.cluster.local."


async def test_engines_are_where_records_say(redis, tmp_path, monkeypatch):
    monkeypatch.setattr(dns, "LOOK_S", 0.02)
    async with engines(2) as some, name_server() as server:
        ports = [urlsplit(one.url).port for one in some]
        server.records = {
            f"{KNOWN} SRV": [f"0 50 {port} pod.test." for port in ports],
            "pod.test. A": ["127.0.0.1"],
        }
        look = partial(dns.srv_places, server.resolver, KNOWN)
        source = partial(dns.follow, settings(), look)
        async with running(redis, tmp_path, source):
            await until_live(redis, *(f"127.0.0.1-{port}" for port in ports))


async def test_no_stop_of_looking_up_records_is_lost(monkeypatch):
    monkeypatch.setattr(dns, "LOOK_S", 0.0)
    async with name_server() as server:
        server.records = {f"{KNOWN} SRV": ["0 0 8000 pod.test."], "pod.test. A": ["127.0.0.1"]}
        look = partial(dns.srv_places, server.resolver, KNOWN)
        await cancel_often(lambda: dns.follow(settings(), look, lambda _: None))


async def test_a_name_is_searched_for_as_the_system_does():
    async with name_server() as server:
        server.records = {f"{KNOWN} SRV": ["0 0 8000 pod.test."], "pod.test. A": ["10.0.0.1"]}

        def searching():
            resolver = server.resolver()
            resolver.search = [Name(("cluster", "local", ""))]
            resolver.ndots = 5
            return resolver

        assert await dns.srv_places(searching, NAME) == {("10.0.0.1", 8000)}
        with pytest.raises(OSError, match=r"no SRV records are known: .* not exist"):
            await dns.srv_places(server.resolver, NAME)


async def test_an_answer_that_is_too_large_for_udp_comes_over_tcp():
    async with name_server() as server:
        server.records = {f"{KNOWN} SRV": [f"0 0 8000 pod-{i}.test." for i in range(100)]}
        server.extra = {f"pod-{i}.test. A": [f"10.0.1.{i}"] for i in range(100)}
        found = await dns.srv_places(server.resolver, KNOWN)
        assert found == {(f"10.0.1.{i}", 8000) for i in range(100)}
        # The addresses came with the records.
        assert server.asked == [f"udp {KNOWN} SRV", f"tcp {KNOWN} SRV"]


async def test_a_record_is_one_engine_though_its_target_has_two_addresses():
    async with name_server() as server:
        server.records = {
            f"{KNOWN} SRV": ["0 0 8000 a.test.", "0 0 8001 b.test.", "0 0 8002 c.test."],
            "a.test. AAAA": ["fd00::1"],
            "a.test. A": ["10.0.0.2", "10.0.0.1"],
            "b.test. AAAA": ["fd00::2"],
        }
        server.extra = {"c.test. A": ["10.0.0.3"], "c.test. AAAA": ["fd00::3"]}
        found = await dns.srv_places(server.resolver, KNOWN)
        assert found == {("10.0.0.1", 8000), ("fd00::2", 8001), ("10.0.0.3", 8002)}


async def test_a_target_without_an_address_is_passed_over():
    async with name_server() as server:
        server.records = {
            f"{KNOWN} SRV": ["0 0 8000 a.test.", "0 0 8000 gone.test.", "0 0 8000 ."],
            "a.test. A": ["10.0.0.1"],
        }
        assert await dns.srv_places(server.resolver, KNOWN) == {("10.0.0.1", 8000)}


@pytest.mark.parametrize("code", [rcode.NXDOMAIN, rcode.SERVFAIL, rcode.REFUSED])
async def test_a_server_that_does_not_know_says_nothing(code):
    async with name_server() as server:
        server.records = {f"{KNOWN} SRV": ["0 0 8000 a.test."]}
        server.rcode = code
        with pytest.raises(OSError, match="no SRV records are known"):
            await dns.srv_places(server.resolver, KNOWN)


async def test_a_server_that_is_silent_says_nothing(monkeypatch):
    monkeypatch.setattr(dns, "DEADLINE_S", 0.1)
    async with name_server() as server:
        server.is_silent = True
        with pytest.raises(OSError, match=r"no SRV records are known: .* timed out"):
            await dns.srv_places(server.resolver, KNOWN)


async def test_without_the_package_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "dns"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackage, match="discovery"):
        await source_of(settings(engine_dns=NAME))
