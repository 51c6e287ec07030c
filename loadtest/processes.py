"""Processes beside this one: simulations, and those that a bench talks to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from typing import Any

ANSWER_TIMEOUT_S = 120.0


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
    """What another process has sent. Raises TimeoutError."""
    if not connection.poll(ANSWER_TIMEOUT_S):
        raise TimeoutError(f"another process said nothing for {ANSWER_TIMEOUT_S:g} s")
    return connection.recv()
