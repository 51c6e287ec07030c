"""The torch engine on real tiers: reuse, sharing, and what requests leave behind."""

import asyncio
import gc
import random
import threading
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace
from unittest import mock

import pytest
import torch

from app.core.errors import InvalidRequest
from app.core.hashing import token_bytes
from app.core.types import Tier
from app.core.worker_report import DEFAULT_SPEED
from app.simulation.steps import PromptTooLargeError
from tests.eventually import eventually
from tests.workers.kv.cache_model import FakePublisher
from workers.engines.base import CompletionRequest, EngineStoppedError, QueueFullError, Sampling
from workers.engines.torch.engine import TorchEngine
from workers.engines.torch.llama import SIZES, Llama
from workers.engines.torch.sequence import TokenSequence
from workers.engines.torch.tiers import carried_out
from workers.kv.copies import Copies
from workers.kv.disk import SlotFile
from workers.kv.identity import BlockIdentity, hash_of, identities_of
from workers.kv.manager import BlockManager
from workers.kv.memory import MemoryPool, host_pool
from workers.kv.moves import WritePolicy
from workers.metrics import registry_of

DEVICE, HOST, DISK = Tier
BLOCK_SIZE = 4
CHUNK = 8
NUM_SLOTS = {DEVICE: 32, HOST: 32, DISK: 32}
GREEDY = Sampling(temperature=0.0)
MODEL = Llama.random(SIZES["tiny"], seed=0, dtype=torch.float32, device=torch.device("cpu"))


class Spy:
    """The model; records the logits that each prefill returns."""

    def __init__(self, model):
        self.config = model.config
        self.logits = []
        self.computed = 0
        """The number of prompt tokens computed."""
        self.model = model

    def prefill(self, kv, tokens, start, *where):
        logits = self.model.prefill(kv, tokens, start, *where)
        self.computed += len(tokens)
        self.logits.append(logits)
        return logits

    def decode(self, *args):
        return self.model.decode(*args)


class SlowSpy(Spy):
    """Ends a prefill once `may_end` is set."""

    def __init__(self, model):
        super().__init__(model)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def prefill(self, *args):
        self.begun.set()
        assert self.may_end.wait(10)
        return super().prefill(*args)


