"""A real vLLM on the CPU, as a process of its own."""

import json
import os
import signal
import subprocess
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType

import httpx
import pytest

from app.local.redis_server import free_port
from tests.door.conftest import replica, until_serving
from tests.e2e.engines import agent

VENV = Path(os.environ.get("KVROUTE_TEST_VLLM", Path(__file__).parents[2] / ".venv-vllm"))
"""The virtual environment that install_vllm.sh makes."""
MODEL, ADAPTER = "tiny", "sql"
BLOCK = 32
"""A CPU's attention needs a multiple of it."""
MAX_SEQS = 8
START_S = 1800.0
"""A minute, on a machine that has nothing else to do."""
ANSWER_S = 600.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Else each worker is a process of its own, which waits for its next step in a busy loop.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}


def make_models(folder, config=None):
    """config: of another model, without weights; None: of the one whose weights are made."""
    script = Path(__file__).with_name("make_model.py")
    subprocess.run([VENV / "bin" / "python", script, folder], check=True)
    if config is not None:
        (folder / "model" / "config.json").write_text(json.dumps(config))


class VllmServer:
    """Serves the model in `folder`; started on construction. blocks: of its KV cache.

    more: flags. environment: beside ours. usual: has prefix caching by a flag, and the adapter.
    """

    def __init__(
        self, folder, name, blocks, more=(), environment=MappingProxyType({}), *, usual=True
    ):
        if not VENV.exists():
            pytest.fail(f"there is no {VENV}: make test-vllm installs vLLM there")
        self.port, self.events_port, self.replay_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder, self._blocks, self._more = folder, blocks, more
        self._environment, self._usual = environment, usual
        self._log = folder / f"{name}.log"
        self.start()

    def start(self):
        events = (
            '{"enable_kv_cache_events":true,"publisher":"zmq",'
            f'"endpoint":"tcp://*:{self.events_port}",'
            f'"replay_endpoint":"tcp://*:{self.replay_port}"}}'
        )
        command = [
            # Threads of NIXL spin: what is tested beside them would wait for a core of two.
            *("nice", "-n", "10"),
            *(VENV / "bin" / "vllm", "serve", self._folder / "model"),
            *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager"),
            *("--distributed-executor-backend", "uni"),
            *(
                "--max-model-len",
                "4096",
                "--max-num-seqs",
                str(MAX_SEQS),
                "--block-size",
                str(BLOCK),
            ),
            *("--num-gpu-blocks-override", str(self._blocks)),
            *("--enable-prompt-tokens-details", "--kv-events-config", events),
            *(self._usual_flags() if self._usual else ("--load-format", "dummy")),
            *self._more,
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **ENVIRONMENT, **self._environment},
                stdout=log,
                stderr=log,
                start_new_session=True,  # its engine is a process of its own
            )

    def _usual_flags(self):
        yield from ("--enable-prefix-caching", "--enable-lora", "--max-lora-rank", "8")
        yield from ("--lora-modules", f"{ADAPTER}={self._folder / 'adapter'}")

    def wait(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/health", timeout=1.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        log = self._log.read_text(errors="replace")
        raise AssertionError(f"vLLM does not serve:\n{log[-4000:]}")

    @property
    def folder(self):
        return self._folder

    @property
    def process_group(self):
        return self._process.pid

    def num_logged(self, text):
        return self._log.read_text(errors="replace").count(text)

    def kill(self):
        """Does nothing if it has ended."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def vllm_servers(folder, *names, blocks, more=(), config=None):
    make_models(folder, config)
    servers = []
    try:
        for name in names:
            servers.append(VllmServer(folder, name, blocks, more, usual=config is None))
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()


@asynccontextmanager
async def behind_a_door(redis_url, folder, more=(), config=None, blocks=2000, **settings):
    """Clients of a replica, and of the one vLLM that it routes to, as a. config: see
    make_models."""
    with (
        vllm_servers(folder, "a", blocks=blocks, more=more, config=config) as [engine],
        agent(engine.url, redis_url, folder / "memory", "a"),
    ):
        async with (
            replica(redis_url, **settings) as door,
            httpx.AsyncClient(base_url=engine.url, timeout=ANSWER_S) as direct,
        ):
            await until_serving(door, 1)
            yield door, direct
