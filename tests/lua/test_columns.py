"""What callers know by what has changed is what a full read says, after whatever has happened."""

import math
import random

import pytest

from app.core.errors import NamespaceMissing
from app.core.types import WorkerKey
from app.state import columns, leases, reservations
from app.state.columns import Columns
from tests.lua.conftest import LONG_MS, NO_LOAD, info

FLEET = 40
"""Enough for changes to be told at all."""
REQUESTS = [f"r{n}" for n in range(60)]


class Counted(Columns):
    """Counts the answers that told only what had changed, and those that were refused."""

    def __init__(self):
        super().__init__()
        self.partial = self.refused = 0

    def take(self, reply):
        taken = super().take(reply)
        self.partial += len(reply) > 5
        self.refused += taken is None
        return taken


@pytest.fixture(autouse=True)
def _without_audits(monkeypatch):
    monkeypatch.setattr(columns, "AUDIT_S", math.inf)


async def fleet(space, size=FLEET):
    return [await space.worker(f"w{n}") for n in range(size)]


@pytest.fixture
async def incs(space):
    return await fleet(space)


async def look(space, known):
    """As a router does: if the answer tells not enough, everything."""
    snapshot = await space.do(reservations.changes(space.keys, known))
    if snapshot is None:
        snapshot = await space.do(reservations.changes(space.keys, known))
    assert snapshot is not None
    return snapshot


async def assert_same(space, *known):
    try:
        full = await space.loads()
    except NamespaceMissing:
        for one in known:
            with pytest.raises(NamespaceMissing):
                await look(space, one)
        return
    for one in known:
        seen = await look(space, one)
        assert dict(seen.loads) == dict(full.loads)
        assert [load.routed_tokens for load in seen.loads.values()] == [
            load.routed_tokens for load in full.loads.values()
        ]
        assert (seen.lapsed, seen.unreadable) == (full.lapsed, full.unreadable)
        assert (seen.rounds, seen.workers_ms, seen.marks) == (
            *(full.rounds, full.workers_ms, full.marks),
        )


