"""Engines that a TOML file lists: a table for each, named as its worker.

[a]
engine-url = "http://10.0.0.1:8000"
role = "prefill"
"""

from __future__ import annotations

import asyncio
import logging
import tomllib
from pathlib import Path

from app.core.errors import ConfigError
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import check_base_url
from workers.discovery.engine import Engine, Engines, Tell, settings_of

log = logging.getLogger(__name__)

LOOK_S = 1.0
GONE_S = 10.0
"""What writes it may take so long."""
MAX_BYTES = 1024 * 1024


def read(process: EngineAgentSettings) -> Engines:
    """Raises ConfigError, which names the file."""
    path = process.engines
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"over {MAX_BYTES} bytes")
        tables = tomllib.loads(content.decode())
        return {name: Engine(_settings(process, name, table)) for name, table in tables.items()}
    except OSError as error:
        raise ConfigError(f"--engines {path}: {error.strerror or error}") from None
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"--engines {path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"--engines {path}: is nested too deeply") from None


def _settings(process: EngineAgentSettings, name: str, table: object) -> EngineAgentSettings:
    """Raises ConfigError."""
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: needs a table, [NAME], for each engine")
    told = dict(table)
    url = told.pop("engine-url", "")
    try:
        check_base_url(url if isinstance(url, str) else "-")
    except ValueError as error:
        raise ConfigError(f"{name}: engine-url: {error}") from None
    if not url:
        raise ConfigError(f"{name}: engine-url: where does the engine listen?")
    return settings_of(process, name, url, told)


async def follow(process: EngineAgentSettings, tell: Tell) -> None:
    """Tell what the file lists, time and again. One that is wrong changes nothing, and a change
    counts when it is read twice: while a file is written it is empty, or ends with any line."""
    problem, before = "", None
    while True:
        try:
            engines = await asyncio.to_thread(read, process)
            if before is None or engines == before:
                tell(engines)
            problem, before = "", engines
        except ConfigError as error:
            if str(error) != problem:
                log.warning("%s; the engines stay as they were", error)
            problem = str(error)
        await asyncio.sleep(LOOK_S)
