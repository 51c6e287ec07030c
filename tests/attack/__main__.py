"""Attacks what listens at a URL, and at a worker's port for KV; prints what should not have come
back, and ends with 1 if anything has.

    python -m tests.attack http://127.0.0.1:8080 --redis-url redis://127.0.0.1:6379
    python -m tests.attack --kv 127.0.0.1:5000 --worker-key KEY

What is sent follows from --seed. The URL is that of a router, a worker or a balancer. With
--redis-url, an engine that answers as none should registers as the only worker of a namespace and a
model of its own. What listens on other machines is attacked only with --elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

import click
import httpx

from app.core.keys import Keyspace
from app.state.connect import connect
from tests.attack.attack import SLOW_S, Attack, Target, answering, attack_from
from tests.attack.engine import hostile_worker
from tests.attack.inputs import Surface
from tests.attack.kv_port import KvPort
from tests.eventually import eventually

MOST_INPUTS = 100_000
STARTS_WITHIN_S = 30.0
HERE = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Keys:
    """key: that the URL asks for. other: another caller's. worker: of workers. "": none."""

    key: str
    other: str
    worker: str


@click.command(help=__doc__)
@click.argument("url", required=False)
@click.option("--kv", multiple=True, metavar="HOST:PORT", help="A worker's port for KV.")
@click.option("--redis-url", default="", help="Redis of the cluster.")
@click.option("--key", default="", help="API key that the URL asks for.")
@click.option("--other-key", default="", help="Another one, of a caller who does no harm.")
@click.option("--worker-key", default="", help="Key of the workers, by which to ask as one.")
@click.option("--count", default=2000, type=click.IntRange(0, MOST_INPUTS), help="Inputs.")
@click.option("--seconds", default=600.0, type=click.FloatRange(1, 3600), help="At most.")
@click.option("--seed", default=1)
@click.option("--elsewhere", is_flag=True, help="They are mine, though on another machine.")
def main(url, kv, redis_url, key, other_key, worker_key, count, seconds, seed, elsewhere):
    if not url and not kv:
        raise click.UsageError("give a URL, or --kv")
    places = [urlsplit(url or "http://localhost"), *(urlsplit(f"tcp://{place}") for place in kv)]
    if not elsewhere and any(place.hostname not in HERE for place in places):
        raise click.BadParameter("only what listens on this machine is attacked: --elsewhere")
    keys = Keys(key, other_key, worker_key)

    async def limited():
        problems = []
        try:
            async with asyncio.timeout(seconds):
                for place in places[1:]:
                    port = KvPort(place.hostname or "", place.port or 0, worker_key, seed, problems)
                    await port.attack(count)
                    click.echo(f"{port.num_sent:6} frames to {place.netloc}")
                if url:
                    await attack(url.rstrip("/"), redis_url, keys, count, seed, problems)
        except TimeoutError:
            problems.append(f"{seconds:g} s were not enough to send all")
        return problems

    problems = asyncio.run(limited())
    click.echo("\n".join(problems) or "nothing came back that should not have", err=True)
    sys.exit(bool(problems))


async def attack(url, redis_url, keys, count, seed, problems):
    """Send all that there is, and add to `problems` what should not have come back."""
    headers = {"authorization": f"Bearer {keys.key}"} if keys.key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0) as http:
        surfaces = await surfaces_of(http, seed)
        targets = [Target(f"{n}", url, surface) for n, surface in enumerate(surfaces)]
        made = Attack(targets, key=keys.key, other_key=keys.other, seed=seed, problems=problems)
        healthy = [
            f"{url}{path}" for path in ("/health", "/readiness") if await is_there(http, path)
        ]
        async with answering(healthy, problems):
            await made.send(0, count, SLOW_S)
            await made.send_named()
            await made.send_unfinished()
            if redis_url:
                await from_engine(redis_url, http, problems)
    for (target, kind, outcome), number in sorted(made.tally.items()):
        click.echo(f"{number:6} {target} {kind}: {outcome}")


async def surfaces_of(http, seed):
    """Returns the surfaces at a URL: the front door of its first model, and the paths of a router
    or of a worker."""
    cards = await http.get("/v1/models")
    models = [card["id"] for card in cards.json()["data"]] if cards.status_code == 200 else []
    openapi = await http.get("/openapi.json")
    is_worker = openapi.status_code != 200
    surfaces = [Surface.of_door(model, 100, seed, is_worker=is_worker) for model in models[:1]]
    if is_worker:
        return [*surfaces, Surface.of_worker(100, seed)]
    return [*surfaces, Surface.of_router(openapi.json(), 100, seed)]


async def is_there(http, path):
    return (await http.get(path)).status_code == 200


async def from_engine(redis_url, http, problems):
    model = f"attack-{os.getpid()}"
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(connect(redis_url))
        engine = await stack.enter_async_context(
            hostile_worker(redis, Keyspace(model), "hostile", model)
        )

        async def models():
            return (await http.get("/v1/models")).text

        await eventually(models, lambda cards: model in cards, within_s=STARTS_WITHIN_S)
        await attack_from(engine, model, http, problems)


if __name__ == "__main__":
    main()
