"""What a worker beside an engine measures, from what the engine says of its load."""

from __future__ import annotations

from app.core.loads import Load
from app.core.worker_report import ForwardPassMetrics
from workers.bridge.http.facts import EngineLoad
from workers.bridge.speed import EngineSpeed


def measured(
    load: EngineLoad,
    speed: EngineSpeed,
    reserved: list[Load | None],
    *,
    max_requests: int,
    total_blocks: int,
    late_s: float,
    read_s_ago: float,
) -> ForwardPassMetrics:
    """reserved: by routers, before that load was read, and after. total_blocks: that it registers.
    late_s: as in ForwardPassMetrics."""
    metrics = ForwardPassMetrics(
        request_active_slots=load.running,
        request_total_slots=max_requests,
        kv_active_blocks=round(load.kv_usage * total_blocks),
        kv_total_blocks=total_blocks,
        num_requests_waiting=load.waiting,
        gpu_cache_usage_perc=load.kv_usage,
        gpu_prefix_cache_hit_rate=load.hit_rate or 0.0,
        kv_idle_before_evict_s=load.idle_before_evict_s or 0.0,
        late_s=late_s,
        read_s_ago=read_s_ago,
        mean_prefill_tokens=speed.mean_prefill_tokens,
        kv_leases_ended=_count(load.leases_ended),
        kv_fetched_late=_count(load.fetched_late),
        kv_transfers=_count(load.transfers),
        kv_transfers_failed=_count(load.failed_transfers),
        engine_steps=None if load.leases_ended is None else _count(load.steps),
    )
    return metrics.beside(*reserved)


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)
