"""Replaying a trace against a cluster, and the arithmetic of the report."""

import asyncio
import dataclasses
import io

import numpy as np
import orjson
import pytest
from click.testing import CliRunner
from rich.console import Console

from loadtest import report
from loadtest.client import FailureKind, Outcome
from loadtest.replay import replay, replay_policy
from loadtest.report import PolicyRun, summarise
from loadtest.traces import Session, Trace, TraceRequest


def answered(
    worker="a:0",
    *,
    arrival_s=0.0,
    ttft_s=1.0,
    request_s=10.0,
    prompt_tokens=100,
    cached_tokens=0,
    decision_s=0.002,
    late_s=0.5,
    attempts=1,
    degraded=False,
):
    return Outcome(
        request_id="r",
        arrival_s=arrival_s,
        sent_s=arrival_s + late_s,
        prompt_tokens=prompt_tokens,
        attempts=attempts,
        worker=worker,
        decision_s=decision_s,
        degraded=degraded,
        first_token_s=arrival_s + ttft_s,
        end_s=arrival_s + request_s,
        cached_tokens=cached_tokens,
        output_tokens=5,
    )


FAILED = Outcome("r", 0.0, 0.5, 100, 3, FailureKind.DEADLINE, "no answer within 9 s", "b:0")


def played(*outcomes, policy="latency", warmup=0.0):
    return PolicyRun(policy, "chat", speedup=8, load=1.5, warmup=warmup, outcomes=outcomes)


def printed(*runs):
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(report.table(runs))
    return console.export_text().splitlines()


def one_turn(index, start_s, input_tokens=8):
    return Session(start_s, (TraceRequest(index, input_tokens, 5, (), 512),))


class TestReport:
    def test_figures_are_those_of_a_worked_example(self):
        summary = summarise(
            played(
                answered("a:0", ttft_s=1, request_s=10, cached_tokens=0, decision_s=0.001),
                answered("a:0", ttft_s=2, request_s=20, cached_tokens=90, decision_s=0.002),
                answered("a:0", ttft_s=3, request_s=30, prompt_tokens=200, decision_s=0.003),
                answered("b:0", ttft_s=6, request_s=40, cached_tokens=60, decision_s=0.004,
                         attempts=2, degraded=True),
            )
        )  # fmt: skip
        assert summary.requests == 4
        assert summary.hit_rate == 0.3  # 150 of 500 tokens
        assert summary.ttft_mean_s == 3.0
        assert summary.ttft_p50_s == 2.5
        assert summary.ttft_p90_s == pytest.approx(5.1)  # 3 + 0.7 * (6 - 3)
        assert summary.request_mean_s == 25.0
        assert summary.requests_per_worker == {"a:0": 3, "b:0": 1}
        assert summary.balance == 1.5  # 3 over a mean of 2
        assert summary.decision_p50_ms == 2.5
        assert summary.send_delay_p99_s == 0.5
        assert (summary.retried, summary.degraded, summary.failed) == (1, 1, 0)

    def test_a_failed_request_counts_as_failed_and_in_no_latency_or_rate(self):
        summary = summarise(played(answered(ttft_s=2, cached_tokens=50), FAILED))
        assert (summary.requests, summary.failed) == (2, 1)
        assert summary.failures == {"deadline": 1}
        assert summary.ttft_mean_s == 2.0
        assert summary.hit_rate == 0.5

    def test_the_warm_up_is_left_out_but_its_workers_are_named(self):
        outcomes = [answered("a:0", ttft_s=50), *[answered("b:0", ttft_s=1)] * 3]
        summary = summarise(played(*outcomes, warmup=0.25))
        assert (summary.warmup_requests, summary.requests) == (1, 3)
        assert summary.ttft_mean_s == 1.0
        assert summary.requests_per_worker == {"a:0": 0, "b:0": 3}
        assert summary.balance == 2.0  # 3 over a mean of 1.5

    def test_a_worker_that_got_nothing_counts_in_the_balance(self):
        run = dataclasses.replace(played(*[answered("a:0")] * 3), workers=("a:0", "b:0", "c:0"))
        summary = summarise(run)
        assert summary.requests_per_worker == {"a:0": 3, "b:0": 0, "c:0": 0}
        assert summary.balance == 3.0

    def test_figures_without_data_are_absent(self):
        summary = summarise(played(FAILED))
        assert summary.ttft_mean_s is None
        assert summary.ttft_p99_s is None
        assert summary.hit_rate is None

    def test_the_ratio_is_the_first_over_the_last(self):
        first = summarise(played(answered(ttft_s=6, cached_tokens=10)))
        last = summarise(played(answered(ttft_s=2, cached_tokens=40)))
        ratio = report.ratio(first, last)
        assert ratio["ttft_mean_s"] == 3.0
        assert ratio["hit_rate"] == 0.25
        assert report.ratio(first, summarise(played(FAILED)))["ttft_mean_s"] is None

    def test_json_holds_every_policy_and_the_ratio(self):
        runs = [
            played(answered(ttft_s=6), policy="random"),
            played(answered(ttft_s=2), policy="latency"),
        ]
        data = orjson.loads(orjson.dumps(report.as_json(runs)))
        assert list(data["policies"]) == ["random", "latency"]
        assert data["policies"]["latency"]["ttft_mean_s"] == 2.0
        assert data["ratio"]["ttft_mean_s"] == 3.0
        assert (data["trace"], data["speedup"], data["load"]) == ("chat", 8, 1.5)

    def test_json_of_a_single_policy_has_no_ratio(self):
        assert report.as_json([played(answered())])["ratio"] == {}

    def test_the_table_shows_policies_side_by_side_with_their_ratio(self):
        lines = printed(
            played(answered(ttft_s=6), policy="random"),
            played(answered(ttft_s=2), policy="latency"),
        )
        assert next(line for line in lines if "random / latency" in line)
        ttft = next(line for line in lines if "TTFT mean" in line)
        assert ttft.split() == ["TTFT", "mean", "6.00", "s", "2.00", "s", "3.00x"]

    def test_the_table_of_a_single_policy_has_no_ratio_and_marks_absent_figures(self):
        ttft = next(line for line in printed(played(FAILED)) if "TTFT mean" in line)
        assert ttft.split() == ["TTFT", "mean", "-"]

    def test_the_table_says_what_was_left_out_and_which_seconds_it_shows(self):
        text = " ".join(printed(played(*[answered()] * 4, warmup=0.25)))
        assert "Without the first 1 requests" in text
        assert "wall time x 8" in text

    def test_the_table_warns_of_a_client_that_was_late_itself(self):
        in_time = played(answered(ttft_s=4.0, late_s=0.9), policy="random")
        late = played(answered(ttft_s=4.0, late_s=1.1), policy="latency")
        assert "The client itself was late (latency): " in " ".join(printed(in_time, late))
        assert "late (" not in " ".join(printed(in_time, played(FAILED)))

    def test_the_table_says_that_failed_requests_are_not_in_its_figures(self):
        whole, failing = played(answered(), policy="random"), played(answered(), FAILED)
        assert "Requests failed (latency): " in " ".join(printed(whole, failing))
        assert "Requests failed" not in " ".join(printed(whole))


