"""Waiting requests: how turns are shared, how long a free slot stays free, by replica count.

    python -m loadtest.bench_waiting --json out/waiting.json

Router processes and Redis are real; the workers are registrations without engines. Callers of three
tenants, with weights 4, 2 and 1, keep more requests waiting than there are slots. Each tenant sends
all its requests to one replica, so that replicas have different tenants. Each routed request is
held for a while and then released. A tenant's share is its part of the turns. A hand-over is the
time from the answer to a release until the next request is routed; 0 if that came first.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from redis.asyncio import Redis
from rich.console import Console

from app.core.errors import KvrouteError
from app.core.keys import Keyspace
from app.core.settings.kinds import LONGEST_S
from app.local.redis_server import EmbeddedRedis
from app.options import PROCESSES, Number
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from loadtest.command import option
from loadtest.harness import bench, grid, percentiles
from loadtest.holders import Holders
from loadtest.servers import routers

KEYS = Keyspace("bench-waiting")
REPLICAS = (1, 2, 4)
WEIGHTS = {"gold": 4, "silver": 2, "bronze": 1}
NUM_WORKERS = 4
SLOTS = 2
"""Slots of each worker."""
CALLERS = 16
"""Callers of each tenant."""
HELD_S = 0.05
PROMPT = list(range(64))
AT_LEAST_1_S = Number(1, LONGEST_S)
"""In less time, a slot may not be handed over even once."""


@dataclass(slots=True)
class Turns:
    """What callers saw; times by time.perf_counter, in order.

    routed_s: when requests were routed. freed_s: when releases were answered.
    """

    by_tenant: Counter[str] = field(default_factory=Counter)
    routed_s: list[float] = field(default_factory=list)
    freed_s: list[float] = field(default_factory=list)

    def hand_overs_s(self) -> list[float]:
        """How long slots stayed free.

        The first requests find them free. From then on, each slot that is freed is the next
        request's, which may even be routed before the release is answered.
        """
        later = self.routed_s[NUM_WORKERS * SLOTS :]
        return [
            max(0.0, routed - freed) for freed, routed in zip(self.freed_s, later, strict=False)
        ]


async def register(redis_url: str) -> None:
    async with connect(redis_url) as redis:
        holders = Holders(ScriptRunner(redis, timeout_s=5.0), KEYS)
        await holders.register(NUM_WORKERS, max_requests=SLOTS)


async def call(
    client: httpx.AsyncClient, tenant: str, caller: int, turns: Turns, until_s: float
) -> None:
    """One request after another."""
    number = 0
    while time.perf_counter() < until_s:
        number += 1
        request_id = f"{tenant}-{caller}-{number}"
        answer = await client.post(
            "/v1/route",
            json={"token_ids": PROMPT, "request_id": request_id, "tenant": tenant},
        )
        if answer.status_code != 200 or answer.json()["degraded"]:
            raise KvrouteError(f"the router answered {answer.status_code}: {answer.text}")
        routed_s = time.perf_counter()
        # After that, fewer and fewer requests wait.
        if routed_s < until_s:
            turns.by_tenant[tenant] += 1
            turns.routed_s.append(routed_s)
        await asyncio.sleep(HELD_S)
        (await client.delete(f"/v1/requests/{request_id}")).raise_for_status()
        turns.freed_s.append(time.perf_counter())


async def _measure(redis_url: str, urls: Sequence[str], seconds: float) -> dict[str, Any]:
    turns = Turns()
    until_s = time.perf_counter() + seconds
    async with Redis.from_url(redis_url) as redis:
        await redis.config_resetstat()
        clients = [httpx.AsyncClient(base_url=url, timeout=60.0) for url in urls]
        async with asyncio.TaskGroup() as tasks:
            for place, tenant in enumerate(WEIGHTS):
                client = clients[place % len(clients)]
                for caller in range(CALLERS):
                    tasks.create_task(call(client, tenant, caller, turns, until_s))
        for client in clients:
            await client.aclose()
        stats: Any = await redis.info("commandstats")
    total = turns.by_tenant.total()
    return {
        "turns": total,
        "shares": {tenant: turns.by_tenant[tenant] / total for tenant in WEIGHTS},
        "hand_over_ms": percentiles([1e3 * s for s in turns.hand_overs_s()], 50, 99),
        "redis_us_per_turn": stats["cmdstat_evalsha"]["usec"] / len(turns.freed_s),
    }


def measure(replicas: Sequence[int], seconds: float) -> dict[int, dict[str, Any]]:
    """What `_measure` finds, for each number of replicas."""
    by_replicas = {}
    with EmbeddedRedis() as redis:
        asyncio.run(register(redis.url))
        with routers(
            max(replicas),
            redis.url,
            namespace=KEYS.namespace,
            wait_queue=256,
            wait_timeout_s=60.0,
            tenant_weights=",".join(f"{name}={weight}" for name, weight in WEIGHTS.items()),
        ) as urls:
            for count in replicas:
                by_replicas[count] = asyncio.run(_measure(redis.url, urls[:count], seconds))
    return by_replicas


def show(result: dict[int, dict[str, Any]], console: Console) -> None:
    total = sum(WEIGHTS.values())
    columns = {
        "turns": "{turns:,}",
        **{f"{t}, due {w / total:.1%}": f"{{shares[{t}]:.1%}}" for t, w in WEIGHTS.items()},
        "slot free, p50": "{hand_over_ms[p50]:.0f} ms",
        "p99": "{hand_over_ms[p99]:.0f} ms",
        "Redis a turn": "{redis_us_per_turn:.0f} µs",
    }
    rows = (([str(count)], figures) for count, figures in result.items())
    console.print(grid(["replicas"], columns, rows))


main = bench(
    measure,
    show,
    option("--replicas", REPLICAS, kind=PROCESSES, several=True),
    option("--seconds", 10.0, "Duration for each number of replicas.", AT_LEAST_1_S),
)

if __name__ == "__main__":
    main()
