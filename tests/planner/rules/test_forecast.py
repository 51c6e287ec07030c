"""How much the load will have grown when a worker that is asked for now is live."""

import math

import pytest

from app.planner.rules.replay import MOST_GROWTH, growth
from app.planner.rules.state import FleetState, PastRequest, Rules
from app.simulation.steps import SimRequest

RULES = Rules(window_s=180.0, lead_s=60.0)


def asked(*at_s, startup_s=60.0):
    """At 1,000 s; the 240 s from 760 s on count."""
    requests = [PastRequest(at, "w0", SimRequest(str(at), (), (1,), 1, 1)) for at in at_s]
    return FleetState(1000.0, [], requests, startup_s=startup_s)


def rising(number):
    """From a rate of 0 on evenly: half as many came in the first 170 s as in all 240."""
    return [760.0 + 240.0 * math.sqrt((n + 0.5) / number) for n in range(number)]


def test_an_even_rate_foretells_itself_and_a_falling_one_no_less():
    even = [760.0 + 240.0 * (n + 0.5) / 500 for n in range(500)]
    assert growth(asked(*even), RULES) == 1.0
    assert growth(asked(*(1760.0 - at_s for at_s in rising(500))), RULES) == 1.0
    assert growth(asked(), RULES) == 1.0


@pytest.mark.parametrize("began_s_ago", [0.5, 5, 30, 120, 150, 180, 210, 239])
def test_even_traffic_that_began_lately_does_not_grow(began_s_ago):
    even = [1000.0 - began_s_ago * (1 - n / 500) for n in range(500)]
    assert growth(asked(*even), RULES) == 1.0
    assert growth(asked(500.0, *even), RULES) == 1.0, "also after a pause"


def test_a_rising_rate_is_extrapolated_to_the_end_of_a_start_less_what_may_be_chance():
    """Requests lie 40 s behind the middle, which is 12 * 40 / 240² of the mean a second."""
    chance_s = 240 / math.sqrt(12 * 10_000)
    rise = 12 * (40 - chance_s) / 240**2
    found = growth(asked(*rising(10_000), startup_s=0.0), RULES)
    assert found == pytest.approx(1 + rise * 120, rel=0.01)
    later = growth(asked(*rising(10_000), startup_s=1.0), RULES)
    assert later == pytest.approx(found + rise, rel=0.01)


def test_few_requests_foretell_little_and_none_more_than_twice_as_many():
    few, many = (growth(asked(*rising(number)), RULES) for number in (5, 1000))
    assert 1.0 < few < 1.1
    assert many == MOST_GROWTH
    assert growth(asked(900.0), RULES) == 1.0
