"""An engine that answers, but begins late: it loses its traffic, is named, and wins it back."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.door.sick_fleet import sick_fleet
from tests.eventually import eventually
from tests.fakes.faults import Faults

LATE_S = 2.0
FAIR = 1.0
pytestmark = pytest.mark.timeout(180)


@asynccontextmanager
async def loaded(fleet, clients=6, *, streamed):
    """While some clients ask, each again once it is answered."""

    async def client(number):
        while True:
            number += clients
            assert (await fleet.ask(number, stream=streamed)).status_code == 200

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def share_of_first(fleet, for_s=4.0):
    """What the first engine gets meanwhile; FAIR: as much as each other."""
    before = fleet.came()
    await asyncio.sleep(for_s)
    got = [now - then for now, then in zip(fleet.came(), before, strict=True)]
    return got[0] * len(got) / sum(got)


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_engine_that_begins_late_loses_its_traffic_and_wins_it_back(
    one_redis_server, redis, streamed
):
    async with (
        sick_fleet(redis, one_redis_server.url, replicas=2) as fleet,
        loaded(fleet, streamed=streamed),
    ):
        await share_of_first(fleet, 2.0)
        fleet.fall_ill(Faults(prefill_s=LATE_S))
        await asyncio.sleep(2 * LATE_S)
        assert await share_of_first(fleet) < 0.1
        for door in fleet.doors:  # all of which know, by Redis
            rows = (await door.get("/v1/workers")).json()["workers"]
            causes = {row["worker_id"]: row["cause"] for row in rows}
            assert "later than predicted" in causes["e0"]
            assert causes["e1"] is causes["e2"] is None
        fleet.recover()
        await eventually(
            lambda: share_of_first(fleet), lambda share: share > 0.5 * FAIR, within_s=60.0
        )
