"""A cluster before stand-ins for engines, for clients that others wrote."""

import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import httpx

from app.local.redis_server import free_port
from tests.e2e.engines import ROOT, engine
from workers.engines.sim.text import FOLDER

START_S = 120.0
SPEAKS = {
    "tokenizer": FOLDER,
    "natural": 40,
    "max_model_len": 200_000,
    "kv_blocks": 50_000,
    "token_s": 0.001,
}


@contextmanager
def cluster(log, *options, engines=2, model="llama"):
    """The URL of `kvroute up` with these options, whose output goes to `log`, and engines that
    speak every API."""
    port = free_port()
    with ExitStack() as stack:
        urls = [stack.enter_context(engine(model=model, **SPEAKS)).url for _ in range(engines)]
        given = (*options, *(f"--engine={url}" for url in urls), f"--port={port}")
        command = [sys.executable, "-m", "app.cli", "up", *given]
        output = stack.enter_context(log.open("wb"))
        process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=output))
        stack.callback(process.terminate)
        yield _serving(f"http://127.0.0.1:{port}", process)


def _serving(url, process):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/v1/models", timeout=5).json()["data"]:
                return url
        except (httpx.HTTPError, ValueError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"{url} serves no model")
