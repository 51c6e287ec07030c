"""Keys that open a server."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from app.core.errors import ConfigError, InvalidRequest, Unauthorized
from app.core.key_rules import KeyRules, parse_rules

_LONGEST = 4096


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def authorization_in(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Returns the header that names the sender's key; None if there is none. Raises InvalidRequest
    if there are two: proxies in front may take another one than this."""
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in (b"authorization", b"x-api-key"):
            if name in values:
                raise InvalidRequest(name.decode(), "comes twice")
            values[name] = value
    if b"authorization" not in values and b"x-api-key" in values:
        return b"Bearer " + values[b"x-api-key"]  # as Anthropic's clients send it
    return values.get(b"authorization")


def name_of(authorization: bytes | None, digests: Sequence[tuple[str, bytes]]) -> str | None:
    """Returns the name of the key in that header; None if none is valid. Every key is compared, so
    that time tells nothing about any."""
    scheme, _, key = (authorization or b"").partition(b" ")
    if scheme.lower() != b"bearer" or len(key) > _LONGEST:
        return None
    given, matching = digest_of(key.strip()), None
    for name, digest in digests:
        if hmac.compare_digest(digest, given):
            matching = name
    return matching


log = logging.getLogger(__name__)

MAX_KEYS_BYTES = 1024 * 1024
CONSOLE, CONSOLE_DATA = "/console/", "/console/api/"
"""Console's paths: below the first is the page, which needs no key; below the second its data, for
operators' keys."""
HEALTH = "/health"
OPEN = ("/", HEALTH, "/readiness", "/console", CONSOLE)
"""Paths of a router that need no key, and all below the last one but CONSOLE_DATA."""
USAGE = "/v1/usage"
"""Path for operators' keys alone, like all below CONSOLE_DATA."""
METRICS = "/metrics"
"""Path that metrics keys open, and no other."""
ROLES = ("metrics", "operator")

_RULE = re.compile(r"(tenant|requests|tokens|uncached|concurrent|models|isolate)=|priority<=")
Digests = list[tuple[str, bytes]]


class Keys:
    """Keys of a server. If none was ever named, the server is open to everybody who reaches it.

    api_key: one of them; "": none. path: a file with others, one on each line, `<name> <key>` and
    its rules; empty lines, and those that begin with #, count for nothing. metrics_key: opens
    METRICS alone, as do keys of the file with the word `metrics` behind them. CONSOLE_DATA opens to
    api_key and to keys with the word `operator`. open_paths: paths that need no key.

    rules: of the keys of the file, by name. isolates: whether any of them has a cache of its own.
    """

    rules: Mapping[str, KeyRules]
    isolates: bool

    def __init__(
        self,
        api_key: str,
        path: str = "",
        metrics_key: str = "",
        *,
        open_paths: Collection[str] = OPEN,
    ) -> None:
        self._open = open_paths
        self._is_asked = False
        self.change(api_key, path, metrics_key)

    def change(self, api_key: str, path: str, metrics_key: str) -> None:
        """Takes other keys, as if given at the start. Raises ConfigError, also if no key would be
        asked for any more, and then keeps the old ones."""
        if self._is_asked and not api_key and not path:
            raise ConfigError(
                "without --api-key and --api-key-file everybody would be let in: that counts from "
                "the next start on"
            )
        own, readers = _one("api-key", api_key), _one("metrics-key", metrics_key)
        read = _read(path)
        if path and not read.rules:
            raise ConfigError(f"api_key_file {path}: no key in it")
        if path and not (own or read.named or read.operators):
            raise ConfigError(
                f"api_key_file {path}: nothing but keys for {METRICS} in it; without keys for the "
                "rest, give one as --metrics-key"
            )
        self._is_asked = bool(api_key or path)
        self._own, self._own_readers = own, readers
        self._take(read)
        self.path = path

    def _take(self, read: _KeyFile) -> None:
        self._digests = self._own + read.named + read.operators
        self._readers = self._own_readers + read.readers
        self._operators = self._own + read.operators
        self.rules = read.rules
        self.isolates = any(rules.isolate for rules in read.rules.values())

    def __bool__(self) -> bool:
        return self._is_asked

    @property
    def is_locked(self) -> bool:
        """Whether a key is asked for and none is left: nobody is let in."""
        return self._is_asked and not self._digests

    def reload(self) -> None:
        """Reads the file again. A file without keys revokes those that it had. Raises ConfigError,
        and then keeps the old ones."""
        self._take(_read(self.path))
        if self.is_locked:
            log.critical("no key is left in %s: nobody is let in", self.path)
        else:
            log.info("%d keys are valid now", len(self._digests) + len(self._readers))

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Returns the name of the key that a request carries; "" if it needs none. Raises
        Unauthorized, and InvalidRequest if there are two."""
        is_asked, allowed = self._is_asked, self._digests
        if path == METRICS:
            is_asked, allowed = is_asked or bool(self._readers), self._operators + self._readers
        if not is_asked or path in self._open:
            return ""
        is_data = path.startswith(CONSOLE_DATA) or path == USAGE
        opens = self._operators if is_data else allowed
        if path.startswith(CONSOLE) and not is_data and CONSOLE in self._open:
            return ""
        given = authorization_in(headers)
        name = name_of(given, opens)
        if name is None and opens is not self._digests and name_of(given, self._digests):
            what = "the console" if path.startswith(CONSOLE) else "the usage of others"
            raise Unauthorized(f"This key does not open {what}: it is no operator's.")
        if name is None:
            raise Unauthorized("No valid API key was given: Authorization: Bearer KEY.")
        return name


def _one(name: str, key: str) -> Digests:
    return [(name, digest_of(key.encode()))] if key else []


class _KeyFile(NamedTuple):
    named: Digests
    readers: Digests
    operators: Digests
    rules: dict[str, KeyRules]


def _read(path: str) -> _KeyFile:
    keys_in = _KeyFile([], [], [], {})
    if not path:
        return keys_in
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            text = file.read(MAX_KEYS_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path}: {error}") from None
    if len(text) > MAX_KEYS_BYTES:
        raise ConfigError(f"api_key_file {path}: over {MAX_KEYS_BYTES} bytes")
    by_role = dict(zip(("", *ROLES), keys_in[:3], strict=True))
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            rules = _rules(words)
            same = keys_in.rules.setdefault(rules.name, rules)
            if same.limits != rules.limits:
                raise ValueError(f"{rules.name!r} has other limits in a line above")
        except ValueError as error:
            raise ConfigError(f"api_key_file {path}: line {number}: {error}") from None
        by_role[rules.role].append((rules.name, digest_of(words[1].encode())))
    return keys_in


def _rules(words: list[str]) -> KeyRules:
    """Returns a line's rules. Raises ValueError, which repeats no key."""
    if not all(word.isprintable() for word in words):  # such as zeros, after a power cut
        raise ValueError("it has characters that are not printed")
    if len(words) < 2:
        raise ValueError("it needs `<name> <key>`: was it cut?")
    if words[1] in ROLES or _RULE.match(words[1]):
        raise ValueError(f"it has {words[1]!r} in the place of a key: is there a name before it?")
    return parse_rules(words[0], words[2:], ROLES)


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
