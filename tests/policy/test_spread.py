"""To which namespaces the requests for a name go."""

import random
from collections import Counter

import pytest

from app.policy.spread import Availability, pick, spread

LEAVES, SLEEPS, STAYS, SERVES = Availability
SHARED = ({"old": 9.0, "new": 1.0}, {"blue": 0.0, "green": 1.0})


@pytest.mark.parametrize(
    ("claims", "standings", "expected"),
    [
        # Whoever claimed it first has it, as long as it has workers that stay.
        (("a", "b"), {"a": SERVES, "b": SERVES}, {"a": 1}),
        (("b", "a"), {"a": SERVES, "b": SERVES}, {"b": 1}),
        (("a", "b"), {"a": STAYS, "b": SERVES}, {"a": 1}),
        (("a", "b"), {"a": SLEEPS, "b": SERVES}, {"a": 1}),
        (("a", "b"), {"a": LEAVES, "b": SERVES}, {"b": 1}),
        (("a", "b"), {"b": SERVES}, {"b": 1}),
        (("a", "b"), {"a": LEAVES}, {"a": 1}),
        (("a", "b"), {"a": LEAVES, "b": LEAVES}, {"a": 1}),
        (("a", "b"), {}, {}),
        ((), {}, {}),
        # Those that share it get their part, as far as they have workers that take requests.
        (("old", "new"), {"old": SERVES, "new": SERVES}, {"old": 9, "new": 1}),
        (("new", "old"), {"old": SERVES, "new": SERVES}, {"old": 9, "new": 1}),
        (("old", "new"), {"old": SERVES, "new": STAYS}, {"old": 9}),
        (("old", "new"), {"old": LEAVES, "new": SERVES}, {"new": 1}),
        (("old", "new"), {"old": SLEEPS, "new": SERVES}, {"new": 1}),
        (("old", "new"), {"old": SLEEPS, "new": STAYS}, {"new": 1}),
        (("old", "new"), {"new": SERVES}, {"new": 1}),
        (("old", "new"), {"old": LEAVES, "new": LEAVES}, {"old": 9, "new": 1}),
        # Whoever does not share it gets none, and takes none away.
        (
            ("old", "thief", "new"),
            dict.fromkeys(("old", "new", "thief"), SERVES),
            {"old": 9, "new": 1},
        ),
        (("thief", "old", "new"), dict.fromkeys(("old", "new", "thief"), SERVES), {"thief": 1}),
        (("old", "blue"), {"old": SERVES, "blue": SERVES}, {"old": 9}),
        # A weight of 0 is for sessions that are there.
        (("blue", "green"), {"blue": SERVES, "green": SERVES}, {"blue": 0, "green": 1}),
        (("blue", "green"), {"blue": SERVES, "green": STAYS}, {"blue": 0, "green": 1}),
        (("blue", "green"), {"blue": SERVES}, {"blue": 0}),
        (("blue", "green"), {"blue": LEAVES}, {}),
    ],
)
def test_requests_go_to_those_that_may_have_them(claims, standings, expected):
    assert spread(claims, standings, SHARED) == expected


def test_each_gets_its_part():
    rng = random.Random(7)
    weights = {"a": 0.0, "b": 9.0, "c": 1.0, "d": 0.0}
    counts = Counter(pick(weights, rng.random()) for _ in range(10_000))
    assert counts.keys() == {"b", "c"}
    assert counts["c"] == pytest.approx(1000, rel=0.1)
    assert pick({"a": 0.1, "b": 0.2, "c": 0.0}, 1 - 2**-53) == "b"
