"""What is learned of an engine's speed from its counters.

The engines here take exactly as long as a formula says.
"""

import random
import statistics
from dataclasses import dataclass, field, replace

import pytest

from app.core.worker_report import DEFAULT_SPEED
from app.simulation.profiles import PROFILES
from workers.bridge.http.facts import EngineLoad
from workers.bridge.speed import EngineSpeed, speed_of

CAPACITY = 100_000
PROFILE = PROFILES["8b-1xh100"]
FIXED_S, TOKEN_S, PAIR_S = 8e-3, 2e-5, 1.5e-8
STEP_S, SEQ_S, KV_TOKEN_S = 3e-3, 1e-4, 1e-7


def prefill_s(computed, cached=0.0, slower=1.0):
    return slower * (FIXED_S + TOKEN_S * computed + PAIR_S * computed * (cached + computed / 2))


@dataclass
class Vllm:
    """Counts as vLLM does, and is read once a second."""

    learner: EngineSpeed = field(default_factory=lambda: EngineSpeed(CAPACITY))
    now: float = 0.0
    load: EngineLoad = field(
        default_factory=lambda: EngineLoad(
            0,
            0,
            0.0,
            prompt_tokens=0,
            cached_tokens=0,
            generated_tokens=0,
            finished_requests=0,
            prefills=0,
            prefill_s=0,
            prefill_prompt_tokens=0,
            prefill_computed_tokens=0,
            inter_tokens=0,
            inter_token_s=0,
            steps=0,
        )
    )

    def __post_init__(self):
        self.read()

    def read(self, after_s=1.0):
        self.now += after_s
        self.learner.observe(self.load, self.now)

    def count(self, **more):
        grown = {name: getattr(self.load, name) + value for name, value in more.items()}
        self.load = replace(self.load, **grown)

    def prefill(self, seconds, computed, cached=0.0):
        self.count(
            prefills=1,
            prefill_s=seconds,
            prefill_prompt_tokens=computed + cached,
            prefill_computed_tokens=computed,
            prompt_tokens=computed + cached,
            cached_tokens=cached,
        )

    def decode(self, seqs, kv_tokens, steps=100, waited_s=0.0):
        step_s = STEP_S + SEQ_S * seqs + KV_TOKEN_S * kv_tokens
        self.count(
            inter_tokens=seqs * steps, inter_token_s=seqs * (steps * step_s + waited_s), steps=steps
        )
        self.load = replace(self.load, kv_usage=kv_tokens / CAPACITY)


def prompts(engine, num, slower=1.0):
    """Of 200 to 4,000 tokens, some of them partly cached, one in each reading."""
    choose = random.Random(num)
    for _ in range(num):
        computed, cached = choose.randrange(200, 4000), choose.choice((0, 0, 512))
        engine.prefill(prefill_s(computed, cached, slower), computed, cached)
        engine.read()


def constant(learner, name):
    return next(found for found in learner.constants() if found.name == name)


def predicted_s(speed, tokens):
    return speed.prefill_s_per_token * tokens + speed.prefill_s_per_token2 * tokens * tokens / 2


def error_of(speed):
    """Median over lone prompts of 200 to 4,000 tokens."""
    lengths = range(200, 4001, 100)
    return statistics.median(abs(predicted_s(speed, n) / prefill_s(n) - 1) for n in lengths)


def test_nothing_is_learned_yet():
    learner = EngineSpeed(CAPACITY)
    assert learner.speed() == DEFAULT_SPEED
    assert {(c.source, c.error) for c in learner.constants()} == {("default", None)}


def test_a_profile_is_assumed_until_enough_was_seen():
    learner = EngineSpeed(CAPACITY, PROFILE)
    assert learner.speed() == speed_of(PROFILE)
    sources = {c.name: c.source for c in learner.constants()}
    assert sources["prefill_s_per_token"] == sources["host_s_per_token"] == "profile"
    assert sources["disk_s_per_token"] == sources["mean_output_tokens"] == "default"


def test_a_profile_predicts_full_steps():
    speed, batch = speed_of(PROFILE), PROFILE.max_batch_tokens
    assert speed.prefill_s_per_token * batch == pytest.approx(PROFILE.compute_s(batch, 0, 0))


