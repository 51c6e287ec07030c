"""Settings that a replica takes over while it runs, when the file that has them changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import fields, replace

from app.core.errors import ConfigError
from app.core.router_settings import RouterSettings
from app.edge.file_stamp import LOOK_EVERY_S, stamp_of
from app.edge.services import Services

log = logging.getLogger(__name__)

LIVE = frozenset(
    {
        *("api_key", "api_key_file", "metrics_key", "log_level", "show_decision", "stalled_s"),
        *("max_request_bytes", "max_body_bytes", "max_prompt_tokens"),
    }
)
"""Settings that count from the next request on. All others count from the next start on."""


class LiveSettings:
    """Keeps the settings of a replica like those of its file.

    path: of the file. read: what the settings would be, were the replica started now; raises
    ConfigError.
    """

    def __init__(self, replica: Services, path: str, read: Callable[[], RouterSettings]) -> None:
        self._replica = replica
        self._path = path
        self._read = read
        self._stamp = stamp_of(path)

    async def run(self) -> None:
        """Read the file again whenever it has changed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if stamp_of(self._path) != self._stamp:
                self.reload()

    def reload(self) -> None:
        """Read the file again. While that is impossible, the settings stay as they are."""
        self._stamp = stamp_of(self._path)
        old = self._replica.settings
        try:
            new = self._read()
            changed = {f.name for f in fields(old) if getattr(new, f.name) != getattr(old, f.name)}
            self._replica.adopt(replace(old, **{n: getattr(new, n) for n in changed & LIVE}))
        except ConfigError as error:
            log.error("the settings stay as they were: %s", error)
            return
        for name in sorted(changed & LIVE):
            log.info("%s: %s has changed", self._path, name)
        for name in sorted(changed - LIVE):
            log.warning("%s: %s has changed, and counts from the next start on", self._path, name)
