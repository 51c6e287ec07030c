"""A request that asks where to go, and the answer that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from app.core.key_rules import Spending
from app.core.loads import Load, Reservation
from app.core.overlaps import Overlaps
from app.core.trust import Trust
from app.core.types import Incarnation, SequenceHash, TierOverlap
from app.core.verdicts import CALLER, LACKS
from app.core.worker_report import WorkerInfo
from app.policy.cost import IN_FLIGHT_TOKENS
from app.policy.locality import Best, Locality
from app.policy.transfer import TransferKind


class Step(StrEnum):
    """How far a prompt's tokens came on the way to being reused. The tokens of a step are some of
    those of the step before: asked before, held by a worker, held by one that could take the
    request, held by the one chosen, and cached there."""

    SEEN = "seen"
    HELD = "held"
    BEST = "best"
    CHOSEN = "chosen"
    USED = "used"


Lost = dict[tuple[str, str], int]
"""Tokens of a prompt, by the step that they did not reach, and the cause."""


@dataclass(slots=True)
class RouteRequest:
    """A request that asks where to go. Not frozen: making a frozen one takes three times as long.

    chain: sequence hashes of the prompt's full blocks. exclude: worker ids or worker keys.
    context_tokens: prompt and answer that its engine must take; 0: unknown. output_tokens: of the
    answer.
    part_tokens: of the longest prompt, where the request has several, of which isl_tokens is the
    sum; 0: it has one.
    began_ms: when it was sent, or else came in, by the Redis clock; None: unknown yet.
    session: "" for none. keeps_session: whether its worker is remembered in any case, as other
    namespaces have the same model.
    tenant, priority: used if it has to wait. holder: its sender, a key or else an address. owner:
    the key that alone may end it; "": anybody may.
    retry: whether it takes the place of what earlier tries with its id hold. balancer_id: equal if
    a balancer sends a request again; "" for none.
    local_only: whether no other worker may compute its prompt, or hand any of it on.
    is_blind: whether its tokens are unknown, and isl_tokens is a guess. trail: of a blind one,
    names of its text's prefixes, the longest first: it follows its session, or else the longest of
    these.
    model: or adapter, that was asked for; "": whichever there is. path: of its engine; "": any.
    carried: whether its router's door carries it, and keeps extending what is reserved.
    spending: against the limits of its key; None: there are none.
    asked_blocks: leading blocks that were asked before, found by its first decision; None: there
    was none.
    """

    request_id: str
    chain: list[SequenceHash]
    isl_tokens: int = 0
    policy: str = ""
    began_ms: int | None = None
    reserve: bool = True
    explain: bool = False
    exclude: frozenset[str] = frozenset()
    session: str = ""
    keeps_session: bool = False
    tenant: str = ""
    owner: str = ""
    priority: str = "normal"
    holder: str = ""
    retry: bool = False
    balancer_id: str = ""
    carried: bool = False
    local_only: bool = False
    is_blind: bool = False
    trail: Sequence[str] = ()
    model: str = ""
    path: str = ""
    context_tokens: int = 0
    output_tokens: int = 1
    part_tokens: int = 0
    spending: Spending | None = None
    asked_blocks: int | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Names of marks for which the request leaves workers alone."""
        return LACKS + self.model, LACKS + self.path, CALLER + self.holder


_ALIKE = "+"


def alike_of(attempt: str) -> str:
    """Returns Query.alike of an attempt."""
    return attempt.partition(_ALIKE)[2]


