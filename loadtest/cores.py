"""The machine's cores: which process runs on which, and the CPU time that it uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.local.redis_server import EmbeddedRedis

CORES = sorted(os.sched_getaffinity(0))
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def redis_to_measure() -> Iterator[str]:
    """The URL of a Redis that is started, to be measured.

    This process and the Redis started stay on the first core from here on. Left to the scheduler,
    they are sometimes together and sometimes apart, where waking each other takes twice the CPU.
    """
    os.sched_setaffinity(0, CORES[:1])
    with EmbeddedRedis() as server:
        assert server.pid is not None
        os.sched_setaffinity(server.pid, CORES[:1])
        yield server.url


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used, as Linux counts them, in hundredths."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / TICKS_PER_S
