"""Workers that join and leave in virtual time."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from app.core.types import SequenceHash
from app.simulation.fleet import SimFleet
from app.simulation.profiles import USUAL
from app.simulation.setting import Setting
from app.simulation.steps import SimRequest
from app.simulation.worker import Status


def request(name, *, blocks=4, output_tokens=10, first=0):
    """A prompt of `blocks` blocks of 256 tokens, whose hashes count up from `first`."""
    chain = tuple(SequenceHash(first + i + 1) for i in range(blocks))
    return SimRequest(name, chain, (), 256 * blocks, output_tokens)


class PlayedFleet:
    """A fleet, and the answers that its requests got."""

    def __init__(self, setting, policy="least_loaded"):
        self.fleet = SimFleet(policy, setting)
        self.answers = {}

    def ask(self, when_s, *requests):
        for one in requests:
            self.fleet.at(when_s, lambda _, one=one: self.fleet.ask(one, self._keep))

    def _keep(self, answer, _):
        self.answers[answer.request.request_id] = answer

    def worker_of(self, name):
        return self.answers[name].worker


def burst(size, prefix, **how):
    return [request(f"{prefix}{i}", first=1000 * i, **how) for i in range(size)]


def test_a_worker_gets_requests_only_once_it_has_started():
    played = PlayedFleet(Setting(num_workers=1))
    played.fleet.at(10.0, lambda _: played.fleet.join(USUAL, startup_s=60.0))
    played.ask(69.0, *burst(4, "early"))
    played.ask(71.0, *burst(4, "late"))
    played.fleet.run()
    assert {played.worker_of(f"early{i}") for i in range(4)} == {0}
    assert {played.worker_of(f"late{i}") for i in range(4)} == {0, 1}
    joined = played.fleet.workers[1]
    assert (joined.asked_s, joined.live_s) == (10.0, 70.0)
    assert joined.held_s(110.0) == 100.0


def test_a_worker_that_joins_has_an_empty_cache():
    played = PlayedFleet(Setting(num_workers=1), "latency")
    played.ask(0.0, request("first"))
    played.fleet.at(20.0, lambda _: played.fleet.join(USUAL))
    played.ask(30.0, request("again"))
    played.fleet.run()
    assert played.answers["again"].cached_tokens == 3 * 256
    assert played.worker_of("again") == 0
    assert played.fleet.workers[1].holdings.overlap(request("again").blocks, 60.0) == (0, 0)


def test_engines_faster_than_assumed_are_all_used_although_one_is_measured_first():
    fast = replace(
        USUAL, over_s=1e-5, a0_s=1e-4, b0_s=7e-7, a1_s=0.0, b1_s=7e-7, q_s=1e-11, c_s=1e-10
    )
    played = PlayedFleet(Setting(num_workers=4, profiles=(fast,)), "latency")
    for n in range(400):
        played.ask(10.0 * n, request(str(n), first=1000 * n, blocks=8))
    played.fleet.run()
    requests = Counter(answer.worker for answer in played.answers.values())
    assert min(requests[worker] for worker in range(4)) > 50


def test_a_worker_that_drains_answers_what_it_has_and_gets_nothing_more():
    played = PlayedFleet(Setting(num_workers=2))
    played.ask(0.0, *burst(4, "before", output_tokens=200))
    played.fleet.at(1.0, lambda _: played.fleet.drain(1))
    played.ask(1.0, *burst(4, "after"))
    played.fleet.run(until_s=1.5)
    leaving = played.fleet.workers[1]
    assert (leaving.status, leaving.num_requests) == (Status.DRAINING, 2)
    played.fleet.run()
    assert all(answer.loss is None for answer in played.answers.values())
    assert {played.worker_of(f"after{i}") for i in range(4)} == {0}
    ends = [a.end_s for a in played.answers.values() if a.worker == 1 and a.end_s is not None]
    assert len(ends) == 2
    assert (leaving.status, leaving.gone_s) == (Status.GONE, max(ends))
    assert leaving.held_s(until_s=1000.0) == max(ends)


def test_a_request_decided_just_before_the_drain_is_decided_again():
    played = PlayedFleet(Setting(num_workers=2, trip_s=0.5))
    played.ask(1.0, *burst(2, "r"))
    played.fleet.at(1.2, lambda _: played.fleet.drain(1))
    played.fleet.run()
    assert {answer.worker for answer in played.answers.values()} == {0}
    assert sorted(answer.attempts for answer in played.answers.values()) == [1, 2]


@pytest.mark.parametrize("status", [Status.STARTING, Status.LIVE])
def test_a_worker_without_requests_leaves_at_once(status):
    fleet = PlayedFleet(Setting(num_workers=1)).fleet
    place = fleet.join(USUAL, startup_s=30.0 if status is Status.STARTING else 0.0)
    assert fleet.workers[place].status is status
    fleet.at(5.0, lambda _: fleet.drain(place))
    fleet.run()
    assert (fleet.workers[place].status, fleet.workers[place].gone_s) == (Status.GONE, 5.0)


def test_blocks_counts_once_what_requests_in_flight_share():
    shared = [request(f"shared{i}", blocks=100, output_tokens=2000) for i in range(3)]
    alone = request("alone", blocks=150, first=1000, output_tokens=2000)
    played = PlayedFleet(Setting(num_workers=2), "blocks")
    for place, one in ((0, shared[0]), (1, alone)):
        played.fleet.warm(place, one)
    played.ask(1.0, *shared, alone)
    played.ask(10.0, request("small", first=2000))
    # Decided from one lookup: the cached 60 blocks make 160 of the 100, against 150.
    cached = request("cached", blocks=60, first=3000, output_tokens=2000)
    played.fleet.warm(0, cached)
    played.ask(15.0, request("first", first=4000), cached, request("last", first=5000))
    played.fleet.run()
    assert [played.worker_of(one.request_id) for one in (*shared, alone)] == [0, 0, 0, 1]
    assert [played.worker_of(name) for name in ("small", "cached", "last")] == [0, 0, 1]


def test_requests_wait_in_line_by_their_priority():
    setting = Setting(num_workers=1, wait_above_s=0.5, priorities=True)
    played = PlayedFleet(setting, "latency")
    jobs = [replace(one, priority="low") for one in burst(40, "job", blocks=8)]
    played.ask(0.0, *jobs)
    played.ask(1.0, request("chat", first=90_000, blocks=8))
    played.fleet.run()
    firsts = {name: one.first_token_s or math.inf for name, one in played.answers.items()}
    assert len(firsts) == 41
    waited_s = firsts["chat"] - 1.0
    assert waited_s < 1.0
    assert max(firsts.values()) > 5.0


def test_nobody_waits_while_a_worker_is_open():
    def answered_s(above_s):
        played = PlayedFleet(Setting(num_workers=2, wait_above_s=above_s), "latency")
        played.ask(0.0, *burst(6, "r"))
        played.fleet.run()
        return [played.answers[f"r{i}"].first_token_s for i in range(6)]

    assert answered_s(60.0) == answered_s(None)
