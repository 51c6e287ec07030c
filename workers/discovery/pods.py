"""What a pod of Kubernetes says of the engine in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.core.errors import ConfigError, shown
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import base_url
from workers.discovery.engine import Engine, port_of, settings_of

ANNOTATION = "kvroute.io/"
"""What an annotation begins with that is a flag of the agent, of this pod alone; and its port."""
REVISION = f"{ANNOTATION}revision"
"""Also a label, by which pods can be selected, too."""
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
NODE_TYPE = "ray.io/node-type"
"""Labels by which LeaderWorkerSet (KServe has it, too) and KubeRay tell one engine's pods apart."""


def uid_of(pod: Any) -> str:
    """pod: as the API has it. "": it has none."""
    try:
        return str(pod["metadata"]["uid"])
    except (LookupError, TypeError):
        return ""


def has_ended(pod: Mapping[str, Any]) -> bool:
    """pod: as the API has it."""
    status = pod.get("status")
    return isinstance(status, dict) and status.get("phase") in ("Succeeded", "Failed")


def is_leader(labels: Mapping[str, str]) -> bool:
    """Whether a pod with these labels listens for an engine, which may span several pods."""
    return labels.get(WORKER_INDEX, "0") == "0" and labels.get(NODE_TYPE, "head") == "head"


def engine_of(
    pod: Mapping[str, Any], process: EngineAgentSettings, prefix: str = ""
) -> Engine | None:
    """pod: as the API has it. prefix: of the worker's name. None: it has no address yet, has ended,
    or only computes for the pod that leads. Raises ConfigError, and others if it is no pod."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    address = status.get("podIP")
    if not address or has_ended(pod) or not is_leader(labels):
        return None
    name, _ = prefix + metadata["name"], metadata["uid"]
    told = {
        key.removeprefix(ANNOTATION): value
        for key, value in (metadata.get("annotations") or {}).items()
        if key.startswith(ANNOTATION)
    }
    told.setdefault("revision", labels.get(REVISION, process.revision))
    port_text = told.pop("port", "") or process.port_name
    port = port_of(port_text) or _port_named(port_text, pod)
    if port is None:
        raise ConfigError(
            f"{name}: has no port {shown(port_text)}: set {ANNOTATION}port to a number from 1 to "
            "65535, or to a port's name"
        )
    return Engine(
        settings_of(process, name, base_url(address, port), told),
        ready=any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in status.get("conditions") or ()
        ),
        leaving=metadata.get("deletionTimestamp") is not None,
    )


def _port_named(name: str, pod: Mapping[str, Any]) -> int | None:
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == name:
                return int(port["containerPort"])
    return None
