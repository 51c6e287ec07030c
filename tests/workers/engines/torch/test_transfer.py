"""Prompts that one torch engine computes and another goes on from, over a real connection."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch

from app.core.hashing import token_bytes
from app.core.types import Tier
from app.core.worker_report import DEFAULT_SPEED
from app.http.server import listen
from tests.eventually import eventually
from tests.workers.engines.torch.test_engine import (
    BLOCK_SIZE,
    MODEL,
    NUM_SLOTS,
    Spy,
    alone,
    blocks_of,
    hashes_of,
    output_of,
    prompt_of,
    running,
)
from tests.workers.kv.bad_link import HeldBytes, bad_link, cut, flipped
from workers.engines.base import EngineStoppedError
from workers.engines.torch.admission import AdaptiveAdmission
from workers.engines.torch.llama import SIZES, Llama
from workers.kv import memory
from workers.kv.transfer.kv_lease import KvPort
from workers.kv.transfer.tcp import offered_frame

DEVICE, HOST, DISK = Tier
KIND = {"model": "tiny"}
PROMPT = prompt_of(1, 43)
WHOLE = 40
"""Tokens of the prompt's whole chunks."""
LEASE_S = 60.0
LAYER_BYTES = MODEL.kv_shape(BLOCK_SIZE).layer_bytes


@asynccontextmanager
async def linked(folder, *, spies=None, tp_sizes=(1, 1), **options):
    """A source and a target, which can reach each other."""
    async with AsyncExitStack() as stack:
        engines = []
        sides = zip(("source", "target"), spies or (None, None), tp_sizes, strict=True)
        for name, spy, tp_size in sides:
            link = KvPort(stack.enter_context(listen("127.0.0.1", 0)), "127.0.0.1", KIND)
            options |= {"spy": spy, "link": link, "tp_size": tp_size}
            running_one = running(folder / name, NUM_SLOTS, **options)
            engines.append(await stack.enter_async_context(running_one))
        await eventually(lambda: _all_run(engines))
        yield engines[0], engines[1]


async def _all_run(engines):
    return all(served.engine.running for served in engines)


async def kept_by(served, prompt=PROMPT, keep_s=LEASE_S):
    """Where the prompt's KV is kept once this engine has computed it."""
    generation = served.submit("split", prompt, 1, keep_s=keep_s)
    await output_of(generation)
    assert generation.kept is not None
    return generation.kept


async def all_let_go(served):
    await served.settle()
    assert served.engine._transfer is not None
    assert not served.engine._transfer._kept.tables


@asynccontextmanager
async def over(alter, kept):
    """The same source, over a bad link."""
    async with bad_link(kept.port, alter) as port:
        yield replace(kept, port=port)


