"""Limits of keys in Redis: buckets that fill by its clock, and requests under way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from app.core.key_rules import KeyRules, Rate
from app.core.keys import Keyspace
from app.state.records import AdmitRow
from app.state.scripts import Call, call, command

_NUMBERS = AdmitRow._fields.index("num_requests")
SETTLES, LOOKS = 0, 2
"""Values of AdmitRow.asks."""
KEPT_MS = 48 * 3_600_000
"""Lifetime of a key's limits, longer than any bucket takes to fill."""


class Admitted(NamedTuple):
    """Outcome of a row. refused: the limit that refuses it; "": none. number: uncached tokens
    taken, or ms until it may be let in. requests, tokens: what is left; -1: no limit. replicas: how
    many have asked about the key lately."""

    refused: str
    number: int
    requests: int
    tokens: int
    replicas: int


def row_of(
    rules: KeyRules,
    held: int,
    *,
    asks: bool = False,
    requests: int = 0,
    tokens: int = 0,
    uncached: int = 0,
    prompt_tokens: int = 0,
    cached_tokens: int = 0,
) -> AdmitRow:
    """Returns a request to let in or, with `asks` False, to settle: see lua/admit.lua."""
    return AdmitRow(
        *(rules.name, int(asks), held, rules.concurrent or 0),
        *(*_times_ms(rules.requests), *_times_ms(rules.tokens), *_times_ms(rules.uncached)),
        num_requests=requests,
        num_tokens=tokens,
        num_uncached=uncached,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
    )


def together(one: AdmitRow, other: AdmitRow) -> AdmitRow:
    """Returns two rows that settle requests of one key as one, of the limits of the second."""
    sums = map(sum, zip(one[_NUMBERS:], other[_NUMBERS:], strict=True))
    return AdmitRow(*other[:_NUMBERS], *sums)


def admit(
    keyspace: Keyspace, replica: str, number: int, rows: Sequence[AdmitRow], *, lease_ms: int
) -> Call[list[Admitted]]:
    """Lets requests of limited keys in, or settles what they used; returns each row's outcome.
    number: larger than in the replica's earlier calls."""
    fields = [field for row in rows for field in row]

    def parse(reply: list[Any]) -> list[Admitted]:
        return [
            Admitted("" if outcome == 1 else outcome.decode(), *numbers)
            for outcome, *numbers in reply
        ]

    return call("admit", keyspace, replica, number, lease_ms, KEPT_MS, *fields, parse=parse)


def used(keyspace: Keyspace, rules: KeyRules, now_ms: int) -> Call[dict[str, tuple[float, int]]]:
    """Returns limit -> what is taken of a key's limit and what may be at once. now_ms: by the Redis
    clock."""

    def parse(reply: list[Any]) -> dict[str, tuple[float, int]]:
        fields = dict(zip(reply[::2], (value.split() for value in reply[1::2]), strict=True))
        found: dict[str, tuple[float, int]] = {}
        for name in ("requests", "tokens", "uncached"):
            if (rate := getattr(rules, name)) is not None:
                until_ms = float(fields.get(f"{name}_until".encode(), [b"0"])[0])
                taken = max(0.0, until_ms - now_ms) * rate.per_s / 1000
                found[name] = taken, round(rate.burst)
        if rules.concurrent is not None:
            held = [value for name, value in fields.items() if name.startswith(b"held ")]
            found["concurrent"] = sum(int(value[0]) for value in held), rules.concurrent
        return found

    return command("limits", "HGETALL", f"{keyspace['limits:']}{rules.name}", parse=parse)


@lru_cache(maxsize=4096)
def _times_ms(rate: Rate | None) -> tuple[str, str]:
    """Returns ms in which an empty bucket fills, and ms for one more in it; "": no limit."""
    if rate is None:
        return "", ""
    return repr(1000 * rate.burst / rate.per_s), repr(1000 / rate.per_s)
