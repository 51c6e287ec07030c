"""`kvroute whatif` in a process of its own: it may take seconds of CPU, which decisions need."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import Any

import orjson

from app.core.errors import InvalidRequest, KvrouteError, cut

TIMEOUT_S = 60.0
MAX_ERROR = 300
NICE = 10


class Busy(KvrouteError):
    """Another what-if is running at this replica."""


class WhatIf:
    """One at a time."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self._env = os.environ | {"REDIS_URL": redis_url}
        self._namespace = namespace
        self._runs = False

    async def run(
        self, policy: str | None, weight: float | None, workers: int | None, last: int
    ) -> Any:
        """What the command prints with --json. Raises Busy, and InvalidRequest with its error."""
        if self._runs:
            raise Busy("another what-if is running at this replica: ask again in a moment")
        self._runs = True
        try:
            options = [f"--last={last}"]
            options += [f"--policy={policy}"] if policy else []
            options += [f"--prefill-weight={weight}"] if weight is not None else []
            options += [f"--workers={workers}"] if workers is not None else []
            return await self._run(options)
        finally:
            self._runs = False

    async def _run(self, options: list[str]) -> Any:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "app", "whatif", "--json", f"--namespace={self._namespace}", *options),
            env=self._env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                out, errors = await process.communicate()
        except TimeoutError:
            raise InvalidRequest("last", f"took over {TIMEOUT_S:g} s: ask for fewer") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            said = errors.decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise InvalidRequest("policy", cut(said[-1].removeprefix("Error: "), MAX_ERROR))
        return orjson.loads(out)
