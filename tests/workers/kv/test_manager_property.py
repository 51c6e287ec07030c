"""The block manager compared with a plain model of it, over long random runs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from app.core.errors import NotEnoughBlocks
from app.core.types import Tier
from tests.workers.kv.block_model import BlockModel, Table
from tests.workers.kv.cache_model import CacheModel
from tests.workers.kv.words import named
from workers.kv.identity import BlockIdentity, hash_of
from workers.kv.manager import BlockManager
from workers.kv.moves import AdmissionPolicy, WritePolicy
from workers.kv.slots import block_of
from workers.kv.tables import BlockTable

NUM_STEPS = 2_500
MAX_LENGTH = 9


def some_chains(rng):
    """Prompts that diverge from one another early and late."""
    chains = []
    for n in range(8):
        stem = rng.choice(chains)[: rng.randrange(MAX_LENGTH)] if chains else []
        # Two chains each have the same sequence hashes.
        numbers = [100 * (n // 2 + 1) + i for i in range(len(stem), MAX_LENGTH)]
        grown = [named(number, twin=n % 2) for number in numbers]
        chains.append([*stem, *grown])
    return chains


@dataclass
class Request:
    """chain: the blocks that it will fill, if it runs for long enough."""

    chain: list[BlockIdentity]
    real: BlockTable
    plain: Table


class Run:
    """Applies the same operations to the manager and to the model, and compares the two."""

    def __init__(self, seed, num_slots, write):
        self.rng = random.Random(seed)
        self.chains = some_chains(self.rng)
        admission = AdmissionPolicy(min_uses=self.rng.choice((1, 2)))
        reuse_multiple = self.rng.choice((1, 1, 2, 3))
        self.model = BlockModel(
            num_slots, write, admission, max_storing=9, reuse_multiple=reuse_multiple
        )
        self.manager = BlockManager(
            num_slots,
            write=write,
            admission=admission,
            reuse_multiple=reuse_multiple,
            max_storing=9,
            now=lambda: self.model.now,
        )
        self.requests = []
        self.moves = []
        self.evictions = []
        self.withdrawn = []
        self.published = CacheModel()
        self.done = Counter()

    def step(self):
        steps = [
            (self.prepare, 10),
            (self.register, 10),
            (self.share, 4),
            (self.release, 8),
            (self.fall_back, 6),
            (self.finish, 10),
            (self.evict, 10),
            (self.withdraw, 8),
            (self.reclaim, 8),
            (self.prefetch, 2),
            (self.wait, 2),
        ]
        step = self.rng.choices([s for s, _ in steps], [weight for _, weight in steps])[0]
        step()
        self.done[step.__name__] += 1
        self.compare()

    def prepare(self):
        chain = self.rng.choice(self.chains)
        prefix = chain[: self.rng.choice((MAX_LENGTH, self.rng.randrange(MAX_LENGTH + 1)))]
        num_blocks = len(prefix) + self.rng.randrange(3)
        plain = self.model.prepare(prefix, num_blocks)
        if plain is None:
            with pytest.raises(NotEnoughBlocks):
                self.manager.prepare(prefix, num_blocks)
            self.done["refused"] += 1
            return
        real = self.manager.prepare(prefix, num_blocks)
        assert real.num_matched == plain.num_matched
        self.requests.append(Request(chain, real, plain))

    def register(self):
        if not self.requests:
            return
        request = self.rng.choice(self.requests)
        full = len(request.real.chain)
        room = min(len(request.real.slots), len(request.chain)) - full
        if room > 0 and request.real.is_ready and self.is_whole(request):
            blocks = request.chain[full : full + self.rng.randint(1, room)]
            self.manager.register(request.real, blocks)
            self.model.register(request.plain, blocks)

    def share(self):
        if not self.requests:
            return
        request = self.rng.choice(self.requests)
        prefix = request.chain[: len(request.real.slots)]
        if request.real.is_ready and self.is_whole(request):
            assert self.manager.share(request.real, prefix) == self.model.share(
                request.plain, prefix
            )

    def is_whole(self, request):
        assert request.real.num_whole == self.model.num_whole(request.plain)
        assert request.real.chain == request.plain.chain
        return request.real.num_whole == request.real.num_matched

    def release(self):
        """Release a request in any state: still loading, or with some or all blocks full."""
        if self.requests:
            request = self.requests.pop(self.rng.randrange(len(self.requests)))
            self.manager.release(request.real)
            self.model.release(request.plain)

    def fall_back(self):
        broken = [r for r in self.requests if r.real.is_ready and not self.is_whole(r)]
        if not broken:
            return
        request = self.rng.choice(broken)
        self.done["fallen back"] += 1
        if self.model.fall_back(request.plain):
            self.manager.fall_back(request.real)
        else:
            with pytest.raises(NotEnoughBlocks):
                self.manager.fall_back(request.real)
            self.requests.remove(request)

    def finish(self):
        if not self.moves:
            return
        move, copy = self.rng.choice(self.moves)
        num_done = len(move.blocks)
        if self.rng.random() < 0.4:
            num_done = self.rng.randrange(num_done)
            self.done["failed"] += 1
        num_done = min(num_done, move.num_ready) if move.is_load else num_done
        self.moves.remove((move, copy))
        self.manager.finish(move, num_done)
        self.model.finish(copy, num_done)

    def evict(self):
        tier = self.rng.choice(list(self.manager.tiers))
        count = self.rng.randrange(1, 12)
        real, plain = self.manager.evict(tier, count), self.model.evict(tier, count)
        assert [slot.block for slot in real.leaving] == [cell.block for cell in plain.cells]
        self.evictions.append((real, plain))

    def withdraw(self):
        ready = [(r, p) for r, p in self.evictions if r.store is None or r.store.finished]
        if not ready:
            return
        eviction = self.rng.choice(ready)
        self.evictions.remove(eviction)
        self.manager.withdraw(eviction[0])
        self.model.withdraw(eviction[1])
        self.withdrawn.append(eviction)

    def reclaim(self):
        if self.withdrawn:
            real, plain = self.withdrawn.pop(self.rng.randrange(len(self.withdrawn)))
            assert self.manager.reclaim(real) == self.model.reclaim(plain)

    def prefetch(self):
        chain = self.rng.choice(self.chains)
        assert self.manager.prefetch(chain) == self.model.prefetch(chain)

    def wait(self):
        self.model.now += self.rng.random()

    def compare(self):
        self.manager.check()
        real_moves = self.manager.moves.take_planned()
        known = [copy for _, copy in self.moves]
        fresh = [copy for copy in self.model.copies if copy not in known]
        assert [(m.source, m.target, m.blocks) for m in real_moves] == [
            (c.source, c.target, c.blocks) for c in fresh
        ]
        self.moves += zip(real_moves, fresh, strict=True)
        for event in self.manager.events.take():
            self.published.take(event)
        for tier, slots in self.manager.tiers.items():
            cells = self.model.cells[tier]
            assert slots.num_free == self.model.num_free(tier)
            assert slots.num_idle == len(self.model.idle(tier))
            assert slots.num_leaving == sum(cell.eviction is not None for cell in cells)
            assert {slot.block for slot in slots.registered()} == {c.block for c in cells} - {None}
            held = {hash_of(c.block) for c in cells if c.block}
            published = {block for block in held if tier in self.published.tiers_of(block)}
            assert published == set(map(hash_of, self.model.published(tier)))
        for chain in self.chains:
            assert self.manager.match(chain) == [tier for tier, _ in self.model.find(chain)]
            for tier in self.published.tiers_of(hash_of(chain[-1])):
                held = {hash_of(block_of(slot)) for slot in self.manager.tiers[tier].registered()}
                assert hash_of(chain[-1]) in held

    def end(self):
        """Release all requests and finish all copies: after that, no slot is in use."""
        while self.requests:
            self.release()
            self.compare()
        while self.moves:
            self.finish()
            self.compare()
        slots = [slot for tier in self.manager.tiers.values() for slot in tier.all()]
        assert not any(slot.references for slot in slots)


TIERS = [
    {Tier.DEVICE: 40},
    {Tier.DEVICE: 40, Tier.HOST: 30},
    {Tier.DEVICE: 40, Tier.HOST: 16, Tier.DISK: 30},
]


@pytest.mark.parametrize("write", WritePolicy, ids=lambda policy: policy.value)
@pytest.mark.parametrize("num_slots", TIERS, ids=len)
def test_the_manager_behaves_like_the_model(num_slots, write):
    done = Counter()
    for seed in range(2):
        run = Run(seed, num_slots, write)
        for _ in range(NUM_STEPS):
            run.step()
        run.end()
        done += run.done
    rare = {"refused", "reclaim"}
    if len(num_slots) > 1:
        rare |= {"failed", "fallen back"}
    assert min(done[name] for name in rare) >= 3, done
