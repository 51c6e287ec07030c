import asyncio

import aiohttp
import pytest

from tests.fakes.engine import fake_engine
from workers.bridge import kv_lease
from workers.bridge.http.engine import EngineHttp
from workers.bridge.kv_lease import disagreement, lease_of

KEPT = {"kv_transfer_params": {"do_remote_prefill": True}}


async def found(config, ends_s=0.3):
    """What is known of a lease as time goes by, of an engine that tells its settings so, and whose
    leases end so long after a prompt."""
    loop, asked = asyncio.get_running_loop(), list[float]()

    def answer(_):
        asked.append(loop.time())
        return KEPT

    def reading():
        now = loop.time()
        return sum(now > begun + ends_s for begun in asked), now

    says = {"/server_info": {"vllm_config": {"kv_transfer_config": config}}}
    async with fake_engine(says=says) as engine, aiohttp.ClientSession() as session:
        engine.paths["/v1/completions"] = answer
        return [s async for s in lease_of(EngineHttp(session, engine.url), "m", reading)]


@pytest.mark.parametrize(
    ("config", "lease_s"),
    [
        ({"kv_connector": "NixlConnector", "kv_connector_extra_config": {"a": 1}}, 30.0),
        (
            {
                "kv_connector": "NixlConnector",
                "kv_connector_extra_config": {"kv_lease_duration": 120},
            },
            120.0,
        ),
    ],
)
async def test_an_engine_that_tells_its_settings_is_asked(config, lease_s):
    assert await found(config) == [lease_s]


@pytest.mark.parametrize(
    "config",
    [
        None,
        "NixlConnector",
        {"kv_connector": "MultiConnector"},
        {
            "kv_connector": "NixlConnector",
            "kv_connector_extra_config": {"kv_lease_duration": "long"},
        },
    ],
)
async def test_of_any_other_it_is_measured_and_never_said_to_be_longer_than_it_was(
    config, monkeypatch
):
    monkeypatch.setattr(kv_lease, "LEAST_S", 0.05)
    monkeypatch.setattr(kv_lease, "LOOK_S", 0.01)
    seconds = await found(config)
    assert seconds == sorted(seconds)
    assert 0.05 < seconds[-1] <= 0.31


@pytest.mark.parametrize(
    ("said_s", "lease_s", "agree"), [(0.0, 20.0, True), (30.0, 29.4, True), (120.0, 20.0, False)]
)
def test_what_an_operator_says_is_compared(said_s, lease_s, agree):
    assert (disagreement(said_s, lease_s) == "") is agree
