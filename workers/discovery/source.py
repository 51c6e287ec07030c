"""Sources of engines for an agent: a file with a table for each, a name, or Kubernetes."""

from __future__ import annotations

import asyncio
import logging
import socket
import tomllib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from app.core.errors import ConfigError
from app.core.extras import extra
from app.core.limits import MAX_ENGINES_BYTES
from app.core.settings.agent import EngineAgentSettings
from workers.discovery import dns
from workers.discovery.engine import DiscoveredEngine, Members, Tell, settings_of

log = logging.getLogger(__name__)

SOURCES = ("engine_url", "engines", "engine_dns", "kubernetes_selector")
"""Settings of which one is given; the first is no source, but an engine."""

GONE_S = 60.0
LOOK_S = 1.0
FILE_GONE_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineSource:
    """A source, and the seconds for which its answers lack an engine that is gone. name: that of
    all processes that share its engines."""

    name: str
    follow: Callable[[Tell], Awaitable[None]]
    gone_s: float = GONE_S


def read_file(process: EngineAgentSettings, members: Members) -> None:
    """Raises ConfigError, which names the file, if it is no TOML or no table of it is right."""
    path = process.engines
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_ENGINES_BYTES + 1)
        if len(content) > MAX_ENGINES_BYTES:
            raise ConfigError(f"over {MAX_ENGINES_BYTES} bytes")
        tables = tomllib.loads(content.decode())
        members.read_all(
            {name: partial(_engine_of_table, process, name, tables[name]) for name in tables}
        )
        if members.wrong and not members.engines:
            raise ConfigError(next(iter(members.wrong.values())))
    except OSError as error:
        raise ConfigError(f"--engines {path}: {error.strerror or error}") from None
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"--engines {path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"--engines {path}: is nested too deeply") from None


def _engine_of_table(process: EngineAgentSettings, name: str, table: object) -> DiscoveredEngine:
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: needs a table, [NAME], for each engine")
    told = dict(table)
    url = told.pop("engine-url", "")
    if not url or not isinstance(url, str):
        raise ConfigError(f"{name}: engine-url: where does the engine listen?")
    return DiscoveredEngine(settings_of(process, name, url, told))


async def follow_file(process: EngineAgentSettings, tell: Tell) -> None:
    """Tells what the file lists, time and again. A file that is no TOML changes nothing, and a
    change counts when it is read twice: while a file is written it is empty, or ends with any
    line."""
    members, problem, before = Members(), "", None
    while True:
        try:
            await asyncio.to_thread(read_file, process, members)
            if before is None or members.engines == before:
                tell(members)
            problem, before = "", members.engines
        except ConfigError as error:
            if str(error) != problem:
                log.warning("%s; the engines stay as they were", error)
            problem = str(error)
        await asyncio.sleep(LOOK_S)


async def source_of(settings: EngineAgentSettings) -> EngineSource:
    """Raises ConfigError, and MissingPackage."""
    if settings.engines:
        read_file(settings, Members())
        # Another machine may have another file of that name.
        name = f"file {socket.gethostname()} {settings.engines}"
        return EngineSource(name, partial(follow_file, settings), FILE_GONE_S)
    if settings.engine_dns:
        look = dns.look_of(settings.engine_dns)
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
