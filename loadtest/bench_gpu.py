"""The figures of a GPU, measured within eight minutes.

    python -m loadtest.bench_gpu --json out/bench_gpu.json

Each benchmark is a process with a limit of its own, the longest last: one that fails or hangs costs
its own figures only. With `--device cpu` the same runs in small.
"""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import orjson
import torch
from rich.console import Console

from loadtest.devices import device_option
from loadtest.harness import bench


@dataclass(frozen=True, slots=True)
class Part:
    """A benchmark. command: a module and its arguments; `{out}` is a folder of its own, `{device}`
    the device. file: that it writes there. limit_s: it is ended after so long."""

    name: str
    command: str
    file: str
    limit_s: float


PARTS = (
    Part(
        "tiers",
        "loadtest.bench_tiers --kib=16 --kib=64 --kib=256 --kib=2048 --mib=64 --rounds=5 "
        "--folder={out} --json={out}/tiers.json",
        "tiers.json",
        75.0,
    ),
    Part(
        "transfer",
        "loadtest.bench_transfer --device={device} --rounds=3 --json={out}/transfer.json",
        "transfer.json",
        100.0,
    ),
    Part(
        "demo",
        "loadtest.demo_torch --device={device} --rounds=3 --out={out}",
        "demo-torch.json",
        200.0,
    ),
)
TERMINATE_S = 10.0


def measure(device: str, parts: Sequence[Part] = PARTS) -> dict[str, Any]:
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "card": card or "cpu",
        "conditions": f"{card or 'CPU'}, torch {torch.__version__}, {date}.",
        "parts": {part.name: taken(part, device) for part in parts},
    }


def taken(part: Part, device: str) -> Any:
    """The figures that the part wrote, or {"error": why there are none}."""
    with TemporaryDirectory(dir=".") as out:
        command = part.command.format(out=out, device=device)
        click.echo(f"python -m {command}")
        process = subprocess.Popen([sys.executable, "-m", *command.split()])
        try:
            status = process.wait(part.limit_s)
            if status:
                return {"error": f"it ended with {status}"}
            return orjson.loads(Path(out, part.file).read_bytes())
        except subprocess.TimeoutExpired:
            return {"error": f"it took more than {part.limit_s:g} s"}
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(TERMINATE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def show(result: dict[str, Any], console: Console) -> None:
    """Raises ClickException if nothing could be measured."""
    console.print(result["conditions"])
    for name, found in result["parts"].items():
        error = found.get("error")
        console.print(
            f"{name}:", f"not measured: {error}" if error else orjson.dumps(found).decode()
        )
    if all("error" in found for found in result["parts"].values()):
        raise click.ClickException("nothing could be measured")


main = bench(measure, show, device_option)

if __name__ == "__main__":
    main()
