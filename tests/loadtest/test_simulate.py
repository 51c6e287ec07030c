"""The command that compares policies offline."""

import re
from dataclasses import replace

import orjson
import pytest
from click.testing import CliRunner

from app.simulation.profiles import Link
from app.simulation.setting import Setting
from loadtest.scenario import Scenario, simulate
from loadtest.simulate import main
from loadtest.traces import DEMO_TRACE, read_trace


@pytest.fixture(scope="module")
def demo():
    return read_trace(DEMO_TRACE)


FEW = ("--requests", "20", "--workers", "2", "--jobs", "1")


@pytest.mark.slow
def test_there_is_a_table_for_each_load_with_a_row_for_each_policy(tmp_path):
    args = ["--policy", "random", "--policy", "blocks:8", "--load", "0.5", "--load", "1"]
    file = tmp_path / "f.json"
    result = CliRunner().invoke(main, [*FEW, *args, "--seeds", "2", "--json", str(file)])
    assert result.exit_code == 0, result.output
    saved = orjson.loads(file.read_bytes())
    assert [title.partition(" at ")[2] for title in saved] == [
        "0.50x the recorded rate",
        "1.00x the recorded rate",
    ]
    for load, played in zip((0.5, 1.0), saved.values(), strict=True):
        assert list(played) == ["`random`", "`blocks:8`"]
        assert [one["load"] for seeds in played.values() for one in seeds] == [load] * 4


@pytest.mark.slow
def test_the_loads_played_by_default_are_shares_of_the_knee_of_the_last_policy():
    result = CliRunner().invoke(main, [*FEW, "--policy", "random"])
    assert result.exit_code == 0, result.output
    knee, *loads = (float(x) for x in re.findall(r"([\d.]+)x the recorded rate", result.output))
    assert [load / knee for load in loads] == pytest.approx([0.5, 0.7, 0.9], abs=0.01)
    assert result.output.startswith("random reaches its knee")
    result = CliRunner().invoke(main, FEW)
    assert result.output.startswith("latency reaches its knee")


def test_the_ideal_is_no_policy_with_a_knee():
    result = CliRunner().invoke(main, [*FEW, "--policy", "ideal"])
    assert result.exit_code == 2
    assert "ideal has no knee to take loads from: set --load" in result.output


@pytest.mark.parametrize("name", ["lowest", "blocks:many", "latency:2"])
def test_an_invalid_policy_is_refused_by_name(name):
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
    tmp_path, line, arguments, message
):
    (tmp_path / "trace.jsonl").write_text(line)
    result = CliRunner().invoke(main, ["--trace", str(tmp_path / "trace.jsonl"), *arguments])
    assert (result.exit_code, result.output) == (1, f"Error: {message}\n")


def test_roles_and_a_link_split_requests(demo):
    args = ["--requests", "60", "--policy", "latency", "--load", "1", "--jobs", "1"]
    args += ["--roles", "1p2d", "--link-gbit", "100"]
    result = CliRunner().invoke(main, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "3 workers" in result.output
    scenario = Scenario(demo.cut(requests=60), Setting(num_workers=2, link=Link(12.5e9)))
    always = replace(scenario, setting=replace(scenario.setting, split_above=0))
    assert simulate(always, "latency", 0.1)["split"] == 1.0
    never = replace(scenario, setting=replace(scenario.setting, split_above=1_000_000))
    assert simulate(never, "latency", 0.1)["split"] == 0.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--roles", "2p"], "'2p' has no worker that decodes"),
        (["--roles", "2x6d"], "'2x6d' is not like 2p6d"),
        (["--roles", "8b"], "needs --link-gbit"),
    ],
)
def test_bad_roles_are_named(args, message):
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("\u2502", " ").split())
