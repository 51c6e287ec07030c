"""Events that can be understood only once a block is known that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from workers.bridge.events.events import BlockHash, BlockRemoved, BlockStored

MAX_WAIT_S = 5.0
MAX_WAITING = 4096


class PendingEvents:
    """Events that wait for one block each; `released` returns them once that is known.

    The hashes of the events are those that `key_of` gives. now: monotonic seconds. joined_late: the
    engine held blocks before the first event, so what waits may be left out.
    """

    def __init__(self, now: Callable[[], float], *, joined_late: bool) -> None:
        self.num_left_out = 0
        self._now = now
        self._joined_late = joined_late
        self._waiting: dict[BlockHash, list[BlockStored | BlockRemoved]] = {}
        """Events by the block that they wait for, in order of arrival."""
        self._awaits: dict[BlockHash, list[BlockHash]] = {}
        """Blocks that each block in `_waiting` waits for, the latest last: two events may store it
        as part of stretches that begin at different places."""
        self._waits_since: dict[BlockHash, float] = {}
        """Time of the first wait for a block, if another's tokens wait for it."""
        self.num_waiting = 0
        self._overrun = False

    @property
    def is_blind(self) -> bool:
        """Whether events were missed: some have waited for too long, or too many wait."""
        if self._joined_late:
            return False
        oldest = next(iter(self._waits_since.values()), self._now())
        return self._overrun or self._now() - oldest > MAX_WAIT_S

    def wait_to_store(self, name: BlockHash, event: BlockStored) -> None:
        """Has the offload of one of an event's blocks wait for its tokens, or, if those wait too,
        for what they wait for."""
        self.wait(self._awaits.get(name, [name])[-1], replace(event, block_hashes=[name]))

    def wait_to_remove(self, name: BlockHash, event: BlockRemoved) -> None:
        """Has the removal of one of an event's blocks wait for what its stores wait for, if they
        do."""
        # What has to wait may be left out later: then a removal must not be, where a store of the
        # block is still waiting.
        awaited = self._awaits.get(name, [])
        for wanted in tuple(awaited) if self._joined_late else awaited[-1:]:
            self.wait(wanted, replace(event, block_hashes=[name]))

    def wait(self, wanted: BlockHash, event: BlockStored | BlockRemoved) -> None:
        """Keeps `event` until `wanted` is known. Events above MAX_WAITING blocks are left out."""
        num_blocks = len(event.block_hashes)
        self._make_room(num_blocks)
        if self.num_waiting + num_blocks > MAX_WAITING:
            self._overrun = True
            self.num_left_out += num_blocks
            return
        self.num_waiting += num_blocks
        self._waiting.setdefault(wanted, []).append(event)
        if isinstance(event, BlockStored) and event.token_ids:
            self._waits_since.setdefault(wanted, self._now())
        for name in event.block_hashes:
            awaited = self._awaits.setdefault(name, [])
            if wanted not in awaited:
                awaited.append(wanted)

    def released(self, names: Iterable[BlockHash]) -> Iterator[BlockStored | BlockRemoved]:
        """Yields what waited for these blocks, in order of arrival."""
        for name in names:
            self._waits_since.pop(name, None)
            for event in self._waiting.pop(name, ()):
                self.num_waiting -= len(event.block_hashes)
                for waited in event.block_hashes:
                    awaited = self._awaits.get(waited, [])
                    if name in awaited:
                        awaited.remove(name)
                        if not awaited:
                            del self._awaits[waited]
                yield event

    def clear(self) -> None:
        self._waiting.clear()
        self._awaits.clear()
        self._waits_since.clear()
        self.num_waiting = 0
        self._overrun = False

    def _make_room(self, num_blocks: int) -> None:
        """Leaves out what may be: offloads of blocks without tokens if too much waits, and, having
        joined late, what has waited too long as well as the oldest of what is too much."""
        num_allowed = MAX_WAITING - num_blocks
        if self.num_waiting > num_allowed:
            for wanted in self._waiting.keys() - self._waits_since.keys():
                self._leave_out(wanted)
        while self._joined_late and self._waits_since:
            wanted, since = next(iter(self._waits_since.items()))
            if self._now() - since <= MAX_WAIT_S and self.num_waiting <= num_allowed:
                break
            self._leave_out(wanted)

    def _leave_out(self, wanted: BlockHash) -> None:
        for event in self.released([wanted]):
            if isinstance(event, BlockStored):
                self.num_left_out += len(event.block_hashes)
