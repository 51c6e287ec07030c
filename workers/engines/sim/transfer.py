"""Transfers of a simulated engine's blocks, by which nothing but the time that they take passes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from app.core.types import SequenceHash, new_id
from app.simulation.engine import SimEngine
from app.simulation.profiles import Sending
from workers.kv.identity import IDENTITY_BYTES, BlockIdentity
from workers.kv.transfer.kv_lease import KvPort, LeasedBlocks
from workers.kv.transfer.server import TransferServer
from workers.kv.transfer.tcp import (
    STALL_S,
    WHOLE_S,
    BlockSource,
    TransferError,
    connected,
    decline,
    log_failure,
    read_offered,
    receive,
    send,
    wanted_frame,
)

UNDERWAY, ARRIVED = b"\0", b"\1"
BEAT_S = STALL_S / 4


@dataclass(frozen=True, slots=True)
class _Held:
    """Blocks that the engine holds by a name."""

    name: str
    chain: list[BlockIdentity]


class SimTransfer:
    """Transfers to and from other workers. sending: in wall-clock seconds."""

    def __init__(self, engine: SimEngine, link: KvPort, sending: Sending) -> None:
        self._engine = engine
        self._link = link
        self.answered = link.answered
        self._sending = sending
        self._kept: LeasedBlocks[_Held] = LeasedBlocks(lambda held: engine.let_go(held.name))
        self._server = TransferServer(self._kept, link, self._send)

    async def run(self) -> None:
        """Runs until cancelled; then nothing is handed on any more."""
        try:
            await self._server.run()
        finally:
            self._kept.close()

    def keep(self, chain: Sequence[SequenceHash], lease_s: float) -> BlockSource | None:
        """Keeps what the device holds of `chain` until it is fetched, or the lease ends."""
        name = new_id()
        num_held = self._engine.hold(name, chain)
        if not num_held:
            self._engine.let_go(name)
            return None
        held = _Held(name, [*map(_identity, chain[:num_held])])
        transfer_id = self._kept.keep(held, lease_s)
        num_tokens = num_held * self._engine.block_size
        return BlockSource(self._link.host, self._link.port, transfer_id, num_tokens)

    async def fetch(self, source: BlockSource, blocks: Sequence[SequenceHash]) -> int:
        """Returns how many leading blocks have arrived; 0 if anything fails."""
        try:
            async with asyncio.timeout(WHOLE_S):
                return await self._fetched(source, blocks)
        except (TransferError, OSError, TimeoutError) as error:
            log_failure(source, error)
            return 0

    async def _fetched(self, source: BlockSource, blocks: Sequence[SequenceHash]) -> int:
        with closing(await connected(source)) as sock:
            wanted = [*map(_identity, blocks)]
            frame = wanted_frame(source.transfer_id, wanted, self._link.kind, self._link.key)
            await send(sock, frame)
            num_offered = await read_offered(sock, len(blocks))
            state = bytearray(UNDERWAY)
            while state != ARRIVED:
                await receive(sock, memoryview(state))
        return num_offered

    async def decline(self, source: BlockSource) -> None:
        await decline(source, self._link.key)

    async def _send(self, sock: socket.socket, _: _Held, blocks: Sequence[BlockIdentity]) -> None:
        clock = asyncio.get_running_loop().time
        arrives_s = self._sending.send(len(blocks) * self._engine.block_size, clock())
        while (left_s := arrives_s - clock()) > 0:
            await send(sock, UNDERWAY)
            await asyncio.sleep(min(left_s, BEAT_S))
        await send(sock, ARRIVED)


def _identity(block: SequenceHash) -> BlockIdentity:
    """Returns an identity made of the hash: a simulated block has no content to be mistaken."""
    return BlockIdentity(block.to_bytes(IDENTITY_BYTES))
