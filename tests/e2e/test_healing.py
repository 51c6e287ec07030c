"""A cluster soon recovers from the loss of any key in Redis, and a reset mends any damage to one.

Three agents and a router run against a real Redis, which hears of them often. While requests are
routed and blocks are stored and removed, a key or an entry is lost. Soon all is right again: every
overlap equals what a scan of the workers' caches gives, the loads are those of the requests in
flight, and no key or entry is left that belongs to nothing. What somebody damaged by hand is not
repaired: each bad value costs its own worker or request at most, and `kvroute reset` mends all of
it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count

import pytest
from redis.exceptions import RedisError, ResponseError

from app.core.chains import parse_owners
from app.core.errors import NoWorkers, RedisUnavailable, RoutingError, WrongVersion
from app.core.events import Removed, Stored
from app.core.hashing import compute_hashes
from app.core.keys import Keyspace
from app.core.settings.router import RouterSettings
from app.core.types import Tier, TierOverlap
from app.ops.namespaces import delete_namespace
from app.policy.decision import RouteRequest
from app.router import maintenance
from app.router.fleet import Fleet
from app.router.metrics import Telemetry
from app.router.router import Router
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import fake_agent
from workers.agent import agent as agents
from workers.agent import publish

KEYS = Keyspace("healing")
SHARDS = 2
INDEX_BLOCKS = 1024  # 16 buckets in each shard
BLOCK_SIZE = 4
LEASE_S = 2.0
"""Leases are renewed every 50 ms; none lapses because the machine is busy."""
REDIS_TIMEOUT_S = 5.0
WORKERS = ("w0", "w1", "w2")
PROMPTS = [[1000 * n + i for i in range(80)] for n in range(1, 7)]
CHAINS = [compute_hashes(tokens, BLOCK_SIZE)[1] for tokens in PROMPTS]
"""20 blocks each."""

Damage = Callable[["World"], Awaitable[object]]


class World:
    """A cluster, what its engines hold, and the requests in flight.

    redis: for doing damage and for checking what became of it.
    """

    def __init__(self, redis, of_agents, of_router, seed, **settings):
        self.redis = redis
        self.rng = random.Random(seed)
        self.agents = {name: agent_of(name, of_agents) for name in WORKERS}
        self.running = {}
        self.router = Router(
            ScriptRunner(of_router, timeout_s=REDIS_TIMEOUT_S),
            KEYS,
            RouterSettings(namespace=KEYS.namespace, policy="latency", seed=seed, **settings),
            Fleet(of_router, KEYS, timeout_s=REDIS_TIMEOUT_S),
            Telemetry(),
        )
        self.held = {(name, n): TierOverlap() for name in WORKERS for n in range(len(CHAINS))}
        self.in_flight = []
        self.ended = []
        """Requests that are over but not released yet."""
        self._ids = count()
        self._busy = asyncio.Event()
        self._idle = asyncio.Event()

    def hold(self, name, prompt, device, host):
        """Make the engine of `name` hold exactly this much of a prompt: device, then host."""
        chain = CHAINS[prompt]
        before = self.held[name, prompt].total
        for tier, start, end in (
            (Tier.DEVICE, 0, device),
            (Tier.HOST, device, device + host),
        ):
            if end > start:
                parent = chain[start - 1] if start else None
                self.agents[name].notify([Stored(tuple(chain[start:end]), parent, tier)])
        gone = tuple(chain[device + host : before])
        self.agents[name].notify(
            [
                Removed(tuple(chain[device:before]), Tier.DEVICE),
                Removed(tuple(chain[:device]), Tier.HOST),
                Removed(gone, Tier.HOST),
            ]
        )
        self.held[name, prompt] = TierOverlap(device=device, host=host)

    async def route(self, prompt, **options):
        request_id = f"r{next(self._ids)}"
        chain, isl = CHAINS[prompt], len(PROMPTS[prompt])
        return await self.router.route(RouteRequest(request_id, chain, isl, "latency", **options))

    async def overlaps(self, prompt):
        decision = await self.route(prompt, reserve=False, explain=True)
        if decision.degraded:
            return None
        return {c.info.key.worker_id: c.overlap for c in decision.candidates}

    async def work(self):
        """Store, remove, route and release, except while paused."""
        while True:
            if not self._busy.is_set():
                self._idle.set()
                await self._busy.wait()
                self._idle.clear()
            for name in WORKERS:
                self.hold(name, self.rng.randrange(3, 6), *self._some())
            try:
                decision = await self.route(self.rng.randrange(6))
                if decision.reserved:
                    self.in_flight.append(decision.request_id)
                if self.rng.random() < 0.5:
                    await self.router.prefill_complete(decision.request_id)
                if len(self.in_flight) > 12:
                    self.end(self.rng.choice(self.in_flight))
                await self.release_ended()
            # Where what says the version is damaged, a reset has not come yet.
            except (RoutingError, RedisUnavailable, WrongVersion):
                pass
            # Ten times the real traffic of three workers, with time left for everything else.
            await asyncio.sleep(0.002)

    def _some(self):
        device = self.rng.randrange(15)
        return device, self.rng.randrange(20 - device)

    def end(self, request_id):
        self.in_flight.remove(request_id)
        self.ended.append(request_id)

    async def release_ended(self):
        while self.ended:
            await self.router.release(self.ended[0])
            self.ended.pop(0)

    async def pause(self):
        self._busy.clear()
        await self._idle.wait()

    def resume(self):
        self._busy.set()

    async def problems(self):
        try:
            await self.release_ended()
            found = await self._wrong_overlaps() + await self._wrong_index()
            return found + await self._wrong_books() + self._unmeasured()
        except (RoutingError, RedisUnavailable, ResponseError, ValueError) as error:
            return [repr(error)]

    async def _wrong_overlaps(self):
        found = []
        for n, seen in enumerate(await asyncio.gather(*map(self.overlaps, range(len(CHAINS))))):
            expected = {name: self.held[name, n] for name in WORKERS}
            if seen != expected:
                found.append(f"prompt {n}: {seen}, not {expected}")
        return found

    async def _wrong_index(self):
        """Index entries that are not exactly the blocks held, and keys that should not exist."""
        names = {agent.incarnation: name for name, agent in self.agents.items()}
        expected = {
            (chain[i], name, Tier.DEVICE if i < held.device else Tier.HOST)
            for (name, n), held in self.held.items()
            for chain in [CHAINS[n]]
            for i in range(held.total)
        }
        seen = []
        found = []
        shards = int(await self.redis.hget(KEYS["meta"], "shards") or 0)
        for key in await self.redis.keys():
            shard, name = KEYS.parse(key) or (None, f"{key!r}")
            family = name.split(":")[0]
            if family == "blocks":
                for block, owners in (await self.redis.hgetall(key)).items():
                    place = int(block, 16) if len(block) == 16 else None
                    seen += [(place, names.get(i), tier) for i, tier in parse_owners(owners)]
            elif family in ("events", "versions"):
                pass  # they tell of what was, too
            elif family not in ALL_KEYS or family == "dead" or (shard or 0) >= shards:
                found.append(f"{name} exists")
        if sorted(map(str, seen)) != sorted(map(str, expected)):
            found.append(f"{len(seen)} entries, not {len(expected)}")
        return found

    async def _wrong_books(self):
        """Contradictions among the records of workers and requests."""
        redis, found = self.redis, []
        incs = sorted(str(agent.incarnation).encode() for agent in self.agents.values())
        for name in ("workers", "writers", "load"):
            if sorted(await redis.hkeys(KEYS[name])) != incs:
                found.append(f"{name}: not {incs}")
        if sorted(await redis.zrange(KEYS["leases"], 0, -1)) != incs:
            found.append(f"leases: not {incs}")
        if sorted(await redis.hvals(KEYS["current"])) != incs:
            found.append(f"current: not {incs}")
        known = {}
        for inc in incs:
            records = await redis.hgetall(KEYS["requests:"].encode() + inc)
            known |= dict.fromkeys(records, inc)
            fields = [record.split() for record in records.values()]
            if any(len(f) != 5 for f in fields):
                return [f"records {records}"]
            waiting = {i for i, f in zip(records, fields, strict=True) if f[3] == b"p"}
            load = list(map(int, (await redis.hget(KEYS["load"], inc) or b"0").split()))
            sums = [sum(int(f[i]) for f in fields if i == 2 or f[3] == b"p") for i in range(3)]
            if load[:2] + load[4:7] != [*sums, len(records), len(records) - len(waiting)]:
                found.append(f"load {load} of {records}")
            queue = await redis.lrange(KEYS["prefills:"].encode() + inc, 0, -1)
            if sorted(queue) != sorted(waiting):
                found.append(f"queue {queue} of {waiting}")
        if await redis.hgetall(KEYS["reservations"]) != known:
            found.append("reservations differ from records")
        if set(await redis.zrange(KEYS["expiry"], 0, -1)) != set(known):
            found.append("expiry differs from records")
        latest = await redis.zrange(KEYS["expiry"], -1, -1, withscores=True)
        if latest and latest[0][1] > (await self._now_ms()) + 600_000:
            found.append(f"expiry {latest}")
        ghosts = {i.decode() for i in known} - set(self.in_flight)
        if ghosts:
            found.append(f"reserved but not in flight: {ghosts}")
        return found

    async def _now_ms(self):
        seconds, micros = await self.redis.time()
        return float(seconds * 1000 + micros / 1000)

    def _unmeasured(self):
        fleet = self.router.fleet
        stale = [
            name
            for name, agent in self.agents.items()
            if agent.incarnation is None
            or fleet.measured(agent.incarnation).metrics.kv_total_blocks != 1000
        ]
        return (
            [f"no recent metrics of {stale}"] if stale or abs(fleet.measurements.age_s) > 2 else []
        )

    async def records(self):
        """Ids of the requests that Redis counts as in flight."""
        found = set()
        for agent in self.agents.values():
            found |= set(await self.redis.hkeys(KEYS[f"requests:{agent.incarnation}"]))
        return {i.decode() for i in found}

    async def heals(self, what, within_s=60.0):
        """Returns once three checks in a row have found nothing wrong."""
        good = 0

        async def look():
            nonlocal good
            found = await self.problems()
            good = 0 if found else good + 1
            return found

        try:
            await eventually(look, lambda found: good >= 3, within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None

    async def suffers(self, what, damage):
        """Do `damage` while everything is working, then wait until it has healed."""
        self.resume()
        await asyncio.sleep(0.01)
        await damage(self)
        await asyncio.sleep(0.01)
        await self.pause()
        await self.heals(what)

    async def leave(self, name):
        """Stop an agent as its process does when it ends."""
        self.running[name].cancel()
        await asyncio.wait([self.running[name]])
        await self.agents[name].stop()

    async def watch(self):
        while True:
            for n in range(len(CHAINS)):
                try:
                    seen = await self.overlaps(n) or {}
                except NoWorkers:
                    continue
                for name, overlap in seen.items():
                    held = self.held[name, n]
                    assert overlap.total <= held.total, f"{name}, prompt {n}: {overlap} of {held}"
            await asyncio.sleep(0.005)  # else agents and router get half of a core

    async def all_requests_end(self):
        """End all requests; check that nothing is reserved and new ones are counted exactly."""
        for request_id in list(self.in_flight):
            self.end(request_id)
        await self.heals("at the end")
        assert await self.records() == set()
        for n in range(len(CHAINS)):
            self.in_flight.append((await self.route(n)).request_id)
        assert await self.records() == set(self.in_flight)
        await self.heals("after the end")


CONTROL = (
    "meta",
    "workers",
    "current",
    "leases",
    "writers",
    "load",
    "reservations",
    "expiry",
    "requests",
    "prefills",
    "metrics",
    "decisions",
)
OF_SHARDS = ("shard", "applied", "dead", "blocks")
ALL_KEYS = CONTROL + OF_SHARDS


def agent_of(name, redis, lease_s=LEASE_S):
    return fake_agent(
        ScriptRunner(redis, timeout_s=REDIS_TIMEOUT_S),
        KEYS,
        name,
        lease_ttl_s=lease_s,
        index_blocks=INDEX_BLOCKS,
        shards=SHARDS,
    )


@asynccontextmanager
async def world(redis_url, seed=0, *, agents_url="", router_url="", **settings):
    """Agents and a router at work, with some blocks held and some requests in flight."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        redis, of_agents, of_router = [
            await stack.enter_async_context(connect(url, max_connections=32))
            for url in (redis_url, agents_url or redis_url, router_url or redis_url)
        ]
        made = World(redis, of_agents, of_router, seed, **settings)
        for agent in made.agents.values():
            await agent.start()
        made.running = {name: tasks.create_task(agent.run()) for name, agent in made.agents.items()}
        others = [tasks.create_task(made.router.run()), tasks.create_task(made.work())]
        for i, name in enumerate(WORKERS):
            made.hold(name, 0, 20, 0)
            made.hold(name, 1, 5 * (i + 1), 3)
            made.hold(name, 2, 18 * (i == 1), 0)
        made.resume()
        await asyncio.sleep(0.1)
        await made.pause()
        await made.heals("before any damage")
        try:
            yield made
        finally:
            for task in (*made.running.values(), *others):
                task.cancel()


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(publish, "DRAIN_BLOCKS", 4)
    monkeypatch.setattr(agents, "AUDIT_INTERVAL_S", 0.05)
    monkeypatch.setattr(agents, "MAX_RENEWAL_S", 0.05)
    monkeypatch.setattr(maintenance, "MAINTENANCE_INTERVAL_S", 0.03)
    monkeypatch.setattr(maintenance, "SWEEP_PAUSE_S", 0.001)
    monkeypatch.setattr(maintenance, "SWEEP_PAUSE_MS", 0)
    monkeypatch.setattr(maintenance, "SWEEP_IDLE_MS", 20)
    monkeypatch.setattr(maintenance, "SCRUB_INTERVAL_MS", 100)
    monkeypatch.setattr(maintenance, "RETIRE_GRACE_MS", 300)


