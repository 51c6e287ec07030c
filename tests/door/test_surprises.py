"""What runs beside the requests of a router fails as nobody foresaw."""

from app.console.sampler import Sampler
from app.door.engine.signs import MissingWorkers
from app.door.models import Models
from app.door.transfer.kv_lease import KvLeases
from app.edge.reload import WatchedFiles
from app.http import supervisor
from app.router.decider import Decider
from app.router.history import History
from app.router.maintenance import Maintenance
from app.router.measurements import Measurements
from app.router.reports import Reports
from app.router.routers import Routers
from app.router.waiting import Waiting
from app.state.client import RedisClient
from tests.door.conftest import replica, until_serving, worker_here
from tests.door.test_answers import chat
from tests.eventually import eventually

TASKS = {
    "keys": (WatchedFiles, "run"),
    "console": (Sampler, "run"),
    "missing_workers": (MissingWorkers, "run"),
    "kv_leases": (KvLeases, "run"),
    "directory": (Routers, "_follow_directory"),
    "models": (Models, "run"),
    "turns": (Waiting, "next_turns"),
    "decisions": (Decider, "_decide_next"),
    "predictions": (History, "_write_forever"),
    "records": (History, "_record_forever"),
    "reports": (Reports, "run"),
    "measurements": (Measurements, "follow"),
    "redis": (RedisClient, "follow"),
    "workers": (Maintenance, "_maintain_workers"),
    "index": (Maintenance, "_maintain_index"),
    "fill": (Maintenance, "_watch_fill"),
    "eviction_policy": (Maintenance, "_watch_memory"),
    "planner": (Maintenance, "_watch_planner"),
    "prune": (Maintenance, "_prune"),
}
"""By the name that the metric has: where each is done."""


async def test_no_surprise_beside_the_requests_ends_a_router_or_what_it_does(
    one_redis_server, monkeypatch
):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    failed = set()

    def fails_at_first(task, kind, method):
        does = getattr(kind, method)

        async def does_later(self, *args):
            if task not in failed:
                failed.add(task)
                raise RecursionError(task)
            return await does(self, *args)

        monkeypatch.setattr(kind, method, does_later)

    for task, (kind, method) in TASKS.items():
        fails_at_first(task, kind, method)
    url = one_redis_server.url
    async with worker_here(url, "a"), replica(url, wait_queue=8) as door:
        await until_serving(door, 1)
        assert (await door.post("/v1/chat/completions", json=chat("hi"))).is_success

        async def counted():
            lines = (await door.get("/metrics")).text.splitlines()
            return {
                line.split('"')[1]
                for line in lines
                if line.startswith("kvroute_task_failures_total") and line.endswith(" 1.0")
            }

        await eventually(counted, lambda tasks: tasks == set(TASKS))
        assert (await door.post("/v1/chat/completions", json=chat("hi"))).is_success
