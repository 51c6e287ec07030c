"""Process of one worker: an engine, its agent, and its HTTP interface."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from importlib.metadata import version

from app.core.errors import ConfigError
from app.core.extras import extra
from app.core.keys import Keyspace
from app.core.roles import Role
from app.core.settings.kinds import base_url
from app.core.settings.worker import WorkerSettings
from app.core.types import Tier, WorkerKey
from app.core.worker_report import (
    DEFAULT_SPEED,
    ForwardPassMetrics,
    Speed,
    WorkerInfo,
    as_fingerprint,
)
from app.http.server import listen
from app.http.server import serve as serve_http
from app.http.supervisor import supervised
from app.simulation.engine import SimEngine
from app.simulation.profiles import PROFILES, Link, Sending
from app.state.connect import connected
from app.state.scripts import ScriptRunner
from workers.agent.agent import Agent, AgentSettings
from workers.agent.gpu import GpuMonitor
from workers.engines.base import Engine, HostedEngine
from workers.engines.sim.runner import EngineRunner
from workers.engines.sim.text import FOLDER, SimTokenizer
from workers.engines.sim.transfer import SimTransfer
from workers.kv.cache import EventSink
from workers.kv.transfer.kv_lease import open_kv_port
from workers.server.answer import ServedEngine
from workers.server.members import KEEP_S
from workers.tasks import FAILURES

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 1.0
CAPACITY_WORKERS = 16
"""Workers of the first one's size that an index is laid out for, unless told otherwise."""


async def serve(settings: WorkerSettings) -> None:
    """Runs a worker until SIGTERM or SIGINT. Raises ConfigError for a bad setting."""
    settings.check_member(settings.kv_transfer)
    keyspace = Keyspace(settings.namespace)
    for name in ("kv_pool_tokens", "host_pool_tokens", "disk_pool_tokens"):
        tokens = getattr(settings, name)
        if tokens and tokens < settings.block_size:
            raise ConfigError(
                f"{name}: needs at least one block of {settings.block_size}, got {tokens}"
            )
    async with AsyncExitStack() as opened:
        hosted = await asyncio.to_thread(host, settings)
        opened.callback(hosted.close)
        # Listen before the worker is registered, so that whoever is routed here can connect.
        listening = opened.enter_context(listen(settings.host, settings.port))
        settings = replace(settings, port=listening.getsockname()[1])
        await _serve_worker(settings, keyspace, hosted, listening)


async def _serve_worker(
    settings: WorkerSettings, keyspace: Keyspace, hosted: HostedEngine, listening: socket.socket
) -> None:
    # Only the modules imported so load Starlette.
    from workers.server.chat_paths import add_chat
    from workers.server.paths import WorkerApp

    async with AsyncExitStack() as opened:
        redis = await opened.enter_async_context(connected(settings.redis_url, REDIS_TIMEOUT_S))
        log.info("worker listening on %s", base_url(*listening.getsockname()[:2]))
        gpu = GpuMonitor(os.environ.get("CUDA_VISIBLE_DEVICES"), hosted.gpu)
        opened.push_async_callback(asyncio.to_thread, gpu.stop)

        def measure() -> tuple[ForwardPassMetrics, Speed]:
            return engine.metrics(), engine.speed()

        agent = await _new_agent(
            settings, keyspace, hosted, ScriptRunner(redis, REDIS_TIMEOUT_S), measure, gpu
        )
        engine = hosted.start(agent)
        names = settings.model_names(hosted.model)
        served = ServedEngine(engine, names, hosted.tokenizer, hosted.invents)
        app = WorkerApp(served, key=settings.worker_key, metrics_key=settings.metrics_key)
        add_chat(app, served, hosted.tokenizer_source)
        async with asyncio.TaskGroup() as tasks:
            running_agent = tasks.create_task(_run(agent))
            following = tasks.create_task(supervised("redis", redis.follow, FAILURES))

            async def leave() -> None:
                if settings.drain_s:
                    await agent.drain(settings.drain_s)
                # In this order: a running agent would take its retirement for a loss, and resync.
                running_agent.cancel()
                await asyncio.wait([running_agent])
                await agent.stop()

            def end() -> None:
                # Cancelled a second time, the engine would not wait for the step it is in.
                if not running.cancelling():
                    running.cancel()

            running = tasks.create_task(engine.run())
            await serve_http(app, listening, on_stop=leave, on_late=end, drain_s=settings.drain_s)
            end()
            following.cancel()


async def _run(agent: Agent) -> None:
    await agent.start()
    await agent.run()


async def _new_agent(
    settings: WorkerSettings,
    keyspace: Keyspace,
    hosted: HostedEngine,
    scripts: ScriptRunner,
    measure: Callable[[], tuple[ForwardPassMetrics, Speed]],
    gpu: GpuMonitor,
) -> Agent:
    info = WorkerInfo(
        key=WorkerKey(settings.resolved_id(), settings.dp_rank),
        address=settings.resolved_address(),
        block_size=settings.block_size,
        kv_total_blocks=hosted.num_blocks[Tier.DEVICE],
        max_requests=settings.max_requests,
        accelerator=await asyncio.to_thread(gpu.start),
        engine=f"kvroute-{settings.engine} {version('kvroute')}",
        models=settings.model_names(hosted.model),
        max_model_len=hosted.num_blocks[Tier.DEVICE] * settings.block_size,
        tokenizer=hosted.tokenizer_source,
        host_total_blocks=hosted.num_blocks.get(Tier.HOST, 0),
        role=Role.parse(settings.role),
        kv_transfer=settings.kv_transfer,
        kv_lease_s=KEEP_S if settings.kv_transfer else 0.0,
        kv_fingerprint=as_fingerprint(hosted.kv_kind),
        tp_size=settings.tp_size if settings.engine == "torch" else 1,
    )
    capacity = settings.index_blocks or CAPACITY_WORKERS * sum(hosted.num_blocks.values())
    agent_settings = AgentSettings(settings.lease_ttl_s, capacity, settings.index_shards)
    return Agent(scripts, keyspace, info, agent_settings, measure, gpu.latest)


def host(settings: WorkerSettings) -> HostedEngine:
    """Returns the engine; blocks for as long as reading a checkpoint takes. Raises ConfigError for
    a bad setting."""
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
    link = open_kv_port(settings, _kind(settings), stack)
    leaving = Link(
        bytes_per_s=settings.link_gbit * 1e9 / 8 * settings.speedup,
        first_s=DEFAULT_SPEED.transfer_s / settings.speedup,
    )
    return SimTransfer(engine, link, Sending(leaving, engine.profile))