class Served:
    """An engine, with what its model computed and its cache published."""

    def __init__(
        self,
        folder,
        stack,
        num_slots,
        publisher=None,
        *,
        write=WritePolicy.BACK,
        spy=None,
        link=None,
        tp_size=1,
    ):
        self.spy = spy or Spy(MODEL)
        model = self.spy.model
        ranks = model.kv_shape(BLOCK_SIZE).split(tp_size)
        self.fake_publisher = FakePublisher()
        self.now_s = 0.0
        self.manager = BlockManager(
            num_slots, write=write, reuse_multiple=CHUNK // BLOCK_SIZE, now=lambda: self.now_s
        )
        self.pools = {DEVICE: [MemoryPool(rank, num_slots[DEVICE], model.device) for rank in ranks]}
        if HOST in num_slots:
            self.pools[HOST] = [host_pool(rank, num_slots[HOST]) for rank in ranks]
        transfers = []
        for n, rank in enumerate(ranks):
            disk = None
            if DISK in num_slots:
                file = SlotFile(
                    folder if not n else folder / f"{n}",
                    block_bytes=rank.block_bytes,
                    num_slots=num_slots[DISK],
                )
                disk = stack.enter_context(closing(file))
            transfers.append(Copies({t: pools[n] for t, pools in self.pools.items()}, disk))
        self.spare = {tier: -(-number // 4) for tier, number in num_slots.items()}
        self.engine = TorchEngine(
            self.spy,
            self.pools[DEVICE],
            self.manager,
            carried_out(transfers),
            publisher or self.fake_publisher,
            chunk_tokens=CHUNK,
            spare=self.spare,
            max_num_seqs=8,
            max_waiting=64,
            link=link,
        )

    def submit(self, name, prompt, max_tokens, **fields):
        request = CompletionRequest(
            name, token_bytes(list(prompt)), max_tokens, fields.pop("sampling", GREEDY), **fields
        )
        return self.engine.complete(request)

    async def ask(self, prompt, max_tokens=3, **fields):
        return await output_of(self.submit("only", prompt, max_tokens, **fields))

    async def settle(self):
        """Wait until no request runs, no copy is under way, and no tier is about to free slots."""

        async def busy():
            return any(
                (slots.num_idle and slots.num_free < self.spare[tier])
                or any(slot.references or slot.leaving or slot.filling for slot in slots.all())
                for tier, slots in self.manager.tiers.items()
            )

        await eventually(busy, lambda is_busy: not is_busy)
        self.engine.check()

    async def evict(self, tier):
        """Evict all blocks of the tier."""
        slots = self.manager.tiers[tier]
        await self.settle()
        await self.engine._cache._free(tier, slots.num_slots)
        await self.settle()
        for pool in self.pools.get(tier, ()):
            pool.words.zero_()
            if pool.words.is_cuda:  # copies do not wait for what the device does besides
                torch.cuda.synchronize()
        assert slots.num_free == slots.num_slots


async def output_of(generation):
    tokens = []
    async for output in generation:
        tokens += output.token_ids
    assert output.finished is not None
    return tokens, output.finished


@asynccontextmanager
async def running(folder, num_slots=None, *args, **options):
    """args, options: see Served."""
    async with AsyncExitStack() as stack:
        served = Served(folder, stack, num_slots or NUM_SLOTS, *args, **options)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(served.engine.run())
            yield served
            served.engine.stop()


def prompt_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(MODEL.config.vocab_size) for _ in range(length)]


def blocks_of(prompt, salt=""):
    return identities_of(token_bytes(list(prompt)), BLOCK_SIZE, salt)


def hashes_of(prompt):
    """Of its blocks, as the index knows them."""
    return [*map(hash_of, blocks_of(prompt))]


def alone(prompt, max_tokens):
    """Greedy output of the model, with the whole text prefilled again for each token."""
    pool = MemoryPool(MODEL.kv_shape(BLOCK_SIZE), 32)
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(MODEL.prefill([pool.kv], tokens, 0, range(32)).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 24, 61])
async def test_greedy_output_is_that_of_the_model_alone(tmp_path, length):
    prompt = prompt_of(length, length)
    async with running(tmp_path) as served:
        tokens, finished = await served.ask(prompt, 6)

    assert tokens == alone(prompt, 6)
    assert (finished.prompt_tokens, finished.output_tokens) == (length, 6)
    assert finished.finish_reason == "length"


@pytest.mark.parametrize(
    "tiers",
    [(DEVICE,), (DEVICE, HOST), (DEVICE, HOST, DISK), (DEVICE, DISK)],
    ids=lambda tiers: "-".join(tier.name.lower() for tier in tiers),
)
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_logits_with_blocks_reused_from_a_tier_are_bit_identical(
    tmp_path, device, dtype, tp_size, tiers
):
    *above, tier = tiers
    prompt = prompt_of(1, 43)
    model = Llama.random(SIZES["tiny"], seed=0, dtype=dtype, device=device)
    num_slots = {t: NUM_SLOTS[t] for t in tiers}
    async with running(tmp_path, num_slots, spy=Spy(model), tp_size=tp_size) as served:
        cold = await served.ask(prompt)
        first = served.spy.logits[-1]
        for evicted in above:
            await served.evict(evicted)
        # Another request takes slots, so that the blocks are loaded back into other ones.
        other = served.submit("other", prompt_of(2, 21), 30)
        await anext(aiter(other))
        computed = served.spy.computed
        warm = await served.ask(prompt)
        other.cancel()

    assert torch.equal(served.spy.logits[-1], first)
    assert warm[0] == cold[0]
    assert served.spy.computed - computed == 43 - 40
    assert (warm[1].cached_tokens, warm[1].host_tokens, warm[1].disk_tokens) == (
        40,
        40 if tier is HOST else 0,
        40 if tier is DISK else 0,
    )


async def test_reuse_ends_at_a_whole_chunk_and_the_last_token_is_always_computed(tmp_path):
    prompt = prompt_of(1, 32)
    async with running(tmp_path) as served:
        await served.ask(prompt)
        again = (await served.ask(prompt))[1]
        # Five blocks are the same; a chunk is two blocks.
        forked = (await served.ask([*prompt[:20], *prompt_of(3, 12)]))[1]

    assert again.cached_tokens == 24
    assert forked.cached_tokens == 16


