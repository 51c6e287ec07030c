"""Leases on KV that an engine keeps for others, and an engine that a late fetch has tainted.

A lease is asked of the engine, or measured by prompts that nobody fetches. A tainted engine may
hold KV of one prompt as another's, until it has begun anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from app.core.errors import ConfigError, EngineUnavailable, EngineUnfit
from app.core.roles import Role
from app.core.settings.agent import EngineAgentSettings
from app.core.types import random_hex
from app.core.worker_report import process_of
from workers.bridge.http.engine import EngineHttp
from workers.bridge.http.facts import EngineLoad
from workers.bridge.rank import Rank

log = logging.getLogger(__name__)

LEAST_S, MOST_S = 1.0, 3600.0
ANSWER_S = 120.0
"""Deadline of an engine that is asked for its settings: it looks at its whole environment first."""
CONFIG = "/server_info?config_format=json"
"""Path that vLLM has only with VLLM_SERVER_DEV_MODE=1."""
USUAL_S = 30.0
TRIES = 2
"""Prompts, of whose leases the longest counts: another prompt's lease may end in one."""
LOOK_S, AGAIN_S = 0.25, 10.0

Reading = Callable[[], tuple[float, float]]
"""Returns how many leases have ended, and when that was asked for, by the event loop's clock."""


def keeps_kv(settings: EngineAgentSettings, loads: Iterable[EngineLoad]) -> bool:
    """Whether an engine counts leases on KV that others fetch."""
    is_source = settings.kv_transfer == "nixl" and settings.role != Role.DECODE
    return is_source and any(load.kv_leases_ended is not None for load in loads)


async def settle_lease(engine: EngineHttp, model: str, ranks: Sequence[Rank]) -> float:
    """Has the ranks register the lease of their engine, as far as it is known by then; returns the
    seconds."""
    lease_s = 0.0

    def ended() -> tuple[float, float]:
        return sum(rank.load.kv_leases_ended or 0.0 for rank in ranks), ranks[0].read_s

    async for lease_s in lease_of(engine, model, ended):
        for rank in ranks:
            rank.agent.info = replace(rank.agent.info, kv_lease_s=lease_s)
    return lease_s


async def lease_of(engine: EngineHttp, model: str, reading: Reading) -> AsyncIterator[float]:
    """Yields more and more seconds that a lease is known to last; the last of them is the lease."""
    known_s = await _asked(engine)
    if known_s is not None:
        yield known_s
        return
    known_s = LEAST_S
    for _ in range(TRIES):
        await _prompt(engine, model)
        began_s, lasted_s = asyncio.get_running_loop().time(), 0.0
        ended, _ = reading()
        while (now := reading())[0] == ended and lasted_s < MOST_S:
            lasted_s = now[1] - began_s
            if lasted_s >= 2 * known_s:
                known_s = lasted_s
                yield known_s
            await asyncio.sleep(LOOK_S)
        known_s = max(known_s, lasted_s)
        yield known_s


def disagreement(said_s: float, lease_s: float) -> str:
    """Returns the finding that an operator gives another lease than the engine has; "": none."""
    if not said_s or abs(said_s - lease_s) <= 2.0 + 0.05 * lease_s:
        return ""
    told = f"--kv-lease-s is {said_s:g}, its engine keeps KV for {lease_s:.0f} s"
    return f"{told}: leave the flag out, as that is found out"


async def _prompt(engine: EngineHttp, model: str) -> None:
    """Returns once the engine has computed a prompt that it keeps for others."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    body = {"model": model, "prompt": [1], "max_tokens": 1, "kv_transfer_params": asked}
    while True:
        with suppress(EngineUnavailable, EngineUnfit):
            answer = await engine.post_object("/v1/completions", body)
            if (answer or {}).get("kv_transfer_params"):
                return
        await asyncio.sleep(AGAIN_S)


async def _asked(engine: EngineHttp) -> float | None:
    """Returns the lease in the settings of the engine's connector; None: it does not tell, or it is
    another connector."""
    config: Any = None
    with suppress(EngineUnavailable, EngineUnfit):
        config = await engine.get_object(CONFIG)
    for name in ("vllm_config", "kv_transfer_config"):
        config = config.get(name) if isinstance(config, dict) else None
    if not isinstance(config, dict) or config.get("kv_connector") != "NixlConnector":
        return None
    extra = config.get("kv_connector_extra_config")
    said = extra.get("kv_lease_duration", USUAL_S) if isinstance(extra, dict) else USUAL_S
    return float(said) if isinstance(said, int | float) and said > 0 else None


TAINT_LOOK_S = 0.75
RESET = "/reset_prefix_cache"
"""Path at which vLLM drops all blocks, unless requests use some; there only with
VLLM_SERVER_DEV_MODE=1."""


async def cleanse(engine: EngineHttp, ranks: Sequence[Rank]) -> None:
    """Keeps the blocks of a tainted engine out of the index until cancelled, and asks the engine to
    drop what it holds. If it does, that is another life of it."""
    was_tainted = False
    while True:
        tainted = [rank for rank in ranks if rank.agent.is_tainted]
        if tainted and not was_tainted:
            for rank in tainted:
                rank.clear()
                log.error(
                    "%s may hold KV of one prompt as another's, and gets no requests until the "
                    "engine has been restarted, or its cache reset",
                    rank.info.key,
                )
        was_tainted = bool(tainted)
        if tainted and await _drops_all(engine):
            log.warning("the engine's cache is reset: it gets requests again")
            for rank in ranks:
                rank.clear()
                process = process_of(rank.agent.info.engine_life)
                life = f"{process}+{random_hex(4)}"
                rank.agent.info = replace(rank.agent.info, engine_life=life)
        await asyncio.sleep(TAINT_LOOK_S)


async def _drops_all(engine: EngineHttp) -> bool:
    with suppress(EngineUnavailable, ConfigError):
        answer = await engine.post_object(RESET, None)
        return answer is not None and answer.get("success") is True
    return False
