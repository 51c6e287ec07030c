"""`kvroute whatif` in a process of its own: it may take seconds of CPU, which decisions need."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import Any

import orjson

from app.core.errors import Crowded, InvalidRequest, KvrouteError, cut
from app.http.turns import Turns

TIMEOUT_S = 60.0
MAX_ERROR = 300
NICE = 10
MAX_CALLS = 8
"""At work or waiting."""


class Busy(KvrouteError):
    """Too many what-ifs are running or waiting at this replica."""


class WhatIf:
    """One at a time, and one of each caller's; others wait for their turn."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self._env = os.environ | {"REDIS_URL": redis_url}
        self._namespace = namespace
        self._turns = Turns(1, MAX_CALLS)
        self._holders: set[str] = set()

    async def run(
        self,
        holder: str,
        policy: str | None,
        weight: float | None,
        workers: int | None,
        last: int,
    ) -> Any:
        """What the command prints with --json. holder: who asks. Raises Busy, and InvalidRequest
        with its error."""
        if holder in self._holders:
            raise Busy("another what-if of yours is running at this replica: wait for its answer")
        self._holders.add(holder)
        try:
            async with self._turns.place(holder):
                return await self._answer(policy, weight, workers, last)
        except Crowded:
            raise Busy("what-ifs of others wait at this replica: ask again later") from None
        finally:
            self._holders.remove(holder)

    async def _answer(
        self, policy: str | None, weight: float | None, workers: int | None, last: int
    ) -> Any:
        options = [f"--last={last}"]
        options += [f"--policy={policy}"] if policy else []
        options += [f"--prefill-weight={weight}"] if weight is not None else []
        options += [f"--workers={workers}"] if workers is not None else []
        return await self._run(options)

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
            why = f"took over {TIMEOUT_S:g} s: ask for fewer, or once this machine is less busy"
            raise InvalidRequest("last", why) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            said = errors.decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise InvalidRequest("policy", cut(said[-1].removeprefix("Error: "), MAX_ERROR))
        return orjson.loads(out)
