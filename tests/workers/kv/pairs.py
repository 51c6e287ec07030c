"""A source that keeps blocks and a target that fetches them, over a real connection."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app.http.server import listen
from tests.eventually import eventually
from tests.workers.kv.pools import WIDE, joined, same
from tests.workers.kv.words import chain, computed, free, manager_of
from workers.kv.arrival import Arrival
from workers.kv.manager import BlockManager
from workers.kv.memory import MemoryPool
from workers.kv.tables import BlockTable
from workers.kv.transfer.kv_lease import KvPort, LeasedBlocks
from workers.kv.transfer.layer_groups import LayerGroups
from workers.kv.transfer.receiver import BlockReceiver
from workers.kv.transfer.sender import BlockSender
from workers.kv.transfer.server import TransferServer
from workers.kv.transfer.tcp import BlockSource

WORD = "ABCDE"
SLOTS = [7, 2, 9, 4, 0]
KIND = {"shape": "wide", "model": "tiny"}
LEASE_S = 60.0


@dataclass
class Pair:
    """A source that keeps the blocks of WORD, and a target: their pools, by rank."""

    manager: BlockManager
    source: list[MemoryPool]
    target: list[MemoryPool]
    kept: LeasedBlocks[BlockTable]
    transfer_id: str
    source_ids: list[int]
    link: KvPort

    @property
    def port(self):
        return self.link.port

    async def fetch(self, word=WORD, *, kind=KIND, port=None, transfer_id=None, key=""):
        groups = LayerGroups(self.target)
        arrival = Arrival(len(word))
        source = BlockSource("127.0.0.1", port or self.port, transfer_id or self.transfer_id, 0)
        receiver = BlockReceiver(groups, kind, key)
        await receiver.fetch(source, chain(word), SLOTS[: len(word)], arrival)
        assert arrival.ended
        return arrival

    async def until_let_go(self):
        await eventually(lambda: _value(len(self.kept.tables)), lambda num: not num)

    def copied(self, num_blocks):
        """Are these leading blocks in the target's slots?"""
        return same(
            joined(self.source)[self.source_ids[:num_blocks]],
            joined(self.target)[SLOTS[:num_blocks]],
        )


@asynccontextmanager
async def pair(shape=WIDE, *, device="cpu", lease_s=LEASE_S, tp_sizes=(1, 1), key=""):
    manager = manager_of(12)
    source, target = (
        [MemoryPool(rank, 12, device) for rank in shape.split(tp_size)] for tp_size in tp_sizes
    )
    for pool in source:
        pool.words.random_()
    table = computed(manager, WORD)
    kept = LeasedBlocks(manager.release)
    with listen("127.0.0.1", 0) as listening:
        link = KvPort(listening, "127.0.0.1", KIND, key)
        server = TransferServer(kept, link, BlockSender(LayerGroups(source)).send)
        running = asyncio.ensure_future(server.run())
        yield Pair(manager, source, target, kept, kept.keep(table, lease_s), table.block_ids, link)
        running.cancel()
        await asyncio.wait([running])
    kept.close()
    manager.check()
    assert free(manager) + 5 == 12


async def _value(value):
    return value


async def answer_of(port, body, length=None):
    """What a source says to a frame. length: that the frame claims; None: its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((len(body) if length is None else length).to_bytes(4, "little") + body)
    try:
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()
