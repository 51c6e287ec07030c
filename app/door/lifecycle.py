"""One request from admission to its end, however it came in: nothing here is of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from app.core.hashing import token_bytes
from app.core.worker_report import WorkerInfo
from app.door.record import Admitted, RequestRecord, Stage, Usage
from app.door.tracing import Trace
from app.policy.decision import Decision
from app.state.endings import Ending


class Lifecycle:
    """admit -> decide -> first token -> end. Each reservation is ended exactly once.

    record: of the request; all that follows is noted in it.
    """

    def __init__(self, admitted: Admitted, record: RequestRecord, trace: Trace) -> None:
        self.record = record
        record.admitted = self.admitted = admitted
        self.trace = trace
        self._request = admitted.request
        self._prompt = admitted.prompt
        """Of which the chain is still to be made."""
        self._router = admitted.model.router
        self._held: Decision | None = None
        self._has_first_token = False

    @property
    def decision(self) -> Decision:
        """The one that holds. Only after `decide`."""
        assert self._held is not None
        return self._held

    def is_missing(self, worker: WorkerInfo) -> bool:
        """Whether it is none of the workers that are alive; False once nothing is decided."""
        if self._held is None:
            return False
        return all(info.key != worker.key for info in self._router.fleet.infos)

    async def decide(self) -> Decision:
        """Choose and reserve a worker that has not failed this request yet. As Router.route."""
        self._held = None
        self._has_first_token = False
        self.record.tries += 1
        if self.record.tries == 1:
            self.record.enter(Stage.DECIDE)
        with self.trace.span("decide"):
            decision = await self._router.route(self._request, self._prompt)
        self._prompt = None
        self._held = decision
        self.record.decided(decision)
        return decision

    def source_complete(self, decision: Decision) -> None:
        """Its source has computed the prompt. Nothing is told that the first token, or another
        decision, has told already."""
        if decision is self._held and decision.reserved and not self._has_first_token:
            self._router.source_done(decision)

    async def source_failed(self, *, suspend: bool) -> None:
        """It has not: the next decision is for another one, or for none. suspend: as below."""
        source = self.decision.source
        assert source is not None
        await self._leave(str(source.worker.key), "failed", suspend=suspend, of_source=True)

    def lease_ended(self, *, is_fetched: bool) -> None:
        """What the source keeps may be gone: the next decision is for one worker alone, and not for
        the one that has fetched it all the same."""
        decision, self._held = self.decision, None
        self.trace.try_ends("lease_ended")
        wrong = {str(decision.worker.key)} if is_fetched else set()
        self._request = replace(
            self._request, local_only=True, exclude=self._request.exclude | wrong
        )
        if decision.reserved:
            self._router.end(decision.reservation_id)

    async def worker_failed(self, *, suspend: bool, is_full: bool = False) -> None:
        """The worker gave no answer: the next decision is for another.

        suspend: nothing at all is routed to it for a while. is_full: it took no more, for now.
        """
        name, why = str(self.decision.worker.key), "full" if is_full else "failed"
        await self._leave(name, why, suspend=suspend, of_source=False)

    async def _leave(self, name: str, why: str, *, suspend: bool, of_source: bool) -> None:
        self.trace.try_ends("worker_failed")
        decision, self._held = self.decision, None
        self._request = replace(self._request, exclude=self._request.exclude | {name})
        self.record.worker_failed(name, why)
        if not decision.reserved:
            return
        if suspend:
            await self._router.release(
                decision.reservation_id, worker_failed=True, of_source=of_source
            )
        else:
            self._router.end(decision.reservation_id)

    def goes_on(self, output: Sequence[int]) -> None:
        """The next decision is for a worker that goes on behind the tokens so far. output: those
        of the answer."""
        prompt = self.admitted.prompt
        assert prompt is not None
        assert prompt.tokens is not None
        before = np.frombuffer(token_bytes(prompt.tokens), dtype="<u4")
        tokens = np.concatenate((before, np.array(output, dtype=np.uint32)))
        self._prompt = replace(prompt, num_tokens=len(tokens), tokens=tokens)
        self._request = replace(self._request, isl_tokens=len(tokens))
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
            self._router.first_token(decision.reservation_id)

    def end(self, outcome: str, *, ended_by: str = "", usage: Usage | None = None) -> None:
        """The answer has ended, in whatever way. Only the first call counts."""
        record = self.record
        if not record.end(outcome, ended_by=ended_by, usage=usage):
            return
        decision, self._held = self._held, None
        if decision is not None:
            cached = usage.cached if usage is not None and not record.migrations else None
            self._router.telemetry.reuse.ended(decision, record.model_name, cached)
        if decision is not None and outcome == "ok":
            self._router.answered(decision, self._request)
        if decision is not None and decision.reserved:
            self._router.end(decision.reservation_id, self._ending())
        self.trace.end(record)

    def _ending(self) -> Ending | None:
        """What came of the request; None: it is not known."""
        record = self.record
        if record.usage is None or not record.usage.output or record.migrations:
            return None
        ttft_s = record.first_token_s - record.began_s
        return Ending(record.usage.output, round(1000 * ttft_s) if record.first_token_s else None)
