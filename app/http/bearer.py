"""Bearer keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from app.core.errors import InvalidRequest

_LONGEST = 4096


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def authorization_in(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Returns the header that names the sender's key; None if there is none.

    Raises InvalidRequest if there are two: proxies in front may take another one than this.
    """
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
