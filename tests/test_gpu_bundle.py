"""The bundle that is carried to a bare machine with a GPU, and what `./run` says where it cannot
run there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tools import gpu_bundle
from tools.gpu_bundle import main

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def asked(monkeypatch):
    calls = []

    def pip(*arguments):
        calls.append(arguments)
        folder = Path(
            arguments[arguments.index("--wheel-dir" if arguments[0] == "wheel" else "--dest") + 1]
        )
        names = (
            ["kvroute-1-py3"] if arguments[0] == "wheel" else ["orjson-3-cp312", "hf_xet-1-cp38"]
        )
        for name in names:
            (folder / f"{name}-none-any.whl").write_bytes(b"wheel")

    monkeypatch.setattr(gpu_bundle, "_pip", pip)
    return calls


def bundled(folder, *arguments):
    return CliRunner().invoke(main, [str(folder), *arguments])


def test_wheels_are_for_the_machine_and_at_the_versions_of_the_tests(asked, tmp_path):
    assert bundled(tmp_path / "bundle").exit_code == 0
    own, others = asked
    assert own[-1] == str(gpu_bundle.ROOT)
    assert others[others.index("--python-version") + 1] == "3.12"
    assert others[others.index("--constraint") + 1] == str(gpu_bundle.ROOT / "constraints.txt")
    assert "--platform=manylinux_2_28_x86_64" in others
    assert any(each.startswith("kvroute[worker,embedded] @ file:///") for each in others)
    assert not any("torch" in each for each in others), "the machine has its own"
    wheels = {wheel.name for wheel in (tmp_path / "bundle/wheels").iterdir()}
    assert wheels == {"kvroute-1-py3-none-any.whl", "orjson-3-cp312-none-any.whl"}


def test_tests_and_benchmarks_are_carried_and_nothing_stays_of_an_older_folder(asked, tmp_path):
    folder = tmp_path / "bundle"
    (folder / "site").mkdir(parents=True)
    result = bundled(folder)
    assert result.output.startswith(f"{folder}: ")
    assert not (folder / "site").exists()
    for carried in (
        "tests/conftest.py",
        "tests/workers/kv/late_stream.py",
        "loadtest/bench_gpu.py",
    ):
        assert (folder / carried).is_file()
    assert not list(folder.rglob("__pycache__"))
    assert "    gpu: " in (folder / "pytest.ini").read_text()
    assert os.access(folder / "run", os.X_OK)


def test_a_folder_that_is_too_large_is_no_success(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_bundle, "MOST_BYTES", 1_000_000)
    result = bundled(tmp_path / "bundle")
    assert result.exit_code == 1
    assert "more than 1 MB" in result.output


def run(folder, python=sys.executable, **more):
    ended = subprocess.run(
        [folder / "run"],
        env=os.environ | {"PYTHON": str(python)} | more,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert not (folder / "site").exists()
    assert not (folder / "out").exists()
    return ended.stderr


def test_another_python_than_the_wheels_are_for_is_refused(asked, tmp_path):
    bundled(tmp_path / "bundle", "--python=3.10")
    assert f"wheels are for Python 3.10; PYTHON is {HERE}." in run(tmp_path / "bundle")


def test_a_python_without_torch_is_refused(asked, tmp_path):
    bundled(tmp_path / "bundle", f"--python={HERE}")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    assert "has no torch; name one that has: PYTHON=" in run(
        tmp_path / "bundle", bare, DEVICE="cpu"
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_a_machine_without_a_gpu_is_refused(asked, tmp_path):
    bundled(tmp_path / "bundle", f"--python={HERE}")
    assert run(tmp_path / "bundle") == (
        "./run: torch sees no GPU; DEVICE=cpu tries all of it in small\n"
    )
