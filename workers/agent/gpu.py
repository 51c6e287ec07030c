"""GPU that a worker runs on, and its readings.

No GPU, no driver, a driver that hangs, and a GPU that vanishes and comes back are normal cases.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from app.core.worker_report import NO_READINGS, GpuReadings

log = logging.getLogger(__name__)

NO_GPU = "cpu"
START_TIMEOUT_S = 10.0
"""Deadline of a sleeping driver, which takes seconds to wake up."""
STOP_TIMEOUT_S = 1.0
READ_INTERVAL_S = 1.0
MAX_AGE_S = 3.0
RETRY_S = 10.0

_CUDA_DEVICE = re.compile(r"\d+|(GPU|MIG)-.+", re.ASCII)


class GpuMonitor:
    """Reader of one of the GPUs that CUDA shows this process, once a second: start, latest, stop.

    Nothing here raises, and only start and stop wait, for up to START_TIMEOUT_S and STOP_TIMEOUT_S.
    All driver calls are made by one daemon thread, which no executor would wait for at the end of
    the process: a call that hangs holds up nothing else.

    cuda_visible_devices: the variable CUDA_VISIBLE_DEVICES; None: it is not set. index: N of CUDA's
    `cuda:N`; None: no GPU is in use.
    """

    def __init__(self, cuda_visible_devices: str | None, index: int | None = 0) -> None:
        if index is None:
            self._wanted = ""
        elif cuda_visible_devices is None:
            self._wanted = str(index)
        else:
            self._wanted = "".join(cuda_visible_devices.split(",")[index : index + 1]).strip()
        self._name = NO_GPU
        self._latest = (NO_READINGS, 0.0)
        self._present = False
        self._silent = False
        self._looked = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-monitor", daemon=True)

    def start(self) -> str:
        """Returns the name of the GPU as its driver gives it, such as `NVIDIA H100 80GB HBM3`; else
        `cpu`."""
        if not _CUDA_DEVICE.fullmatch(self._wanted):
            # Hidden from this process, or not in use: leave the driver alone.
            return NO_GPU
        self._thread.start()
        if not self._looked.wait(START_TIMEOUT_S):
            log.warning("the GPU driver has not answered for %g s", START_TIMEOUT_S)
        return self._name

    def latest(self) -> GpuReadings:
        """Returns the last readings; NO_READINGS while there is no GPU, or its driver is silent."""
        readings, at = self._latest
        silent = readings != NO_READINGS and time.monotonic() - at > MAX_AGE_S
        if silent and not self._silent:
            log.warning("%s: the driver has not answered for %g s", self._name, MAX_AGE_S)
        self._silent = silent
        return NO_READINGS if silent else readings

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            import pynvml
        except ImportError:  # the package comes with the `worker` extra
            self._looked.set()
            return
        while not self._stopping.is_set():
            try:
                self._read_until_lost(pynvml)
            except pynvml.NVMLError as error:
                self._note_absent(error)
            self._looked.set()
            self._stopping.wait(RETRY_S)

    def _read_until_lost(self, nvml: Any) -> None:
        """Raises NVMLError if the GPU is missing or gets lost; returns once the monitor stops."""
        nvml.nvmlInit()
        try:
            device = _find(nvml, self._wanted)
            self._name = str(nvml.nvmlDeviceGetName(device))
            while not self._stopping.is_set():
                self._latest = (_read(nvml, device), time.monotonic())
                if not self._present:
                    log.info("reading %s once a second", self._name)
                self._present = True
                self._looked.set()
                self._stopping.wait(READ_INTERVAL_S)
        finally:
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _note_absent(self, error: Exception) -> None:
        self._latest = (NO_READINGS, 0.0)
        if self._present:
            log.warning("%s can no longer be read: %s", self._name, error)
        elif not self._looked.is_set():
            log.debug("no GPU: %s", error)
        self._present = False


def _find(nvml: Any, wanted: str) -> Any:
    """Returns the device that an entry of CUDA_VISIBLE_DEVICES means. Raises NVMLError: there is
    none. Numbers follow PCI bus order. So do CUDA's if all GPUs are alike, or with
    CUDA_DEVICE_ORDER=PCI_BUS_ID. A prefix of a GPU's UUID is enough if no other UUID begins with
    it."""
    if wanted.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(wanted))
    if wanted.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(wanted)
    devices = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):  # from another device, which is lost
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetUUID(device).startswith(wanted):
                devices.append(device)
    if len(devices) != 1:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)
    return devices[0]


def _read(nvml: Any, device: Any) -> GpuReadings:
    """Returns the readings, after 50 ms: each PCIe direction is sampled for 20. Raises NVMLError:
    nothing can be read. For a MIG instance, memory is the instance's own; what only the whole card
    has is the card's."""
    errors: list[Exception] = []

    def ask(question: Callable[[], Any]) -> Any:
        """Returns the answer, or None: anything may be unsupported, and not all cards say so
        alike."""
        try:
            return question()
        except nvml.NVMLError as error:
            errors.append(error)
            return None

    card = device
    with suppress(nvml.NVMLError):  # the device is a card itself
        card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
    to_host, from_host = nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES
    readings = GpuReadings(
        memory_used_bytes=ask(lambda: nvml.nvmlDeviceGetMemoryInfo(device).used),
        memory_total_bytes=ask(lambda: nvml.nvmlDeviceGetMemoryInfo(device).total),
        utilisation=ask(lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100),
        temperature_c=ask(lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)),
        power_w=ask(lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000),
        pcie_sent_bytes_per_s=ask(lambda: 1000 * nvml.nvmlDeviceGetPcieThroughput(card, to_host)),
        pcie_received_bytes_per_s=ask(
            lambda: 1000 * nvml.nvmlDeviceGetPcieThroughput(card, from_host)
        ),
    )
    if readings == NO_READINGS:
        raise errors[-1]
    return readings
