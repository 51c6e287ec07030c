"""A worker's cache with real copies and, where Redis matters, a real agent."""

import asyncio
import random
import threading
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, closing
from itertools import count

import pytest
import torch

from app.core.errors import NotEnoughBlocks
from app.core.keys import Keyspace
from app.core.types import SequenceHash, Tier, TierOverlap
from app.state.overlap import match
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import fake_agent
from tests.workers.kv.cache_model import FakePublisher
from tests.workers.kv.words import named
from workers.kv.cache import LOAD_THREADS, BlockCache
from workers.kv.copies import Copies
from workers.kv.disk import SlotFile
from workers.kv.identity import hash_of
from workers.kv.manager import BlockManager
from workers.kv.memory import KVShape, MemoryPool
from workers.kv.moves import WritePolicy

DEVICE, HOST, DISK = Tier
SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=4)
KEYS = Keyspace("cache")
NUM_SLOTS = {DEVICE: 24, HOST: 20, DISK: 30}
SPARE = {DEVICE: 4, HOST: 6, DISK: 6}


class Worker:
    """A cache, and an engine that fills each block with its hash and checks what it reuses."""

    def __init__(self, folder, publisher, manager, stack):
        slots = {tier: pool.num_slots for tier, pool in manager.tiers.items()}
        self.pools = {tier: MemoryPool(SHAPE, slots[tier]) for tier in (DEVICE, HOST)}
        self.disk = stack.enter_context(
            closing(SlotFile(folder, block_bytes=SHAPE.block_bytes, num_slots=slots[DISK]))
        )
        self.transfers = Copies(self.pools, self.disk)
        self.manager = manager
        self.timed = []
        """Loads that the cache reported, with their seconds."""
        self.cache = BlockCache(
            manager,
            self.carry_out,
            publisher,
            spare=SPARE,
            on_load=lambda *load: self.timed.append(load),
        )
        self.may_load, self.may_store = threading.Event(), threading.Event()
        self.may_load_from_disk = threading.Event()
        for event in (self.may_load, self.may_store, self.may_load_from_disk):
            event.set()

    def carry_out(self, move):
        if move.is_load:
            assert self.may_load.wait(60)
            assert move.source is not DISK or self.may_load_from_disk.wait(60)
        elif move.target is DISK:
            assert self.may_store.wait(60)
        return self.transfers.carry_out(move)

    async def compute(self, chain, num_blocks):
        """Admit a request, check the blocks that it reuses, and compute the rest."""
        table = await self.cache.admit(chain, num_blocks)
        self.check(table)
        for block, slot in list(zip(chain, table.slots, strict=False))[table.num_matched :]:
            self.pools[DEVICE].words[slot.block_id].fill_(word(block))
        self.cache.register(table, chain[table.num_matched :])
        return table

    async def compute_and_release(self, chain):
        self.cache.release(await self.compute(chain, len(chain)))

    def check(self, table):
        for block, slot in zip(table.chain, table.slots, strict=False):
            assert (self.pools[DEVICE].words[slot.block_id] == word(block)).all()

    async def until_quiet(self):
        """Wait until no copy is under way, and spare slots are free or nothing can be freed."""

        async def busy():
            tiers = self.manager.tiers.items()
            return any(
                slots.num_leaving or (slots.num_free < SPARE[tier] and slots.num_idle)
                for tier, slots in tiers
            ) or any(slot.filling for _, slots in tiers for slot in slots.all())

        await eventually(busy, lambda is_busy: not is_busy)
        self.manager.check()


def word(block):
    return hash_of(block) - (1 << 63)


def chain_of(seed, length, stem=()):
    rng = random.Random(seed)
    grown = [named(rng.getrandbits(64)) for _ in range(length - len(stem))]
    return [*stem, *grown]


@asynccontextmanager
async def running(folder, publisher, manager=None, **options):
    async with AsyncExitStack() as stack:
        manager = manager or BlockManager(NUM_SLOTS, now=lambda: 0.0, **options)
        worker = Worker(folder, publisher, manager, stack)
        task = asyncio.ensure_future(worker.cache.run())
        await asyncio.sleep(0)
        try:
            yield worker
        finally:
            for event in (worker.may_load, worker.may_store, worker.may_load_from_disk):
                event.set()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_a_request_waiting_for_room_keeps_the_blocks_it_found(tmp_path):
    least_recent, other = chain_of(1, 9), chain_of(2, 9)
    async with running(tmp_path, FakePublisher()) as worker:
        await worker.compute_and_release(least_recent)
        await worker.compute_and_release(other)
        await worker.until_quiet()
        table = await worker.compute(chain_of(3, 18, least_recent), 18)
        assert table.tiers == [DEVICE] * 9
        assert worker.manager.counts.loaded == 0
        worker.cache.release(table)


