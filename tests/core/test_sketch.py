"""What the sketch knows of chains, for how long, and how often it is wrong."""

import numpy as np

from app.core import sketch
from app.core.sketch import ChainSketch
from app.core.types import SequenceHash

RNG = np.random.default_rng(7)


def chain(length):
    return [SequenceHash(n) for n in RNG.integers(0, 2**64, length, dtype=np.uint64).tolist()]


def test_of_a_chain_that_shares_a_beginning_just_that_is_known():
    known, one = ChainSketch(), chain(100)
    assert known.leading(one, 0.0) == 0
    known.add(one[:60], 0.0)
    assert known.leading(one, 0.0) == 60
    assert known.leading([*one[:13], *chain(50)], 0.0) == 13
    assert known.leading([], 0.0) == 0


def test_a_chain_is_known_for_an_hour_after_it_was_last_added_and_not_for_much_longer():
    known, one, other = ChainSketch(), chain(8), chain(8)
    known.add(one, 0.0)
    known.add(other, 0.0)
    known.add(one, 3599.0)
    assert known.leading(other, 3599.0) == 8
    assert known.leading(other, 4801.0) == 0
    assert known.leading(one, 7198.0) == 8
    assert known.leading(one, 100_000.0) == 0


def test_what_is_added_faster_than_it_has_room_for_is_known_for_less_long(monkeypatch):
    monkeypatch.setattr(sketch, "CAPACITY", 100)
    known, first = ChainSketch(), chain(60)
    known.add(first, 0.0)
    for _ in range(3):
        known.add(chain(100), 1.0)
        assert known.leading(first, 1.0) == 60
    known.add(chain(100), 1.0)
    assert known.leading(first, 1.0) == 0


def test_once_it_is_full_it_is_wrong_about_as_little_as_it_says():
    known, lengths = ChainSketch(), 4096
    for _ in range(sketch.GENERATIONS * sketch.CAPACITY // lengths):
        known.add(chain(lengths), 0.0)
    news = [known.leading(chain(lengths), 0.0) / lengths for _ in range(4000)]
    assert 0 < np.mean(news) < sketch.ERROR
