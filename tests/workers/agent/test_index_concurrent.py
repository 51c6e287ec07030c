"""Queries of the index while agents publish, and which answers are allowed.

Each batch is applied atomically, and each script that looks up a chain runs atomically. So:

- A chain that is sent whole is looked up at one moment between the query and its answer: each
  worker's overlap is what it had published at that moment, the same moment for all workers.
- A longer chain is looked up at two moments, first samples of it, then the stretches between them.
  Each worker's overlap lies between what it had published at either moment. That holds separately
  for its blocks on the device, for those on the device or host, and for all of them. If nothing
  changed between the two moments, the overlap is exact.

The agents and their batches are real; a simulated engine stores, removes, moves and clears blocks
at random, with holes. Now and then an agent dies with its cache, or its lease lapses.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement, count
from math import inf
from typing import Any

import pytest

from app.core.chains import TIER_OF_LETTER, shard_of
from app.core.events import Cleared, Removed, Stored
from app.core.keys import Keyspace
from app.core.types import SequenceHash, Tier, TierOverlap
from app.state import index, leases, overlap
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import fake_agent, running
from tests.workers.kv.cache_model import CacheModel, leading
from workers.agent import publish

KEYS = Keyspace("concurrent")
NUM_SHARDS = 2
NUM_READERS = 3
TIMEOUT_S = 60.0
LEASE_TTL_S = 1.0
MAX_PAUSE_S = 0.01
BATCH_BLOCKS = 24
"""Smaller batches than real ones, so that there are more states between them."""
NOTHING = TierOverlap()


def new_chains():
    """Prompts with shared prefixes; the last two are looked up in two round trips."""
    rng = random.Random(1)
    blocks = iter(lambda: SequenceHash(rng.getrandbits(64)), None)

    def grown(stem, length):
        return [*stem, *(next(blocks) for _ in range(length - len(stem)))]

    system_prompt = grown([], 20)
    document = grown(system_prompt, 400)
    return [
        grown(system_prompt, 40),
        grown([], 90),
        grown(system_prompt, overlap.WHOLE_CHAIN),
        grown(document, 700),
        grown(document, 1300),
    ]


CHAINS = new_chains()
Settle = Callable[[Any, int], None]
"""Called with the reply to a call, and with the time when it had arrived."""


@dataclass(eq=False)
class State:
    """What an incarnation had published from some moment after `since` to one before `until`.

    overlaps: the overlap with each of CHAINS.
    """

    overlaps: list[TierOverlap]
    since: int
    until: float = inf


class Life:
    """The states of an incarnation that one shard of the index may have shown, in order."""

    def __init__(self):
        self.hidden_since = inf
        """From this time on, the sweep may have hidden the incarnation."""
        self.hidden_until = inf
        """By this time, the sweep has hidden it."""
        self._published = {}
        self._states = [State([NOTHING] * len(CHAINS), since=-1)]

    def enter(self, changes, now):
        """Enter a batch that was sent."""
        for block, tier in changes:
            if tier is None:
                self._published.pop(block, None)
            else:
                self._published[block] = tier
        state = State([leading(self._published, chain) for chain in CHAINS], now)
        self._states.append(state)
        return state

    def settle(self, state, applied, now):
        """Settle a batch whose answer has arrived."""
        if not applied:
            self._states.remove(state)
            return
        for earlier in reversed(self._states[: self._states.index(state)]):
            if earlier.until < inf:
                break
            earlier.until = now

    def between(self, start, end):
        """All states that it may have been in at any time from `start` to `end`."""
        found = []
        if start < self.hidden_until:
            for state in reversed(self._states):
                if state.until <= start:
                    break
                if state.since < end:
                    found.append(state)
        if self.hidden_since < end:
            found.append(State([NOTHING] * len(CHAINS), int(self.hidden_since)))
        return found


class History:
    """All that was published. Its clock counts calls and answers in their order.

    num_queries: the queries that were checked. num_between: those during which some worker may have
    been in several states.
    """

    def __init__(self):
        self.num_queries = 0
        self.num_between = 0
        self._clock = count()
        self._lives = {}
        """By the first key of a call to the shard."""

    def tick(self):
        return next(self._clock)

    def enter(self, call, now):
        """Enter a call that was sent; returns what to call with its reply."""
        lives = self._lives.setdefault(call.keys[0], {})
        if call.name == "apply":
            life = lives.setdefault(call.args[0], Life())
            state = life.enter(changes_in(call.args[4:]), now)
            return lambda applied, at: life.settle(state, applied, at)
        if call.name == "sweep":
            lost = [lives[inc] for inc in call.args[2:] if inc in lives]
            for life in lost:
                life.hidden_since = min(life.hidden_since, now)
            return lambda _, at: hide(lost, at)
        return lambda _, at: None

    def check(self, position, answer, start, end):
        """Check an answer for a chain that was asked for at `start` and had arrived at `end`."""
        root = CHAINS[position][0]
        lives = self._lives[KEYS.of_shard(shard_of(root, NUM_SHARDS))["shard"]]
        assert answer.keys() <= lives.keys()
        possible = {inc: life.between(start, end) for inc, life in lives.items()}
        self.num_queries += 1
        self.num_between += any(len(states) > 1 for states in possible.values())
        # States become possible only at these moments, so other moments allow no further answers.
        begins = {max(start, s.since) for states in possible.values() for s in states}
        moments = sorted({start, *begins})
        whole = len(CHAINS[position]) <= overlap.WHOLE_CHAIN
        looks = ((m, m) for m in moments) if whole else combinations_with_replacement(moments, 2)
        if any(
            all(
                allows(states, position, answer.get(inc, NOTHING), look)
                for inc, states in possible.items()
            )
            for look in looks
        ):
            return
        seen = {
            inc: [(s.since, s.until, s.overlaps[position]) for s in states]
            for inc, states in possible.items()
        }
        raise AssertionError(
            f"asked at {start} and answered at {end} for {len(CHAINS[position])} blocks: {answer}, "
            f"but the published states were {seen}"
        )


def changes_in(groups):
    """The changes in the last arguments of lua/apply.lua."""
    for group in groups:
        for at in range(16, len(group), 17):
            tier = TIER_OF_LETTER.get(group[at].encode())
            yield SequenceHash(int(group[at + 1 : at + 17], 16)), tier


def hide(lives, now):
    for life in lives:
        life.hidden_until = min(life.hidden_until, now)


def allows(states, position, answer, look):
    """Whether a lookup of a chain at the moments of `look` may find `answer`."""
    first, last = (
        [s.overlaps[position] for s in states if s.since <= moment < s.until] for moment in look
    )
    if len(CHAINS[position]) <= overlap.WHOLE_CHAIN:
        return answer in first
    return any(lies_between(one, answer, other) for one in first for other in last)


def lies_between(one, middle, other):
    """Compares, for each tier, the number of blocks in that tier or a faster one."""
    totals = [accumulate((o.device, o.host, o.disk)) for o in (one, middle, other)]
    return all(min(a, b) <= m <= max(a, b) for a, m, b in zip(*totals, strict=True))


class Recorder(ScriptRunner):
    """Records in `history` when each call may have taken effect, and when it must have."""

    def __init__(self, redis, history):
        super().__init__(redis, TIMEOUT_S)
        self._history = history

    async def run_each(self, calls):
        now = self._history.tick()
        settles = [self._history.enter(call, now) for call in calls]
        replies = await super().run_each(calls)
        now = self._history.tick()
        for settle, reply in zip(settles, replies, strict=True):
            settle(reply, now)
        return replies


class Worker:
    """An agent with a simulated engine."""

    def __init__(self, runner, name, rng):
        self.cache = CacheModel()
        self._runner = runner
        self._name = name
        self._rng = rng
        self._running = AsyncExitStack()

    @property
    def incarnation(self):
        assert self.agent.incarnation is not None
        return self.agent.incarnation

    async def start(self):
        self.agent = fake_agent(
            self._runner,
            KEYS,
            self._name,
            lease_ttl_s=LEASE_TTL_S,
            index_blocks=4000,
            shards=NUM_SHARDS,
        )
        await self._running.enter_async_context(running(self.agent))

    async def die(self):
        await self._running.aclose()

    async def live(self, num_events):
        """Do `num_events` random things that engines and their processes may do."""
        for _ in range(num_events):
            await asyncio.sleep(self._rng.uniform(0, MAX_PAUSE_S))
            if self._rng.random() < 0.01:
                await self.die()
                self.cache = CacheModel()
                await self.start()
            elif self._rng.random() < 0.02:
                await self._lapse()
            else:
                for event in self._events():
                    self.cache.take(event)
                    self.agent.notify([event])

    async def _lapse(self):
        """Expire the lease: the agent will resync if it is retired before it renews the lease."""
        await self._runner.redis.zadd(KEYS["leases"], {str(self.incarnation): 1})

    def _events(self):
        rng = self._rng
        chain = rng.choice(CHAINS)
        start, end = sorted(rng.sample(range(len(chain) + 1), 2))
        blocks = tuple(chain[start:end])
        tier, other = rng.sample(list(Tier), 2)
        match rng.choices(
            ("store", "extend", "hole", "cut", "move", "clear"), (30, 15, 15, 15, 15, 1)
        )[0]:
            case "store":
                return [Stored(tuple(chain[:end]), None, rng.choice((Tier.DEVICE, tier)))]
            case "extend":
                return [Stored(blocks, chain[start - 1] if start else None, tier)]
            case "hole":
                return [Removed(blocks[: rng.randint(1, 3)], t) for t in Tier]
            case "cut":
                return [Removed(tuple(chain[end:]), t) for t in Tier]
            case "move":
                # Only blocks that are held move, all of one chain.
                held = tuple(b for b in blocks if tier in self.cache.tiers_of(b))
                stored = [Stored((b,), parent_in(chain, b), other) for b in held]
                return [*stored, Removed(held, tier)]
            case _:
                return [Cleared()]


def parent_in(chain, block):
    at = chain.index(block)
    return chain[at - 1] if at else None


async def read(runner, history, rng):
    """Query chains, one or several at a time, and check the answers, until cancelled."""
    learnt_boundaries = overlap.Boundaries()
    while True:
        positions = rng.sample(range(len(CHAINS)), rng.choice((1, 1, 3)))
        chains, boundaries = [CHAINS[i] for i in positions], rng.choice((None, learnt_boundaries))
        start = history.tick()
        answers, _ = await overlap.match(runner, KEYS, chains, NUM_SHARDS, boundaries=boundaries)
        end = history.tick()
        for position, answer in zip(positions, answers, strict=True):
            assert answer is not None
            history.check(position, answer, start, end)


async def maintain(runner):
    """Retire lapsed workers and sweep, as routers do but without pauses, until cancelled."""
    lost = []
    while True:
        await runner.one(leases.retire_lapsed(KEYS, grace_ms=0, heard_ms=1 << 53))
        steps = await runner.run(
            [
                index.sweep(KEYS.of_shard(shard), lost, max_buckets=8, scrub_ms=60_000)
                for shard in range(NUM_SHARDS)
            ]
        )
        writers = {inc for step in steps for inc in step.writers}
        lost = await runner.one(leases.absent(KEYS, writers)) if writers else []


async def run_history(redis, num_workers, num_events, seed):
    """Run agents, readers and the sweep together until each agent has had `num_events`."""
    history = History()
    writing, reading = Recorder(redis, history), ScriptRunner(redis, TIMEOUT_S)
    workers = [Worker(writing, f"w{i}", random.Random(f"{seed}:{i}")) for i in range(num_workers)]
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.die)
        background = [tasks.create_task(maintain(writing))]
        for i in range(NUM_READERS):
            rng = random.Random(f"{seed}:reader {i}")
            background.append(tasks.create_task(read(reading, history, rng)))
        await asyncio.gather(*(worker.live(num_events) for worker in workers))
        await eventually(lambda: is_exact(reading, workers), within_s=TIMEOUT_S)
        for task in background:
            task.cancel()
    return history


async def is_exact(runner, workers):
    """Whether every answer equals a scan of the caches."""
    answers, _ = await overlap.match(runner, KEYS, CHAINS, NUM_SHARDS)
    return all(
        (answer or {}).get(w.incarnation, NOTHING) == w.cache.scan(chain)
        for answer, chain in zip(answers, CHAINS, strict=True)
        for w in workers
    )


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(publish, "BATCH_BLOCKS", BATCH_BLOCKS)


async def test_an_answer_matches_what_was_published_during_the_query(redis_server):
    async with connect(redis_server.url, timeout_s=TIMEOUT_S) as redis:
        history = await run_history(redis, num_workers=3, num_events=150, seed=1)
    # Many queries ran while a worker was publishing; otherwise nothing was tested.
    assert history.num_between > 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_workers", [3, 4, 5])
async def test_answers_match_what_was_published_through_long_histories(redis_server, num_workers):
    """Ten histories on each kind of server."""
    async with connect(redis_server.url, timeout_s=TIMEOUT_S) as redis:
        for seed in range(10):
            await redis.flushall()
            history = await run_history(redis, num_workers=num_workers, num_events=1000, seed=seed)
            assert history.num_between > 300
