"""An engine's life in worked examples: what it did, second by second, and what is thought of it."""

from dataclasses import replace

import pytest

from workers.bridge.health import MANY_BLOCKS, STALLED, EngineHealth, Life, Probe, Silence
from workers.bridge.http.facts import EngineLoad

IDLE = EngineLoad()
BUSY, WAITING = EngineLoad(running=1), EngineLoad(waiting=1)
WELL, ILL, GONE = Life
LATE, DENIED, UNWELL, REFUSED = Probe.LATE, Probe.DENIED, Probe.UNWELL, Probe.REFUSED


def days(seconds, outcome=Probe.ANSWERED, load=IDLE, tokens=0, events=0, took_s=0.0, prompt_s=0.0):
    """So many seconds, each with a probe that took so long, a reading of `load` (None: there is
    none), and so many more tokens and events. prompt_s: of the longest prompt."""
    return [(outcome, load, tokens, events, took_s, prompt_s)] * seconds


def still(seconds, load=BUSY, **more):
    return days(seconds, load=load, **more)


SOME, TOKEN = days(10), days(1, load=BUSY, tokens=1)
COMPUTES = 10 * TOKEN
SLOW = [*TOKEN, *still(20)] * 10 + TOKEN
ANY = None
"""However late it is."""
LIVES = {
    "idle, and answers": [(days(3600), WELL, "", 0.0)],
    "answers late": [(days(100, took_s=3.0), WELL, "", 3.0), (days(1, took_s=0.3), WELL, "", 0.0)],
    "tokens come, but no answers": [(days(600, LATE, BUSY, tokens=1), WELL, "", 5.0)],
    "tokens come, but it is not let answer": [(days(600, DENIED, BUSY, tokens=1), WELL, "", 0.0)],
    "events come": [(days(600, LATE, None, events=1), WELL, "", ANY)],
    "shows metrics alone": [(days(600, DENIED), WELL, "", ANY)],
    **{
        f"no sign of life, {how}": [
            (SOME + days(19, how, None), WELL, "", 19.0),
            (days(1, how, None), ILL, how.value, 20.0),
            (days(1), WELL, "", 0.0),
        ]
        for how in (LATE, DENIED)
    },
    "nobody listens, twice": [
        (SOME + days(1, REFUSED, None), WELL, "", ANY),
        (days(1, REFUSED, None), GONE, REFUSED.value, ANY),
    ],
    "nobody listens, but events come": [
        (SOME + days(10, REFUSED, None, events=1), WELL, "", ANY),
        (days(2, REFUSED, None), GONE, REFUSED.value, ANY),
    ],
    "says three times that it is not well": [
        (COMPUTES + days(2, UNWELL, BUSY), WELL, "", ANY),
        (days(1, UNWELL, BUSY), ILL, "says that it is not well", ANY),
        (days(1, UNWELL, BUSY, tokens=1), WELL, "", ANY),
    ],
    # 30 s, and five times the longest second that it stood still before
    "has requests and computes nothing": [
        (COMPUTES + still(34), WELL, "", 34 - 2 - 1),
        (still(1), ILL, STALLED, ANY),
        (TOKEN, WELL, "", 0.0),
    ],
    # How long it stood still in its illness is not what is usual.
    "is ill again and again": [
        (COMPUTES + still(34), WELL, "", ANY),
        (still(60), ILL, STALLED, ANY),
    ]
    * 3,
    "has them waiting": [(COMPUTES + still(35, WAITING), ILL, STALLED, ANY)],
    "computes a long prompt": [
        (COMPUTES + still(94, prompt_s=20.0), WELL, "", ANY),
        (still(1, prompt_s=20.0), ILL, STALLED, ANY),
    ],
    "its first token": [(still(120), WELL, "", ANY), (still(1), ILL, STALLED, ANY)],
    "slow by nature": [(SLOW + still(120), WELL, "", ANY)],
    "idle after work": [(COMPUTES + days(600), WELL, "", ANY), (still(30), WELL, "", ANY)],
    "no metrics any more": [(COMPUTES + days(600, load=None), WELL, "", ANY)],
}
OPTIONS = {
    "has them waiting for others": (
        {"waits_for_others": True},
        [(COMPUTES + still(600, WAITING), WELL, "", ANY)],
    ),
    "left alone": ({"stall_s": 0.0}, [(still(6000), WELL, "", ANY)]),
}
CASES = {name: ({}, life) for name, life in LIVES.items()} | OPTIONS


