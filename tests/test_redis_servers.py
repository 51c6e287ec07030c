import pytest

from tests.redis_servers import KINDS, redis_version, require_redis


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_the_version_that_its_name_says(kind):
    expected = {"redis-7": (7, 0), "redis-6.2": (6, 2), "valkey": (9, 1)}[kind]
    version = redis_version(require_redis(kind))
    assert version == expected if kind == "redis-6.2" else version >= expected
