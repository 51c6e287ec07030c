"""vLLM's engine with a real model, in this process, one step at a time: run by vLLM's Python.

It reads a case from stdin as JSON, and writes a JSON line for each step: what was scheduled.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine


def named(request_id):
    return request_id.split("-")[0]


def scheduled(output):
    begun = output.scheduled_new_reqs
    return {
        "tokens": sum(output.num_scheduled_tokens.values()),
        "begun": [[named(new.req_id), new.num_computed_tokens] for new in begun],
        "preempted": sorted(map(named, output.preempted_req_ids or ())),
    }


def main():
    case = json.load(sys.stdin)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=case["model"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=case["num_blocks"] * case["block_size"],
            block_size=case["block_size"],
            num_gpu_blocks_override=case["num_blocks"] + 1,  # one is never used
            max_num_batched_tokens=case["batch_tokens"],
            max_num_seqs=case["max_seqs"],
            enable_prefix_caching=True,
            async_scheduling=False,
        )
    )
    scheduler = engine.engine_core.engine_core.scheduler
    schedule, steps = scheduler.schedule, []

    def noted(*args, **kwargs):
        output = schedule(*args, **kwargs)
        steps.append(scheduled(output))
        return output

    scheduler.schedule = noted
    requests, at = case["requests"], 0
    while requests or engine.has_unfinished_requests():
        while requests and requests[0]["at"] <= at:
            one = requests.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=one["max_tokens"], ignore_eos=True)
            engine.add_request(one["name"], {"prompt_token_ids": one["prompt"]}, params)
        at += 1
        before = len(steps)
        outputs = engine.step() if engine.has_unfinished_requests() else []
        ended = sorted(named(output.request_id) for output in outputs if output.finished)
        step = steps[-1] if len(steps) > before else {}
        sys.stdout.write("STEP " + json.dumps(step | {"ended": ended}) + "\n")


main()
