"""Attacks what listens at a URL of this machine; prints what should not have come back, and ends
with 1 if anything has.

    python -m tests.attack http://127.0.0.1:8080 --redis-url redis://127.0.0.1:6379

What is sent follows from --seed. With --redis-url, an engine that answers as none should registers
as the only worker of a namespace and a model of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import click
import httpx

from app.core.keys import Keyspace
from app.state.connect import connect
from tests.attack.attack import SLOW_S, Attack, Target, answering, attack_from
from tests.attack.engine import hostile_worker
from tests.attack.inputs import Surface
from tests.eventually import eventually

MOST_INPUTS = 100_000
STARTS_WITHIN_S = 30.0


@click.command(help=__doc__)
@click.argument("url", callback=lambda _context, _name, url: on_this_machine(url))
@click.option("--redis-url", default="", help="Redis of the cluster.")
@click.option("--key", default="", help="API key that the URL asks for.")
@click.option("--count", default=2000, type=click.IntRange(0, MOST_INPUTS), help="Inputs.")
@click.option("--seconds", default=600.0, type=click.FloatRange(1, 3600), help="At most.")
@click.option("--seed", default=1)
def main(url: str, redis_url: str, key: str, count: int, seconds: float, seed: int) -> None:
    async def limited() -> Attack:
        async with asyncio.timeout(seconds):
            return await attack(url, redis_url, key, count, seed)

    done = asyncio.run(limited())
    for (target, kind, outcome), number in sorted(done.tally.items()):
        click.echo(f"{number:6} {target} {kind}: {outcome}")
    click.echo("\n".join(done.problems) or "nothing came back that should not have", err=True)
    sys.exit(bool(done.problems))


def on_this_machine(url: str) -> str:
    if urlsplit(url).hostname not in ("127.0.0.1", "::1", "localhost"):
        raise click.BadParameter("only what listens on this machine is attacked")
    return url.rstrip("/")


async def attack(url: str, redis_url: str, key: str, count: int, seed: int) -> Attack:
    """Send all that there is."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0) as http:
        cards = (await http.get("/v1/models")).json()["data"]
        surfaces = [Surface.of_door(card["id"], 100, seed) for card in cards[:1]]
        openapi = await http.get("/openapi.json")
        surfaces.append(Surface.of_router(openapi.json(), 100, seed))
        targets = [Target(f"{n}", url, surface) for n, surface in enumerate(surfaces)]
        made = Attack(targets, key=key, seed=seed)
        async with answering([f"{url}/health", f"{url}/readiness"], made.problems):
            await made.send(0, count, SLOW_S)
            await made.send_named()
            await made.send_unfinished()
            if redis_url:
                await from_engine(redis_url, http, made.problems)
        return made


async def from_engine(redis_url: str, http: httpx.AsyncClient, problems: list[str]) -> None:
    model = f"attack-{os.getpid()}"
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(connect(redis_url))
        engine = await stack.enter_async_context(
            hostile_worker(redis, Keyspace(model), "hostile", model)
        )

        async def models() -> str:
            return (await http.get("/v1/models")).text

        await eventually(models, lambda cards: model in cards, within_s=STARTS_WITHIN_S)
        await attack_from(engine, model, http, problems)


if __name__ == "__main__":
    main()
