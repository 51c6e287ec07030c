import numpy as np
import pytest

from app.core.errors import MAX_SHOWN, cut, shown


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        *(None, 1, 1.5, True, "a", "it's", b"\xff", "", [], {}, [[]], [{}], {"a": {}}),
        *([1, "a", None], {"a": [1, {"b": 2.5}], "c": "d"}, {1: 2}, (1, 2), range(3)),
        *("x" * 78, "x" * 79, "x" * 1000, ["x" * 100] * 3, [list(range(30))] * 9, nested(30)),
        *({"x" * 100: 1}, {f"{n}": n for n in range(100)}, [[1] * n for n in range(40)]),
    ],
)
def test_a_value_is_shown_as_repr_shows_its_begin(value):
    assert shown(value) == cut(repr(value))


def test_ids_are_shown_as_the_list_that_was_sent():
    assert shown({"prompt": np.arange(3)}) == "{'prompt': [0, 1, 2]}"
    assert "\n" not in shown(np.arange(100_000))
    assert shown(np.arange(100_000)).startswith("[0, 1, 2,")


def test_a_value_nested_deeper_than_repr_takes_is_shown():
    assert shown(nested(100_000)) == "[" * (MAX_SHOWN - 3) + "..."


def test_of_a_large_value_only_what_is_shown_is_looked_at():
    class Number(float):
        seen = 0

        def __repr__(self):
            Number.seen += 1
            return "1.7e308"

    shown([Number()] * 100_000)
    shown({str(n): Number() for n in range(100_000)})
    assert Number.seen < 30
