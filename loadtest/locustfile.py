"""Chat traffic with shared prefixes through the balancer, for locust.

    locust -f loadtest/locustfile.py --headless -u 32 -r 8 -t 30s --host http://127.0.0.1:8080

Each user holds conversations: one of a small set of system prompts, then turns that each carry the
whole conversation so far. A few system prompts are far more popular than the rest. A turn is routed
by the cluster, streamed from the chosen worker and released. Locust's tables have the rows `route`,
`ttft` and `completion`. The run ends by reporting how much of the prompts came from caches.

With `--api openai` a turn is one chat, in text, that the router answers; the row is then `chat`.

This file stands alone, so that locust can send it to other machines.
"""

from __future__ import annotations

import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator
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

UNNAMED = ""
"""In place of a worker's name."""

Tokens = list[int]
Messages = list[dict[str, str]]


@dataclass(slots=True)
class Totals:
    """Totals of this process; with --processes or --worker, each process reports its own."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    degraded: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    requests_per_worker: Counter[str] = field(default_factory=Counter)

    def count(self, usage: dict[str, Any], worker: str) -> None:
        """One answer. worker: as far as it is known."""
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self.requests_per_worker[worker] += 1

    def report(self) -> str:
        answers = self.requests_per_worker.total()
        if not answers:
            return "no request was answered"
        p50, p90, p99 = np.percentile(self.ttft_ms, (50, 90, 99))
        return (
            f"{answers:,} answers {self.whose()}; {self.degraded:,} degraded\n"
            f"hit rate {self.cached_tokens / self.prompt_tokens:.1%} "
            f"({self.cached_tokens:,} of {self.prompt_tokens:,} prompt tokens)\n"
            f"TTFT mean {np.mean(self.ttft_ms):.0f} ms, p50 {p50:.0f} ms, p90 {p90:.0f} ms, "
            f"p99 {p99:.0f} ms"
        )

    def whose(self) -> str:
        if UNNAMED in self.requests_per_worker:
            return "from workers that routers name only with --show-decision"
        workers = len(self.requests_per_worker)
        busiest = max(self.requests_per_worker.values())
        evenness = busiest * workers / self.requests_per_worker.total()
        return f"from {workers} workers, the busiest with {evenness:.2f}x the mean"


totals = Totals()


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument(
        "--api",
        choices=("kvroute", "openai"),
        default="kvroute",
        help="How requests are made: routed by the caller, or OpenAI's chats",
    )
    parser.add_argument("--model", default="", help="With --api openai; default: the first one")
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


def text_of(tokens: Tokens) -> str:
    """A letter for each token, as simulated engines make a token of each letter."""
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def chunks_of(response: ResponseContextManager) -> Iterator[dict[str, Any]]:
    """The events of an answer. Raises ValueError for one that says an error."""
    while line := response.stream.readline(b"\n"):
        if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
            continue
        chunk = orjson.loads(line[5:])
        if "error" in chunk:
            raise ValueError(str(chunk["error"]))
        yield chunk


def reserved_path(choice: dict[str, Any]) -> str:
    # A decision made without Redis has reserved nothing.
    return f"/v1/requests/{choice.get('reservation_id', choice['request_id'])}"


class Chat(FastHttpUser):
    """One caller; its next turn comes after the answer and a pause."""

    wait_time = between(0.5, 2.0)

    def on_start(self) -> None:
        self.rng = random.Random()
        self.options = self.environment.parsed_options
        self.new_conversation()
        self.model = self.options.model
        if self.options.api == "openai" and not self.model:
            cards = orjson.loads(self.client.get("/v1/models", name="models").content or b"{}")
            self.model = next((card["id"] for card in cards.get("data", ())), "")

    def new_conversation(self) -> None:
        system = self.rng.choices(SYSTEM_PROMPTS, POPULARITY)[0]
        self.history = list(system)
        self.messages: Messages = [{"role": "system", "content": text_of(system)}]

    @task
    def turn(self) -> None:
        said = random_tokens(self.rng.randint(*USER_TURN_TOKENS), self.rng)
        if self.options.api == "openai":
            self.messages.append({"role": "user", "content": text_of(said)})
            self.messages.append({"role": "assistant", "content": self.chat()})
        else:
            self.history += said
            self.send()
        if self.rng.random() < 1 / MEAN_TURNS:
            self.new_conversation()

    def send(self) -> None:
        """Route the conversation, and append the answer of the worker chosen."""
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

    def output_tokens(self) -> int:
        return max(1, round(self.rng.expovariate(1 / self.options.output_tokens)))

    def chat(self) -> str:
        """The router's answer to the messages; empty if it did not arrive in full."""
        body = {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": self.output_tokens(),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked = time.perf_counter()
        answer, usage = "", None
        with self.client.post(
            "/v1/chat/completions",
            data=orjson.dumps(body),  # type: ignore[arg-type]
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            name="chat",
            stream=True,
            catch_response=True,
        ) as response:
            if response.status_code != 200:
                return ""
            try:
                for chunk in chunks_of(response):
                    for choice in chunk["choices"]:
                        text = choice["delta"].get("content") or ""
                        if text and not answer:
                            self.note_first_token((time.perf_counter() - asked) * 1000)
                        answer += text
                    usage = chunk.get("usage") or usage
                if usage is None:
                    raise ValueError("the answer ended before its usage")
            except (*FAILURE_EXCEPTIONS, ValueError) as error:
                response.failure(error)
                return ""
            response.request_meta["response_time"] = (time.perf_counter() - asked) * 1000
            headers = response.headers or {}
        totals.count(usage, str(headers.get("x-kvroute-worker", UNNAMED)))
        return answer

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
        max_tokens = self.output_tokens()
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
        totals.degraded += choice["degraded"]
        totals.count(usage, f"{choice['worker_id']}:{choice['dp_rank']}")
        return answer

    def read_answer(
        self, response: ResponseContextManager, choice: dict[str, Any], started: float
    ) -> tuple[Tokens, dict[str, Any]]:
        """Tokens and usage. Raises ValueError for an error or if no usage arrives."""
        answer: Tokens = []
        usage = None
        first = True
        for chunk in chunks_of(response):
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
