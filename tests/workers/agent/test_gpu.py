"""The readings of a GPU. pynvml is real; the C library behind it is a stand-in."""

import asyncio
import logging
import os
import sys

import pytest

import workers.agent.gpu
from app.core.worker_report import NO_READINGS, GpuReadings
from tests.eventually import eventually
from workers.agent.gpu import GpuMonitor

pynvml = pytest.importorskip("pynvml")

from tests.nvml import Gpu, stand_in  # noqa: E402 (it imports pynvml)

READ = GpuReadings(
    memory_used_bytes=60_129_542_145,
    memory_total_bytes=85_899_345_920,
    utilisation=0.37,
    temperature_c=54,
    power_w=312.345,
    pcie_sent_bytes_per_s=1_250_000,
    pcie_received_bytes_per_s=87_654_321_000,
)
"""The readings of a default Gpu()."""
SLICE = Gpu(
    name="NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    uuid="MIG-22222222-0000",
    memory_used=1_000_000_000,
    memory_total=5_000_000_000,
    failing={
        "nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_NOT_SUPPORTED,
        "nvmlDeviceGetTemperature": pynvml.NVML_ERROR_INVALID_ARGUMENT,
        "nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_INVALID_ARGUMENT,
        "nvmlDeviceGetPcieThroughput": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    },
)


@pytest.fixture
def plug(monkeypatch):
    """`plug(*gpus)`: a machine with a driver and these GPUs, which are read often."""
    monkeypatch.setattr(workers.agent.gpu, "READ_INTERVAL_S", 0.01)
    monkeypatch.setattr(workers.agent.gpu, "RETRY_S", 0.01)
    return lambda *gpus: stand_in(monkeypatch, *gpus)


@pytest.fixture
def monitor(plug):
    """`monitor(cuda_visible_devices=None, index=0)`: a monitor, which is stopped after the test."""
    made = []

    def make(cuda_visible_devices=None, index=0):
        made.append(GpuMonitor(cuda_visible_devices, index))
        return made[-1]

    yield make
    for one in made:
        one.stop()
        assert not one._thread.is_alive()


async def until(monitor, readings):
    await eventually(lambda: asyncio.sleep(0, monitor.latest()), lambda seen: seen == readings)


def test_a_gpu_is_named_and_its_readings_are_converted(plug, monitor):
    library = plug(Gpu())
    one = monitor()
    assert one.latest() == NO_READINGS
    assert one.start() == "NVIDIA H100 80GB HBM3"
    assert one.latest() == READ
    one.stop()
    assert library.initialised == 0


def test_an_idle_gpu_reads_zero_instead_of_nothing(plug, monitor):
    plug(Gpu(memory_used=0, utilization_percent=0, power_mw=0, pcie_kb_per_s=(0, 0)))
    one = monitor()
    one.start()
    assert one.latest() == GpuReadings(0, 85_899_345_920, 0.0, 54, 0.0, 0, 0)


@pytest.mark.parametrize("code", ["NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND"])
@pytest.mark.parametrize(
    ("function", "unread"),
    [
        ("MemoryInfo", ["memory_used_bytes", "memory_total_bytes"]),
        ("UtilizationRates", ["utilisation"]),
        ("Temperature", ["temperature_c"]),
        ("PowerUsage", ["power_w"]),
        ("PcieThroughput", ["pcie_sent_bytes_per_s", "pcie_received_bytes_per_s"]),
    ],
)
def test_only_the_readings_that_a_gpu_does_not_give_are_left_out(
    plug, monitor, function, unread, code
):
    failing = {f"nvmlDeviceGet{function}": getattr(pynvml, f"NVML_ERROR_{code}")}
    plug(Gpu(failing=failing))
    one = monitor()
    one.start()
    known = READ.known()
    assert one.latest().known() == {name: known[name] for name in known if name not in unread}


def test_a_function_that_an_older_library_lacks_is_left_out(plug, monitor):
    library = plug(Gpu())
    del library.nvmlDeviceGetPcieThroughput
    del library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle
    one = monitor()
    one.start()
    assert len(one.latest().known()) == 5