async def key_of(world, family):
    """A key of this family, at random if there are several."""
    if family in OF_SHARDS and family != "blocks":
        return KEYS.of_shard(world.rng.randrange(SHARDS))[family]
    if family in ("blocks", "requests", "prefills"):
        keys = []
        while not keys:
            keys = sorted(await world.redis.keys(KEYS.pattern + f"{family}:*"))
        return str(world.rng.choice(keys).decode())
    return KEYS[family]


async def field_of(world, family):
    """A key of this family, and any of its fields."""
    fields = []
    while not fields:
        key = await key_of(world, family)
        fields = sorted(await world.redis.hkeys(key))
    return key, str(world.rng.choice(fields).decode())


async def item_of(world, family):
    """A key of this family, and the last item of its list."""
    item = None
    while item is None:  # lists appear and vanish all the time
        key = await key_of(world, family)
        item = await world.redis.lindex(key, -1)
    return key, item


async def member_of(world, family):
    """Any member of the sorted set."""
    member = None
    while member is None:
        member = await world.redis.zrandmember(KEYS[family])
    return member


async def plausible(world, family, key, field):
    """A value that looks valid."""
    others = [a.incarnation for a in world.agents.values() if str(a.incarnation) != field]
    other = str(world.rng.choice(others))
    match family:
        case "workers" | "writers":
            return str((await world.redis.hget(key, other) or b"").decode())
        case "current" | "reservations":
            return str(world.rng.choice(list(world.agents.values())).incarnation)
        case "load":
            return "100 5000 5000 12345 7 3 2 9"
        case "requests":
            return "100 5000 7 d word"
        case "applied":
            seq, nonce = (await world.redis.hget(key, field) or b"0 -").split()
            return f"{int(seq) + 5} {nonce.decode()}"
        case "blocks":
            return f"{other}d"
        case _:
            return str(world.rng.choice([1, 3, 5]))


