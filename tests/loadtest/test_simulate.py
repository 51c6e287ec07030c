"""The command that compares policies offline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from app.simulation.link import Link
from app.simulation.setting import Setting
from loadtest.scenario import Scenario, simulate
from loadtest.simulate import main
from loadtest.traces import DEMO_TRACE, Trace, read_trace


@pytest.fixture(scope="module")
def demo() -> Trace:
    return read_trace(DEMO_TRACE)


@pytest.mark.slow
def test_the_command_prints_a_table_for_each_load_and_saves_the_figures(tmp_path: Path) -> None:
    args = ["--requests", "60", "--workers", "2", "--policy", "random", "--policy", "blocks:8"]
    args += ["--load", "0.5", "--load", "1", "--seeds", "2", "--jobs", "2", "--limit", "0.5"]
    args += ["--json", str(tmp_path / "f.json"), "--png", str(tmp_path / "f.png")]
    result = CliRunner().invoke(main, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "0.50x the recorded rate" in result.output
    assert "1.00x the recorded rate" in result.output
    saved = orjson.loads((tmp_path / "f.json").read_bytes())
    asked = [(f["policy"], f["load"], f["seed"]) for f in saved["figures"]]
    assert asked == [
        (policy, load, seed)
        for load in (0.5, 1.0)
        for policy in ("random", "blocks:8")
        for seed in (0, 1)
    ]
    assert set(saved["limit"]["load"]) == {"random", "blocks:8"}
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_loads_played_by_default_are_shares_of_the_knee(tmp_path: Path) -> None:
    args = ["--requests", "40", "--workers", "2", "--policy", "random", "--jobs", "1"]
    result = CliRunner().invoke(main, [*args, "--json", str(tmp_path / "f.json")])
    assert result.exit_code == 0, result.output
    saved = orjson.loads((tmp_path / "f.json").read_bytes())
    shares = [figures["load"] / saved["knee"] for figures in saved["figures"]]
    assert shares == pytest.approx([0.5, 0.7, 0.9])


@pytest.mark.slow
def test_the_knee_searched_for_by_default_is_that_of_latency() -> None:
    result = CliRunner().invoke(main, ["--requests", "20", "--workers", "2", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("latency reaches its knee")


def test_the_ideal_is_no_policy_with_a_knee_or_a_limit() -> None:
    few = ["--requests", "20", "--workers", "2", "--jobs", "1"]
    both = ["--policy", "latency", "--policy", "ideal"]
    result = CliRunner().invoke(main, [*few, *both, "--limit", "0.9"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("latency reaches its knee")
    assert "latency keeps 90%" in result.output
    assert "ideal keeps" not in result.output
    result = CliRunner().invoke(main, [*few, "--policy", "ideal"])
    assert result.exit_code == 2
    assert "ideal has no knee to take loads from: set --load" in result.output


@pytest.mark.parametrize("name", ["lowest", "blocks:many", "latency:2"])
def test_an_invalid_policy_is_refused_by_name(name: str) -> None:
    result = CliRunner().invoke(main, ["--policy", name])
    assert result.exit_code == 2
    assert name in result.output


@pytest.mark.parametrize(
    ("line", "arguments", "message"),
    [
        ('{"timestamp":-1}', [],
         "trace.jsonl:1: field 'timestamp': expected a whole number from 0, found -1"),
        ('{"timestamp":0,"input_length":399990,"output_length":11,"hash_ids":[]}', [],
         "request 0 has 399,990 tokens and an answer of 11; a worker holds 1,562 blocks of 256"),
        ('{"timestamp":0,"input_length":9,"output_length":9,"hash_ids":[]}',
         ["--block-size", "1000000"],
         "request 0 has 9 tokens and an answer of 9; a worker holds 0 blocks of 1,000,000"),
    ],
)  # fmt: skip
def test_a_trace_that_cannot_be_played_is_an_error_before_anything_is_played(
    tmp_path: Path, line: str, arguments: list[str], message: str
) -> None:
    (tmp_path / "trace.jsonl").write_text(line)
    result = CliRunner().invoke(main, ["--trace", str(tmp_path / "trace.jsonl"), *arguments])
    assert (result.exit_code, result.output) == (1, f"Error: {message}\n")


def test_roles_and_a_link_split_requests(demo: Trace) -> None:
    args = ["--requests", "60", "--policy", "latency", "--load", "1", "--jobs", "1"]
    args += ["--roles", "1p2d", "--link-gbit", "100", "--split-above", "2048"]
    result = CliRunner().invoke(main, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "3 workers" in result.output
    scenario = Scenario(demo.cut(requests=60), Setting(num_workers=2, link=Link(12.5e9)))
    always = replace(scenario, setting=replace(scenario.setting, split_above=0))
    assert simulate(always, "latency", 0.1).split == 1.0
    never = replace(scenario, setting=replace(scenario.setting, split_above=1_000_000))
    assert simulate(never, "latency", 0.1).split == 0.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--roles", "2p"], "'2p' has no worker that decodes"),
        (["--roles", "2x6d"], "'2x6d' is not like 2p6d"),
        (["--roles", "8b"], "need --link-gbit"),
        (["--split-above", "2048"], "need --link-gbit"),
    ],
)
def test_bad_roles_are_named(args: list[str], message: str) -> None:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("\u2502", " ").split())
