"""Chat traffic with shared prefixes through the balancer, for locust.

    locust -f loadtest/locustfile.py --headless -u 32 -r 8 -t 30s --host http://127.0.0.1:8080

Each user holds conversations: one of a small set of system prompts, then turns that each carry the
whole conversation so far. A few system prompts are far more popular than the rest. A turn is routed
by the cluster, streamed from the chosen worker and released. Locust's tables have the rows `route`,
`ttft` and `completion`, and `cached`, whose times are percents of prompts that came from caches. A
run ends by reporting both of all answers, also in web mode, and from all of its processes.

With `--api openai` a turn is one chat, in text, that the router answers; the row is then `chat`.
Where routers ask for a key: `--api-key`, or the variable KVROUTE_API_KEY.

This file stands alone, so that locust can send it to other machines.
"""

from __future__ import annotations

import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlencode

import click
import gevent
import numpy as np
import orjson
from locust import FastHttpUser, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, ResponseContextManager
from locust.env import Environment
from locust.runners import WorkerRunner

NUM_SYSTEM_PROMPTS = 24
SYSTEM_PROMPT_TOKENS = (512, 4096)
USER_TURN_TOKENS = (32, 512)
MEAN_TURNS = 5
VOCABULARY = 32_000
CHUNKS_PER_ANSWER = 5
AS_IT_IS = {"Accept-Encoding": "identity"}
OCTETS = {"Content-Type": "application/octet-stream", **AS_IT_IS}

TRIES = 30
PAUSE_S = 1.0
UNANSWERED = 0
"""Locust's status of a request that got no answer."""
REPEATED = (UNANSWERED, 408, 429, 502, 503, 504)

UNNAMED = ""
"""In place of a worker's name."""

Tokens = list[int]
Messages = list[dict[str, str]]