def delete(family):
    async def do(world):
        await world.redis.delete(await key_of(world, family))

    return do


def become_a_string(family):
    async def do(world):
        await world.redis.set(await key_of(world, family), "spoilt")

    return do


def rename(family):
    async def do(world):
        key = await key_of(world, family)

        async def renamed():
            # A key that holds nothing at the moment does not exist.
            with suppress(ResponseError):
                await world.redis.rename(key, f"{key}.bak")
                return True
            return False

        await eventually(renamed)

    return do


def set_a_field(family, value):
    """value: None for one that looks valid."""

    async def do(world):
        key, field = await field_of(world, family)
        text = await plausible(world, family, key, field) if value is None else value
        await world.redis.hset(key, field, text)

    return do


def add_a_field(family, field, value):
    async def do(world):
        await world.redis.hset(await key_of(world, family), field, value)

    return do


def remove_a_field(family):
    async def do(world):
        await world.redis.hdel(*await field_of(world, family))

    return do


def remove_a_member(family):
    async def do(world):
        await world.redis.zrem(KEYS[family], await member_of(world, family))

    return do


def score_a_member(family, score):
    async def do(world):
        await world.redis.zadd(KEYS[family], {await member_of(world, family): score})

    return do


def add_a_member(family, score):
    async def do(world):
        await world.redis.zadd(KEYS[family], {"junk": score})

    return do


