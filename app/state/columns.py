"""Loads of all workers as one caller knows them, kept current by what has changed since.

Each change of a worker's load or registration has a version (lua/lib/changed.lua). A caller that
knows all changes up to one version asks for those after it, and for lapsed leases. New workers are
among them; that a worker is gone, only a full answer tells. Each answer also counts workers and
loads, and names the last change that it leaves out: if the caller knows others, Redis has lost
something, and the caller asks for everything.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app.core.loads import LOAD_FIELDS, Load, Loads, Snapshot
from app.core.types import Incarnation, parse_incarnation

_LOAD = re.compile(b" ".join([rb"(?:0|[1-9]\d{0,14})"] * len(LOAD_FIELDS)))


AUDIT_S = 5.0
ALL = slice(None)


class Columns:
    """Loads of incarnations, in ascending order, written in place. The one caller asks again only
    once it has the answer. Every AUDIT_S it asks for everything, as somebody may have written in
    Redis by hand."""

    def __init__(self) -> None:
        self._incarnations: list[Incarnation] = []
        self._row: dict[bytes, int] = {}
        self._loads = np.empty((len(LOAD_FIELDS), 0))
        self._has_load = self._is_readable = self._is_alive = np.empty(0, np.bool_)
        self._versions = np.empty(0)
        """0: not known."""
        self._num_loads = 0
        self._lapsed: list[bytes] | None = None
        self._told: tuple[Collection[bytes], list[bytes]] | None = None
        """Leases and loads of the last answer, if that told everything and no version: usually
        those of the next one, too."""
        self._told_rows: list[int] | slice = ALL
        self._shown: Snapshot | None = None
        """The last answer, while it still is right about live workers."""
        self._since = 0
        self._everything_s = 0.0
        self._changed: set[bytes] = set()
        """Changes that no reader of a snapshot has taken yet: an answer may be refused, or lost
        with others of its round trip, so the next one names them too."""

    def ask(self) -> int:
        """Returns the version since when changes are to be told; 0: everything is."""
        now_s = time.monotonic()
        if now_s - self._everything_s > AUDIT_S:
            self._since, self._everything_s = 0, now_s
        return self._since

    def take(self, reply: Sequence[Any]) -> Snapshot | None:
        """Returns the snapshot that a reply of lua/lib/snapshot.lua and the known loads make; None:
        ask again."""
        now_ms, rounds, leases, loads, versions, *rest = reply
        if not rest:
            self._changed.update(self._take_everything(leases, loads, versions))
        else:
            self._changed.update(versions[::2])
            if not self._take_changes(leases, loads, versions, *rest):
                self._since = 0
                return None
        return self._snapshot(now_ms, rounds)

    def _take_everything(
        self, live: Collection[bytes], pairs: list[bytes], versions: list[bytes]
    ) -> list[bytes]:
        """Returns the workers whose version is new or not known."""
        told = live, pairs[::2]
        if told == self._told and not versions:
            self._write(self._told_rows, pairs[1::2])
            return list(self._row)
        before = dict(zip(self._row, self._versions.tolist(), strict=True))
        texts = dict(zip(pairs[::2], pairs[1::2], strict=True))
        version_of = dict(zip(versions[::2], map(float, versions[1::2]), strict=True))
        names = {parse_incarnation(name): name for name in (*live, *texts, *version_of)}
        names.pop(None, None)
        self._incarnations = sorted(inc for inc in names if inc is not None)
        ordered = [names[inc] for inc in self._incarnations]
        self._row = {name: row for row, name in enumerate(ordered)}
        self._loads = np.zeros((len(LOAD_FIELDS), len(ordered)))
        self._has_load, self._is_readable, self._is_alive = np.zeros((3, len(ordered)), np.bool_)
        self._write(ALL, [texts.get(name) for name in ordered])
        self._num_loads = len(texts)
        self._versions = np.array([version_of.get(name, 0.0) for name in ordered])
        self._is_alive[[self._row[name] for name in live if name in self._row]] = True
        self._lapsed = self._shown = self._told = None
        if not versions and self._row.keys() >= texts.keys():
            rows = [self._row[name] for name in texts]
            self._told, self._told_rows = told, ALL if rows == list(range(len(ordered))) else rows
        is_complete = len(version_of) > 0 and bool(self._versions[self._is_alive].all())
        self._since = int(self._versions.max()) if is_complete else 0
        versions_now = zip(ordered, self._versions.tolist(), strict=True)
        return [name for name, version in versions_now if not version == before.get(name) != 0.0]

    def _take_changes(
        self,
        lapsed: list[bytes],
        loads: list[bytes | None],
        pairs: list[bytes],
        num: int,
        num_loads: int,
        last: list[bytes],
    ) -> bool:
        """Returns False if some of what is new to the caller is missing."""
        row = self._row
        if new := [name for name in pairs[::2] if name not in row]:
            self._add(new)
        try:
            rows = [row[name] for name in pairs[::2]]
            ended = [row[name] for name in lapsed]
            latest = row[last[0]] if last else None
        except KeyError:
            return False
        unchanged = self._versions.copy()
        if rows:
            had_load = int(np.count_nonzero(self._has_load[rows]))
            self._write(rows, loads)
            self._num_loads += int(np.count_nonzero(self._has_load[rows])) - had_load
            self._versions[rows] = orjson.loads(b"[%b]" % b",".join(pairs[1::2]))
            unchanged[rows] = 0.0
            self._since = int(pairs[-1])
        if lapsed != self._lapsed or self._shown is None:
            self._lapsed, self._shown = lapsed, None
            self._is_alive = self._versions > 0.0
            # There are as many leases as versions, and so they are of the same incarnations, unless
            # one has lost the one and another the other.
            if not self._is_alive[ended].all():
                return False
            self._is_alive[ended] = False
        version_of_last = float(last[1]) if last else 0.0
        return (
            num == np.count_nonzero(self._versions)
            and num_loads == self._num_loads
            and version_of_last == unchanged.max(initial=0.0)
            and (latest is None or version_of_last == unchanged[latest])
        )

    def _add(self, names: list[bytes]) -> None:
        """Adds rows of newly registered incarnations behind all others; none, if not all are later
        ones."""
        last = self._incarnations[-1] if self._incarnations else 0
        parsed = ((parse_incarnation(name), name) for name in names)
        numbers = {inc: name for inc, name in parsed if inc is not None and inc > last}
        if len(numbers) < len(names):
            return
        incs = sorted(numbers)
        self._row |= {numbers[inc]: row for row, inc in enumerate(incs, len(self._incarnations))}
        self._incarnations = [*self._incarnations, *incs]
        self._loads = np.pad(self._loads, ((0, 0), (0, len(incs))))
        self._has_load = np.pad(self._has_load, (0, len(incs)))
        self._is_readable = np.pad(self._is_readable, (0, len(incs)))
        self._versions = np.pad(self._versions, (0, len(incs)))
        self._shown = None

    def _write(self, rows: list[int] | slice, texts: Sequence[bytes | None]) -> None:
        loads, is_readable = parse_loads(texts)
        self._loads[:, rows] = loads
        if not (self._is_readable[rows] == is_readable).all():
            self._shown = None
        self._is_readable[rows] = is_readable
        self._has_load[rows] = [text is not None for text in texts]

    def _snapshot(self, now_ms: int, rounds: int) -> Snapshot:
        shown = self._shown
        if shown is None:
            live = self._is_alive & self._is_readable
            shown = self._shown = Snapshot(
                now_ms,
                Loads(self._of(live), self._loads),
                lapsed=frozenset(self._of(self._has_load & ~self._is_alive)),
                unreadable=frozenset(self._of(self._is_alive & ~self._is_readable)),
            )
            self._live = live
        incarnations = shown.loads.incarnations
        is_all = len(incarnations) == len(self._incarnations)
        loads = self._loads.copy() if is_all else self._loads[:, self._live]
        return Snapshot(
            now_ms,
            Loads(incarnations, loads),
            rounds,
            changed=self._changed,
            lapsed=shown.lapsed,
            unreadable=shown.unreadable,
        )

    def _of(self, rows: NDArray[np.bool_]) -> list[Incarnation]:
        return [self._incarnations[row] for row in rows.nonzero()[0].tolist()]


def parse_load(text: bytes) -> Load | None:
    """Returns the load in a field of `load`; None if it cannot be read."""
    return Load(*map(int, text.split())) if _LOAD.fullmatch(text) else None


def parse_loads(texts: Sequence[bytes | None]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns the loads in many fields, as columns that are 0 where one cannot be read, and which
    can be."""
    numbers = _numbers(texts)
    if numbers is not None:
        return numbers, np.ones(len(texts), np.bool_)
    loads = [None if text is None else parse_load(text) for text in texts]
    columns = Loads.of({Incarnation(n): load or Load() for n, load in enumerate(loads)}).columns
    return columns, np.array([load is not None for load in loads], np.bool_)


def _numbers(texts: Sequence[bytes | None]) -> NDArray[np.float64] | None:
    """Returns the columns, if all can be read: one by one they would take three times as long."""
    known = [text for text in texts if text is not None]
    lengths = {text.count(b" ") + 1 for text in known}
    if len(known) < len(texts) or lengths != {len(LOAD_FIELDS)}:
        return None
    try:
        numbers = np.array(orjson.loads(b"[%b]" % b",".join(known).replace(b" ", b",")))
    except ValueError:
        return None
    # With few workers an argmin takes a third of a min.
    if numbers.dtype != np.int64 or numbers[numbers.argmin()] < 0:
        return None
    if numbers[numbers.argmax()] >= 10**15:
        return None
    return numbers.reshape(len(texts), len(LOAD_FIELDS)).T.astype(np.float64)
