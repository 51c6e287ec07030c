"""What a pod of Kubernetes says of the engine in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.core.errors import ConfigError
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import base_url
from workers.discovery.engine import Engine, settings_of

ANNOTATION = "kvroute.io/"
"""What an annotation begins with that is a flag of the agent, of this pod alone; and its port."""
REVISION = f"{ANNOTATION}revision"
"""Also a label, by which pods can be selected, too."""


def has_ended(pod: Mapping[str, Any]) -> bool:
    """pod: as the API has it."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def engine_of(pod: Mapping[str, Any], process: EngineAgentSettings) -> Engine | None:
    """pod: as the API has it. None: it has no address yet, or it has ended. Raises ConfigError."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    address = status.get("podIP")
    if not address or has_ended(pod):
        return None
    name = metadata["name"]
    told = {
        key.removeprefix(ANNOTATION): value
        for key, value in (metadata.get("annotations") or {}).items()
        if key.startswith(ANNOTATION)
    }
    told.setdefault("revision", (metadata.get("labels") or {}).get(REVISION, process.revision))
    port = _port(told.pop("port", ""), pod, process.port_name)
    if port is None:
        raise ConfigError(f"{name}: has no port named {process.port_name}: set {ANNOTATION}port")
    return Engine(
        settings_of(process, name, base_url(address, port), told),
        ready=any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in status.get("conditions") or ()
        ),
        leaving=metadata.get("deletionTimestamp") is not None,
    )


def _port(told: str, pod: Mapping[str, Any], port_name: str) -> int | None:
    """told: a number, or the name of a port; "": port_name is the name."""
    if told.isdigit() and 0 < int(told) < 65536:
        return int(told)
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == (told or port_name):
                return int(port["containerPort"])
    return None
