from dataclasses import replace

import numpy as np
import pytest

from app.core.types import Tier
from app.core.worker_report import DEFAULT_SPEED, Speed
from app.simulation.engine import SimEngine
from app.simulation.profiles import PROFILES
from app.simulation.speed import SpeedLearner, sped_up
from app.simulation.steps import EngineStep, Finished, SimRequest

H100 = PROFILES["70b-4xh100"]
FULL_STEP_S_PER_TOKEN = (0.002 + 0.0086 + 72.3e-6 * 2048) / 2048  # 77.5 us


def step_of(
    duration_s=1.0,
    *,
    load_s=0.0,
    loaded=0,
    prefill=0,
    pairs=0.0,
    decoding=0,
    context=0,
    finished=(),
):
    ended = [Finished(str(i), 1, 0, output) for i, output in enumerate(finished)]
    return EngineStep(duration_s, load_s, loaded, prefill, pairs, decoding, context, [], [], ended)


def learn(
    defaults=DEFAULT_SPEED, *, speedup=1.0, prompts=(1000, 12000), concurrency=24, num_requests=150
):
    """Serve random requests with a 70B model, at a concurrency that varies in a slow wave."""
    engine = SimEngine(H100, block_size=16, now=lambda: 0.0)
    learner = SpeedLearner(H100.max_batch_tokens, defaults)
    rng = np.random.default_rng(1)
    submitted = steps = 0
    while submitted < num_requests:
        limit = concurrency * (2 + np.sin(steps / 300)) / 3
        if engine.metrics().request_active_slots < limit and not engine.num_waiting:
            prompt = rng.integers(0, 32000, int(rng.integers(*prompts)))
            output = int(rng.integers(50, 150))
            engine.submit(SimRequest.from_tokens(str(submitted), prompt, output, block_size=16))
            submitted += 1
        step = engine.step()
        assert step is not None
        steps += 1
        learner.observe(step, step.duration_s / speedup)
    return learner.speed()


def test_without_steps_the_defaults_apply():
    assert SpeedLearner(2048).speed() == DEFAULT_SPEED


@pytest.mark.parametrize("off_by", [1 / 3, 1, 3])
def test_the_constants_of_a_70b_model_are_learned_from_its_steps(off_by):
    speed = learn(sped_up(DEFAULT_SPEED, off_by))

    assert speed.prefill_s_per_token == pytest.approx(FULL_STEP_S_PER_TOKEN, rel=0.03)
    assert speed.prefill_s_per_token2 == pytest.approx(1.10e-9, rel=0.05)
    assert speed.decode_s_per_kv_token == pytest.approx(3.06e-8, rel=0.15)
    assert speed.mean_output_tokens == pytest.approx(100, abs=20)  # from 300


def test_the_share_of_each_decoding_request_is_learned_when_their_number_varies():
    speed = learn(prompts=(100, 800), concurrency=60, num_requests=400)

    assert speed.decode_s_per_seq == pytest.approx(41.5e-6 + 54.5e-6, rel=0.1)


def test_short_prompts_alone_do_not_make_long_ones_look_expensive():
    """With small chunks the two lines of the step time look like one curve."""
    speed = learn(prompts=(100, 800), concurrency=4)

    seconds = 30000 * speed.prefill_s_per_token + 30000**2 / 2 * speed.prefill_s_per_token2
    truly = 30000 * FULL_STEP_S_PER_TOKEN + 30000**2 / 2 * 1.10e-9
    assert seconds == pytest.approx(truly, rel=0.1)


def test_a_worker_sped_up_20_times_learns_times_20_times_shorter():
    fast = learn(sped_up(DEFAULT_SPEED, 20), speedup=20)

    slow = sped_up(learn(), 20)
    assert fast.prefill_s_per_token == pytest.approx(slow.prefill_s_per_token)
    assert fast.decode_s_per_kv_token == pytest.approx(slow.decode_s_per_kv_token)
    assert fast.mean_output_tokens == slow.mean_output_tokens


