"""The comparison of rules for a fleet's size."""

import orjson
import pytest
from click.testing import CliRunner

from loadtest.autoscale import main


@pytest.mark.slow
def test_the_command_prints_a_table_for_each_choice_of_victims_and_saves_the_figures(tmp_path):
    args = ["--hours", "0.1", "--workers", "2", "--max-workers", "4", "--jobs", "2"]
    args += ["--load", "0.3", "--policy", "static:2", "--policy", "slo"]
    args += ["--victim", "unique_value", "--victim", "newest"]
    args += ["--json", str(tmp_path / "f.json")]
    result = CliRunner().invoke(main, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    unique, newest = orjson.loads((tmp_path / "f.json").read_bytes()).items()
    assert unique[0].endswith("; unique_value leaves")
    assert newest[0].endswith("; newest leaves")
    for _, played in (unique, newest):
        assert list(played) == ["`static:2`", "`slo`"]
        [static] = played["`static:2`"]
        assert (static["worker_hours"], static["changes"], static["lost"]) == (0.2, 0, 0)
        assert {one["requests"] for [one] in played.values()} == {static["requests"]}


@pytest.mark.slow
def test_two_runs_give_the_same_figures(tmp_path):
    texts = []
    for name in ("one.json", "two.json"):
        args = ["--hours", "0.1", "--load", "0.3", "--policy", "slo", "--jobs", "1"]
        args += ["--json", str(tmp_path / name)]
        assert CliRunner().invoke(main, args, catch_exceptions=False).exit_code == 0
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_curve_gives_every_choice_of_victims_the_same_sizes(tmp_path):
    out = tmp_path / "out.json"
    options = ("--hours", "0.1", "--jobs", "1", "--load", "0.3", "--json", str(out))
    victims = ("--victim", "newest", "--victim", "unique_value")
    played = CliRunner().invoke(main, ["--policy", "curve:4", *victims, *options])
    assert played.exit_code == 0, played.output
    newest, unique = (
        only for [[only]] in map(dict.values, orjson.loads(out.read_bytes()).values())
    )
    assert newest["sizes"] == unique["sizes"]
    assert newest["changes"] > 0


def test_a_curve_knows_no_roles():
    refused = CliRunner().invoke(main, ["--roles", "1p1d", "--policy", "curve:2"])
    assert refused.exit_code == 2
    assert "--roles: curve knows none" in refused.output
