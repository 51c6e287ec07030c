"""`kvroute up --engine`: what runs already, behind a router, by one command."""

import json
import re
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.e2e.engines import engine
from tests.redis_servers import default_kind, require_redis
from tests.test_cli import kvroute_here


@contextmanager
def started(*arguments):
    require_redis(default_kind())
    command = [sys.executable, "-m", "app.cli", "up", "--port=0", "--no-haproxy", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


@contextmanager
def up(*arguments):
    with started(*arguments) as process:
        assert process.stdout is not None
        said = list(iter(process.stdout.readline, "Press Ctrl-C to stop.\n"))
        assert process.poll() is None
        yield said


def run(said, path):
    """The command for a path, as it is printed."""
    [line] = [line for line in said if "curl -s http://" in line and path in line]
    words = shlex.split(line)
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_engines_that_run_already_need_one_command():
    with (
        engine(model="one") as first,
        engine(model="one") as second,
        up(f"--engine={first.url}", f"--engine={second.url}") as said,
    ):
        assert len([line for line in said if line.startswith("router ")]) == 1
        assert run(said, "/v1/chat/completions")["choices"]
        workers = run(said, "/v1/workers")["workers"]
        assert isinstance(workers, list)
        assert {one["address"] for one in workers} == {first.url, second.url}


@pytest.mark.slow
def test_an_engine_that_publishes_nothing_is_a_worker_and_the_flag_is_named():
    with (
        engine(publishes=False) as silent,
        started(f"--engine={silent.url}") as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        assert "--kv-events-config" in process.stderr.readline()
        said = list(iter(process.stdout.readline, "Press Ctrl-C to stop.\n"))
        assert run(said, "/v1/chat/completions")["choices"]
        workers = run(said, "/v1/workers")["workers"]
        assert isinstance(workers, list)
        assert "--kv-events-config" in workers[0]["trust_cause"]


@pytest.mark.slow
def test_it_waits_for_an_engine_that_loads():
    with engine() as gone:
        port = int(gone.url.rpartition(":")[2])
    with started(f"--engine=http://127.0.0.1:{port}") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stderr.readline()
        assert re.search(rf"waiting for the engine: .*127\.0\.0\.1:{port}", first)
        with engine(port=port):
            assert process.stdout.readline().startswith("balancer ")


@pytest.mark.parametrize("engine", ["abacus", "sim,torch", "http://127.0.0.1:1,sim", "ftp://h"])
def test_an_engine_is_one_of_ours_or_a_url(engine):
    ended = kvroute_here("up", f"--engine={engine}")
    assert ended.exit_code == 2
    assert "sim, torch or http" in ended.output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--workers=2"], "--workers: not together with --engine URL"),
        (["--planner"], "--planner: not together with --engine URL"),
    ],
)
def test_beside_engines_nothing_else_is_a_worker(options, why):
    ended = kvroute_here("up", "--engine=http://127.0.0.1:1", *options)
    assert ended.exit_code == 1
    assert why in ended.output
