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


class Keys:
    """The keys that open a replica. None at all: it is open to everybody who reaches it.

    api_key: one of them. path: a file with others, one on each line, `<name> <key>` or only the
    key; empty lines, and those that begin with #, count for nothing. "" for none.
    """

    def __init__(self, api_key: str, path: str = "") -> None:
        """Raises ConfigError."""
        self.change(api_key, path)

    def change(self, api_key: str, path: str) -> None:
        """Take other keys, as if they had been given at the start. Raises ConfigError, and then
        stays as it was."""
        stamp = stamp_of(path)
        own = [("api-key", digest_of(api_key.encode()))] if api_key else []
        self._digests = own + _read(path)
        self._own, self._path, self._stamp = own, path, stamp

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
            self._digests = self._own + _read(self._path)
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("%d keys are valid now", len(self._digests))

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The name of the key that a request carries; "": it needs none.

        Raises Unauthorized, and InvalidRequest if there are two.
        """
        if not self._digests or path in OPEN:
            return ""
        name = name_of(authorization_in(headers), self._digests)
        if name is None:
            raise Unauthorized("No valid API key was given: Authorization: Bearer KEY.")
        return name


def _read(path: str) -> list[tuple[str, bytes]]:
    """Names and digests of the keys in a file; "": of none. Raises ConfigError."""
    if not path:
        return []
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_KEYS_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path}: {error}") from None
    if len(text) > MAX_KEYS_BYTES:
        raise ConfigError(f"api_key_file {path}: over {MAX_KEYS_BYTES} bytes")
    named = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ConfigError(
                f"api_key_file {path}: line {number} has {len(words)} words, not `<name> <key>` "
                "or a key"
            )
        name = words[0] if len(words) == 2 else f"line-{number}"
        named.append((name, digest_of(words[-1].encode())))
    if not named:
        raise ConfigError(f"api_key_file {path}: no key in it")
    return named


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
