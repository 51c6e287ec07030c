"""Finds out what the engine beside an agent is, from its HTTP interface."""

from __future__ import annotations

import aiohttp

from app.core.errors import EngineUnfit
from workers.bridge.engine_http import EngineHttp
from workers.bridge.facts import NO_OVERRIDES, EngineFacts, Overrides
from workers.bridge.sglang import sglang_facts
from workers.bridge.vllm import vllm_facts

SERVER_INFO = ("/server_info", "/get_server_info")
"""What SGLang describes itself under; the second was the name until 0.5."""


async def discover(
    session: aiohttp.ClientSession, engine_url: str, overrides: Overrides = NO_OVERRIDES
) -> EngineFacts:
    """What the engine at `engine_url` says of itself, but for the `overrides`.

    Raises EngineUnavailable while it does not answer or is still loading, and EngineUnfit, in one
    line, if it does not say what is needed, or if events could not tell what it caches.
    """
    engine = EngineHttp(session, engine_url)
    kind = overrides.engine_kind
    # vLLM's own /server_info collects its environment for seconds: never ask that one.
    if kind != "sglang":
        version = await engine.get_object("/version")
        if version is not None and isinstance(version.get("version"), str):
            return await vllm_facts(engine, version["version"], overrides)
    if kind != "vllm":
        for path in SERVER_INFO:
            info = await engine.get_object(path)
            if info is not None and "page_size" in info:
                return await sglang_facts(engine, info, overrides)
    name = {"vllm": "vLLM", "sglang": "SGLang", None: "neither vLLM nor SGLang"}[kind]
    raise EngineUnfit(f"{name} {'answers' if kind is None else 'does not answer'} at {engine.url}")
