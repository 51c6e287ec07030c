"""GPU readings on their way from the driver to a router, through a whole worker process."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.core.worker_report import GPU
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE

pytest.importorskip("pynvml")

READINGS = {
    "memory_used_bytes": 60_129_542_145,
    "memory_total_bytes": 85_899_345_920,
    "utilisation": 0.37,
    "temperature_c": 54,
    "power_w": 312.345,
    "pcie_sent_bytes_per_s": 1_250_000,
    "pcie_received_bytes_per_s": 87_654_321_000,
}
ROOT = Path(__file__).parents[2]
WORKER = """
import sys
import pytest
import workers.agent.gpu
from app.cli import main
from tests.nvml import Gpu, stand_in

library = stand_in(pytest.MonkeyPatch(), Gpu())
if sys.argv.pop(1) == "hangs":
    library.answering.clear()
    workers.agent.gpu.START_TIMEOUT_S = 0.1
main()
"""
"""`kvroute` on the stand-in of tests/nvml.py for a driver, which `answers` or `hangs`."""


@contextmanager
def worker_whose_driver(behaviour, redis_url):
    """Runs a worker, which must then exit with status 0 on SIGTERM."""
    settings = ["--port=0", "--worker-id=w0", f"--namespace={NAMESPACE}", "--log-level=error"]
    command = ["worker", f"--redis-url={redis_url}", *settings]
    process = subprocess.Popen([sys.executable, "-c", WORKER, behaviour, *command], cwd=ROOT)
    try:
        yield
        assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def client(one_redis_server):
    """A client of one replica."""
    async with started_replica(one_redis_server.url) as client:
        yield client


async def reporting_worker(client):
    """The only worker's entry in /v1/workers, once its metrics have arrived."""

    async def fresh():
        found = (await client.get("/v1/workers")).json()["workers"]
        return [worker for worker in found if not worker["stale"]]

    [worker] = await eventually(fresh, within_s=30)
    return worker


async def scraped(client):
    """The GPU readings of the worker in /metrics."""
    text = (await client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {
        reading.name: sample.value
        for reading in GPU
        for sample in families[f"kvroute_worker_{reading.gauge}"].samples
        if sample.labels["worker"] == "w0:0"
    }


async def test_a_router_shows_the_gpu_readings_of_a_worker(client, one_redis_server):
    with worker_whose_driver("answers", one_redis_server.url):
        worker = await reporting_worker(client)
        assert worker["accelerator"] == "NVIDIA H100 80GB HBM3"
        assert worker["gpu"] == READINGS
        assert await eventually(lambda: scraped(client)) == READINGS


async def test_a_worker_whose_gpu_driver_hangs_reports_everything_else_and_stops_on_sigterm(
    client, one_redis_server
):
    with worker_whose_driver("hangs", one_redis_server.url):
        worker = await reporting_worker(client)
        assert (worker["accelerator"], worker["gpu"]) == ("cpu", None)
        assert await scraped(client) == {}
