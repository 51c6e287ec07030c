"""Settings of a fleet in virtual time, and what its routers know of each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from app.core.roles import Role
from app.policy.cost import CostFunction
from app.policy.pairing import OWN_TRANSFER
from app.policy.policies import blocks
from app.simulation.profiles import USUAL, Link, Profile


class Sharing(StrEnum):
    """Knowledge of replicas about each other's reservations.

    EXACT: every one at once; a reservation is refused if another one came before it. LATE: every
    one SYNC_S later, as replicas inform each other.
    """

    EXACT = "exact"
    LATE = "late"
    NONE = "none"


SYNC_S = 0.005


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that is simulated, except the requests and the policy."""

    num_workers: int = 8
    """Workers at the start."""
    profiles: tuple[Profile, ...] = (USUAL,)
    """Profiles of the workers, in turn. SLOs are taken from the first."""
    host_pool_tokens: int = 0
    """Tokens for each worker; 0 means no host tier."""
    block_size: int = 256
    replicas: int = 1
    """Routers, which receive the requests in turn."""
    sharing: Sharing = Sharing.EXACT
    trip_s: float = 0.0005
    """Seconds from lookup to reservation."""
    event_delay_s: float = 0.0
    """Seconds from the end of a step until routers see what it did to the cache."""
    metrics_interval_s: float = 0.1
    idle_reported: bool = True
    """Whether workers report how long the blocks that they evict were idle."""
    link: Link | None = None
    """Link of each worker; None: KV travels between none of them."""
    kv_transfer: str = OWN_TRANSFER
    """Protocol of transfers: only our own engines fetch a prefix and compute the rest."""
    roles: tuple[Role, ...] = (Role.BOTH,)
    """Roles of the workers, in turn."""
    split_above: int | None = None
    """Tokens; a yardstick in place of the price: a prompt is computed by a source if its target
    lacks at least so many."""
    priorities: bool = False
    """Whether requests have those that they name; else all are alike."""
    wait_above_s: float | None = None
    """Seconds of every worker's queue above which requests wait; None: they never do."""
    seed: int = 0
    """Seed for ties. Any but 0 also moves sessions, those that start together by the same time."""


@dataclass(frozen=True, slots=True)
class PolicyVariant:
    """A policy of app.policy by its name; `blocks:W` is `blocks` with a prefill weight of W."""

    name: str

    @property
    def key(self) -> str:
        return self.name.partition(":")[0]

    @property
    def weight(self) -> float | None:
        """Raises ValueError if the weight is not a number."""
        _, _, weight = self.name.partition(":")
        return float(weight) if weight else None

    @property
    def cost(self) -> CostFunction | None:
        """Cost function with the weight; None: the policy's own."""
        weight = self.weight
        return None if weight is None else partial(blocks, prefill_weight=weight)
