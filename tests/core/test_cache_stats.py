import pytest

from app.core.cache_stats import WINDOW, IdleBeforeEvict


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def test_the_value_is_zero_until_a_block_is_evicted():
    idle = IdleBeforeEvict(Clock())
    assert idle.value_s == 0
    idle.add(999.5)
    assert idle.value_s == 0.5


def test_the_value_is_a_mean_over_roughly_the_last_window_of_blocks():
    clock = Clock()
    idle = IdleBeforeEvict(clock)
    for _ in range(WINDOW):
        idle.add(clock.now_s - 600)
    assert idle.value_s == 600
    for _ in range(WINDOW):
        idle.add(clock.now_s - 100)
    # The first blocks keep (1 - 1 / 200) ** 200 of the weight.
    assert idle.value_s == pytest.approx(100 + 500 * 0.367, abs=0.5)


def test_the_value_grows_while_no_block_is_evicted():
    clock = Clock()
    idle = IdleBeforeEvict(clock)
    idle.add(clock.now_s - 30)
    clock.now_s += 45
    assert idle.value_s == 75
    idle.add(clock.now_s - 30)
    assert idle.value_s == 30
