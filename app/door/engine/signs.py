"""Signs of life of engines, as a router sees them without the engines' agents."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import orjson

from app.core.worker_report import WorkerInfo
from app.door.engine.connection import UpstreamBroken, UpstreamError
from app.door.engine.upstream import Upstream
from app.door.engine.waits import Wait
from app.door.lifecycle import Lifecycle

ANSWER_S = 5.0
MAX_BYTES = 1 << 20
"""Bytes of an answer that are read."""
LOOK_EVERY_S = 0.5
PROBE_S = 2.0
UNTOLD = (401, 403, 404, 405)
"""Statuses of an engine that lives, and tells no more without its key, or at this path."""


class EngineSigns:
    """Asks engines whether they are well."""

    def __init__(self, upstream: Upstream, worker_key: str) -> None:
        self._upstream = upstream
        self._headers = [(b"authorization", b"Bearer " + worker_key.encode())] if worker_key else []

    async def answers(self, worker: WorkerInfo) -> bool:
        """Whether an engine answers at the worker's address, says that it is well, and lists the
        model that the worker registered: another may have got the address."""
        looks = [self._lists(worker)]
        # There /health may compute a token, and take as long as the queue does.
        if not worker.engine.lower().startswith(("sglang", "openai")):
            looks.append(self._is_well(worker))
        return all(await asyncio.gather(*looks))

    async def _is_well(self, worker: WorkerInfo) -> bool:
        status, _ = await self._get(worker, "/health")
        return status == 200 or status in UNTOLD

    async def _lists(self, worker: WorkerInfo) -> bool:
        status, body = await self._get(worker, "/v1/models")
        if status != 200:
            return status in UNTOLD
        try:
            listed = {card["id"] for card in orjson.loads(body)["data"]}
        except (ValueError, LookupError, TypeError):
            return False
        return listed.issuperset(worker.models)

    async def _get(self, worker: WorkerInfo, path: str) -> tuple[int, bytes]:
        """Returns status and body; 0 if no answer comes in time."""
        try:
            answer = await self._upstream.send(
                *(worker.address, path, self._headers, b""),
                method=b"GET",
                connect_s=ANSWER_S,
                answer_s=ANSWER_S,
                kept=False,
            )
            body, is_all = await answer.read_up_to(MAX_BYTES, ANSWER_S)
        except UpstreamError:
            return 0, b""
        if not is_all:
            answer.abort()
        return answer.status, body


Awaited = tuple[Lifecycle, WorkerInfo]
"""A request, and the worker that it waits for."""


def _is_vain(wait: Wait[Awaited]) -> bool:
    life, worker = wait.about
    return life.is_missing(worker)


def _is_gone() -> UpstreamBroken:
    return UpstreamBroken("is gone: its lease has run out, and it does not answer", cause="gone")


class MissingWorkers:
    """Fails requests whose worker has vanished: its lease has run out and /health does not answer,
    although the connection is still open."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._waiting: set[Wait[Awaited]] = set()

    def waiting(self, life: Lifecycle, worker: WorkerInfo) -> Wait[Awaited]:
        """Returns a context manager around a request's wait for a worker. Raises UpstreamBroken
        within it once the worker is gone."""
        return Wait(self._waiting, _is_gone, (life, worker))

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            by_address: defaultdict[str, list[Wait[Awaited]]] = defaultdict(list)
            for wait in self._waiting:
                if _is_vain(wait):
                    by_address[wait.about[1].address].append(wait)
            await asyncio.gather(*(self._look_at(*missing) for missing in by_address.items()))

    async def _look_at(self, address: str, waits: list[Wait[Awaited]]) -> None:
        try:
            answer = await self._upstream.send(
                address, "/health", (), b"", method=b"GET", connect_s=PROBE_S, answer_s=PROBE_S
            )
        except UpstreamError:
            for wait in waits:
                if wait in self._waiting and _is_vain(wait):
                    wait.end()
        else:
            answer.abort()  # whatever it says, it is there
