import math

import pytest

from app.core.errors import InvalidRequest
from workers.engines.base import Sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, 2.1, math.nan, math.inf, "1", None, True)),
        *(("top_p", value) for value in (0, -1, 1.01, math.nan, "1", None)),
        *(("top_k", value) for value in (-2, 1.5, None, True)),
        *(("seed", value) for value in (1.5, "1", 1 << 63, -(1 << 63) - 1, True)),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequest, match=f"^{field}: .*got ") as refused:
        Sampling(**{field: value})
    assert refused.value.field == field


def test_options_at_the_ends_of_their_ranges_are_accepted():
    Sampling(temperature=2, top_p=1, top_k=-1, seed=(1 << 63) - 1)
    Sampling(temperature=0, top_p=5e-324, top_k=1 << 40, seed=-(1 << 63))
