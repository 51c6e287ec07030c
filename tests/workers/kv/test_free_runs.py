import random
from collections import deque
from itertools import groupby, pairwise

from app.core.types import Tier
from tests.workers.kv.words import named
from workers.kv.manager import BlockManager
from workers.kv.slots import MAX_STALE, FreeRuns


def freed(*runs):
    free = FreeRuns()
    for first, last in runs:
        free.add(first, last)
    return free


def test_the_longest_run_is_given_out_first():
    free = freed((0, 3), (10, 16), (20, 24))
    assert free.take(5) == [10, 11, 12, 13, 14]
    assert free.take(5) == [20, 21, 22, 23, 24]
    assert free.take(5) == [0, 1, 2, 3, 15]
    assert list(free) == [16]


def test_runs_that_meet_become_one():
    free = freed((0, 1), (3, 5), (8, 9))
    free.add(2, 2)
    free.add(7, 7)
    assert free.take(6) == [0, 1, 2, 3, 4, 5]
    free.add(6, 6)
    assert free.take(4) == [6, 7, 8, 9]
    assert len(free) == 0


def longest(free):
    """The length of the longest run."""
    runs = groupby(enumerate(sorted(free)), lambda pair: pair[1] - pair[0])
    return max((len(list(run)) for _, run in runs), default=0)


def test_any_sequence_of_calls_gives_out_each_free_number_once_and_long_runs_first():
    rng = random.Random(0)
    free, taken_out = freed((0, 299)), set[int]()
    for _ in range(5_000):
        if rng.random() < 0.5:
            for n in rng.sample(sorted(taken_out), rng.randint(0, len(taken_out))):
                taken_out.remove(n)
                free.add(n, n)
                assert len(free._longest) <= 2 * len(free._last) + MAX_STALE
        else:
            before = set(free)
            taken = free.take(rng.randint(0, len(before)))
            assert before.issuperset(taken)
            of_one_run = min(len(taken), longest(before))
            assert taken[:of_one_run] == [taken[0] + n for n in range(of_one_run)]
            assert taken_out.isdisjoint(taken)
            taken_out.update(taken)
            assert len(before) + len(taken_out) - len(taken) == 300
        assert sorted([*free, *taken_out]) == list(range(300))
        assert len(free) == 300 - len(taken_out)


def test_blocks_still_move_in_runs_after_long_use():
    """Eight conversations at a time, of which each turn repeats and extends the last one."""
    rng = random.Random(0)
    num_slots = {Tier.DEVICE: 800, Tier.HOST: 3_200}
    manager = BlockManager(num_slots, now=lambda: 0.0)
    num_blocks = num_runs = 0

    def finish_all():
        nonlocal num_blocks, num_runs
        for move in manager.moves.take_planned():
            pairs = sorted(
                (a.block_id, b.block_id) for a, b in zip(move.sources, move.targets, strict=True)
            )
            num_blocks += len(pairs)
            num_runs += 1 + sum(b != (a[0] + 1, a[1] + 1) for a, b in pairwise(pairs))
            manager.finish(move, len(pairs))

    def keep_spare(tier):
        slots = manager.tiers[tier]
        while (short := num_slots[tier] // 8 - slots.num_free) > 0 and slots.num_idle:
            eviction = manager.evict(tier, short)
            finish_all()
            manager.withdraw(eviction)
            manager.reclaim(eviction)

    chains = [[] for _ in range(60)]
    running = deque()
    for n in range(1_500):
        if n == 1_000:
            num_blocks = num_runs = 0
        chain = rng.choice(chains)
        if len(chain) > 60:
            chain.clear()
        chain += map(named, range(n * 100, n * 100 + rng.randrange(2, 20)))
        if len(running) == 8:
            manager.release(running.popleft())
        for tier in (Tier.HOST, Tier.DEVICE):
            keep_spare(tier)
        table = manager.prepare(chain, len(chain) + 3)
        finish_all()
        manager.register(table, chain[table.num_matched :])
        running.append(table)
    assert num_blocks > 10_000
    assert num_blocks > 3 * num_runs, "slots given out in the order of release make runs of one"
