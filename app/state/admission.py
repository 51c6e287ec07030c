"""Limits of keys in Redis: buckets that fill by its clock, and requests under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from app.core.key_rules import KeyRules, Rate
from app.core.keys import Keyspace
from app.state.records import AdmitRow
from app.state.scripts import Call, call, command

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
        key=rules.name,
        asks=int(asks),
        held=held,
        concurrent=rules.concurrent or 0,
        requests=_limit(rules.requests),
        tokens=_limit(rules.tokens),
        uncached=_limit(rules.uncached),
        num_requests=requests,
        num_tokens=tokens,
        num_uncached=uncached,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
    )


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


def used(keyspace: Keyspace, rules: KeyRules) -> Call[dict[str, tuple[float, int]]]:
    """Returns limit -> what is taken of a key's limit and what may be at once, as of its last
    request."""

    def parse(reply: list[Any]) -> dict[str, tuple[float, int]]:
        fields = dict(zip(reply[::2], (value.split() for value in reply[1::2]), strict=True))
        found: dict[str, tuple[float, int]] = {}
        for name in ("requests", "tokens", "uncached"):
            if (rate := getattr(rules, name)) is not None:
                level = float(fields[name.encode()][0]) if name.encode() in fields else rate.burst
                found[name] = max(0.0, rate.burst - level), round(rate.burst)
        if rules.concurrent is not None:
            held = [value for name, value in fields.items() if name.startswith(b"held ")]
            found["concurrent"] = sum(int(value[0]) for value in held), rules.concurrent
        return found

    return command("limits", "HGETALL", f"{keyspace['limits:']}{rules.name}", parse=parse)


def _limit(rate: Rate | None) -> str:
    return "-" if rate is None else f"{rate.burst:.6f} {rate.per_s / 1000:.9f}"