def push(family, item):
    """item: None for one that is in the list already."""

    async def do(world):
        key, last = await item_of(world, family)
        await world.redis.lpush(key, item or last)

    return do


def pop(family):
    async def do(world):
        await world.redis.lpop(await key_of(world, family))

    return do


def add_to_dead(*members):
    """members: added to the set `dead`; without any, a live incarnation is."""

    async def do(world):
        live = str(world.agents["w1"].incarnation)
        await world.redis.sadd(await key_of(world, "dead"), *(members or (live,)))

    return do


def append(entry_id):
    async def do(world):
        inc = str(world.agents["w1"].incarnation)
        entry = {"worker": "junk", "incarnation": inc, "kv_total_blocks": "7"}
        await world.redis.xadd(KEYS["metrics"], entry, id=entry_id)

    return do


def one_after_another(damages):
    async def do(world):
        for damage in damages:
            # The one before may have left nothing to damage, or nothing that looks valid.
            with suppress(RedisError, ValueError):
                await damage(world)

    return do


def losses(family):
    done = {"delete": delete(family)}
    if family in ("leases", "expiry"):
        return done | {"remove": remove_a_member(family)}
    if family == "prefills":
        return done | {"pop": pop(family)}
    if family in ("dead", "metrics", "decisions"):
        return done
    return done | {"remove": remove_a_field(family)}


