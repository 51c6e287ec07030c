"""Leadership of one planner at a time, by a lease in Redis."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from app.core.errors import LeadershipLost, RedisUnavailable
from app.core.keys import Keyspace
from app.state import planner
from app.state.scripts import ScriptRunner

log = logging.getLogger(__name__)

RENEWALS = 3
"""Renewals within a lease."""

T = TypeVar("T")


class Lease:
    """Lease of the leading planner, which `keep` renews."""

    def __init__(self, runner: ScriptRunner, keyspace: Keyspace, lease_s: float) -> None:
        self.token = 0
        """Number that the leader's writes carry; 0: this planner does not lead."""
        self._runner, self._keyspace, self._lease_s = runner, keyspace, lease_s
        self._holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._ends_s = 0.0
        self._due_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds for which nobody else can lead."""
        return max(0.0, self._ends_s - time.monotonic()) if self.token else 0.0

    async def keep(self) -> Mapping[str, Any] | None:
        """Renew the lease, or try for it, if that is due. Returns what the last leader recorded if
        this planner leads from now on, else None. Raises RedisUnavailable."""
        now_s = time.monotonic()
        if self.token and now_s >= self._ends_s:
            self.lose("it was not renewed in time")
        if now_s < self._due_s:
            return None
        self._due_s = now_s + self._lease_s / RENEWALS
        state = await self._runner.one(
            planner.lead(self._keyspace, self._holder, round(self._lease_s * 1000))
        )
        before, self.token = self.token, state.token
        if not state.token:
            if before:
                log.warning("leads no longer: %s leads", state.holder)
            return None
        self._ends_s = now_s + self._lease_s
        if state.token == before:
            return None
        log.info("leads from now on, with token %d", state.token)
        return state.state

    async def hold(self, work: Awaitable[T]) -> T:
        """Returns what `work` returns, and renews the lease until then. Raises LeadershipLost if
        another planner may have led meanwhile, and RedisUnavailable."""
        token, working = self.token, asyncio.ensure_future(work)
        try:
            while not working.done():
                await asyncio.wait([working], timeout=self._lease_s / RENEWALS / 2)
                await self.keep()
                if self.token != token:
                    raise LeadershipLost("the lease was lost during a proposal")
        finally:
            working.cancel()
        return await working

    def lose(self, why: str) -> None:
        """Stop acting as leader until `keep` has the lease again."""
        log.warning("leads no longer: %s", why)
        self.token = 0
        self._due_s = 0.0

    async def leave(self) -> None:
        """Let another planner lead at once."""
        if not self.token:
            return
        self.token = 0
        try:
            await self._runner.one(planner.lead(self._keyspace, self._holder, 0))
        except RedisUnavailable as error:
            log.debug("the lease ends by itself: %s", error)
