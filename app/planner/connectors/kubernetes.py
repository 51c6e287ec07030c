"""Scales a Deployment, StatefulSet or ReplicaSet; each worker is a pod that has its name."""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
from kubernetes_asyncio import client
from kubernetes_asyncio.client.exceptions import ApiException

from app.core.errors import ConfigError
from app.core.roles import Role
from app.planner.connectors.base import ConnectorError

log = logging.getLogger(__name__)

KINDS = {"deployment": "deployment", "statefulset": "stateful_set", "replicaset": "replica_set"}
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
FIRST = "-2147483648"
"""Pods of the lowest cost are deleted first."""


class Kubernetes:
    """scale: KIND/NAME of all workers but those with the role prefill. prefill_scale: of these; "":
    there can be none. Raises ConfigError for any other form."""

    def __init__(
        self,
        scale: str,
        namespace: str,
        configuration: client.Configuration,
        prefill_scale: str = "",
    ) -> None:
        self._scale = _kind_and_name("kubernetes_scale", scale)
        self._prefill_scale = None
        if prefill_scale:
            self._prefill_scale = _kind_and_name("kubernetes_prefill_scale", prefill_scale)
        self._namespace, self._configuration = namespace, configuration

    async def add(self, role: Role, count: int, desired: int, reason: str) -> None:
        await self._change(role, count, None)

    async def remove(self, worker: str, role: Role, desired: int) -> None:
        await self._change(role, -1, worker)

    async def _change(self, role: Role, by: int, victim: str | None) -> None:
        """Relative to what it is now, so that an outside change counts."""
        scaled = self._prefill_scale if role is Role.PREFILL else self._scale
        if scaled is None:
            raise ConnectorError("kubernetes: no kubernetes_prefill_scale for the role prefill")
        kind, name = scaled
        try:
            async with client.ApiClient(self._configuration) as api:
                apps, core = client.AppsV1Api(api), client.CoreV1Api(api)
                if victim is not None:
                    cost = {"metadata": {"annotations": {DELETION_COST: FIRST}}}
                    await core.patch_namespaced_pod(victim, self._namespace, cost)
                suffix = f"namespaced_{kind}_scale"
                scale: Any = await getattr(apps, f"read_{suffix}")(name, self._namespace)
                before = scale.spec.replicas or 0
                body = {
                    # Refused if somebody else has changed it since.
                    "metadata": {"resourceVersion": scale.metadata.resource_version},
                    "spec": {"replicas": max(0, before + by)},
                }
                await getattr(apps, f"patch_{suffix}")(name, self._namespace, body)
        except ApiException as error:
            raise ConnectorError(f"kubernetes: {error.status} {error.reason}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectorError(f"kubernetes: {error}") from None
        log.info("%s scaled from %d by %+d", name, before, by)


def _kind_and_name(setting: str, scale: str) -> tuple[str, str]:
    """The kind as the client spells it. Raises ConfigError."""
    kind, _, name = scale.partition("/")
    if kind.lower() not in KINDS or not name:
        raise ConfigError(
            f"{setting}: needs KIND/NAME, KIND one of {', '.join(KINDS)}, got {scale!r}"
        )
    return KINDS[kind.lower()], name
