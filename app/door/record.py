"""The record of one request to the front door, from its head to its end."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from app.core.key_rules import Spending
from app.core.outcomes import GONE, LEFT_BEFORE, NO_KEY, OK, Kind, kind_of, told_apart
from app.core.usage import UsageSums, Who
from app.door.answer_request import MODELS, AnswerRequest
from app.door.model import Model
from app.door.prompts.prompts import PromptIds
from app.policy.decision import Decision, RouteRequest


class Stage(StrEnum):
    """Parts of a request's time, in turn; their sum is its duration."""

    BODY = "body"
    TOKENS = "tokens"
    WAIT = "wait"
    DECIDE = "decide"
    FAILED = "failed"
    FIRST_TOKEN = "first_token"  # noqa: S105
    WHOLE = "whole"
    REST = "rest"


STAGES = {
    Stage.BODY: "reading its head and body",
    Stage.TOKENS: "rendering and tokenizing its prompt",
    Stage.WAIT: "waiting for a worker that could take it",
    Stage.DECIDE: "deciding and reserving",
    Stage.FAILED: "with workers that failed it",
    Stage.FIRST_TOKEN: "from the decision to the first token",
    Stage.WHOLE: "from the decision to the end, where no first token was seen",
    Stage.REST: "from the first token to the end",
}


@dataclass(slots=True)
class Usage:
    """Tokens of a request, as its engine counted them.

    cached: None if the engine did not say. ttft_s: seconds to the first token, by the engine; None
    if it did not say. by_router: counted here, as the engine did not tell of all that the client
    got: `output` is what was passed on, which may be too low, and `cached` the prediction.
    """

    prompt: int
    output: int
    cached: int | None
    ttft_s: float | None = None
    by_router: bool = False


