"""The comparison of rules for a fleet's size: its figures, its command."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from app.planner.rules.state import Prediction, Proposal, Reason, Rules
from app.simulation.profiles import USUAL
from loadtest.autoscale import Figures, ScalingVariant, figures_of, main
from loadtest.client import FailureKind, Outcome
from loadtest.scaling import Played


def outcome(arrival_s: float, ttft_s: float = 1.0) -> Outcome:
    return Outcome(
        request_id=str(arrival_s),
        arrival_s=arrival_s,
        sent_s=arrival_s,
        prompt_tokens=100,
        attempts=1,
        first_token_s=arrival_s + ttft_s,
        end_s=arrival_s + ttft_s,
        output_tokens=1,
    )


def change(at_s: float, size: int, desired: int, attainment: float | None = None) -> Proposal:
    candidates = ()
    if attainment is not None:
        candidates = (Prediction(desired, 100, attainment, 1.0, 0.0),)
    return Proposal(at_s, "slo", size, desired, Reason.ENOUGH, candidates=candidates)


def figures(proposals: list[Proposal], outcomes: list[Outcome]) -> Figures:
    played = Played(outcomes, proposals, worker_s=7200.0, recomputed_s=5.0)
    return figures_of("slo", "newest", played, USUAL, Rules(window_s=100.0))


def test_a_change_that_undoes_one_of_the_last_ten_minutes_is_a_reversal() -> None:
    found = figures(
        [
            change(0.0, 4, 5),
            change(30.0, 5, 5),
            change(60.0, 5, 6),
            change(660.0, 6, 5),
            change(1290.0, 5, 6),
        ],
        [outcome(0.0)],
    )
    assert (found.changes, found.reversals) == (4, 1)
    assert found.worker_hours == 2.0
    assert found.prediction_error is None


def test_a_request_without_an_answer_is_lost_and_misses_the_slo() -> None:
    lost = Outcome("lost", 1.0, 1.0, 100, 1, failure=FailureKind.FULL)
    found = figures([], [outcome(0.0), lost, outcome(2.0, ttft_s=9.0), outcome(3.0)])
    assert (found.lost, found.within_slo) == (1, 0.5)


def test_a_prediction_is_compared_with_what_then_was_until_the_next_change() -> None:
    # From 10 s to 40 s a third of the requests is late, afterwards all are.
    outcomes = [
        outcome(float(at_s), ttft_s=9.0 if at_s >= 40 or at_s % 3 == 0 else 1.0)
        for at_s in range(200)
    ]
    down, up = change(10.0, 5, 4, attainment=0.9), change(40.0, 4, 5, attainment=1.0)
    assert figures([down, up], outcomes).prediction_error == pytest.approx(0.9 - 2 / 3)
    # Without a next change, what then was is as long as what was predicted: 10 s to 110 s.
    assert figures([down], outcomes).prediction_error == pytest.approx(0.9 - 0.2)
    assert figures([down], outcomes[:25]).prediction_error is None


def test_the_number_after_a_policy_is_what_it_is_set_to() -> None:
    usual = Rules()
    scaled = ScalingVariant("threshold:0.5").rules(usual)
    assert (scaled.prefill_queue_up, scaled.kv_load_down) == (0.25, 0.25)
    assert ScalingVariant("waiting:2").rules(usual).waiting_per_worker == 10.0
    assert ScalingVariant("oracle:0.9").rules(usual).slo.target == 0.9
    assert ScalingVariant("slo").rules(usual) == usual


@pytest.mark.slow
def test_the_command_prints_a_table_for_each_choice_of_victims_and_saves_the_figures(
    tmp_path: Path,
) -> None:
    args = ["--hours", "0.1", "--workers", "2", "--max-workers", "4", "--jobs", "2"]
    args += ["--load", "0.3", "--policy", "static:2", "--policy", "slo", "--policy", "oracle:0.9"]
    args += ["--victim", "unique_value", "--victim", "newest"]
    args += ["--json", str(tmp_path / "f.json"), "--png", str(tmp_path / "f.png")]
    result = CliRunner().invoke(main, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "unique_value leaves" in result.output
    assert "newest leaves" in result.output
    saved = orjson.loads((tmp_path / "f.json").read_bytes())["figures"]
    assert [(f["policy"], f["victim"]) for f in saved] == [
        (policy, victim)
        for policy in ("static:2", "slo", "oracle:0.9")
        for victim in ("unique_value", "newest")
    ]
    static = saved[0]
    assert (static["worker_hours"], static["changes"], static["lost"]) == (0.2, 0, 0)
    assert {f["requests"] for f in saved} == {static["requests"]}
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_two_runs_give_the_same_figures(tmp_path: Path) -> None:
    texts = []
    for name in ("one.json", "two.json"):
        args = ["--hours", "0.1", "--load", "0.3", "--policy", "slo", "--jobs", "1"]
        args += ["--json", str(tmp_path / name)]
        assert CliRunner().invoke(main, args, catch_exceptions=False).exit_code == 0
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]


def test_the_fewest_workers_that_keep_the_slo_are_found(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--hours", "0.1", "--jobs", "1", "--load", "0.3", "--json", str(out))
    played = CliRunner().invoke(main, ["--equal", "0.9", "--policy", "static:1", *options])
    assert played.exit_code == 0, played.output
    [found] = orjson.loads(out.read_bytes())["figures"]
    size = int(found["policy"].partition(":")[2])
    assert found["within_slo"] >= 0.9
    fewer = CliRunner().invoke(main, ["--policy", f"static:{size - 1}", *options])
    assert fewer.exit_code == 0, fewer.output
    [found] = orjson.loads(out.read_bytes())["figures"]
    assert found["within_slo"] < 0.9


def test_a_curve_gives_every_choice_of_victims_the_same_sizes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--hours", "0.1", "--jobs", "1", "--load", "0.3", "--json", str(out))
    victims = ("--victim", "newest", "--victim", "unique_value")
    played = CliRunner().invoke(main, ["--policy", "curve:4", *victims, *options])
    assert played.exit_code == 0, played.output
    newest, unique = orjson.loads(out.read_bytes())["figures"]
    assert newest["sizes"] == unique["sizes"]
    assert newest["changes"] > 0


def test_only_policies_that_know_roles_take_them() -> None:
    refused = CliRunner().invoke(main, ["--roles", "1p1d", "--policy", "waiting"])
    assert refused.exit_code == 2
    assert "--roles: waiting knows none; use slo, threshold, oracle, static" in refused.output
