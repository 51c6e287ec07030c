"""How much load a policy bears."""

import pytest

from app.simulation.setting import Setting
from loadtest.scenario import Scenario, highest, knee, simulate
from loadtest.traces import DEMO_TRACE, read_trace


@pytest.fixture(scope="module")
def demo():
    return read_trace(DEMO_TRACE)


def test_a_search_ends_just_below_the_highest_acceptable_load():
    for bound in (0.3, 1.0, 1.7, 13.0):
        assert bound / 1.02 <= highest(lambda load, bound=bound: load <= bound) <= bound
    assert highest(lambda _: False) == 0.0
    assert highest(lambda _: True) == 64.0


@pytest.mark.slow
def test_the_knee_is_the_highest_load_within_its_bound(demo):
    scenario = Scenario(demo.cut(0.0, None, 150), Setting(num_workers=2))

    def ttft(load):
        return simulate(scenario, "random", load)["ttft_mean_s"] or 0.0

    found = knee(scenario, "random")
    assert ttft(found) <= 3 * ttft(0.1) < ttft(found * 1.1)
