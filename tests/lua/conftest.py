"""A namespace in a real Redis, and shorthands for what agents and routers do in it."""

import json
import re

import pytest

from app.core.chains import GROUP_BLOCKS
from app.core.failures import Counts, Failure
from app.core.keys import Keyspace
from app.core.loads import Load, Reservation
from app.core.types import Incarnation, SequenceHash, Tier, WorkerKey
from app.core.worker_report import WorkerInfo
from app.state import index, leases, overlap, predictions, reservations, sessions, waiting
from app.state.index import Change
from app.state.reservations import PrefillComplete, Release
from app.state.scripts import ScriptRunner
from tests.eventually import eventually

A, B, C, D, E = (SequenceHash(digit * 0x1111_1111_1111_1111) for digit in range(10, 15))
"""Blocks whose hashes in hex are one digit repeated: aaaaaaaaaaaaaaaa and so on."""

CROWD = [SequenceHash(0xAA << 56 | n) for n in range(3000)]
"""Too many blocks to scan in one step. If each begins a chain, all lie in one bucket of 256."""

DEVICE, HOST, DISK = Tier
LONG_MS = 60_000
NO_LOAD = Load()
BROKEN = Failure("broken", counts=Counts.ALL)
"""As another worker has answered the request."""


class Namespace:
    """Namespace `test`. Worker `a` is `a:0`, and its process has the nonce `nonce-a`."""

    def __init__(self, redis):
        self.redis = redis
        self.keys = Keyspace("test")
        self.shard = self.keys.of_shard(0)
        self.runner = ScriptRunner(redis, timeout_s=10)
        self._nonces = {}
        self._leaders = {}
        self.infos = {}
        self._held = {}
        """Worker and nonce -> the incarnation that this process acts as, or last acted as."""
        self._staged = set()

    async def do(self, call):
        return await self.runner.one(call)

    async def register(
        self,
        worker,
        *,
        nonce=None,
        ttl_ms=LONG_MS,
        resync=False,
        block_size=4,
        bucket_bits=8,
        shards=1,
    ):
        """Register, open shard 0, and activate the worker unless its predecessor is live.

        resync: the same process registers again.
        """
        nonce = nonce or f"nonce-{worker}"
        held = self._held.get((worker, nonce)) if resync else None
        registration = await self.do(
            leases.register(
                self.keys,
                info(worker, block_size=block_size),
                nonce,
                ttl_ms=ttl_ms,
                shards=shards,
                previous=held,
            )
        )
        inc = registration.incarnation
        assert await self.do(index.open_shard(self.shard, inc, nonce, bucket_bits))
        self._nonces[inc] = nonce
        self.infos[inc] = info(worker, block_size=block_size)
        if registration.predecessor_lives:
            self._staged.add(inc)
        else:
            assert await self.do(
                leases.activate(self.keys, WorkerKey(worker), inc, nonce, previous=held)
            )
            self._held[worker, nonce] = inc
        return registration

    async def worker(self, worker, **options):
        """Register `worker` and return its incarnation."""
        return (await self.register(worker, **options)).incarnation

    async def activate(self, worker, inc, nonce=None):
        nonce = nonce or self._nonces[inc]
        self._staged.discard(inc)
        held = self._held.get((worker, nonce))
        call = leases.activate(self.keys, WorkerKey(worker), inc, nonce, previous=held)
        switched = await self.do(call)
        if switched:
            self._held[worker, nonce] = inc
        return switched

    async def renew(self, inc, ttl_ms=LONG_MS, nonce=None, *, drains=False):
        worker = self.infos.get(inc, info("a"))
        nonce = nonce or self._nonces[inc]
        staged = inc in self._staged
        call = leases.renew(
            self.keys, worker, inc, nonce, ttl_ms=ttl_ms, staged=staged, drains=drains
        )
        return bool(await self.do(call))

    async def retire(self, worker, inc, nonce=None):
        nonce = nonce or self._nonces[inc]
        return await self.do(leases.retire(self.keys, WorkerKey(worker), inc, nonce))

    async def apply(self, inc, seq, changes, nonce=None):
        """Apply a batch. Those of its blocks that belong to no chain yet form a new one."""
        nonce = nonce or self._nonces[inc]
        changes = list(changes)
        self.set_chain([block for block, _ in changes if block not in self._leaders])
        placed = [Change(block, tier, self._leaders[block]) for block, tier in changes]
        return await self.do(index.apply(self.shard, inc, nonce, seq, placed))

    def set_chain(self, chain):
        """Make these blocks a chain from its root, whatever they belonged to before."""
        for i, block in enumerate(chain):
            self._leaders[block] = chain[i - i % GROUP_BLOCKS]

    async def hold(self, inc, blocks, tier=DEVICE):
        """Publish `blocks` as the first batch of `inc`."""
        assert await self.apply(inc, 1, [(block, tier) for block in blocks])

    async def match(self, *chains, boundaries=None):
        """Overlaps of incarnations that have not ended; a router ignores the others."""
        overlaps, _ = await overlap.match(self.runner, self.keys, chains, boundaries=boundaries)
        ended = set(await self.lost())
        return [{inc: o for inc, o in found.items() if inc not in ended} for found in overlaps]

    async def suspend(self, request_id, failure=BROKEN, **about):
        """The one worker that is suspended."""
        suspended = await self.do(leases.suspend(self.keys, failure, request_id, **about))
        assert len(suspended) <= 1
        return suspended[0] if suspended else None

    async def mark(self, worker, **marks):
        """Write a worker's record by hand."""
        await self.redis.hset(self.keys["verdicts"], f"{worker}:0", json.dumps(marks))

    async def verdict(self, inc):
        return (await self.loads()).verdict(inc)

    async def retire_lapsed(self, grace_ms=0):
        return await self.do(leases.retire_lapsed(self.keys, grace_ms, await self.now_ms()))

    async def lost(self):
        """Incarnations that the shard still lets publish, although they have ended."""
        writers = await self.redis.hkeys(self.shard["applied"])
        asked = [Incarnation(int(writer)) for writer in writers]
        return await self.do(leases.absent(self.keys, asked)) if asked else []

    async def sweep(self, max_buckets=256, scrub_ms=LONG_MS, pause_ms=0, idle_ms=0):
        """One step, which is given the incarnations that are lost now."""
        return await self.do(
            index.sweep(
                self.shard,
                await self.lost(),
                max_buckets=max_buckets,
                scrub_ms=scrub_ms,
                pause_ms=pause_ms,
                idle_ms=idle_ms,
            )
        )

    async def reserve(
        self,
        inc,
        request_id,
        *,
        tokens=100,
        us=5000,
        blocks=7,
        attempt="-",
        ttl_ms=LONG_MS,
        max_requests=256,
        seen_total=None,
        prefill_ttl_ms=None,
        retry=False,
        source=None,
        flow="",
    ):
        there = {"incarnation": inc, "max_requests": max_requests, "seen_total": seen_total}
        promised = Reservation(
            request_id, tokens, us, blocks, attempt, retry, **there, source=source, flow=flow
        )
        (refused,) = await self.reserve_all(promised, ttl_ms=ttl_ms, prefill_ttl_ms=prefill_ttl_ms)
        return refused

    async def reserve_all(self, *wishes, ttl_ms=LONG_MS, prefill_ttl_ms=None):
        return await self.do(
            reservations.reserve(self.keys, wishes, ttl_ms=ttl_ms, prefill_ttl_ms=prefill_ttl_ms)
        )

    async def prefill_complete(self, request_id, ttl_ms=LONG_MS, *, of_source=False):
        one = PrefillComplete(request_id, ttl_ms, of_source=of_source)
        return (await self.do(reservations.prefill_complete(self.keys, [one]))) != [None]

    async def release(
        self, request_id, attempt="", began_by_ms=None, *, answered=False, whole=False
    ):
        one = Release(request_id, attempt, began_by_ms, answered or whole, whole)
        return (await self.release_all(one)) != [None]

    async def release_all(self, *some):
        return await self.do(reservations.release(self.keys, some))

    async def remember(self, session, inc, ttl_ms=LONG_MS, limit=1000):
        return await self.do(sessions.remember(self.keys, session, inc, ttl_ms, limit))

    async def recall(self, *asked):
        visits = await self.do(sessions.recall(self.keys, asked))
        return [visit and visit.incarnation for visit in visits]

    async def wait(self, replica, *tickets, ttl_ms=LONG_MS, kept_ms=LONG_MS):
        call = waiting.wait(self.keys, replica, tickets, ttl_ms=ttl_ms, kept_ms=kept_ms)
        return await self.do(call)

    async def turns(self, replica, limit=100, max_picky=waiting.MAX_PICKY):
        """Names of those of the replica's tickets that are among the first `limit` of all."""
        call = waiting.turns(self.keys, replica, limit, max_picky)
        return [name for _, name in await self.do(call)]

    async def leave(self, *tickets, had_turn=False):
        await self.do(waiting.leave(self.keys, [(t.flow, t.name, had_turn) for t in tickets]))

    async def waiting(self):
        """Flow -> names of the tickets waiting in it, the longest-waiting first."""
        prefix = self.keys["waiting:"]
        return {
            key.decode().removeprefix(prefix): [
                name.decode() for name in await self.redis.zrange(key, 0, -1)
            ]
            async for key in self.redis.scan_iter(match=prefix.replace("{", r"\{") + "*")
        }

    async def expire(self, limit=100):
        return await self.do(reservations.expire(self.keys, limit))

    async def loads(self):
        return await self.do(reservations.loads(self.keys))

    async def load(self, inc):
        return (await self.loads()).loads[inc]

    async def owners(self, block, bucket_bits=8):
        """A block's owners as stored in Redis, dead ones included."""
        bucket = bucket_name(self._leaders.get(block, block), bucket_bits)
        return await self.get(f"blocks:{bucket}", f"{block:016x}")

    async def predict(self, inc, chain, settings, attempt="1000-aa", *, confirmed=True):
        call = predictions.predict(self.shard, inc, chain, settings, attempt, LONG_MS)
        count = await self.do(call)
        if confirmed:
            await self.do(predictions.confirm_predicted(self.shard, attempt, settings))
        return count

    async def confirm_predicted(self, attempt, settings):
        return await self.do(predictions.confirm_predicted(self.shard, attempt, settings))

    async def withdraw_predicted(self, attempt):
        return await self.do(predictions.withdraw_predicted(self.shard, attempt))

    async def predicted(self, chain, settings):
        return await self.do(predictions.predicted(self.shard, chain, settings))

    async def prune(self, settings, max_buckets=4):
        return (await self.do(predictions.prune(self.shard, settings, max_buckets))).removed

    async def predictions(self):
        """Number of predictions; counters and entries must agree on it."""
        counters = await self.redis.hgetall(self.key("predictions"))
        counted = sum(int(n) for name, n in counters.items() if len(name) == 1)
        stored = 0
        async for key in self.redis.scan_iter(match=self.key("predicted:") + "*"):
            stored += sum(len(re.findall(rb"\d+[a-zA-Z]", v)) for v in await self.redis.hvals(key))
        assert counted == stored
        return stored

    async def age_predictions(self, slices):
        """Make every prediction older by `slices` slices of time."""

        def older(letter):
            first = ord("a" if letter.islower() else "A")
            return chr(first + (ord(letter) - first - slices) % 26)

        counters = await self.redis.hgetall(self.key("predictions"))
        letters = {name.decode(): n for name, n in counters.items() if len(name) == 1}
        if letters:
            await self.redis.hdel(self.key("predictions"), *letters)
            moved = {older(name): n for name, n in letters.items()}
            await self.redis.hset(self.key("predictions"), mapping=moved)
        async for key in self.redis.scan_iter(match=self.key("predicted:") + "*"):
            for block, owners in (await self.redis.hgetall(key)).items():
                text = re.sub(r"[a-zA-Z]", lambda m: older(m[0]), owners.decode())
                await self.redis.hset(key, block, text)

    async def get(self, key, field):
        """A field of one of the namespace's hashes."""
        text = await self.redis.hget(self.key(key), str(field))
        return None if text is None else str(text.decode())

    def key(self, name):
        """The full name of a key, which is the shard's or the namespace's."""
        of_shard = name in ("shard", "applied", "dead", "sweep", "predictions")
        of_shard = of_shard or name.startswith(("blocks:", "predicted:", "routed:"))
        return (self.shard if of_shard else self.keys)[name]

    async def expires_ms(self, key, member):
        """The score of a member of `leases` or `expiry`."""
        score = await self.redis.zscore(self.keys[key], str(member))
        assert score is not None, f"{member} is not in {key}"
        return score

    async def contents(self):
        """Every key with its full contents."""
        lines = []
        async for key in self.redis.scan_iter(count=1000):
            match await self.redis.type(key):
                case b"hash":
                    value = sorted((await self.redis.hgetall(key)).items())
                case b"zset":
                    value = await self.redis.zrange(key, 0, -1)
                case b"set":
                    value = sorted(await self.redis.smembers(key))
                case b"stream":
                    value = await self.redis.xrange(key)
                case _:
                    value = await self.redis.lrange(key, 0, -1)
            lines.append(f"{key!r} {value!r}")
        return "\n".join(sorted(lines))

    async def now_ms(self):
        seconds, micros = await self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def until_lease_lapses(self, inc):
        """Return once the Redis clock is past the lease's expiry."""
        moment_ms = await self.expires_ms("leases", inc)
        await eventually(self.now_ms, lambda now: now >= moment_ms)

    async def until_reservation_expires(self, request_id):
        """Return once the Redis clock is past the reservation's expiry."""
        moment_ms = await self.expires_ms("expiry", request_id)
        await eventually(self.now_ms, lambda now: now >= moment_ms)

    async def backdate_expiry(self, *request_ids):
        """Set the expiry of reservations to long ago; the first one given expires first."""
        times = {request_id: 1 + i for i, request_id in enumerate(request_ids)}
        await self.redis.zadd(self.keys["expiry"], times, xx=True)


def info(worker, *, block_size=4, max_requests=256):
    return WorkerInfo(
        key=WorkerKey(worker),
        address=f"http://{worker}:8081",
        block_size=block_size,
        kv_total_blocks=1000,
        max_requests=max_requests,
    )


def ticket(flow, replica, number, *, tokens=100, weight=1.0, picky=False, since_ms=None):
    """A ticket that has waited since `since_ms`, or else since `number`."""
    return waiting.ticket(
        flow,
        replica,
        number,
        tokens=tokens,
        weight=weight,
        picky=picky,
        since_ms=number if since_ms is None else since_ms,
    )


def bucket_name(block, bits):
    digits = -(-bits // 4)
    return f"{(block >> (64 - bits)) << (4 * digits - bits):0{digits}x}"


@pytest.fixture
def space(redis_client):
    return Namespace(redis_client)


@pytest.fixture
async def a(space):
    """The incarnation of worker `a`, which registers first."""
    return await space.worker("a")


@pytest.fixture
async def b(space):
    return await space.worker("b")


@pytest.fixture
def inc(a):
    """The incarnation of worker `a`, in tests that need no other."""
    return a


@pytest.fixture
def old(a):
    """The incarnation of worker `a`, in tests that replace it."""
    return a
