"""Settings of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.core.settings.kinds import (
    COMMON,
    PORT,
    POSITIVE_SECONDS,
    PROCESSES,
    SECONDS,
    CommonSettings,
    Integers,
    OneOf,
    Real,
    setting,
)

CONNECTORS = ("advise", "local", "exec", "kubernetes")


class ScalingPolicy(StrEnum):
    """Rule that sizes the fleet: see app/planner/rules/policies.py."""

    SLO = "slo"
    THRESHOLD = "threshold"


@dataclass(frozen=True, slots=True)
class PlannerSettings(CommonSettings):
    """Settings of one planner; any number of them may stand by."""

    port: int = setting(
        8083, "Port for /health and /metrics; 0 takes a free one.", PORT, heading=COMMON, often=True
    )
    connector: str = setting(
        "advise",
        "What changes the fleet's size; advise: nothing, proposals are only published.",
        OneOf(CONNECTORS),
        heading="Size of the fleet",
        often=True,
    )
    scaling_policy: str = setting(
        "slo", "What the fleet's size follows.", OneOf(tuple(ScalingPolicy)), often=True
    )
    roles: bool = setting(
        False,
        "Have one pool of workers prefill and another decode, each of at least one; unset: only if "
        "some workers have these roles.",
        bool,
    )
    interval_s: float = setting(30.0, "Seconds between proposals.", POSITIVE_SECONDS)
    min_workers: int = setting(
        1,
        "Minimum number of workers; 0: the last one leaves too, and the next request starts one.",
        Integers(0, 1024),
        often=True,
    )
    idle_s: float = setting(
        300.0, "With --min-workers 0: seconds without requests after which workers leave.", SECONDS
    )
    max_workers: int = setting(8, "Maximum number of workers.", PROCESSES, often=True)
    grace_intervals: int = setting(
        3, "Number of intervals after a worker joined during which none is removed.", PROCESSES
    )
    slo_ttft_s: float = setting(
        2.0,
        "Seconds within which an answer should begin, besides one and a half times the prefill "
        "that its prompt takes alone.",
        POSITIVE_SECONDS,
        heading="Objectives",
        often=True,
    )
    slo_token_s: float = setting(
        0.1, "Seconds that each further token may take.", POSITIVE_SECONDS, often=True
    )
    slo_target: float = setting(
        0.95, "Share of requests that must meet both, 0-1.", Real(0, 1), often=True
    )
    startup_deadline_s: float = setting(
        600.0,
        "Seconds after which a worker that has not registered is given up.",
        SECONDS,
        heading="Deadlines",
    )
    lease_s: float = setting(
        10.0,
        "Seconds after which another planner takes over from one that is silent.",
        Real(1, 3600),
    )
    exec_command: str = setting(
        "",
        "Connector exec: the command that is run, with a JSON object on its standard input.",
        heading="Connectors",
        often=True,
    )
    worker_flags: str = setting(
        "", "Connector local: flags of the `kvroute worker` processes that are started.", often=True
    )
    local_folder: str = setting(
        "",
        "Connector local: folder in which a planner finds the workers that another one started; "
        "unset: kvroute/planner in the user's state folder.",
    )
    kubernetes_scale: str = setting(
        "",
        "Connector kubernetes: what is scaled, KIND/NAME with KIND deployment, statefulset or "
        "replicaset.",
        often=True,
    )
    kubernetes_prefill_scale: str = setting(
        "",
        "Connector kubernetes: what is scaled of workers with the role prefill; then "
        "--kubernetes-scale is of the others.",
    )
    kubernetes_namespace: str = setting("default", "Connector kubernetes: its namespace there.")