@pytest.mark.parametrize("profile", [None, PROFILES["70b-4xh100"]])
def test_a_hundred_prompts_teach_how_long_others_will_take(profile):
    engine = Vllm(EngineSpeed(CAPACITY, profile))
    before = error_of(engine.learner.speed())
    prompts(engine, 100)
    assert before > 0.5
    assert error_of(engine.learner.speed()) < 0.1
    assert engine.learner.speed().prefill_s_per_token2 == pytest.approx(PAIR_S, rel=0.1)
    assert constant(engine.learner, "prefill_s_per_token").source == "learned"


def test_several_prompts_in_each_reading_teach_the_same():
    engine, choose = Vllm(), random.Random(1)
    for _ in range(50):
        for _ in range(2):
            tokens = choose.randrange(200, 4000)
            engine.prefill(prefill_s(tokens), tokens)
        engine.read(5.0)
    assert error_of(engine.learner.speed()) < 0.2


def test_prompts_that_share_their_time_do_not_each_need_all_of_it():
    engine = Vllm()
    for _ in range(30):
        for _ in range(10):
            engine.prefill(0.5, 1000)  # five at a time
        engine.read()
    assert 0.5 / 6 < predicted_s(engine.learner.speed(), 1000) < 0.5 / 3


def test_prompts_that_take_longer_than_a_reading_are_seen_together():
    engine = Vllm()
    for _ in range(100):
        for _ in range(2):
            engine.prefill(5.0, 1000)  # ten at a time
        engine.read()
    assert predicted_s(engine.learner.speed(), 1000) == pytest.approx(0.5, rel=0.2)


def test_what_is_read_of_a_quiet_time_counts_more():
    engine = Vllm()
    for _ in range(20):
        engine.prefill(0.1, 1000)
        engine.read()
    for _ in range(20):
        for _ in range(3):
            engine.prefill(1.5, 1000)
        engine.read()
    assert predicted_s(engine.learner.speed(), 1000) == pytest.approx(0.1, rel=0.25)


def test_what_is_computed_of_nearly_cached_prompts_does_not_make_tokens_seem_slow():
    engine = Vllm()
    for tokens in (8, 16, 24, 32) * 10:
        engine.prefill(prefill_s(tokens, 2000), tokens, 2000)
        engine.read()
    assert predicted_s(engine.learner.speed(), 4000) < 3 * prefill_s(4000)


@pytest.mark.parametrize("fixed_s", [2e-3, 8e-3, 50e-3])
@pytest.mark.parametrize("profile", [None, PROFILE])
def test_short_chats_do_not_make_long_prompts_seem_slow(fixed_s, profile):
    assumed = DEFAULT_SPEED if profile is None else speed_of(profile)

    def took_s(tokens):
        pairs = tokens * tokens / 2
        return fixed_s + TOKEN_S * tokens + assumed.prefill_s_per_token2 * pairs

    engine, choose = Vllm(EngineSpeed(CAPACITY, profile)), random.Random(5)
    for _ in range(300):
        tokens = choose.randrange(20, 200)
        engine.prefill(took_s(tokens) * choose.uniform(0.9, 1.2), tokens)
        engine.read()
    speed = engine.learner.speed()
    for tokens in (2_000, 8_000, 32_000):
        ratio = predicted_s(speed, tokens) / took_s(tokens)
        assert 0.5 < ratio < 3
    assert engine.learner.longest_prefill < 200
    assert constant(engine.learner, "prefill_s_per_token").source == "learned"
    unlearned = constant(engine.learner, "prefill_s_per_token2")
    assert unlearned.source == ("default" if profile is None else "profile")
    prompts(engine, 100)
    assert constant(engine.learner, "prefill_s_per_token2").source == "learned"


def test_predictions_of_an_engine_that_does_not_change_are_right():
    engine = Vllm()
    prompts(engine, 200)
    found = constant(engine.learner, "prefill_s_per_token")
    assert found.error is not None
    assert found.error < 0.1


def test_an_engine_that_becomes_slower_is_noticed_and_learned():
    engine = Vllm()
    prompts(engine, 60)
    prompts(engine, 10, slower=2.0)
    early = constant(engine.learner, "prefill_s_per_token").error
    assert early is not None
    assert early > 0.15
    before = predicted_s(engine.learner.speed(), 2000)
    prompts(engine, 600, slower=2.0)
    assert predicted_s(engine.learner.speed(), 2000) > 1.5 * before


