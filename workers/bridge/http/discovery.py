"""Finds out what the engine beside an agent is, from its HTTP interface."""

from __future__ import annotations

import aiohttp

from app.core.errors import EngineUnfit
from app.core.settings.agent import EngineAgentSettings
from app.core.trust import Rung, Trust
from workers.bridge.http.engine import EngineHttp, models_of
from workers.bridge.http.facts import USUAL_BLOCK_SIZE, EngineFacts, silent
from workers.bridge.http.sglang import sglang_facts
from workers.bridge.http.vllm import vllm_facts

SERVER_INFO = ("/server_info", "/get_server_info")
"""Paths under which SGLang describes itself; the second was the name until 0.5."""
NOTHING_GIVEN = EngineAgentSettings()
VLLM_OWNERS = ("vllm", "kvroute")
"""Owners of the models that vLLM and our engines list."""
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


async def discover(
    session: aiohttp.ClientSession, engine_url: str, given: EngineAgentSettings = NOTHING_GIVEN
) -> EngineFacts:
    """Returns what the engine at `engine_url` says of itself, but for what is given. Raises
    EngineUnavailable while it does not answer or is still loading, and EngineUnfit, in one line, if
    it refuses or lists no model. What else it lacks lowers its rung."""
    engine = EngineHttp(session, engine_url)
    kind = None if given.engine_kind == "auto" else given.engine_kind
    # vLLM's own /server_info collects its environment for seconds: never ask that one.
    if kind in (None, "vllm"):
        version = await engine.get_object("/version")
        said = None if version is None else version.get("version")
        # TensorRT-LLM has that path, too.
        if isinstance(said, str) and (kind or await _is_vllm(engine, given)):
            return await vllm_facts(engine, said, given)
    if kind in (None, "sglang"):
        for path in SERVER_INFO:
            info = await engine.get_object(path)
            if info is not None and "page_size" in info:
                return await sglang_facts(engine, info, given)
    if kind in (None, "openai"):
        return await openai_facts(engine, given)
    raise EngineUnfit(f"{NAMES[kind]} does not answer at {engine.url}")


async def _is_vllm(engine: EngineHttp, given: EngineAgentSettings) -> bool:
    models = await models_of(engine, given)
    return models.owner in VLLM_OWNERS or b"vllm:" in (await engine.get("/metrics") or b"")


TELLS_NOTHING = (
    "only vLLM and SGLang tell what they cache: start one of them, with --kv-events-config"
)


async def openai_facts(engine: EngineHttp, given: EngineAgentSettings) -> EngineFacts:
    """Raises EngineUnavailable and EngineUnfit."""
    models = await models_of(engine, given)
    block_size = given.engine_block_size or USUAL_BLOCK_SIZE
    return EngineFacts(
        kind="openai",
        version=models.owner,
        models=models.names,
        max_model_len=models.max_model_len,
        tokenizer=models.tokenizer,
        block_size=block_size,
        capacity_tokens=given.capacity_tokens or 0,
        reuse_tokens=block_size,
        sources=silent(range(given.data_parallel_size or 1)),
        rung=Rung(Trust.APPROXIMATE, TELLS_NOTHING),
    )
