"""What tells an agent of engines: a file, a name, or Kubernetes."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from app.core.errors import ConfigError
from app.core.extras import extra
from app.core.settings.agent import EngineAgentSettings
from workers.discovery import dns, file
from workers.discovery.engine import Members, Tell

SOURCES = ("engine_url", "engines", "engine_dns", "kubernetes_selector")
"""Settings of which one is given; the first is no source, but an engine."""

GONE_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineSource:
    """name: that of all processes that share its engines. gone_s: as for Absences."""

    name: str
    follow: Callable[[Tell], Awaitable[None]]
    gone_s: float = GONE_S


async def source_of(settings: EngineAgentSettings) -> EngineSource:
    """Raises ConfigError, and MissingPackage."""
    if settings.engines:
        file.read(settings, Members())
        # Another machine may have another file of that name.
        name = f"file {socket.gethostname()} {settings.engines}"
        return EngineSource(name, partial(file.follow, settings), file.GONE_S)
    if settings.engine_dns:
        look = _look(*dns.name_and_port(settings.engine_dns))
        name = f"dns {settings.engine_dns}"
        return EngineSource(name, partial(dns.follow, settings, look), dns.GONE_S)
    with extra("discovery"):
        from app.http.kubernetes import load_configuration
        from workers.discovery import kubernetes
    try:
        pods = kubernetes.Pods(settings, await load_configuration())
    except ConfigError as error:
        raise ConfigError(f"--kubernetes-selector: {error}") from None
    namespaces = ",".join(kubernetes.namespaces_of(settings))
    name = f"pods {namespaces} {settings.kubernetes_selector}"
    return EngineSource(name, pods.follow)


def _look(name: str, port: int | None) -> dns.Look:
    """Raises MissingPackage."""
    if port is not None:
        return partial(dns.addresses, name, port)
    with extra("discovery"):
        from workers.discovery import srv
    return partial(srv.places, name)
