"""An engine before it is asked, the agent's settings for it, and what a source lists."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from app.core.errors import ConfigError
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import Integers, OneOf, Real, Text, check_base_url
from workers.bridge.http.facts import NONE, NotExact, reachable

log = logging.getLogger(__name__)

ENGINE_SETTINGS = frozenset(
    {
        *("address", "engine_kind", "model", "role", "max_requests"),
        *("kv_transfer", "kv_lease_s", "kv_compatible", "revision", "side_channel_port", "kv_host"),
        *("bootstrap_port", "events_endpoint", "replay_endpoint", "engine_block_size"),
        *("capacity_tokens", "data_parallel_size", "stall_s", "profile"),
    }
)
"""Settings that each engine may have for itself; the others are those of the process."""
FIELDS: Mapping[str, Field[Any]] = {
    f.name.replace("_", "-"): f for f in fields(EngineAgentSettings) if f.name in ENGINE_SETTINGS
}


@dataclass(frozen=True, slots=True)
class DiscoveredEngine:
    """An engine that a source lists. settings: the agent's, for this engine alone. ready: it may be
    begun with. leaving: it is to get no requests, and ends. ended: it also is no more."""

    settings: EngineAgentSettings
    ready: bool = True
    leaving: bool = False
    ended: bool = False

    def is_replaced(self, engines: Iterable[DiscoveredEngine]) -> bool:
        """Whether one of these has its name, or its place."""
        name, url = self.settings.worker_id, self.settings.engine_url
        return any(o.settings.worker_id == name or o.settings.engine_url == url for o in engines)


Engines = Mapping[str, DiscoveredEngine]
"""Engines by a key that tells each from all others, those before it at the same address as well."""
Read = Callable[[], DiscoveredEngine | None]
"""Reads one member of a source; None: it has no engine yet. Raises ConfigError if it says something
wrong, or anything else if it is no member at all."""


class Members:
    """Engines that a source lists, each read for itself: one that is wrong changes no other.

    engines: by key, as last read. wrong: by key, why a member cannot be read. It stays as it was.
    """

    def __init__(self) -> None:
        self.engines: dict[str, DiscoveredEngine] = {}
        self.wrong: dict[str, str] = {}

    def read_all(self, members: Mapping[str, Read]) -> None:
        before, self.engines = self.engines, {}
        self.wrong = {key: why for key, why in self.wrong.items() if key in members}
        for key, read in members.items():
            self.read(key, read, before.get(key))

    def read(self, key: str, read: Read, before: DiscoveredEngine | None) -> None:
        """before: what was last read of the member."""
        try:
            engine = read()
            self.wrong.pop(key, None)
        except Exception as error:
            is_told = isinstance(error, ConfigError)
            why = str(error) if is_told else f"{key or 'one without a name'}: {error!r}"
            if self.wrong.get(key) != why:
                log.warning("an engine is left as it was: %s", why)
            self.wrong[key] = why
            engine = before
        if engine is not None:
            self.engines[key] = engine


Tell = Callable[[Members], None]
"""Takes what a source lists, whenever it has looked."""


ANSWERS = 3


@dataclass(frozen=True, slots=True)
class _Absence:
    engine: DiscoveredEngine
    first_s: float
    last_s: float
    answers: int

    def goes_on(self, now: float) -> _Absence:
        first_s = self.first_s if self.answers else now
        return replace(self, first_s=first_s, last_s=now, answers=self.answers + 1)


class Absences:
    """Engines that the last answers lack. gone_s: for so long answers lack an engine that is gone,
    whether it works or not."""

    def __init__(self, gone_s: float) -> None:
        self._gone_s = gone_s
        self._told: Engines = {}
        self._of: dict[str, _Absence] = {}

    @property
    def lacking(self) -> Engines:
        """Returns those that may yet be there; none of them may be begun with."""
        return {key: replace(one.engine, ready=False) for key, one in self._of.items()}

    def note(self, engines: Engines, now: float) -> None:
        """Takes in that the source tells of `engines`; of none at all, that says nothing."""
        before, self._of = self._of, {}
        known = {key: absence.engine for key, absence in before.items()} | dict(self._told)
        for key, engine in known.items():
            if key in engines or engine.leaving or engine.is_replaced(engines.values()):
                continue
            absence = before.get(key, _Absence(engine, now, now, 0))
            absence = absence.goes_on(now) if engines else absence
            if not self._is_long(absence):
                self._of[key] = absence
        self._told = engines

    def forget(self, key: str) -> None:
        self._of.pop(key, None)

    def _is_long(self, absence: _Absence) -> bool:
        lasted_s = absence.last_s - absence.first_s
        return absence.answers >= ANSWERS and lasted_s >= self._gone_s


def port_of(text: str) -> int | None:
    """Returns the port that `text` spells; None: it spells none."""
    is_number = text.isascii() and text.isdigit() and len(text) <= 5
    return int(text) if is_number and 0 < int(text) < 65536 else None


def settings_of(
    process: EngineAgentSettings, worker_id: str, engine_url: str, told: Mapping[str, object]
) -> EngineAgentSettings:
    """Returns the settings of one engine. told: what differs from the settings of the process, by
    the names of flags; may be text. Raises ConfigError."""
    own: dict[str, Any] = {}
    for name, value in told.items():
        if name not in FIELDS:
            raise ConfigError(f"{worker_id}: {name}: needs one of {', '.join(sorted(FIELDS))}")
        try:
            own[FIELDS[name].name] = _value(FIELDS[name], value)
        except ValueError as error:
            raise ConfigError(f"{worker_id}: {name}: {error}") from None
    # An agent that is no part of its engine's pod ends without it.
    own |= {"worker_id": worker_id, "engine_url": engine_url, "keep_engine": True}
    settings = replace(process, **own)
    try:
        check(settings)
    except ConfigError as error:
        raise ConfigError(f"{worker_id}: {error}") from None
    return settings


def _value(field: Field[Any], value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"needs a text or a number, got {type(value).__name__}")
    kind, text = field.metadata["kind"], str(value)
    match kind:
        case OneOf(words) if text not in words:
            raise ValueError(f"needs one of {', '.join(filter(None, words))}, got {text!r}")
        case Integers() | Real():
            return _number(kind, text)
        case Text():
            kind.check(text)
    return text


def _number(kind: Integers | Real, text: str) -> float:
    try:
        number = int(text) if isinstance(kind, Integers) else float(text)
    except ValueError:
        number = math.nan
    if not kind.least <= number <= kind.most:
        raise ValueError(f"needs a number from {kind.least} to {kind.most}, got {text}")
    return number


def check(settings: EngineAgentSettings) -> None:
    """Raises ConfigError if there can be no such engine."""
    try:
        check_base_url(settings.engine_url)
    except ValueError as error:
        raise ConfigError(f"--engine-url: {error}") from None
    settings.check_member(settings.kv_transfer)
    if settings.role == "both" and settings.kv_transfer == "sglang":
        raise ConfigError("--kv-transfer sglang: needs --role prefill or decode, as the engine has")
    for flag, endpoint in (
        ("--events-endpoint", settings.events_endpoint),
        ("--replay-endpoint", settings.replay_endpoint),
    ):
        try:
            if endpoint and (flag, endpoint) != ("--events-endpoint", NONE):
                reachable(endpoint, "localhost")
        except NotExact as error:
            raise ConfigError(f"{flag}: {error}") from None
