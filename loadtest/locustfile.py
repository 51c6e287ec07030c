"""Chat traffic with shared prefixes through the balancer, for locust.

    locust -f loadtest/locustfile.py --headless -u 32 -r 8 -t 30s --host http://127.0.0.1:8080

Each user holds conversations: one of a small set of system prompts, then turns that each carry the
whole conversation so far. A few system prompts are far more popular than the rest. A turn is routed
by the cluster, streamed from the chosen worker and released. Locust's tables have the rows `route`,
`ttft` and `completion`. The run ends by reporting how much of the prompts came from caches.

This file stands alone, so that locust can send it to other machines.
"""

from __future__ import annotations

import random
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
import orjson
from locust import FastHttpUser, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, ResponseContextManager

NUM_SYSTEM_PROMPTS = 24
SYSTEM_PROMPT_TOKENS = (512, 4096)
USER_TURN_TOKENS = (32, 512)
MEAN_TURNS = 5
VOCABULARY = 32_000
CHUNKS_PER_ANSWER = 5
HEADERS = {"Content-Type": "application/octet-stream", "Accept-Encoding": "identity"}

Tokens = list[int]


@dataclass(slots=True)
class Totals:
    """Totals of this process; with --processes or --worker, each process reports its own."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    degraded: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    requests_per_worker: Counter[str] = field(default_factory=Counter)

    def report(self) -> str:
        answers = self.requests_per_worker.total()
        if not answers:
            return "no request was answered"
        workers = len(self.requests_per_worker)
        p50, p90, p99 = np.percentile(self.ttft_ms, (50, 90, 99))
        busiest = max(self.requests_per_worker.values())
        return (
            f"{answers:,} answers from {workers} workers, the busiest with "
            f"{busiest * workers / answers:.2f}x the mean; {self.degraded:,} degraded\n"
            f"hit rate {self.cached_tokens / self.prompt_tokens:.1%} "
            f"({self.cached_tokens:,} of {self.prompt_tokens:,} prompt tokens)\n"
            f"TTFT mean {np.mean(self.ttft_ms):.0f} ms, p50 {p50:.0f} ms, p90 {p90:.0f} ms, "
            f"p99 {p99:.0f} ms"
        )


totals = Totals()


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--policy", default="", help="Routing policy; default: the routers' own")
    parser.add_argument(
        "--output-tokens", type=int, default=100, help="Mean length of an answer in tokens"
    )


@events.quit.add_listener  # type: ignore[untyped-decorator]
def print_report(**_: Any) -> None:
    click.echo(f"\n{totals.report()}")


def random_tokens(count: int, rng: random.Random) -> Tokens:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def system_prompts() -> list[Tokens]:
    """The same in every process and run, so that caches may hold them."""
    rng = random.Random(0)
    return [
        random_tokens(rng.randint(*SYSTEM_PROMPT_TOKENS), rng) for _ in range(NUM_SYSTEM_PROMPTS)
    ]


SYSTEM_PROMPTS = system_prompts()
# Zipf's law: the k-th most popular is asked for 1/k as often as the first.
POPULARITY = [1 / rank for rank in range(1, NUM_SYSTEM_PROMPTS + 1)]


def reserved_path(choice: dict[str, Any]) -> str:
    # A decision made without Redis has reserved nothing.
    return f"/v1/requests/{choice.get('reservation_id', choice['request_id'])}"


class Chat(FastHttpUser):
    """One caller; its next turn comes after the answer and a pause."""

    wait_time = between(0.5, 2.0)

    def on_start(self) -> None:
        self.rng = random.Random()
        self.options = self.environment.parsed_options
        self.history = self.new_conversation()

    def new_conversation(self) -> Tokens:
        return list(self.rng.choices(SYSTEM_PROMPTS, POPULARITY)[0])

    @task
    def turn(self) -> None:
        self.history += random_tokens(self.rng.randint(*USER_TURN_TOKENS), self.rng)
        request_id = f"locust-{uuid.uuid4().hex}"
        prompt = np.array(self.history, dtype="<u4").tobytes()
        started = time.perf_counter()
        choice = self.route(request_id, prompt)
        if choice is None:
            return
        try:
            self.history += self.complete(choice, request_id, prompt, started)
        finally:
            self.client.delete(reserved_path(choice), name="release")
        if self.rng.random() < 1 / MEAN_TURNS:
            self.history = self.new_conversation()

    def route(self, request_id: str, prompt: bytes) -> dict[str, Any] | None:
        """The router's choice, or None if it made none; waits if the router says for how long."""
        query = f"request_id={request_id}" + (
            f"&policy={self.options.policy}" if self.options.policy else ""
        )
        response = self.client.post(
            f"/v1/route?{query}",
            data=prompt,  # type: ignore[arg-type]  # locust's annotation omits bytes
            headers=HEADERS,
            name="route",
        )
        if response.status_code == 200:
            choice: dict[str, Any] = orjson.loads(response.content)
            return choice
        if response.status_code == 429 and response.headers:
            time.sleep(float(str(response.headers["Retry-After"])))
        return None

    def complete(
        self, choice: dict[str, Any], request_id: str, prompt: bytes, started: float
    ) -> Tokens:
        """Tokens of the answer; empty if it did not arrive in full.

        started: when the turn began, on time.perf_counter's clock; TTFT includes the routing.
        """
        max_tokens = max(1, round(self.rng.expovariate(1 / self.options.output_tokens)))
        url = (
            f"{choice['address']}/v1/completions?request_id={request_id}&stream=true"
            f"&max_tokens={max_tokens}&stream_interval={-(-max_tokens // CHUNKS_PER_ANSWER)}"
        )
        asked = time.perf_counter()
        with self.client.post(
            url,
            data=prompt,  # type: ignore[arg-type]
            headers=HEADERS,
            name="completion",
            stream=True,
            catch_response=True,
        ) as response:
            if response.status_code != 200:
                return []
            try:
                answer, usage = self.read_answer(response, choice, started)
            except (*FAILURE_EXCEPTIONS, ValueError) as error:
                response.failure(error)
                return []
            response.request_meta["response_time"] = (time.perf_counter() - asked) * 1000
        totals.prompt_tokens += usage["prompt_tokens"]
        totals.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        totals.degraded += choice["degraded"]
        totals.requests_per_worker[f"{choice['worker_id']}:{choice['dp_rank']}"] += 1
        return answer

    def read_answer(
        self, response: ResponseContextManager, choice: dict[str, Any], started: float
    ) -> tuple[Tokens, dict[str, Any]]:
        """Tokens and usage. Raises ValueError for an error or if no usage arrives."""
        answer: Tokens = []
        usage = None
        first = True
        while line := response.stream.readline(b"\n"):
            if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                continue
            chunk = orjson.loads(line[5:])
            if "error" in chunk:
                raise ValueError(str(chunk["error"]))
            if first:
                first = False
                self.note_first_token((time.perf_counter() - started) * 1000)
                self.client.post(
                    f"{reserved_path(choice)}/prefill_complete", name="prefill_complete"
                )
            for part in chunk["choices"]:
                answer += part.get("token_ids", [])
            usage = chunk.get("usage") or usage
        if usage is None:
            raise ValueError("the answer ended before its usage")
        return answer, usage

    def note_first_token(self, ttft_ms: float) -> None:
        totals.ttft_ms.append(ttft_ms)
        self.environment.events.request.fire(
            request_type="FIRST",
            name="ttft",
            response_time=ttft_ms,
            response_length=0,
            exception=None,
            context=self.context(),
        )