@pytest.mark.parametrize(("options", "life"), CASES.values(), ids=CASES)
def test_what_is_thought_of_an_engine(options, life):
    health, now, sums = EngineHealth(0.0, **({"stall_s": 30.0} | options)), 0.0, [0, 0]
    for seconds, thought, why, late_s in life:
        for outcome, load, tokens, events, took_s, prompt_s in seconds:
            now += 1.0
            sums = [sums[0] + tokens, sums[1] + events]
            health.asked(now - took_s)
            health.probed(outcome, now)
            health.heard(sums[1], now)
            if load is not None:
                health.read(replace(load, generated_tokens=float(sums[0])), now, prompt_s)
        verdict = health.verdict(now)
        assert (verdict.life, verdict.why) == (thought, why)
        assert late_s is ANY or verdict.late_s == late_s


def test_one_missed_answer_that_took_half_a_minute_is_one():
    health = EngineHealth(0.0, stall_s=30.0)
    health.asked(0.0)
    health.probed(LATE, 30.0)
    assert health.verdict(30.0).life is WELL


def test_of_an_engine_that_counts_no_tokens_nobody_knows():
    health = EngineHealth(0.0, stall_s=30.0)
    for second in range(600):
        health.read(BUSY, float(second), 0.0)
    assert health.verdict(600.0).life is WELL


BLOCK = 16


def told(tokens=0, prompts=0, cached=0, generated=0, running=0):
    return EngineLoad(
        running=running,
        prompt_tokens=tokens,
        first_tokens=prompts,
        cached_tokens=cached,
        generated_tokens=generated,
    )


def untold(tokens):
    """An engine that does not say how many prompts it computes."""
    return replace(told(tokens), first_tokens=None)


STILL, PROMPT = told(), told(2 * BLOCK, 1)
FEW, MANY = (MANY_BLOCKS - 1) * BLOCK, MANY_BLOCKS * BLOCK
NEVER = [False] * 10
SILENCES = {
    "a prompt of which nothing is heard": ([STILL, PROMPT], [False, True, True]),
    "until the first event": ([STILL, PROMPT, PROMPT, (PROMPT, 1)], [False, True, False]),
    "it computes nothing": ([STILL, told(500 * BLOCK, 1, cached=500 * BLOCK)], NEVER),
    "prompts that fill no block": ([STILL, told(1000 * BLOCK, 1000)], NEVER),
    **{
        f"what is generated, while {num} run": (
            [STILL, *[(told(running=num), 1)] * 3, (told(BLOCK // 2, 1, 0, 6 * BLOCK, num), 1)],
            [False] * 4 + [is_silent],
        )
        # Each may have begun to fill a block before.
        for num, is_silent in ((0, True), (2, True), (3, False))
    },
    "counters that follow their events": ([STILL, (STILL, 1), (PROMPT, 1)], NEVER),
    "started again": ([STILL, PROMPT, PROMPT, STILL], [False, True, *NEVER]),
    "too few blocks, of unknown prompts": ([untold(0), untold(FEW)], NEVER),
    "many blocks, of unknown prompts": ([untold(0), untold(MANY)], [False, True]),
    "SGLang counts what it computes": (
        [EngineLoad(busy_tokens=0), EngineLoad(busy_tokens=MANY)],
        [False, True],
    ),
    "it counts nothing": ([BUSY], NEVER),
}


@pytest.mark.parametrize(("readings", "silent"), SILENCES.values(), ids=SILENCES)
def test_an_engine_that_computes_and_is_not_heard_is_told_after_two_readings(readings, silent):
    """readings: of the load, and of how much was heard, if anything. The first is read four times,
    then the others, the last of them as long as `silent`, which says of each whether it is told."""
    silence, began = Silence(BLOCK), None
    for now, expected in enumerate([False] * 4 + silent):
        reading = readings[max(0, min(now - 3, len(readings) - 1))]
        load, num_heard = reading if isinstance(reading, tuple) else (reading, 0)
        silence.observe(load, num_heard, float(now))
        began = (began or float(now)) if expected else None
        assert silence.since_s == began
