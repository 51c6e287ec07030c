"""Promises of the index beside vLLM's own KV cache manager, in random histories of evictions."""

from math import gcd

import pytest

from tests.engines.vllm_histories import CASES, VENV, count, histories

pytestmark = pytest.mark.vllm
SEED, STEPS = 7, 120
AT_ITS_END = ("drafter, ", "drafter of ")
"""Kinds that do without the last block held, which may look ahead to something else."""
NOT_KNOWN = ("chunked attention", "drafter before 0.33, states and windows")
LINES = []


@pytest.fixture
def lines():
    if not VENV.exists():
        pytest.skip(f"no vLLM in {VENV}: make test-vllm installs it")
    if not LINES:
        LINES.extend(histories([case | {"seed": SEED, "steps": STEPS} for case in CASES]))
    return LINES


def test_never_more_is_promised_than_the_engine_reuses(lines):
    counted = count(lines)
    assert len(counted) > 20
    assert {name: c.over for name, c in counted.items() if c.over} == {}
    assert all(c.probes > 100 and c.reused_tokens > 1000 for c in counted.values())


def test_what_is_held_is_more_than_engines_with_windows_states_and_drafters_reuse(lines):
    """Else the test before could not fail."""
    counted = count(lines, honest=False)
    assert all(c.over > 0 and c.most_over > 0 for c in counted.values())


def test_hardly_ever_less_is_promised_than_the_engine_reuses(lines):
    sizes = {case["name"]: gcd(*(g["block"] for g in case["groups"])) for case in CASES}
    for name, c in count(lines).items():
        if name.startswith(AT_ITS_END):
            assert c.under_tokens <= c.probes * max(sizes[name], 32), name
        elif name not in NOT_KNOWN:
            assert c.under <= 0.01 * c.probes, (name, c)
