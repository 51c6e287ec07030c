"""How long an engine keeps KV that waits to be fetched: it is asked, or it is measured, by a prompt
that nobody fetches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from app.core.errors import EngineUnavailable, EngineUnfit
from workers.bridge.http.engine import EngineHttp
from workers.bridge.http.facts import EngineLoad

LEAST_S = 1.0
"""What counts before more is known."""
ANSWER_S = 120.0
"""An engine that is asked for its settings looks at its whole environment first."""
CONFIG = "/server_info?config_format=json"
"""vLLM has the path only with VLLM_SERVER_DEV_MODE=1."""
USUAL_S = 30.0
TRIES = 3
LOOK_S, AGAIN_S = 0.25, 10.0
MOST_S = 3600.0
"""Longer ones count as this."""


def differs(said_s: float, lease_s: float) -> bool:
    """Whether what an operator says of a lease is not what it was found to be."""
    return abs(said_s - lease_s) > 2.0 + 0.05 * lease_s


class KvLeaseFinder:
    """said_s: by an operator; 0: nothing. reading: the engine's load by rank, and when that was
    asked for, by the event loop's clock. found: called with more and more seconds that a lease is
    found to last."""

    def __init__(
        self,
        engine: EngineHttp,
        model: str,
        said_s: float,
        reading: Callable[[], tuple[Mapping[int, EngineLoad], float]],
        found: Callable[[float], None],
    ) -> None:
        self.lease_s: float | None = None
        """None: it is not known yet."""
        self._engine = engine
        self._model = model
        self._said_s = said_s
        self._reading = reading
        self._found = found
        self._proven_s = LEAST_S

    @property
    def finding(self) -> str:
        """That an operator says something else; "": no."""
        if not self._said_s or self.lease_s is None or not differs(self._said_s, self.lease_s):
            return ""
        said = f"--kv-lease-s is {self._said_s:g}, its engine keeps KV for {self.lease_s:.0f} s"
        return f"{said}: leave the flag out, as that is found out"

    async def run(self) -> None:
        """Until it is known."""
        lease_s = await self._asked()
        for _ in range(TRIES if lease_s is None else 0):
            await self._measure()
            # Before, a lease of somebody else may have ended.
            if not self._said_s or not differs(self._said_s, self._proven_s):
                break
        self.lease_s = self._proven_s if lease_s is None else lease_s
        self._found(self.lease_s)

    async def _asked(self) -> float | None:
        with suppress(EngineUnavailable, EngineUnfit):
            config = ((await self._engine.get_object(CONFIG)) or {}).get("vllm_config")
            return _lease_in(config.get("kv_transfer_config")) if isinstance(config, dict) else None
        return None

    async def _measure(self) -> None:
        """By how long no lease ends after an answer that gives one."""
        prompt = {"model": self._model, "prompt": [1], "max_tokens": 1}
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        answer: Mapping[str, Any] | None = None
        while not (answer or {}).get("kv_transfer_params"):
            with suppress(EngineUnavailable, EngineUnfit):
                body = prompt | {"kv_transfer_params": asked}
                answer = await self._engine.post_object("/v1/completions", body)
            await asyncio.sleep(LOOK_S if answer else AGAIN_S)
        began_s, before = asyncio.get_running_loop().time(), self._ended()
        told_s = self._proven_s
        while self._ended() == before and self._proven_s < MOST_S:
            self._proven_s = max(self._proven_s, self._reading()[1] - began_s)
            if self._proven_s >= 2 * told_s:
                told_s = self._proven_s
                self._found(told_s)
            await asyncio.sleep(LOOK_S)

    def _ended(self) -> float:
        loads, _ = self._reading()
        return sum(load.leases_ended or 0.0 for load in loads.values())


def _lease_in(config: Any) -> float | None:
    """What the settings of an engine's connector say; None: it is another, or they make no
    sense."""
    if not isinstance(config, dict) or config.get("kv_connector") != "NixlConnector":
        return None
    extra = config.get("kv_connector_extra_config")
    said = extra.get("kv_lease_duration", USUAL_S) if isinstance(extra, dict) else USUAL_S
    return float(said) if isinstance(said, int | float) and said > 0 else None
