"""Engines where the SRV records of a name say that they are."""

import sys
from functools import partial
from urllib.parse import urlsplit

import dns.rcode
import pytest

from app.core.errors import MissingPackage
from tests.cancelling import cancel_often
from tests.workers.discovery.fleets import engines, running, settings, until_live
from tests.workers.discovery.name_server import name_server
from workers.discovery import dns as by_name
from workers.discovery import source, srv

NAME = "_http._tcp.vllm.models.svc"
KNOWN = f"{NAME}.cluster.local."


async def test_engines_are_where_records_say(redis, tmp_path, monkeypatch):
    monkeypatch.setattr(by_name, "LOOK_S", 0.02)
    async with engines(2) as some, name_server() as server:
        ports = [urlsplit(one.url).port for one in some]
        server.records = {
            f"{KNOWN} SRV": [f"0 50 {port} pod.test." for port in ports],
            "pod.test. A": ["127.0.0.1"],
        }
        look = partial(srv.places, KNOWN, server.resolver)
        source = partial(by_name.follow, settings(), look)
        async with running(redis, tmp_path, source):
            await until_live(redis, *(f"127.0.0.1-{port}" for port in ports))


async def test_no_stop_of_looking_up_records_is_lost(monkeypatch):
    monkeypatch.setattr(by_name, "LOOK_S", 0.0)
    async with name_server() as server:
        server.records = {f"{KNOWN} SRV": ["0 0 8000 pod.test."], "pod.test. A": ["127.0.0.1"]}
        look = partial(srv.places, KNOWN, server.resolver)
        await cancel_often(lambda: by_name.follow(settings(), look, lambda _: None))


async def test_a_name_is_searched_for_as_the_system_does():
    async with name_server() as server:
        server.records = {f"{KNOWN} SRV": ["0 0 8000 pod.test."], "pod.test. A": ["10.0.0.1"]}

        def searching():
            resolver = server.resolver()
            resolver.search = [srv.Name(("cluster", "local", ""))]
            resolver.ndots = 5
            return resolver

        assert await srv.places(NAME, searching) == {("10.0.0.1", 8000)}
        with pytest.raises(OSError, match=r"no SRV records are known: .* not exist"):
            await srv.places(NAME, server.resolver)


async def test_an_answer_that_is_too_large_for_udp_comes_over_tcp():
    async with name_server() as server:
        server.records = {f"{KNOWN} SRV": [f"0 0 8000 pod-{i}.test." for i in range(100)]}
        server.extra = {f"pod-{i}.test. A": [f"10.0.1.{i}"] for i in range(100)}
        found = await srv.places(KNOWN, server.resolver)
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
        found = await srv.places(KNOWN, server.resolver)
        assert found == {("10.0.0.1", 8000), ("fd00::2", 8001), ("10.0.0.3", 8002)}


async def test_a_target_without_an_address_is_passed_over():
    async with name_server() as server:
        server.records = {
            f"{KNOWN} SRV": ["0 0 8000 a.test.", "0 0 8000 gone.test.", "0 0 8000 ."],
            "a.test. A": ["10.0.0.1"],
        }
        assert await srv.places(KNOWN, server.resolver) == {("10.0.0.1", 8000)}


@pytest.mark.parametrize("rcode", [dns.rcode.NXDOMAIN, dns.rcode.SERVFAIL, dns.rcode.REFUSED])
async def test_a_server_that_does_not_know_says_nothing(rcode):
    async with name_server() as server:
        server.records = {f"{KNOWN} SRV": ["0 0 8000 a.test."]}
        server.rcode = rcode
        with pytest.raises(OSError, match="no SRV records are known"):
            await srv.places(KNOWN, server.resolver)


async def test_a_server_that_is_silent_says_nothing(monkeypatch):
    monkeypatch.setattr(srv, "DEADLINE_S", 0.1)
    async with name_server() as server:
        server.is_silent = True
        with pytest.raises(OSError, match=r"no SRV records are known: .* timed out"):
            await srv.places(KNOWN, server.resolver)


async def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "workers.discovery.srv", None)
    monkeypatch.delattr("workers.discovery.srv")
    for name in [name for name in sys.modules if name.partition(".")[0] == "dns"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "workers.discovery.srv")
    with pytest.raises(MissingPackage, match="discovery"):
        await source.source_of(settings(engine_dns=NAME))