async def test_blocks_of_a_partial_chunk_at_a_prompts_end_are_not_published(tmp_path):
    prompt = prompt_of(1, 43)
    async with running(tmp_path / "alone") as served:
        await served.ask(prompt)
        expected = served.spy.logits[-1]
    async with running(tmp_path / "after") as served:
        # The seventh block is computed in a chunk of five tokens, so its bits may differ.
        await served.ask(prompt[:29])
        assert served.fake_publisher.shown.scan(hashes_of(prompt)).total == 6
        await served.ask(prompt)

    assert torch.equal(served.spy.logits[-1], expected)


async def test_generated_tokens_are_computed_again_in_the_next_turn(tmp_path):
    prompt = prompt_of(1, 16)
    async with running(tmp_path) as served:
        tokens, _ = await served.ask(prompt, 16)
        _, next_turn = await served.ask([*prompt, *tokens, 1])

    assert next_turn.cached_tokens == 16


async def test_requests_running_together_get_the_output_each_gets_alone(tmp_path):
    stem = prompt_of(0, 16)
    prompts = [[*stem, *prompt_of(n, 2 * n + 1)] for n in range(10)]
    async with running(tmp_path) as served:
        generations = [served.submit(f"r{n}", p, 5) for n, p in enumerate(prompts)]
        outputs = [await output_of(generation) for generation in generations]
        await served.settle()
        device = served.manager.tiers[DEVICE]
        assert device.num_free + device.num_idle == device.num_slots
        assert served.fake_publisher.shown.scan(hashes_of(stem)).total == 4

    assert [tokens for tokens, _ in outputs] == [alone(prompt, 5) for prompt in prompts]
    assert sum(finished.cached_tokens for _, finished in outputs) > 0


async def test_requests_arriving_together_compute_their_shared_prefix_once(tmp_path):
    stem = prompt_of(0, 40)
    async with running(tmp_path, {DEVICE: 64}) as served:
        together = [served.submit(f"r{n}", [*stem, *prompt_of(n, 3)], 2) for n in range(4)]
        outputs = [await output_of(generation) for generation in together]
        await served.settle()

    assert [finished.cached_tokens for _, finished in outputs] == [0, 40, 40, 40]
    assert served.spy.computed == 40 + 4 * 3


async def test_the_same_seed_draws_the_same_tokens_alone_and_among_other_requests(tmp_path):
    prompt = prompt_of(1, 11)
    drawn = Sampling(temperature=1.0, top_p=0.9, seed=7)
    async with running(tmp_path) as served:
        expected, _ = await served.ask(prompt, 12, sampling=drawn)
        crowd = [served.submit(f"r{n}", prompt_of(n, 9), 12) for n in range(6)]
        again, _ = await served.ask(prompt, 12, sampling=drawn)
        other, _ = await served.ask(prompt, 12, sampling=replace(drawn, seed=8))
        for generation in crowd:
            await output_of(generation)

    assert again == expected
    assert other != expected


async def test_generation_ends_at_an_end_of_sequence_token_unless_ignore_eos_is_set(tmp_path):
    prompt = prompt_of(1, 9)
    tokens = alone(prompt, 8)
    end = tokens.index(tokens[3])
    async with running(tmp_path) as served:
        served.spy.config = replace(MODEL.config, eos_token_ids=(tokens[3],))
        short, finished = await served.ask(prompt, 8)
        long, _ = await served.ask(prompt, 8, ignore_eos=True)

    assert short == tokens[: end + 1]
    assert finished.finish_reason == "stop"
    assert long == tokens


