"""An engine's life in worked examples: what it did, second by second, and what is thought of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from workers.bridge.health import MANY_BLOCKS, STALLED, EngineHealth, Life, Probe, Silence
from workers.bridge.http.facts import EngineLoad

IDLE = EngineLoad(running=0, waiting=0, kv_usage=0.0, generated_tokens=0.0)
BUSY = replace(IDLE, running=1)
WELL, ILL, GONE = Life


class Days:
    """An engine that is asked and read once a second."""

    def __init__(self, *, stall_s=30.0, waits_for_others=False):
        self.now = 0.0
        self.health = EngineHealth(0.0, stall_s=stall_s, waits_for_others=waits_for_others)
        self.tokens = 0.0
        self.events = 0

    def pass_by(
        self,
        seconds,
        outcome=Probe.ANSWERED,
        load=IDLE,
        *,
        tokens=0,
        events=0,
        took_s=0.0,
        longest_prompt_s=0.0,
    ):
        """outcome: of the probe of each second; None: it is under way. load: None: not readable.
        tokens, events: of each second."""
        for _ in range(seconds):
            self.now += 1.0
            self.tokens += tokens
            self.events += events
            if outcome is not None:
                self.health.asked(self.now - took_s)
                self.health.probed(outcome, self.now)
            self.health.heard(self.events, self.now)
            if load is not None:
                told = replace(load, generated_tokens=self.tokens)
                self.health.read(told, self.now, longest_prompt_s)
        return self.health.verdict(self.now).life

    @property
    def why(self):
        return self.health.verdict(self.now).why

    @property
    def late_s(self):
        return self.health.verdict(self.now).late_s


def test_an_idle_engine_that_answers_is_well():
    days = Days()
    assert days.pass_by(3600) is WELL
    assert (days.why, days.late_s) == ("", 0.0)


def test_answers_that_are_late_make_it_slow_and_no_more():
    days = Days()
    assert days.pass_by(100, took_s=3.0) is WELL
    assert days.late_s == 3.0
    assert days.pass_by(1, took_s=0.3) is WELL
    assert days.late_s == 0.0


@pytest.mark.parametrize("outcome", [Probe.LATE, Probe.DENIED])
def test_while_tokens_come_it_may_answer_nobody(outcome):
    days = Days()
    assert days.pass_by(600, outcome, BUSY, tokens=1) is WELL
    assert days.late_s <= 5.0


def test_while_events_come_it_may_answer_nobody_and_show_no_metrics():
    days = Days()
    assert days.pass_by(600, Probe.LATE, None, events=1) is WELL


def test_what_shows_its_metrics_is_alive_though_it_is_not_let_say_so():
    assert Days().pass_by(600, Probe.DENIED, IDLE) is WELL


@pytest.mark.parametrize("outcome", [Probe.LATE, Probe.DENIED])
def test_without_any_sign_of_life_it_is_ill_after_twenty_seconds(outcome):
    days = Days()
    days.pass_by(10)
    assert days.pass_by(19, outcome, None) is WELL
    assert days.late_s == 19.0
    assert days.pass_by(1, outcome, None) is ILL
    assert days.why == outcome.value
    assert days.pass_by(1) is WELL


def test_one_missed_answer_that_took_half_a_minute_is_one():
    days = Days()
    days.now = 30.0
    days.health.asked(0.0)
    days.health.probed(Probe.LATE, days.now)
    assert days.health.verdict(days.now).life is WELL


def test_where_nobody_listens_twice_it_is_gone():
    days = Days()
    days.pass_by(10)
    assert days.pass_by(1, Probe.REFUSED, None) is WELL
    assert days.pass_by(1, Probe.REFUSED, None) is GONE


def test_it_is_not_gone_while_its_events_come():
    days = Days()
    days.pass_by(10)
    assert days.pass_by(10, Probe.REFUSED, None, events=1) is WELL
    assert days.pass_by(2, Probe.REFUSED, None) is GONE


def test_one_that_says_three_times_that_it_is_not_well_is_believed():
    days = Days()
    days.pass_by(10, load=BUSY, tokens=1)
    assert days.pass_by(2, Probe.UNWELL, BUSY) is WELL
    assert days.pass_by(1, Probe.UNWELL, BUSY) is ILL
    assert days.why == "says that it is not well"
    assert days.pass_by(1, Probe.UNWELL, BUSY, tokens=1) is WELL


def test_an_engine_that_has_requests_and_computes_nothing_is_ill():
    days = Days()
    days.pass_by(10, load=BUSY, tokens=1)
    # 30 s, and five times the longest second that it stood still before.
    assert days.pass_by(34, load=BUSY) is WELL
    assert days.late_s == 34 - 2 - 1
    assert days.pass_by(1, load=BUSY) is ILL
    assert days.why == STALLED
    assert days.pass_by(1, load=BUSY, tokens=1) is WELL
    assert days.late_s == 0.0


def test_how_long_it_stood_still_in_its_illness_is_not_what_is_usual():
    days = Days()
    for _ in range(3):
        days.pass_by(10, load=BUSY, tokens=1)
        assert days.pass_by(34, load=BUSY) is WELL
        assert days.pass_by(60, load=BUSY) is ILL


def test_what_it_has_waiting_counts_as_what_runs():
    waiting = replace(IDLE, waiting=1)
    days = Days()
    days.pass_by(10, load=BUSY, tokens=1)
    assert days.pass_by(35, load=waiting) is ILL
    days = Days(waits_for_others=True)
    days.pass_by(10, load=BUSY, tokens=1)
    assert days.pass_by(600, load=waiting) is WELL


def test_a_long_prompt_may_take_its_time():
    days = Days()
    days.pass_by(10, load=BUSY, tokens=1)
    assert days.pass_by(94, load=BUSY, longest_prompt_s=20.0) is WELL
    assert days.pass_by(1, load=BUSY, longest_prompt_s=20.0) is ILL


def test_the_first_token_of_all_may_take_a_minute_and_a_half_more():
    days = Days()
    days.pass_by(1, load=BUSY)
    assert days.pass_by(119, load=BUSY) is WELL
    assert days.pass_by(1, load=BUSY) is ILL


def test_one_that_is_slow_by_nature_is_judged_by_its_own_pauses():
    days = Days()
    for _ in range(10):
        days.pass_by(1, load=BUSY, tokens=1)
        assert days.pass_by(20, load=BUSY) is WELL
    days.pass_by(1, load=BUSY, tokens=1)
    assert days.pass_by(120, load=BUSY) is WELL


def test_an_idle_engine_stands_still_for_good():
    days = Days()
    days.pass_by(10, load=BUSY, tokens=1)
    assert days.pass_by(600) is WELL
    assert days.pass_by(30, load=BUSY) is WELL


def test_of_an_engine_that_counts_no_tokens_nobody_knows():
    days = Days()
    for second in range(600):
        days.health.read(EngineLoad(running=1, waiting=0, kv_usage=0.0), float(second), 0.0)
    assert days.health.verdict(600.0).life is WELL


def test_metrics_that_are_old_say_nothing_of_now():
    days = Days()
    days.pass_by(10, load=BUSY, tokens=1)
    assert days.pass_by(600, load=None) is WELL


def test_it_may_be_left_alone_for_ever():
    assert Days(stall_s=0.0).pass_by(6000, load=BUSY) is WELL


BLOCK = 16


@dataclass
class Listener:
    """num_heard: how often something was heard."""

    silence: Silence = field(default_factory=lambda: Silence(BLOCK))
    tokens: float = 0.0
    cached: float = 0.0
    prompts: float | None = 0.0
    generated: float = 0.0
    running: int = 0
    num_heard: int = 0
    now: float = 0.0

    def read(self, times=1):
        for _ in range(times):
            self.now += 0.75
            load = EngineLoad(
                self.running,
                0,
                0.0,
                generated_tokens=self.generated,
                prompt_tokens=self.tokens,
                cached_tokens=self.cached,
                first_tokens=self.prompts,
            )
            self.silence.observe(load, self.num_heard, self.now)

    def compute(self, tokens, prompts=1):
        self.tokens += tokens
        if self.prompts is not None:
            self.prompts += prompts


@pytest.fixture
def listener():
    listener = Listener()
    listener.read(4)
    return listener


def test_a_computed_prompt_of_which_nothing_is_heard_is_told_after_two_readings(listener):
    listener.compute(2 * BLOCK)
    listener.read()
    assert listener.silence.since_s is None
    listener.read()
    began = listener.silence.since_s
    assert began == listener.now
    listener.read(3)
    assert listener.silence.since_s == began


def test_it_ends_with_the_first_event(listener):
    listener.compute(2 * BLOCK)
    listener.read(2)
    listener.num_heard += 1
    listener.read()
    assert listener.silence.since_s is None


def test_an_engine_that_computes_nothing_may_be_silent(listener):
    listener.compute(500 * BLOCK)
    listener.cached += 500 * BLOCK
    listener.read(10)
    assert listener.silence.since_s is None


def test_prompts_that_fill_no_block_cause_no_events(listener):
    listener.compute(1000 * BLOCK, prompts=1000)
    listener.read(10)
    assert listener.silence.since_s is None


@pytest.mark.parametrize(("running", "is_silent"), [(0, True), (2, True), (3, False)])
def test_what_is_generated_fills_blocks_as_well(listener, running, is_silent):
    """running: requests that may each have begun to fill a block before."""
    listener.running, listener.num_heard = running, 1
    listener.read(3)
    listener.compute(BLOCK // 2, prompts=1)
    listener.generated += 6 * BLOCK
    listener.read(2)
    assert (listener.silence.since_s is not None) == is_silent


def test_counters_may_follow_the_events_of_what_they_count(listener):
    listener.num_heard += 1
    listener.read()
    listener.compute(2 * BLOCK)
    listener.read(10)
    assert listener.silence.since_s is None


def test_an_engine_that_was_started_again_counts_anew(listener):
    listener.compute(2 * BLOCK)
    listener.read(2)
    listener.tokens, listener.prompts = 0.0, 0.0
    listener.read(10)
    assert listener.silence.since_s is None


def test_without_the_number_of_prompts_many_blocks_are_needed(listener):
    listener.prompts = None
    listener.compute((MANY_BLOCKS - 1) * BLOCK)
    listener.read(10)
    assert listener.silence.since_s is None
    listener.compute(BLOCK)
    listener.read(2)
    assert listener.silence.since_s is not None


def test_sglang_counts_what_it_computes(listener):
    silence = Silence(BLOCK)
    for reading in range(6):
        computed = (reading > 2) * MANY_BLOCKS * BLOCK
        silence.observe(EngineLoad(0, 0, 0.0, busy_tokens=computed), 0, float(reading))
    assert silence.since_s == 4.0


def test_nothing_is_said_of_an_engine_that_counts_nothing():
    silence = Silence(BLOCK)
    for reading in range(9):
        silence.observe(EngineLoad(1, 0, 0.5), 0, float(reading))
    assert silence.since_s is None
