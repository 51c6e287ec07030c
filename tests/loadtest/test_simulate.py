"""The offline comparison of policies: its figures, its searches, its command."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from app.simulation.link import Link
from app.simulation.profiles import USUAL
from app.simulation.setting import Setting, Sharing
from loadtest.client import Outcome
from loadtest.simulate import (
    Scenario,
    alone_s,
    highest,
    knee,
    limit,
    main,
    meets_slo,
    offered,
    processes,
    simulate,
)
from loadtest.traces import DEMO_TRACE, Session, Trace, TraceRequest, read_trace


@pytest.fixture(scope="module")
def demo() -> Trace:
    return read_trace(DEMO_TRACE)


def outcome(prompt_tokens: int, ttft_s: float, token_s: float) -> Outcome:
    return Outcome(
        request_id="r",
        arrival_s=10.0,
        sent_s=10.0,
        prompt_tokens=prompt_tokens,
        attempts=1,
        first_token_s=10.0 + ttft_s,
        end_s=10.0 + ttft_s + 10 * token_s,
        output_tokens=11,
    )


def test_a_run_is_reproducible_and_ranks_the_policies_as_expected(demo: Trace) -> None:
    scenario = Scenario(demo.cut(0.0, None, 500), Setting())
    ttft = {}
    for policy in ("random", "blocks", "latency"):
        mean = simulate(scenario, policy, load=1.1, seed=3).summary.ttft_mean_s
        assert mean is not None
        ttft[policy] = mean
    assert ttft["latency"] < ttft["blocks"] < ttft["random"]
    assert simulate(scenario, "latency", load=1.1, seed=3).summary.ttft_mean_s == ttft["latency"]
    assert simulate(scenario, "latency", load=1.1, seed=4).summary.ttft_mean_s != ttft["latency"]


def test_sixteen_replicas_with_exact_state_decide_as_well_as_one(demo: Trace) -> None:
    trace = demo.cut(0.0, None, 800)

    def ttft(setting: Setting) -> float:
        mean = simulate(Scenario(trace, setting), "latency", load=1.1).summary.ttft_mean_s
        assert mean is not None
        return mean

    one = ttft(Setting())
    assert ttft(Setting(replicas=16)) == pytest.approx(one, rel=0.05)
    assert ttft(Setting(replicas=16, sharing=Sharing.NONE)) > 1.5 * one


def test_a_prompt_alone_takes_the_sum_of_its_steps() -> None:
    # 2,048 tokens: 2 ms + 9.5 ms + 80.3 us a token, and 1.1 ns for each pair that attends.
    assert alone_s(USUAL, 2048) == pytest.approx(0.1759 + 1.10e-9 * 2048 * 1024, rel=1e-3)
    rest = USUAL.compute_s(52, 52 * (2048 + 26), 0)
    assert alone_s(USUAL, 2100) == pytest.approx(alone_s(USUAL, 2048) + rest)


@pytest.mark.parametrize(
    ("ttft_s", "token_s", "met"), [(2.26, 0.1, True), (2.28, 0.1, False), (2.26, 0.101, False)]
)
def test_the_slo_bounds_ttft_and_the_time_per_further_token(
    ttft_s: float, token_s: float, met: bool
) -> None:
    # 2 s + 1.5 * 178 ms.
    assert meets_slo(outcome(2048, ttft_s, token_s), USUAL) is met


def test_a_request_without_an_answer_misses_the_slo() -> None:
    assert not meets_slo(Outcome("r", 0.0, 0.0, 100, 1), USUAL)


def test_figures_that_no_request_has_are_absent(demo: Trace) -> None:
    at_once = simulate(Scenario(demo.cut(requests=1024), Setting(num_workers=1)), "random", 1e6)
    # The first 256 take all slots, and none is measured.
    assert at_once.summary.failed == at_once.summary.requests == 768
    assert at_once.token_s is None
    only_token = Session(0.0, (TraceRequest(0, 100, 1, (), 512),))
    alone = simulate(Scenario(Trace("made up", (only_token,)), Setting()), "random", 1)
    assert (alone.token_s, alone.goodput_per_s) == (None, None)


def test_a_search_ends_just_below_the_highest_acceptable_load() -> None:
    for bound in (0.3, 1.0, 1.7, 13.0):
        assert bound / 1.02 <= highest(lambda load, bound=bound: load <= bound) <= bound
    assert highest(lambda _: False) == 0.0
    assert highest(lambda _: True) == 64.0


def test_the_knee_and_the_limit_are_the_highest_loads_within_their_bounds(demo: Trace) -> None:
    scenario = Scenario(demo.cut(0.0, None, 150), Setting(num_workers=2))

    def ttft(load: float) -> float:
        return simulate(scenario, "random", load).summary.ttft_mean_s or 0.0

    found = knee(scenario, "random")
    assert ttft(found) <= 3 * ttft(0.1) < ttft(found * 1.1)

    def within_slo(load: float) -> float:
        return sum(simulate(scenario, "random", load, seed).within_slo for seed in (0, 1)) / 2

    found = limit(scenario, "random", 0.9, seeds=2)
    assert within_slo(found) >= 0.9 > within_slo(found * 1.1)


def test_a_load_above_1_copies_sessions_but_only_compresses_single_requests() -> None:
    turns = tuple(TraceRequest(i, 512, 1, (1, 10 + i), 256) for i in range(2))
    closed = Trace("closed", (Session(0.0, turns), Session(8.0, turns)))
    assert [session.start_s for session in offered(closed, 2.0).sessions] == [0, 0, 8, 8]
    assert [session.start_s for session in offered(closed, 1.6).sessions] == [0, 0, 10, 10]
    open_loop = Trace("open", (Session(0.0, turns[:1]), Session(8.0, turns[:1])))
    assert [session.start_s for session in offered(open_loop, 4.0).sessions] == [0, 2]


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


def test_an_interrupted_comparison_does_not_wait_for_what_is_being_played(demo: Trace) -> None:
    def interrupted(scenario: Scenario) -> None:
        with processes(scenario, 1) as executor:
            executor.submit(time.sleep, 100)
            raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted(Scenario(demo, Setting()))
    assert time.monotonic() < begun + 50


def test_the_loads_played_by_default_are_shares_of_the_knee(tmp_path: Path) -> None:
    args = ["--requests", "40", "--workers", "2", "--policy", "random", "--jobs", "1"]
    result = CliRunner().invoke(main, [*args, "--json", str(tmp_path / "f.json")])
    assert result.exit_code == 0, result.output
    saved = orjson.loads((tmp_path / "f.json").read_bytes())
    shares = [figures["load"] / saved["knee"] for figures in saved["figures"]]
    assert shares == pytest.approx([0.5, 0.7, 0.9])


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