def collected(served):
    """The samples that Prometheus collects, by name and labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry_of(served.engine).collect()
        for sample in family.samples
    }


async def test_metrics_show_how_long_evicted_blocks_had_been_idle(tmp_path):
    idle = ("kvroute_engine_kv_idle_before_evict_seconds",)
    async with running(tmp_path, {DEVICE: 40}) as served:
        await served.ask(prompt_of(1, 43))
        assert collected(served)[idle] == 0
        served.now_s += 60
        await served.evict(DEVICE)
        assert served.engine.metrics().kv_idle_before_evict_s == 60
        assert collected(served)[idle] == 60


async def test_after_a_failed_load_computing_starts_after_the_last_good_chunk(tmp_path):
    prompt = prompt_of(1, 43)
    async with running(tmp_path) as served:
        cold, _ = await served.ask(prompt)
        for tier in (DEVICE, HOST):
            await served.evict(tier)
        slot = served.manager.tiers[DISK].find(blocks_of(prompt)[5])
        assert slot is not None
        with (tmp_path / "blocks").open("r+b") as file:
            file.seek(slot.block_id * 4096)
            spoilt = bytes(255 - byte for byte in file.read(1))
            file.seek(slot.block_id * 4096)
            file.write(spoilt)
        warm, _ = await served.ask(prompt)
        await served.settle()

    assert warm == cold
    metrics = collected(served)
    assert metrics["kvroute_engine_kv_block_events_total", "fallbacks"] == 1
    assert metrics["kvroute_engine_kv_block_events_total", "recomputed"] == 10 - 4
    assert metrics["kvroute_engine_kv_blocks", "total"] == NUM_SLOTS[DEVICE]
    counts = served.manager.counts
    # The sixth of ten blocks is bad; a chunk is two blocks.
    assert (counts.fallbacks, counts.recomputed) == (1, 10 - 4)


async def test_a_request_waits_until_it_fits_and_is_not_overtaken(tmp_path, monkeypatch):
    async with running(tmp_path, {DEVICE: 16}) as served:
        prepare = mock.Mock(wraps=served.manager.prepare)
        monkeypatch.setattr(served.manager, "prepare", prepare)
        first = served.submit("first", prompt_of(1, 33), 20)
        second = served.submit("second", prompt_of(2, 33), 20)
        later = []
        async for output in first:
            if output.finished is None:
                later.append(served.submit(f"later {len(later)}", prompt_of(3, 3), 1))
                metrics = served.engine.metrics()
                assert metrics.request_active_slots == 1
                assert metrics.num_requests_waiting == 1 + len(later)
                # An arrival makes no room, and looking for some takes long for a long prompt.
                assert prepare.call_count <= 2
        assert len(later) > 2
        for generation in (*later, second):
            await output_of(generation)
        await served.settle()


async def test_a_request_that_waits_for_room_holds_up_no_other_once_it_is_cancelled(tmp_path):
    async with running(tmp_path, {DEVICE: 16}) as served:
        first = served.submit("first", prompt_of(1, 9), 46)
        second = served.submit("second", prompt_of(2, 33), 20)
        third = served.submit("third", prompt_of(3, 3), 1)
        await anext(aiter(first))
        second.cancel()
        await output_of(third)
        assert served.engine.metrics().request_active_slots == 1


async def test_the_chunk_that_a_cancelled_request_was_in_is_reused(tmp_path):
    spy = SlowSpy(MODEL)
    prompt = prompt_of(1, 17)
    async with running(tmp_path, spy=spy) as served:
        generation = served.submit("r", prompt, 1)
        assert await asyncio.to_thread(spy.begun.wait, 10)
        generation.cancel()
        spy.may_end.set()
        await served.settle()
        assert served.manager.match(blocks_of(prompt)) == [DEVICE] * 2


async def test_a_finished_request_that_is_cancelled_leaves_the_next_of_its_id_alone(tmp_path):
    async with running(tmp_path) as served:
        first = served.submit("same", [1], 1)
        await output_of(first)
        second = served.submit("same", [2], 3)
        first.cancel()
        tokens, _ = await output_of(second)
        assert len(tokens) == 3


async def test_cancelled_requests_leave_nothing_behind(tmp_path):
    rng = random.Random(0)
    stems = [prompt_of(n, 24) for n in range(4)]
    async with running(tmp_path) as served:
        for n in range(150):
            generation = served.submit(
                f"r{n}", [*rng.choice(stems), *prompt_of(n, rng.randrange(9))], 9
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.choice((0.0, 0.001, 0.01, 1.0))):
                    await output_of(generation)
            if rng.random() < 0.5:
                generation.cancel()
            else:
                asyncio.get_running_loop().call_later(rng.random() * 0.02, generation.cancel)
        async with asyncio.timeout(20):
            while served.engine._sequences:
                for sequence in list(served.engine._sequences.values()):
                    sequence.generation.cancel()
                await asyncio.sleep(0.01)
        await served.settle()
        device = served.manager.tiers[DEVICE]
        assert device.num_free + device.num_idle == device.num_slots
        assert served.engine.metrics().kv_active_blocks == 0


async def test_finished_requests_are_freed_without_the_cycle_collector(tmp_path):
    """The cycle collector rarely runs, and prompts are long."""
    async with running(tmp_path) as served:
        gc.collect()
        gc.disable()
        try:
            for n in range(5):
                await served.ask(prompt_of(n, 9))
                served.submit("waits", prompt_of(n, 9), 3).cancel()
                generation = served.submit("runs", prompt_of(n, 9), 9)
                await anext(aiter(generation))
                generation.cancel()
            await served.ask([1])
            alive = [s.request.request_id for s in gc.get_objects() if type(s) is TokenSequence]
        finally:
            gc.enable()

    # The request admitted last, and the one that `generation` refers to.
    assert sorted(alive) == ["only", "runs"]


async def test_requests_may_arrive_before_the_engine_runs(tmp_path):
    async with running(tmp_path) as served:

        async def submit():
            return [served.submit(f"r{n}", prompt_of(n, 9), 2) for n in range(3)]

        for generation in await asyncio.create_task(submit()):
            await output_of(generation)


async def test_a_request_cancelled_while_room_is_made_for_it_holds_up_no_other(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("workers.kv.cache.WITHDRAW_TIMEOUT_S", 3600.0)
    async with running(tmp_path, {DEVICE: 16}) as served:
        await served.ask(prompt_of(1, 50))
        await served.settle()
        served.fake_publisher.confirms.clear()
        large = served.submit("large", prompt_of(2, 50), 1)

        async def leaving():
            return served.manager.tiers[DEVICE].num_leaving

        await eventually(leaving)
        assert served.engine.metrics().kv_active_blocks == 0
        small = served.submit("small", [1], 1)
        large.cancel()
        await asyncio.wait_for(output_of(small), 20)
        again = served.submit("large", prompt_of(2, 50), 1)
        await asyncio.sleep(0)
    # Stopped while room was being made for it.
    with pytest.raises(EngineStoppedError):
        await output_of(again)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_requests_that_can_never_run_are_refused(tmp_path):
    vocabulary = MODEL.config.vocab_size
    async with running(tmp_path) as served:
        assert served.engine.max_context_tokens == 128
        with pytest.raises(PromptTooLargeError, match="KV pool holds 128"):
            served.submit("r", prompt_of(1, 100), 29)
        with pytest.raises(PromptTooLargeError, match="the model takes"):
            served.submit("r", [1], MODEL.config.max_position_embeddings)
        with pytest.raises(InvalidRequest, match=f"{vocabulary} is not a token id"):
            served.submit("r", [1, vocabulary], 1)
        generation = served.submit("r", [1], 100)
        with pytest.raises(InvalidRequest, match="'r' is already in use"):
            served.submit("r", [2], 1)
        generation.cancel()
        await output_of(served.submit("r", [2], 1))


async def test_no_more_than_max_num_seqs_requests_run_at_once(tmp_path):
    running_at_once = 0
    async with running(tmp_path, {DEVICE: 96}) as served:
        crowd = [served.submit(f"r{n}", [n + 1], 20) for n in range(12)]
        async for _ in crowd[0]:
            active = served.engine.metrics().request_active_slots
            running_at_once = max(running_at_once, active)
        for generation in crowd[1:]:
            await output_of(generation)

    assert running_at_once == 8


async def test_requests_beyond_max_waiting_are_refused(tmp_path):
    async with running(tmp_path, {DEVICE: 8}) as served:
        waiting = [served.submit(f"r{n}", [1], 30) for n in range(64)]
        with pytest.raises(QueueFullError, match="64 requests are already waiting"):
            served.submit("late", [1], 1)
        for generation in waiting:
            generation.cancel()
        await output_of(served.submit("late", [1], 1))


async def test_requests_unfinished_when_the_engine_stops_end_with_an_error(tmp_path):
    async with running(tmp_path) as served:
        generation = served.submit("r", [1], 100)
        waiting = served.submit("s", [1], 100)
    for unfinished in (generation, waiting):
        with pytest.raises(EngineStoppedError):
            await output_of(unfinished)
        unfinished.cancel()
    with pytest.raises(EngineStoppedError):
        served.submit("t", [1], 1)


async def test_blocks_of_a_waiting_request_are_prefetched(tmp_path):
    prompt = prompt_of(1, 43)
    async with running(tmp_path, {DEVICE: 40, HOST: 32}) as served:
        await served.ask(prompt)
        await served.evict(DEVICE)
        crowd = [served.submit(f"r{n}", prompt_of(n, 3), 4) for n in range(9)]
        last = served.submit("last", prompt, 3)
        for generation in crowd:
            await output_of(generation)
        _, finished = await output_of(last)

    assert (finished.cached_tokens, finished.host_tokens) == (40, 0)


async def test_only_the_next_waiting_requests_are_prefetched_for_and_each_once(
    tmp_path, monkeypatch
):
    prompts, spy = [prompt_of(n, 43) for n in range(6)], SlowSpy(MODEL)
    spy.may_end.set()
    async with running(tmp_path, {DEVICE: 240, HOST: 120}, spy=spy) as served:
        for prompt in prompts:
            await served.ask(prompt)
        await served.evict(DEVICE)
        spy.may_end.clear()  # or the crowd may leave before anybody looks
        cache, asked = served.engine._cache, Counter[BlockIdentity]()
        prefetch = cache.prefetch

        def counted(chain):
            asked.update(chain[:1])
            return prefetch(chain)

        monkeypatch.setattr(cache, "prefetch", counted)
        crowd = [served.submit(f"c{n}", prompt_of(10 + n, 3), 40) for n in range(8)]
        waiting = [served.submit(f"w{n}", prompt, 3) for n, prompt in enumerate(prompts)]

        async def loaded():
            return served.manager.counts.loaded

        # The first waiting request and the two behind it, of 10 blocks each.
        await eventually(loaded, lambda count: count >= 30)
        await asyncio.sleep(0.02)
        assert await loaded() == 30
        spy.may_end.set()
        for generation in [*crowd, *waiting]:
            await output_of(generation)
        assert await loaded() == 60
    assert set(asked.values()) == {1}


async def test_a_tier_slower_than_computing_is_not_loaded_from_until_retried_later(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("workers.engines.torch.admission.REVISED_S", 0.01)
    prompt = prompt_of(1, 43)
    async with running(tmp_path, {DEVICE: 40, HOST: 32}) as served:
        engine = served.engine
        await served.ask(prompt)
        await served.evict(DEVICE)
        assert (await served.ask(prompt))[1].host_tokens == 40
        engine._admission.observe_load(HOST, 10, 60.0)  # as if the load had taken a minute

        async def loads():
            return engine._manager.admission.loads(HOST)

        await eventually(loads, lambda is_loaded_from: not is_loaded_from)
        await served.evict(DEVICE)
        assert (await served.ask(prompt))[1].cached_tokens == 0
        monkeypatch.setattr("workers.engines.torch.admission.TIER_RETRIED_S", 0.0)
        await eventually(loads)
        monkeypatch.setattr("workers.engines.torch.admission.TIER_RETRIED_S", 60.0)
        await served.evict(DEVICE)
        assert (await served.ask(prompt))[1].host_tokens == 40
        assert engine.speed().host_s_per_token < 0.1
        await asyncio.sleep(0.05)
        assert await loads()


async def test_metrics_and_speed_reflect_the_work_done(tmp_path):
    async with running(tmp_path) as served:
        generation = served.submit("r", prompt_of(1, 16), 50)
        outputs = aiter(generation)
        await anext(outputs)
        metrics = served.engine.metrics()
        generation.cancel()
        prompt = prompt_of(2, 43)
        await served.ask(prompt)
        await served.evict(DEVICE)
        await served.ask(prompt)
        speed = served.engine.speed()

    assert (metrics.request_active_slots, metrics.kv_active_blocks) == (1, 17)
    assert served.engine.metrics().gpu_prefix_cache_hit_rate == pytest.approx(40 / (16 + 43 + 43))
    assert speed.host_s_per_token != DEFAULT_SPEED.host_s_per_token
    assert speed.mean_output_tokens < 300
