"""A trace played once in virtual time, and its figures."""

import time

import pytest

from app.simulation.setting import Setting, Sharing
from loadtest.processes import forked
from loadtest.scenario import Scenario, offered, simulate
from loadtest.traces import DEMO_TRACE, Session, Trace, TraceRequest, read_trace


@pytest.fixture(scope="module")
def demo():
    return read_trace(DEMO_TRACE)


def test_a_run_is_reproducible_and_ranks_the_policies_as_expected(demo):
    scenario = Scenario(demo.cut(0.0, None, 500), Setting())
    ttft = {}
    for policy in ("random", "blocks", "latency"):
        mean = simulate(scenario, policy, load=1.1, seed=3)["ttft_mean_s"]
        assert mean is not None
        ttft[policy] = mean
    assert ttft["latency"] < ttft["blocks"] < ttft["random"]
    assert simulate(scenario, "latency", load=1.1, seed=3)["ttft_mean_s"] == ttft["latency"]
    assert simulate(scenario, "latency", load=1.1, seed=4)["ttft_mean_s"] != ttft["latency"]


@pytest.mark.slow
def test_sixteen_replicas_with_exact_state_decide_as_well_as_one(demo):
    trace = demo.cut(0.0, None, 800)

    def ttft(setting):
        mean = simulate(Scenario(trace, setting), "latency", load=1.1)["ttft_mean_s"]
        assert mean is not None
        return mean

    one = ttft(Setting())
    assert ttft(Setting(replicas=16)) == pytest.approx(one, rel=0.05)
    assert ttft(Setting(replicas=16, sharing=Sharing.NONE)) > 1.5 * one


def test_figures_that_no_request_has_are_absent(demo):
    at_once = simulate(Scenario(demo.cut(requests=1024), Setting(num_workers=1)), "random", 1e6)
    # The first 256 take all slots, and none is measured.
    assert at_once["failed"] == at_once["requests"] == 768
    assert at_once["token_s"] is None
    only_token = Session(0.0, (TraceRequest(0, 100, 1, (), 512),))
    alone = simulate(Scenario(Trace("made up", (only_token,)), Setting()), "random", 1)
    assert (alone["token_s"], alone["goodput_per_s"]) == (None, None)


def test_a_load_above_1_copies_sessions_but_only_compresses_single_requests():
    turns = tuple(TraceRequest(i, 512, 1, (1, 10 + i), 256) for i in range(2))
    closed = Trace("closed", (Session(0.0, turns), Session(8.0, turns)))
    assert [session.start_s for session in offered(closed, 2.0).sessions] == [0, 0, 8, 8]
    assert [session.start_s for session in offered(closed, 1.6).sessions] == [0, 0, 10, 10]
    open_loop = Trace("open", (Session(0.0, turns[:1]), Session(8.0, turns[:1])))
    assert [session.start_s for session in offered(open_loop, 4.0).sessions] == [0, 2]


def test_an_interrupted_comparison_does_not_wait_for_what_is_being_played():
    def interrupted():
        with forked(1) as executor:
            executor.submit(time.sleep, 100)
            raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() < begun + 50
