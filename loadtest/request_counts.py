"""Calls of one warm request in a replica: counts, which no busy machine changes."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import app
from app.core.settings.router import RouterSettings
from app.http.server import Loop, listen
from app.http.supervisor import supervised
from app.local.redis_server import LOOPBACK, free_port
from app.state.round_trip import round_trip
from app.state.scripts import Call
from loadtest.servers import Shape

START_S = 120.0
AFTER_S = 0.2
"""Seconds after an answer, in which its records and reports come to their ends."""
WINDOWS = 8
WARM_UP = 12
_OURS = str(Path(app.__file__).parent)
_FOR_REQUESTS = ("decisions", "predictions", "records")
"""Supervised tasks that work for requests: all others go on beside them, and are not counted."""
_INLINE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Parts of functions."""
_IS_RESUMED = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR

Window = Counter[CodeType | str]
"""How often each function was called, and each other thing made."""


class _CountingLoop(Loop):
    """Counts in `window` what it makes for requests."""

    def __init__(self) -> None:
        super().__init__()
        self.window: Window = Counter()

    def _made(self, what: str) -> None:
        if not _is_beside(sys._getframe(2)):
            self.window[what] += 1

    def create_future(self) -> Any:
        self._made("futures")
        return super().create_future()

    def create_task(self, *args: Any, **about: Any) -> Any:
        self._made("tasks")
        return super().create_task(*args, **about)

    def call_later(self, *args: Any, **about: Any) -> Any:  # type: ignore[override]
        self._made("timers")
        return super().call_later(*args, **about)

    def call_at(self, *args: Any, **about: Any) -> Any:  # type: ignore[override]
        self._made("timers")
        return super().call_at(*args, **about)


def _is_beside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is supervised.__code__:
            return frame.f_locals["task"] not in _FOR_REQUESTS
        frame = frame.f_back
    return False


def _profiler(window: Window) -> Callable[[FrameType, str, Any], None]:
    """Counts calls of functions of the application. A coroutine that goes on is not called."""
    begun: set[FrameType] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in _INLINE or not code.co_filename.startswith(_OURS):
            return
        if frame in begun or _is_beside(frame):
            return
        if code.co_flags & _IS_RESUMED:
            begun.add(frame)
            window["awaits"] += bool(code.co_flags & inspect.CO_COROUTINE)
        window[code] += 1

    return profile


def _ask(connection: HTTPConnection, request: bytes) -> None:
    """Asks in a thread, of which nothing is counted. Raises ValueError unless the answer has status
    200."""
    head, _, body = request.partition(b"\r\n\r\n")
    line, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    connection.request("POST", line.split()[1], body, headers)
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise ValueError(f"{answer.status}: {text.decode()}")


async def _until_serving(connection: HTTPConnection, request: bytes) -> None:
    """Waits for an answer: a router listens before it knows its workers."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(START_S):
        while True:
            try:
                return await loop.run_in_executor(None, _ask, connection, request)
            except (OSError, HTTPException, ValueError):
                connection.close()
                await asyncio.sleep(0.2)


async def _window(connection: HTTPConnection, request: bytes) -> Window:
    loop: Any = asyncio.get_running_loop()
    window: Window = Counter()
    asking = loop.run_in_executor(None, _ask, connection, request)
    loop.window = window
    sys.setprofile(_profiler(window))
    try:
        await asking
        await asyncio.sleep(AFTER_S)
    finally:
        sys.setprofile(None)
        loop.window = Counter()
    return window


def _counts(windows: Sequence[Window]) -> dict[str, Any]:
    """Returns what each window has: what comes now and then is none of the request's."""
    least = {what: min(window[what] for window in windows) for what in windows[0]}
    called = {code: n for code, n in least.items() if isinstance(code, CodeType) and n}
    return {
        "functions": len(called),
        "files": len({code.co_filename for code in called}),
        "calls": sum(called.values()),
        "packages": dict(_by_package(called)),
        **{what: least.get(what, 0) for what in ("awaits", "tasks", "futures", "timers")},
        "round_trips": called.get(round_trip.__code__, 0),
        "redis": called.get(Call.words.__code__, 0),
        "called": {_name_of(code): n for code, n in called.items()},
    }


def _by_package(called: Mapping[CodeType, int]) -> Counter[str]:
    calls = Counter[str]()
    for code, number in called.items():
        calls[Path(code.co_filename).relative_to(_OURS).parts[0]] += number
    return calls


def _name_of(code: CodeType) -> str:
    return f"{code.co_filename[len(_OURS) + 1 :]}:{code.co_firstlineno} {code.co_qualname}"


async def _counted(settings: RouterSettings, shapes: Sequence[Shape]) -> dict[str, Any]:
    from app.edge.app import serve_router

    port = free_port()
    loop = asyncio.get_running_loop()
    serving = asyncio.ensure_future(serve_router(settings, listen(LOOPBACK, port)))
    connection = HTTPConnection(LOOPBACK, port, timeout=30)
    counts = {}
    try:
        await _until_serving(connection, shapes[0].request(0, 0))
        for shape in shapes:
            requests = [shape.request(n, n % 4) for n in range(WARM_UP + WINDOWS)]
            for request in requests[:WARM_UP]:
                await loop.run_in_executor(None, _ask, connection, request)
            counts[shape.name] = _counts([await _window(connection, r) for r in requests[WARM_UP:]])
    finally:
        connection.close()
        serving.cancel()
        await asyncio.wait([serving])
    return counts


def counts_of(settings: RouterSettings, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Returns by shape: functions of the application that a request calls, the files that they are
    in, how many calls that is, and of these coroutines; tasks, futures and timers that it makes;
    round trips to Redis, and commands that it is sent. called: which functions, and how often each.
    packages: calls by package."""
    with asyncio.Runner(loop_factory=_CountingLoop) as runner:
        return runner.run(_counted(settings, shapes))