class World:
    """Everything that agents, routers, operators and failures do to a namespace."""

    def __init__(self, space, live, rng):
        self.space, self.rng = space, rng
        self.names = {inc: f"w{n}" for n, inc in enumerate(live)}
        self.number = FLEET
        self.copy = {}

    async def step(self):
        usual = (self.reserve, self.prefill_complete, self.release, self.renew)
        seldom = (
            *(self.lapse, self.suspend, self.drain, self.register, self.retire, self.resync),
            *(self.expire, self.lag_behind, self.write_far_ahead, self.heartbeats),
        )
        disasters = (self.fail_over, self.lose_one, self.lose_key)
        (kind,) = self.rng.choices((usual, seldom, disasters), (12, 5, 1))
        event = self.rng.choice(kind)
        await event()
        if event in disasters and self.rng.random() < 0.5:
            await self.heartbeats()

    def one(self):
        return self.rng.choice(list(self.names))

    async def reserve(self):
        for _ in range(self.rng.randrange(1, 6)):
            await self.space.reserve(self.one(), self.rng.choice(REQUESTS))

    async def prefill_complete(self):
        await self.space.prefill_complete(self.rng.choice(REQUESTS))

    async def release(self):
        await self.space.release(self.rng.choice(REQUESTS))

    async def renew(self, inc=None):
        inc = inc or self.one()
        name = self.names[inc]
        call = leases.renew(
            self.space.keys, info(name), inc, f"nonce-{name}", ttl_ms=LONG_MS, staged=False
        )
        await self.space.do(call)

    async def heartbeats(self):
        for inc in self.names:
            await self.renew(inc)

    async def lapse(self):
        """The clock reaches the end of a lease."""
        now_ms = await self.space.now_ms()
        await self.space.redis.zadd(
            self.space.key("leases"), {str(self.one()): now_ms - 1}, xx=True
        )

    async def suspend(self):
        await self.space.suspend(self.rng.choice(REQUESTS))

    async def drain(self):
        worker = WorkerKey(f"w{self.rng.randrange(FLEET)}")
        undo = self.rng.random() < 0.7
        await self.space.do(leases.drain(self.space.keys, worker, undo=undo))

    async def register(self):
        self.number += 1
        await self.begin(f"w{self.number}", None)

    async def resync(self):
        previous = self.one()
        await self.begin(self.names[previous], previous)

    async def begin(self, name, previous):
        """It stays staged at times, and is refused where Redis has lost what went before."""
        keys, nonce = self.space.keys, f"nonce-{name}"
        call = leases.register(keys, info(name), nonce, ttl_ms=LONG_MS, previous=previous)
        inc = (await self.space.do(call)).incarnation
        self.names[inc] = name
        if self.rng.random() < 0.7:
            key = WorkerKey(name)
            await self.space.do(leases.activate(keys, key, inc, nonce, previous=previous))

    async def retire(self):
        inc = self.one()
        key = WorkerKey(self.names[inc])
        await self.space.do(leases.retire(self.space.keys, key, inc, f"nonce-{self.names[inc]}"))

    async def expire(self):
        await self.space.backdate_expiry(*self.rng.sample(REQUESTS, 5))
        await self.space.expire()

    async def lag_behind(self):
        """A replica of Redis gets no writes from here on."""
        self.copy = {
            key: await self.space.redis.dump(key)
            async for key in self.space.redis.scan_iter(match="kvroute:*")
        }

    async def fail_over(self):
        """That replica becomes the master: the last writes are lost."""
        if self.copy:
            await self.space.redis.flushall()
            for key, value in self.copy.items():
                await self.space.redis.restore(key, 0, value)

    async def lose_one(self):
        name, inc = self.rng.choice(["leases", "versions", "load"]), str(self.one())
        if name == "load":
            await self.space.redis.hdel(self.space.key(name), inc)
        else:
            await self.space.redis.zrem(self.space.key(name), inc)

    async def lose_key(self):
        names = ["leases", "versions", "load", "meta"]
        await self.space.redis.delete(self.space.key(self.rng.choice(names)))

    async def write_far_ahead(self):
        """The clock of an earlier master was ahead, or a hand was at work."""
        ahead = self.rng.choice([1e9, 8.5e15])
        version = await self.space.now_ms() * 1000 + ahead
        await self.space.redis.zadd(self.space.key("versions"), {str(self.one()): version}, xx=True)


@pytest.mark.parametrize(
    ("seed", "size"), [*((seed, FLEET) for seed in range(6)), (6, 8), (7, 8), (8, 3)]
)
async def test_after_any_history_what_is_known_equals_a_full_read(space, seed, size):
    """Small fleets are told everything each time."""
    rng = random.Random(seed)
    world = World(space, await fleet(space, size), rng)
    always, seldom = Counted(), Counted()
    for _ in range(250):
        await world.step()
        await assert_same(space, always, *([seldom] if rng.random() < 0.1 else []))
    assert always.partial > 0 or size < FLEET


async def test_only_what_changed_is_told(space, incs):
    known = Counted()
    await look(space, known)
    await space.reserve(incs[3], "r1")
    await space.renew(incs[4])
    *_, changed, num, num_loads, last = await raw_changes(space, known)
    assert changed[::2] == [str(incs[3]).encode()]
    assert (num, num_loads, last[0]) == (FLEET, FLEET, str(incs[-1]).encode())
    assert (await look(space, known)).loads[incs[3]].requests == 1
    assert (known.partial, known.refused) == (1, 0)


async def test_a_heartbeat_that_changes_nothing_changes_no_version(space):
    incs = await fleet(space, 3)
    before = await space.redis.zrange(space.key("versions"), 0, -1, withscores=True)
    for inc in incs:
        assert await space.renew(inc)
    assert await space.redis.zrange(space.key("versions"), 0, -1, withscores=True) == before


