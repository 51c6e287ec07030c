"""The service-level objective that the figures count requests by."""

from __future__ import annotations

from functools import cache

from app.simulation.profiles import Profile
from loadtest.client import Outcome

SLO_TTFT_S = 2.0
SLO_PREFILLS = 1.5
SLO_TOKEN_S = 0.1


@cache
def alone_s(profile: Profile, prompt_tokens: int) -> float:
    """Seconds to prefill a prompt with nothing cached, on a worker with nothing else to do."""
    starts = range(0, prompt_tokens, profile.max_batch_tokens)
    chunks = [(start, min(profile.max_batch_tokens, prompt_tokens - start)) for start in starts]
    return sum(profile.compute_s(n, n * (start + n / 2), 0) for start, n in chunks)


def meets_slo(outcome: Outcome, profile: Profile) -> bool:
    if outcome.first_token_s is None or outcome.end_s is None:
        return False
    ttft_s = outcome.first_token_s - outcome.arrival_s
    allowed_s = SLO_TTFT_S + SLO_PREFILLS * alone_s(profile, outcome.prompt_tokens)
    return ttft_s <= allowed_s and token_s(outcome) <= SLO_TOKEN_S


def token_s(outcome: Outcome) -> float:
    """Mean seconds for each token after the first. outcome: of a request that was answered."""
    assert outcome.first_token_s is not None
    assert outcome.end_s is not None
    return (outcome.end_s - outcome.first_token_s) / max(1, outcome.output_tokens - 1)
