"""What a proposal is made from, and what it says. Times are seconds of one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from app.core.roles import Role
from app.core.worker_report import DEFAULT_SPEED, Speed
from app.simulation.profiles import Profile
from app.simulation.steps import SimRequest

USUAL_STARTUP_S = 60.0
"""Of workers none of which has been seen to start."""


class Phase(StrEnum):
    PENDING = "pending"
    """Asked for, and not registered yet."""
    LIVE = "live"
    DRAINING = "draining"


class Reason(StrEnum):
    """Why a fleet should have the size proposed."""

    BELOW_MINIMUM = "below_minimum"
    OVER_BUDGET = "over_budget"
    NO_METRICS = "no_metrics"
    """Some live worker's load is not known."""
    FLEET_CHANGED = "fleet_changed"
    """Somebody else changed its size, which is accepted."""
    CHANGE_UNDER_WAY = "change_under_way"
    GRACE = "grace"
    """It could be smaller, but a worker was added a short time ago."""
    AT_MINIMUM = "at_minimum"
    AT_BUDGET = "at_budget"
    PREFILL_QUEUE = "prefill_queue"
    KV_LOAD = "kv_load"
    LOW_LOAD = "low_load"
    COOL_DOWN = "cool_down"
    """Fewer would do, but not for long enough yet."""
    SLO_MISSED = "slo_missed"
    SLO_MET_BY_FEWER = "slo_met_by_fewer"
    OTHER_ROLE = "other_role"
    """A worker would do more good in the other pool."""
    ENOUGH = "enough"
    WOKEN = "woken"
    """Requests wait, and there is no worker."""
    ASLEEP = "asleep"
    IDLE = "idle"
    """For so long that even the last worker leaves."""
    SCHEDULED = "scheduled"
    """By somebody who sets sizes by the clock."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Workers of a fleet. decode: all that do not merely prefill; without roles these are all."""

    prefill: int
    decode: int

    @property
    def size(self) -> int:
        return self.prefill + self.decode

    def but(self, *, prefill: int = 0, decode: int = 0) -> Pools:
        """With so many more."""
        return Pools(self.prefill + prefill, self.decode + decode)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Means over the last interval."""

    prefill_queue: float
    """Requests that wait for the prefill of others."""
    queue_s: float
    """Seconds of prefill that are promised."""
    kv_usage: float
    """Share of its KV blocks in use, 0-1."""
    waiting: float
    """Requests that its engine has not begun."""
    requests: float
    """In flight."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker. load: None while it is not known."""

    name: str
    phase: Phase
    since_s: float
    """When the phase began."""
    load: WorkerLoad | None = None
    unique_value_s: float = 0.0
    """Seconds of prefill that losing it would cost: see app.planner.rules.policies."""
    speed: Speed = DEFAULT_SPEED
    profile: Profile | None = None
    """Of its engine in virtual time; None: it will be like the first of the others."""
    role: Role = Role.BOTH

    @property
    def pool(self) -> Role:
        return pool_of(self.role)


def pool_of(role: Role) -> Role:
    """PREFILL or DECODE: the pool in which a worker of that role counts."""
    return Role.PREFILL if role is Role.PREFILL else Role.DECODE


@dataclass(frozen=True, slots=True)
class Latencies:
    """What came of a request. token_s: mean time between two of its tokens."""

    ttft_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class PastRequest:
    """One recorded decision. request: its blocks stand for those of the prompt."""

    at_s: float
    worker: str
    request: SimRequest
    best_blocks: int = 0
    """Leading blocks that some worker held when it was decided."""
    came: Latencies | None = None
    """None: nobody has said."""
    source: str = ""
    """The worker that it got blocks of its prompt from; "": none."""

    @property
    def holders(self) -> tuple[str, ...]:
        """Workers that held the prompt afterwards."""
        return (self.worker, self.source) if self.source else (self.worker,)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the recorded decisions would have come to. attainment: share within the SLO, 0-1."""

    size: int
    requests: int
    attainment: float
    ttft_p99_s: float
    hit_rate: float
    """Share of the prompts' tokens that were cached."""
    pools: Pools | None = None
    """None: its workers have no roles."""

    @property
    def fleet(self) -> Pools:
        return self.pools or Pools(0, self.size)


