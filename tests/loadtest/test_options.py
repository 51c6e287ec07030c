"""Options that the commands of loadtest/ refuse before they measure anything."""

import signal
from importlib import import_module
from inspect import signature
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from loadtest import autoscale, bench_replicas, bench_tiers, simulate
from loadtest.command import Command, save
from loadtest.demo import demo
from loadtest.experiments import splits
from loadtest.replay import replay

WITH_A_FILE = (
    *(
        "simulate",
        "experiments.splits",
        "bench_bridge",
        "bench_decision",
        "bench_door",
        "bench_failover",
    ),
    *("bench_index", "bench_replicas", "bench_tiers", "bench_transfer"),
)
COMMANDS = (*WITH_A_FILE, "demo_torch")


def invoke(module, *arguments):
    command = import_module(f"loadtest.{module}").main
    return CliRunner().invoke(command, arguments)


@pytest.mark.parametrize("module", WITH_A_FILE)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(module, tmp_path):
    (tmp_path / "file").touch()
    inside_a_file = invoke(module, "--json", str(tmp_path / "file" / "out.json"))
    assert inside_a_file.output == f"Error: {tmp_path / 'file'}: File exists\n"
    a_folder = invoke(module, "--json", str(tmp_path))
    assert a_folder.exit_code == 2
    assert "is a directory" in a_folder.output


def test_a_report_for_which_the_disk_has_no_room_is_named_in_one_line():
    @click.command(cls=Command)
    def bench():
        save({"figures": 1}, Path("/dev/full"))

    result = CliRunner().invoke(bench)
    assert (result.exit_code, result.output) == (1, "Error: /dev/full: No space left on device\n")


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path):
    refused = invoke("bench_tiers", "--folder", str(tmp_path / "none"))
    assert refused.exit_code == 2
    assert "does not exist" in refused.output


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("autoscale", "--hours nan"),
        ("autoscale", "--load 0"),
        ("autoscale", "--policy slo:many"),
        ("autoscale", "--policy slo:0.5"),
        ("autoscale", "--policy static:1.5"),
        ("autoscale", "--policy static"),
        ("autoscale", "--policy fastest"),
        ("bench_failover", "--seeds 0"),
        ("bench_index", "--blocks 0"),
        ("bench_index", "--queries 0"),
        ("bench_index", "--repeats 0"),
        ("bench_index", "--workers 2"),
        ("bench_replicas", "--load nan"),
        ("bench_replicas", "--speedup inf"),
        ("bench_tiers", "--kib 0"),
        ("bench_tiers", "--kib 7"),
        ("bench_tiers", "--kib 17"),
        ("bench_tiers", "--mib 0"),
        ("bench_tiers", "--rounds 0"),
        ("simulate", "--load inf"),
        ("simulate", "--load nan"),
        ("simulate", "--policy blocks:-5"),
        ("simulate", "--policy blocks:nan"),
    ],
)
def test_an_unusable_number_is_refused(module, arguments):
    option, _ = arguments.split()
    refused = invoke(module, *arguments.split())
    assert refused.exit_code == 2, refused.output
    assert f"Invalid value for '{option}'" in refused.output


def test_a_cluster_without_a_scheme_is_refused():
    refused = CliRunner().invoke(replay, ["--url", "localhost:8080"])
    assert refused.exit_code == 2
    assert "'localhost:8080' is not the http:// or https:// base URL of a host" in refused.output


def test_sigterm_ends_a_command_as_ctrl_c_does_and_lets_it_clean_up():
    cleaned_up = []

    @click.command(cls=Command)
    def command():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned_up.append(True)

    ended = CliRunner().invoke(command)
    assert (ended.exit_code, ended.output, cleaned_up) == (1, "\nAborted!\n", [True])


@pytest.mark.parametrize("module", COMMANDS)
def test_every_command_ends_that_way(module):
    assert isinstance(import_module(f"loadtest.{module}").main, Command)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (demo, "--policy latency --policy random --policy latency"),
        (replay, "--policy random --policy random"),
        (bench_replicas.main, "--replicas 1 --replicas 4 --replicas 4"),
        (bench_tiers.main, "--kib 16 --kib 64 --kib 16"),
        (autoscale.main, "--policy slo --policy slo"),
        (autoscale.main, "--victim newest --victim newest"),
        (simulate.main, "--policy blocks:8 --policy blocks:8"),
        (simulate.main, "--load 1 --load 2 --load 1"),
        (splits.main, "--link-gbit 100 --link-gbit 400 --link-gbit 100"),
    ],
)
def test_the_same_twice_is_refused_where_results_are_told_apart_by_it(command, arguments):
    refused = CliRunner().invoke(command, arguments)
    assert refused.exit_code == 2, refused.output
    assert " twice" in refused.output


def test_whoever_plays_replicas_gives_a_seed_and_nothing_else():
    fleet = {"num_workers": 2, "load": 1.0, "speedup": 4.0}
    for play in bench_replicas.rows((1, 2), 40, **fleet)[""].values():
        assert signature(play).bind(1)
