"""Hits that are computed while their last layers are still on their way.

Streams are late, and in no order to each other: what does not wait for an event finds old bits.
"""

import asyncio
import random
import threading
import time
from itertools import count

import pytest
import torch

from app.core.types import Tier
from tests.workers.engines.torch.test_engine import MODEL, Spy, alone, output_of, prompt_of, running
from tests.workers.engines.torch.test_soak import soak
from tests.workers.kv.disk_files import flip
from tests.workers.kv.late_stream import LateEvent, LateStream
from tests.workers.kv.pools import move_of
from workers.engines.torch.admission import AdaptiveAdmission
from workers.kv import copiers, copies, memory
from workers.kv.copiers import PoolCopier
from workers.kv.copies import Copies
from workers.kv.memory import MemoryPool
from workers.kv.transfer import layer_groups

DEVICE, HOST, DISK = Tier
PROMPT = prompt_of(1, 43)
REUSED = 40
"""Tokens of the prompt's whole chunks."""
ABOVE = {HOST: (DEVICE,), DISK: (DEVICE, HOST)}
slower = pytest.mark.parametrize("tier", [HOST, DISK], ids=lambda tier: tier.name.lower())


def streams_are(monkeypatch, new):
    for module in (copiers, copies, layer_groups):
        monkeypatch.setattr(module, "new_stream", new)


@pytest.fixture(autouse=True)
def _layer_by_layer(monkeypatch):
    """And the forward pass begins as soon as the first layer is there."""
    monkeypatch.setattr(memory, "GROUP_BYTES", 1)
    monkeypatch.setattr(AdaptiveAdmission, "compute_s", lambda *_: 1e9)
    streams_are(monkeypatch, LateStream)


async def held_in(served, tier):
    """Compute the prompt, and have its blocks in that tier alone; the logits of that."""
    await served.ask(PROMPT)
    logits = served.spy.logits[-1]
    for above in ABOVE[tier]:
        await served.evict(above)
    return logits


@slower
@pytest.mark.parametrize("tp_size", [1, 2])
async def test_logits_are_those_of_computing_all_of_it(tmp_path, tier, tp_size):
    async with running(tmp_path, tp_size=tp_size) as served:
        expected = await held_in(served, tier)
        computed = served.spy.computed
        _, finished = await served.ask(PROMPT)

    assert finished.cached_tokens == REUSED
    assert served.spy.computed == computed + len(PROMPT) - REUSED
    assert torch.equal(served.spy.logits[-1], expected)


class EndSpy(Spy):
    """Sets `has_ended` once a chunk was computed."""

    def __init__(self):
        super().__init__(MODEL)
        self.has_ended = threading.Event()

    def prefill(self, *args):
        logits = super().prefill(*args)
        self.has_ended.set()
        return logits


@slower
async def test_the_control_logits_are_others_if_events_are_not_waited_for(
    tmp_path, tier, monkeypatch
):
    spy = EndSpy()

    class Last(LateStream):
        """Nothing moves before a chunk was computed."""

        def submit(self, work):
            def late():
                assert spy.has_ended.wait(30)
                work()

            return super().submit(late)

    spy.has_ended.set()
    streams_are(monkeypatch, Last)
    async with running(tmp_path, spy=spy) as served:
        expected = await held_in(served, tier)
        monkeypatch.setattr(LateEvent, "wait", lambda _: None)
        spy.has_ended.clear()
        await served.ask(PROMPT)

    assert not torch.equal(served.spy.logits[-1], expected)


class LayerSpy(Spy):
    """Sets `reached` once the first layer of a chunk is computed that waits for what it reuses."""

    def __init__(self):
        super().__init__(MODEL)
        self.reached = threading.Event()

    def prefill(self, kv, tokens, start, block_ids, *before):
        def before_layer(layer):
            if layer == 1:
                self.reached.set()
            before[0](layer)

        return super().prefill(kv, tokens, start, block_ids, *([before_layer] if before else []))


@slower
async def test_the_first_layers_are_computed_while_the_last_ones_are_on_their_way(
    tmp_path, tier, monkeypatch
):
    spy, is_slow = LayerSpy(), threading.Event()

    class Slow(LateStream):
        """Of a load, the last layer does not move before the first one is computed."""

        num_submitted = 0

        def submit(self, work):
            if not is_slow.is_set():
                return super().submit(work)
            self.num_submitted += 1

            def late():
                assert spy.reached.wait(30)
                work()

            return super().submit(late if self.num_submitted == 2 else work)

    streams_are(monkeypatch, Slow)
    async with running(tmp_path, spy=spy) as served:
        expected = await held_in(served, tier)
        is_slow.set()
        async with asyncio.timeout(60):
            _, finished = await served.ask(PROMPT)

    assert spy.reached.is_set()
    assert finished.cached_tokens == REUSED
    assert torch.equal(spy.logits[-1], expected)


