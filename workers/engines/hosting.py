"""The engine that a worker's settings ask for, ready to start."""

from __future__ import annotations

import time
from contextlib import ExitStack

from app.core.errors import ConfigError
from app.core.extras import extra
from app.core.settings.worker import WorkerSettings
from app.core.types import Tier
from app.core.worker_report import DEFAULT_SPEED
from app.simulation.engine import SimEngine
from app.simulation.link import Link, Sending
from app.simulation.profiles import PROFILES
from workers.engines.base import Engine, HostedEngine
from workers.engines.sim.runner import EngineRunner
from workers.engines.sim.text import FOLDER, SimTokenizer
from workers.engines.sim.transfer import SimTransfer
from workers.kv.cache import EventSink
from workers.kv.transfer.link import open_link


def host(settings: WorkerSettings) -> HostedEngine:
    """Blocks for as long as reading a checkpoint takes. Raises ConfigError for a bad setting."""
    if settings.engine == "torch":
        with extra("torch"):
            from workers.engines.torch.loading import load  # torch takes seconds to import

        return load(settings)
    return _simulated(settings)


def _simulated(settings: WorkerSettings) -> HostedEngine:
    if settings.profile not in PROFILES:
        raise ConfigError(f"profile: needs one of {', '.join(PROFILES)}, got {settings.profile!r}")
    engine = SimEngine(
        PROFILES[settings.profile],
        block_size=settings.block_size,
        now=time.monotonic,
        kv_pool_tokens=settings.kv_pool_tokens,
        host_pool_tokens=settings.host_pool_tokens,
    )
    stack = ExitStack()
    transfer = _transfer(settings, engine, stack) if settings.kv_transfer else None
    runner = EngineRunner(engine, speedup=settings.speedup, transfer=transfer)

    def start(publisher: EventSink) -> Engine:
        runner.on_step = lambda: publisher.notify(runner.take_events())
        return runner

    num_blocks = {
        Tier.DEVICE: engine.pool.num_blocks,
        Tier.HOST: settings.host_pool_tokens // settings.block_size,
    }
    return HostedEngine(
        settings.profile,
        num_blocks,
        start,
        stack.close,
        tokenizer=SimTokenizer(),
        invents=True,
        tokenizer_source=str(FOLDER),
        kv_kind=_kind(settings) if settings.kv_transfer else {},
    )


def _kind(settings: WorkerSettings) -> dict[str, str]:
    return {"profile": settings.profile, "block_size": str(settings.block_size)}


def _transfer(settings: WorkerSettings, engine: SimEngine, stack: ExitStack) -> SimTransfer:
    """Open as long as `stack` is."""
    link = open_link(settings, _kind(settings), stack)
    leaving = Link(
        bytes_per_s=settings.link_gbit * 1e9 / 8 * settings.speedup,
        first_s=DEFAULT_SPEED.transfer_s / settings.speedup,
    )
    return SimTransfer(engine, link, Sending(leaving, engine.profile))
