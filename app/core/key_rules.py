"""Rules of an API key: its limits, and what its requests may ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase

from app.core.errors import RoutingError
from app.core.settings.kinds import PRIORITIES
from app.core.types import TENANT_ID

_RATE = re.compile(r"([1-9]\d{0,11})([kMG]?)/([smhd])")
_TIMES = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}
_PERIODS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
BURST = 6
"""Divisor of an amount: a sixth of it, or what comes in a second, may be used at once."""
ANY = "*"


@dataclass(frozen=True, slots=True)
class Rate:
    """Amount per period."""

    amount: int
    period_s: int

    def __str__(self) -> str:
        unit = next(unit for unit, seconds in _PERIODS_S.items() if seconds == self.period_s)
        return f"{self.amount}/{unit}"

    @property
    def per_s(self) -> float:
        return self.amount / self.period_s

    @property
    def burst(self) -> float:
        """Amount that may be used at once, after a rest."""
        return max(1.0, self.per_s, self.amount / BURST)

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Returns the rate that a text like `600/m` or `2M/h` says. Raises ValueError."""
        match = _RATE.fullmatch(text)
        if match is None:
            raise ValueError("needs a number by second, minute, hour or day, as 600/m or 2M/d")
        return cls(int(match[1]) * _TIMES[match[2]], _PERIODS_S[match[3]])


@dataclass(frozen=True, slots=True)
class KeyRules:
    """Rules of one key.

    role: metrics, operator, or "" for clients. tenant: under which its requests count; "": the
    key's name; ANY: the one that each request names. requests, tokens: of prompts and answers;
    uncached: prompt tokens that had to be computed; concurrent: requests at once. None: no limit.
    priority: the highest that its requests may have. models: patterns of names; none: all. isolate:
    the tenant shares no cache with others.
    """

    name: str
    role: str = ""
    tenant: str = ""
    requests: Rate | None = None
    tokens: Rate | None = None
    uncached: Rate | None = None
    concurrent: int | None = None
    priority: str = PRIORITIES[0]
    models: tuple[str, ...] = ()
    isolate: bool = False

    @property
    def limits(self) -> tuple[object, ...]:
        """Limits that refuse requests; keys of one name share them."""
        return self.requests, self.tokens, self.uncached, self.concurrent

    @property
    def is_limited(self) -> bool:
        return any(limit is not None for limit in self.limits)

    @property
    def is_client(self) -> bool:
        return not self.role

    def may_ask(self, model: str) -> bool:
        """Whether requests of the key may name `model`."""
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)

    def highest(self, priority: str) -> str:
        """Returns `priority`, lowered to the highest that the key's requests may have."""
        return max(priority, self.priority, key=PRIORITIES.index)


@dataclass(slots=True, eq=False)
class Spending:
    """A request's share of its key's limits, from its first decision to its end. tokens, uncached:
    estimates, taken once the request is let in. left: of requests and tokens then, by limit; -1: no
    limit. refused: why the request is not let in. is_owed: nothing was taken, as Redis was away."""

    rules: KeyRules
    tokens: int = 0
    uncached: int = 0
    left: Mapping[str, int] = field(default_factory=dict)
    refused: RateLimited | None = None
    is_let_in: bool = False
    is_owed: bool = False
    has_ended: bool = False


class RateLimited(RoutingError):
    """The limits of a key do not let a request in for now.

    limit: the one that refuses. left: of requests and tokens, by limit; -1: no limit.
    """

    outcome = "limited"

    def __init__(
        self, rules: KeyRules, limit: str, retry_after_s: float, left: Mapping[str, int]
    ) -> None:
        allowed = getattr(rules, limit)
        super().__init__(f"the key {rules.name!r} is limited to {limit}={allowed}")
        self.retry_after_s, self.limit, self.rules, self.left = retry_after_s, limit, rules, left


def parse_rules(name: str, words: list[str], roles: tuple[str, ...]) -> KeyRules:
    """Returns the rules that follow a key: a role, and members like `requests=600/m`. Raises
    ValueError, naming the first word that is neither."""
    found: dict[str, object] = {"name": name}
    for word in words:
        member, _, value = word.partition("<=" if word.startswith("priority") else "=")
        member = "role" if word in roles else member
        if member in found:
            raise ValueError(f"{member} comes twice")
        try:
            found[member] = word if member == "role" else _PARSERS[member](value)
        except KeyError:
            members = (f"{name}<=" if name == "priority" else f"{name}=" for name in _PARSERS)
            known = ", ".join((*roles, *members))
            raise ValueError(f"{word!r} is none of {known}") from None
        except ValueError as error:
            raise ValueError(f"{word!r}: {error}") from None
    return KeyRules(**found)  # type: ignore[arg-type]


def _tenant(value: str) -> str:
    if not TENANT_ID.fullmatch(value):
        raise ValueError("needs 1 to 64 visible ASCII characters")
    return value


def _count(value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= 1_000_000:
        raise ValueError("needs a number from 1 to 1000000")
    return int(value)


def _priority(value: str) -> str:
    if value not in PRIORITIES:
        raise ValueError(f"needs one of {', '.join(PRIORITIES)}")
    return value


def _models(value: str) -> tuple[str, ...]:
    if not value or not all(value.split(",")):
        raise ValueError("needs names or patterns of models, as llama-*,qwen")
    return tuple(value.split(","))


def _yes(value: str) -> bool:
    if value not in ("yes", "no"):
        raise ValueError("needs yes or no")
    return value == "yes"


_PARSERS = {
    "tenant": _tenant,
    "requests": Rate.parse,
    "tokens": Rate.parse,
    "uncached": Rate.parse,
    "concurrent": _count,
    "priority": _priority,
    "models": _models,
    "isolate": _yes,
}
assert _PARSERS.keys() == {field.name for field in fields(KeyRules)} - {"name", "role"}
