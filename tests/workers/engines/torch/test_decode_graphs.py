"""Decoding by graphs gives what decoding without them gives, as sequences come, grow and go."""

import random
import threading

import pytest
import torch
from torch import Tensor

from tests.workers.engines.torch import test_engine
from tests.workers.engines.torch.recorded_graph import RecordedGraph
from tests.workers.engines.torch.test_engine import CHUNK, MODEL, alone, output_of, prompt_of
from tests.workers.engines.torch.test_llama import BLOCK_SIZE, NUM_BLOCKS, pool_of, prompt, slots
from tests.workers.engines.torch.test_soak import soak
from workers.engines.torch import decode_graphs
from workers.engines.torch.decode_graphs import DecodeGraphs, GraphSize, recorder, size_of
from workers.engines.torch.llama import SIZES, Llama
from workers.kv.memory import MemoryPool

Batch = tuple[list[int], list[int], list[list[int]]]


def batch_of(model, kv, lengths, room=1):
    """Sequences of these lengths, computed, and a next token of each, with room for so many."""
    blocks = slots(*(length + room for length in lengths))
    for length, block_ids in zip(lengths, blocks, strict=True):
        model.prefill([kv], prompt(length, 256, seed=length), 0, block_ids)
    return list(range(1, len(lengths) + 1)), list(lengths), blocks


class Recorded:
    """Counts what is recorded."""

    def __init__(self):
        self.times = 0

    def record(self, work):
        self.times += 1
        return RecordedGraph.record(work)


def test_sizes_are_no_more_than_a_quarter_larger_than_what_is_asked_for():
    assert size_of([0], 16) == GraphSize(1, 8)
    assert size_of([1_024], 16) == GraphSize(1, 80)  # its 65th block
    assert size_of([1_023] * 16, 16) == GraphSize(16, 64)
    assert size_of([3, 200, 7], 4) == GraphSize(4, 56)
    for position in range(64 * 16, 4096 * 16, 7):
        size = size_of([position], 16)
        assert size is not None
        assert position // 16 < size.blocks <= 1.25 * (position // 16 + 1)


def test_a_batch_that_keeps_the_device_busy_anyway_has_no_graph():
    assert size_of([4_095] * 16, 16) == GraphSize(16, 256)
    assert size_of([4_096] * 16, 16) is None
    assert size_of([0] * 64, 16) == GraphSize(64, 8)
    assert size_of([0] * 65, 16) is None


@pytest.mark.parametrize("lengths", [[1], [3, 40], [120, 5, 33, 1, 17], [7] * 8], ids=str)
def test_a_graph_gives_the_logits_and_the_kv_that_the_model_gives(lengths):
    pools = pool_of(MODEL), pool_of(MODEL)
    graphs = DecodeGraphs(MODEL, [pools[0].kv], RecordedGraph.record)
    for pool in pools:
        tokens, positions, blocks = batch_of(MODEL, pool.kv, lengths)
    for _ in range(2):  # recorded, then repeated for other tokens
        torch.testing.assert_close(
            graphs.decode(tokens, positions, blocks),
            MODEL.decode([pools[1].kv], tokens, positions, blocks),
            rtol=0,
            atol=1e-5,
        )
        torch.testing.assert_close(pools[0].kv, pools[1].kv, rtol=0, atol=1e-5)
        tokens = [token + 50 for token in tokens]


def test_a_graph_follows_sequences_that_grow_leave_and_come_in_any_order():
    pools = pool_of(MODEL), pool_of(MODEL)
    recorded = Recorded()
    graphs = DecodeGraphs(MODEL, [pools[0].kv], recorded.record)
    for pool in pools:
        tokens, positions, blocks = batch_of(MODEL, pool.kv, [30, 9, 2, 14], room=25)
    rng = random.Random(0)
    for _ in range(24):
        rows = rng.sample(range(4), rng.randint(1, 4))
        batch = tuple([of[row] for row in rows] for of in (tokens, positions, blocks))
        torch.testing.assert_close(
            graphs.decode(*batch), MODEL.decode([pools[1].kv], *batch), rtol=0, atol=1e-5
        )
        for row in rows:
            positions[row] += 1
            tokens[row] = rng.randrange(256)
    assert max(positions) // BLOCK_SIZE >= 8 > 30 // BLOCK_SIZE  # so there were two lengths
    assert recorded.times <= 3 * 2, "sizes that had come before were recorded again"


def test_no_other_block_is_written_and_nothing_in_it_matters():
    pool = pool_of(MODEL)
    tokens, positions, blocks = batch_of(MODEL, pool.kv, [37, 4, 20])
    expected = MODEL.decode([pool.kv], tokens, positions, blocks)
    others = [n for n in range(NUM_BLOCKS) if n not in {m for own in blocks for m in own}]
    pool.kv[others] = torch.nan
    graphs = DecodeGraphs(MODEL, [pool.kv], RecordedGraph.record)
    for _ in range(2):
        logits = graphs.decode(tokens, positions, blocks)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert pool.kv[others].isnan().all()


