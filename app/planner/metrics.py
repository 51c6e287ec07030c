"""What a planner shows to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from app.planner.rules.state import Proposal


class PlannerMetrics:
    """Those of one planner; only the leader's proposals count."""

    def __init__(self, namespace: str) -> None:
        self.registry = CollectorRegistry()
        about = {"namespace": namespace}

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, ["namespace", *labels], registry=self.registry)

        self._namespace = namespace
        self.leads = gauge("kvroute_planner_leads", "1: this planner leads.").labels(**about)
        self._desired = gauge("kvroute_planner_desired_workers", "As last proposed.")
        self._size = gauge("kvroute_planner_workers", "That are live or will be.")
        self._value = gauge(
            "kvroute_worker_unique_value_seconds",
            "Prefill that losing the worker would cost.",
            "worker",
        )
        self._proposals = Counter(
            "kvroute_planner_proposals",
            "Proposals by why.",
            ["namespace", "reason"],
            registry=self.registry,
        )
        self.failures = Counter(
            "kvroute_planner_failed_changes",
            "Changes of the fleet that the connector refused, or that never came.",
            ["namespace"],
            registry=self.registry,
        ).labels(**about)

    def proposed(self, proposal: Proposal, values: Mapping[str, float]) -> None:
        self._desired.labels(self._namespace).set(proposal.desired)
        self._size.labels(self._namespace).set(proposal.size)
        self._proposals.labels(self._namespace, str(proposal.reason)).inc()
        self._value.clear()
        for worker, value_s in values.items():
            self._value.labels(self._namespace, worker).set(value_s)

    def silence(self) -> None:
        """Show nothing that another planner may know better."""
        self.leads.set(0)
        for gauge in (self._desired, self._size, self._value):
            gauge.clear()
