from __future__ import annotations

import pytest
from rich.console import Console

from app.local.redis_server import EmbeddedRedis
from loadtest.bench_decision import shapes
from loadtest.bench_parts import PARTS, REST, measure, show

pytestmark = pytest.mark.slow


def test_the_time_of_a_decision_is_reported_by_part(own_redis_server: EmbeddedRedis) -> None:
    found = measure(own_redis_server.url, requests=2000)
    assert list(found) == [shape.name for shape in shapes()]
    bare, *routed = found.values()
    assert bare.keys() == {*PARTS, REST}
    assert bare[REST] == sum(bare.values()) > 0
    for parts in routed:
        # The longest parts show up even in few samples.
        assert parts["prices and choice"] > 0
        assert parts["lookup: commands, replies, view of the workers"] > 0
    console = Console(record=True, width=200)
    show(found, console)
    assert "in all" in console.export_text()
