"""A cluster with simulated engines, for clients that others wrote."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from app.local.redis_server import free_port

ROOT = Path(__file__).parents[2]
START_S = 120.0


@contextmanager
def cluster(log: Path, *options: str) -> Iterator[str]:
    """The URL of `kvroute up` with these options, whose output goes to `log`."""
    port = free_port()
    given = (*options, "--speedup", "20", "--port", str(port))
    command = [sys.executable, "-m", "app.cli", "up", *given]
    with log.open("wb") as output, subprocess.Popen(command, cwd=ROOT, stdout=output) as process:
        try:
            yield _serving(f"http://127.0.0.1:{port}", process)
        finally:
            process.terminate()


def _serving(url: str, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/v1/models", timeout=5).json()["data"]:
                return url
        except (httpx.HTTPError, ValueError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"{url} serves no model")
