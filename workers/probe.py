"""What hardware a worker runs on. No GPU, or no driver, is a normal case."""

from __future__ import annotations


def accelerator_name() -> str:
    """Name of the first GPU as its driver gives it, such as `NVIDIA H100 80GB HBM3`; else `cpu`.

    Blocks while the driver wakes up, up to seconds: call it from a thread.
    """
    try:
        import pynvml
    except ImportError:  # the package comes with the `worker` extra
        return "cpu"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "cpu"
    try:
        if pynvml.nvmlDeviceGetCount() == 0:
            return "cpu"
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except pynvml.NVMLError:
        return "cpu"
    finally:
        pynvml.nvmlShutdown()
