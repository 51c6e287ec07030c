from app.core.pace import Pace


def test_events_are_allowed_evenly_and_a_large_one_counts_as_several():
    limit = Pace(4)

    def allowed(since_s, quarters, size):
        return [limit.allows(since_s + n / 4, size) for n in range(quarters)]

    assert allowed(100.0, 3, 1.0) == [True, True, True]
    assert allowed(100.75, 6, 3.0) == [True, False, False, True, False, False]
    assert allowed(102.25, 2, 1.0) == [True, True]


def test_the_first_event_is_allowed_at_any_time():
    assert Pace(4).allows(-1000.0)


def test_a_limit_of_none_allows_nothing():
    assert not Pace(0).allows(100.0)
