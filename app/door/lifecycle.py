"""One request from its head to its end, however it came in: nothing here is of HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np

from app.core.errors import NoWorkers
from app.core.failures import Failure, Suspects
from app.core.hashing import token_bytes
from app.core.outcomes import OK, Ending
from app.core.worker_report import WorkerInfo
from app.door.answer.events import usage_in
from app.door.answer.migration import Migrating
from app.door.answer.stream import Stream, Whole
from app.door.answer_request import PROMPTS
from app.door.blame import takes_no_more
from app.door.errors import ContextTooLong
from app.door.evidence import Evidence
from app.door.model import Model
from app.door.prompts.prompts import PromptIds
from app.door.record import FailedTry, RequestRecord, Stage, Usage
from app.door.told.tracing import SpanTrace
from app.policy.answers import Answer
from app.policy.decision import Decision, RouteRequest
from app.router.prompt import Prompt, check_length
from app.router.router import Router

IN_TIME_S = 0.5
"""Seconds that a first token may be later than twice its prediction."""
UNTRACED = nullcontext()
Parser = Stream | Whole | Migrating


@dataclass(slots=True, eq=False)
class Lifecycle(RequestRecord):
    """A request that is let in, decided, answered and ended: each reservation is ended once.

    held: the decision that holds; None before one, and once its worker was given up or has ended.
    parser: sees what is passed on of the answer, whose engine can count `most_tokens`. evidence:
    against workers that failed; None if none did. marked: names for which its worker was left alone
    when it was chosen. trace: None without an exporter.
    """

    held: Decision | None = None
    parser: Parser | None = None
    most_tokens: int = 0
    evidence: Evidence | None = None
    marked: Sequence[str] = ()
    trace: SpanTrace | None = None
    prompt: Prompt | None = None
    router: Router = field(init=False)
    _unhashed: Prompt | None = None
    """The prompt that the next decision hashes; None if its chain is made."""
    _has_first_token: bool = False
    """Whether the worker that has the request has said one."""
    _decided_s: float = 0.0
    _tells_late: bool = False
    """Whether routers are still to be told how late the worker's first token is."""
    _sent_ms: int | None = None
    """Time at which the worker got the request, by the Redis clock."""
    _doubted: frozenset[str] = frozenset()
    """Sources with which a worker failed the request."""

    @property
    def asks(self) -> RouteRequest:
        assert self.request is not None
        return self.request

    @property
    def current(self) -> Decision:
        """The decision that holds. Only after `decide`."""
        assert self.held is not None
        return self.held

    def admit(self, ids: PromptIds, max_prompt_tokens: int) -> None:
        """Lets the request in, whose model and ids are known. Raises InvalidRequest, and its
        ContextTooLong."""
        request, model, asked, prompt = self.asks, self.model, self.asked, None
        assert model is not None
        assert asked is not None
        if ids.ids is not None:
            field, num_tokens = PROMPTS[asked.api], ids.num_tokens
            if 0 < model.max_tokens <= num_tokens:
                raise ContextTooLong(field, model.max_tokens, str(num_tokens))
            check_length(field, num_tokens, max_prompt_tokens)
            # One with a salt of its own is cached nowhere.
            salt = asked.cache_salt or None if asked.reads_cache else request.request_id
            prompt = Prompt(
                num_tokens, tokens=ids.ids, lora_name=model.lora_name, cache_namespace=salt
            )
        request.isl_tokens, request.is_blind = ids.num_tokens, ids.ids is None
        request.part_tokens = ids.part_tokens
        request.trail = ids.trail
        request.exclude = model.others
        request.output_tokens = max(1, asked.output_room)
        request.context_tokens = _context(model, ids, asked.output_room)
        self.router, self.ids, self.prompt, self._unhashed = model.router, ids, prompt, prompt
        self.held, self.evidence, self._doubted = None, None, frozenset()

    def is_missing(self, worker: WorkerInfo) -> bool:
        """Whether a decision holds, and the worker is none of those alive."""
        return self.held is not None and not self.router.fleet.has(worker.key)

    async def decide(self) -> Decision:
        """Chooses and reserves a worker that has not failed this request yet. Raises as
        Router.route."""
        self.held, self._has_first_token = None, False
        self.tries += 1
        if self.tries == 1:
            self.enter(Stage.DECIDE)
        router, request = self.router, self.asks
        with UNTRACED if self.trace is None else self.trace.span("decide"):
            try:
                decision = await router.route(request, self._unhashed)
            except NoWorkers:
                doubted = self._doubted - {failed.worker for failed in self.failures}
                if not doubted:
                    raise
                self._doubted = frozenset()
                self.request = request = replace(request, exclude=request.exclude - doubted)
                decision = await router.route(request, self._unhashed)
        self._unhashed = None
        self.held, self._decided_s, self._tells_late = decision, time.monotonic(), True
        self._sent_ms = router.fleet.redis_now_ms
        view, inc = router.fleet.last_view, decision.incarnation
        if view is not None and view.knows_failures:
            self.marked = [name for name in request.marks if inc in view.marked(name)]
        self.note_decision(decision)
        return decision

    def source_complete(self, decision: Decision) -> None:
        """Reports that the source has computed the prompt, unless the first token, or another
        decision, has told that."""
        if decision is self.held and decision.reserved and not self._has_first_token:
            self.router.source_done(decision)

    async def source_failed(self, failure: Failure | None, cause: str, words: str) -> None:
        """Gives up a source that failed, which the next decision excludes. failure: to be counted
        against the source; None: nothing is. cause, words: see FailedTry."""
        source = self.current.source
        assert source is not None
        failed = FailedTry(str(source.worker.key), "failed", cause, words)
        await self._leave(failed, failure, [source.worker])

    def goes_alone(self, why: str, *, elsewhere: bool) -> None:
        """Has the next decision choose one worker that computes the prompt itself. elsewhere:
        another one than now, if there is any."""
        decision = self.current
        if elsewhere:
            self._doubted |= {str(decision.worker.key)}
        self.request = replace(
            self.asks, local_only=True, exclude=self.asks.exclude | self._doubted
        )
        self._give_up(decision, why)

    async def worker_failed(self, failure: Failure | None, cause: str, words: str) -> None:
        """Gives up a worker that gave no answer, or none that counts; the next decision excludes
        it. Where its source may be at fault as well, it is doubted, too.

        failure: to be counted against the worker; None: nothing is. cause, words: see FailedTry.
        """
        worker, source = self.current.worker, self.current.source
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
        """Lets a worker that failed the request have it once more, as there is no other."""
        self.request = replace(self.asks, exclude=self.asks.exclude - {str(worker.key)})

    def passes_over(self, workers: Iterable[str]) -> None:
        """Excludes these workers from the next decision."""
        self.request = replace(self.asks, exclude=self.asks.exclude.union(workers))

    async def answered(self) -> None:
        """Tells that the worker has answered to the end: at fault are those that failed the request
        before, and the worker is no longer left alone."""
        if self.marked or (self.evidence is not None and self.evidence.tries):
            await self.against().answered(self.current.worker, self.marked)

    def against(self) -> Evidence:
        """Returns the evidence against workers, which is made for the first one that fails."""
        if self.evidence is None:
            self.evidence = Evidence(self.router, self.asks.holder)
        return self.evidence

    async def judge(self, *, is_answered: bool, is_own: bool = False, began: bool = True) -> None:
        """Has the evidence judged, if there is any. See Evidence.judge."""
        if self.evidence is not None:
            await self.evidence.judge(is_answered=is_answered, is_own=is_own, began=began)

    def _give_up(self, decision: Decision, why: str) -> None:
        if self.trace is not None:
            self.trace.try_ends(why)
        self.held = None
        if decision.reserved:
            self.router.end(decision.reservation_id, answered=False)

    async def _leave(
        self, failed: FailedTry, failure: Failure | None, blamed: Iterable[WorkerInfo]
    ) -> None:
        self.request = replace(
            self.asks, exclude=self.asks.exclude | self._doubted | {failed.worker}
        )
        self.note_failed(failed)
        self._give_up(self.current, "worker_failed")
        if failure is not None:
            began = self._has_first_token
            await self.against().add(failure, blamed, self._sent_ms, began=began)

    def goes_on(self, output: Sequence[int]) -> None:
        """Has the next decision choose a worker that goes on behind `output`, the tokens of the
        answer so far."""
        prompt = self.prompt
        assert prompt is not None
        assert prompt.tokens is not None
        before = np.frombuffer(token_bytes(prompt.tokens), dtype="<u4")
        tokens = np.concatenate((before, np.array(output, dtype=np.uint32)))
        self._unhashed = replace(prompt, num_tokens=len(tokens), tokens=tokens)
        context_tokens = self.asks.context_tokens
        self.request = replace(
            self.asks,
            isl_tokens=len(tokens),
            context_tokens=context_tokens and max(context_tokens, len(tokens) + 1),
        )
        self.migrations += 1

    def first_token(self, *, is_seen: bool = True) -> None:
        """Reports the worker's first token. is_seen: it came just now, and not with all others."""
        decision = self.held
        # Without one, what the client gets is the refusal of a worker that was given up.
        if self._has_first_token or decision is None:
            return
        self._has_first_token = True
        if is_seen and not self.first_token_s:
            self.note_first_token()
            if self.trace is not None:
                self.trace.first_token()
        if decision.reserved:
            late_ms = self._late_ms(decision) if is_seen else None
            self._tells_late = not is_seen
            self.router.first_token(decision.reservation_id, late_ms=late_ms)

    def end(self, outcome: str, *, ended_by: str = "", usage: Usage | None = None) -> None:
        """Ends the request and its reservation. Only the first call counts."""
        if not self.close(outcome, ended_by=ended_by, usage=usage):
            return
        if usage is None:
            self.usage = self._counted_here()
        self.parser = None
        decision, self.held = self.held, None
        if decision is not None:
            self._learn(decision, usage)
        if decision is not None and decision.reserved:
            is_ok = self.outcome == OK
            late_ms = self._late_ms(decision, usage) if self._tells_late else None
            if not is_ok:
                late_ms = late_ms or None  # what has not come may yet be in time
            self.router.end(
                decision.reservation_id, self._ending(), answered=is_ok, late_ms=late_ms
            )
        if self.trace is not None:
            self.trace.end(self)

    def _learn(self, decision: Decision, usage: Usage | None) -> None:
        router = self.router
        told = usage if not self.migrations else None
        router.telemetry.reuse.ended(decision, self.model_name, told.cached if told else None)
        if self.outcome != OK:
            return
        router.answered(decision, self.asks)
        if told is not None:
            first_token_s = self.spent_s[Stage.FIRST_TOKEN] if self.first_token_s else 0.0
            rest_s = self.spent_s.get(Stage.REST, 0.0)  # which no whole answer has
            router.teach(
                decision, Answer(told.prompt, told.cached, told.output, first_token_s, rest_s)
            )

    def _late_ms(self, decision: Decision, usage: Usage | None = None) -> int | None:
        """Returns ms by which the first token is later than twice its prediction and IN_TIME_S; 0:
        it is in time; None: it is not known whose time that was.

        usage: of an answer that came whole, whose tokens' time is predicted as well.
        """
        view = self.router.fleet.last_view
        at = view.position(decision.incarnation) if view is not None else None
        if view is None or at is None or decision.source is not None:
            return None
        rest_s = usage.output * view.measured[at].speed.decode_s if usage is not None else 0.0
        took_s = time.monotonic() - self._decided_s
        late_s = took_s - 2.0 * (decision.expected_s + rest_s) - IN_TIME_S
        return round(1000 * max(0.0, late_s))

    def told(self) -> Usage | None:
        """Returns the usage that the engine has told so far; None if it has not."""
        parser = self.parser
        return None if parser is None else usage_in(parser.tail, self.most_tokens, parser.start)

    def _counted_here(self) -> Usage | None:
        """Returns what the client got of an answer whose engine did not tell all; None: nothing."""
        output = self.parser.num_said if self.parser is not None else 0
        if not output or not self.first_token_s or self.ids is None:
            return None
        told, cached = self.told(), self.predicted_cached
        if told is None or not told.prompt:  # some say 0 as an answer begins
            return Usage(self.ids.num_tokens, output, cached, by_router=True)
        cached = cached if told.cached is None else told.cached
        return Usage(told.prompt, max(output, told.output), cached, by_router=True)

    def _ending(self) -> Ending | None:
        if self.usage is None or not self.usage.output or self.migrations:
            return None
        ttft_s = self.first_token_s - self.began_s
        return Ending(self.usage.output, round(1000 * ttft_s) if self.first_token_s else None)


def _context(model: Model, ids: PromptIds, output_room: int) -> int:
    """Returns the tokens that an engine must take; 0: any may do.

    What fits nowhere goes where most fits: how to say so, or to shorten the answer, is up to the
    engine.
    """
    longest, most = model.max_tokens, ids.bound if ids.ids is None else ids.num_tokens
    if most is None:
        return longest
    return min(most + output_room, longest) if longest else most + output_room