def damages(family):
    if family == "dead":
        return {
            "string": become_a_string(family),
            "junk": one_after_another([delete(family), add_to_dead("junk", "a b", "-1")]),
            "live": add_to_dead(),
        }
    done = {"string": become_a_string(family), "rename": rename(family)}
    if family in ("leases", "expiry"):
        return done | {
            "long ago": score_a_member(family, 0),
            "far ahead": score_a_member(family, 9e15),
            "for ever": score_a_member(family, float("inf")),
            "junk": add_a_member(family, 9e15),
        }
    if family == "prefills":
        return done | {"junk": push(family, "junk"), "twice": push(family, None)}
    if family == "metrics":
        return done | {
            "junk": append("*"),
            "far ahead": append("99999999999999-0"),
            "last": append(f"{2**64 - 1}-{2**64 - 1}"),
        }
    if family == "decisions":
        return done
    return done | {
        "junk": add_a_field(family, "junk", "7"),
        "spoilt": one_after_another(bad_values(family)),
    }


def bad_values(family):
    """A value each that a hash should not have."""
    return [set_a_field(family, value) for value in (None, "", "9" * 30, "-5", "spoilt")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "families",
    [
        ("meta", "workers", "current", "writers", "metrics", "decisions"),
        ("load", "prefills", "leases", "reservations", "expiry"),
        ("shard", "applied", "dead", "blocks"),
    ],
    ids=" ".join,
)
async def test_any_loss_heals(one_redis_server, families):
    async with world(one_redis_server.url) as cluster:
        for family in families:
            for name, loss in losses(family).items():
                await cluster.suffers(f"{family}, {name}", loss)
                if family not in ("leases", "reservations", "expiry"):
                    assert await cluster.records() == set(cluster.in_flight)
        await cluster.all_requests_end()


