"""Where other workers reach what a worker keeps for them."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from app.core.settings.worker import WorkerSettings


@dataclass(frozen=True, slots=True)
class Link:
    """Where others reach a worker's blocks: at `host`, and the port that `listening` has.

    kind: what has to be equal on both sides, by name. key: that others must have, and have to prove
    to them; "": none. answered: connections that have ended here, by what became of them.
    """

    listening: socket.socket
    host: str
    kind: Mapping[str, str]
    key: str = ""
    answered: Counter[str] = field(default_factory=Counter)

    @property
    def port(self) -> int:
        port: int = self.listening.getsockname()[1]
        return port


def open_link(settings: WorkerSettings, kind: Mapping[str, str], stack: ExitStack) -> Link:
    """Open as long as `stack` is. Raises ConfigError if the port is taken."""
    from app.http.server import listen  # engines on their own need no web server

    listening = stack.enter_context(listen(settings.host, settings.kv_port))
    host = urlsplit(settings.resolved_address()).hostname or settings.host
    return Link(listening, host, kind, settings.worker_key)