async def test_a_lapsed_lease_without_a_version_does_not_hide_a_version_without_a_lease(
    space, incs
):
    await space.redis.zadd(space.key("leases"), {str(incs[0]): 1})
    await space.redis.zrem(space.key("versions"), str(incs[0]))
    await space.redis.zrem(space.key("leases"), str(incs[1]))
    known = Counted()
    for _ in range(2):
        await assert_same(space, known)


async def test_a_lease_lapses_and_is_revived_without_a_version(space, incs):
    known = Counted()
    await look(space, known)
    await space.redis.zadd(space.key("leases"), {str(incs[0]): 1})
    seen = await look(space, known)
    assert incs[0] not in seen.loads
    assert seen.lapsed == {incs[0]}
    await space.renew(incs[0])
    assert (await look(space, known)).loads[incs[0]] == NO_LOAD
    assert (known.partial, known.refused) == (2, 0)


async def test_workers_that_join_are_told_as_a_change(space, incs):
    known = Counted()
    first = await look(space, known)
    assert len(first.changed) == FLEET
    first.changed.clear()
    joined = [await space.worker("another"), await space.worker("a third")]
    await space.reserve(joined[1], "r1")
    seen = await look(space, known)
    assert seen.changed == {b"%d" % inc for inc in joined}
    assert seen.loads.incarnations == [*incs, *joined]
    assert seen.loads[joined[1]].requests == 1
    await assert_same(space, known)
    assert known.refused == 0


async def test_of_everything_that_is_read_again_only_what_is_new_counts_as_changed(
    space, incs, monkeypatch
):
    known = Columns()
    (await look(space, known)).changed.clear()
    await space.reserve(incs[3], "r1")
    monkeypatch.setattr(columns, "AUDIT_S", -1.0)
    assert (await look(space, known)).changed == {b"%d" % incs[3]}


async def test_a_refused_reservation_tells_what_changed_too(space, incs):
    known = Counted()
    await look(space, known)
    await space.reserve(incs[1], "r1")
    wish = reservations.Reservation(
        "r2", 9, 9, 9, incarnation=incs[1], max_requests=256, seen_total=0
    )
    call = reservations.reserve(space.keys, [wish], ttl_ms=60_000, columns=known)
    (refused,) = await space.do(call)
    assert refused.fresh is not None
    assert refused.fresh.loads[incs[1]].requests == 1
    assert known.partial == 1


async def test_what_was_written_by_hand_is_seen_once_everything_is_asked_for_again(
    space, incs, monkeypatch
):
    known = Columns()
    await look(space, known)
    await space.redis.hset(space.key("load"), str(incs[0]), "1 2 3 4 5 6 0 8 9 10 11 12")
    assert (await look(space, known)).loads[incs[0]] == NO_LOAD
    monkeypatch.setattr(columns, "AUDIT_S", -1.0)
    assert (await look(space, known)).loads[incs[0]].prefill_tokens == 1


async def raw_changes(space, known):
    call = reservations.changes(space.keys, known)
    reply = await space.redis.evalsha(*call.words()[1:])
    return reply[0]


async def test_versions_lost_with_a_failover_are_not_counted_to_again(space, incs):
    """Though the clock of the new master is behind them."""
    ahead = await space.now_ms() * 1000 + 60_000_000
    await space.redis.zadd(space.key("versions"), {str(incs[0]): ahead})
    runs = []
    for _ in range(2):
        backup = await space.redis.dump(space.key("versions"))
        for inc in incs[1:9]:
            await space.reserve(inc, f"r{len(runs)} {inc}")
        pairs = await space.redis.zrange(space.key("versions"), -8, -1, withscores=True)
        runs.append({version for _, version in pairs})
        await space.redis.restore(space.key("versions"), 0, backup, replace=True)
    first, second = runs
    assert len(first | second) > 8
