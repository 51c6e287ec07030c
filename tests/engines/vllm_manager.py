"""vLLM's own KV cache manager, driven without a model: run by vLLM's Python, in a random history.

It reads cases from stdin as JSON, and writes JSON lines: what it publishes after each step, and
how many tokens of some prompts it would reuse then. Requests are admitted, chunked, decoded and
freed as by vLLM's scheduler.
"""

import json
import random
import sys
from inspect import signature

import msgspec
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

KNOWN = signature(KVCacheManager).parameters
HEADS = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


def spec_of(group):
    size = group["block"]
    match group["kind"]:
        case "full":
            return FullAttentionSpec(block_size=size, **HEADS)
        case "sliding":
            return SlidingWindowSpec(block_size=size, sliding_window=group["window"], **HEADS)
        case "chunked":
            return ChunkedLocalAttentionSpec(
                block_size=size, attention_chunk_size=group["chunk"], **HEADS
            )
        case "mamba":
            return MambaSpec(
                block_size=size,
                shapes=((1, 1),),
                dtypes=(torch.float32,),
                mamba_cache_mode=group["mode"],
            )


class Engine:
    def __init__(self, case):
        self.rng = random.Random(case["seed"])
        self.case = case
        self.unit = case["unit"]
        lookahead = case.get("lookahead", 0)
        more = {"num_hash_lookahead_tokens": lookahead} if lookahead else {}
        groups = [KVCacheGroupSpec([str(i)], spec_of(g)) for i, g in enumerate(case["groups"])]
        self.manager = KVCacheManager(
            KVCacheConfig(
                case["num_blocks"],
                [],
                groups,
                prefix_cache_retention_interval=case.get("retention"),
            ),
            max_model_len=100_000,
            scheduler_block_size=self.unit,
            hash_block_size=case["hash"],
            enable_caching=True,
            use_eagle=case.get("drop", False),
            enable_kv_cache_events=True,
            **more,
        )
        init_none_hash(sha256)
        hasher = [case["hash"], sha256, *([lookahead] if lookahead else [])]
        self.hasher = get_request_block_hasher(*hasher)
        self.drafts = 3 if lookahead or case.get("drop") else 0
        self.aligned = next((g["block"] for g in case["groups"] if g.get("mode") == "align"), None)
        self.running = []
        self.seen = [[]]
        self.number = 0

    def request(self, tokens, output=1):
        self.number += 1
        about = {"block_hasher": self.hasher, "pooling_params": None}
        if "eos_token_id" in signature(Request.__init__).parameters:
            about["eos_token_id"] = None
        params = SamplingParams(max_tokens=output)
        return Request(str(self.number), list(tokens), params, **about)

    def prompt(self):
        """Returns a prompt that shares a prefix with an earlier one, often up to a block's end."""
        old = self.rng.choice(self.seen)
        cut = self.rng.randint(0, len(old))
        if self.rng.random() < 0.5:
            size = self.rng.choice([self.unit, *(g["block"] for g in self.case["groups"])])
            cut = min(len(old), max(0, cut // size * size + self.rng.choice([-1, 0, 0, 0, 1, 2])))
        more = self.rng.randint(1, self.case["longest"] // self.rng.choice([1, 1, 4, 16]))
        # Of few tokens, so that what an engine has looked ahead to is met again.
        return (old[:cut] + [self.rng.randint(1, 3) for _ in range(more)])[: self.case["longest"]]

    def chunk(self, request):
        start = request.num_computed_tokens
        end = min(start + self.case["budget"], request.num_tokens)
        if self.aligned and start < request.num_prompt_tokens:
            last = (request.num_tokens - 1) // self.aligned * self.aligned
            if self.case.get("drop"):
                last = max(0, last - self.aligned)
            if end < request.num_tokens:
                end = max(end // self.aligned * self.aligned, min(end, start + 1))
            if start < last < end:
                end = last
        return end - start

    def admit(self):
        request = self.request(self.prompt(), self.rng.randint(1, 3 * self.case["hash"]))
        blocks, computed, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        request.num_computed_tokens = computed
        count = self.chunk(request)
        request.num_computed_tokens = 0
        if count < 1:
            return
        if self.manager.allocate_slots(request, count, computed, blocks, self.drafts) is None:
            self.manager.free(request)
            return
        request.num_computed_tokens = computed + count
        self.running.append(request)

    def advance(self, request):
        if request.num_computed_tokens == request.num_tokens:
            if request.num_output_tokens >= request.max_tokens or self.rng.random() < 0.05:
                self.finish(request)
                return
            request.append_output_token_ids(self.rng.randint(1, 3))
        count = self.chunk(request)
        if self.manager.allocate_slots(request, count, num_lookahead_tokens=self.drafts) is None:
            self.finish(request)
            return
        request.num_computed_tokens += count

    def finish(self, request):
        self.running.remove(request)
        self.manager.free(request)
        self.seen = [*self.seen[-12:], list(request.all_token_ids)]

    def step(self):
        self.manager.new_step_starts()
        for request in [*self.running]:
            self.advance(request)
        while len(self.running) < 4 and self.rng.random() < 0.5:
            self.admit()
        if not self.running and self.rng.random() < 0.02:
            self.manager.reset_prefix_cache()
        events = [msgspec.to_builtins(event) for event in self.manager.events.take()]
        for event in events:
            event["block_hashes"] = [h & (1 << 64) - 1 for h in event.get("block_hashes", [])]
        say({"events": events})

    def probe(self):
        tokens = self.prompt()
        _, reused, *_ = self.manager.get_computed_blocks(self.request(tokens))
        say({"tokens": tokens, "reused": reused})


def say(value):
    sys.stdout.write(json.dumps(value, default=list) + "\n")


def main():
    for case in json.load(sys.stdin):
        say({"case": case})
        if case.get("lookahead") and "num_hash_lookahead_tokens" not in KNOWN:
            continue
        try:
            engine = Engine(case)
        except AssertionError as error:
            say({"refused": str(error)})
            continue
        for _ in range(case["steps"]):
            engine.step()
            if engine.rng.random() < 0.3:
                for _ in range(4):
                    engine.probe()


main()
