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
    """Of the tokens of a prompt, those of each step are some of the step before it: asked before,
    held by a worker, by one that could take the request, by the one chosen, and cached there."""

    SEEN = "seen"
    HELD = "held"
    BEST = "best"
    CHOSEN = "chosen"
    USED = "used"


Lost = dict[tuple[str, str], int]
"""Tokens of a prompt, by the step that they did not reach, and why."""


@dataclass(slots=True)
class RouteRequest:
    """chain: sequence hashes of the prompt's full blocks. exclude: worker ids or worker keys.

    context_tokens: that its engine must take, of the prompt and what is asked for together; 0: that
    is not known. output_tokens: of these, what is asked for.
    began_ms: when it was sent, or else came in, by the Redis clock; None: that is not known yet.
    session: "" for none. keeps_session: where it went is remembered in any case, as other
    namespaces have the same model. tenant, priority: used if it has to wait. holder: who sent it:
    a key, or else an address. owner: the key that alone may end it; "": anybody may. retry: it
    takes the place of what earlier tries with its id hold.
    balancer_id: the same if a balancer sends a request again; "" for none.
    local_only: no other worker computes its prompt, or hands any of it on.
    is_blind: its tokens are not known, and isl_tokens is a guess. part_tokens: of the longest
    prompt, where it has several, of which isl_tokens is the sum; 0: it has one. trail: of a blind
    one, names of its text's prefixes, the longest first: it follows its session, or else the
    longest of these.
    model: or adapter, that was asked for; "": whichever there is. path: of its engine; "": any.
    carried: until it ends, its router's door carries it, and keeps extending what is reserved.
    Like everything that each decision creates, it is not frozen: that would take three times as
    long.
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
    """From the limits of its key; None: there are none."""
    asked_blocks: int | None = None
    """Leading blocks that were asked before, as its first decision found; None: there was none."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Names of those for which it leaves workers alone."""
        return LACKS + self.model, LACKS + self.path, CALLER + self.holder


_ALIKE = "+"


def alike_of(attempt: str) -> str:
    """Query.alike of an attempt."""
    return attempt.partition(_ALIKE)[2]


@dataclass(slots=True, eq=False)
class Query:
    """One try to decide a request, and what is known for it."""

    request: RouteRequest
    tag: str
    """Tells it from other tries of the same request."""
    began_ms: int | None = None
    """When it came in, by the Redis clock; None: that is not known yet."""
    overlaps: Overlaps = field(default_factory=Overlaps)
    """As far as engines reuse them."""
    published: Overlaps | None = None
    """Those that workers have published, without what they are predicted to hold; None: all."""
    computing: Sequence[Incarnation] = ()
    """Workers that publish what they hold, and compute more of the prompt for another request."""
    held: Overlaps = field(default_factory=Overlaps)
    """As far as workers hold them."""
    bound: dict[Incarnation, int] = field(default_factory=dict)
    """How many blocks of the overlaps are not published: see Decision.bound_blocks."""
    is_short: bool = False
    """Whether Redis did not tell all of the overlaps."""
    trust: Trust = Trust.EXACT
    """In what it told."""
    session_at: Incarnation | None = None
    """Where its session last went, or what else it follows."""
    followed: float = 0.0
    """How much of it that was, from 0 to 1; 0: as the settings say."""
    tries: int = 0
    """This one included."""
    waited_ms: int = 0
    """How long the request waited for a worker that could take it."""
    alike: str = ""
    """Names the prompts in flight that begin as a long one does: see app/state/in_flight.py. "": it
    is short, or enough of these are known of."""
    nonce: str = ""
    """Tells tries with the same tag apart: those of a request that a balancer sends again."""

    @property
    def attempt(self) -> str:
        """The name of the try: see Reservation."""
        alike = f"{_ALIKE}{self.alike}" if self.alike else ""
        return f"{self.began_ms or 0}-{self.tag}{self.nonce}{alike}"

    @property
    def is_long(self) -> bool:
        """Whether it matters what is on its way of its prompt. Policies but `latency` are those of
        others, and do not go by that."""
        request = self.request
        return request.isl_tokens >= IN_FLIGHT_TOKENS and request.policy == "latency"

    @property
    def reservation_id(self) -> str:
        return f"{self.request.request_id}~{self.tag}"

    @property
    def replaces(self) -> str | None:
        """The id of what an earlier try may hold; None: there was none."""
        if self.request.retry:
            return self.request.request_id
        return self.reservation_id if self.request.balancer_id else None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as a decision saw it. terms: see the policy's cost function.

    load: what is reserved. others_requests: in its engine beyond those. queue_s: of all.
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
    """The worker from which the one that decodes gets blocks of the prompt. overlap: its own.

    reservation: what it owes; None: nothing is promised.
    """

    kind: TransferKind
    worker: WorkerInfo
    overlap: TierOverlap
    reservation: Reservation | None


@dataclass(slots=True)
class Decision:
    """Where a request goes.

    incarnation: the worker's, as it was found.
    overlap: leading blocks that are not computed anew: those that the source holds, if there is
    one, else the worker.

    bound_blocks: so many of the overlap are not published yet, but the worker has just answered a
    prompt with them. It may hold more than that.
    degraded: decided without Redis, by load alone, from the last loads seen; or without all of the
    overlaps.
    reservation: what is promised to the request until that is released or expires; None: nothing.
    reservation_id: that of the promise, which nobody else can guess.
    expected_s: predicted until the prompt is computed, with what is computed before it.
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
    """None: the worker computes itself what it lacks."""
    costs_by_kind: dict[TransferKind, float]
    """What the cheapest of each kind costs, in seconds, where workers can pass on their KV. Filled
    if the request asked for an explanation."""
    lost: Lost
    """Filled if it reserves: what the worker lacks of the prompt. See app/policy/reuse.py."""
    candidates: list[Candidate]
    """Filled if the request asked for an explanation."""

    @property
    def prompt_worker(self) -> WorkerInfo:
        """The one whose engine says how much of the prompt it had cached."""
        is_split = self.source is not None and self.source.kind is TransferKind.SPLIT
        return self.source.worker if self.source is not None and is_split else self.worker

    @property
    def reserved(self) -> bool:
        return self.reservation is not None