@dataclass(frozen=True, slots=True)
class Proposal:
    """size: that it was made for, with those pending. victim: who should leave, if anyone."""

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
    """Of `size` and `desired`; None: the workers have no roles."""

    @property
    def before(self) -> Pools:
        return self.pools or Pools(0, self.size)

    @property
    def after(self) -> Pools:
        return self.desired_pools or Pools(0, self.desired)

    @property
    def starts(self) -> Mapping[Role, int]:
        """How many workers of each role should start."""
        more = {
            Role.PREFILL: self.after.prefill - self.before.prefill,
            Role.BOTH if self.pools is None else Role.DECODE: self.after.decode
            - self.before.decode,
        }
        return {role: count for role, count in more.items() if count > 0}


@dataclass(frozen=True, slots=True)
class FleetState:
    """recent: decisions, the oldest first, in blocks of `block_size` tokens. proposals: the last
    ones, the newest last. startup_s: from when a worker is asked for until it registers."""

    now_s: float
    workers: Sequence[WorkerState]
    recent: Sequence[PastRequest] = ()
    proposals: Sequence[Proposal] = ()
    block_size: int = 256
    startup_s: float = USUAL_STARTUP_S
    somebody_waits: bool = False
    """Whether any request waits at a router."""
    may_sleep: bool = False
    """Whether routers would know its models without a worker."""
    wants_roles: bool = False
    """Whether it is to have two pools even while no worker has a role."""

    def those(self, phase: Phase) -> list[WorkerState]:
        return [worker for worker in self.workers if worker.phase is phase]

    def live_in(self, pool: Role) -> list[WorkerState]:
        return [worker for worker in self.those(Phase.LIVE) if worker.pool is pool]

    @property
    def size(self) -> int:
        """Workers that are live or will be."""
        return len(self.workers) - len(self.those(Phase.DRAINING))

    @property
    def pools(self) -> Pools:
        """Workers of each pool that are live or will be."""
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
    """A first token within `ttft_s` plus `prefills` times the prefill that the prompt would take
    alone and uncached, and at most `token_s` per further token; for a share `target` of all."""

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
    """What every policy keeps to, and what some of them are set to."""

    min_workers: int = 1
    """0: all leave when nothing was asked for `idle_s`."""
    max_workers: int = 64
    idle_s: float = 300.0
    interval_s: float = 30.0
    """From one proposal to the next."""
    grace_intervals: int = 3
    """After a worker has joined, none leaves for so long."""
    prefill_queue_up: float = 0.5
    prefill_queue_down: float = 0.2
    kv_load_up: float = 0.9
    kv_load_down: float = 0.5
    kv_load_per_waiting: float = 0.02
    slo: Slo = Slo()
    longest_kept_s: float = 600.0
    """By `slo`, a worker to spare is kept for no longer, whatever its cache is worth."""
    window_s: float = 180.0
    """Recorded decisions of so long are replayed."""
    lead_s: float = 60.0
    """Those of so long before them too, but not judged: to find workers as busy as they were. At
    most half of all that are replayed."""
    window_requests: int = 4096
    """At most so many are replayed."""
    half_life_s: float = 300.0
    """A prompt asked so long ago says half as much of what will be asked for again."""
    attained_s: float = 1800.0
    """What came of the requests of so long counts as what was attained."""


def prefill_s(cached_tokens: int, prompt_tokens: int, speed: Speed) -> float:
    """Seconds to compute a prompt from its token `cached_tokens` on."""
    uncached = prompt_tokens - cached_tokens
    attended = (prompt_tokens + cached_tokens) / 2
    return uncached * (speed.prefill_s_per_token + speed.prefill_s_per_token2 * attended)
