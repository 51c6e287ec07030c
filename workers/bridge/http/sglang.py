"""What SGLang says of itself.

Fields of /server_info from sglang/srt/server_args.py and describe_kv_events_publisher of
sglang/srt/runtime_context.py.
"""

from __future__ import annotations

from typing import Any

import orjson

from app.core.errors import EngineUnfit
from workers.bridge.events.sources import binds, overridden, reachable, silent
from workers.bridge.http.engine import EngineHttp, whole
from workers.bridge.http.facts import USUAL_BLOCK_SIZE, EngineFacts, EventSource, Overrides
from workers.bridge.http.models import models_of

EVENTS_FLAG = (
    '--kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5657"}\''
)
"""The ports of ranks count upwards from these."""
KV_SETTINGS = (
    "attention_backend",
    "disaggregation_transfer_backend",
    "dtype",
    "quantization",
    "revision",
    "tp_size",
)
"""What the KV depends on that is handed on."""


async def sglang_facts(
    engine: EngineHttp, info: dict[str, Any], overrides: Overrides
) -> EngineFacts:
    """info: what /server_info answered. Raises EngineUnavailable and EngineUnfit as `discover`
    does."""
    # It answers while it still warms up. /health would generate a token.
    await engine.get("/ready")
    _check_prefix_cache(info)
    sources, approximate = _sources(engine.host, info, overrides)
    page_size = _page_size(info, overrides, must_say=not approximate)
    capacity = overrides.capacity_tokens or whole(
        info.get("max_total_num_tokens"), "max_total_num_tokens"
    )
    if capacity is None and not approximate:
        raise EngineUnfit(
            "SGLang does not say how much KV it holds: give the agent --capacity-tokens"
        )
    models = await models_of(engine, overrides)
    return EngineFacts(
        kind="sglang",
        version=str(info.get("version", "")),
        models=models.names,
        adapters=models.adapters,
        folders=models.folders,
        max_model_len=models.max_model_len,
        tokenizer=models.tokenizer,
        block_size=page_size,
        capacity_tokens=capacity or 0,
        reuse_tokens=page_size,
        recomputed_tokens=0,
        sources=sources,
        announces_copies=False,
        started_s=None,
        # Its radix tree then has pairs of tokens.
        lookahead_tokens=1 if info.get("speculative_algorithm") else 0,
        kv_dtype=_told(info, "kv_cache_dtype"),
        kv_settings=tuple((name, _told(info, name)) for name in KV_SETTINGS),
        approximate=approximate,
    )


def _told(info: dict[str, Any], name: str) -> str:
    """As text; "": it does not say."""
    return str(info[name]) if name in info else ""


def _check_prefix_cache(info: dict[str, Any]) -> None:
    if info.get("disable_radix_cache"):
        raise EngineUnfit("SGLang caches no prefixes: start it without --disable-radix-cache")
    if info.get("disaggregation_mode") == "decode" and not info.get(
        "disaggregation_decode_enable_radix_cache"
    ):
        raise EngineUnfit(
            "this SGLang only decodes and caches no prefixes: start it with "
            "--disaggregation-decode-enable-radix-cache"
        )


def _page_size(info: dict[str, Any], overrides: Overrides, *, must_say: bool) -> int:
    """Tokens of a block in events: a page's, times the ranks that share the decode context. Without
    events, any will do."""
    size = overrides.engine_block_size
    if size is None and isinstance(info.get("kv_events"), dict):
        size = whole(info["kv_events"].get("block_size"), "block_size")
    if size is None:
        page = whole(info.get("page_size"), "page_size")
        size = page and page * (whole(info.get("dcp_size"), "dcp_size") or 1)
    if not must_say:
        return size if size and size > 1 else USUAL_BLOCK_SIZE
    if size is None:
        raise EngineUnfit(
            "SGLang does not say its page size: give the agent --engine-block-size 16"
        )
    if size == 1:
        raise EngineUnfit("SGLang's pages have one token each: start it with --page-size 16")
    return size


def _sources(
    host: str, info: dict[str, Any], overrides: Overrides
) -> tuple[tuple[EventSource, ...], str]:
    """And why they publish nothing; "": they do."""
    said = info.get("kv_events")
    events: dict[str, Any] = said if isinstance(said, dict) else {}
    ranks = range(
        overrides.data_parallel_size
        or whole(events.get("dp_size"), "dp_size")
        or whole(info.get("dp_size"), "dp_size")
        or 1
    )
    if overrides.events_endpoint is not None:
        return overridden(ranks, host, overrides), ""
    config = _config(info)
    if config.get("publisher") == "zmq" and not events and "kv_events" not in info:
        events = _described(config)  # from before /server_info described the publisher
    if events.get("publisher") != "zmq":
        return silent(ranks), f"SGLang publishes no KV events: start it with {EVENTS_FLAG}"
    endpoint = str(config.get("endpoint", "*"))
    if not binds(endpoint) and config.get("bind") is not True:
        raise EngineUnfit(
            f"SGLang connects to {endpoint} instead of binding it: start it with {EVENTS_FLAG}"
        )
    base = f"tcp://{events.get('endpoint_host')}"
    events_at = f"{base}:{events.get('endpoint_port_base')}"
    replay_port = events.get("replay_endpoint_port_base")
    replay_at = overrides.replay_endpoint or (f"{base}:{replay_port}" if replay_port else None)
    sources = tuple(
        EventSource(
            rank,
            reachable(events_at, host, rank),
            reachable(replay_at, host, rank) if replay_at else None,
            str(events.get("topic") or ""),
        )
        for rank in ranks
    )
    return sources, ""


def _config(info: dict[str, Any]) -> dict[str, Any]:
    """What --kv-events-config was."""
    try:
        config = orjson.loads(info.get("kv_events_config") or "{}")
    except (orjson.JSONDecodeError, TypeError):
        return {}
    return config if isinstance(config, dict) else {}


def _described(config: dict[str, Any]) -> dict[str, Any]:
    """As newer versions describe it."""
    parts = str(config.get("endpoint", "tcp://*:5557")).removeprefix("tcp://").rpartition(":")
    replay = str(config.get("replay_endpoint") or "").rpartition(":")
    return {
        "publisher": "zmq",
        "endpoint_host": parts[0],
        "endpoint_port_base": parts[2],
        "replay_endpoint_port_base": replay[2] or None,
        "topic": config.get("topic"),
    }
