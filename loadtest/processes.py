"""Processes beside this one, the cores that they run on, and the CPU time that they use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from typing import Any

from app.local.redis_server import EmbeddedRedis

CORES = sorted(os.sched_getaffinity(0))
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ANSWER_TIMEOUT_S = 120.0
_SCHEDULED = 2
"""Kind of a process's clock in Linux that counts by the scheduler, in ns, and not by ticks."""


@contextmanager
def forked(number: int) -> Iterator[Executor]:
    """Processes that inherit what there is: sending a trace takes long."""
    with ProcessPoolExecutor(number, mp_context=get_context("fork")) as executor:
        try:
            yield executor
        except BaseException:
            # What they play may take minutes more, which leaving the executor would wait for.
            for process in active_children():
                process.kill()
            raise


@contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process that calls `target` with a pipe to here, and with the arguments; our end of it."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.terminate()
        process.join()


def received(connection: Connection) -> Any:
    """Returns what another process has sent. Raises TimeoutError."""
    if not connection.poll(ANSWER_TIMEOUT_S):
        raise TimeoutError(f"another process said nothing for {ANSWER_TIMEOUT_S:g} s")
    return connection.recv()


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
    """Returns the seconds of CPU that a process has used."""
    return time.clock_gettime(~pid << 3 | _SCHEDULED)
