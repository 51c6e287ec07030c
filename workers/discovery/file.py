"""Engines that a TOML file lists: a table for each, named as its worker.

[a]
engine-url = "http://10.0.0.1:8000"
role = "prefill"
"""

from __future__ import annotations

import asyncio
import logging
import tomllib
from functools import partial
from pathlib import Path

from app.core.errors import ConfigError
from app.core.limits import MAX_ENGINES_BYTES
from app.core.settings.agent import EngineAgentSettings
from workers.discovery.engine import DiscoveredEngine, Members, Tell, settings_of

log = logging.getLogger(__name__)

LOOK_S = 1.0
GONE_S = 10.0
"""What writes it may take so long."""


def read(process: EngineAgentSettings, members: Members) -> None:
    """Raises ConfigError, which names the file, if it is no TOML or no table of it is right."""
    path = process.engines
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_ENGINES_BYTES + 1)
        if len(content) > MAX_ENGINES_BYTES:
            raise ConfigError(f"over {MAX_ENGINES_BYTES} bytes")
        tables = tomllib.loads(content.decode())
        members.read_all({name: partial(_engine, process, name, tables[name]) for name in tables})
        if members.wrong and not members.engines:
            raise ConfigError(next(iter(members.wrong.values())))
    except OSError as error:
        raise ConfigError(f"--engines {path}: {error.strerror or error}") from None
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"--engines {path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"--engines {path}: is nested too deeply") from None


def _engine(process: EngineAgentSettings, name: str, table: object) -> DiscoveredEngine:
    """Raises ConfigError."""
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: needs a table, [NAME], for each engine")
    told = dict(table)
    url = told.pop("engine-url", "")
    if not url or not isinstance(url, str):
        raise ConfigError(f"{name}: engine-url: where does the engine listen?")
    return DiscoveredEngine(settings_of(process, name, url, told))


async def follow(process: EngineAgentSettings, tell: Tell) -> None:
    """Tell what the file lists, time and again. One that is no TOML changes nothing, and a change
    counts when it is read twice: while a file is written it is empty, or ends with any line."""
    members, problem, before = Members(), "", None
    while True:
        try:
            await asyncio.to_thread(read, process, members)
            if before is None or members.engines == before:
                tell(members)
            problem, before = "", members.engines
        except ConfigError as error:
            if str(error) != problem:
                log.warning("%s; the engines stay as they were", error)
            problem = str(error)
        await asyncio.sleep(LOOK_S)