def copies_fail(monkeypatch, fails):
    """Some cannot be begun, while others of the same load are under way."""
    begin = PoolCopier.begin

    def may_fail(*args):
        if fails():
            raise RuntimeError("the link is gone")
        return begin(*args)

    monkeypatch.setattr(PoolCopier, "begin", may_fail)


async def test_a_prompt_is_computed_if_the_copy_of_its_last_layer_fails(tmp_path, monkeypatch):
    async with running(tmp_path) as served:
        expected = await held_in(served, HOST)
        nth = count(1)
        copies_fail(monkeypatch, lambda: next(nth) == 2)
        tokens, finished = await served.ask(PROMPT)
        await served.settle()
        assert served.engine.block_events()["failed"] == REUSED // 4

    assert finished.cached_tokens == 0
    assert tokens == alone(PROMPT, 3)
    assert torch.equal(served.spy.logits[-1], expected)


def test_a_load_that_fails_has_written_all_that_it_began(monkeypatch):
    is_slow = threading.Event()

    class Slow(LateStream):
        def submit(self, work):
            def late():
                if is_slow.is_set():
                    time.sleep(0.5)
                work()

            return super().submit(late)

    streams_are(monkeypatch, Slow)
    host, device = (MemoryPool(MODEL.kv_shape(4), 2) for _ in range(2))
    host.words.fill_(3)
    loads = Copies({DEVICE: device, HOST: host})
    nth = count(1)
    copies_fail(monkeypatch, lambda: next(nth) == 2)
    is_slow.set()
    with pytest.raises(RuntimeError, match="the link is gone"):
        loads.carry_out(move_of(HOST, DEVICE, [0, 1], [0, 1]))
    assert (device.words[:, loads.groups[0]] == 3).all()


async def test_a_spoilt_block_on_disk_is_computed_with_those_after_it(tmp_path):
    async with running(tmp_path) as served:
        expected = await held_in(served, DISK)
        slots = sorted(
            slot.block_id for slot in served.manager.tiers[DISK].registered() if slot.block
        )
        flip(tmp_path / "blocks", slots[5] * 4096 + MODEL.kv_shape(4).layer_bytes + 7)
        tokens, finished = await served.ask(PROMPT)
        await served.settle()
        assert served.engine.block_events()["fallbacks"] == 1

    assert finished.cached_tokens < REUSED
    assert tokens == alone(PROMPT, 3)
    assert torch.equal(served.spy.logits[-1], expected)


async def test_a_request_that_is_cancelled_while_its_layers_come_leaves_nothing_behind(
    tmp_path, monkeypatch
):
    streams_are(monkeypatch, lambda *_: LateStream(late_s=0.05))
    async with running(tmp_path) as served:
        expected = await held_in(served, HOST)
        for n in range(4):
            cancelled = served.submit(f"cancelled {n}", PROMPT, 3)
            await asyncio.sleep(0.02 * n)
            cancelled.cancel()
        _, finished = await served.ask(PROMPT)
        await served.settle()

    assert finished.cached_tokens == REUSED
    assert torch.equal(served.spy.logits[-1], expected)


async def test_requests_whose_shared_load_fails_wait_for_room_to_compute_it(tmp_path, monkeypatch):
    async with running(tmp_path, {DEVICE: 16, HOST: 32}) as served:
        await held_in(served, HOST)
        copies_fail(monkeypatch, lambda: True)
        # Together they fit only as long as they share what is loaded.
        together = [served.submit(f"r{n}", [*PROMPT[:40], n], 3) for n in range(3)]
        async with asyncio.timeout(60):
            outputs = [await output_of(generation) for generation in together]
        await served.settle()

    assert [tokens for tokens, _ in outputs] == [alone([*PROMPT[:40], n], 3) for n in range(3)]


async def test_logits_stay_exact_while_blocks_come_and_go_and_copies_fail(
    tmp_path, redis, monkeypatch
):
    rng = random.Random(5)
    copies_fail(monkeypatch, lambda: rng.random() < 0.02)
    assert await soak(tmp_path, redis, 3) > 50


def test_late_streams_run_nothing_before_it_is_submitted_nor_out_of_order():
    pool = MemoryPool(MODEL.kv_shape(4), 1)
    stream, order = LateStream(pool), list[int]()
    events = [stream.submit(lambda n=n: order.append(n)) for n in range(5)]
    events[3].synchronize()
    assert order[:4] == [0, 1, 2, 3]
    assert stream.num_late