async def test_spare_slots_stay_free_and_evicted_blocks_are_loaded_back(tmp_path):
    publisher = FakePublisher()
    chains = [chain_of(n, 8) for n in range(7)]
    async with running(tmp_path, publisher) as worker:
        for chain in chains:
            await worker.compute_and_release(chain)
            await worker.until_quiet()
        for tier, slots in worker.manager.tiers.items():
            assert slots.num_free >= SPARE[tier]
        assert {tier for chain in chains for tier in worker.manager.match(chain)} == set(Tier)
        for chain in chains:
            held = worker.manager.match(chain)
            assert [
                min(publisher.shown.tiers_of(hash_of(block))) for block in chain[: len(held)]
            ] == held
            await worker.compute_and_release(chain)
            await worker.until_quiet()
        assert worker.manager.counts.loaded > 0
        assert worker.manager.counts.failed == 0


async def test_a_request_waits_for_room_and_is_refused_if_none_can_be_made(tmp_path):
    async with running(tmp_path, FakePublisher()) as worker:
        await worker.compute_and_release(chain_of(1, 10))
        held = await worker.compute(chain_of(2, 8), 10)
        table = await worker.compute(chain_of(3, 10), 14)
        with pytest.raises(NotEnoughBlocks, match="1 needed, 0 free"):
            await worker.cache.admit([], 1)
        worker.cache.release(held)
        worker.cache.release(table)
        await worker.until_quiet()


@pytest.mark.parametrize("max_storing", [3, 256])
async def test_evicted_blocks_wait_for_room_below_instead_of_being_dropped(
    max_storing, tmp_path, monkeypatch
):
    monkeypatch.setattr("workers.kv.cache.STORE_WAIT_S", 30.0)
    async with running(tmp_path, FakePublisher(), max_storing=max_storing) as worker:
        for n in range(5):
            # More blocks at a time than host memory keeps free.
            await worker.compute_and_release(chain_of(n, 20))
        await worker.until_quiet()
        assert worker.manager.counts.stores_dropped == 0
        assert len(worker.manager.match(chain_of(3, 20))) == 20


