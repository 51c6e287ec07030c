"""Each process is told to end at any moment, among all that its tasks wait for."""

import asyncio
from contextlib import nullcontext

import pytest

from app.core.settings.agent import EngineAgentSettings
from app.core.settings.planner import PlannerSettings
from app.core.settings.router import PickerSettings, RouterSettings
from app.core.settings.worker import WorkerSettings
from app.edge import app as edge
from app.gateway.processor import serve as serve_picker
from app.http.server import listen
from app.planner import main as planner
from app.router import routers
from tests.cancelling import cancel_often
from tests.fake_worker import NAMESPACE
from tests.fakes.engine import fake_engine
from workers import engine_agent
from workers import main as worker
from workers.bridge import follower
from workers.discovery import dns, source


async def lifespan_alone(app, *_, **__):
    """Stands for the server of HTTP, whose stop takes two tenths of a second each time."""
    router = getattr(app, "router", None)
    async with nullcontext() if router is None else router.lifespan_context(app):
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    """Tasks that sleep are cancelled easily: they look more often than as a rule."""
    monkeypatch.setattr(edge, "serve", lifespan_alone)
    for process in (worker, engine_agent, planner):
        monkeypatch.setattr(process, "serve_http", lifespan_alone)
    monkeypatch.setattr(routers, "DIRECTORY_INTERVAL_S", 0.0)
    monkeypatch.setattr(follower, "POLL_S", 0.002)
    monkeypatch.setattr(follower, "LOOK_AGAIN_S", 0.002)
    monkeypatch.setattr(dns, "LOOK_S", 0.0)
    monkeypatch.setattr(source, "LOOK_S", 0.0)


async def router(**common):
    with listen("127.0.0.1", 0) as listening:
        await edge.serve_router(RouterSettings(**common), listening)


async def picker(**common):
    with listen("127.0.0.1", 0) as listening:
        await serve_picker(PickerSettings(grpc_port=0, **common), listening)


def agent(**more):
    async def serve(engine, folder, **common):
        told = {name: text.format(engine=engine, folder=folder) for name, text in more.items()}
        settings = EngineAgentSettings(port=0, memory_folder=str(folder), **common, **told)
        await engine_agent.serve(settings)

    return serve


ROWS = {
    "router": router,
    "picker": picker,
    "worker": lambda **common: worker.serve(WorkerSettings(worker_id="w", port=0, **common)),
    "agent": agent(engine_url="http://{engine}"),
    "agent of a file": agent(engines="{folder}/engines.toml"),
    "agent of a name": agent(engine_dns="{engine}"),
    "planner": lambda **common: planner.serve(PlannerSettings(port=0, **common)),
}


# Where closing itself is cancelled, the garbage collector closes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("process", ROWS)
async def test_no_stop_is_lost(process, one_redis_server, tmp_path):
    common = {"redis_url": one_redis_server.url, "namespace": NAMESPACE}
    async with fake_engine() as engine:
        if process.startswith("agent"):
            address = engine.url.removeprefix("http://")
            (tmp_path / "engines.toml").write_text(f'[e]\nengine-url = "{engine.url}"\n')
            common |= {"engine": address, "folder": tmp_path}
        await cancel_often(lambda: ROWS[process](**common))
