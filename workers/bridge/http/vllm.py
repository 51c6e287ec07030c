"""Facts of vLLM.

Paths and labels from vllm/entrypoints/serve/instrumentator and vllm/v1/metrics/loggers.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from app.core.settings.agent import EngineAgentSettings
from app.core.trust import TOP, Trust
from workers.bridge.http.engine import EngineHttp, models_of, whole
from workers.bridge.http.facts import (
    USUAL_BLOCK_SIZE,
    EngineFacts,
    EventSource,
    NotExact,
    overridden,
    reachable,
    silent,
)
from workers.bridge.http.load import STARTED, Sample, SamplePattern

EVENTS_FLAG = (
    '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
    '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}\''
)
"""Flag that has vLLM publish events; ports of further ranks count upwards."""
FORGEABLE = (
    "its engine knows KV by hashes that a client can forge, also across tenants: start vLLM with "
    "--prefix-caching-hash-algo sha256 instead of {}"
)
CONFIG = "vllm:cache_config_info"
RUNNING = "vllm:num_requests_running"
SPECULATIVE = "vllm:spec_decode_num_drafts_total"
CONNECTED = "vllm:num_requests_kv_fetch_by_stage"
LOOKAHEAD_SINCE = (0, 33)
"""Version since which a block's hash covers the tokens after it that a drafter has read, unless
there is a KV connector."""
_WANTED = SamplePattern((CONFIG, *STARTED, RUNNING, SPECULATIVE, CONNECTED))
_RANK = re.compile(r"\d{1,5}", re.ASCII)
_LOCAL = ("tcp://127.", "tcp://localhost:", "tcp://0.0.0.0:")
"""Addresses of this node that vLLM connects to, as it binds only what has `*` or `::` in it. It may
report another one as bound, because it resolved `tcp://*:0` to it, but never one of these."""


@dataclass(frozen=True, slots=True)
class _Said:
    """Facts in /metrics. config: labels of cache_config_info."""

    config: dict[str, str]
    ranks: tuple[int, ...]
    started_s: float | None
    is_speculative: bool
    is_connected: bool


async def vllm_facts(engine: EngineHttp, version: str, given: EngineAgentSettings) -> EngineFacts:
    """Raises EngineUnavailable and EngineUnfit."""
    said = _read(list(_WANTED.samples(await engine.get("/metrics") or b"")))
    listed = await engine.get_object("/kv_event_sources")
    models = await models_of(engine, given)
    size = given.engine_block_size or _number(said, "effective_attention_block_size", "block_size")
    block_size = size if size and size > 1 else USUAL_BLOCK_SIZE
    try:
        _check(said, size)
        sources, rung = _sources(engine.host, version, listed, said, given), TOP
    except NotExact as error:
        ranks = range(given.data_parallel_size or 0) or said.ranks
        sources, rung = silent(ranks), error.rung
    drops_block = _drops_last_block(said, version)
    algorithm = said.config.get("prefix_caching_hash_algo", "")
    return EngineFacts(
        kind="vllm",
        version=version,
        models=models.names,
        adapters=models.adapters,
        folders=models.folders,
        max_model_len=models.max_model_len,
        tokenizer=models.tokenizer,
        block_size=block_size,
        capacity_tokens=given.capacity_tokens or _capacity(said, models.max_model_len or 0),
        pool_blocks=_number(said, "num_gpu_blocks") or 0,
        reuse_tokens=_number(said, "cache_hit_alignment_tokens") or block_size,
        recomputed_tokens=block_size if said.is_speculative and drops_block else 0,
        lookahead_tokens=1 if said.is_speculative and not drops_block else 0,
        sources=sources,
        announces_copies=True,
        started_s=said.started_s,
        kv_dtype=said.config.get("cache_dtype", ""),
        rung=rung,
        findings=(FORGEABLE.format(algorithm),) if algorithm.startswith("xxhash") else (),
    )


def _read(samples: list[Sample]) -> _Said:
    values = {sample.name: sample for sample in samples}
    ranks = {_rank(sample) for sample in samples if sample.name == RUNNING}
    return _Said(
        values[CONFIG].labels if CONFIG in values else {},
        tuple(sorted(ranks)) or (0,),
        max((sample.value for sample in samples if sample.name in STARTED), default=None),
        SPECULATIVE in values,
        CONNECTED in values,
    )


def _drops_last_block(said: _Said, version: str) -> bool:
    """Whether it computes the last block of a hit again if it has a drafter, as that one's KV of
    the last token may be that of another continuation. Which kind of drafter it is, only its log
    says: EAGLE and MTP, which need that, are most of them."""
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    is_older = numbers is None or (int(numbers[1]), int(numbers[2])) < LOOKAHEAD_SINCE
    return is_older or said.is_connected


def _rank(sample: Sample) -> int:
    engine = sample.labels.get("engine", "0")
    return int(engine) if _RANK.fullmatch(engine) else 0


def _number(said: _Said, *labels: str) -> int | None:
    numbers = (whole(said.config.get(label)) for label in labels)
    return next((number for number in numbers if number is not None), None)


def _check(said: _Said, size: int | None) -> None:
    if said.config.get("enable_prefix_caching") == "False":
        raise NotExact(
            "vLLM caches no prefixes: an encoder cannot, others do with --enable-prefix-caching",
            Trust.LOAD_ONLY,
        )
    if size is None:
        raise NotExact(
            "vLLM does not say its block size: start it without --disable-log-stats, or give the "
            "agent --engine-block-size 16 --capacity-tokens TOKENS"
        )
    if size == 1:
        raise NotExact("vLLM's blocks have one token each: start it with --block-size 16")


def _capacity(said: _Said, max_model_len: int) -> int:
    """Returns the tokens of KV on each rank; 0 if vLLM does not say, or has none: an encoder has
    one block."""
    # Older versions give the blocks of all ranks together.
    blocks, size = _number(said, "num_gpu_blocks"), _number(said, "block_size")
    tokens = blocks * size // len(said.ranks) if blocks and size else 0
    tokens = _number(said, "kv_cache_size_tokens") or tokens
    return tokens if tokens >= max_model_len else 0


def _sources(
    host: str, version: str, listed: dict[str, Any] | None, said: _Said, given: EngineAgentSettings
) -> tuple[EventSource, ...]:
    """listed: the answer of /kv_event_sources. Raises NotExact."""
    if given.events_endpoint:
        count = given.data_parallel_size
        ranks = range(count) if count else _listed_ranks(listed) or said.ranks
        return overridden(ranks, host, given)
    if listed is None:
        raise NotExact(
            f"vLLM {version} does not say where it publishes KV events: start it with "
            f"{EVENTS_FLAG} and the agent with --events-endpoint tcp://{host}:5557 "
            f"--replay-endpoint tcp://{host}:5657"
        )
    configs = {rank: listed[str(rank)] for rank in _listed_ranks(listed)}
    if not configs or not all(map(_publishes, configs.values())):
        raise NotExact(f"vLLM publishes no KV events: start it with {EVENTS_FLAG}")
    return tuple(_source(rank, config, host, given) for rank, config in configs.items())


def _listed_ranks(listed: dict[str, Any] | None) -> tuple[int, ...]:
    return tuple(sorted(int(rank) for rank in listed or {} if _RANK.fullmatch(rank)))


def _publishes(config: object) -> bool:
    return (
        isinstance(config, dict)
        and bool(config.get("enable_kv_cache_events"))
        and config.get("publisher") == "zmq"
        and isinstance(config.get("endpoint"), str)
    )


def _source(
    rank: int, config: dict[str, Any], host: str, given: EngineAgentSettings
) -> EventSource:
    """config: of this rank, with its own ports. Raises NotExact."""
    endpoint, replay = config["endpoint"], config.get("replay_endpoint")
    if endpoint.startswith(_LOCAL):
        raise NotExact(
            f"vLLM connects to {endpoint} instead of binding it: start it with {EVENTS_FLAG}"
        )
    if given.replay_endpoint:
        replay = reachable(given.replay_endpoint, host, rank)
    elif replay is not None:
        replay = reachable(str(replay), host)
    return EventSource(rank, reachable(endpoint, host), replay, str(config.get("topic") or ""))