async def test_what_is_left_of_lost_requests_expires(one_redis_server):
    async with world(one_redis_server.url, reservation_ttl_s=1.0) as cluster:
        for name, loss in losses("requests").items():
            await cluster.suffers(f"requests, {name}", loss)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
async def test_any_loss_of_several_keys_heals(redis_server, seed):
    async with world(redis_server.url, seed, reservation_ttl_s=1.0) as cluster:
        choices = {f"{f}, {name}": do for f in ALL_KEYS for name, do in losses(f).items()}
        for _ in range(60):
            picked = cluster.rng.sample(sorted(choices), cluster.rng.choice([1, 2, 2]))
            several = one_after_another([choices[name] for name in picked])
            await cluster.suffers("; ".join(picked), several)


@pytest.mark.parametrize("families", [CONTROL[:6], CONTROL[6:], OF_SHARDS], ids=" ".join)
async def test_a_reset_mends_any_damage(one_redis_server, families):
    """Also damage done to several keys at once, of a namespace that is in use."""
    async with world(one_redis_server.url) as cluster:
        for family in families:
            cluster.resume()
            await one_after_another(damages(family).values())(cluster)
            await asyncio.sleep(0.2)
            await delete_namespace(cluster.redis, KEYS)
            await cluster.pause()
            await cluster.heals(f"{family}, reset")
        cluster.resume()
        await asyncio.sleep(0.05)
        await cluster.pause()
        await cluster.all_requests_end()


@pytest.mark.parametrize(
    "family",
    ["workers", "current", "load", "reservations", "requests", "applied", "blocks", "writers"],
)
async def test_a_bad_value_costs_its_own_worker_or_request_at_most(one_redis_server, family):
    async with world(one_redis_server.url) as cluster:
        for number, damage in enumerate(bad_values(family)):
            await damage(cluster)
            for n in range(2 * len(CHAINS)):
                decision = await cluster.route(n % len(CHAINS))
                assert decision.reserved, f"{family}, {number}"
                assert not decision.degraded, f"{family}, {number}"
                await cluster.router.release(decision.request_id)
            await delete_namespace(cluster.redis, KEYS)
            await cluster.heals(f"{family}, {number}, reset")
            for _ in range(3):
                cluster.in_flight.append((await cluster.route(0)).request_id)


async def lose_everything(world):
    await world.redis.flushall()


async def lose_all_but_the_index(world):
    """Incarnations are then counted from 1 again, while index entries of old ones remain."""
    await world.redis.delete(*await world.redis.keys(KEYS["*"]))


async def lose_a_shard(world):
    await world.redis.delete(*await world.redis.keys(KEYS.of_shard(1)["*"]))


async def lose_the_counter_and_the_writers(world):
    await world.redis.delete(KEYS["meta"], KEYS["writers"])


@pytest.mark.parametrize(
    "damage",
    [
        lose_everything,
        lose_all_but_the_index,
        lose_a_shard,
        lose_the_counter_and_the_writers,
    ],
)
async def test_no_loss_makes_a_worker_seem_to_hold_blocks_that_it_does_not(
    one_redis_server, damage
):
    async with world(one_redis_server.url) as cluster:
        for n in range(len(CHAINS)):
            for i, name in enumerate(WORKERS):
                cluster.hold(name, n, 20 * (n % 3 == i), 0)
        await cluster.heals("at first")
        watching = asyncio.create_task(cluster.watch())
        for _ in range(2):
            await damage(cluster)
            await cluster.heals(damage.__name__)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
