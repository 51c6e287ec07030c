"""Variables of the environment that look like settings and are none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields

from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import variable
from app.core.settings.picker import PickerSettings
from app.core.settings.planner import PlannerSettings
from app.core.settings.worker import WorkerSettings

OTHERS = frozenset(
    {
        "KVROUTE_CONFIG",
        *("KVROUTE_BALANCER_HOST", "KVROUTE_BALANCER_PORT"),
        *("KVROUTE_BALANCER_TIMEOUT", "KVROUTE_BALANCER_ANSWER_TIMEOUT", "KVROUTE_ROUTERS_DNS"),
        *("KVROUTE_BALANCER_MAXCONN", "KVROUTE_BALANCER_MAXCONN_PER_CLIENT"),
    }
)
"""Of `kvroute up` and of deploy/haproxy.cfg."""
SETTINGS = OTHERS | {
    variable(f)
    for settings in (PickerSettings, WorkerSettings, EngineAgentSettings, PlannerSettings)
    for f in fields(settings)
}
_NOT_OURS = re.compile(r"KVROUTE_TEST_|KVROUTE_(\w+_)?(SERVICE_(HOST|PORT)|PORT)(_|$)")
"""Of the tests, and what Kubernetes sets in pods near a Service whose name begins with kvroute."""


def unknown_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names that begin with KVROUTE_ and that nothing reads, each with what to say of it."""
    for name in sorted(environment.keys() - SETTINGS):
        if name.startswith("KVROUTE_") and not _NOT_OURS.match(name):
            similar = difflib.get_close_matches(name, SETTINGS, 1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            yield name, f"the environment has {name}, which is no setting{hint}"
