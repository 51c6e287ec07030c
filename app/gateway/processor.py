"""Answers gateways that ask where requests go: Envoy's ext_proc, over gRPC."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

from starlette.exceptions import HTTPException

from app.core.errors import ConfigError
from app.core.settings.router import PickerSettings
from app.door.answer_request import is_of_door
from app.edge.app import Application, serve_router
from app.edge.errors import answer_to
from app.edge.reload import WatchedFiles
from app.edge.tls import certificate_of
from app.gateway import ext_proc, messages
from app.gateway.endpoints import Endpoints
from app.gateway.gateway_request import GatewayRequest
from app.gateway.grpc_server import Call, CallEndedError, GrpcServer, Status
from app.gateway.picker import GatewayCarriage
from app.http.client import JSON
from app.http.held import HeldBodies
from app.http.protocol import HEAD_TIMEOUT_S
from app.http.server import listen

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"
HEALTH = "/health"
"""Path that clients such as GuideLLM ask an engine first."""
LOOK_EVERY_S = 1.0
MAX_SILENT = 1024
"""Calls that have not said what they want; one more ends the one that waits for longest."""
SERVING, NOT_SERVING = 1, 2
"""States of a service, as gRPC's health has them."""


class Processor:
    """The gRPC service of a picker, beside a router's HTTP."""

    def __init__(self, app: Application, settings: PickerSettings) -> None:
        """Raises ConfigError if the port cannot be had."""
        self._app = app
        self._settings = settings
        self._held = HeldBodies(settings.max_held_bytes)
        self._endpoints = Endpoints()
        self._health = dict.fromkeys(("", LIVENESS, SERVICE), SERVING) | {READINESS: NOT_SERVING}
        self._silent: dict[asyncio.Timeout, None] = {}
        self._certificate = certificate_of(settings.tls_cert, settings.tls_key, "h2")
        if (certificate := self._certificate) is not None:
            files = WatchedFiles(
                "gRPC's certificates", lambda: certificate.files, certificate.reload
            )
            app.replica.watched.append(files)
        try:
            listening = listen(settings.host, settings.grpc_port)
        except ConfigError as error:
            raise ConfigError(f"{error}: grpc_port") from None
        self.port: int = listening.getsockname()[1]
        process, check = f"/{SERVICE}/Process", "/grpc.health.v1.Health/Check"
        methods = {process.encode(): self._process, check.encode(): self._check}
        self._server = GrpcServer(listening, methods)

    async def run(self) -> None:
        """Serve until cancelled; what goes on then is cut."""
        tls = self._certificate.context if self._certificate else None
        try:
            await self._server.start(tls)
            log.info("picker listening on port %d", self.port)
            while True:
                is_ready, _ = await self._app.replica.readiness.now()
                self._health[READINESS] = SERVING if is_ready else NOT_SERVING
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await self._server.stop(0)

    async def stop(self) -> None:
        """Take no more requests, and wait until those under way have ended, or for `drain_s`."""
        self._health = dict.fromkeys(self._health, NOT_SERVING)
        await self._server.stop(self._settings.drain_s)

    async def _check(self, call: Call) -> None:
        service = ext_proc.HealthCheckRequest.FromString(await call.read() or b"").service
        if service not in self._health:
            raise CallEndedError(Status.NOT_FOUND, f"no service {service}")
        state = ext_proc.HealthCheckResponse(status=self._health[service])
        await call.write(state.SerializeToString())

    async def _first(self, call: Call) -> bytes | None:
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
            words = "no request_headers have come"
            raise CallEndedError(Status.DEADLINE_EXCEEDED, words) from None
        finally:
            self._silent.pop(wait, None)

    async def _process(self, call: Call) -> None:
        said = await self._first(call)
        if said is None:
            return
        first = messages.parsed(said)
        if problem := messages.problem_of(first):
            raise CallEndedError(Status.INVALID_ARGUMENT, problem)
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
