"""What a server says of itself of which nothing is known but that it speaks OpenAI's API."""

from __future__ import annotations

from app.core.trust import Rung, Trust
from workers.bridge.http.engine import EngineHttp
from workers.bridge.http.facts import USUAL_BLOCK_SIZE, EngineFacts, Overrides, silent
from workers.bridge.http.models import models_of

TELLS_NOTHING = (
    "only vLLM and SGLang tell what they cache: start one of them, with --kv-events-config"
)


async def openai_facts(engine: EngineHttp, overrides: Overrides) -> EngineFacts:
    """Raises EngineUnavailable and EngineUnfit as `discover` does."""
    models = await models_of(engine, overrides)
    block_size = overrides.engine_block_size or USUAL_BLOCK_SIZE
    return EngineFacts(
        kind="openai",
        version=models.owner,
        models=models.names,
        max_model_len=models.max_model_len,
        tokenizer=models.tokenizer,
        block_size=block_size,
        capacity_tokens=overrides.capacity_tokens or 0,
        reuse_tokens=block_size,
        sources=silent(range(overrides.data_parallel_size or 1)),
        rung=Rung(Trust.APPROXIMATE, TELLS_NOTHING),
    )
