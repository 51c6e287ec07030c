"""Those parts of vLLM's HTTP interface that an agent beside it reads, for our own engines."""

from __future__ import annotations

from importlib.metadata import version

from prometheus_client import CollectorRegistry, ProcessCollector

from app.core.settings.worker import WorkerSettings
from app.core.types import Tier
from app.http.client import Client
from workers.engines.base import Engine, HostedEngine
from workers.server.chat_paths import add_chat
from workers.server.paths import WorkerApp
from workers.server.writers import ServedEngine
from workers.vllm_face.event_socket import EventSocket
from workers.vllm_face.request_metrics import LoadCollector

SPOKEN_VERSION = "0.33.0"
"""Of vLLM's interfaces and events."""


def labels_of(settings: WorkerSettings, hosted: HostedEngine) -> dict[str, str]:
    """Those of all of vLLM's metrics."""
    return {"model_name": hosted.model, "engine": str(settings.dp_rank)}


def create_vllm_app(
    engine: Engine,
    settings: WorkerSettings,
    hosted: HostedEngine,
    events: EventSocket,
    registry: CollectorRegistry,
) -> WorkerApp:
    """See `WorkerApp` and `add_chat`; besides, /version, /kv_event_sources, /reset_prefix_cache
    and, among the metrics, vLLM's. registry: has those of requests."""
    registry.register(
        LoadCollector(engine.metrics, labels_of(settings, hosted), _cache_config(settings, hosted))
    )
    ProcessCollector(registry=registry)
    names = settings.model_names(hosted.model)
    served = ServedEngine(engine, names, hosted.tokenizer, hosted.invents, salts=False)
    app = WorkerApp(
        served, registry=registry, key=settings.worker_key, metrics_key=settings.metrics_key
    )
    add_chat(app, served, hosted.tokenizer_source)

    async def show_version(client: Client) -> None:
        await client.answer({"version": f"{SPOKEN_VERSION}+kvroute.{version('kvroute')}"})

    async def kv_event_sources(client: Client) -> None:
        await client.answer(events.sources() if settings.publish_events == "vllm" else {})

    async def reset_prefix_cache(client: Client) -> None:
        await client.answer({"success": engine.running and engine.reset_cache()})

    app.add("GET", "/version", show_version)
    app.add("GET", "/kv_event_sources", kv_event_sources)
    app.add("POST", "/reset_prefix_cache", reset_prefix_cache)
    return app


def _cache_config(settings: WorkerSettings, hosted: HostedEngine) -> dict[str, str]:
    """The labels of vllm:cache_config_info that say what our engines know."""
    block_size, num_blocks = settings.block_size, hosted.num_blocks[Tier.DEVICE]
    config = {
        "block_size": block_size,
        "effective_attention_block_size": block_size,
        "hash_block_size": block_size,
        "cache_hit_alignment_tokens": hosted.reuse_tokens or block_size,
        "num_gpu_blocks": num_blocks,
        "kv_cache_size_tokens": num_blocks * block_size,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "xxh3_64",
    }
    return {name: str(value) for name, value in config.items()}
