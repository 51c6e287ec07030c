"""Input and output of a proposal. Times are seconds of one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from app.core.roles import Role
from app.core.worker_report import DEFAULT_SPEED, Speed
from app.simulation.profiles import Profile
from app.simulation.steps import SimRequest

USUAL_STARTUP_S = 60.0
"""Startup time of workers of which none has been seen to start."""


class Phase(StrEnum):
    PENDING = "pending"  # asked for, and not registered yet
    LIVE = "live"
    DRAINING = "draining"


class Reason(StrEnum):
    """Why a fleet should have the size proposed."""

    BELOW_MINIMUM = "below_minimum"
    OVER_BUDGET = "over_budget"
    NO_METRICS = "no_metrics"  # some live worker's load is not known
    FLEET_CHANGED = "fleet_changed"  # by somebody else, which is accepted
    CHANGE_UNDER_WAY = "change_under_way"
    GRACE = "grace"  # it could be smaller, but a worker was added a short time ago
    AT_MINIMUM = "at_minimum"
    AT_BUDGET = "at_budget"
    PREFILL_QUEUE = "prefill_queue"
    KV_LOAD = "kv_load"
    LOW_LOAD = "low_load"
    COOL_DOWN = "cool_down"  # fewer would do, but not for long enough yet
    SLO_MISSED = "slo_missed"
    SLO_MET_BY_FEWER = "slo_met_by_fewer"
    OTHER_ROLE = "other_role"  # a worker would do more good in the other pool
    ENOUGH = "enough"
    WOKEN = "woken"  # requests wait, and there is no worker
    ASLEEP = "asleep"
    IDLE = "idle"  # for so long that even the last worker leaves
    SCHEDULED = "scheduled"  # sizes are set by the clock


@dataclass(frozen=True, slots=True)
class Pools:
    """Numbers of workers. decode: all that do not merely prefill; without roles, all."""

    prefill: int
    decode: int

    @property
    def size(self) -> int:
        return self.prefill + self.decode

    def but(self, *, prefill: int = 0, decode: int = 0) -> Pools:
        """Returns the pools with so many workers more."""
        return Pools(self.prefill + prefill, self.decode + decode)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Means over the last interval.

    prefill_queue: requests that wait for the prefill of others. queue_s: seconds of prefill that
    are promised. kv_usage: share of KV blocks in use, 0-1. waiting: requests that the engine has
    not begun. requests: those in flight.
    """

    prefill_queue: float
    queue_s: float
    kv_usage: float
    waiting: float
    requests: float


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker.

    since_s: when the phase began. load: None while it is not known. unique_value_s: seconds of
    prefill that losing the worker would cost. profile: of its engine in virtual time; None: like
    the first of the others.
    """

    name: str
    phase: Phase
    since_s: float
    load: WorkerLoad | None = None
    unique_value_s: float = 0.0
    speed: Speed = DEFAULT_SPEED
    profile: Profile | None = None
    role: Role = Role.BOTH

    @property
    def pool(self) -> Role:
        return pool_of(self.role)


def pool_of(role: Role) -> Role:
    """Returns the pool in which a worker of that role counts: PREFILL or DECODE."""
    return Role.PREFILL if role is Role.PREFILL else Role.DECODE


@dataclass(frozen=True, slots=True)
class Latencies:
    """Times of a request. token_s: mean time between two of its tokens."""

    ttft_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class PastRequest:
    """One recorded decision.

    request: its blocks stand for those of the prompt. best_blocks: leading blocks that some worker
    held then. came: None if nobody has said. source: the worker that handed on blocks; "": none.
    """

    at_s: float
    worker: str
    request: SimRequest
    best_blocks: int = 0
    came: Latencies | None = None
    source: str = ""

    @property
    def holders(self) -> tuple[str, ...]:
        """Workers that held the prompt afterwards."""
        return (self.worker, self.source) if self.source else (self.worker,)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Outcome of the recorded decisions in a fleet of some size.

    attainment: share within the SLO, 0-1. hit_rate: share of the prompts' tokens that were cached,
    0-1. pools: None if workers have no roles.
    """

    size: int
    requests: int
    attainment: float
    ttft_p99_s: float
    hit_rate: float
    pools: Pools | None = None

    @property
    def fleet(self) -> Pools:
        return self.pools or Pools(0, self.size)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposal. size: workers that it was made for, pending ones included. victim: the worker
    that should leave. pools, desired_pools: those of `size` and `desired`; None without roles."""

    at_s: float
    policy: str
    size: int
    desired: int
    reason: Reason
    victim: str | None = None
    inputs: Mapping[str, float] = field(default_factory=dict)
    candidates: tuple[Prediction, ...] = ()
    pools: Pools | None = None
    desired_pools: Pools | None = None

    @property
    def before(self) -> Pools:
        return self.pools or Pools(0, self.size)

    @property
    def after(self) -> Pools:
        return self.desired_pools or Pools(0, self.desired)

    @property
    def starts(self) -> Mapping[Role, int]:
        """Numbers of workers of each role that should start."""
        more = {
            Role.PREFILL: self.after.prefill - self.before.prefill,
            Role.BOTH if self.pools is None else Role.DECODE: self.after.decode
            - self.before.decode,
        }
        return {role: count for role, count in more.items() if count > 0}


@dataclass(frozen=True, slots=True)
class FleetState:
    """State of a fleet.

    recent: decisions, the oldest first, in blocks of `block_size` tokens. proposals: the last ones,
    the newest last. startup_s: time from asking for a worker until it registers. somebody_waits:
    whether a request waits at a router. may_sleep: whether routers would know its models without a
    worker. wants_roles: whether it is to have two pools even while no worker has a role.
    """

    now_s: float
    workers: Sequence[WorkerState]
    recent: Sequence[PastRequest] = ()
    proposals: Sequence[Proposal] = ()
    block_size: int = 256
    startup_s: float = USUAL_STARTUP_S
    somebody_waits: bool = False
    may_sleep: bool = False
    wants_roles: bool = False

    def those(self, phase: Phase) -> list[WorkerState]:
        return [worker for worker in self.workers if worker.phase is phase]

    def live_in(self, pool: Role) -> list[WorkerState]:
        return [worker for worker in self.those(Phase.LIVE) if worker.pool is pool]

    @property
    def size(self) -> int:
        """Number of workers that are live or will be."""
        return len(self.workers) - len(self.those(Phase.DRAINING))

    @property
    def pools(self) -> Pools:
        """Numbers of workers in each pool that are live or will be."""
        stay = [worker.pool for worker in self.workers if worker.phase is not Phase.DRAINING]
        return Pools(stay.count(Role.PREFILL), stay.count(Role.DECODE))

    @property
    def has_roles(self) -> bool:
        return self.wants_roles or any(worker.role is not Role.BOTH for worker in self.workers)

    @property
    def is_changing(self) -> bool:
        return any(worker.phase is not Phase.LIVE for worker in self.workers)


@dataclass(frozen=True, slots=True)
class Slo:
    """Promise of a first token within `ttft_s` plus `prefills` times the prefill that the prompt
    would take alone and uncached, and of `token_s` per further token, for a share `target` of
    all."""

    ttft_s: float = 2.0
    prefills: float = 1.5
    token_s: float = 0.1
    target: float = 0.95

    def is_met(self, came: Latencies, prompt_tokens: int, speed: Speed) -> bool:
        """speed: of the worker."""
        within_s = self.ttft_s + self.prefills * prefill_s(0, prompt_tokens, speed)
        return came.ttft_s <= within_s and came.token_s <= self.token_s


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits and settings of policies.

    min_workers: 0 lets all leave when nothing was asked for `idle_s`. interval_s: from one proposal
    to the next. grace_intervals: time after a worker has joined in which none leaves.
    longest_kept_s: time for which `slo` keeps a spare worker at most, whatever its cache is worth.
    window_s: time whose decisions are replayed. lead_s: time before, whose decisions are replayed
    and not judged, to find workers as busy as they were; at most half of all. window_requests:
    decisions that are replayed at most. half_life_s: age at which a prompt says half as much of
    what will be asked for again. attained_s: time whose requests count as attained.
    """

    min_workers: int = 1
    max_workers: int = 64
    idle_s: float = 300.0
    interval_s: float = 30.0
    grace_intervals: int = 3
    prefill_queue_up: float = 0.5
    prefill_queue_down: float = 0.2
    kv_load_up: float = 0.9
    kv_load_down: float = 0.5
    kv_load_per_waiting: float = 0.02
    slo: Slo = Slo()
    longest_kept_s: float = 600.0
    window_s: float = 180.0
    lead_s: float = 60.0
    window_requests: int = 4096
    half_life_s: float = 300.0
    attained_s: float = 1800.0


def prefill_s(cached_tokens: int, prompt_tokens: int, speed: Speed) -> float:
    """Returns the seconds to compute a prompt from its token `cached_tokens` on."""
    uncached = prompt_tokens - cached_tokens
    attended = (prompt_tokens + cached_tokens) / 2
    return uncached * (speed.prefill_s_per_token + speed.prefill_s_per_token2 * attended)