def test_without_the_pynvml_package_the_device_is_a_cpu(monkeypatch, monitor):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    one = monitor()
    assert (one.start(), one.latest()) == ("cpu", NO_READINGS)


def not_installed(library):
    library.installed = False
    return lambda: setattr(library, "installed", True)


def not_started(code):
    def refuse(library):
        library.failing["nvmlInitWithFlags"] = getattr(pynvml, f"NVML_ERROR_{code}")
        return library.failing.clear

    return refuse


def hanging(library):
    library.answering.clear()
    return library.answering.set


CODES = ("DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH", "UNKNOWN")


@pytest.mark.parametrize("fail", [not_installed, *map(not_started, CODES), hanging])
async def test_the_device_is_a_cpu_until_the_driver_answers(plug, monitor, monkeypatch, fail):
    monkeypatch.setattr(workers.agent.gpu, "START_TIMEOUT_S", 0.05 if fail is hanging else 10.0)
    mend, one = fail(plug(Gpu())), monitor()
    assert (one.start(), one.latest()) == ("cpu", NO_READINGS)
    mend()
    await until(one, READ)


def test_with_a_driver_but_no_gpu_the_device_is_a_cpu(plug, monitor):
    library = plug()
    one = monitor()
    assert (one.start(), one.latest()) == ("cpu", NO_READINGS)
    one.stop()
    assert library.initialised == 0


@pytest.mark.parametrize("code", ["GPU_IS_LOST", "UNKNOWN", "RESET_REQUIRED"])
async def test_losing_a_gpu_and_finding_it_again_are_each_logged_once(plug, monitor, code, caplog):
    library = plug(Gpu())
    one = monitor()
    with caplog.at_level(logging.INFO, "workers.agent.gpu"):
        one.start()
        library.gpus[0].failing[""] = getattr(pynvml, f"NVML_ERROR_{code}")
        await until(one, NO_READINGS)
        tries = len(library.calls)

        async def tried():
            return len(library.calls)

        await eventually(tried, lambda calls: calls > tries + 20)
        assert one.latest() == NO_READINGS
        library.gpus[0].failing.clear()
        await until(one, READ)

        async def logged():
            return len(caplog.records)

        await eventually(logged, lambda records: records >= 3)
    lost, *_ = (r.message for r in caplog.records if r.levelno == logging.WARNING)
    assert [r.message for r in caplog.records] == [
        "reading NVIDIA H100 80GB HBM3 once a second",
        lost,
        "reading NVIDIA H100 80GB HBM3 once a second",
    ]
    assert lost.startswith("NVIDIA H100 80GB HBM3 can no longer be read: ")


async def test_an_unplugged_gpu_is_found_again_under_its_new_handle(plug, monitor):
    library = plug(Gpu())
    one = monitor()
    one.start()
    unplugged = library.gpus.pop()
    await until(one, NO_READINGS)
    library.gpus.append(Gpu(power_mw=1_000, uuid=unplugged.uuid))
    await eventually(lambda: _read(one, "power_w"), lambda seen: seen == 1.0)


async def _read(one, name):
    return one.latest().known().get(name)


async def test_a_hanging_driver_voids_the_readings_and_is_asked_only_once(
    plug, monitor, monkeypatch, caplog
):
    monkeypatch.setattr(workers.agent.gpu, "MAX_AGE_S", 0.05)
    monkeypatch.setattr(workers.agent.gpu, "STOP_TIMEOUT_S", 0.05)
    library = plug(Gpu())
    one = monitor()
    one.start()
    library.answering.clear()
    await until(one, NO_READINGS)
    assert "NVIDIA H100 80GB HBM3: the driver has not answered for 0.05 s" in caplog.messages
    caplog.clear()
    assert [one.latest(), one.latest()] == [NO_READINGS, NO_READINGS]
    assert caplog.messages == []
    one.stop()
    assert one._thread.is_alive(), "stop() should not wait for a hanging driver"
    assert library.num_hanging == 1
    library.answering.set()
    monkeypatch.setattr(workers.agent.gpu, "STOP_TIMEOUT_S", 10.0)


