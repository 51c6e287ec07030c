"""The stand-in for engines as a worker, whose agent only renews its lease."""

from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType

from app.core.worker_report import DEFAULT_SPEED, ForwardPassMetrics
from app.state.scripts import ScriptRunner
from tests.fake_worker import KEYS, running, worker_info
from tests.fakes.engine import fake_engine
from workers.agent.agent import Agent, AgentSettings

LEASE_S = 9.0
NUM_BLOCKS = 100_000


@asynccontextmanager
async def leased(redis, name, *, keyspace=KEYS, options=MappingProxyType({}), choose=None, **about):
    """A worker of model `m`. options, choose: of the engine. about: more of WorkerInfo."""
    async with fake_engine(**options) as engine:
        engine.choose = choose
        info = replace(
            worker_info(name, kv_total_blocks=NUM_BLOCKS),
            **({"address": engine.url, "models": ("m",)} | about),
        )
        measured = ForwardPassMetrics(kv_total_blocks=NUM_BLOCKS), DEFAULT_SPEED
        agent = Agent(
            *(ScriptRunner(redis, 5.0), keyspace, info, AgentSettings(LEASE_S, 1024)),
            lambda: measured,
        )
        async with running(agent):
            yield engine
