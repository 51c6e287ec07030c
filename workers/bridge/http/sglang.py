"""Facts of SGLang.

Fields of /server_info from sglang/srt/server_args.py and describe_kv_events_publisher of
sglang/srt/runtime_context.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from app.core.settings.agent import EngineAgentSettings
from app.core.trust import TOP, Trust
from workers.bridge.http.engine import EngineHttp, models_of, whole
from workers.bridge.http.facts import (
    USUAL_BLOCK_SIZE,
    EngineFacts,
    EventSource,
    NotExact,
    binds,
    overridden,
    reachable,
    silent,
)

EVENTS_FLAG = (
    '--kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5657"}\''
)
"""Flag that has SGLang publish events; ports of further ranks count upwards."""
KV_SETTINGS = (
    "attention_backend",
    "disaggregation_transfer_backend",
    "dtype",
    "quantization",
    "revision",
    "tp_size",
)
"""Settings that the KV depends on which is handed on."""


async def sglang_facts(
    engine: EngineHttp, info: dict[str, Any], given: EngineAgentSettings
) -> EngineFacts:
    """info: the answer of /server_info. Raises EngineUnavailable and EngineUnfit."""
    # It answers while it still warms up. /health would generate a token.
    await engine.get("/ready")
    models = await models_of(engine, given)
    size = _page_size(info, given)
    page_size = size if size and size > 1 else USUAL_BLOCK_SIZE
    ranks = range(given.data_parallel_size or _num_ranks(info))
    try:
        _check(info, size)
        sources, rung = _sources(engine.host, ranks, info, given), TOP
    except NotExact as error:
        sources, rung = silent(ranks), error.rung
    return EngineFacts(
        kind="sglang",
        version=str(info.get("version", "")),
        models=models.names,
        adapters=models.adapters,
        folders=models.folders,
        max_model_len=models.max_model_len,
        tokenizer=models.tokenizer,
        block_size=page_size,
        capacity_tokens=given.capacity_tokens or whole(info.get("max_total_num_tokens")) or 0,
        reuse_tokens=page_size,
        sources=sources,
        # Its radix tree then has pairs of tokens.
        lookahead_tokens=1 if info.get("speculative_algorithm") else 0,
        kv_dtype=_told(info, "kv_cache_dtype"),
        kv_settings=tuple((name, _told(info, name)) for name in KV_SETTINGS),
        rung=rung,
    )


def _told(info: dict[str, Any], name: str) -> str:
    return str(info[name]) if name in info else ""


def _check(info: dict[str, Any], size: int | None) -> None:
    if info.get("disable_radix_cache"):
        raise NotExact(
            "SGLang caches no prefixes: start it without --disable-radix-cache", Trust.LOAD_ONLY
        )
    if info.get("disaggregation_mode") == "decode" and not info.get(
        "disaggregation_decode_enable_radix_cache"
    ):
        raise NotExact(
            "this SGLang only decodes and caches no prefixes: start it with "
            "--disaggregation-decode-enable-radix-cache",
            Trust.LOAD_ONLY,
        )
    if size is None:
        raise NotExact("SGLang does not say its page size: give the agent --engine-block-size 16")
    if size == 1:
        raise NotExact("SGLang's pages have one token each: start it with --page-size 16")


def _page_size(info: dict[str, Any], given: EngineAgentSettings) -> int | None:
    """Returns the tokens of a block in events: a page's, times the ranks that share the decode
    context."""
    size = given.engine_block_size or whole(_events(info).get("block_size"))
    page = whole(info.get("page_size"))
    return size or (page and page * (whole(info.get("dcp_size")) or 1))


def _events(info: dict[str, Any]) -> dict[str, Any]:
    said = info.get("kv_events")
    return said if isinstance(said, dict) else {}


def _num_ranks(info: dict[str, Any]) -> int:
    return whole(_events(info).get("dp_size")) or whole(info.get("dp_size")) or 1


def _sources(
    host: str, ranks: Iterable[int], info: dict[str, Any], given: EngineAgentSettings
) -> tuple[EventSource, ...]:
    if given.events_endpoint:
        return overridden(ranks, host, given)
    config, events = _config(info), _events(info)
    if config.get("publisher") == "zmq" and not events and "kv_events" not in info:
        events = _described(config)  # from before /server_info described the publisher
    if events.get("publisher") != "zmq":
        raise NotExact(f"SGLang publishes no KV events: start it with {EVENTS_FLAG}")
    endpoint = str(config.get("endpoint", "*"))
    if not binds(endpoint) and config.get("bind") is not True:
        raise NotExact(
            f"SGLang connects to {endpoint} instead of binding it: start it with {EVENTS_FLAG}"
        )
    base = f"tcp://{events.get('endpoint_host')}"
    events_at = f"{base}:{events.get('endpoint_port_base')}"
    replay_port = events.get("replay_endpoint_port_base")
    replay_at = given.replay_endpoint or (f"{base}:{replay_port}" if replay_port else None)
    return tuple(
        EventSource(
            rank,
            reachable(events_at, host, rank),
            reachable(replay_at, host, rank) if replay_at else None,
            str(events.get("topic") or ""),
        )
        for rank in ranks
    )


def _config(info: dict[str, Any]) -> dict[str, Any]:
    try:
        config = orjson.loads(info.get("kv_events_config") or "{}")
    except (orjson.JSONDecodeError, TypeError):
        return {}
    return config if isinstance(config, dict) else {}


def _described(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a publisher's configuration in the form in which newer versions describe it."""
    parts = str(config.get("endpoint", "tcp://*:5557")).removeprefix("tcp://").rpartition(":")
    replay = str(config.get("replay_endpoint") or "").rpartition(":")
    return {
        "publisher": "zmq",
        "endpoint_host": parts[0],
        "endpoint_port_base": parts[2],
        "replay_endpoint_port_base": replay[2] or None,
        "topic": config.get("topic"),
    }