async def test_a_driver_that_answers_late_is_read_again(plug, monitor, monkeypatch):
    monkeypatch.setattr(workers.agent.gpu, "MAX_AGE_S", 0.05)
    library = plug(Gpu())
    one = monitor()
    one.start()
    library.answering.clear()
    await until(one, NO_READINGS)
    library.answering.set()
    await until(one, READ)


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        (None, "first"),
        ("0", "first"),
        ("1", "second"),
        ("1,0", "second"),
        (" 2 , 1", "third"),
        ("GPU-bbbb-2222", "second"),
        ("GPU-c", "third"),
        ("GPU-c,0", "third"),
        ("MIG-22222222-0000", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
        ("3", "cpu"),
        ("GPU-bbbb", "cpu"),  # the beginning of two UUIDs
        ("GPU-d", "cpu"),
        ("MIG-3", "cpu"),
        ("3,0", "cpu"),  # CUDA ignores all entries from the first unknown one on
    ],
)
def test_the_first_gpu_that_is_visible_to_cuda_is_read(plug, monitor, visible, name):
    plug(
        Gpu(name="first", uuid="GPU-bbbb-1111"),
        Gpu(name="second", uuid="GPU-bbbb-2222"),
        Gpu(name="third", uuid="GPU-cccc-1111", mig=SLICE),
    )
    assert monitor(visible).start() == name


@pytest.mark.parametrize(
    ("visible", "index", "name"),
    [
        (None, 1, "second"),
        ("0,1", 1, "second"),
        ("1, GPU-bbbb-1111", 1, "first"),
        ("1", 1, "cpu"),
        (None, 2, "cpu"),
        (None, None, "cpu"),
        ("0", None, "cpu"),
    ],
)
def test_the_gpu_that_the_worker_computes_on_is_read(plug, monitor, visible, index, name):
    plug(Gpu(name="first", uuid="GPU-bbbb-1111"), Gpu(name="second", uuid="GPU-bbbb-2222"))
    assert monitor(visible, index).start() == name


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", ",0", "none"])
def test_the_driver_is_not_asked_if_all_gpus_are_hidden(plug, monitor, visible):
    library = plug(Gpu())
    one = monitor(visible)
    assert (one.start(), one.latest()) == ("cpu", NO_READINGS)
    one.stop()
    assert library.calls == []


def test_a_gpu_is_found_by_its_uuid_even_if_another_is_lost(plug, monitor):
    plug(Gpu(failing={"": pynvml.NVML_ERROR_GPU_IS_LOST}), Gpu(name="second", uuid="GPU-b"))
    assert monitor("GPU-b").start() == "second"


def test_a_mig_instance_has_its_own_memory_readings_and_the_rest_from_its_card(plug, monitor):
    plug(Gpu(mig=SLICE))
    one = monitor(SLICE.uuid)
    one.start()
    assert one.latest() == GpuReadings(
        memory_used_bytes=1_000_000_000,
        memory_total_bytes=5_000_000_000,
        temperature_c=54,
        power_w=312.345,
        pcie_sent_bytes_per_s=1_250_000,
        pcie_received_bytes_per_s=87_654_321_000,
    )


@pytest.mark.gpu
def test_the_gpu_of_this_machine_is_read(monitor):
    one = monitor(os.environ.get("CUDA_VISIBLE_DEVICES"))
    name = one.start()
    assert "NVIDIA" in name
    known = one.latest().known()
    limits = {
        "memory_used_bytes": (1 << 20, known["memory_total_bytes"]),
        "memory_total_bytes": (1 << 30, 1 << 40),
        "utilisation": (0, 1),
        "temperature_c": (5, 110),
        "power_w": (1, 2_000),
        "pcie_sent_bytes_per_s": (0, 300e9),
        "pcie_received_bytes_per_s": (0, 300e9),
    }
    outside = {k: v for k, v in known.items() if not limits[k][0] <= v <= limits[k][1]}
    assert outside == {}
    one.stop()
    assert not one._thread.is_alive()