class FailedTry(NamedTuple):
    """A worker that lost a request to another one. result: failed or full. cause: from a closed
    list, for metrics. words: the engine's own, as far as logs may have them."""

    worker: str
    result: str
    cause: str = ""
    words: str = ""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request, refused or not. Times are monotonic seconds; 0.0 until they come.

    client: its address. forwarded_for: X-Forwarded-For, which anybody can send. spending: None if
    no limits apply. unavailable: the model's name, if no worker of it is alive. ids: of its prompt,
    once the request is let in. worker: the last one that had it. outcome: ok, or what ended it.
    ended_by: client, worker or router. error: why, without a value of the client's.
    """

    path: str
    client: str = ""
    forwarded_for: str = ""
    began_s: float = field(default_factory=time.monotonic)
    came_at: datetime = field(default_factory=partial(datetime.now, UTC))
    key_name: str = ""
    request_id: str = ""
    asked: AnswerRequest | None = None
    request: RouteRequest | None = None
    model: Model | None = None
    unavailable: str = ""
    ids: PromptIds | None = None
    spending: Spending | None = None
    tries: int = 0
    decision: Decision | None = None
    worker: str = ""
    first_token_s: float = 0.0
    ended_s: float = 0.0
    usage: Usage | None = None
    outcome: str = ""
    ended_by: str = ""
    error: str = ""
    status: int = 0
    """Status of the client's answer; 0 until there is one."""
    is_said: bool = False
    """Whether the client was sent the end of each choice, so that it may hang up."""
    failures: list[FailedTry] = field(default_factory=list)
    migrations: int = 0
    """Times that another worker went on with its answer."""
    spent_s: defaultdict[Stage, float] = field(default_factory=lambda: defaultdict(float))
    _stage: Stage = Stage.BODY
    _since_s: float = 0.0
    """Time at which that stage began; 0.0: with the request."""

    @property
    def model_name(self) -> str:
        """The name of a model that the door knows; "" if none was named."""
        return self.model.name if self.model else self.unavailable

    @property
    def predicted_cached(self) -> int | None:
        """Tokens of the prompt that the worker was predicted to have cached; None if unknown. The
        last token is always computed, and with it its block."""
        decision, ids = self.decision, self.ids
        if decision is None or ids is None or ids.ids is None:
            return None
        if not decision.trust.predicts or self.migrations:
            return None
        size = decision.prompt_worker.block_size
        # The overlap leaves out what the engine holds and does not reuse.
        return max(0, min(decision.overlap.total, (ids.num_tokens - 1) // size)) * size

    @property
    def used(self) -> tuple[Who, UsageSums] | None:
        """The sender, and what counts as used by it; None before the end, for requests with a wrong
        key, and for those that only ask about models."""
        if self.outcome == NO_KEY or self.path.startswith(MODELS):
            return None
        tenant = self.request.tenant if self.request else ""
        usage, kind = self.usage, kind_of(self.outcome)
        return Who(self.key_name, tenant, self.model_name), UsageSums(
            requests=1,
            failed=int(kind in (Kind.ENGINE, Kind.CUT)),
            refused=int(kind is Kind.REFUSED),
            prompt_tokens=usage.prompt if usage else 0,
            cached_tokens=(usage.cached or 0) if usage else 0,
            output_tokens=usage.output if usage else 0,
            waited_ms=round(1000 * self.spent_s.get(Stage.WAIT, 0.0)),
            by_router=int(usage is not None and usage.by_router),
        )

    @property
    def spent(self) -> tuple[int, int, int]:
        """Tokens that count against limits: of the prompt, those cached, of the answer. A client
        that leaves before the first token has had its prompt computed."""
        if self.usage is not None:
            cached = self.usage.cached
            cached = self.predicted_cached or 0 if cached is None else cached
            return self.usage.prompt, cached, self.usage.output
        if self.outcome != LEFT_BEFORE or self.decision is None or self.ids is None:
            return 0, 0, 0
        return self.ids.num_tokens, self.predicted_cached or 0, 0

    def enter(self, stage: Stage, *, was: Stage | None = None) -> None:
        """Begins a stage. was: counts the time so far as another stage than the one that was
        begun."""
        now_s = time.monotonic()
        self.spent_s[was or self._stage] += now_s - (self._since_s or self.began_s)
        self._stage, self._since_s = stage, now_s

    def note_failed(self, failed: FailedTry) -> None:
        """Notes a worker that failed the request: a decision for another one begins."""
        self.failures.append(failed)
        self.enter(Stage.DECIDE, was=Stage.FAILED if self._stage is Stage.FIRST_TOKEN else None)

    def note_decision(self, decision: Decision) -> None:
        """Notes a decision that was made just now, part of whose time was waiting."""
        self.decision, self.worker = decision, str(decision.worker.key)
        self.enter(Stage.REST if self.first_token_s else Stage.FIRST_TOKEN)
        waited_s = min(decision.waited_ms / 1000, self.spent_s[Stage.DECIDE])
        if waited_s:
            self.spent_s[Stage.DECIDE] -= waited_s
            self.spent_s[Stage.WAIT] += waited_s

    def note_first_token(self) -> None:
        self.enter(Stage.REST)
        self.first_token_s = self._since_s

    def close(self, outcome: str, *, ended_by: str = "", usage: Usage | None = None) -> bool:
        """Notes how the request ended. Returns whether this was the first call; later ones change
        nothing."""
        if self.outcome:
            return False
        outcome = OK if outcome == GONE and self.is_said else outcome
        self.outcome = told_apart(
            outcome, has_begun=0 < self.status < 400, has_token=self.first_token_s > 0
        )
        self.ended_by, self.usage = ended_by, usage
        is_whole = self._stage is Stage.FIRST_TOKEN
        self.enter(self._stage, was=Stage.WHOLE if is_whole else None)
        self.ended_s = self._since_s
        if is_whole and usage is not None and usage.ttft_s is not None:
            whole_s = self.spent_s.pop(Stage.WHOLE)
            self.spent_s[Stage.FIRST_TOKEN] = min(usage.ttft_s, whole_s)
            self.spent_s[Stage.REST] = whole_s - self.spent_s[Stage.FIRST_TOKEN]
            self.first_token_s = self.ended_s - self.spent_s[Stage.REST]
        return True

    def note_left(self, outcome: str, *, ended_by: str) -> None:
        """Notes that the client has not read all of an answer that its worker has ended."""
        if self.outcome == OK and not (outcome == GONE and self.is_said):
            self.outcome = told_apart(outcome, has_begun=True, has_token=True)
            self.ended_by = ended_by