class TestReplay:
    async def test_arrivals_and_times_are_in_engine_seconds(self, cluster):
        trace = Trace("chat", (one_turn(0, 10.0), one_turn(1, 50.0)))
        run = await replay_policy(trace, cluster.url, "random", speedup=400)
        assert [o.arrival_s for o in run.outcomes] == pytest.approx([10, 50])
        assert [o.failure for o in run.outcomes] == [None, None]
        assert run.workers == ("w1:0", "w2:0")
        first = run.outcomes[0]
        assert first.first_token_s is not None
        assert first.decision_s is not None
        # The decision (wall seconds) is part of the wait for the first token (engine seconds).
        assert first.first_token_s - first.arrival_s > first.decision_s * 400

    async def test_load_makes_arrivals_denser(self, cluster):
        trace = Trace("chat", (one_turn(0, 10.0), one_turn(1, 50.0)))
        run = await replay_policy(trace, cluster.url, "random", speedup=400, load=2)
        assert [o.arrival_s for o in run.outcomes] == pytest.approx([5, 25])

    async def test_a_turn_arrives_its_think_time_after_the_answer_before(self, cluster):
        turns = (TraceRequest(0, 8, 5, (), 256), TraceRequest(1, 8, 5, (), 256, think_s=20.0))
        run = await replay_policy(
            Trace("agentic", (Session(0.0, turns),)), cluster.url, "random", speedup=400
        )
        first, second = run.outcomes
        assert first.end_s is not None
        assert second.arrival_s >= first.end_s + 20
        assert cluster.calls.index("POST /worker/v1/completions") == 1
        assert cluster.calls[4] == "POST /v1/route"

    async def test_progress_counts_up_to_the_whole_trace(self, cluster):
        cluster.cached_tokens = 4
        cluster.route_script.append(422)
        seen = []
        trace = Trace("chat", tuple(one_turn(i, 0.0) for i in range(3)))
        await replay_policy(trace, cluster.url, "random", speedup=400, on_progress=seen.append)
        assert [p.done for p in seen] == [1, 2, 3]
        assert (seen[-1].total, seen[-1].failed) == (3, 1)
        assert seen[-1].hit_rate == 0.5

    async def test_another_seed_sends_other_prompts(self, cluster):
        trace = Trace("chat", (one_turn(0, 0.0),))
        for seed in (1, 1, 2):
            await replay_policy(trace, cluster.url, "random", seed=seed)
        same, again, other = cluster.prompts
        assert same == again != other
        assert np.frombuffer(same, "<u4").tolist() == trace.sessions[0].turns[0].prompt(1).tolist()

    async def test_no_request_id_is_used_twice_even_by_a_second_replay(self, cluster):
        trace = Trace("chat", tuple(one_turn(i, 0.0) for i in range(2)))
        for _ in range(2):
            await replay_policy(trace, cluster.url, "random", speedup=400)
        assert len({query["request_id"] for query in cluster.queries}) == 4


