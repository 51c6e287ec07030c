from __future__ import annotations

import orjson
import pytest

from app.local.redis_server import EmbeddedRedis
from loadtest import bench_door
from loadtest.bench_door import Chats, measure, shapes

pytestmark = pytest.mark.slow


def test_the_door_is_measured_beside_a_proxy(
    own_redis_server: EmbeddedRedis,
) -> None:
    # Fewer could take a process less than the hundredth of a second in which Linux counts.
    found = measure(own_redis_server.url, requests=500, rounds=1)
    assert list(found["cost"]) == [shape.name for shape in shapes()]
    for made in found["cost"].values():
        assert made["door"]["per_s"] > 0
        assert made["proxy"]["per_s"] > 0
    assert set(found["added_first_token_ms"]) == {"p50", "p99"}
    assert 0 < found["tokenizing_seen_share"] < 1


def test_prompts_have_the_sizes_that_are_said() -> None:
    for shape, size in zip(shapes(), (800, 32_000, 800, 800, 32_000), strict=True):
        assert all(abs(len(body) - size) < 120 for body in shape.bodies)
        assert len(shape.bodies) == bench_door.NUM_PROMPTS


def test_of_a_chat_all_but_the_last_turn_comes_again() -> None:
    chats = Chats(2_000)
    first, again = (orjson.loads(chats[3])["messages"] for _ in range(2))
    assert first[:-1] == again[:-1]
    assert first[-1] != again[-1]
    assert len(first) == bench_door.CHAT_TURNS
