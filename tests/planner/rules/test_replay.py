"""What recorded decisions would have come to with more or fewer workers."""

from dataclasses import replace

import pytest

from app.core.roles import Role
from app.core.types import SequenceHash
from app.core.worker_report import DEFAULT_SPEED
from app.planner.rules.replay import Replay, ReplayTooLong, recorded_request
from app.planner.rules.state import (
    FleetState,
    PastRequest,
    Phase,
    Pools,
    Prediction,
    Rules,
    WorkerState,
)
from app.policy.record import sampled
from app.simulation.profiles import USUAL, Link
from app.simulation.setting import Setting
from app.simulation.steps import SimRequest

RULES = Rules(window_s=120.0, lead_s=60.0)


def request(name, first, blocks=32):
    chain = tuple(SequenceHash(first + i + 1) for i in range(blocks))
    return SimRequest(name, chain, (), 256 * blocks, 50)


def fleet(size, recent, now_s=1000.0):
    workers = [WorkerState(f"w{i}", Phase.LIVE, 0.0) for i in range(size)]
    return FleetState(now_s, workers, recent)


def predict(state, size, victim=None, rules=RULES):
    replay = Replay(state, rules, "latency", Setting(), DEFAULT_SPEED)
    return replay.predict(Pools(0, size), {Role.DECODE: victim} if victim else {})


def every(seconds, workers):
    """Prompts of 8,192 tokens, 0.75 s of prefill each, with nothing in common."""
    number = int(180 / seconds)
    return [
        PastRequest(820.0 + i * seconds, f"w{i % workers}", request(f"r{i}", 1000 * i))
        for i in range(number)
    ]


def test_more_workers_keep_the_slo_where_fewer_do_not():
    # Two prompts a second are 1.5 s of prefill a second: too much for one worker.
    state = fleet(2, every(0.5, 2))
    one, two, three = (predict(state, size) for size in (1, 2, 3))
    assert one.attainment < 0.2
    assert one.attainment < two.attainment <= three.attainment
    assert three.attainment == 1.0
    assert one.ttft_p99_s > two.ttft_p99_s > three.ttft_p99_s


def test_requests_that_come_twice_as_fast_need_more_workers():
    # One a second is 0.75 s of prefill a second: enough for one worker, but not twice that.
    state = fleet(1, every(1.0, 1))
    twice = Replay(state, RULES, "latency", Setting(), DEFAULT_SPEED, growth=2.0).predict(
        Pools(0, 1), {}
    )
    assert predict(state, 1).attainment > 0.9 > 0.2 > twice.attainment
    assert twice.requests == predict(state, 1).requests


def test_only_requests_of_the_window_are_judged_and_those_of_its_lead_keep_workers_busy():
    state = fleet(2, every(0.5, 2))
    assert predict(state, 2).requests == 240
    without_lead = replace(state, recent=[one for one in state.recent if one.at_s >= 880.0])
    assert predict(without_lead, 1).ttft_p99_s < predict(state, 1).ttft_p99_s


def test_a_long_history_is_played_only_in_part():
    few = replace(RULES, window_requests=90)
    # Half of those played are the lead, as they last for less than twice its 60 s.
    assert predict(fleet(2, every(0.5, 2)), 2, rules=few).requests == 45


def test_a_replay_of_fewer_decisions_remembers_fewer_too():
    """One that was too long is made smaller, so all of it has to be."""
    asked = iter(range(10**6))
    few = replace(RULES, window_requests=10)
    long_ago = [PastRequest(500.0 + n / 10, f"w{n % 2}", request(f"b{n}", 0)) for n in range(2000)]
    state = fleet(2, [*long_ago, *every(0.5, 2)])
    replay = Replay(
        state, few, "latency", Setting(), DEFAULT_SPEED, is_over=lambda: next(asked) > 100
    )
    assert replay.predict(Pools(0, 2), {}).requests == 5


def test_a_replay_ends_when_its_time_is_over():
    asked = iter(range(10**6))
    replay = Replay(
        fleet(2, every(0.5, 2)),
        RULES,
        "latency",
        Setting(),
        DEFAULT_SPEED,
        is_over=lambda: next(asked) > 500,
    )
    with pytest.raises(ReplayTooLong, match="360 decisions"):
        replay.predict(Pools(0, 2), {})
    assert next(asked) == 502


