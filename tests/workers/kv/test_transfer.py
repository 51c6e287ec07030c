"""Blocks that travel between two pools over a real connection."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import orjson
import pytest
import torch

from app.core.errors import BlockLost
from app.http.server import listen
from tests.eventually import eventually
from tests.workers.kv.bad_link import bad_link, cut, flipped
from tests.workers.kv.late_stream import LateStream
from tests.workers.kv.pairs import KIND, SLOTS, WORD, answer_of, pair
from tests.workers.kv.pools import ODD, SMALL, WIDE, joined, same
from tests.workers.kv.words import chain
from workers.kv import memory
from workers.kv.arrival import Arrival
from workers.kv.memory import KVShape, MemoryPool
from workers.kv.transfer import layer_groups, tcp
from workers.kv.transfer.layer_groups import LayerGroups
from workers.kv.transfer.receiver import BlockReceiver
from workers.kv.transfer.tcp import MAX_FRAME_BYTES, VERSION, BlockSource, TransferError

ASKED = {"version": VERSION, "transfer_id": "x", "num_blocks": 1, "kind": {}, "proof": ""}


@pytest.mark.parametrize("shape", [SMALL, WIDE, ODD], ids=["small", "wide", "odd"])
async def test_blocks_arrive_bit_by_bit_and_are_let_go(shape):
    async with pair(shape) as workers:
        arrival = await workers.fetch()
        assert arrival.num_good == 5
        assert workers.copied(5)
        assert arrival.seconds > 0
        for layer in range(shape.num_layers):
            arrival.wait_layer(layer)
        await workers.until_let_go()
        again = await workers.fetch()
        assert again.num_good == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp_sizes", [p for p in product((1, 2, 4), repeat=2) if p != (1, 1)])
async def test_blocks_arrive_however_each_side_splits_their_heads(tp_sizes, dtype):
    # With two-byte numbers, each rank's layers end within a word.
    shape = KVShape(num_layers=5, num_kv_heads=4, head_size=1, dtype=dtype, block_size=3)
    async with pair(shape, tp_sizes=tp_sizes) as workers:
        assert (await workers.fetch("ABCX")).num_good == 3
        assert workers.copied(3)


@pytest.mark.parametrize("tp_size", [1, 2])
async def test_what_is_written_late_is_not_lost_to_what_comes_next(tp_size, monkeypatch):
    monkeypatch.setattr(layer_groups, "new_stream", lambda *_: LateStream(late_s=0.05))
    monkeypatch.setattr(memory, "GROUP_BYTES", 1)
    shape = KVShape(num_layers=8, num_kv_heads=4, head_size=1, dtype=torch.float32, block_size=3)
    async with pair(shape, tp_sizes=(1, tp_size)) as workers:
        assert (await workers.fetch()).num_good == 5
        assert workers.copied(5)


@pytest.mark.gpu
@pytest.mark.parametrize("tp_sizes", [(1, 1), (2, 1), (1, 4)])
async def test_blocks_travel_between_gpus(tp_sizes):
    async with pair(device="cuda", tp_sizes=tp_sizes) as workers:
        assert LayerGroups(workers.target).packed(0, 1).is_pinned()
        assert (await workers.fetch()).num_good == 5
        assert workers.copied(5)


async def test_only_leading_blocks_that_are_kept_travel():
    async with pair() as workers:
        assert (await workers.fetch("ABCX")).num_good == 3
        assert workers.copied(3)


async def test_blocks_behind_those_that_the_target_has_travel_too():
    async with pair() as workers:
        groups = LayerGroups(workers.target)
        arrival = Arrival(2)
        source = BlockSource("127.0.0.1", workers.port, workers.transfer_id, 0)
        await BlockReceiver(groups, KIND).fetch(source, chain(WORD)[3:], [1, 8], arrival)
        assert arrival.num_good == 2
        assert same(joined(workers.source)[workers.source_ids[3:]], joined(workers.target)[[1, 8]])


async def test_another_prompts_blocks_do_not_travel():
    async with pair() as workers:
        assert (await workers.fetch("XBCDE")).num_good == 0
        assert not joined(workers.target).any()


async def _altered(workers, alter):
    async with bad_link(workers.port, alter) as port:
        return await workers.fetch(port=port)


def header_bytes(num_blocks):
    """Before the first group: the frame that offers so many blocks."""
    return len(tcp.offered_frame(num_blocks))


async def test_a_flipped_byte_loses_its_block_and_those_after_it():
    async with pair() as workers:
        group_bytes = 5 * (8 + 2 * WIDE.layer_bytes)
        in_block_3 = header_bytes(5) + group_bytes + 5 * 8 + 3 * 2 * WIDE.layer_bytes + 99
        arrival = await _altered(workers, flipped(in_block_3))
        assert arrival.num_good == 3
        assert workers.copied(3)
        assert not joined(workers.target)[SLOTS[3:], 2:4].any(), "no wrong bits reach a slot"
        with pytest.raises(BlockLost, match="3 of 5 blocks came whole"):
            arrival.wait_layer(0)


async def test_a_flipped_checksum_loses_its_block():
    async with pair() as workers:
        assert (await _altered(workers, flipped(header_bytes(5) + 8))).num_good == 1


async def test_a_connection_that_is_cut_leaves_no_block():
    async with pair() as workers:
        arrival = await _altered(workers, cut(header_bytes(5) + 5 * (8 + 2 * WIDE.layer_bytes)))
        assert arrival.share == 0.4
        assert arrival.num_good == 0
        with pytest.raises(BlockLost):
            arrival.wait_layer(2)
        await workers.until_let_go()


async def test_a_source_that_stalls_is_given_up(monkeypatch):
    monkeypatch.setattr(tcp, "STALL_S", 0.05)
    async with pair() as workers:
        with listen("127.0.0.1", 0) as silent:
            assert (await workers.fetch(port=silent.getsockname()[1])).num_good == 0


async def test_a_fetch_that_is_cancelled_waits_for_no_source(monkeypatch):
    monkeypatch.setattr(tcp, "STALL_S", 60.0)
    arrival = Arrival(5)
    with listen("127.0.0.1", 0) as listening:
        source = BlockSource("127.0.0.1", listening.getsockname()[1], "x", 0)
        receiver = BlockReceiver(LayerGroups([MemoryPool(WIDE, 12)]), KIND)
        fetching = asyncio.create_task(receiver.fetch(source, chain(WORD), SLOTS, arrival))
        there, _ = await asyncio.to_thread(listening.accept)
        with there:
            there.sendall(tcp.offered_frame(5))
            await eventually(arrived_frame(receiver), bool)
            fetching.cancel()
            async with asyncio.timeout(30):
                await asyncio.wait([fetching])
    assert fetching.cancelled()
    assert arrival.ended


def arrived_frame(receiver):
    """Asks whether a thread waits for what follows the offer."""

    async def look():
        return len(receiver._threads._threads)

    return look


async def test_who_is_cancelled_while_all_threads_are_busy_waits_for_none_of_them():
    begun = []
    others_end = threading.Event()
    here, there = socket.socketpair()
    with ThreadPoolExecutor(1) as threads, here, there:
        threads.submit(others_end.wait)
        try:
            fetching = asyncio.create_task(
                tcp.in_thread(threads, here, partial(begun.append, "begun"))
            )
            await asyncio.sleep(0)
            fetching.cancel()
            async with asyncio.timeout(10):
                await asyncio.wait([fetching])
        finally:
            others_end.set()
    assert fetching.cancelled()
    assert not begun


async def test_a_source_that_is_gone_leaves_no_block():
    async with pair() as workers:
        with listen("127.0.0.1", 0) as closed:
            port = closed.getsockname()[1]
        assert (await workers.fetch(port=port)).num_good == 0


@pytest.mark.parametrize("name", KIND)
async def test_workers_that_compute_other_bits_refuse_each_other(name, caplog):
    async with pair() as workers:
        assert (await workers.fetch(kind={**KIND, name: "other"})).num_good == 0
        assert f"{name}: {KIND[name]} at the source, other at the target" in caplog.text
        await workers.until_let_go()


async def test_a_target_of_another_version_is_told_of_it():
    async with pair() as workers:
        body = b'{"version": 2}'
        assert b"version: 3 here, 2 there" in await answer_of(workers.port, body)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"[]", b"asks for no blocks"),
        (b"{", b"not JSON"),
        (b"[" * 4096, b"not JSON"),
        (b"\xff", b"not JSON"),
        *[
            (orjson.dumps(ASKED | {name: value}), b"asks for no blocks")
            for name, value in (
                ("transfer_id", "x" * 65),
                ("transfer_id", "\u20ac"),
                ("transfer_id", None),
                ("num_blocks", -1),
                ("num_blocks", tcp.MAX_BLOCKS + 1),
                ("num_blocks", 1.5),
                ("kind", {"model": ["tiny"]}),
                ("proof", 1),
            )
        ],
    ],
)
async def test_a_malformed_request_is_refused(body, error):
    async with pair() as workers:
        assert error in await answer_of(workers.port, body)


async def test_a_frame_that_is_too_long_is_not_read():
    async with pair() as workers:
        answer = await answer_of(workers.port, b"", length=MAX_FRAME_BYTES + 1)
        assert b"4097 bytes" in answer


async def test_blocks_are_let_go_when_their_lease_ends():
    async with pair(lease_s=0.0) as workers:
        await workers.until_let_go()
        assert (await workers.fetch()).num_good == 0


async def test_a_lease_that_ends_while_blocks_travel_lets_go_after_that():
    async with pair() as workers:
        with workers.kept.taken(workers.transfer_id):
            workers.kept.end(workers.transfer_id)
            assert len(workers.kept.tables) == 1
            with pytest.raises(TransferError, match="its lease has ended"):
                workers.kept.taken(workers.transfer_id).__enter__()
        assert not workers.kept.tables


async def test_a_fetch_that_nobody_wants_ends_early():
    async with pair() as workers:
        groups = LayerGroups(workers.target)
        arrival = Arrival(5)
        arrival.limit(0)
        source = BlockSource("127.0.0.1", workers.port, workers.transfer_id, 0)
        await BlockReceiver(groups, KIND).fetch(source, chain(WORD), SLOTS, arrival)
        assert not arrival.share
        assert arrival.ended


@pytest.mark.parametrize("group", [0, 1])
async def test_a_target_that_cannot_write_ends_without_a_block(group, monkeypatch, caplog):
    write = LayerGroups.write

    def fails(groups, nth, *args):
        if nth == group:
            raise RuntimeError("no pinned memory is left")
        return write(groups, nth, *args)

    async with pair() as workers:
        monkeypatch.setattr(LayerGroups, "write", fails)
        arrival = await workers.fetch()
        assert (arrival.num_good, arrival.share) == (0, [0.0, 0.4][group])
        assert "no pinned memory is left" in caplog.text
        await workers.until_let_go()


async def test_slots_that_were_not_written_to_the_end_hold_no_block(monkeypatch):
    class Broken:
        def wait(self): ...

        def synchronize(self):
            raise RuntimeError("the device is gone")

    write = LayerGroups.write

    def breaks(*args):
        write(*args)
        return Broken()

    async with pair() as workers:
        monkeypatch.setattr(LayerGroups, "write", breaks)
        assert (await workers.fetch()).num_good == 0