async def invoke(*arguments):
    """Runs the command in a thread, because the cluster runs on the test's event loop."""
    return await asyncio.to_thread(CliRunner().invoke, replay, arguments)


class TestCommand:
    @pytest.fixture
    def trace_file(self, tmp_path):
        line = b'{"timestamp":0,"input_length":600,"output_length":9,"hash_ids":[0,1]}\n'
        (tmp_path / "two.jsonl").write_bytes(line * 2)
        return str(tmp_path / "two.jsonl")

    async def test_two_policies_are_compared_in_table_and_json(self, cluster, trace_file, tmp_path):
        done = await invoke(
            *("--url", cluster.url, "--trace", trace_file, "--speedup", "100", "--warmup", "0"),
            *("--policy", "random", "--policy", "latency"),
            *("--json", str(tmp_path / "out.json")),
        )
        assert done.exit_code == 0, done.output
        assert "random / latency" in done.output
        figures = orjson.loads((tmp_path / "out.json").read_bytes())
        assert figures["policies"]["random"]["requests"] == 2
        assert figures["policies"]["latency"]["failed"] == 0

    async def test_policies_find_no_blocks_of_each_other_in_the_caches(self, cluster, trace_file):
        await invoke(
            *("--url", cluster.url, "--trace", trace_file, "--speedup", "100", "--requests", "1"),
            *("--policy", "random", "--policy", "latency"),
        )
        first, second = (prompt for prompt in cluster.prompts if len(prompt) == 2400)
        assert first[:2048] != second[:2048]

    async def test_a_policy_that_routers_refuse_is_an_error_before_anything_is_played(
        self, cluster, trace_file
    ):
        cluster.route_script.append(422)
        done = await invoke("--url", cluster.url, "--trace", trace_file, "--policy", "odd")
        assert done.exit_code == 1
        assert "Error: a test request failed: " in done.output
        assert "422" in done.output
        assert len(cluster.calls) == 1

    async def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_played(
        self, cluster, trace_file
    ):
        done = await invoke(
            "--url", cluster.url, "--trace", trace_file, "--json", f"{trace_file}/f"
        )
        assert done.exit_code == 1
        assert done.output == f"Error: {trace_file}: File exists\n"
        assert cluster.calls == []

    async def test_failures_are_reported_with_an_example(self, cluster, trace_file):
        cluster.route_script.extend([200, 422])
        done = await invoke("--url", cluster.url, "--trace", trace_file, "--speedup", "100")
        assert done.exit_code == 0
        assert "default: 1 failed, refused, such as: http://127.0.0.1" in done.output

    async def test_a_replay_without_a_single_answer_is_an_error(self, cluster, trace_file):
        cluster.route_script.extend([200, 422, 422])
        done = await invoke("--url", cluster.url, "--trace", trace_file, "--speedup", "100")
        assert done.exit_code == 1
        assert "no request was answered" in done.output

    async def test_a_bad_trace_is_an_error_that_names_the_line(self, tmp_path):
        (tmp_path / "bad.jsonl").write_text('{"timestamp": -1}')
        done = await invoke("--trace", str(tmp_path / "bad.jsonl"))
        assert done.exit_code == 1
        assert "bad.jsonl:1: field 'timestamp'" in done.output
