"""Requests that any worker of a model may answer, for which none is reserved."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.core.failures import Failure
from app.core.outcomes import of_refusal
from app.core.types import WorkerKey
from app.core.verdicts import LACKS
from app.core.worker_report import WorkerInfo
from app.door import blame
from app.door.engine.connection import ConnectFailed, EngineAnswer, UpstreamError
from app.door.engine.upstream import CONNECT_S, MAX_WHOLE_BYTES, Upstream
from app.door.engine.words import EngineWords
from app.door.errors import PathMissing, Unreached, WorkerFailed
from app.door.evidence import Evidence, TryCounts
from app.door.forwarding import Headers, Recipient, headers_back, renamed
from app.door.model import Model
from app.door.record import FailedTry, RequestRecord
from app.http.json_body import JsonBody

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Question:
    """One request. told: what the last worker made of it. has_begun: its client has got some of an
    answer."""

    model: Model
    asked: JsonBody
    path: str
    headers: Headers
    client: Recipient
    record: RequestRecord
    evidence: Evidence
    told: str = "no worker takes requests"
    has_begun: bool = False
    counts: TryCounts = field(default_factory=TryCounts)

    @property
    def error(self) -> type[WorkerFailed]:
        """The error that the request ends by if no worker has answered."""
        if self.counts.nobody_had_it:
            return Unreached
        causes = {failure.cause for failure in self.record.failures}
        return PathMissing if causes == {"no_path"} else WorkerFailed

    def note_refusal(self, failure: Failure, status: int, words: str) -> Failure:
        """Returns what is to be counted of a worker that refused. words: the engine's."""
        self.counts.refused += 1
        self.told = f"{failure.cause} (status {status}){words and f': {words}'}"
        result = "full" if blame.takes_no_more(failure) else "failed"
        self.record.failures.append(FailedTry(self.record.worker, result, failure.cause, words))
        return blame.at_path(failure, self.path)

    def note_break(self, error: UpstreamError) -> Failure | None:
        """Returns what is to be counted of a worker that broke off; None: nothing is."""
        self.told = str(error)
        self.record.failures.append(FailedTry(self.record.worker, "failed", error.cause, self.told))
        self.counts.broke(never_sent=isinstance(error, ConnectFailed))
        failure = blame.of_break(error.cause, is_late=error.is_late, is_whole=not self.has_begun)
        return failure and blame.at_path(failure, self.path)


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
        self._asked = Counter[tuple[WorkerKey, str]]()
        """Tries that go on, by worker and path."""

    async def answer(
        self,
        model: Model,
        asked: JsonBody,
        path: str,
        headers: Headers,
        client: Recipient,
        record: RequestRecord,
        caller: str,
    ) -> None:
        """Has any worker of `model` answer. Raises WorkerFailed if none does."""
        body = asked.changed(renamed(asked.fields.get("model"), model.name))
        evidence = Evidence(model.router, caller)
        question = _Question(model, asked, path, headers, client, record, evidence)
        left = [*model.workers]
        try:
            while left and not question.counts.is_over:
                worker = self._fittest(model, path, caller, left)
                left.remove(worker)
                at = worker.key, path
                self._asked[at] += 1
                try:
                    if await self._is_answered(question, body, worker):
                        return
                finally:
                    self._asked[at] -= 1
                    if not self._asked[at]:
                        del self._asked[at]
                if question.has_begun:
                    break
            await evidence.judge(is_answered=False)
        finally:
            evidence.withdraw()
        raise question.error(f"model {model.name}: {question.told}")

    def _fittest(
        self, model: Model, path: str, caller: str, left: Sequence[WorkerInfo]
    ) -> WorkerInfo:
        shares, failed = model.failed_shares(path, caller), model.failed(path)

        def unfitness(worker: WorkerInfo) -> tuple[float, int, float]:
            num_asked = self._asked[worker.key, path]
            is_tried = worker.key in failed and num_asked > 0
            share = 1.0 if is_tried else shares.get(worker.key, 0.0)
            return share, num_asked, random.random()

        return min(left, key=unfitness)

    async def _is_answered(self, question: _Question, body: bytes, worker: WorkerInfo) -> bool:
        """Whether the worker has answered, so that no other is to be asked."""
        model, path = question.model, question.path
        question.record.worker = str(worker.key)
        sent_ms = model.router.fleet.redis_now_ms
        answer: EngineAnswer | None = None
        try:
            answer = await self._upstream.send(
                *(worker.address, path, question.headers, body),
                connect_s=CONNECT_S,
                answer_s=self._between_s,
            )
            piece, is_all = await answer.read_up_to(MAX_WHOLE_BYTES, self._between_s)
            failure = blame.failure_of(
                *(answer.status, answer.headers, piece), model=model.name, path=path, is_all=is_all
            )
            if failure is None:
                question.has_begun = True
                await self._pass_on(question, worker, answer, piece, is_all)
                return True
            words = self._words.of(piece, question.asked)
            failure = question.note_refusal(failure, answer.status, words)
        except UpstreamError as error:
            failure = question.note_break(error)
        finally:
            if answer is not None:
                answer.abort()
        log.warning("worker %s: %s; %s", worker.key, question.told, path)
        if failure is not None:
            await question.evidence.add(failure, [worker], sent_ms, began=question.has_begun)
        return False

    async def _pass_on(
        self,
        question: _Question,
        worker: WorkerInfo,
        answer: EngineAnswer,
        piece: bytes,
        is_all: bool,
    ) -> None:
        """Passes an answer on that begins with `piece`. Raises UpstreamBroken."""
        client, headers = question.client, headers_back(answer.headers)
        status = blame.status_of(piece) if answer.status == 200 else answer.status
        if is_all and status >= 400:
            question.record.error = self._words.of(piece, question.asked)
            outcome = of_refusal(status, is_failure=False, is_full=False)
            question.record.close(outcome, ended_by="worker")
            await question.evidence.judge(is_answered=False, is_own=True)
            await client.refuse(status, headers, piece, worker)
            return
        has_failed = worker.key in question.model.failed(question.path)
        marks = [LACKS + question.path] if has_failed else []
        await question.evidence.answered(worker, marks)
        more = [(b"content-length", b"%d" % len(piece))] if is_all else []
        await client.start(answer.status, headers + more)
        if is_all:
            await client.send(piece, last=True)
            return
        await client.send(piece)
        while await answer.give(client.offer, self._between_s):
            await client.taken()
        await client.send(b"", last=True)
