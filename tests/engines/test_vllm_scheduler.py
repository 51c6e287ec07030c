"""The simulated engine beside a real vLLM with a small cache: the same requests, step by step."""

import json
import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from app.simulation.engine import SimEngine
from app.simulation.profiles import USUAL
from app.simulation.steps import SimRequest
from tests.engines.vllm_server import BLOCK, ENVIRONMENT, VENV, make_models

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
BLOCKS, BATCH_TOKENS, MAX_SEQS, REQUESTS = 40, 256, 6, 80


def requests_of(seed):
    """Prompts that share prefixes, of which one in four ends with a block, and answers that fill
    several blocks."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(5, 400) for _ in range(rng.randrange(40, 400))] for _ in range(5)]
    asked, at = [], 0
    for number in range(REQUESTS):
        begun = rng.choice(prefixes)
        prompt = begun[: rng.randrange(len(begun) // 2, len(begun))]
        prompt = [*prompt, *(rng.randrange(5, 400) for _ in range(rng.randrange(1, 60)))]
        if rng.randrange(4) == 0:
            prompt = begun[: rng.randrange(1, len(begun) // BLOCK + 1) * BLOCK]
        at += rng.randrange(0, 12)
        asked.append(
            {
                "name": f"r{number}",
                "prompt": prompt,
                "max_tokens": rng.randrange(1, 150),
                "at": at,
            }
        )
    return asked


def steps_of_vllm(folder, asked):
    if not VENV.exists():
        pytest.fail(f"there is no {VENV}: make test-vllm installs vLLM there")
    make_models(folder)
    case = {
        "model": str(folder / "model"),
        "block_size": BLOCK,
        "num_blocks": BLOCKS,
        "batch_tokens": BATCH_TOKENS,
        "max_seqs": MAX_SEQS,
        "requests": asked,
    }
    ran = subprocess.run(
        [VENV / "bin" / "python", Path(__file__).with_name("vllm_scheduler.py")],
        input=json.dumps(case),
        capture_output=True,
        text=True,
        timeout=1500,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    said = [line for line in ran.stdout.splitlines() if line.startswith("STEP ")]
    return [json.loads(line.removeprefix("STEP ")) for line in said]


def steps_of_ours(asked):
    profile = replace(USUAL, max_batch_tokens=BATCH_TOKENS, max_num_seqs=MAX_SEQS)
    engine = SimEngine(profile, block_size=BLOCK, now=lambda: 0.0, kv_pool_tokens=BLOCKS * BLOCK)
    steps = []
    left = list(asked)
    while left or engine.metrics().request_active_slots or engine.num_waiting:
        while left and left[0]["at"] <= len(steps):
            one = left.pop(0)
            engine.submit(
                SimRequest.from_tokens(
                    one["name"], one["prompt"], one["max_tokens"], block_size=BLOCK
                )
            )
        step = engine.step()
        engine.check()
        if step is None:
            steps.append({"ended": []})
            continue
        steps.append(
            {
                "tokens": step.prefill_tokens + step.decode_seqs,
                "begun": [list(one) for one in step.begun],
                "preempted": sorted(step.preempted),
                "ended": sorted(one.request_id for one in step.finished),
            }
        )
    return steps


def test_a_simulated_engine_schedules_as_vllm_does(tmp_path):
    asked = requests_of(1)
    theirs = steps_of_vllm(tmp_path, asked)
    ours = steps_of_ours(asked)
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one == other, f"step {at}"
    assert sum(len(step.get("preempted", [])) for step in theirs) > 10
    assert sum(cached > 0 for step in theirs for _, cached in step.get("begun", [])) > 20
