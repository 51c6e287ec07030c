"""Metrics of a planner."""

from __future__ import annotations

from collections.abc import Mapping

from app.core.roles import Role
from app.http.metrics import Table, counter, gauge
from app.http.supervisor import TASK_FAILURES
from app.planner.rules.state import Proposal


class PlannerMetrics(Table):
    """Metrics of one planner; only the leader's proposals count."""

    leading = gauge("planner_leads", "1 if this planner leads, else 0.", "namespace")
    desired = gauge("planner_desired_workers", "Number of workers last proposed.", "namespace")
    desired_of_role = gauge(
        "planner_desired_workers_of_role",
        "Number of workers last proposed for each pool of a fleet with roles.",
        "namespace",
        "role",
    )
    size = gauge("planner_workers", "Workers that are live or starting.", "namespace")
    value = gauge(
        "worker_unique_value_seconds",
        "Seconds of prefill that losing a worker would cost.",
        "namespace",
        "worker",
    )
    proposals = counter("planner_proposals", "Proposals by reason.", "namespace", "reason")
    task_failures = TASK_FAILURES
    failed_changes = counter(
        "planner_failed_changes",
        "Changes of the fleet that the connector refused or that never happened.",
        "namespace",
    )
    unreplayable = gauge(
        "planner_unreplayable_decisions",
        "Recent decisions left out of the replay: no worker could have answered them as recorded.",
        "namespace",
    )

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self._namespace = namespace
        self.leads = self.leading.labels(namespace)
        self.failures = self.failed_changes.labels(namespace)

    def proposed(self, proposal: Proposal, values: Mapping[str, float], unreplayable: int) -> None:
        self.desired.labels(self._namespace).set(proposal.desired)
        self.size.labels(self._namespace).set(proposal.size)
        self.desired_of_role.clear()
        if (pools := proposal.desired_pools) is not None:
            self.desired_of_role.labels(self._namespace, Role.PREFILL).set(pools.prefill)
            self.desired_of_role.labels(self._namespace, Role.DECODE).set(pools.decode)
        self.unreplayable.labels(self._namespace).set(unreplayable)
        self.proposals.labels(self._namespace, str(proposal.reason)).inc()
        self.value.clear()
        for worker, value_s in values.items():
            self.value.labels(self._namespace, worker).set(value_s)

    def silence(self) -> None:
        """Show nothing that another planner may know better."""
        self.leads.set(0)
        shown = (self.desired, self.desired_of_role, self.size, self.value, self.unreplayable)
        for metric in shown:
            metric.clear()