def first_group_bytes(num_blocks=WHOLE // BLOCK_SIZE):
    """What a source sends before its second group of layers, with one layer a group."""
    offered = offered_frame(num_blocks)
    return len(offered) + num_blocks * (8 + LAYER_BYTES)


@pytest.fixture
def _one_layer_a_group(monkeypatch):
    monkeypatch.setattr(memory, "GROUP_BYTES", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_logits_after_a_split_are_those_of_one_worker_alone(tmp_path, device, dtype):
    model = Llama.random(SIZES["tiny"], seed=0, dtype=dtype, device=device)
    async with running(tmp_path / "alone", spy=Spy(model)) as one:
        expected = await one.ask(PROMPT, 6)
        logits = one.spy.logits[-1]
    async with linked(tmp_path, spies=(Spy(model), Spy(model))) as (source, target):
        kept = await kept_by(source)
        tokens, finished = await target.ask(PROMPT, 6, source=kept)
        await all_let_go(source)

    assert kept.num_tokens == WHOLE
    assert tokens == expected[0]
    assert torch.equal(target.spy.logits[-1], logits)
    assert target.spy.computed == len(PROMPT) - WHOLE
    assert (finished.cached_tokens, finished.host_tokens) == (WHOLE, 0)
    assert target.fake_publisher.shown.scan(hashes_of(PROMPT)).total == WHOLE // BLOCK_SIZE


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "tp_sizes",
    [
        pytest.param(sizes, marks=() if sizes in {(1, 2), (2, 1), (4, 2)} else pytest.mark.slow)
        for sizes in product((1, 2, 4), repeat=2)
    ],
    ids=str,
)
async def test_logits_are_those_of_one_rank_however_source_and_target_split_the_heads(
    tmp_path, tp_sizes, device
):
    config = replace(SIZES["tiny"], num_kv_heads=4)
    model = Llama.random(config, seed=0, dtype=torch.float32, device=device)
    held = prompt_of(7, 43)
    longer = [*held[:33], *prompt_of(9, 30)]
    expected = {}
    async with running(tmp_path / "alone", spy=Spy(model)) as one:
        for name, prompt in (("split", PROMPT), ("fetch", longer)):
            expected[name] = (await one.ask(prompt, 6))[0], one.spy.logits[-1]

    async with linked(tmp_path, spies=(Spy(model), Spy(model)), tp_sizes=tp_sizes) as engines:
        source, target = engines
        await source.ask(held)
        await source.evict(DEVICE)
        kept = {
            "split": await kept_by(source),
            "fetch": await source.engine.hand_on(token_bytes(longer), LEASE_S),
        }
        for name, prompt, reused in (("split", PROMPT, WHOLE), ("fetch", longer, 32)):
            tokens, finished = await target.ask(prompt, 6, source=kept[name])
            assert finished.cached_tokens == reused
            assert tokens == expected[name][0]
            assert torch.equal(target.spy.logits[-1], expected[name][1])


async def test_a_target_that_lacks_nothing_has_its_source_let_go(tmp_path):
    async with linked(tmp_path) as (source, target):
        await target.ask(PROMPT, 6)
        _, finished = await target.ask(PROMPT, 6, source=await kept_by(source))
        assert finished.cached_tokens == WHOLE
        assert source.engine._transfer is not None
        kept = source.engine._transfer._kept
        await eventually(lambda: _value(len(kept.tables)), lambda number: not number)
        await all_let_go(source)


async def _value(value):
    return value


async def test_the_one_token_of_a_source_says_nothing_of_how_long_answers_are(tmp_path):
    async with linked(tmp_path) as (source, target):
        kept = await kept_by(source)
        await target.ask(PROMPT, 6, source=kept)
        assert target.engine.speed().mean_output_tokens < 300
        await all_let_go(source)
        assert source.engine.speed().mean_output_tokens == 300


async def test_the_control_another_prompts_blocks_change_the_logits(tmp_path):
    async with linked(tmp_path) as (source, target):
        kept = await kept_by(source, prompt_of(2, 43))
        # As if the source had another prompt's blocks under this prompt's hashes.
        (hold,) = source.engine._transfer._kept._holds.values()
        hold.table.chain[:] = blocks_of(PROMPT)
        tokens, _ = await target.ask(PROMPT, 6, source=kept)
        hold.table.chain[:] = blocks_of(prompt_of(2, 43))

    assert tokens != alone(PROMPT, 6)


@pytest.mark.parametrize("above", [(), (DEVICE,), (DEVICE, HOST)], ids=["device", "host", "disk"])
async def test_a_held_prefix_is_handed_on_from_any_tier_without_computing(tmp_path, above):
    longer = [*PROMPT[:33], *prompt_of(9, 30)]
    async with linked(tmp_path) as (source, target):
        await source.ask(PROMPT)
        for tier in above:
            await source.evict(tier)
        computed = source.spy.computed
        kept = await source.engine.hand_on(token_bytes(longer), LEASE_S)
        assert kept is not None
        tokens, finished = await target.ask(longer, 6, source=kept)
        await all_let_go(source)

    assert source.spy.computed == computed
    assert kept.num_tokens == finished.cached_tokens == 32
    assert target.spy.computed == 63 - 32
    assert tokens == alone(longer, 6)


async def test_nothing_held_is_handed_on_as_nothing(tmp_path):
    async with linked(tmp_path) as (source, _):
        assert await source.engine.hand_on(token_bytes(PROMPT), LEASE_S) is None
        await all_let_go(source)


async def test_a_request_gets_the_slots_of_a_prefix_that_took_too_long_to_load(
    tmp_path, monkeypatch
):
    async with linked(tmp_path) as (source, _):
        await source.ask(PROMPT)
        cache = source.engine._cache
        admit, is_held = cache.admit, asyncio.Event()

        async def slow(prefix, num_blocks):
            table = await admit(prefix, num_blocks)
            is_held.set()
            try:
                await asyncio.Event().wait()
            finally:
                cache.release(table)
            return table

        monkeypatch.setattr(cache, "admit", slow)
        handed_on = asyncio.create_task(source.engine.hand_on(token_bytes(PROMPT), LEASE_S))
        await is_held.wait()
        monkeypatch.setattr(cache, "admit", admit)
        most = prompt_of(5, NUM_SLOTS[DEVICE] * BLOCK_SIZE - 3)
        async with asyncio.timeout(30):
            await source.ask(most)
        assert await handed_on is None


async def test_what_the_target_holds_itself_does_not_travel(tmp_path):
    async with linked(tmp_path) as (source, target):
        await target.ask(PROMPT[:25])
        kept = await kept_by(source)
        computed = target.spy.computed
        sent = []

        def recorded(_, data):
            sent.append(data)
            return data

        async with over(recorded, kept) as watched:
            tokens, finished = await target.ask(PROMPT, 6, source=watched)

    num_lacking = (WHOLE - 24) // BLOCK_SIZE
    contents = num_lacking * (8 + MODEL.config.num_layers * LAYER_BYTES)
    assert sum(map(len, sent)) == len(offered_frame(num_lacking)) + contents
    assert finished.cached_tokens == WHOLE
    assert target.spy.computed - computed == len(PROMPT) - WHOLE
    assert tokens == alone(PROMPT, 6)


@pytest.mark.usefixtures("_one_layer_a_group")
@pytest.mark.parametrize(
    ("alter", "num_fetched"),
    [
        # In the second layer of the sixth of ten blocks; a chunk is two blocks.
        (flipped(first_group_bytes() + 10 * 8 + 5 * LAYER_BYTES + 7), 16),
        (cut(first_group_bytes() + 99), 0),
        (cut(0), 0),
    ],
    ids=["flipped", "cut", "gone"],
)
@pytest.mark.parametrize("begins_early", [False, True])
async def test_what_does_not_arrive_whole_is_computed(
    tmp_path, alter, num_fetched, begins_early, monkeypatch
):
    if begins_early:
        monkeypatch.setattr(AdaptiveAdmission, "compute_s", lambda *_: 1e9)
    async with linked(tmp_path) as (source, target):
        kept = await kept_by(source)
        async with over(alter, kept) as bad:
            tokens, finished = await target.ask(PROMPT, 6, source=bad)
        logits = target.spy.logits[-1]
        await target.settle()
        events = target.engine.block_events()
        num_blocks = num_fetched // BLOCK_SIZE
        assert (events["fetched"], events["lost"]) == (num_blocks, 10 - num_blocks)
        await source.ask(PROMPT)
        await all_let_go(source)

    assert tokens == alone(PROMPT, 6)
    assert torch.equal(logits, source.spy.logits[-1])
    assert finished.cached_tokens == num_fetched
    assert target.fake_publisher.shown.scan(hashes_of(PROMPT)).total == WHOLE // BLOCK_SIZE


async def kept_by_now(served):
    assert served.engine._transfer is not None
    return served.engine._transfer.num_kept


class LayerSpy(Spy):
    """Sets `reached`, on the event loop, before a layer is computed that needs what is fetched."""

    def __init__(self, layer):
        super().__init__(MODEL)
        self.layer = layer
        self.reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def prefill(self, kv, tokens, start, block_ids, *before):
        def before_layer(layer):
            if layer == self.layer:
                self._loop.call_soon_threadsafe(self.reached.set)
            before[0](layer)

        return super().prefill(kv, tokens, start, block_ids, *([before_layer] if before else []))


@pytest.mark.usefixtures("_one_layer_a_group")
async def test_the_first_layers_are_used_while_the_last_ones_travel(tmp_path, monkeypatch):
    monkeypatch.setattr(AdaptiveAdmission, "compute_s", lambda *_: 1e9)
    spy = LayerSpy(1)
    async with linked(tmp_path, spies=(Spy(MODEL), spy)) as (source, target):
        kept = await kept_by(source)
        async with over(HeldBytes(first_group_bytes(), spy.reached), kept) as slow:
            tokens, finished = await target.ask(PROMPT, 6, source=slow)

    assert spy.reached.is_set()
    assert finished.cached_tokens == WHOLE
    assert tokens == alone(PROMPT, 6)


async def test_others_are_computed_while_a_request_waits_for_what_it_fetches(tmp_path):
    async with linked(tmp_path) as (source, target):
        kept = await kept_by(source)
        may_go = asyncio.Event()
        async with over(HeldBytes(0, may_go), kept) as slow:
            waiting = target.submit("waiting", PROMPT, 3, source=slow)
            tokens, _ = await target.ask(prompt_of(3, 20), 3)
            may_go.set()
            fetched, finished = await output_of(waiting)

    assert tokens == alone(prompt_of(3, 20), 3)
    assert fetched == alone(PROMPT, 3)
    assert finished.cached_tokens == WHOLE


@pytest.mark.parametrize("comes", [True, False])
async def test_a_prefix_that_another_request_fetches_is_waited_for(tmp_path, comes):
    longer = [*PROMPT[:WHOLE], *prompt_of(4, 9)]
    async with linked(tmp_path) as (source, target):
        kept = await kept_by(source)
        may_go = asyncio.Event()
        async with over(HeldBytes(0, may_go), kept) as slow:
            fetching = target.submit("fetching", PROMPT, 3, source=slow)
            waiting = target.submit("waiting", longer, 3)
            await target.ask(prompt_of(3, 20), 3)
            assert target.spy.computed < 2 * 20
            if comes:
                may_go.set()
            else:
                fetching.cancel()
            tokens, finished = await output_of(waiting)
            may_go.set()

    assert tokens == alone(longer, 3)
    assert finished.cached_tokens == (WHOLE if comes else 0)


async def test_a_request_that_is_cancelled_while_it_fetches_frees_its_slots_after_that(tmp_path):
    async with linked(tmp_path) as (source, target):
        kept = await kept_by(source)
        may_go = asyncio.Event()
        async with over(HeldBytes(0, may_go), kept) as slow:
            waiting = target.submit("waiting", PROMPT, 3, source=slow)
            await eventually(_prefilling(target))
            waiting.cancel()
            assert await _prefilling(target)()
            may_go.set()
            await target.settle()
            await all_let_go(source)
        assert not await _prefilling(target)()


async def test_a_request_that_is_cancelled_before_it_fetches_has_its_source_let_go(tmp_path):
    async with linked(tmp_path) as (source, target):
        target.submit("waiting", PROMPT, 3, source=await kept_by(source)).cancel()
        await all_let_go(source)


def _prefilling(served):
    async def count():
        return len(served.engine._prefills)

    return count


async def test_a_request_waits_for_the_room_of_what_is_kept(tmp_path):
    async with linked(tmp_path) as (source, _):
        prompts = [prompt_of(n, 43) for n in range(2, 4)]
        for n, prompt in enumerate(prompts):
            await output_of(source.submit(f"kept {n}", prompt, 1, keep_s=0.3))
        # Twenty of 32 slots are kept.
        tokens, _ = await source.ask(prompt_of(4, 60), 4)

    assert tokens == alone(prompt_of(4, 60), 4)


async def test_blocks_that_wait_to_be_fetched_are_no_load(tmp_path):
    async with linked(tmp_path) as (source, _):
        await kept_by(source)
        assert await kept_by_now(source) == WHOLE // BLOCK_SIZE
        assert source.engine.metrics().kv_active_blocks == 0
        # Another request uses them as well.
        running_on = source.submit("other", PROMPT, 20)
        await anext(aiter(running_on))
        assert await kept_by_now(source) == 0
        assert source.engine.metrics().kv_active_blocks == -(-(len(PROMPT) + 20) // BLOCK_SIZE)
        running_on.cancel()


async def test_blocks_that_nobody_fetches_are_let_go_when_the_lease_ends(tmp_path):
    async with linked(tmp_path) as (source, target):
        kept = await kept_by(source, keep_s=1e-3)
        await all_let_go(source)
        tokens, finished = await target.ask(PROMPT, 6, source=kept)

    assert finished.cached_tokens == 0
    assert tokens == alone(PROMPT, 6)


async def test_a_transfer_is_learned_and_does_not_count_as_computed(tmp_path):
    async with linked(tmp_path) as (source, target):
        unlearned = target.engine.speed()
        assert unlearned.transfer_s == DEFAULT_SPEED.transfer_s
        await target.ask(PROMPT, source=await kept_by(source))
        speed = target.engine.speed()

    assert speed.transfer_s != DEFAULT_SPEED.transfer_s
    assert target.spy.computed == len(PROMPT) - WHOLE


async def test_an_engine_that_stops_while_blocks_travel_ends(tmp_path):
    async with (
        linked(tmp_path) as (source, target),
        over(HeldBytes(0, asyncio.Event()), await kept_by(source)) as slow,
    ):
        waiting = target.submit("waiting", PROMPT, 3, source=slow)
        await eventually(_prefilling(target))
        target.engine.stop()
        with pytest.raises(EngineStoppedError):
            await output_of(waiting)
