"""What answers teach of a worker whose engine tells nothing."""

from dataclasses import replace

import pytest

from app.core.worker_report import DEFAULT_SPEED
from app.policy.answers import ENOUGH, LEAST_KEPT, STEP_S, Answer, Answers, _usual_s

PREDICTED = 1000
ANSWER = Answer(
    prompt_tokens=2000, cached_tokens=1000, output_tokens=11, first_token_s=0.5, rest_s=0.4
)


def taught(*answers, predicted=PREDICTED, queue_s=0.0):
    learned = Answers()
    for answer in answers:
        learned.add(answer, round(predicted * learned.kept), queue_s)
    return learned


@pytest.mark.parametrize(
    ("cached", "kept"), [(1000, 1.0), (1200, 1.0), (500, 0.5), (0, LEAST_KEPT), (None, 1.0)]
)
def test_of_what_was_routed_there_so_much_counts_as_engines_said_to_have_cached(cached, kept):
    answer = replace(ANSWER, cached_tokens=cached)
    assert taught(*[answer] * (ENOUGH - 1)).kept == 1.0
    assert taught(*[answer] * 100).kept == pytest.approx(kept, rel=0.01)


def test_what_is_kept_is_seen_to_grow_again():
    lost, held = (replace(ANSWER, cached_tokens=tokens) for tokens in (0, PREDICTED))
    assert taught(*[lost] * 50, *[held] * 200).kept > 0.9


def test_prompts_of_which_nothing_was_predicted_say_nothing_of_what_is_kept():
    assert taught(*[replace(ANSWER, cached_tokens=0)] * 50, predicted=0).kept == 1.0


def test_the_time_to_first_tokens_teaches_how_fast_prompts_are_computed():
    slow = replace(ANSWER, first_token_s=10 * _usual_s(2000, 1000))
    speed = taught(*[slow] * ENOUGH).speed
    for name in ("prefill_s_per_token", "prefill_s_per_token2"):
        assert getattr(speed, name) == pytest.approx(10 * getattr(DEFAULT_SPEED, name))


def test_the_time_of_tokens_teaches_how_fast_they_are_generated():
    slow = replace(ANSWER, rest_s=10 * 3 * STEP_S)
    speed = taught(*[slow] * ENOUGH).speed
    assert speed.decode_s_per_seq == pytest.approx(3 * DEFAULT_SPEED.decode_s_per_seq)
    assert speed.mean_output_tokens == pytest.approx(11)


def test_answers_that_waited_behind_others_say_nothing_of_prefills():
    waited = taught(*[replace(ANSWER, first_token_s=9.0)] * 50, queue_s=3.0)
    assert waited.speed.prefill_s_per_token == DEFAULT_SPEED.prefill_s_per_token


def test_answers_that_came_whole_say_nothing_of_speed():
    whole = replace(ANSWER, first_token_s=0.0, rest_s=0.0)
    speed = taught(*[whole] * 50).speed
    assert replace(speed, mean_output_tokens=DEFAULT_SPEED.mean_output_tokens) == DEFAULT_SPEED