def test_a_speed_up_shortens_every_time_but_no_output():
    speed = Speed(10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
    assert sped_up(speed, 10) == Speed(1, 2, 3, 4, 5, 6, 70, 8, 9, 10)


def test_old_steps_are_forgotten():
    learner = SpeedLearner(2048)
    for seconds_per_token in (4e-4, 1e-4):
        for i in range(20000):
            tokens = 100 + i % 1000
            learner.observe(step_of(prefill=tokens), seconds_per_token * tokens)

    assert learner.speed().prefill_s_per_token == pytest.approx(1e-4, rel=0.01)


def test_learned_values_are_never_negative():
    learner = SpeedLearner(2048)
    for i in range(1000):  # more work takes less time: absurd, but a clock may say so
        busy = i % 10
        learner.observe(step_of(decoding=busy, context=1000 * busy), 0.1 - 0.01 * busy)
        learner.observe(step_of(prefill=1 + busy, pairs=busy * 1e6), 0.1 - 0.01 * busy)

    speed = learner.speed()

    assert speed.decode_s_per_seq == 0
    assert speed.prefill_s_per_token2 == 0
    assert min(speed.decode_s_per_kv_token, speed.prefill_s_per_token) >= 0


def test_loading_from_the_host_is_learned_separately_from_computing():
    learner = SpeedLearner(2048)
    for i in range(50):
        loaded = 4096 * (1 + i % 7)
        tokens = 500 + i
        step = step_of(
            1e-4 * tokens + 3e-6 * loaded, load_s=3e-6 * loaded, loaded=loaded, prefill=tokens
        )
        learner.observe(step, step.duration_s / 2)

    assert learner.speed().host_s_per_token == pytest.approx(1.5e-6)
    assert learner.speed().prefill_s_per_token == pytest.approx(0.5e-4, rel=0.1)


def test_a_discounted_load_counts_only_until_there_is_another():
    learner = SpeedLearner(2048)
    learner.observe_load(Tier.DISK, 1000, 1.0)

    learner.discount_loads(Tier.DISK)
    assert learner.speed().disk_s_per_token == pytest.approx(1e-3)

    learner.observe_load(Tier.DISK, 10, 0.001)
    assert learner.speed().disk_s_per_token == pytest.approx(1e-4, rel=0.01)


def test_the_mean_output_follows_the_requests_that_finish():
    learner = SpeedLearner(2048, replace(DEFAULT_SPEED, mean_output_tokens=100.0))

    learner.observe(step_of(finished=(122,)), 1.0)
    assert learner.speed().mean_output_tokens == pytest.approx(100 + 22 / 11)

    for _ in range(1000):
        learner.observe(step_of(finished=(500,)), 1.0)
    assert learner.speed().mean_output_tokens == pytest.approx(500, rel=0.01)

    for _ in range(1000):
        learner.observe(step_of(finished=(100,)), 1.0)
    assert learner.speed().mean_output_tokens == pytest.approx(100, rel=0.05)


def test_a_paused_process_does_not_look_slow_but_one_that_slows_down_does():
    learner = SpeedLearner(256)

    def after(seconds, num_steps):
        """Seconds of a full step, as learned."""
        for _ in range(num_steps):
            learner.observe(step_of(prefill=256), seconds)
        return 256 * learner.speed().prefill_s_per_token

    assert after(0.01, 2000) == pytest.approx(0.01, rel=0.05)
    assert after(30.0, 1) == pytest.approx(0.01, rel=0.1)
    assert after(0.5, 256) > 0.08  # half a second is no pause, however fast the steps were
    assert after(3.0, 20_000) == pytest.approx(3.0, rel=0.1)
    assert after(300.0, 1) == pytest.approx(3.0, rel=0.02)


def test_a_worker_may_be_slow_from_its_first_step_on_but_soon_a_pause_is_noticed():
    learner = SpeedLearner(256)
    for _ in range(20):
        learner.observe(step_of(prefill=256), 20.0)
    assert 256 * learner.speed().prefill_s_per_token == pytest.approx(20.0, rel=0.05)
    learner.observe(step_of(prefill=256), 20_000.0)
    assert 256 * learner.speed().prefill_s_per_token < 40.0
