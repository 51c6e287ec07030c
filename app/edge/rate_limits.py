"""Headers that tell clients what is left of the limits of their key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

from app.core.key_rules import KeyRules, Rate
from app.http.errors import Dialect, Headers


def limits_shown(rules: KeyRules, left: Mapping[str, int], dialect: Dialect) -> Headers:
    """Returns the headers as the clients of that dialect read them. left: of requests and tokens;
    -1: not known."""
    return [
        (header.encode(), value.encode())
        for name in ("requests", "tokens")
        if (rate := getattr(rules, name)) is not None and left.get(name, -1) >= 0
        for header, value in _of(name, rate, left[name], dialect)
    ]


def _of(name: str, rate: Rate, left: int, dialect: Dialect) -> Iterator[tuple[str, str]]:
    full_s = max(0.0, rate.burst - left) / rate.per_s
    if dialect is Dialect.ANTHROPIC:
        begin, limit, remaining, reset = (
            f"anthropic-ratelimit-{name}-",
            "limit",
            "remaining",
            "reset",
        )
        at = datetime.now(UTC) + timedelta(seconds=full_s)
        when = at.isoformat(timespec="seconds").replace("+00:00", "Z")
    else:
        begin, when = "x-ratelimit-", f"{full_s:.3f}s"
        limit, remaining, reset = (f"{word}-{name}" for word in ("limit", "remaining", "reset"))
    yield begin + limit, str(rate.amount)
    yield begin + remaining, str(left)
    yield begin + reset, when
