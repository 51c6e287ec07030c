import pytest

from app.simulation.profiles import PROFILES
from app.simulation.setting import Setting
from loadtest.ideal import ideal
from loadtest.traces import DEMO_TRACE, Session, Trace, read_trace
from loadtest.virtual import Simulation, TracePrompts
from tests.loadtest.test_virtual import open_loop, request


def ttft_s(outcome):
    assert outcome.first_token_s is not None
    return outcome.first_token_s - outcome.arrival_s


def request_s(outcome):
    assert outcome.end_s is not None
    return outcome.end_s - outcome.arrival_s


def test_no_request_waits():
    trace = open_loop(
        *(request(i, blocks) for i, blocks in enumerate([(7, 8), (9,), (7, 8)])), every_s=0.0
    )
    setting = Setting(num_workers=1)
    first, other, again = ideal(setting, trace, TracePrompts(setting.block_size))
    assert [outcome.cached_tokens for outcome in (first, other, again)] == [0, 0, 7 * 256]
    for asked in (first, other):
        alone = Trace("alone", (trace.sessions[int(asked.request_id)],))
        [outcome] = Simulation("latency", setting).run(alone)
        # A live request also waits for its router.
        assert ttft_s(outcome) == pytest.approx(ttft_s(asked) + setting.trip_s)
        assert request_s(outcome) == pytest.approx(request_s(asked) + setting.trip_s)
    assert ttft_s(again) < ttft_s(first) / 4


def test_the_memories_of_all_workers_are_one():
    # Two prompts of 256,000 tokens, where a device and a host tier hold 400,000 each.
    a, b = range(250), range(250, 500)
    trace = open_loop(*(request(i, tuple(blocks)) for i, blocks in enumerate((a, b, a))), every_s=0)
    prompts = TracePrompts(256)
    one, two, with_host = (
        ideal(Setting(num_workers=workers, host_pool_tokens=host), trace, prompts)[2].cached_tokens
        for workers, host in ((1, 0), (2, 0), (1, 400_000))
    )
    assert one < two == with_host == 256_000 - 256


def test_the_worker_is_as_fast_as_the_fastest_profile():
    trace = open_loop(request(0, (1, 2)), every_s=0.0)
    slow, fast, either = (
        ideal(Setting(profiles=tuple(PROFILES[name] for name in names)), trace, TracePrompts(256))[
            0
        ]
        for names in (("70b-4xh100",), ("8b-1xh100",), ("70b-4xh100", "8b-1xh100"))
    )
    assert ttft_s(either) == ttft_s(fast) < ttft_s(slow)


@pytest.mark.slow
def test_no_policy_does_better_while_memory_suffices():
    trace = read_trace(DEMO_TRACE).cut(0.0, None, 300)
    setting = Setting(num_workers=16, host_pool_tokens=100_000)
    prompts = TracePrompts(setting.block_size)
    best = ideal(setting, trace, prompts)
    for policy in ("latency", "random"):
        found = Simulation(policy, setting, prompts).run(trace)
        for ours, bound in zip(found, best, strict=True):
            assert ours.request_id == bound.request_id
            assert ours.cached_tokens <= bound.cached_tokens
            assert ttft_s(ours) >= ttft_s(bound)
            assert request_s(ours) >= request_s(bound)


def test_a_turn_follows_the_answer_before_it_by_its_think_time():
    turns = (request(0, (1,)), request(1, (1, 2), think_s=5.0))
    first, second = ideal(Setting(), Trace("made up", (Session(2.0, turns),)), TracePrompts(256))
    assert first.arrival_s == 2.0
    assert first.end_s is not None
    assert second.arrival_s == pytest.approx(first.end_s + 5.0)
    assert second.cached_tokens == 1024
