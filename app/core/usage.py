"""Usage of requests, added up by key, tenant or model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

ANONYMOUS = "anonymous"
OTHER = "other"
HOUR_MS = 3_600_000


class Who(NamedTuple):
    """Origin of usage. key: its name; "": none was needed. tenant: "" for none. model: the one that
    answered; "": none was found."""

    key: str
    tenant: str
    model: str


class UsageSums(NamedTuple):
    """Sums over requests. failed: by engines, or answers that broke off. refused: by the router.
    waited_ms: for a worker that could take them. by_router: requests whose tokens the router
    counted, as their engine did not tell."""

    requests: int = 0
    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    waited_ms: int = 0
    by_router: int = 0

    def plus(self, other: UsageSums) -> UsageSums:
        return UsageSums(*map(sum, zip(self, other, strict=True)))


BY: Mapping[str, Callable[[Who], str]] = {
    "key": lambda who: who.key or who.tenant or ANONYMOUS,
    "tenant": lambda who: who.tenant or ANONYMOUS,
    "model": lambda who: who.model or "unknown",
}


def added_up(used: Iterable[tuple[Who, UsageSums]], by: str) -> dict[str, UsageSums]:
    """Returns the sum for each name, those with most tokens first. by: one of BY."""
    sums: dict[str, UsageSums] = {}
    for who, usage in used:
        name = BY[by](who)
        sums[name] = sums.get(name, UsageSums()).plus(usage)
    return dict(sorted(sums.items(), key=lambda item: (-tokens(item[1]), item[0])))


def tokens(usage: UsageSums) -> int:
    return usage.prompt_tokens + usage.output_tokens


def cached_share(usage: UsageSums) -> float | None:
    """Returns the share of the prompt tokens that was cached; None if there were no tokens."""
    return usage.cached_tokens / usage.prompt_tokens if usage.prompt_tokens else None
