"""What the commands here take, and refuse before they measure anything."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

WITH_A_FILE = (
    *("simulate", "bench_burst", "bench_decision", "bench_failover", "bench_index"),
    *("bench_index_sweeps", "bench_replicas", "bench_shards", "bench_tiers", "bench_waiting"),
)


def invoke(module: str, *arguments: str) -> Result:
    command: click.Command = import_module(f"loadtest.{module}").main
    return CliRunner().invoke(command, arguments)


@pytest.mark.parametrize("module", WITH_A_FILE)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    module: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    inside_a_file = invoke(module, "--json", str(tmp_path / "file" / "out.json"))
    assert inside_a_file.output == f"Error: {tmp_path / 'file'}: File exists\n"
    a_folder = invoke(module, "--json", str(tmp_path))
    assert a_folder.exit_code == 2
    assert "is a directory" in a_folder.output
