"""The server of the KV port: hands kept blocks on to callers that name them and have the workers'
key.

Anybody may connect. So nothing here costs more than a short frame before a caller has proven that
it is a worker, and named what is kept for it; and no caller has a place for long, or all of them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic

from app.core.errors import Crowded, cut
from app.core.pace import Paces
from app.http.turns import Turns
from workers.kv.identity import BlockIdentity
from workers.kv.transfer.kv_lease import K, KvPort, LeasedBlocks
from workers.kv.transfer.tcp import (
    MAX_SENDING,
    STALL_S,
    WHOLE_S,
    Challenge,
    TransferError,
    offered_frame,
    read_asked,
    read_blocks,
    send,
    send_last,
)

EVERY_S = 60.0
MAX_PEERS = 256
"""Peers that are told apart; further ones share one line."""
MAX_SHOWN = 300


class Complaints:
    """Log lines about peers: one for each peer and minute, which says how many went unsaid."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._limits = Paces(1 / EVERY_S, most=MAX_PEERS)

    def say(self, peer: str, what: str, error: Exception, *, traced: bool = False) -> None:
        """Logs an error. peer: an address; "": nobody's. traced: with a traceback."""
        unsaid = self._limits.allows(peer, time.monotonic())
        if unsaid is None:
            return
        why = cut(str(error), MAX_SHOWN) or "nothing came, or was taken, in time"
        more = f" ({unsaid} like it went unsaid)" if unsaid else ""
        by = f" by {peer}" if peer else ""
        self._log.warning("%s%s: %s%s", what, by, why, more, exc_info=error if traced else None)


log = logging.getLogger(__name__)

MAX_ASKING = 64
"""Connections that have not said yet what they want. One more, and the oldest of the address that
has most is closed."""
ASKING_S = 2.0
"""Seconds in which a connection must say what it wants."""
MAX_TRANSFERS = 64
"""Transfers under way, or waiting for their turn."""
TURN_S = 0.75 * STALL_S
"""Seconds for which they wait: a target that hears nothing for STALL_S is gone."""
SendBlocks = Callable[[socket.socket, K, Sequence[BlockIdentity]], Awaitable[None]]
"""Sends blocks of a table that are wanted."""


class TransferServer(Generic[K]):
    """Server of the KV port: `run` it on the event loop of `kept`."""

    def __init__(self, kept: LeasedBlocks[K], link: KvPort, send_blocks: SendBlocks[K]) -> None:
        self._kept = kept
        self._link = link
        self._send_blocks = send_blocks
        self._asking: dict[asyncio.Task[None], str] = {}
        """Addresses of connections that have not said what they want, the oldest first."""
        self._turns = Turns(MAX_SENDING, MAX_TRANSFERS)
        self._complaints = Complaints(log)

    async def run(self) -> None:
        listening = self._link.listening
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as serving:
            while True:
                try:
                    sock, address = await loop.sock_accept(listening)
                except OSError as error:  # such as: too many open files
                    self._complaints.say("", "a worker that fetches could not connect", error)
                    await asyncio.sleep(0.1)
                    continue
                task = serving.create_task(self._serve(sock, address[0]))
                self._asking[task] = address[0]
                task.add_done_callback(partial(self._ended, sock))
                self._make_room()
                await asyncio.sleep(0)  # to accept does not, as long as one more is there

    def _ended(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        # Not in the task itself: one that is cancelled at once never runs.
        sock.close()
        self._asking.pop(task, None)

    def _make_room(self) -> None:
        if len(self._asking) <= MAX_ASKING:
            return
        [(crowding, _)] = Counter(self._asking.values()).most_common(1)
        oldest = next(task for task, peer in self._asking.items() if peer == crowding)
        del self._asking[oldest]
        oldest.cancel()
        self._count("crowded")

    def _count(self, outcome: str) -> None:
        self._link.answered[outcome] += 1

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        """Serves one connection; whatever goes wrong ends this connection alone."""
        try:
            outcome = await self._answer(sock, peer)
        except (OSError, TimeoutError) as error:
            outcome = "stalled" if isinstance(error, TimeoutError) else "lost"
            self._complaints.say(peer, "blocks were not fetched", error)
        except Exception as error:
            outcome = "failed"
            self._complaints.say(peer, "a transfer failed unexpectedly", error, traced=True)
        self._count(outcome)

    async def _answer(self, sock: socket.socket, peer: str) -> str:
        """Returns what became of the connection. Raises OSError and TimeoutError."""
        try:
            async with asyncio.timeout(ASKING_S):
                asked = await read_asked(sock)
                if not asked.is_proven(self._link.key):
                    raise TransferError("proof: the target has not the key of this worker")
                if not asked.num_blocks:
                    self._kept.end(asked.transfer_id)
                    return "declined"
            async with asyncio.timeout(WHOLE_S):
                await self._hand_on(sock, asked, peer)
        except (TransferError, Crowded) as error:
            self._complaints.say(peer, "blocks are not handed on", error)
            with suppress(OSError, TimeoutError):
                await send_last(sock, offered_frame(0, str(error)))
            return "refused"
        return "sent"

    async def _hand_on(self, sock: socket.socket, asked: Challenge, peer: str) -> None:
        with self._kept.taken(asked.transfer_id) as kept:
            self._check(asked)
            wanted = await read_blocks(sock, asked.num_blocks)
            asking = asyncio.current_task()
            assert asking is not None
            self._asking.pop(asking, None)
            try:
                async with asyncio.timeout(TURN_S) as waiting, self._turns.place(peer):
                    waiting.reschedule(None)
                    blocks = _leading(wanted, kept.chain)
                    await send(sock, offered_frame(len(blocks)))
                    await self._send_blocks(sock, kept, blocks)
            except TimeoutError:
                if waiting.expired():
                    raise TransferError(f"{MAX_SENDING} transfers are under way already") from None
                raise

    def _check(self, asked: Challenge) -> None:
        here, there = self._link.kind, asked.kind
        for name in here:
            if here[name] != there.get(name):
                raise TransferError(
                    f"{name}: {here[name]} at the source, {there.get(name)} at the target"
                )
        if unknown := there.keys() - here.keys():
            raise TransferError(f"{min(unknown)}: not compared at the source")


def _leading(
    wanted: Sequence[BlockIdentity], chain: Sequence[BlockIdentity]
) -> Sequence[BlockIdentity]:
    """Returns the leading wanted blocks that are kept, each once. Raises TransferError: none is."""
    kept = set(chain)
    for number, block in enumerate(wanted):
        if block not in kept:
            wanted = wanted[:number]
            break
        kept.remove(block)  # however often it is asked for
    if not wanted:
        raise TransferError(f"blocks: the first one wanted is not among the {len(chain)} kept")
    return wanted
