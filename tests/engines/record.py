"""Records what an engine publishes, and what it says was cached, for tests/data/engines:

    python -m tests.engines.record URL REPLAY_ADDRESS FILE NUM_REQUESTS [ADAPTER]

The engine is a vLLM with VLLM_SERVER_DEV_MODE=1, --enable-prompt-tokens-details and a context of
512 tokens, or sglang_engine.py. It was just started, and has so few blocks that some are evicted.
The bytes are those of its replay socket.
"""

import random
import sys
import time
from pathlib import Path

import httpx
import msgspec
import zmq

RESET_AT = 24
LONGEST = 260
END = b"\xff" * 8
QUIET_S = 0.3


def batches_from(socket, first):
    found = []
    while True:
        time.sleep(QUIET_S)
        before = len(found)
        socket.send_multipart([b"", (first + before).to_bytes(8, "big")])
        while True:
            *_, number, payload = socket.recv_multipart()
            if number == END:
                break
            assert int.from_bytes(number, "big") == first + len(found)
            found.append(payload)
        if len(found) == before:
            return found


def prompts(adapter):
    """Tokens, adapter and salt: prompts that go on, branch off and come again."""
    choice = random.Random(1)
    told = [{"tokens": [], "lora_name": None, "cache_salt": None}]
    while True:
        prompt = dict(choice.choice(told[-4:]))
        begun = prompt["tokens"]
        if choice.random() < 0.2:
            begun = []
            prompt["lora_name"] = choice.choice([adapter, None, None])
            prompt["cache_salt"] = choice.choice(["red", None, None])
        kept = begun[: choice.choice([len(begun), choice.randrange(len(begun) + 1)])]
        more = [choice.randrange(5, 400) for _ in range(choice.choice([1, 33, 70, 130]))]
        prompt["tokens"] = [*kept, *more][:LONGEST]
        told.append(prompt)
        yield prompt


def ask(http, prompt, *, is_vllm):
    """How many tokens were cached."""
    if not is_vllm:
        asked = {"tokens": prompt["tokens"], "salt": prompt["cache_salt"]}
        return int(http.post("/ask", json=asked).raise_for_status().json()["cached"])
    asked = {"model": prompt["lora_name"] or "tiny", "prompt": prompt["tokens"], "max_tokens": 3}
    if prompt["cache_salt"]:
        asked["cache_salt"] = prompt["cache_salt"]
    answer = http.post("/v1/completions", json=asked | {"ignore_eos": True}).raise_for_status()
    return (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def record(url, replay, num, adapter):
    with httpx.Client(base_url=url, timeout=60) as http, zmq.Context() as context:
        is_vllm = http.get("/version").is_success
        with context.socket(zmq.DEALER) as socket:
            socket.connect(replay)
            before = batches_from(socket, 0)
            count = len(before)
            first = {"tokens": [], "lora_name": None, "cache_salt": None, "is_reset": False}
            steps = [{**first, "cached": 0, "payloads": before}]
            for number, prompt in zip(range(num), prompts(adapter), strict=False):
                is_reset = number == RESET_AT
                if is_reset:
                    http.post("/reset_prefix_cache" if is_vllm else "/reset").raise_for_status()
                cached = ask(http, prompt, is_vllm=is_vllm)
                payloads = batches_from(socket, count)
                count += len(payloads)
                said = {"is_reset": is_reset, "cached": cached, "payloads": payloads}
                steps.append({**prompt, **said})
    return steps


if __name__ == "__main__":
    url, replay, file, num, *adapters = sys.argv[1:]
    steps = record(url, replay, int(num), adapters[0] if adapters else None)
    Path(file).write_bytes(msgspec.msgpack.encode(steps))
