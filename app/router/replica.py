"""What all parts of one router replica share."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.keys import Keyspace
from app.core.settings.router import RouterSettings
from app.router.fleet import Fleet
from app.router.metrics import Telemetry
from app.router.tally import Tally
from app.state.scripts import ScriptRunner


@dataclass(frozen=True, slots=True)
class Replica:
    """One router replica: how it reaches Redis, its settings, the workers it knows, its metrics,
    and what its requests have used."""

    runner: ScriptRunner
    keyspace: Keyspace
    settings: RouterSettings
    fleet: Fleet
    telemetry: Telemetry
    tally: Tally
