"""When an engine counts as not being heard: `block_size` 16, readings 0.75 s apart."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from workers.bridge.events.silence import MANY_BLOCKS, Silence
from workers.bridge.http.facts import EngineLoad

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

    def read(self, times: int = 1) -> None:
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

    def compute(self, tokens: float, prompts: int = 1) -> None:
        self.tokens += tokens
        if self.prompts is not None:
            self.prompts += prompts


@pytest.fixture
def listener() -> Listener:
    listener = Listener()
    listener.read(4)
    return listener


def test_a_computed_prompt_of_which_nothing_is_heard_is_told_after_two_readings(
    listener: Listener,
) -> None:
    listener.compute(2 * BLOCK)
    listener.read()
    assert listener.silence.since_s is None
    listener.read()
    began = listener.silence.since_s
    assert began == listener.now
    listener.read(3)
    assert listener.silence.since_s == began


def test_it_ends_with_the_first_event(listener: Listener) -> None:
    listener.compute(2 * BLOCK)
    listener.read(2)
    listener.num_heard += 1
    listener.read()
    assert listener.silence.since_s is None


def test_an_engine_that_computes_nothing_may_be_silent(listener: Listener) -> None:
    listener.compute(500 * BLOCK)
    listener.cached += 500 * BLOCK
    listener.read(10)
    assert listener.silence.since_s is None


def test_prompts_that_fill_no_block_cause_no_events(listener: Listener) -> None:
    listener.compute(1000 * BLOCK, prompts=1000)
    listener.read(10)
    assert listener.silence.since_s is None


@pytest.mark.parametrize(("running", "is_silent"), [(0, True), (2, True), (3, False)])
def test_what_is_generated_fills_blocks_as_well(
    listener: Listener, running: int, is_silent: bool
) -> None:
    """running: requests that may each have begun to fill a block before."""
    listener.running, listener.num_heard = running, 1
    listener.read(3)
    listener.compute(BLOCK // 2, prompts=1)
    listener.generated += 6 * BLOCK
    listener.read(2)
    assert (listener.silence.since_s is not None) == is_silent


def test_counters_may_follow_the_events_of_what_they_count(listener: Listener) -> None:
    listener.num_heard += 1
    listener.read()
    listener.compute(2 * BLOCK)
    listener.read(10)
    assert listener.silence.since_s is None


def test_an_engine_that_was_started_again_counts_anew(listener: Listener) -> None:
    listener.compute(2 * BLOCK)
    listener.read(2)
    listener.tokens, listener.prompts = 0.0, 0.0
    listener.read(10)
    assert listener.silence.since_s is None


def test_without_the_number_of_prompts_many_blocks_are_needed(listener: Listener) -> None:
    listener.prompts = None
    listener.compute((MANY_BLOCKS - 1) * BLOCK)
    listener.read(10)
    assert listener.silence.since_s is None
    listener.compute(BLOCK)
    listener.read(2)
    assert listener.silence.since_s is not None


def test_sglang_counts_what_it_computes(listener: Listener) -> None:
    silence = Silence(BLOCK)
    for reading in range(6):
        computed = (reading > 2) * MANY_BLOCKS * BLOCK
        silence.observe(EngineLoad(0, 0, 0.0, busy_tokens=computed), 0, float(reading))
    assert silence.since_s == 4.0


def test_nothing_is_said_of_an_engine_that_counts_nothing() -> None:
    silence = Silence(BLOCK)
    for reading in range(9):
        silence.observe(EngineLoad(1, 0, 0.5), 0, float(reading))
    assert silence.since_s is None