async def test_a_request_does_not_wait_for_a_stalled_tier_below(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.kv.cache.STORE_WAIT_S", 0.001)
    async with running(tmp_path, FakePublisher()) as worker:
        for n in range(2):
            await worker.compute_and_release(chain_of(n, 20))
            await worker.until_quiet()
        worker.may_store.clear()
        # Host memory has room for 6 blocks, and no more becomes free while nothing is stored.
        free = worker.manager.tiers[HOST].num_free
        waiting = asyncio.ensure_future(worker.compute(chain_of(2, 24), 24))

        async def dropped():
            return worker.manager.counts.stores_dropped

        await eventually(dropped)
        worker.may_store.set()
        worker.cache.release(await waiting)
        assert free == 6


async def test_no_slot_is_reused_before_redis_confirms_the_removal_of_its_block(tmp_path):
    publisher = FakePublisher()
    async with running(tmp_path, publisher) as worker:
        chain = chain_of(1, 20)
        await worker.compute_and_release(chain)
        await worker.until_quiet()
        publisher.confirms.clear()
        admitted = asyncio.ensure_future(worker.compute(chain_of(2, 24), 24))
        device = worker.manager.tiers[DEVICE]

        async def leaving():
            return device.num_leaving

        assert await eventually(leaving)
        assert not admitted.done()
        assert len(worker.manager.match(chain)) == 20
        publisher.confirms.set()
        worker.cache.release(await admitted)
        assert worker.cache.unconfirmed == 0


async def test_slots_freed_by_sharing_go_to_a_waiting_request(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.kv.cache.WITHDRAW_TIMEOUT_S", 3600.0)
    publisher = FakePublisher()
    publisher.confirms.clear()
    async with running(tmp_path, publisher) as worker:
        chain, device = chain_of(1, 8), worker.manager.tiers[DEVICE]
        await worker.compute_and_release(chain_of(2, 8))
        late = await worker.cache.admit(chain, 8)
        early = await worker.compute(chain, 8)
        waiting = asyncio.ensure_future(worker.cache.admit([], 8))

        async def withdrawn():
            return sum(slot.leaving > 0 and not slot.published for slot in device.all())

        # No slot is freed by eviction: Redis does not confirm any removal.
        assert await eventually(withdrawn) == device.num_leaving
        assert not waiting.done()
        assert worker.cache.share(late, chain) == 8
        for table in (await asyncio.wait_for(waiting, 20), late, early):
            worker.cache.release(table)
        publisher.confirms.set()
        await worker.until_quiet()


async def test_an_unreachable_redis_does_not_stop_the_worker(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("workers.kv.cache.WITHDRAW_TIMEOUT_S", 0.01)
    publisher = FakePublisher()
    publisher.confirms.clear()
    async with running(tmp_path, publisher) as worker:
        await worker.compute_and_release(chain_of(1, 20))
        await worker.compute_and_release(chain_of(2, 24))
        await worker.until_quiet()
        assert worker.cache.unconfirmed == worker.manager.counts.evicted > 0
        assert caplog.text.count("whose blocks Redis may still show") == 1


async def test_requests_sharing_a_prefix_load_it_once_even_if_one_is_cancelled(tmp_path):
    async with running(tmp_path, FakePublisher()) as worker:
        chain = chain_of(1, 8)
        await worker.compute_and_release(chain)
        await worker.compute_and_release(chain_of(2, 20))
        await worker.until_quiet()
        assert worker.manager.match(chain)[-1] > DEVICE
        worker.may_load.clear()
        before = worker.manager.counts.loaded
        requests = [asyncio.ensure_future(worker.cache.admit(chain, 8)) for _ in range(3)]

        async def shared():
            return sum(slot.references > 1 for slot in worker.manager.tiers[DEVICE].all())

        await eventually(shared, lambda count: count >= 8)
        requests[0].cancel()
        await asyncio.wait(requests[:1])
        assert requests[0].cancelled()
        worker.may_load.set()
        for request in requests[1:]:
            table = await request
            worker.check(table)
            assert table.num_matched == 8
            worker.cache.release(table)
            loaded = sum(len(load.blocks) for load in table.loads)
            assert loaded == worker.manager.counts.loaded - before
        await worker.until_quiet()
        assert not any(slot.references for slot in worker.manager.tiers[DEVICE].all())


async def test_loads_from_host_memory_do_not_wait_for_a_slow_disk(tmp_path):
    chains = [chain_of(n, 8) for n in range(7)]
    async with running(tmp_path, FakePublisher()) as worker:
        for chain in chains:
            await worker.compute_and_release(chain)
            await worker.until_quiet()
        tiers = [set(worker.manager.match(chain)) for chain in chains]
        on_disk = [chain for chain, where in zip(chains, tiers, strict=True) if where == {DISK}]
        on_host = chains[tiers.index({HOST})]
        worker.may_load_from_disk.clear()
        assert len(on_disk[:2]) == LOAD_THREADS
        assert [worker.cache.prefetch(chain[:2]) for chain in on_disk[:2]] == [2, 2]
        worker.may_store.clear()
        evictions = [asyncio.ensure_future(worker.cache._free(HOST, 1)) for _ in range(2)]
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await worker.compute_and_release(on_host)
        assert worker.manager.counts.loaded == 8
        worker.may_store.set()
        await asyncio.gather(*evictions)


async def test_only_whole_loads_onto_the_device_are_timed(tmp_path):
    async with running(tmp_path, FakePublisher(), write=WritePolicy.THROUGH) as worker:
        chain = chain_of(1, 8)
        await worker.compute_and_release(chain)
        for n in (2, 3):
            await worker.compute_and_release(chain_of(n, 16))
            await worker.until_quiet()
        tiers = worker.manager.match(chain)
        assert DEVICE not in tiers
        assert worker.timed == []  # stores are not
        worker.may_load.clear()
        admitted = asyncio.ensure_future(worker.compute(chain, 8))
        await asyncio.sleep(0.2)
        worker.may_load.set()
        worker.cache.release(await admitted)
        assert sorted(load[:2] for load in worker.timed) == sorted(Counter(tiers).items())
        assert all(0.05 < seconds < 60 for *_, seconds in worker.timed)


async def test_blocks_that_cannot_be_loaded_are_computed(tmp_path):
    async with running(tmp_path, FakePublisher(), write=WritePolicy.THROUGH) as worker:
        chain = chain_of(1, 8)
        await worker.compute_and_release(chain)
        others = count(2)
        while worker.manager.match(chain)[-1] is not DISK:
            await worker.compute_and_release(chain_of(next(others), 20))
            await worker.until_quiet()
        size = (tmp_path / "blocks").stat().st_size
        (tmp_path / "blocks").write_bytes(bytes(size))
        await worker.compute_and_release(chain)
        assert worker.manager.counts.fallbacks == 1
        assert DISK not in [tier for tier, *_ in worker.timed]
        assert worker.manager.match(chain) == [DEVICE] * 8
        await worker.until_quiet()


async def test_blocks_of_an_earlier_life_are_published_before_the_first_request(tmp_path):
    manager, publisher = BlockManager(NUM_SLOTS, now=lambda: 0.0), FakePublisher()
    manager.adopt(DISK, [(0, 1, named(7), None)])
    async with running(tmp_path, publisher, manager):
        assert publisher.shown.tiers_of(SequenceHash(7)) == {DISK}


async def test_computed_blocks_are_published_at_once_and_room_is_made_once_they_are_released(
    tmp_path,
):
    publisher = FakePublisher()
    async with running(tmp_path, publisher) as worker:
        chain, device = chain_of(1, 24), worker.manager.tiers[DEVICE]
        table = await worker.compute(chain, 24)
        assert publisher.shown.scan([*map(hash_of, chain)]) == TierOverlap(device=24)
        await asyncio.sleep(0)  # there is nothing to free yet
        worker.cache.release(table)
        await worker.until_quiet()
        assert device.num_free == SPARE[DEVICE]


async def test_the_cache_ends_only_once_its_copies_have_ended(tmp_path):
    async with AsyncExitStack() as stack:
        manager = BlockManager(NUM_SLOTS, now=lambda: 0.0)
        worker = Worker(tmp_path, FakePublisher(), manager, stack)
        cache = asyncio.ensure_future(worker.cache.run())
        await asyncio.sleep(0)
        chain = chain_of(1, 4)
        await worker.compute_and_release(chain)
        await worker.cache._free(DEVICE, 4)
        worker.may_load.clear()
        assert worker.cache.prefetch(chain) == 4
        await asyncio.sleep(0)
        cache.cancel()
        done, _ = await asyncio.wait([cache], timeout=0.05)
        worker.may_load.set()
        assert not done
        with pytest.raises(asyncio.CancelledError):
            await cache


async def test_blocks_whose_copy_raises_are_computed(tmp_path, monkeypatch, caplog):
    def fail(move):
        raise RuntimeError("the device is out of memory")

    async with running(tmp_path, FakePublisher()) as worker:
        chain = chain_of(1, 4)
        await worker.compute_and_release(chain)
        await worker.cache._free(DEVICE, 4)
        monkeypatch.setattr(worker.transfers, "carry_out", fail)
        await worker.compute_and_release(chain)
        assert worker.manager.counts.fallbacks == 1
        assert worker.manager.match(chain) == [DEVICE] * 4
    assert "copying 4 blocks failed" in caplog.text
    assert "the device is out of memory" in caplog.text


@asynccontextmanager
async def running_with_a_copy_under_way(folder):
    """As long as there is one, requests without room wait; it takes no room on the device."""
    block, manager = named(7), BlockManager(NUM_SLOTS, now=lambda: 0.0)
    manager.adopt(HOST, [(0, 1, block, None)])
    manager.tiers[HOST].all()[0].uses = 1  # else it would not be worth storing
    async with running(folder, FakePublisher(), manager) as worker:
        worker.may_store.clear()
        evicted = asyncio.ensure_future(worker.cache._free(HOST, 1))
        await asyncio.sleep(0)
        yield worker
        worker.may_store.set()
        await evicted


async def test_slots_of_a_request_that_cannot_fall_back_go_to_a_waiting_one(tmp_path, monkeypatch):
    async with running_with_a_copy_under_way(tmp_path) as worker:
        chain = chain_of(1, 8)
        await worker.compute_and_release(chain)
        await worker.cache._free(DEVICE, 8)
        worker.may_load.clear()
        # Both wait for the same load, and what other slots there are goes to a third.
        large = asyncio.ensure_future(worker.cache.admit(chain, 12))
        small = asyncio.ensure_future(worker.cache.admit(chain, 8))
        other = await worker.compute(chain_of(2, 12), 12)
        waiting = asyncio.ensure_future(worker.cache.admit([], 4))
        await asyncio.sleep(0)

        def fail(move):
            raise RuntimeError("the device is out of memory")

        monkeypatch.setattr(worker.transfers, "carry_out", fail)
        worker.may_load.set()
        tables = [await asyncio.wait_for(asked, 20) for asked in (small, waiting)]
        assert not large.done()
        for table in (*tables, other):
            worker.cache.release(table)
        worker.cache.release(await large)


async def test_nothing_is_evicted_for_a_request_that_there_can_be_no_room_for_yet(tmp_path):
    async with running_with_a_copy_under_way(tmp_path) as worker:
        cached, first, second = (chain_of(n, length) for n, length in ((1, 10), (2, 5), (3, 5)))
        held = [await worker.compute(chain, len(chain)) for chain in (cached, first, second)]
        worker.cache.release(held.pop(0))
        waiting = asyncio.ensure_future(worker.cache.admit([], 14))
        await asyncio.sleep(0)
        # Before anything is evicted for it, another request uses what would have been.
        held.append(await worker.cache.admit(cached, 10))
        await asyncio.sleep(0)
        worker.cache.release(held.pop(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert worker.manager.tiers[DEVICE].num_idle == 5
        for table in held:
            worker.cache.release(table)
        worker.cache.release(await waiting)


async def test_prefetching_loads_no_more_blocks_than_there_are_spare_slots(tmp_path):
    async with running(tmp_path, FakePublisher()) as worker:
        chain = chain_of(1, 8)
        await worker.compute_and_release(chain)
        await worker.compute_and_release(chain_of(2, 20))
        await worker.until_quiet()
        below = sum(tier > DEVICE for tier in worker.manager.match(chain))
        assert worker.cache.prefetch(chain) == min(below, SPARE[DEVICE])
        await worker.compute_and_release(chain)
        await worker.until_quiet()


class WatchedManager(BlockManager):
    """Calls `before` ahead of each change that may remove a block it could serve."""

    def before(self):
        """Set by the test."""

    def reclaim(self, eviction):
        self.before()
        return super().reclaim(eviction)

    def finish(self, move, num_done):
        self.before()
        super().finish(move, num_done)


async def test_routers_never_see_a_block_that_the_worker_could_not_serve_at_that_moment(
    redis, tmp_path, monkeypatch
):
    """Each answer of the index must have been true at some moment since it was asked for."""
    monkeypatch.setattr("workers.kv.cache.WITHDRAW_TIMEOUT_S", 3600.0)
    rng = random.Random(5)
    stem = chain_of(0, 4)
    chains = [chain_of(n, 4 + n, stem if n % 2 else ()) for n in range(1, 10)]
    scripts = ScriptRunner(redis, timeout_s=5.0)
    agent = fake_agent(scripts, KEYS, "w0", block_size=SHAPE.block_size)
    manager = WatchedManager(NUM_SLOTS, now=lambda: 0.0)
    windows = {}

    def before():
        for best in windows.values():
            best[:] = map(max, best, map(len, map(manager.match, chains)))

    manager.before = before
    served = seen = 0
    stop = asyncio.Event()

    async def engine(seed):
        nonlocal served
        rng = random.Random(seed)
        while not stop.is_set():
            chain = rng.choice(chains)
            try:
                table = await worker.compute(chain, len(chain) + rng.randrange(2))
            except NotEnoughBlocks:
                await asyncio.sleep(0)
                continue
            served += 1
            await asyncio.sleep(rng.random() * 0.003)
            worker.check(table)
            worker.cache.release(table)

    async def reader(seed):
        nonlocal seen
        while not stop.is_set():
            best = [0] * len(chains)
            windows[id(best)] = best
            before()
            (found, *_), _ = await match(scripts, KEYS, [[*map(hash_of, chains[seed])]], 1)
            before()
            del windows[id(best)]
            for overlap in (found or {}).values():
                assert overlap.total <= best[seed]
                seen += overlap.total > 0

    await agent.start()
    async with running(tmp_path, agent, manager) as worker, asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(agent.run())]
        work = [tasks.create_task(engine(n)) for n in range(3)]
        work += [tasks.create_task(reader(rng.randrange(len(chains)))) for _ in range(3)]

        async def evicted():
            return manager.counts.evicted, served, seen

        await eventually(evicted, lambda n: n[0] > 300 and n[1] > 100 and n[2] > 100, within_s=60)
        stop.set()
        await asyncio.wait(work)
        await worker.until_quiet()
        assert worker.cache.unconfirmed == 0
        for task in others:
            task.cancel()


async def test_a_request_that_has_no_room_yet_keeps_its_prefix_on_the_device(tmp_path):
    running_chain, prefix = chain_of(1, 6), chain_of(2, 12)
    prompt = chain_of(3, 22, prefix)
    async with running(tmp_path, FakePublisher()) as worker:
        running_table = await worker.compute(running_chain, 6)
        await worker.compute_and_release(prefix)
        await worker.until_quiet()
        with pytest.raises(NotEnoughBlocks):
            await worker.cache.admit(prompt, 22)
        await worker.until_quiet()
        assert worker.manager.match(prefix) == [DEVICE] * 12
        worker.cache.release(running_table)
        table = await worker.compute(prompt, 22)
        assert table.tiers == [DEVICE] * 12
        worker.cache.release(table)
