"""Who may send requests: keys as bearer tokens, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from pathlib import Path

from app.core.errors import ConfigError
from app.door.errors import Unauthorized

MAX_KEYS_BYTES = 1024 * 1024
_LONGEST = 4096


OPEN = ("/health", "/readiness")
"""Paths that need no key."""


class Keys:
    """The keys that open a replica. None at all: it is open to everybody who reaches it."""

    def __init__(self, named: Iterable[tuple[str, str]]) -> None:
        """named: names and keys."""
        self._digests = [(name, _digest(key.encode())) for name, key in named]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> str:
        """The name of the key that a request carries; "": it needs none. Raises Unauthorized."""
        if not self._digests or path in OPEN:
            return ""
        given = headers.get(b"authorization")
        if given is None and b"x-api-key" in headers:
            given = b"Bearer " + headers[b"x-api-key"]  # as Anthropic's clients send it
        name = self._name_of(given)
        if name is None:
            raise Unauthorized("No valid API key was given: Authorization: Bearer KEY.")
        return name

    def _name_of(self, authorization: bytes | None) -> str | None:
        """The name of the key in that header; None: there is no valid one there.

        Compares with every key, whichever matches, so that time tells nothing about any.
        """
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or len(key) > _LONGEST:
            return None
        given, found = _digest(key.strip()), None
        for name, digest in self._digests:
            if hmac.compare_digest(digest, given):
                found = name
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def load_keys(api_key: str, api_key_file: str) -> Keys:
    """The key given itself, and those of a file: one on each line, `<name> <key>` or only the key.

    Empty lines, and those that begin with #, count for nothing. Raises ConfigError.
    """
    named = [("api-key", api_key)] if api_key else []
    if api_key_file:
        try:
            with Path(api_key_file).open(encoding="utf-8") as file:
                text = file.read(MAX_KEYS_BYTES + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file {api_key_file}: {error}") from None
        if len(text) > MAX_KEYS_BYTES:
            raise ConfigError(f"api_key_file {api_key_file}: over {MAX_KEYS_BYTES} bytes")
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2:
                raise ConfigError(
                    f"api_key_file {api_key_file}: line {number} has {len(words)} words, not "
                    "`<name> <key>` or a key"
                )
            named.append((words[0] if len(words) == 2 else f"line-{number}", words[-1]))
        if not named:
            raise ConfigError(f"api_key_file {api_key_file}: no key in it")
    return Keys(named)


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
