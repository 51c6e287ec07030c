"""Processes that are told to stop, and of which something does not."""

import signal
import time
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.conftest import listens
from tests.e2e.engines import Process
from tests.fake_worker import NAMESPACE

SOON_S, LONG_S = "0.2", "3600"
COMMANDS = {
    "router": ("router", "--drain-s=0"),
    "picker": ("picker", "--drain-s=0", "--grpc-port=0"),
    "worker": ("worker", "--drain-s=0"),
    "agent": ("agent", "--drain-s=0", "--engine-url=http://127.0.0.1:9"),
    "agent of a file": ("agent", "--drain-s=0", "--engines=/dev/null"),
    "planner": ("planner",),
}
PLACES = {
    "heedless": "did not end: heedless > sleep at ",
    "blocking": "did not end: blocking at ",
    "threaded": " in sleeping\n",
}


@contextmanager
def hanging(task, late_s, redis_url, command):
    common = (f"--redis-url={redis_url}", f"--namespace={NAMESPACE}", "--port=0")
    process = Process(task, late_s, *command, *common, module="tests.hanging")
    try:
        with httpx.Client(base_url=process.url) as client:
            client.get("/health", timeout=None)
        yield process
    finally:
        process.end(signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "task"),
    [
        *((command, "heedless") for command in COMMANDS),
        ("planner", "blocking"),
        ("planner", "threaded"),
    ],
)
def test_a_process_ends_whatever_a_task_does_and_says_which_did_not(
    command, task, one_redis_server
):
    with hanging(task, SOON_S, one_redis_server.url, COMMANDS[command]) as process:
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait() == 1
    assert PLACES[task] in process.said


@pytest.mark.parametrize("command", ["router", "agent", "planner"])
def test_a_second_signal_ends_a_process_at_once(command, one_redis_server):
    with hanging("heedless", LONG_S, one_redis_server.url, COMMANDS[command]) as process:
        process.popen.send_signal(signal.SIGTERM)
        while listens(process.url):
            time.sleep(0.01)
        process.popen.send_signal(signal.SIGTERM)
        process.popen.wait()
