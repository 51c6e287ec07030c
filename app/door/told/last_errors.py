"""Tells Redis what requests fail of: seldom, and beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from app.core.errors import KvrouteError
from app.core.keys import Keyspace
from app.core.outcomes import UNFIT, Kind, kind_of
from app.door.record import RequestRecord
from app.state import last_errors
from app.state.last_errors import Error
from app.state.scripts import ScriptRunner

EVERY_S = 1.0
AGAIN_S = 10.0
"""Seconds until the same error is told again."""
MAX_AT_ONCE = 10
"""Told in a second; the others wait for the next one."""
MAX_KNOWN = 200
"""Errors that are told apart; what comes beyond is not told."""
QUIET_S = 60.0
"""Seconds after which an error is forgotten."""
TOLD = (Kind.ENGINE, Kind.CUT, Kind.UNFIT, Kind.REFUSED, Kind.LEFT_BEFORE)
LEFT = "its client left, and had waited for a first token"


@dataclass(slots=True)
class _Known:
    error: Error
    count: int = 0
    due_s: float = 0.0
    last_s: float = 0.0


class LastErrors:
    """Errors of one replica. runner: of a namespace; None if there is none. own: its own
    namespace."""

    def __init__(self, runner: Callable[[str], ScriptRunner | None], own: str) -> None:
        self._runner = runner
        self._own = own
        self._known: dict[tuple[str, ...], _Known] = {}

    def ended(self, record: RequestRecord) -> None:
        """Notes what a request has met, even if it was answered in the end. No I/O."""
        for namespace, error in _errors(record, self._own):
            kind = namespace, *error.kind
            known = self._known.get(kind)
            if known is None:
                if len(self._known) >= MAX_KNOWN:
                    continue
                known = self._known[kind] = _Known(error)
            known.error, known.last_s = error, record.ended_s
            known.count += 1

    async def run(self) -> None:
        """Tells what is due, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.tell(time.monotonic())

    async def tell(self, now_s: float) -> None:
        """Tells what is due. now_s: monotonic."""
        due = [kind for kind, known in self._known.items() if known.count and known.due_s <= now_s]
        for kind in due[:MAX_AT_ONCE]:
            known, runner = self._known[kind], self._runner(kind[0])
            known.due_s = now_s + AGAIN_S
            if runner is None:
                continue
            count, known.count = known.count, 0
            try:
                await runner.one(last_errors.record(Keyspace(kind[0]), known.error, count))
            except KvrouteError:  # while Redis is away, they are counted on
                known.count += count
        for kind in [k for k, known in self._known.items() if now_s - known.last_s > QUIET_S]:
            del self._known[kind]


def _errors(record: RequestRecord, own: str) -> Iterator[tuple[str, Error]]:
    """Yields errors with their namespaces."""
    namespace = record.model.namespace if record.model else own
    for worker, _, cause, words in record.failures:
        yield namespace, Error(record.model_name, worker, cause, words, record.request_id)
    kind = kind_of(record.outcome)
    if kind not in TOLD or (record.failures and kind is not Kind.REFUSED):
        return
    is_ours = kind is Kind.REFUSED
    cause = f"status_{record.status}" if record.outcome == UNFIT else record.outcome
    worker = "" if is_ours else record.worker
    words = record.error or (LEFT if kind is Kind.LEFT_BEFORE else "")
    yield namespace, Error(record.model_name, worker, cause, words, record.request_id)