@dataclass(slots=True)
class Totals:
    """Totals of a run. Of one with several processes, the master has those of all."""

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

    def told(self) -> dict[str, Any]:
        """What another process adds to its own; all of it is counted there from now on."""
        told = {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "degraded": self.degraded,
            "ttft_ms": list(self.ttft_ms),
            "requests_per_worker": dict(self.requests_per_worker),
        }
        self.clear()
        return told

    def clear(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.degraded = 0
        self.ttft_ms.clear()
        self.requests_per_worker.clear()

    def add(self, told: dict[str, Any]) -> None:
        self.prompt_tokens += told["prompt_tokens"]
        self.cached_tokens += told["cached_tokens"]
        self.degraded += told["degraded"]
        self.ttft_ms += told["ttft_ms"]
        self.requests_per_worker.update(told["requests_per_worker"])

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
    parser.add_argument(
        "--api-key",
        default="",
        env_var="KVROUTE_API_KEY",
        is_secret=True,
        help="A key that the routers take, if they ask for one",
    )
    parser.add_argument("--model", default="", help="With --api openai; default: the first one")
    parser.add_argument("--policy", default="", help="Routing policy; default: the routers' own")
    parser.add_argument(
        "--output-tokens", type=int, default=100, help="Mean length of an answer in tokens"
    )


@events.init.add_listener  # type: ignore[untyped-decorator]
def set_the_clock(**_: Any) -> None:
    """Have gevent look at the time: --run-time would begin before all this was loaded."""
    gevent.sleep(0)


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def begin_anew(**_: Any) -> None:
    totals.clear()


@events.report_to_master.add_listener  # type: ignore[untyped-decorator]
def tell_master(data: dict[str, Any], **_: Any) -> None:
    data["totals"] = totals.told()


@events.worker_report.add_listener  # type: ignore[untyped-decorator]
def hear_worker(data: dict[str, Any], **_: Any) -> None:
    totals.add(data["totals"])


def print_report(**_: Any) -> None:
    click.echo(f"\n{totals.report()}")


@events.init.add_listener  # type: ignore[untyped-decorator]
def report_in_the_end(environment: Environment, **_: Any) -> None:
    """Of each run in web mode, which goes on after one; what a worker has counted, its master
    reports."""
    if not isinstance(environment.runner, WorkerRunner):
        ends = environment.events.test_stop if environment.web_ui else environment.events.quit
        ends.add_listener(print_report)  # type: ignore[no-untyped-call]


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def fail_without_answers(environment: Environment, **_: Any) -> None:
    """Tries that were to be repeated are no failures, but a run of nothing else has failed."""
    if isinstance(environment.runner, WorkerRunner):
        return  # its master looks at what all of them report
    rows = [environment.stats.entries.get((name, "POST")) for name in ("route", "chat")]
    if not any(row and row.num_requests > row.num_failures for row in rows):
        environment.process_exit_code = 1


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


def pause_s(response: ResponseContextManager) -> float:
    """How long to wait before the next try."""
    after = None if response.headers is None else response.headers.get("Retry-After")
    return float(str(after)) if after else PAUSE_S


def reserved_path(choice: dict[str, Any]) -> str:
    # A decision made without Redis has reserved nothing.
    return f"/v1/requests/{choice.get('reservation_id', choice['request_id'])}"


class Chat(FastHttpUser):
    """One caller; its next turn comes after the answer and a pause."""

    wait_time = between(0.5, 2.0)

    is_ended = False
    """Whether locust has told it to end."""

    def on_start(self) -> None:
        self.rng = random.Random()
        self.options = self.environment.parsed_options
        key = self.options.api_key
        self.key = {"Authorization": f"Bearer {key}"} if key else {}
        """Sent to routers, and not to workers."""
        self.new_conversation()
        self.model = self.options.model
        if self.options.api == "openai" and not self.model:
            listed = self.client.get("/v1/models", name="models", headers=self.key)
            cards = orjson.loads(listed.content or b"{}")
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
        # Both ends in greenlets of their own: locust ends a user by an exception wherever it waits,
        # and what the router has reserved would stay so.
        routing = gevent.spawn(self.route, request_id, prompt)
        try:
            if choice := routing.get():
                self.history += self.complete(choice, request_id, prompt, started)
        except gevent.GreenletExit:
            self.is_ended = True
            raise
        finally:
            releasing = gevent.spawn(self.release_what, routing)
            try:
                releasing.get()
            except gevent.GreenletExit:
                self.is_ended = True
                releasing.join()
                raise

    def release_what(self, routing: gevent.Greenlet) -> None:
        if choice := routing.get():
            self.release(choice)

    def confirm(self, choice: dict[str, Any]) -> None:
        """Report the first token."""
        path = f"{reserved_path(choice)}/prefill_complete"
        post = partial(self.client.post, path, headers=self.key, catch_response=True)
        self.call("prefill_complete", lambda _: post())

    def release(self, choice: dict[str, Any]) -> None:
        path = reserved_path(choice)
        delete = partial(self.client.delete, path, headers=self.key, catch_response=True)
        self.call("release", lambda _: delete())

    def call(
        self, name: str, request: Callable[[bool], ResponseContextManager]
    ) -> ResponseContextManager:
        """The answer of a router, which is asked again while docs/client.md says so.

        request: makes one try; its argument says whether there was one before. Only the last one
        counts as failed.
        """
        for attempt in range(TRIES):
            response = request(attempt > 0)
            with response:
                if not self.is_to_repeat(response, name, attempt):
                    break
        return response

    def is_to_repeat(self, response: ResponseContextManager, name: str, attempt: int) -> bool:
        """Whether to try once more; if so, after a pause, and the try counts as no failure."""
        response.request_meta["name"] = name
        if response.status_code not in REPEATED or attempt == TRIES - 1:
            return False
        response.request_meta["name"] = f"{name}, to be repeated"
        response.success()  # type: ignore[no-untyped-call]
        if not self.is_ended:
            time.sleep(pause_s(response))
        return not self.is_ended

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
        for attempt in range(TRIES):
            answer = self.try_chat(orjson.dumps(body), attempt)
            if answer is not None:
                return answer
        return ""

    def try_chat(self, body: bytes, attempt: int) -> str | None:
        """As `chat`; None: it is to be tried once more."""
        asked = time.perf_counter()
        answer, usage = "", None
        with self.client.post(
            "/v1/chat/completions",
            data=body,  # type: ignore[arg-type]
            headers={"Content-Type": "application/json", **AS_IT_IS, **self.key},
            name="chat",
            stream=True,
            catch_response=True,
        ) as response:
            if response.status_code != 200:
                return None if self.is_to_repeat(response, "chat", attempt) else ""
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
        self.note_answer(usage, str(headers.get("x-kvroute-worker", UNNAMED)))
        return answer

    def route(self, request_id: str, prompt: bytes) -> dict[str, Any] | None:
        """The router's choice, or None if it made none."""
        query = {"request_id": request_id}
        if self.options.policy:
            query["policy"] = self.options.policy

        def request(again: bool) -> ResponseContextManager:
            marked = query | {"retry": "true"} if again else query
            return self.client.post(
                f"/v1/route?{urlencode(marked)}",
                data=prompt,  # type: ignore[arg-type]  # locust's annotation omits bytes
                headers={**OCTETS, **self.key},
                catch_response=True,
            )

        response = self.call("route", request)
        if response.status_code == 200:
            choice: dict[str, Any] = orjson.loads(response.content)
            return choice
        if response.status_code == UNANSWERED:
            self.release({"request_id": request_id})  # it may have been reserved all the same
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
            headers=OCTETS,
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
        self.note_answer(usage, f"{choice['worker_id']}:{choice['dp_rank']}")
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
                self.confirm(choice)
            for part in chunk["choices"]:
                answer += part.get("token_ids", [])
            usage = chunk.get("usage") or usage
        if usage is None:
            raise ValueError("the answer ended before its usage")
        return answer, usage

    def note_first_token(self, ttft_ms: float) -> None:
        totals.ttft_ms.append(ttft_ms)
        self.note("FIRST", "ttft", ttft_ms)

    def note_answer(self, usage: dict[str, Any], worker: str) -> None:
        totals.count(usage, worker)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.note("CACHED", "cached", 100 * cached / usage["prompt_tokens"])

    def note(self, kind: str, name: str, value: float) -> None:
        """Have a row of locust's tables show a value that is no time of a request."""
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=value,
            response_length=0,
            exception=None,
            context=self.context(),
        )
