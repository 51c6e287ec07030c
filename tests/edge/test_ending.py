"""What a replica leaves open when it ends."""

import asyncio
from contextlib import suppress

from app.console.sampler import Sampler
from app.core.settings.router import RouterSettings
from app.edge.app import create_app
from tests.fake_worker import NAMESPACE


async def test_what_it_says_last_leaves_no_connection(one_redis_server, redis, monkeypatch):
    said_last = Sampler.run

    async def late(self):
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)  # as a busy machine lets it come late
        ending = asyncio.create_task(said_last(self))
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.wait([ending])

    monkeypatch.setattr(Sampler, "run", late)
    before = len(await redis.client_list())
    app = create_app(RouterSettings(redis_url=one_redis_server.url, namespace=NAMESPACE))
    async with app.router.lifespan_context(app):
        await asyncio.sleep(0)
    assert len(await redis.client_list()) == before
