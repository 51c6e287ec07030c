from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.workers.agent.harness import Observer


@pytest.fixture
def observer(redis: Redis) -> Observer:
    return Observer(redis)
