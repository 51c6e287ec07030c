from __future__ import annotations

import pytest

from tests.redis_servers import KINDS, redis_version, require_binary, require_redis

MISSING = "kvroute-no-such-program"


def test_a_missing_program_skips_the_test_on_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"{MISSING} is not installed"):
        require_binary(MISSING)


def test_a_missing_program_fails_the_test_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=f"{MISSING} is not installed"):
        require_binary(MISSING)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_the_version_that_its_name_says(kind: str) -> None:
    expected = {"redis-7": (7, 0), "redis-6.2": (6, 2)}[kind]
    version = redis_version(require_redis(kind))
    assert version == expected if kind == "redis-6.2" else version >= expected
