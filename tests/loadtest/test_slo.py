"""The objective that requests are counted by."""

import pytest

from app.simulation.profiles import USUAL
from loadtest.client import Outcome
from loadtest.experiment import alone_s, meets_slo


def outcome(prompt_tokens, ttft_s, token_s):
    return Outcome(
        request_id="r",
        arrival_s=10.0,
        sent_s=10.0,
        prompt_tokens=prompt_tokens,
        attempts=1,
        first_token_s=10.0 + ttft_s,
        end_s=10.0 + ttft_s + 10 * token_s,
        output_tokens=11,
    )


def test_a_prompt_alone_takes_the_sum_of_its_steps():
    # 2,048 tokens: 2 ms + 8.6 ms + 72.3 us a token, and 1.1 ns for each pair that attends.
    assert alone_s(USUAL, 2048) == pytest.approx(0.1587 + 1.10e-9 * 2048 * 1024, rel=1e-3)
    rest = USUAL.compute_s(52, 52 * (2048 + 26), 0)
    assert alone_s(USUAL, 2100) == pytest.approx(alone_s(USUAL, 2048) + rest)


@pytest.mark.parametrize(
    ("ttft_s", "token_s", "met"), [(2.24, 0.1, True), (2.25, 0.1, False), (2.24, 0.101, False)]
)
def test_the_slo_bounds_ttft_and_the_time_per_further_token(ttft_s, token_s, met):
    # 2 s + 1.5 * 161 ms.
    assert meets_slo(outcome(2048, ttft_s, token_s), USUAL) is met


def test_a_request_without_an_answer_misses_the_slo():
    assert not meets_slo(Outcome("r", 0.0, 0.0, 100, 1), USUAL)
