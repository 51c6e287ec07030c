"""Serving of an ASGI application until the process is told to stop."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import math
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import uvicorn
import uvloop
from uvicorn.lifespan.on import LifespanOn

from app.core.errors import ConfigError, KvrouteError
from app.http.held import HeldBodies
from app.http.protocol import HEAD_TIMEOUT_S, NOTICED_S, Connections, Protocol
from app.output import ERR

log = logging.getLogger(__name__)

BLOCKED_S = 3.0
"""Seconds after which the process is ended if its main thread heeds no signal or is slow to log."""


def end_within(seconds: float, loop: asyncio.AbstractEventLoop) -> None:
    """Ends this process after `seconds`, with status 1, and logs which tasks of `loop` are left
    then. Only the main thread may call this. A later call can bring the end forward, not put it
    off."""

    def end(*_: object) -> None:
        log.error("not ended %g s after it was told to stop; its tasks and threads:", seconds)
        for task in asyncio.all_tasks(loop):
            log.error("did not end: %s", where(task))
        ERR.flush()
        faulthandler.dump_traceback()  # of all threads
        os._exit(1)

    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if not 0 < left_s <= seconds:
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        faulthandler.dump_traceback_later(seconds + BLOCKED_S, exit=True)


def where(task: asyncio.Task[Any]) -> str:
    """Returns a task's coroutines, the outermost first, and the line at which the last waits."""
    coroutine: Any = task.get_coro()
    names, place = [], ""
    while frame := getattr(coroutine, "cr_frame", None):
        names.append(frame.f_code.co_qualname)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        coroutine = coroutine.cr_await
    return f"{' > '.join(names)} at {place}"


T = TypeVar("T")

GC_THRESHOLD = 20_000
KEEP_ALIVE_S = 75
"""Seconds a connection may be idle. Balancers and clients should be the first to close it (most do
after 60 s or less), as a request that meets its closing is lost."""
DRAIN_S = 2.0
"""Seconds that open responses go on after the signal to stop, where all are metrics and probes."""
ENDING_S = 1
"""Seconds that responses go on once they are told to end."""
LATE_S = 6.0
"""Seconds that a process may take to end after its open responses have."""


class Loop(uvloop.Loop):
    """Event loop whose listeners give a TLS handshake as much time as the head of a request."""

    async def create_server(self, *where: Any, ssl: Any = None, **options: Any) -> Any:
        if ssl is not None:
            options["ssl_handshake_timeout"] = HEAD_TIMEOUT_S
        return await super().create_server(*where, ssl=ssl, **options)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` on uvloop, with a fifth less CPU per request than asyncio.run."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; clients may connect at once, and are answered once it is served.

    `::` takes connections over IPv4 as well, where the machine can. Raises ConfigError if the
    address cannot be taken, or is empty: to Python, that is every address of the machine, which
    nobody means who writes `--host "$UNSET"`.
    """
    if not host:
        raise ConfigError(f"cannot listen on :{port}: the host is empty")
    try:
        if ":" not in host:
            return socket.create_server((host, port), backlog=1024)
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6,
            backlog=1024,
            dualstack_ipv6=socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        # Python appends the address once more.
        reason = str(error.strerror or error).partition(" (while")[0]
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from None


class _Server(uvicorn.Server):
    """uvicorn's server, which also stops when the application's lifespan fails. on_stop: awaited
    before open responses are waited for. on_late: called `drain_s` after the signal."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_stop: Callable[[], Awaitable[None]],
        on_late: Callable[[], object],
        drain_s: float,
        on_refused: Callable[[str], object],
        held: HeldBodies | None,
    ) -> None:
        super().__init__(config)
        self.server_state = self._connections = Connections(on_refused, held)
        self._drain_s = drain_s
        self._on_stop = on_stop
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops; at a second signal, ends open responses at once, and then the process."""
        loop = self._loop
        if isinstance(loop, Loop):  # which is that of a process
            end_within(2 * ENDING_S if self.should_exit else self._drain_s + LATE_S, loop)
        if self.should_exit:
            loop.call_soon_threadsafe(self._on_late)
            force_exit = partial(setattr, self, "force_exit", True)
            loop.call_soon_threadsafe(loop.call_later, ENDING_S, force_exit)
        self.should_exit = True

    @property
    def failed(self) -> bool:
        return isinstance(self.lifespan, LifespanOn) and self.lifespan.shutdown_failed

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.failed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # What `on_stop` waits for is of the same time: of two waits in a row whoever stops this
        # process would not see the end of the second.
        late = asyncio.get_running_loop().call_later(self._drain_s, self._on_late)
        try:
            await self._on_stop()
            self._connections.closes_in_s = min(NOTICED_S, self._drain_s)
            await super().shutdown(sockets)
        finally:
            late.cancel()


async def nothing() -> None:
    pass


def collect_seldom() -> None:
    """Makes Python look for garbage seldom, and not among what is loaded by now. Only the first
    call does: what was garbage at a later one would be kept for ever."""
    if gc.get_threshold()[0] == GC_THRESHOLD:
        return
    # That stays, and scanning it in vain holds up requests and block events.
    gc.freeze()
    # Next to nothing here is in cycles. With prompts of thousands of numbers in flight, each young
    # collection scans all of those.
    gc.set_threshold(GC_THRESHOLD)


async def serve(
    app: Any,
    *sockets: socket.socket,
    on_stop: Callable[[], Awaitable[None]] = nothing,
    on_late: Callable[[], object] = lambda: None,
    drain_s: float = DRAIN_S,
    on_refused: Callable[[str], object] = lambda _: None,
    held: HeldBodies | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serves until SIGINT, SIGTERM or cancellation; returns when the open responses have ended.

    on_stop: awaited first, while requests are still accepted, to leave the rotation. on_late:
    called if responses are still open, or `on_stop` waits, `drain_s` after the signal, so that they
    end by themselves; ENDING_S later they are cut off. In a process that `run` runs, the process
    ends LATE_S after `drain_s` at the latest, and soon after a second signal. on_refused: called
    with the code of the error for each request that is refused before the application sees it.
    held: bounds the bodies of all callers together; None: by default. tls: the only protocol
    spoken; None: plain HTTP.
    Raises ConfigError if the application does not start, KvrouteError if its lifespan fails later.
    """
    collect_seldom()
    config = _config(app, drain_s, tls)
    server = _Server(config, on_stop, on_late, drain_s, on_refused, held)
    serving = asyncio.ensure_future(server.serve(sockets=list(sockets)))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        # If it were cancelled itself, uvicorn would log a crash of the application.
        server.should_exit = True
        await serving
        raise
    if not server.started:
        raise ConfigError("the application did not start")
    if server.failed:
        raise KvrouteError("the application failed; see the log above")


def _config(app: Any, drain_s: float, tls: ssl.SSLContext | None) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        # Nothing here asks who the client is.
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(drain_s) + ENDING_S,
    )
    config.load()
    config.ssl = tls
    return config
