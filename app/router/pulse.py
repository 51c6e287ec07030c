"""How well a process gets on: how late its event loop is, and how much CPU it uses."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque

from app.router.metrics import Telemetry

EVERY_S = 0.05
LOOKS = 100
"""Those of five seconds, of which nine in ten are less late than is told."""


class Pulse:
    """Measures while `run` runs. What waits for the loop, or for the CPU, is in no other metric:
    they all begin once the loop has come to a request."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    async def run(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        late = deque[float](maxlen=LOOKS)
        cpu = deque([(loop.time(), time.process_time())], maxlen=LOOKS)
        while True:
            # At odd times, as quotas of CPU come at even ones.
            due_s = loop.time() + random.uniform(0.5, 1.5) * EVERY_S
            await asyncio.sleep(due_s - loop.time())
            now_s = loop.time()
            late.append(max(0.0, now_s - due_s))
            cpu.append((now_s, time.process_time()))
            self._telemetry.loop_late_s.set(sorted(late)[9 * len(late) // 10])
            self._telemetry.cpu.set((cpu[-1][1] - cpu[0][1]) / (now_s - cpu[0][0]))