@pytest.mark.parametrize("prompt_tokens", [100, 16_000, 17_920, 18_000, 32_000])
def test_an_answer_that_fits_on_no_worker_or_only_on_some_ends_no_replay(prompt_tokens):
    """Pools of 70 and of 140 blocks of 256 tokens: 17,920 and 35,840."""
    small, large = (replace(USUAL, kv_pool_tokens=tokens) for tokens in (17_920, 35_840))
    blocks = tuple(SequenceHash(n) for n in range(1, prompt_tokens // 256 + 1))
    endless = SimRequest("r", blocks, (0,) * (prompt_tokens % 256), prompt_tokens, 10**9)
    workers = [
        WorkerState("w0", Phase.LIVE, 0.0, profile=small),
        WorkerState("w1", Phase.LIVE, 0.0, profile=large),
    ]
    recent = [PastRequest(900.0 + n, "w0", endless) for n in range(4)]
    # One that fills the small pool to the last token has no room for an answer there.
    played = 0 if prompt_tokens == 17_920 else 4
    assert predict(FleetState(1000.0, workers, recent), 2).requests == played


def test_no_requests_miss_nothing():
    assert predict(fleet(2, []), 1) == Prediction(1, 0, 1.0, 0.0, 0.0)


def asked_before(worker):
    """A prompt that `worker` answered long ago and that is asked again now."""
    return [
        PastRequest(100.0, worker, request("old", 0)),
        PastRequest(990.0, worker, request("new", 0)),
    ]


def test_workers_begin_with_what_earlier_decisions_left_in_their_caches():
    # Of 32 blocks the last is computed again.
    assert predict(fleet(2, asked_before("w1")), 2).hit_rate == 31 / 32
    assert predict(fleet(2, asked_before("gone")), 2).hit_rate == 0.0


@pytest.mark.parametrize(("victim", "hit_rate"), [("w0", 31 / 32), ("w1", 0.0)])
def test_the_cache_of_the_one_that_leaves_is_lost(victim, hit_rate):
    assert predict(fleet(2, asked_before("w1")), 1, victim).hit_rate == hit_rate


def test_a_worker_that_drains_is_no_longer_counted_on():
    state = fleet(2, asked_before("w1"))
    leaving = replace(state.workers[1], phase=Phase.DRAINING)
    draining = replace(state, workers=[state.workers[0], leaving])
    assert predict(draining, 1).hit_rate == 0.0


def test_what_a_host_tier_holds_is_not_computed_again():
    """The prompts fill a worker's 400,000 tokens once and a half, and are asked again."""
    prompts = [request(f"r{n}", 1000 * n, blocks=100) for n in range(24)]
    recent = [PastRequest(100.0 + n, "w0", one) for n, one in enumerate(prompts)]
    recent += [PastRequest(900.0 + 4 * n, "w0", one) for n, one in enumerate(prompts)]
    rates = []
    for host_tokens in (0, 400_000):
        setting = Setting(host_pool_tokens=host_tokens)
        replay = Replay(fleet(1, recent), RULES, "latency", setting, DEFAULT_SPEED)
        rates.append(replay.predict(Pools(0, 1), {}).hit_rate)
    assert rates[0] < 0.1 < 0.9 < rates[1]


def test_merged_blocks_share_what_single_blocks_share():
    long = [SequenceHash(n) for n in range(1, 51)]
    fork = [*long[:40], *(SequenceHash(n) for n in range(101, 111))]

    def recorded(name, chain, merged):
        return recorded_request(
            name,
            sampled(chain),
            prompt_tokens=16 * len(chain) + 3,
            output_tokens=5,
            block_size=16,
            merged=merged,
        )

    for merged in (1, 2, 4, 8):
        one, other = recorded("a", long, merged), recorded("b", fork, merged)
        shared = [x == y for x, y in zip(one.blocks, other.blocks, strict=True)]
        assert shared == [True] * (40 // merged) + [False] * (50 // merged - 40 // merged)
        assert one.prompt_tokens == 16 * merged * len(one.blocks) + len(one.tail_tokens) == 803


def test_recorded_requests_share_what_their_prompts_share():
    def recorded(name, chain):
        return recorded_request(
            name,
            sampled(chain),
            prompt_tokens=16 * len(chain) + 3,
            output_tokens=5,
            block_size=16,
        )

    long = [SequenceHash(n) for n in range(1, 51)]
    fork = [*long[:40], *(SequenceHash(n) for n in range(101, 111))]
    first, second, again = recorded("a", long), recorded("b", fork), recorded("c", long)
    shared = [x == y for x, y in zip(first.blocks, second.blocks, strict=True)]
    assert shared == [True] * 40 + [False] * 10
    # Recorded are the blocks 1 to 16, 18, ..., 32, 36, 40, 44, 48; the last two are their own.
    assert [x == y for x, y in zip(first.blocks, again.blocks, strict=True)] == [True] * 48 + [
        False
    ] * 2
    assert len(first.tail_tokens) == 3
    assert len(set(first.blocks)) == 50


def test_a_request_that_was_decided_twice_is_played_twice():
    again = [PastRequest(990.0 + n, "w0", request("same", 0)) for n in range(2)]
    assert predict(fleet(1, again), 1).requests == 2


def with_roles(prefill, decode, recent):
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    workers = [WorkerState(f"w{n}", Phase.LIVE, 0.0, role=role) for n, role in enumerate(roles)]
    return FleetState(1000.0, workers, recent)


def predict_pools(state, pools, victims=None):
    replay = Replay(state, RULES, "latency", Setting(link=Link(12.5e9)), DEFAULT_SPEED)
    return replay.predict(pools, victims or {})


def test_pools_are_played_by_their_roles():
    # A prompt each 0.8 s is 0.94 s of prefill a second: workers that decode help out.
    state = with_roles(1, 3, every(0.8, 4))
    now, moved = predict_pools(state, Pools(1, 3)), predict_pools(state, Pools(3, 1))
    assert (now.pools, now.size) == (Pools(1, 3), 4)
    assert now.ttft_p99_s != moved.ttft_p99_s
    few = predict_pools(state, Pools(1, 1))
    assert few.size == 2
    assert few.attainment <= now.attainment


def test_what_a_source_computed_is_cached_there_and_lost_with_it():
    prompt = request("r", 1)
    asked = [
        PastRequest(400.0 + n, "w2", replace(prompt, request_id=f"r{n}"), source="w0")
        for n in range(5)
    ]
    again = PastRequest(980.0, "w2", replace(prompt, request_id="again"))
    # The other worker that decodes holds nothing, and neither does the other source.
    state = with_roles(2, 2, [*asked, again])
    leaves = [{Role.PREFILL: source, Role.DECODE: "w2"} for source in ("w0", "w1")]
    rates = [predict_pools(state, Pools(1, 1), victims).hit_rate for victims in leaves]
    assert rates == [0.0, pytest.approx(31 / 32, abs=0.04)]
