"""Tasks of a worker or an agent beside the engine's requests: failures, and further tries."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import stamina
import stamina.instrumentation

from app.http.supervisor import Tasks

FAILURES = Tasks().failures


T = TypeVar("T")

log = logging.getLogger(__name__)


async def until_it_works(
    attempt: Callable[[], Awaitable[T]],
    on: type[Exception] | tuple[type[Exception], ...],
    what: str,
    wait_s: float = 0.1,
    wait_max_s: float = 1.0,
) -> T:
    """Returns what the first `attempt` returns that does not raise `on`. what: named in the log.
    wait_s: pause after the first failure; it grows to wait_max_s."""
    async for retry in stamina.retry_context(
        on=on, attempts=None, timeout=None, wait_initial=wait_s, wait_max=wait_max_s
    ):
        with retry:
            try:
                return await attempt()
            except on as error:
                # Ever more rarely, as it may be gone for hours.
                if retry.num.bit_count() == 1:
                    log.warning("%s: attempt %d failed, retrying: %s", what, retry.num, error)
                raise
    raise AssertionError("stamina retries without end")


# Stamina's own log line does not show what failed.
stamina.instrumentation.set_on_retry_hooks(())
