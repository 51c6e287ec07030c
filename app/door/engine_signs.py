"""Whether an engine lives, as a router sees it without the engine's agent."""

from __future__ import annotations

import asyncio

import orjson

from app.core.worker_report import WorkerInfo
from app.door.connection import UpstreamError
from app.door.upstream import Upstream

ANSWER_S = 5.0
"""For one look; several may be on their way."""
MAX_BYTES = 1 << 20
"""Of an answer."""
UNTOLD = (401, 403, 404, 405)
"""An engine that answers so lives, and says no more to those without its key, or on this path."""


class EngineSigns:
    """Asks engines."""

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
        """Status and body; 0: there is no answer, or not in time."""
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
