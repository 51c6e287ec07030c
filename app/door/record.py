"""What is known of one request to the front door, from its head to its end."""

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
from app.door.asked import MODELS, AnswerRequest
from app.door.models import Model
from app.policy.decision import Decision, RouteRequest
from app.router.prompt import Prompt
from app.tokens.media import Media


class Stage(StrEnum):
    """What the time of a request is spent on, in turn; together they are its duration."""

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
    """Tokens, as the engine counted them. cached: None: it did not say. ttft_s: until the first
    token, as it says; None: it does not.

    by_router: counted here instead, as the engine did not tell of all that the client got: `output`
    by what was passed on, which may be less; `cached` is what was predicted."""

    prompt: int
    output: int
    cached: int | None
    ttft_s: float | None = None
    by_router: bool = False


@dataclass(slots=True)
class Admission:
    """A request that has been let in.

    request: who asks, and the length of the prompt, estimated without one. prompt: None if its
    tokens cannot be known here; it is then routed by load and session alone. tokens_from: who knew
    the tokens, or why nobody did, for headers and metrics. media: what of the prompt is no text.
    """

    request: RouteRequest
    model: Model
    prompt: Prompt | None
    tokens_from: str
    media: Media | None = None

    @property
    def num_tokens(self) -> int:
        return self.request.isl_tokens


class FailedTry(NamedTuple):
    """A worker that a request was taken away from. result: failed, or full. cause: from a closed
    list, for metrics. words: what went wrong, in the engine's own words if it said so; "": it
    did not, or not in words that logs may have."""

    worker: str
    result: str
    cause: str = ""
    words: str = ""


@dataclass(slots=True)
class RequestRecord:
    """One request, refused or not. Times: monotonic seconds; 0.0: it never came to that.

    client: the address it came from. forwarded_for: as a proxy says, or anybody.
    asked, request, model, admitted: None as long as they are not known. spending: None: its key has
    no limits. unavailable: the model's
    name, if it has no workers. any_worker: that answers, where none was decided on.
    outcome: ok, or what it ended by. ended_by: client, worker or router. error: why, in words that
    name no value of the client's, the engine's own if it said so; "": nothing to say.
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
    admitted: Admission | None = None
    spending: Spending | None = None
    tries: int = 0
    decision: Decision | None = None
    any_worker: str = ""
    first_token_s: float = 0.0
    ended_s: float = 0.0
    usage: Usage | None = None
    outcome: str = ""
    ended_by: str = ""
    error: str = ""
    status: int = 0
    """What the client was answered with; 0: nothing, so far."""
    is_said: bool = False
    """Whether the client was sent the end of each choice. Whoever hangs up then has it all."""
    failures: list[FailedTry] = field(default_factory=list)
    """In turn."""
    migrations: int = 0
    """How often another worker went on with its answer."""
    spent_s: defaultdict[Stage, float] = field(default_factory=lambda: defaultdict(float))
    _stage: Stage = Stage.BODY
    _since_s: float = 0.0
    """When that stage began; 0.0: with the request."""

    @property
    def model_name(self) -> str:
        """Of a model that the door knows; "": none was named."""
        return self.model.name if self.model else self.unavailable

    @property
    def worker(self) -> str:
        """The last one that it was given to; "": none."""
        return str(self.decision.worker.key) if self.decision else self.any_worker

    @property
    def predicted_cached(self) -> int | None:
        """Tokens of the prompt that the worker was predicted to have cached; None: nobody could
        tell. The last token is always computed, and with it its block."""
        decision, admitted = self.decision, self.admitted
        if decision is None or admitted is None or admitted.prompt is None:
            return None
        if not decision.trust.predicts or self.migrations:
            return None
        size = decision.prompt_worker.block_size
        # Of the overlap, what the engine does not reuse of what it holds is left out already.
        return max(0, min(decision.overlap.total, (admitted.num_tokens - 1) // size)) * size

    @property
    def used(self) -> tuple[Who, UsageSums] | None:
        """Who sent it, and what counts as used by it, once it has ended; None: its sender is not
        known, or it only asks about models."""
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
        """Tokens that count against limits: of its prompt, of these cached ones, of its answer. Who
        leaves before the first token has had the prompt computed."""
        if self.usage is not None:
            cached = self.usage.cached
            cached = self.predicted_cached or 0 if cached is None else cached
            return self.usage.prompt, cached, self.usage.output
        if self.outcome != LEFT_BEFORE or self.decision is None or self.admitted is None:
            return 0, 0, 0
        return self.admitted.num_tokens, self.predicted_cached or 0, 0

    def enter(self, stage: Stage, *, was: Stage | None = None) -> None:
        """From now on time is spent on `stage`. was: what it was spent on before, if not on what
        was said then."""
        now_s = time.monotonic()
        self.spent_s[was or self._stage] += now_s - (self._since_s or self.began_s)
        self._stage, self._since_s = stage, now_s

    def worker_failed(self, failed: FailedTry) -> None:
        """Another one is decided on from now on."""
        self.failures.append(failed)
        self.enter(Stage.DECIDE, was=Stage.FAILED if self._stage is Stage.FIRST_TOKEN else None)

    def decided(self, decision: Decision) -> None:
        """That took until now, and part of it was waiting."""
        self.decision = decision
        self.enter(Stage.REST if self.first_token_s else Stage.FIRST_TOKEN)
        waited_s = min(decision.waited_ms / 1000, self.spent_s[Stage.DECIDE])
        if waited_s:
            self.spent_s[Stage.DECIDE] -= waited_s
            self.spent_s[Stage.WAIT] += waited_s

    def first_token(self) -> None:
        """Of all tries, it was seen just now."""
        self.enter(Stage.REST)
        self.first_token_s = self._since_s

    def end(self, outcome: str, *, ended_by: str = "", usage: Usage | None = None) -> bool:
        """It has ended, in whatever way. Only the first call counts; whether this was it."""
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

    def not_taken(self, outcome: str, *, ended_by: str) -> None:
        """Of an answer that a worker has ended, the client has not taken all."""
        if self.outcome == OK and not (outcome == GONE and self.is_said):
            self.outcome = told_apart(outcome, has_begun=True, has_token=True)
            self.ended_by = ended_by
