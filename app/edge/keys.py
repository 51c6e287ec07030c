"""Who may send requests: the keys that open a replica."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Iterable
from pathlib import Path

from app.core.errors import ConfigError
from app.door.errors import Unauthorized
from app.edge.live import LOOK_EVERY_S, stamp_of
from app.http.bearer import authorization_in, digest_of, name_of

log = logging.getLogger(__name__)

MAX_KEYS_BYTES = 1024 * 1024
OPEN = ("/health", "/readiness")
"""Paths that need no key."""
METRICS = "/metrics"
"""The path that a key of its own may open, and no other."""

Digests = list[tuple[str, bytes]]
"""Of keys, with their names."""


class Keys:
    """The keys that open a replica. None at all: it is open to everybody who reaches it.

    api_key: one of them. path: a file with others, one on each line, `<name> <key>` or only the
    key; empty lines, and those that begin with #, count for nothing. metrics_key: opens METRICS
    alone, as do keys of the file with the word `metrics` behind them. "" for none.
    """

    def __init__(self, api_key: str, path: str = "", metrics_key: str = "") -> None:
        """Raises ConfigError."""
        self.change(api_key, path, metrics_key)

    def change(self, api_key: str, path: str, metrics_key: str) -> None:
        """Take other keys, as if they had been given at the start. Raises ConfigError, and then
        stays as it was."""
        stamp = stamp_of(path)
        own, readers = _one("api-key", api_key), _one("metrics-key", metrics_key)
        read, more_readers = _read(path)
        self._digests, self._readers = own + read, readers + more_readers
        self._own, self._own_readers = own, readers
        self._path, self._stamp = path, stamp

    def __bool__(self) -> bool:
        return bool(self._digests)

    async def run(self) -> None:
        """Read the file again whenever it has changed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if stamp_of(self._path) != self._stamp:
                self.reload()

    def reload(self) -> None:
        """Read the file again. While that is impossible, the keys stay as they are."""
        if not self._path:
            return
        self._stamp = stamp_of(self._path)
        try:
            read, readers = _read(self._path)
            self._digests = self._own + read
            self._readers = self._own_readers + readers
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("%d keys are valid now", len(self._digests) + len(self._readers))

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The name of the key that a request carries; "": it needs none.

        Raises Unauthorized, and InvalidRequest if there are two.
        """
        allowed = self._digests
        if path == METRICS and self._readers:
            allowed = allowed + self._readers
        if not allowed or path in OPEN:
            return ""
        name = name_of(authorization_in(headers), allowed)
        if name is None:
            raise Unauthorized("No valid API key was given: Authorization: Bearer KEY.")
        return name


def _one(name: str, key: str) -> Digests:
    return [(name, digest_of(key.encode()))] if key else []


def _read(path: str) -> tuple[Digests, Digests]:
    """The keys in a file, and those of them that open METRICS alone; "": none. Raises
    ConfigError."""
    if not path:
        return [], []
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_KEYS_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path}: {error}") from None
    if len(text) > MAX_KEYS_BYTES:
        raise ConfigError(f"api_key_file {path}: over {MAX_KEYS_BYTES} bytes")
    named: Digests = []
    readers: Digests = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 3 or (len(words) == 3 and words[2] != "metrics"):
            raise ConfigError(
                f"api_key_file {path}: line {number} has {len(words)} words, not `<name> <key>`, "
                "`<name> <key> metrics` or a key"
            )
        name = words[0] if len(words) > 1 else f"line-{number}"
        keys = readers if len(words) == 3 else named
        keys.append((name, digest_of(words[min(len(words), 2) - 1].encode())))
    if not named and not readers:
        raise ConfigError(f"api_key_file {path}: no key in it")
    return named, readers


def check_open(host: str, keys: Keys, *, no_auth: bool) -> None:
    """Raises ConfigError if anybody on the network could use a replica without a key."""
    if keys or no_auth:
        return
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"without a key, only loopback addresses are served, and host is {host!r}: set "
            "--api-key or --api-key-file, or --no-auth if something in front of it asks for keys"
        )