def test_the_heads_may_be_split_among_ranks_of_the_same_device():
    whole = pool_of(MODEL)
    ranks = [MemoryPool(rank, NUM_BLOCKS) for rank in MODEL.kv_shape(BLOCK_SIZE).split(2)]
    batch = batch_of(MODEL, whole.kv, [9, 5])
    for rank, heads in zip(ranks, whole.kv.chunk(2, -2), strict=True):
        rank.kv.copy_(heads)
    graphs = DecodeGraphs(MODEL, [rank.kv for rank in ranks], RecordedGraph.record)
    torch.testing.assert_close(
        graphs.decode(*batch), MODEL.decode([whole.kv], *batch), rtol=0, atol=1e-5
    )


def test_where_nothing_can_be_recorded_it_is_tried_once_and_decoded_without_graphs(caplog):
    recorded = Recorded()

    def fails(work):
        recorded.record(work)
        raise RuntimeError("no memory is left\nC++ stack")

    pool = pool_of(MODEL)
    batch = batch_of(MODEL, pool.kv, [9, 5])
    expected = MODEL.decode([pool.kv], *batch)
    graphs = DecodeGraphs(MODEL, [pool.kv], fails)
    assert all(torch.equal(graphs.decode(*batch), expected) for _ in range(2))
    assert recorded.times == 1
    assert caplog.messages == ["decoding without CUDA graphs: no memory is left"]


def test_graphs_are_of_one_cuda_device():
    cpu, one, other = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    assert recorder({cpu}) is None
    assert recorder({one, other}) is None


def test_the_stand_in_refuses_what_a_device_would_have_to_be_waited_for():
    numbers = torch.ones(3)
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        RecordedGraph(lambda: numbers[numbers.sum().item() :])
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        RecordedGraph(lambda: numbers + torch.tensor([1.0, 2.0, 3.0]))


def test_the_stand_in_repeats_on_the_same_memory_and_leaves_only_that():
    given, taken, kept = torch.ones(2), torch.zeros(2), list[Tensor]()

    def work():
        kept.append(given * 3)
        taken.copy_(kept[0] + 1)

    replay = RecordedGraph.record(work)
    given.fill_(5.0)
    replay()
    assert taken.tolist() == [16.0, 16.0]
    assert len(kept) == 1
    assert kept[0].isnan().all()


@pytest.fixture
def with_graphs(monkeypatch):
    """Engines decode by graphs on a CPU too."""
    recorded = Recorded()
    monkeypatch.setattr(decode_graphs, "recorder", lambda _: recorded.record)
    return recorded


async def test_requests_running_together_get_the_output_each_gets_alone(tmp_path, with_graphs):
    prompts = [prompt_of(n, length) for n, length in enumerate((3, 21, 2 * CHUNK, 9, 13))]
    async with test_engine.running(tmp_path) as served:
        together = [served.submit(f"r{n}", tokens, 6 + n) for n, tokens in enumerate(prompts)]
        outputs = [await output_of(generation) for generation in together]
    assert with_graphs.times
    assert [tokens for tokens, _ in outputs] == [
        alone(tokens, 6 + n) for n, tokens in enumerate(prompts)
    ]


@pytest.mark.slow
async def test_logits_stay_exact_while_requests_that_decode_by_graphs_come_and_go(
    tmp_path, redis, with_graphs
):
    assert await soak(tmp_path, redis, 4) > 50
    assert with_graphs.times


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_graph_decodes_as_the_model_does_while_others_use_the_device(dtype):
    model = Llama.random(SIZES["tiny"], seed=1, dtype=dtype, device="cuda")
    pools = pool_of(model), pool_of(model)
    record = recorder({pools[0].device})
    assert record is not None
    graphs = DecodeGraphs(model, [pools[0].kv], record)
    for pool in pools:
        tokens, positions, blocks = batch_of(model, pool.kv, [30, 9, 2, 14], room=12)
    is_over = threading.Event()
    copying = threading.Thread(target=_copy_until, args=(is_over,))
    copying.start()
    try:
        for _ in range(12):
            batch = tokens, positions, blocks
            torch.testing.assert_close(
                graphs.decode(*batch),
                model.decode([pools[1].kv], *batch),
                rtol=0,
                atol=1e-4 if dtype is torch.float32 else 0.1,
            )
            positions = [position + 1 for position in positions]
    finally:
        is_over.set()
        copying.join()
    assert graphs._can_record
    assert graphs._graphs


def _copy_until(is_over):
    """As a worker's other threads do: allocate, copy and wait, on a stream of their own."""
    stream = torch.cuda.Stream()
    while not is_over.is_set():
        with torch.cuda.stream(stream):
            there = torch.ones(1 << 16, pin_memory=True).to("cuda", non_blocking=True)
            there.cpu()
        stream.synchronize()
