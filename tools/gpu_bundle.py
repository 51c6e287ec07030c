"""Collects what a bare machine with a GPU lacks into one folder, to be carried there.

    python -m tools.gpu_bundle out/gpu-bundle

The machine has Python 3.12, torch and perhaps transformers, and no network. The folder has wheels
for that Python, the project's own, its tests and benchmarks. `./run` in it installs them into the
folder, runs the tests that need a GPU, then the benchmarks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
PLATFORMS = "manylinux2014_x86_64", "manylinux_2_28_x86_64", "linux_x86_64"
EXTRAS = "kvroute[worker,embedded]"
MORE = (
    "safetensors",
    "aiohttp",
    "stamina",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "hypothesis",
)
MOST_BYTES = 60_000_000
LEFT_OUT = "hf_xet"
"""A wheel of 4 MB that nothing imports where there is no network."""
CARRIED = "tests", "loadtest", "constraints.txt"
RUN = """\
#!/bin/sh
# Installs what the machine lacks beside itself, tests, measures. PYTHON: one with torch.
# DEVICE=cpu MARK='not slow and not gpu' tries all of it in small, without a GPU.
cd "$(dirname "$0")" || exit 1
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/site:$PWD"
"$python" - "${DEVICE:-cuda}" <<'END' || exit 2
import sys

if sys.version_info[:2] != tuple(map(int, "@PYTHON@".split("."))):
    sys.exit(f"./run: its wheels are for Python @PYTHON@; PYTHON is {sys.version.split()[0]}")
try:
    import torch
except ImportError:
    sys.exit(f"./run: {sys.executable} has no torch; name one that has: PYTHON=... ./run")
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("./run: torch sees no GPU; DEVICE=cpu tries all of it in small")
END
lacking=$("$python" - <<'END'
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

for wheel in sorted(Path("wheels").glob("*.whl")):
    try:
        version(wheel.name.split("-")[0])
    except PackageNotFoundError:
        print(wheel)
END
)
[ -z "$lacking" ] || "$python" -m pip install --quiet --no-index --no-deps \\
    --target site $lacking || exit 1
mkdir -p out
"$python" -m pytest -p no:benchmark -p no:xdist -p no:cacheprovider -c pytest.ini --rootdir . -q \\
    --timeout 60 -m "${MARK:-gpu}" ${TESTS:-tests/workers/kv tests/workers/engines/torch}
status=$?
"$python" -m loadtest.bench_gpu --device "${DEVICE:-cuda}" --json out/bench_gpu.json || status=1
exit $status
"""
PYTEST = """\
[pytest]
addopts = --import-mode=importlib --strict-markers -ra
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
markers =
"""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--python", default="3.12", show_default=True, help="Of the machine.")
def main(folder: Path, python: str) -> None:
    """Write the folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    (own,) = wheels.glob("kvroute-*.whl")
    _pip(
        *("download", "--dest", str(wheels), "--only-binary", ":all:"),
        *("--python-version", python, "--constraint", str(ROOT / "constraints.txt")),
        *(f"--platform={platform}" for platform in PLATFORMS),
        f"{EXTRAS} @ {own.resolve().as_uri()}",
        *MORE,
    )
    for wheel in wheels.glob(f"{LEFT_OUT}-*.whl"):
        wheel.unlink()
    for name in CARRIED:
        _carry(ROOT / name, folder / name)
    (folder / "pytest.ini").write_text(PYTEST + _markers())
    run = folder / "run"
    run.write_text(RUN.replace("@PYTHON@", python))
    run.chmod(0o755)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    click.echo(f"{folder}: {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        raise click.ClickException(f"more than {MOST_BYTES / 1e6:g} MB")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=600)


def _carry(source: Path, target: Path) -> None:
    if source.is_file():
        shutil.copy(source, target)
        return
    ignored = shutil.ignore_patterns("__pycache__", "*.png", "node_modules")
    shutil.copytree(source, target, ignore=ignored)


def _markers() -> str:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    markers: list[str] = settings["tool"]["pytest"]["ini_options"]["markers"]
    return "".join(f"    {marker}\n" for marker in markers)


if __name__ == "__main__":
    main()