def test_a_pause_of_the_engine_does_not_outweigh_all_else():
    engine = Vllm()
    prompts(engine, 100)
    engine.prefill(60.0, 1000)
    engine.read()
    assert error_of(engine.learner.speed()) < 0.2


def test_a_restarted_engine_counts_from_nothing():
    engine = Vllm()
    prompts(engine, 100)
    learned = engine.learner.speed()
    engine.load = Vllm().load
    engine.read()
    assert engine.learner.speed() == learned
    prompts(engine, 50)
    assert error_of(engine.learner.speed()) < 0.1


def test_decoding_is_learned_from_the_gaps_between_tokens():
    engine, choose = Vllm(), random.Random(2)
    for _ in range(200):
        engine.decode(choose.randrange(1, 50), choose.randrange(1000, 50_000))
        engine.read()
    speed = engine.learner.speed()
    assert speed.decode_s_per_seq == pytest.approx(SEQ_S, rel=0.05)
    assert speed.decode_s_per_kv_token == pytest.approx(KV_TOKEN_S, rel=0.05)
    found = constant(engine.learner, "decode_s_per_seq")
    assert found.source == "learned"
    assert found.error is not None
    assert found.error < 0.05


def test_what_decoding_waits_for_prompts_is_not_its_own():
    engine, choose = Vllm(), random.Random(3)
    prompts(engine, 100)
    for _ in range(200):
        seqs = choose.randrange(5, 50)
        tokens = 40 * seqs  # the busier it is, the longer are the prompts
        engine.decode(seqs, choose.randrange(1000, 50_000), 20, waited_s=prefill_s(tokens))
        engine.prefill(prefill_s(tokens), tokens)
        engine.read()
    speed = engine.learner.speed()
    assert speed.decode_s_per_seq == pytest.approx(SEQ_S, rel=0.2)
    assert speed.decode_s_per_kv_token == pytest.approx(KV_TOKEN_S, rel=0.2)


def test_nothing_is_taken_off_for_prompts_before_it_is_known_how_long_they_take():
    engine = Vllm()
    for _ in range(30):
        engine.decode(30, 10_000)
        engine.count(prompt_tokens=10)
        engine.read()
    assert constant(engine.learner, "decode_s_per_seq").source == "default"


def test_outputs_are_as_long_as_they_were():
    engine = Vllm()
    for _ in range(20):
        engine.count(generated_tokens=120, finished_requests=3)
        engine.read()
    assert engine.learner.speed().mean_output_tokens == pytest.approx(40)
    assert constant(engine.learner, "mean_output_tokens").source == "learned"


def test_sglang_says_exactly_what_a_computed_token_takes():
    learner = EngineSpeed(CAPACITY)
    for reading in range(3):
        load = EngineLoad(1, 0, 0.5, busy_tokens=6000 * reading, prefill_busy_s=1.5 * reading)
        learner.observe(load, float(reading))
    speed = learner.speed()
    assert speed.prefill_s_per_token == pytest.approx(1.5 / 6000)
    assert speed.prefill_s_per_token2 == 0
    found = constant(learner, "prefill_s_per_token")
    assert (found.source, found.error) == ("learned", pytest.approx(0.0, abs=1e-9))


def test_an_engine_that_counts_nothing_keeps_what_is_assumed():
    learner = EngineSpeed(CAPACITY, PROFILE)
    for now in range(10):
        learner.observe(EngineLoad(1, 0, 0.5), float(now))
    assert learner.speed() == speed_of(PROFILE)


def test_transfers_teach_how_long_others_will_take():
    """30 ms and 20 us a token."""
    engine = Vllm()
    engine.load = replace(engine.load, kv_transfers=0, transfer_s=0, transferred_tokens=0)
    engine.read()
    rng = random.Random(3)
    for _ in range(40):
        tokens = rng.choice([200, 1000, 4000])
        engine.count(kv_transfers=1, transfer_s=0.03 + 2e-5 * tokens, transferred_tokens=tokens)
        engine.read()
    speed = engine.learner.speed()
    assert speed.transfer_s == pytest.approx(0.03, rel=0.1)
    assert speed.transfer_s_per_token == pytest.approx(2e-5, rel=0.1)
    assert constant(engine.learner, "transfer_s").source == "learned"
    assert constant(Vllm().learner, "transfer_s").source == "default"
