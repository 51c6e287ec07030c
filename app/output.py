"""Lines of text written from a thread of its own: a pipe that nobody reads stops no event loop."""

from __future__ import annotations

import atexit
import logging
import sys
from queue import Empty, Full, Queue
from threading import Lock, Thread
from typing import Any, Literal

from app.core.errors import cut, printable

MAX_LINES = 10_000
"""Lines that wait to be written. More are lost, and counted once the stream takes lines again."""
LINES_AT_ONCE = 256
MAX_CHARACTERS = 2000
"""Length of a line of the log: what an engine or an API server says wrongly may be megabytes."""
FLUSH_S = 1.0
"""Time for which the end of the process waits for lines that are not written."""


class Output:
    """Writes to a standard stream of the process; each is looked up anew, as tests replace it."""

    def __init__(self, stream: Literal["stdout", "stderr"]) -> None:
        self._stream = stream
        self._lines: Queue[str] = Queue(MAX_LINES)
        self._num_lost = 0
        self._starting = Lock()
        self._thread: Thread | None = None

    def write(self, *lines: str) -> None:
        """Write lines, which stay together. They come without their ends."""
        if self._thread is None:
            self._start()
        try:
            self._lines.put_nowait("\n".join(map(printable, lines)))
        except Full:
            self._num_lost += 1

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until all is written, or for `timeout_s`."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, timeout_s)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = Thread(target=self._run, name=self._stream, daemon=True)
                self._thread.start()
                atexit.register(self.flush)

    def _run(self) -> None:
        while True:
            lines = [self._lines.get()]
            try:
                while len(lines) < LINES_AT_ONCE:
                    lines.append(self._lines.get_nowait())
            except Empty:
                pass
            self._print(lines)
            for _ in lines:
                self._lines.task_done()

    def _print(self, lines: list[str]) -> None:
        stream = getattr(sys, self._stream)
        try:
            stream.write("\n".join(lines) + "\n")
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more, or it is closed
            return
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            log.warning("%d lines of %s were lost: it took none for too long", lost, self._stream)


log = logging.getLogger(__name__)
OUT, ERR = Output("stdout"), Output("stderr")


class _Formatter(logging.Formatter):
    """A record in one line; and, farther in, those of its traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as it is named there
        return printable(cut(super().formatMessage(record), MAX_CHARACTERS))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {cut(line, MAX_CHARACTERS)}" for line in lines)


class ErrHandler(logging.Handler):
    """Writes the log of the process to standard error."""

    def __init__(self, form: str = "%(message)s") -> None:
        super().__init__()
        self.setFormatter(_Formatter(form))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            ERR.write(*self.format(record).split("\n"))
        except Exception:
            self.handleError(record)
