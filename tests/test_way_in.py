"""A newcomer's first commands where something is in the way."""

import asyncio
import re
import ssl

import aiohttp
import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer

from app.core.errors import EngineUnfit
from app.core.settings.kinds import parse_engines
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.child import ClusterError
from app.local.cluster import Cluster
from app.up import _listening
from tests.fakes.engine import fake_engine
from tests.fakes.faults import Faults
from workers.bridge.http.discovery import discover


def cluster(*engines):
    return Cluster(
        num_workers=0,
        num_replicas=1,
        router=RouterSettings(),
        worker=WorkerSettings(),
        engines=[engine.url for engine in engines],
        haproxy=False,
    )


async def test_a_certificate_that_is_not_trusted_is_named_with_what_mends_it(tmp_path, monkeypatch):
    authority, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async def models(_):
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=context)
    async with server:
        url = str(server.make_url("/")).rstrip("/")
        async with aiohttp.ClientSession() as http:
            with pytest.raises(EngineUnfit, match=r"is not trusted .*: set SSL_CERT_FILE") as error:
                await discover(http, url)
        assert url in str(error.value)
        trusted = tmp_path / "ca.pem"
        authority.cert_pem.write_to_path(str(trusted))
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context())
        async with aiohttp.ClientSession(connector=connector) as http:
            assert (await discover(http, url)).models == ("m",)


def test_an_engine_that_is_named_twice_is_one():
    assert parse_engines("http://a:1,http://b:1/, http://a:1/") == ["http://a:1", "http://b:1"]


def started(*engines):
    with cluster(*engines) as running:
        return _listening(running)


async def test_a_base_model_is_tried_and_no_adapter():
    async with fake_engine(models=("z",), adapters=("a",)) as engine:
        said = await asyncio.to_thread(started, engine)
    assert re.findall(r'"model": "(\w+)"', said) == ["z"]


async def test_an_engine_that_takes_no_key_leads_to_the_flag_for_it():
    async with fake_engine() as engine:
        engine.faults = Faults(status=401, body='{"error": {"message": "no"}}')
        with pytest.raises(ClusterError, match="--engine-api-key"):
            await asyncio.to_thread(started, engine)
