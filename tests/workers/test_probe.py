from __future__ import annotations

import sys

import pytest

from workers.probe import accelerator_name

pynvml = pytest.importorskip("pynvml")


def fake_driver(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """A driver with `count` GPUs; the calls that begin and end its use."""
    calls: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: calls.append("init"))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: count)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: f"GPU {index}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: f"name of {handle}")
    return calls


def test_the_first_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_driver(monkeypatch, count=2)

    assert accelerator_name() == "name of GPU 0"
    assert calls == ["init", "shutdown"]


def test_a_driver_without_a_gpu_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_driver(monkeypatch, count=0)

    assert accelerator_name() == "cpu"
    assert calls == ["init", "shutdown"]


def test_no_driver_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)

    assert accelerator_name() == "cpu"


def test_a_driver_that_fails_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_driver(monkeypatch, count=1)

    def fail(handle: str) -> str:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", fail)

    assert accelerator_name() == "cpu"
    assert calls == ["init", "shutdown"]


def test_a_plain_install_without_the_package_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert accelerator_name() == "cpu"


@pytest.mark.gpu
def test_the_driver_of_this_machine_names_its_gpu() -> None:
    assert "NVIDIA" in accelerator_name()
