"""Handling of an engine that may hold KV of one prompt as another's, until it has begun anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from app.core.errors import ConfigError, EngineUnavailable
from app.core.types import random_hex
from app.core.worker_report import process_of
from workers.bridge.http.engine import EngineHttp
from workers.bridge.http.facts import EngineFacts
from workers.bridge.rank import Rank

log = logging.getLogger(__name__)

LOOK_S = 0.75
RESET = "/reset_prefix_cache"
"""Path at which vLLM drops all blocks, unless requests use some; there only with
VLLM_SERVER_DEV_MODE=1."""


def life_of(facts: EngineFacts) -> str:
    return f"{facts.started_s:.3f}" if facts.started_s is not None else ""


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
        await asyncio.sleep(LOOK_S)


async def _drops_all(engine: EngineHttp) -> bool:
    with suppress(EngineUnavailable, ConfigError):
        answer = await engine.post_object(RESET, None)
        return answer is not None and answer.get("success") is True
    return False
