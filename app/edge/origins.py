"""Pages of other origins in browsers: they may call models, and nothing of operators."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException

from app.door.answer_request import is_of_door

ASKED = b"x-kvroute-console"
"""A header that no form can send, with what changes something: see `check_asked`."""


def may_be_shared(path: str) -> bool:
    """Whether pages of --cors-origin may call it."""
    return path.startswith("/v1/") or is_of_door(path)


def check_origin(headers: Iterable[tuple[bytes, bytes]], *, asks_for_keys: bool) -> None:
    """Raises HTTPException if a page of another origin asks for what the console alone shows. Other
    programs than browsers do not say where they come from.

    asks_for_keys: this router, or a proxy in front. Else anybody may have a name that leads to this
    machine, and a page of that origin: so no name but `localhost` is served.
    """
    said = dict(headers)
    if not asks_for_keys and not _is_loopback(said.get(b"host", b"").decode("latin-1")):
        raise HTTPException(
            403, "Without keys, the console is at localhost and loopback addresses alone."
        )
    if (site := said.get(b"sec-fetch-site")) is not None:
        is_own = site in (b"same-origin", b"none")
    else:
        # Only pages that came encrypted, or from this machine, say more than their origin.
        origin = said.get(b"origin", b"").decode("latin-1")
        is_own = not origin or _place(origin) == said.get(b"host", b"").decode("latin-1").lower()
    if not is_own:
        raise HTTPException(403, "Pages of other origins may not ask the console.")


def check_asked(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises HTTPException unless a request that changes something has the header ASKED."""
    if ASKED not in dict(headers):
        raise HTTPException(403, f"The header {ASKED.decode()} is missing: any value will do.")


def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("", "localhost") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _place(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
