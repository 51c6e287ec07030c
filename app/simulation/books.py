"""Knowledge of routers about a simulated worker: what is reserved on it, and which blocks it
holds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.core.events import CacheEvent, Removed, Stored
from app.core.loads import ROUND, Load, Reservation
from app.core.types import SequenceHash, Tier
from app.simulation.steps import SimRequest


class InFlight:
    """Blocks of the prompts in flight on one worker; those that several share count once."""

    def __init__(self) -> None:
        self._full: Counter[SequenceHash] = Counter()
        self._partial = 0

    def add(self, request: SimRequest) -> None:
        self._full.update(request.blocks)
        self._partial += bool(request.tail_tokens)

    def remove(self, request: SimRequest) -> None:
        self._partial -= bool(request.tail_tokens)
        full = self._full
        for block in request.blocks:
            left = full[block] - 1
            if left:
                full[block] = left
            else:
                del full[block]

    def overlap(self, chain: Sequence[SequenceHash]) -> int:
        """Returns the number of leading blocks that others have, too."""
        return _leading(chain, 0, self._full.__contains__) if self._full else 0

    def num_blocks_beside(self, chain: Sequence[SequenceHash]) -> int:
        """Returns the number of blocks without those that a prompt has, too."""
        return len(self._full) + self._partial - self.overlap(chain)


@dataclass(frozen=True, slots=True)
class Booking:
    """A reservation, and what it was made for.

    counts_blocks: whether the prompt's blocks count as the worker's from now on: not where they
    have yet to arrive from another one.
    """

    reservation: Reservation
    request: SimRequest
    counts_blocks: bool = True


class Books:
    """Reservations on one worker, as one or all replicas know them: the books of lua/.

    fleet: the books of all workers. counts_blocks: whether in_flight is filled, which takes its
    time.
    """

    def __init__(self, fleet: Sequence[Books], *, counts_blocks: bool = False) -> None:
        self.load = Load()
        self.in_flight = InFlight()
        self._fleet = fleet
        self._counts_blocks = counts_blocks
        self._bookings: dict[str, Booking] = {}
        # Requests without a first token, the oldest first.
        self._prefilling: dict[str, None] = {}
        # Those for which it only holds blocks, until another worker has them.
        self._holding: set[str] = set()

    def reserve(self, booking: Booking, now_s: float) -> None:
        request_id = booking.reservation.request_id
        rounds = rounds_of(self._fleet) + ROUND // len(self._fleet)
        self.load.add(booking.reservation, round(now_s * 1000), rounds)
        self._bookings[request_id] = booking
        if booking.reservation.only_holds:
            self._holding.add(request_id)
        else:
            self._prefilling[request_id] = None
        if self._counts_blocks and booking.counts_blocks:
            self.in_flight.add(booking.request)

    def prefill_complete(self, request_id: str, now_s: float) -> None:
        """Note a first token as lua/prefill_complete.lua does: the next in line becomes the
        head."""
        self._leave_prefills(request_id, now_s)
        self.load.decoding += 1

    def computed(self, request_id: str, now_s: float) -> None:
        """Note that a source has computed the prompt, and holds it until it is fetched."""
        self._leave_prefills(request_id, now_s)
        self.load.requests -= 1
        self._holding.add(request_id)

    def release(self, request_id: str, now_s: float) -> None:
        """End a reservation as lua/release.lua does."""
        if request_id in self._holding:
            self._holding.remove(request_id)
        else:
            if request_id in self._prefilling:
                self._leave_prefills(request_id, now_s)
            else:
                self.load.decoding -= 1
            self.load.requests -= 1
        booking = self._bookings.pop(request_id)
        self.load.blocks -= booking.reservation.blocks
        if self._counts_blocks and booking.counts_blocks:
            self.in_flight.remove(booking.request)

    def _leave_prefills(self, request_id: str, now_s: float) -> None:
        reservation = self._bookings[request_id].reservation
        self.load.prefill_tokens -= reservation.prefill_tokens
        self.load.prefill_us -= reservation.prefill_us
        was_head = next(iter(self._prefilling)) == request_id
        del self._prefilling[request_id]
        if was_head:
            head = next(iter(self._prefilling), None)
            self.load.head_us = self._bookings[head].reservation.prefill_us if head else 0
            self.load.head_since_ms = round(now_s * 1000)


def rounds_of(fleet: Sequence[Books]) -> int:
    """Returns reservations made so far, in millionths, as if the fleet had always had its size."""
    return ROUND * sum(books.load.total for books in fleet) // len(fleet)


class Holdings:
    """Blocks that a worker has published, and their tiers."""

    DEVICE = 1
    HOST = 2

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._tiers: dict[SequenceHash, int] = {}
        self._late: deque[tuple[float, list[CacheEvent]]] = deque()

    @property
    def num_blocks(self) -> int:
        return len(self._tiers)

    def publish(self, events: list[CacheEvent], now_s: float) -> None:
        if events:
            self._late.append((now_s + self._delay_s, events))

    def overlap(
        self, chain: Sequence[SequenceHash], now_s: float, ahead: int = 0
    ) -> tuple[int, int]:
        """Returns the number of leading blocks on the device, and of those behind them on the host.

        ahead: number of leading blocks that it is about to hold; they count as on the device.
        """
        while self._late and self._late[0][0] <= now_s:
            for event in self._late.popleft()[1]:
                self._apply(event)
        tiers = self._tiers
        device = held = 0
        if chain and chain[0] in tiers:
            device = _leading(chain, 0, lambda block: tiers.get(block, 0) & self.DEVICE != 0)
            held = _leading(chain, device, tiers.__contains__)
        if ahead > held:
            return device + ahead - held, held - device
        return device, held - device

    def _apply(self, event: CacheEvent) -> None:
        assert isinstance(event, Stored | Removed), (
            "simulated engines never clear, and have no ends"
        )
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
    """Returns the position of the first block from `start` on that is not held; held ones come
    first."""
    low, high = start, len(chain)
    while low < high:
        middle = (low + high) // 2
        if holds(chain[middle]):
            low = middle + 1
        else:
            high = middle
    return low
