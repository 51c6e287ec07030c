"""Changes that were ordered and have not happened yet, which the next leader has to know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from app.core.roles import Role
from app.core.settings.kinds import LONGEST_S
from app.planner.rules.state import USUAL_STARTUP_S

MOST_MODELS = 64


@dataclass(slots=True)
class Changing:
    """Changes under way.

    pending: when each worker that has not registered yet was asked for, in seconds since 1970, by
    role. known: workers that count as registered. leaving: the worker that drains; "": none.
    is_stopped: whether that worker was told to stop. successor: role of the worker to be asked for
    then; "": none. models: names that workers had lately, of which routers are told while there is
    no worker. startup_s: time from asking for a worker until it registers, as lately seen.
    """

    pending: dict[Role, list[float]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    leaving: str = ""
    leaving_since_s: float = 0.0
    is_stopped: bool = False
    successor: str = ""
    models: list[str] = field(default_factory=list)
    startup_s: float = USUAL_STARTUP_S

    def coming(self) -> Iterator[tuple[Role, float]]:
        """Yields the role of each worker that is to come, and when it was asked for."""
        for role, asked_s in self.pending.items():
            yield from ((role, at_s) for at_s in asked_s)
        if self.successor:
            yield Role(self.successor), self.leaving_since_s

    def ask(self, starts: Mapping[Role, int], now_s: float) -> None:
        for role, count in starts.items():
            self.pending.setdefault(role, []).extend([now_s] * count)

    def give_up(self, role: Role, count: int) -> None:
        del self.pending[role][-count:]

    def give_up_before(self, since_s: float, now_s: float) -> int:
        """Give up workers asked for before `since_s`, or by a clock ahead of `now_s`. Returns how
        many."""
        before = sum(map(len, self.pending.values()))
        self.pending = {
            role: left
            for role, asked_s in self.pending.items()
            if (left := [at_s for at_s in asked_s if since_s < at_s <= now_s])
        }
        return before - sum(map(len, self.pending.values()))

    def joined(self, role: Role, now_s: float) -> None:
        """Count a worker as registered that was asked for, if possible with that role."""
        pending = self.pending.get(role) or next(filter(None, self.pending.values()), None)
        if pending:
            took_s = now_s - pending.pop(0)
            self.startup_s = (self.startup_s + max(0.0, took_s)) / 2

    def as_json(self) -> dict[str, Any]:
        pending = {str(role): asked_s for role, asked_s in self.pending.items()}
        return {**asdict(self), "pending": pending, "known": sorted(self.known)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any], most: int) -> Changing:
        """Returns the recorded state, or an empty one for a record that no planner would write.
        most: workers that may be pending."""
        try:
            changing = cls(
                pending={
                    Role(role): [float(at_s) for at_s in asked_s]
                    for role, asked_s in state.get("pending", {}).items()
                },
                known={str(name) for name in state.get("known", [])},
                leaving=str(state.get("leaving", "")),
                leaving_since_s=float(state.get("leaving_since_s", 0.0)),
                is_stopped=bool(state.get("is_stopped", False)),
                successor=str(state.get("successor", "") and Role(state["successor"])),
                models=[str(name) for name in state.get("models", [])][:MOST_MODELS],
                startup_s=float(state.get("startup_s", USUAL_STARTUP_S)),
            )
        except (AttributeError, TypeError, ValueError):
            return cls()
        is_usable = len([*changing.coming()]) <= most and 0 <= changing.startup_s <= LONGEST_S
        return changing if is_usable else cls()
