"""Settings that a replica takes over while it runs, when the file that has them changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields, replace

from app.core.errors import ConfigError
from app.core.settings.router import RouterSettings
from app.edge.services import Services, check
from app.edge.watched_files import WholeFiles, check_there

log = logging.getLogger(__name__)

LIVE = frozenset(
    {
        *("api_key", "api_key_file", "metrics_key", "log_level", "show_decision", "stalled_s"),
        *("max_request_bytes", "max_prompt_tokens", "model_alias"),
        "namespace_weights",
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
        self._settling = WholeFiles()

    def reload(self) -> None:
        """Read the file again. Raises ConfigError for what would be refused at a start, or would
        open the replica, and then the settings stay as they are."""
        old, new = self._replica.settings, self._read()
        named = new.api_key_file
        if named and named != old.api_key_file:
            check_there(named)
            if not self._settling.is_whole(named):
                raise ConfigError(f"api_key_file {named}: is being written")
        check(new)
        changed = {f.name for f in fields(old) if getattr(new, f.name) != getattr(old, f.name)}
        self._replica.adopt(replace(old, **{n: getattr(new, n) for n in changed & LIVE}))
        for name in sorted(changed & LIVE):
            log.info("%s: %s has changed", self._path, name)
        for name in sorted(changed - LIVE):
            log.warning("%s: %s has changed, and counts from the next start on", self._path, name)
