"""Envoy with deploy/envoy.yaml, and pickers to be killed."""

import asyncio
import os
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import httpx

from app.local.balancers import rendered
from app.local.redis_server import free_port
from tests.door.conftest import until_healthy
from tests.e2e.engines import ROOT, Process
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE

ENVOY = Path(os.environ.get("KVROUTE_TEST_GATEWAY") or ROOT / ".venv-gateway") / "bin" / "envoy"
SUBSET_BY_HEADER = """\
                  - name: envoy.filters.http.header_to_metadata
                    typed_config:
                      "@type": type.googleapis.com/\
envoy.extensions.filters.http.header_to_metadata.v3.Config
                      request_rules:
                        - header: x-subset
                          on_header_present:
                            metadata_namespace: envoy.lb.subset_hint
                            key: x-gateway-destination-endpoint-subset
                          remove: true
"""
"""What stands in for a gateway that confines requests to some endpoints."""
HTTP_2_ALONE = """\
static_resources:
  listeners:
    - address: {socket_address: {address: 127.0.0.1, port_value: %d}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/\
envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: engine
                codec_type: HTTP2
                route_config:
                  virtual_hosts:
                    - name: engine
                      domains: ["*"]
                      routes: [{match: {prefix: "/"}, route: {cluster: engine, timeout: 0s}}]
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/\
envoy.extensions.filters.http.router.v3.Router
  clusters:
    - name: engine
      load_assignment:
        cluster_name: engine
        endpoints:
          - lb_endpoints:
              - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: %d}}}
"""
"""What makes an engine one that speaks no HTTP/1.1: its port, and the engine's."""
_FILTER = "                  - name: envoy.filters.http.ext_proc\n"


def place_of(url):
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


@asynccontextmanager
async def envoy(pickers, engines, **options):
    """A client of an Envoy that asks the pickers at these ports, once it serves a model.

    engines: base URLs. options: of `rendered`.
    """
    places = [("127.0.0.1", port) for port in pickers], [place_of(url) for url in engines]
    port = free_port()
    text = rendered(("127.0.0.1", port), *places, **options)
    text = text.replace(_FILTER, SUBSET_BY_HEADER + _FILTER)
    async with _running(text):
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await eventually(lambda: _models(client))
            yield client


@asynccontextmanager
async def http_2_alone(engine_port):
    """Where an engine speaks HTTP/2, and no HTTP/1.1."""
    port = free_port()
    async with _running(HTTP_2_ALONE % (port, engine_port)):
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def _running(text):
    with TemporaryDirectory() as folder:
        config = Path(folder) / "envoy.yaml"
        config.write_text(text)
        command = [str(ENVOY), "-c", str(config), "--concurrency", "1", "--disable-hot-restart"]
        process = await asyncio.create_subprocess_exec(*command, "-l", "critical")
        try:
            yield
        finally:
            process.terminate()
            await process.wait()


async def _models(client):
    with suppress(httpx.TransportError, ValueError, KeyError):
        return list((await client.get("/v1/models")).json()["data"])
    return []


@contextmanager
def picker(redis_url, port, **options):
    """One that is a process, to be killed. port: of gRPC, by which engines know it as well."""
    given = {"redis-url": redis_url, "namespace": NAMESPACE, "port": 0, "grpc-port": port}
    given["worker-key"] = port
    more = {name.replace("_", "-"): value for name, value in options.items()}
    flags = [f"--{name}={value}" for name, value in (given | more).items()]
    process = Process("picker", *flags, "--redis-timeout-ms=5000", "--show-decision")
    with process.ending():
        yield process


@asynccontextmanager
async def pickers(redis_url, num, **options):
    """Several, and their ports."""
    ports = [free_port() for _ in range(num)]
    with _all(redis_url, ports, **options) as processes:
        for process in processes:
            async with httpx.AsyncClient(base_url=process.url) as http:
                await until_healthy(http)
        yield ports, processes


@contextmanager
def _all(redis_url, ports, **options):
    if not ports:
        yield []
        return
    with (
        picker(redis_url, ports[0], **options) as first,
        _all(redis_url, ports[1:], **options) as others,
    ):
        yield [first, *others]
