"""What a router writes down about decisions, on a real Redis."""

import asyncio
import logging
from functools import partial

from app.core.loads import Load
from app.core.settings.router import RouterSettings
from app.policy.record import decode
from app.router.fleet import Fleet
from app.router.history import MAX_UNWRITTEN, History
from app.router.limiter import Limiter
from app.router.metrics import Telemetry
from app.router.replica import Replica, UsageTally
from app.state.connect import connect
from app.state.decisions import FIELD, MAX_WRITTEN
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.policy.test_plan import plan, query, view_of
from tests.state.test_decisions import KEYS


def history_of(redis, runner=None, **settings):
    return History(
        Replica(
            runner or ScriptRunner(redis, timeout_s=5),
            KEYS,
            RouterSettings(**settings),
            Fleet(redis, KEYS, timeout_s=5),
            Telemetry(),
            UsageTally(KEYS, 35, lambda: None),
            Limiter(KEYS),
        )
    )


def planned(request_id):
    asked = query()
    asked.request.request_id = request_id
    return plan(asked, view_of(Load()))


async def test_when_too_many_decisions_are_unwritten_the_oldest_are_dropped(redis):
    history = history_of(redis)
    for n in range(MAX_UNWRITTEN + 3):
        history.record(planned(f"r{n}"))
    writing = asyncio.create_task(history.run())
    written = partial(redis.xrange, KEYS["decisions"])
    entries = await eventually(written, lambda found: len(found) >= MAX_UNWRITTEN)
    writing.cancel()
    ids = [decode(entry[FIELD]).request_id for _, entry in entries]
    assert ids == [f"r{n}" for n in range(3, MAX_UNWRITTEN + 3)]


async def test_what_redis_does_not_accept_is_lost_but_not_what_comes_later(
    own_redis_server, caplog
):
    caplog.set_level(logging.DEBUG, "app.router.history")

    async def log():
        return caplog.text

    async with connect(own_redis_server.url) as redis:
        history = history_of(redis)
        own_redis_server.kill()
        history.record(planned("r0"))
        writing = asyncio.create_task(history.run())
        await eventually(log, lambda text: "decisions not recorded" in text)
        own_redis_server.start()
        history.record(planned("r1"))
        [(_, entry)] = await eventually(partial(redis.xrange, KEYS["decisions"]))
        writing.cancel()
    assert decode(entry[FIELD]).request_id == "r1"


async def test_none_are_recorded_if_none_are_to_be_kept(redis):
    off, on = history_of(redis, decisions_kept=0), history_of(redis)
    writing = [asyncio.create_task(history.run()) for history in (off, on)]
    off.record(planned("off"))
    on.record(planned("on"))
    [(_, entry)] = await eventually(partial(redis.xrange, KEYS["decisions"]))
    for task in writing:
        task.cancel()
    assert decode(entry[FIELD]).request_id == "on"


async def test_no_call_writes_more_than_redis_can_in_a_millisecond(redis):
    written = []

    class Runner(ScriptRunner):
        async def run(self, calls):
            written.append(len(calls))
            return await super().run(calls)

    history = history_of(redis, Runner(redis, timeout_s=5))
    for n in range(2 * MAX_WRITTEN + 1):
        history.record(planned(f"r{n}"))
    writing = asyncio.create_task(history.run())
    await eventually(partial(redis.xlen, KEYS["decisions"]), lambda n: n > 2 * MAX_WRITTEN)
    writing.cancel()
    assert written == [MAX_WRITTEN, MAX_WRITTEN, 1]
