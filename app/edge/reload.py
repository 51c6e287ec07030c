"""Has a replica go by what its files say, also when they change while it runs."""

from __future__ import annotations

import asyncio
import logging
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from os import SEEK_END
from pathlib import Path

from app.core.errors import ConfigError
from app.core.settings.router import RouterSettings
from app.edge.services import Services, check

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
SETTLED_S = 1.0
"""A file whose last line has no end has been written whole if it has been the same for so long."""
LOOKS_AT_START = 40
"""Looks within ten seconds, before a start is given up."""


def stamp_of(path: str) -> Sequence[int]:
    """Returns numbers that change once a file is written, or another one takes its place; none if
    there is no file, or a pipe, which can be read once only."""
    with suppress(OSError):
        seen = Path(path).stat()
        if path and stat.S_ISREG(seen.st_mode):
            # Archives and copies set the time of what they write, and numbers are used again.
            return seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino, seen.st_size
    return ()


def check_there(path: str) -> None:
    """Raises ConfigError unless `path` can be read at any time: to open a pipe waits for whoever
    writes to it, and all else meanwhile."""
    if not stamp_of(path):
        raise ConfigError(f"{path}: is gone, or can be read but once")


class WholeFiles:
    """Tells, from one look to the next, which files have been written whole."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Sequence[int], float]] = {}
        """Looks of a file without an end, and since when, monotonic seconds."""

    def is_whole(self, path: str) -> bool:
        """Whether its last line has an end, or it has been the same for SETTLED_S of looks. Else
        somebody may be in the middle of a line, or has only emptied it so far."""
        stamp, now_s = stamp_of(path), time.monotonic()
        if not stamp or _ends(path):
            self._seen.pop(path, None)
            return True
        if path not in self._seen or self._seen[path][0] != stamp:
            self._seen[path] = (stamp, now_s)
        return now_s - self._seen[path][1] >= SETTLED_S


def _ends(path: str) -> bool:
    with suppress(OSError), Path(path).open("rb") as file:
        file.seek(max(0, file.seek(0, SEEK_END) - 1))
        return file.read().endswith(b"\n")
    return True  # whoever reads it will say why that is impossible


async def written(path: str) -> None:
    """Returns once a file has been written whole. Raises ConfigError if that takes too long."""
    settling = WholeFiles()
    for _ in range(LOOKS_AT_START):
        if settling.is_whole(path):
            return
        await asyncio.sleep(SETTLED_S / 4)
    raise ConfigError(f"{path}: is still being written")


class WatchedFiles:
    """Files by which a replica goes.

    problem: why it does not go by what they say now; "": it does.
    """

    def __init__(
        self, what: str, paths: Callable[[], Sequence[str]], take: Callable[[], object]
    ) -> None:
        """what: is in them. paths: which ones they are now; none: nothing is watched. take: takes
        over what they say. It raises ConfigError for what would be refused at a start, and then
        changes nothing; it is called again at each look until it does not.
        """
        self.what = what
        self.problem = ""
        self._paths = paths
        self._take = take
        self._taken: list[Sequence[int]] = []
        """Looks of the files as they were taken over. Whoever read them at the start looked a
        moment sooner than `run` can, so those that are there are read once more."""
        self._asked = asyncio.Event()

    def look(self) -> None:
        """Has `run` look at once, and read the files again even if they seem to be the same."""
        self._asked.set()

    async def run(self) -> None:
        """Takes over what the files say whenever it has changed, until cancelled."""
        self._taken = [stamp and (0,) for stamp in self._stamps()]
        settling, is_due = WholeFiles(), False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._asked.wait()
            is_due |= self._asked.is_set() or bool(self.problem) or self._stamps() != self._taken
            self._asked.clear()
            if is_due and all(settling.is_whole(path) for path in self._paths()):
                is_due = False
                self.reload()

    def reload(self) -> None:
        """Read them again. While they cannot be taken over, all stays as it is."""
        paths, stamps = self._paths(), self._stamps()
        problem = "failed unexpectedly"
        try:
            for path in paths:
                check_there(path)
            if paths:
                self._take()
            problem = ""
        except ConfigError as error:
            problem = str(error)
            if problem != self.problem:
                log.error("the %s stay as they were: %s", self.what, problem)
        finally:
            self.problem, self._taken = problem, stamps

    def _stamps(self) -> list[Sequence[int]]:
        return [stamp_of(path) for path in self._paths()]


LIVE = frozenset(
    {
        *("api_key", "api_key_file", "metrics_key", "log_level", "show_decision", "stalled_s"),
        *("max_request_bytes", "max_prompt_tokens", "model_alias"),
        "namespace_weights",
    }
)
"""Settings that count from the next request on. All others count from the next start on."""


class LiveSettings:
    """Keeps the settings of a replica like those of its file.

    path: of the file. read: what the settings would be, were the replica started now; raises
    ConfigError.
    """

    def __init__(self, replica: Services, path: str, read: Callable[[], RouterSettings]) -> None:
        self._replica = replica
        self._path = path
        self._read = read
        self._settling = WholeFiles()

    def reload(self) -> None:
        """Read the file again. Raises ConfigError for what would be refused at a start, or would
        open the replica, and then the settings stay as they are."""
        old, new = self._replica.settings, self._read()
        named = new.api_key_file
        if named and named != old.api_key_file:
            check_there(named)
            if not self._settling.is_whole(named):
                raise ConfigError(f"api_key_file {named}: is being written")
        check(new)
        changed = {f.name for f in fields(old) if getattr(new, f.name) != getattr(old, f.name)}
        self._replica.adopt(replace(old, **{n: getattr(new, n) for n in changed & LIVE}))
        for name in sorted(changed & LIVE):
            log.info("%s: %s has changed", self._path, name)
        for name in sorted(changed - LIVE):
            log.warning("%s: %s has changed, and counts from the next start on", self._path, name)
