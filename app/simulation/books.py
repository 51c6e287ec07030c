"""What routers know of a worker: what is reserved on it, and which blocks it holds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from app.core.events import CacheEvent, Cleared, Stored
from app.core.loads import Load, Reservation
from app.core.types import SequenceHash, Tier


class Books:
    """What is reserved on one worker, as one or all replicas know it: the books of lua/."""

    def __init__(self) -> None:
        self.load = Load()
        self._reserved: dict[str, Reservation] = {}
        # Requests without a first token, the oldest first.
        self._prefilling: dict[str, None] = {}

    def reserve(self, reservation: Reservation, now_s: float) -> None:
        self.load.add(reservation, round(now_s * 1000))
        self._reserved[reservation.request_id] = reservation
        self._prefilling[reservation.request_id] = None

    def prefill_complete(self, request_id: str, now_s: float) -> None:
        """Like lua/prefill_complete.lua: the next in line becomes the head."""
        self._leave_prefills(request_id, now_s)
        self.load.decoding += 1

    def release(self, request_id: str, now_s: float) -> None:
        """Like lua/release.lua."""
        if request_id in self._prefilling:
            self._leave_prefills(request_id, now_s)
        else:
            self.load.decoding -= 1
        self.load.blocks -= self._reserved.pop(request_id).blocks
        self.load.requests -= 1

    def _leave_prefills(self, request_id: str, now_s: float) -> None:
        reservation = self._reserved[request_id]
        self.load.prefill_tokens -= reservation.prefill_tokens
        self.load.prefill_us -= reservation.prefill_us
        was_head = next(iter(self._prefilling)) == request_id
        del self._prefilling[request_id]
        if was_head:
            head = next(iter(self._prefilling), None)
            self.load.head_us = self._reserved[head].prefill_us if head else 0
            self.load.head_since_ms = round(now_s * 1000)


class Holdings:
    """Which blocks a worker has published, in which tiers, and which it is about to hold."""

    DEVICE = 1
    HOST = 2

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._tiers: dict[SequenceHash, int] = {}
        self._late: deque[tuple[float, list[CacheEvent]]] = deque()
        self._promised: Counter[SequenceHash] = Counter()

    @property
    def num_blocks(self) -> int:
        """Published, and in any tier."""
        return len(self._tiers)

    def publish(self, events: list[CacheEvent], now_s: float) -> None:
        if events:
            self._late.append((now_s + self._delay_s, events))

    def promise(self, chain: Sequence[SequenceHash]) -> None:
        self._promised.update(chain)

    def settle(self, chain: Sequence[SequenceHash]) -> None:
        """Undo `promise`."""
        promised = self._promised
        for block in chain:
            left = promised[block] - 1
            if left:
                promised[block] = left
            else:
                del promised[block]

    def overlap(self, chain: Sequence[SequenceHash], now_s: float) -> tuple[int, int]:
        """Number of leading blocks on the device, and of those behind them on the host.

        Promised blocks count as on the device, as in `app.router.lookup.with_predicted`.
        """
        while self._late and self._late[0][0] <= now_s:
            for event in self._late.popleft()[1]:
                self._apply(event)
        tiers, promised = self._tiers, self._promised
        device = _leading(chain, 0, lambda block: tiers.get(block, 0) & self.DEVICE != 0)
        held = _leading(chain, device, tiers.__contains__)
        ahead = _leading(chain, 0, promised.__contains__) if promised else 0
        if ahead > held:
            return device + ahead - held, held - device
        return device, held - device

    def _apply(self, event: CacheEvent) -> None:
        assert not isinstance(event, Cleared), "simulated engines never clear"
        tiers = self._tiers
        bit = self.DEVICE if event.tier is Tier.DEVICE else self.HOST
        if isinstance(event, Stored):
            for block in event.blocks:
                tiers[block] = tiers.get(block, 0) | bit
            return
        for block in event.blocks:
            left = tiers.get(block, 0) & ~bit
            if left:
                tiers[block] = left
            else:
                tiers.pop(block, None)


def _leading(
    chain: Sequence[SequenceHash], start: int, holds: Callable[[SequenceHash], bool]
) -> int:
    """Position of the first block from `start` on that is not held; held blocks must come first."""
    low, high = start, len(chain)
    while low < high:
        middle = (low + high) // 2
        if holds(chain[middle]):
            low = middle + 1
        else:
            high = middle
    return low
