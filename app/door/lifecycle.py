"""One request from admission to its end, however it came in: nothing here is of HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from app.core.errors import NoWorkers
from app.core.failures import Failure, Suspects
from app.core.hashing import token_bytes
from app.core.outcomes import OK, Ending
from app.core.worker_report import WorkerInfo
from app.door.blame import takes_no_more
from app.door.evidence import Evidence
from app.door.record import Admission, FailedTry, RequestRecord, Stage, Usage
from app.door.tracing import Trace
from app.policy.answers import Answer
from app.policy.decision import Decision

IN_TIME_S = 0.5
"""So much longer a first token may take than twice what was predicted."""


def _nothing_heard() -> tuple[int, None]:
    return 0, None


class Lifecycle:
    """admit -> decide -> first token -> end. Each reservation is ended exactly once.

    record: of the request; all that follows is noted in it.
    """

    def __init__(self, admitted: Admission, record: RequestRecord, trace: Trace) -> None:
        self.record = record
        record.admitted = self.admitted = admitted
        self.trace = trace
        self._request = admitted.request
        self._prompt = admitted.prompt
        """Of which the chain is still to be made."""
        self._router = admitted.model.router
        self.evidence = Evidence(self._router, admitted.request.holder)
        self._held: Decision | None = None
        self._heard: Callable[[], tuple[int, Usage | None]] = _nothing_heard
        self._has_first_token = False
        self._decided_s = 0.0
        self._tells_late = False
        """Whether it is still to be told how late the worker's first token is."""
        self._sent_ms: int | None = None
        """When it was given to that worker, by the Redis clock."""
        self._doubted: frozenset[str] = frozenset()
        """Sources with which a worker failed it."""
        self.marked: Sequence[str] = ()
        """For what of the request its worker was left alone when it was decided on."""

    @property
    def decision(self) -> Decision:
        """The one that holds. Only after `decide`."""
        assert self._held is not None
        return self._held

    @property
    def is_decided(self) -> bool:
        """Whether a decision holds."""
        return self._held is not None

    def is_missing(self, worker: WorkerInfo) -> bool:
        """Whether it is none of the workers that are alive; False once nothing is decided."""
        if self._held is None:
            return False
        return not self._router.fleet.has(worker.key)

    async def decide(self) -> Decision:
        """Choose and reserve a worker that has not failed this request yet. As Router.route."""
        self._held = None
        self._has_first_token = False
        self.record.tries += 1
        if self.record.tries == 1:
            self.record.enter(Stage.DECIDE)
        with self.trace.span("decide"):
            try:
                decision = await self._router.route(self._request, self._prompt)
            except NoWorkers:
                doubted = self._doubted - {failed.worker for failed in self.record.failures}
                if not doubted:
                    raise
                self._doubted = frozenset()
                exclude = self._request.exclude - doubted
                self._request = replace(self._request, exclude=exclude)
                decision = await self._router.route(self._request, self._prompt)
        self._prompt = None
        self._held, self._decided_s, self._tells_late = decision, time.monotonic(), True
        self._sent_ms = self._router.fleet.redis_now_ms
        view, inc = self._router.fleet.last_view, decision.incarnation
        if view is not None and view.knows_failures:
            self.marked = [name for name in self._request.marks if inc in view.marked(name)]
        self.record.decided(decision)
        return decision

    def source_complete(self, decision: Decision) -> None:
        """Its source has computed the prompt. Nothing is told that the first token, or another
        decision, has told already."""
        if decision is self._held and decision.reserved and not self._has_first_token:
            self._router.source_done(decision)

    async def source_failed(self, failure: Failure | None, cause: str, words: str) -> None:
        """It has not: the next decision is for another one, or for none. All as below."""
        source = self.decision.source
        assert source is not None
        failed = FailedTry(str(source.worker.key), "failed", cause, words)
        await self._leave(failed, failure, [source.worker])

    def goes_alone(self, why: str, *, elsewhere: bool) -> None:
        """The next decision is for one worker, which computes the prompt itself; elsewhere: for
        another one, if there is any."""
        decision, self._held = self.decision, None
        self.trace.try_ends(why)
        if elsewhere:
            self._doubted |= {str(decision.worker.key)}
        exclude = self._request.exclude | self._doubted
        self._request = replace(self._request, local_only=True, exclude=exclude)
        if decision.reserved:
            self._router.end(decision.reservation_id, answered=False)

    async def worker_failed(self, failure: Failure | None, cause: str, words: str) -> None:
        """The worker gave no answer, or none that counts: the next decision is for another.

        failure: to be counted against it; None: nothing is. cause, words: as in FailedTry. Where
        its source may be at fault just as well, the next decision is for other sources, too, if
        there are any.
        """
        worker, source = self.decision.worker, self.decision.source
        blamed = [worker]
        if failure is not None and failure.whose is Suspects.EITHER and source is not None:
            self._doubted |= {str(source.worker.key)}
            # Each is counted half: what they do with others tells.
            in_a_row, weight = max(failure.in_a_row, 2), failure.weight / 2
            failure = replace(failure, in_a_row=in_a_row, weight=weight)
            blamed.append(source.worker)
        is_full = failure is not None and takes_no_more(failure)
        result = "full" if is_full else "failed"
        await self._leave(FailedTry(str(worker.key), result, cause, words), failure, blamed)

    def asks_again(self, worker: WorkerInfo) -> None:
        """A worker that failed it may have it once more, as there is no other."""
        exclude = self._request.exclude - {str(worker.key)}
        self._request = replace(self._request, exclude=exclude)

    def passes_over(self, workers: Iterable[str]) -> None:
        """The next decision is for none of these."""
        self._request = replace(self._request, exclude=self._request.exclude.union(workers))

    async def answered(self) -> None:
        """The worker has answered to the end, and is no longer left alone: at fault are those that
        failed the request before."""
        await self.evidence.answered(self.decision.worker, self.marked)

    async def _leave(
        self, failed: FailedTry, failure: Failure | None, blamed: Iterable[WorkerInfo]
    ) -> None:
        self.trace.try_ends("worker_failed")
        decision, self._held = self.decision, None
        exclude = self._request.exclude | self._doubted | {failed.worker}
        self._request = replace(self._request, exclude=exclude)
        self.record.worker_failed(failed)
        if decision.reserved:
            self._router.end(decision.reservation_id, answered=False)
        if failure is not None:
            began = self._has_first_token
            await self.evidence.add(failure, blamed, self._sent_ms, began=began)

    def goes_on(self, output: Sequence[int]) -> None:
        """The next decision is for a worker that goes on behind the tokens so far. output: those
        of the answer."""
        prompt = self.admitted.prompt
        assert prompt is not None
        assert prompt.tokens is not None
        before = np.frombuffer(token_bytes(prompt.tokens), dtype="<u4")
        tokens = np.concatenate((before, np.array(output, dtype=np.uint32)))
        self._prompt = replace(prompt, num_tokens=len(tokens), tokens=tokens)
        context_tokens = self._request.context_tokens
        self._request = replace(
            self._request,
            isl_tokens=len(tokens),
            context_tokens=context_tokens and max(context_tokens, len(tokens) + 1),
        )
        self.record.migrations += 1

    def first_token(self, *, is_seen: bool = True) -> None:
        """The first token of the worker is out. is_seen: just now, and not with all others."""
        decision = self._held
        # Without one, what the client gets is the refusal of a worker that was given up.
        if self._has_first_token or decision is None:
            return
        self._has_first_token = True
        if is_seen and not self.record.first_token_s:
            self.record.first_token()
            self.trace.first_token()
        if decision.reserved:
            late_ms = self._late_ms(decision) if is_seen else None
            self._tells_late = not is_seen
            self._router.first_token(decision.reservation_id, late_ms=late_ms)

    def hears(self, heard: Callable[[], tuple[int, Usage | None]]) -> None:
        """heard: tells how many tokens of the answer have been passed on, and what its engine last
        said that it counted."""
        self._heard = heard

    def end(self, outcome: str, *, ended_by: str = "", usage: Usage | None = None) -> None:
        """The answer has ended, in whatever way. Only the first call counts."""
        record = self.record
        if not record.end(outcome, ended_by=ended_by, usage=usage):
            return
        if record.usage is None:
            record.usage = self._counted_here()
        self._heard = _nothing_heard  # what tells it refers to this
        decision, self._held = self._held, None
        if decision is not None:
            cached = usage.cached if usage is not None and not record.migrations else None
            self._router.telemetry.reuse.ended(decision, record.model_name, cached)
        if decision is not None and record.outcome == OK:
            self._router.answered(decision, self._request)
            if usage is not None and not record.migrations:
                self._router.teach(decision, _answer(record, usage))
        if decision is not None and decision.reserved:
            is_ok = record.outcome == OK
            late_ms = self._late_ms(decision, usage) if self._tells_late else None
            if not is_ok:
                late_ms = late_ms or None  # what has not come may yet be in time
            self._router.end(
                decision.reservation_id, self._ending(), answered=is_ok, late_ms=late_ms
            )
        self.trace.end(record)

    def _late_ms(self, decision: Decision, usage: Usage | None = None) -> int | None:
        """How much later than predicted the first token has come, or has not come by now; 0: within
        twice the time that was predicted, and half a second. None: it is not known whose time that
        was.

        usage: of an answer that came whole; what its tokens take is predicted as well.
        """
        view = self._router.fleet.last_view
        at = view.position(decision.incarnation) if view is not None else None
        if view is None or at is None or decision.source is not None:
            return None
        rest_s = usage.output * view.measured[at].speed.decode_s if usage is not None else 0.0
        took_s = time.monotonic() - self._decided_s
        late_s = took_s - 2.0 * (decision.expected_s + rest_s) - IN_TIME_S
        return round(1000 * max(0.0, late_s))

    def _counted_here(self) -> Usage | None:
        """What the client got of an answer of which its engine did not tell all; None: nothing."""
        record = self.record
        output, told = self._heard()
        if not output or not record.first_token_s:
            return None
        cached = record.predicted_cached
        if told is None or not told.prompt:  # some say 0 as an answer begins
            return Usage(self.admitted.num_tokens, output, cached, by_router=True)
        cached = cached if told.cached is None else told.cached
        return Usage(told.prompt, max(output, told.output), cached, by_router=True)

    def _ending(self) -> Ending | None:
        """What came of the request; None: it is not known."""
        record = self.record
        if record.usage is None or not record.usage.output or record.migrations:
            return None
        ttft_s = record.first_token_s - record.began_s
        return Ending(record.usage.output, round(1000 * ttft_s) if record.first_token_s else None)


def _answer(record: RequestRecord, usage: Usage) -> Answer:
    is_seen = bool(record.first_token_s)
    first_token_s = record.spent_s[Stage.FIRST_TOKEN] if is_seen else 0.0
    rest_s = record.spent_s.get(Stage.REST, 0.0)  # which no whole answer has
    return Answer(usage.prompt, usage.cached, usage.output, first_token_s, rest_s)
