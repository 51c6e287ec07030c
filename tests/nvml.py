"""A stand-in for libnvidia-ml: its C functions, behind pynvml's loader.

They are called through C function pointers, take the library's arguments, write into the caller's
memory and return the library's codes. So pynvml itself is real.
"""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_int, c_uint, c_void_p, memmove, string_at
from dataclasses import dataclass, field
from functools import partial
from threading import Event

import pynvml

LIBRARY = "libnvidia-ml.so.1"
SIGNATURES = {
    "nvmlInitWithFlags": (c_uint,),
    "nvmlShutdown": (),
    "nvmlDeviceGetCount_v2": (c_void_p,),
    "nvmlDeviceGetHandleByIndex_v2": (c_uint, c_void_p),
    "nvmlDeviceGetHandleByUUID": (c_void_p, c_void_p),
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": (c_void_p, c_void_p),
    "nvmlDeviceGetUUID": (c_void_p, c_void_p, c_uint),
    "nvmlDeviceGetName": (c_void_p, c_void_p, c_uint),
    "nvmlDeviceGetMemoryInfo": (c_void_p, c_void_p),
    "nvmlDeviceGetUtilizationRates": (c_void_p, c_void_p),
    "nvmlDeviceGetTemperature": (c_void_p, c_uint, c_void_p),
    "nvmlDeviceGetPowerUsage": (c_void_p, c_void_p),
    "nvmlDeviceGetPcieThroughput": (c_void_p, c_uint, c_void_p),
}


@dataclass
class Gpu:
    """A GPU, in the library's units. failing: function -> code returned; `""` means any function.

    mig: a MIG instance of this card, which can be found only by its UUID.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-11111111-0000"
    memory_used: int = 60_129_542_145
    memory_total: int = 85_899_345_920
    utilization_percent: int = 37
    temperature_c: int = 54
    power_mw: int = 312_345
    pcie_kb_per_s: tuple[int, int] = (1_250, 87_654_321)
    """Sent, received."""
    failing: dict[str, int] = field(default_factory=dict)
    mig: Gpu | None = None


class StandIn:
    """The loaded library. failing: function -> code returned, whatever the GPU."""

    def __init__(self, *gpus):
        self.gpus = list(gpus)
        self.installed = True
        self.failing = {}
        self.initialised = 0
        self.calls = []
        self.answering = Event()
        self.answering.set()
        self.num_hanging = 0
        for name, argtypes in SIGNATURES.items():
            pointer = CFUNCTYPE(c_int, *argtypes)(partial(self._call, name))
            setattr(self, name, pointer)

    def load(self, name):
        """Replaces ctypes.CDLL."""
        if not self.installed:
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        assert name == LIBRARY
        return self

    def _call(self, name, *args):
        self.calls.append(name)
        if code := self.failing.get(name):
            return code
        if not self.initialised and name != "nvmlInitWithFlags":
            return pynvml.NVML_ERROR_UNINITIALIZED
        match name, args:
            case "nvmlInitWithFlags", _:
                self.initialised += 1
            case "nvmlShutdown", _:
                self.initialised -= 1
            case "nvmlDeviceGetCount_v2", (count,):
                return _write(count, c_uint(len(self.gpus)))
            case "nvmlDeviceGetHandleByIndex_v2", (index, handle):
                if index >= len(self.gpus):
                    return pynvml.NVML_ERROR_INVALID_ARGUMENT
                return _hand_out(self.gpus[index], handle)
            case "nvmlDeviceGetHandleByUUID", (uuid, handle):
                named = [d for d in self._devices() if d.uuid.encode() == string_at(uuid)]
                return _hand_out(named[0], handle) if named else pynvml.NVML_ERROR_NOT_FOUND
            case _, (handle, *rest):
                return self._ask(name, handle, *rest)
        return pynvml.NVML_SUCCESS

    def _devices(self):
        return self.gpus + [gpu.mig for gpu in self.gpus if gpu.mig]

    def _ask(self, name, handle, *args):
        if not self.answering.is_set():
            self.num_hanging += 1
            self.answering.wait()
            self.num_hanging -= 1
        gpu = next((gpu for gpu in self._devices() if id(gpu) == handle), None)
        if gpu is None:
            return pynvml.NVML_ERROR_GPU_IS_LOST
        return gpu.failing.get(name) or gpu.failing.get("") or self._answer(name, gpu, *args)

    def _answer(self, name, gpu, *args):
        match name.removeprefix("nvmlDeviceGet"), args:
            case "DeviceHandleFromMigDeviceHandle", (out,):
                cards = [card for card in self.gpus if card.mig is gpu]
                if not cards:
                    return pynvml.NVML_ERROR_INVALID_ARGUMENT
                return _write(out, c_void_p(id(cards[0])))
            case "UUID", (out, size):
                return _write_text(out, size, gpu.uuid)
            case "Name", (out, size):
                return _write_text(out, size, gpu.name)
            case "MemoryInfo", (out,):
                free = gpu.memory_total - gpu.memory_used
                return _write(out, pynvml.c_nvmlMemory_t(gpu.memory_total, free, gpu.memory_used))
            case "UtilizationRates", (out,):
                return _write(out, pynvml.c_nvmlUtilization_t(gpu.utilization_percent, 99))
            case "Temperature", (pynvml.NVML_TEMPERATURE_GPU, out):
                return _write(out, c_uint(gpu.temperature_c))
            case "PowerUsage", (out,):
                return _write(out, c_uint(gpu.power_mw))
            case "PcieThroughput", (counter, out):
                return _write(out, c_uint(gpu.pcie_kb_per_s[counter]))
        return pynvml.NVML_ERROR_INVALID_ARGUMENT


def _hand_out(gpu, handle):
    return gpu.failing.get("") or _write(handle, c_void_p(id(gpu)))


def _write(address, value):
    memmove(address, bytes(value), len(bytes(value)))
    return pynvml.NVML_SUCCESS


def _write_text(address, size, text):
    if len(text) >= size:
        return pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    memmove(address, text.encode() + b"\0", len(text) + 1)
    return pynvml.NVML_SUCCESS


def stand_in(patch, *gpus):
    """Make pynvml find this library from now on, as if none had been loaded yet."""
    library = StandIn(*gpus)
    patch.setattr(pynvml, "CDLL", library.load)
    patch.setattr(pynvml, "nvmlLib", None)
    patch.setattr(pynvml, "_nvmlLib_refcount", 0)
    patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return library
