from app.core.settings.router import RouterSettings
from loadtest.experiments.two_keys import play


def test_a_key_that_floods_the_fleet_makes_another_wait_little_longer():
    default = play(2, RouterSettings().wait_above_s, 20.0, seed=1)
    assert default["times"] < 1.7
    without = play(2, None, 20.0, seed=1)
    assert without["times"] > 10, "else the test above could not fail"
    assert default["per_s"] > 0.95 * without["per_s"], "the flood pays nothing for it"
