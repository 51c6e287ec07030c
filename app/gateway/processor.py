"""Answers gateways that ask where requests go: Envoy's ext_proc, over gRPC."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from starlette.exceptions import HTTPException

from app.core.errors import ConfigError
from app.core.settings.router import PickerSettings
from app.door.answer_request import is_of_door
from app.edge.app import Application, serve_router
from app.edge.errors import answer_to
from app.edge.tls import certificate_of
from app.gateway import ext_proc, messages
from app.gateway.endpoints import Endpoints
from app.gateway.gateway_request import GatewayRequest
from app.gateway.picker import GatewayCarriage
from app.http.client import JSON
from app.http.held import HeldBodies
from app.http.protocol import HEAD_TIMEOUT_S, max_connections

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"
HEALTH = "/health"
"""Path that clients such as GuideLLM ask an engine first."""
LOOK_EVERY_S = 1.0
_OPTIONS = (
    # Else two processes may have the same port, and share what comes.
    ("grpc.so_reuseport", 0),
    # A gateway whose machine is gone does not hang up.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.max_receive_message_length", messages.MAX_BYTES),
)
MAX_SILENT = 1024
"""Calls that have not said what they want; one more ends the one that waits for longest."""
_Health = health_pb2.HealthCheckResponse


class Processor:
    """The gRPC service of a picker, beside a router's HTTP."""

    def __init__(self, app: Application, settings: PickerSettings) -> None:
        """Raises ConfigError if the port cannot be had."""
        self._app = app
        self._settings = settings
        self._held = HeldBodies(settings.max_held_bytes)
        self._endpoints = Endpoints()
        self._health = health.aio.HealthServicer()
        self._silent: dict[asyncio.Timeout, None] = {}
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=max_connections())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=messages.parsed,
            response_serializer=ext_proc.ProcessingResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Process": process})
        self._server.add_generic_rpc_handlers((handler,))
        self.port = self._listen()

    def _listen(self) -> int:
        settings = self._settings
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        where = f"{host}:{settings.grpc_port}"
        certificate = certificate_of(settings.tls_cert, settings.tls_key)
        try:
            if certificate is None:
                return int(self._server.add_insecure_port(where))
            return int(self._server.add_secure_port(where, _credentials(*certificate.files)))
        except RuntimeError:
            raise ConfigError(f"cannot listen on {where}: grpc_port is taken") from None

    async def run(self) -> None:
        """Serve until cancelled; what goes on then is cut."""
        for name in ("", LIVENESS, SERVICE):
            await self._health.set(name, _Health.SERVING)
        await self._health.set(READINESS, _Health.NOT_SERVING)
        await self._server.start()
        log.info("picker listening on port %d", self.port)
        try:
            while True:
                is_ready, _ = await self._app.replica.readiness.now()
                state = _Health.SERVING if is_ready else _Health.NOT_SERVING
                await self._health.set(READINESS, state)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await self._server.stop(None)

    async def stop(self) -> None:
        """Take no more requests, and wait until those under way have ended, or for `drain_s`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._settings.drain_s)

    async def _first(self, call: grpc.aio.ServicerContext) -> Any:
        """Returns what a call says first. One that says nothing is ended."""
        if len(self._silent) >= MAX_SILENT:
            longest = next(iter(self._silent))
            del self._silent[longest]
            longest.reschedule(0.0)
        wait = asyncio.timeout(HEAD_TIMEOUT_S)
        self._silent[wait] = None
        try:
            async with wait:
                return await call.read()
        except TimeoutError:
            await call.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no request_headers have come")
        finally:
            self._silent.pop(wait, None)

    async def _process(self, _: object, call: grpc.aio.ServicerContext) -> None:
        first = await self._first(call)
        if first is grpc.aio.EOF:
            return
        if problem := messages.problem_of(first):
            await call.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        gateway = GatewayRequest(call, first, self._held)
        settings = self._settings
        carrier = partial(
            GatewayCarriage,
            gateway,
            self._endpoints,
            settings.send_ids,
            settings.obey_test_header,
        )
        scope = gateway.scope(carrier)
        try:
            if is_of_door(scope["path"]) or scope["path"] == HEALTH:
                await self._app(scope, gateway.receive, gateway.send)
            else:
                status, headers, body = answer_to(HTTPException(404), scope["path"])
                await gateway.say(messages.at_once(status, [JSON, *headers], body))
        finally:
            gateway.close()


def _credentials(cert: str, key: str) -> grpc.ServerCredentials:
    """Returns credentials whose files are read again for each connection."""

    def read() -> grpc.ServerCertificateConfiguration:
        pair = Path(key).read_bytes(), Path(cert).read_bytes()
        return grpc.ssl_server_certificate_configuration([pair])

    return grpc.dynamic_ssl_server_credentials(read(), read)


async def serve(
    settings: PickerSettings,
    listening: socket.socket,
    *,
    file: str = "",
    read: Callable[[], PickerSettings] | None = None,
) -> None:
    """Run until the process is told to stop. Raises ConfigError for bad settings, or if `grpc_port`
    is taken."""
    beside = partial(Processor, settings=settings)
    await serve_router(settings, listening, file=file, read=read, beside=beside)
