"""Simulations side by side, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context


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
