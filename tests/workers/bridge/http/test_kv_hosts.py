from __future__ import annotations

from workers.bridge.registration import kv_hosts


async def test_a_host_is_known_by_its_addresses_too() -> None:
    hosts = await kv_hosts("LOCALHOST", "10.9.8.7", "")
    assert "localhost" in hosts
    assert {"127.0.0.1", "::1"} & set(hosts)
    assert "10.9.8.7" in hosts


async def test_a_host_without_an_address_is_known_by_its_name() -> None:
    assert await kv_hosts("no-such-host.invalid") == ("no-such-host.invalid",)
