"""The tokenizers of models, each of them loaded and kept once, however many models use it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from app.core.errors import cut
from app.http.supervisor import Beside
from app.tokens import Renderer, TokenizerUnavailable, load
from app.tokens.files import folder_of

log = logging.getLogger(__name__)

T = TypeVar("T")
Stamp = tuple[tuple[str, int, int], ...]
"""Name, time of change and size of each file of a folder."""

LOAD_S = 120.0
"""A folder may be on a file system that does not answer."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Seconds until what could not be loaded is tried again; twice as long each time."""
FIRST_S = 2.0
"""Seconds that the first prompts of a model wait at most for its tokenizer: as long as for ids from
an engine."""
NOT_LOADED = "not loaded yet"


@dataclass(slots=True, weakref_slot=True, eq=False)
class LoadedTokenizer:
    """A tokenizer, by where it is said to be. why_not: why there is none."""

    folder: _Folder | None = None
    why_not: str = NOT_LOADED
    loading: asyncio.Task[None] | None = None
    begun_s: float = 0.0
    again_s: float = 0.0
    pause_s: float = 0.0

    @property
    def renderer(self) -> Renderer | None:
        return self.folder.renderer if self.folder else None

    async def first_load(self) -> None:
        """Returns once the first attempt to load it has ended, or began too long ago."""
        left_s = self.begun_s + FIRST_S - time.monotonic()
        if self.loading is not None and self.why_not == NOT_LOADED and left_s > 0:
            await asyncio.wait([self.loading], timeout=left_s)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Folder:
    """A renderer, and the files of its folder as they were when it was loaded."""

    renderer: Renderer
    stamp: Stamp


class Tokenizers:
    """Loads tokenizers in threads, one at a time, and keeps each for as long as somebody else keeps
    what `at` returned."""

    def __init__(self, beside: Beside) -> None:
        self._beside = beside
        self._by_source: WeakValueDictionary[str, LoadedTokenizer] = WeakValueDictionary()
        self._by_folder: WeakValueDictionary[Path, _Folder] = WeakValueDictionary()
        self._one_at_a_time = asyncio.Lock()

    def at(self, source: str) -> LoadedTokenizer:
        """Returns the tokenizer of a folder, or of a name in the local Hugging Face cache. The
        first call has it loaded, and so has one some time after a failure."""
        loaded = self._by_source.get(source)
        if loaded is None:
            loaded = self._by_source[source] = LoadedTokenizer()
        if loaded.folder is None:
            self.look_again(source)
        return loaded

    def look_again(self, source: str) -> None:
        """Has it loaded once more if its files have changed, unless that was tried lately."""
        loaded = self._by_source[source]
        if loaded.loading is None and time.monotonic() >= loaded.again_s:
            loaded.begun_s = time.monotonic()
            loaded.loading = self._beside("tokenizer", partial(self._load, source, loaded))

    async def _load(self, source: str, loaded: LoadedTokenizer) -> None:
        try:
            async with self._one_at_a_time, asyncio.timeout(LOAD_S):
                loaded.folder = await self._of_folder(source)
        except TokenizerUnavailable as error:
            loaded.why_not = str(error)
        except TimeoutError:
            loaded.why_not = f"{source}: not loaded within {LOAD_S:g} s"
        finally:
            loaded.loading = None
            loaded.pause_s = min(max(FIRST_PAUSE_S, 2 * loaded.pause_s), LONGEST_PAUSE_S)
            loaded.again_s = time.monotonic() + loaded.pause_s

    async def _of_folder(self, source: str) -> _Folder:
        """Raises TokenizerUnavailable."""
        if not source:
            raise TokenizerUnavailable("its workers do not say where its tokenizer is")
        path, stamp = await _in_thread(_stamped, source)
        folder = self._by_folder.get(path)
        if folder is None or folder.stamp != stamp:
            renderer = await _in_thread(load, str(path))
            folder = self._by_folder[path] = _Folder(renderer, stamp)
        return folder


async def _in_thread(call: Callable[[str], T], source: str) -> T:
    """Raises TokenizerUnavailable, whatever the call raises: others wrote the files, libraries read
    them, and their panics are no Exceptions."""

    def run() -> T:
        try:
            return call(source)
        except TokenizerUnavailable:
            raise
        except BaseException as error:
            log.debug("tokenizer %s", source, exc_info=True)
            told = cut(f"{type(error).__name__}: {error}")
            raise TokenizerUnavailable(f"{source}: {told}") from None

    return await asyncio.to_thread(run)


def _stamped(source: str) -> tuple[Path, Stamp]:
    """Returns the folder of a tokenizer, and what tells that its files have changed. Raises
    TokenizerUnavailable."""
    folder = folder_of(source).resolve()
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return folder, tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in files)
