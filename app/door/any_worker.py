"""Requests that any worker of a model may answer, for which none is reserved."""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import dataclass, field

from app.core.failures import Failure
from app.core.outcomes import of_refusal
from app.core.types import WorkerKey
from app.core.verdicts import LACKS
from app.core.worker_report import WorkerInfo
from app.door import blame, whole_answer
from app.door.after_failure import TryCounts
from app.door.client import Client, Headers
from app.door.connection import ConnectFailed, EngineAnswer, UpstreamError
from app.door.engine_words import EngineWords
from app.door.errors import PathMissing, Unreached, WorkerFailed
from app.door.evidence import Evidence
from app.door.forwarding import renamed
from app.door.members import headers_back
from app.door.models import Model
from app.door.record import FailedTry, RequestRecord
from app.door.upstream import CONNECT_S, MAX_WHOLE_BYTES, Upstream
from app.http.json_body import JsonBody

log = logging.getLogger(__name__)

Path = tuple[WorkerKey, str]


class AnyWorker:
    """Has one worker after another answer: first those that fail least, and of these the one which
    is asked least.

    A worker that fails a path is asked last at once, and once its pause is over, one request at a
    time until it answers one; what it is asked besides goes on.
    """

    def __init__(self, upstream: Upstream, between_s: float, words: EngineWords) -> None:
        self._upstream = upstream
        self._words = words
        self._between_s = between_s
        self._asked = Counter[Path]()
        """Tries that go on, of each worker and path."""

    async def answer(
        self,
        model: Model,
        asked: JsonBody,
        path: str,
        headers: Headers,
        client: Client,
        record: RequestRecord,
        caller: str,
    ) -> None:
        """Have any worker of `model` answer. Raises WorkerFailed if none does."""
        body = asked.changed(renamed(asked.fields.get("model"), model.name))
        evidence = Evidence(model.router, caller)
        asking = _Asking(model, asked, body, path, headers, client, record, caller, evidence)
        try:
            while not asking.is_over:
                worker = self._fittest(asking)
                if worker is None:
                    break
                at = worker.key, path
                self._asked[at] += 1
                try:
                    if await self._is_answered(asking, worker):
                        return
                finally:
                    _count_down(self._asked, at)
            await evidence.judge(is_answered=False)
        finally:
            evidence.withdraw()
        raise asking.failed(f"model {model.name}: {asking.told}")

    def _fittest(self, asking: _Asking) -> WorkerInfo | None:
        """None: all were asked."""
        model, path = asking.model, asking.path
        shares, failed = model.failed_shares(path, asking.caller), model.failed(path)

        def unfitness(worker: WorkerInfo) -> tuple[float, int, float]:
            num_asked = self._asked[worker.key, path]
            is_tried = worker.key in failed and num_asked > 0
            share = 1.0 if is_tried else shares.get(worker.key, 0.0)
            return share, num_asked, random.random()

        left = [worker for worker in model.workers if worker.key not in asking.tried]
        return min(left, key=unfitness, default=None)

    async def _is_answered(self, asking: _Asking, worker: WorkerInfo) -> bool:
        """Whether that worker has answered, so that no other is to be asked."""
        model, path = asking.model, asking.path
        asking.tried.add(worker.key)
        asking.record.any_worker = str(worker.key)
        sent_ms = model.router.fleet.redis_now_ms
        answer: EngineAnswer | None = None
        try:
            answer = await self._upstream.send(
                *(worker.address, path, asking.headers, asking.body),
                connect_s=CONNECT_S,
                answer_s=self._between_s,
            )
            piece, is_all = await answer.read_up_to(MAX_WHOLE_BYTES, self._between_s)
            failure = whole_answer.failure_of(
                *(answer.status, answer.headers, piece), model=model.name, path=path, is_all=is_all
            )
            if failure is None:
                asking.has_begun = True
                await self._pass_on(asking, worker, answer, piece, is_all)
                return True
            words = self._words.of(piece, asking.asked)
            failure = asking.refused(worker, failure, answer.status, words)
        except UpstreamError as error:
            failure = asking.broke(worker, error)
        finally:
            if answer is not None:
                answer.abort()
        log.warning("worker %s: %s; %s", worker.key, asking.told, path)
        if failure is not None:
            await asking.evidence.add(failure, [worker], sent_ms, began=asking.has_begun)
        return False

    async def _pass_on(
        self, asking: _Asking, worker: WorkerInfo, answer: EngineAnswer, piece: bytes, is_all: bool
    ) -> None:
        """An answer that begins with that piece. Raises UpstreamBroken."""
        client, headers = asking.client, headers_back(answer.headers)
        status = whole_answer.status_of(piece) if answer.status == 200 else answer.status
        if is_all and status >= 400:
            asking.record.error = self._words.of(piece, asking.asked)
            outcome = of_refusal(status, is_failure=False, is_full=False)
            asking.record.end(outcome, ended_by="worker")
            await asking.evidence.judge(is_answered=False, is_own=True)
            await client.refuse(status, headers, piece, worker)
            return
        path = asking.path
        has_failed = worker.key in asking.model.failed(path)
        await asking.evidence.answered(worker, [LACKS + path] if has_failed else [])
        more = [(b"content-length", b"%d" % len(piece))] if is_all else []
        await client.start(answer.status, headers + more)
        while not is_all and piece:
            await client.send(piece)
            piece = await answer.read(self._between_s)
        await client.send(piece, last=True)


@dataclass(slots=True)
class _Asking:
    """One request. told: what the last worker made of it. refusals: failures that workers answered
    with, which are taken back if no other worker answers better."""

    model: Model
    asked: JsonBody
    body: bytes
    path: str
    headers: Headers
    client: Client
    record: RequestRecord
    caller: str
    evidence: Evidence
    tried: set[WorkerKey] = field(default_factory=set)
    told: str = "no worker takes requests"
    has_begun: bool = False
    _tally: TryCounts = field(default_factory=TryCounts)

    @property
    def is_over(self) -> bool:
        return self.has_begun or self._tally.is_over

    @property
    def failed(self) -> type[WorkerFailed]:
        """What is raised if no worker has answered."""
        if self._tally.nobody_had_it:
            return Unreached
        causes = {failure.cause for failure in self.record.failures}
        return PathMissing if causes == {"no_path"} else WorkerFailed

    def refused(self, worker: WorkerInfo, failure: Failure, status: int, words: str) -> Failure:
        """Returns what is to be counted. words: the engine's."""
        self._tally.refused += 1
        self.told = f"{failure.cause} (status {status}){words and f': {words}'}"
        result = "full" if blame.takes_no_more(failure) else "failed"
        self.record.failures.append(FailedTry(str(worker.key), result, failure.cause, words))
        return blame.at_path(failure, self.path)

    def broke(self, worker: WorkerInfo, error: UpstreamError) -> Failure | None:
        """The same of a worker that did not answer, or not to the end."""
        self.record.failures.append(FailedTry(str(worker.key), "failed", error.cause, str(error)))
        self._tally.broke(never_sent=isinstance(error, ConnectFailed))
        self.told = str(error)
        failure = blame.of_break(error.cause, is_late=error.is_late, is_whole=not self.has_begun)
        return failure and blame.at_path(failure, self.path)


def _count_down(counts: Counter[Path], at: Path) -> None:
    counts[at] -= 1
    if not counts[at]:
        del counts[at]