@dataclass(slots=True, eq=False)
class Query:
    """One try to decide a request, and what is known for it.

    tag: tells it from other tries of the same request; nonce: tells tries with one tag apart, which
    a balancer sends.
    began_ms: when it came in, by the Redis clock; None: unknown yet.
    held: leading blocks that workers hold; overlaps: as far as engines reuse them; published: those
    that workers have published, without predicted ones; None: all.
    computing: workers that publish what they hold, and compute more of the prompt for another
    request.
    bound: how many blocks of the overlaps are not published, by worker: see Decision.bound_blocks.
    is_short: whether Redis told less than all of the overlaps. trust: in what it told.
    session_at: the worker that its session last went to, or what else it follows. followed: 0-1,
    how much of that was followed; 0: as the settings say.
    tries: this one included. waited_ms: for a worker that could take it.
    alike: names the prompts in flight that begin as this long one does (app/state/in_flight.py);
    "": it is short, or enough of these are known.
    """

    request: RouteRequest
    tag: str
    began_ms: int | None = None
    overlaps: Overlaps = field(default_factory=Overlaps)
    published: Overlaps | None = None
    computing: Sequence[Incarnation] = ()
    held: Overlaps = field(default_factory=Overlaps)
    bound: dict[Incarnation, int] = field(default_factory=dict)
    is_short: bool = False
    trust: Trust = Trust.EXACT
    session_at: Incarnation | None = None
    followed: float = 0.0
    tries: int = 0
    waited_ms: int = 0
    alike: str = ""
    nonce: str = ""

    @property
    def attempt(self) -> str:
        """Name of the try: see Reservation."""
        alike = f"{_ALIKE}{self.alike}" if self.alike else ""
        return f"{self.began_ms or 0}-{self.tag}{self.nonce}{alike}"

    @property
    def is_long(self) -> bool:
        """Whether it matters which prompts in flight begin alike. Other policies than `latency` do
        not count those."""
        request = self.request
        return request.isl_tokens >= IN_FLIGHT_TOKENS and request.policy == "latency"

    @property
    def reservation_id(self) -> str:
        return f"{self.request.request_id}~{self.tag}"

    @property
    def replaces(self) -> str | None:
        """Id of what an earlier try may hold; None: there was none."""
        if self.request.retry:
            return self.request.request_id
        return self.reservation_id if self.request.balancer_id else None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as a decision saw it.

    load: what is reserved. others_requests: in its engine beyond those. queue_s: of all requests.
    terms: see the policy's cost function.
    """

    info: WorkerInfo
    overlap: TierOverlap
    load: Load
    others_requests: float
    queue_s: float
    eligible: bool
    cost: float
    terms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Source:
    """The worker from which the one that decodes gets blocks of the prompt.

    overlap: its own. reservation: what it owes; None: nothing is promised.
    """

    kind: TransferKind
    worker: WorkerInfo
    overlap: TierOverlap
    reservation: Reservation | None


@dataclass(slots=True)
class Decision:
    """The answer to a request: its worker, and what that was decided from.

    incarnation: the worker's when it was found. source: where the worker gets blocks of the prompt
    from; None: it computes what it lacks.
    overlap: leading blocks that are not computed anew: held by the source, if there is one, else by
    the worker. bound_blocks: those of the overlap that are not published yet, but belong to a
    prompt that the worker has just answered.
    degraded: whether it was decided without Redis, by the loads last seen, or without all overlaps.
    reservation: promised until it is released or expires; None: nothing is. reservation_id: names
    that promise, and nobody else can guess it.
    expected_s: predicted until the prompt is computed, with what is computed before it.
    costs_by_kind: seconds of the cheapest route of each kind, and candidates: both only where the
    request asked for an explanation.
    lost: what the worker lacks of the prompt, if it reserves: see app/policy/reuse.py.
    """

    request_id: str
    worker: WorkerInfo
    incarnation: Incarnation
    overlap: TierOverlap
    bound_blocks: int
    isl_tokens: int
    isl_blocks: int
    policy: str
    tied: bool
    tries: int
    degraded: bool
    trust: Trust
    reservation: Reservation | None
    reservation_id: str
    locality: Locality
    best: Best
    waited_ms: int
    expected_s: float
    source: Source | None
    costs_by_kind: dict[TransferKind, float]
    lost: Lost
    candidates: list[Candidate]

    @property
    def prompt_worker(self) -> WorkerInfo:
        """The worker whose engine says how much of the prompt it had cached."""
        is_split = self.source is not None and self.source.kind is TransferKind.SPLIT
        return self.source.worker if self.source is not None and is_split else self.worker

    @property
    def reserved(self) -> bool:
        return self.reservation is not None
