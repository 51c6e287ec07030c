"""What all parts of one router replica share."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.keys import Keyspace
from app.core.settings.router import RouterSettings
from app.router.fleet import Fleet
from app.router.limiter import Limiter
from app.router.metrics import Telemetry
from app.router.tally import UsageTally
from app.state.scripts import ScriptRunner


@dataclass(frozen=True, slots=True)
class Replica:
    """One router replica: how it reaches Redis, its settings, the workers it knows, its metrics,
    what its requests have used, and the limits of their keys."""

    runner: ScriptRunner
    keyspace: Keyspace
    settings: RouterSettings
    fleet: Fleet
    telemetry: Telemetry
    tally: UsageTally
    limiter: Limiter
