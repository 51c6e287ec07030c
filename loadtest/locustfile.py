"""Chat traffic with shared prefixes through the balancer, for locust.

    locust -f loadtest/locustfile.py --headless -u 32 -r 8 -t 30s --host http://127.0.0.1:8080
    locust -f loadtest/locustfile.py Chat --headless -u 32 -r 8 -t 30s --host http://127.0.0.1:8080

Each user holds conversations: one of a small set of system prompts, then turns that each carry the
whole conversation so far. A few system prompts are far more popular than the rest. A `Chat` sends
text to the router, as OpenAI's clients do. A `Routed` asks the router for a worker, streams the
answer from there and releases it. Locust's tables also have `ttft`, and `cached`, whose times are
percents of prompts that came from caches.

Where routers ask for a key: `--api-key`, or the variable KVROUTE_API_KEY.

This file stands alone, so that locust can send it to other machines.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlencode

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
JSON = {"Content-Type": "application/json", **AS_IT_IS}

TRIES = 30
PAUSE_S = 1.0
UNANSWERED = 0
"""Locust's status of a request that got no answer."""
REPEATED = (UNANSWERED, 408, 429, 502, 503, 504)
"""Statuses of routers after which clients ask once more, says docs/client.md."""

Tokens = list[int]


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        default="",
        env_var="KVROUTE_API_KEY",
        is_secret=True,
        help="A key that the routers take, if they ask for one",
    )
    parser.add_argument("--model", default="", help="Of chats; default: the first one")
    parser.add_argument("--policy", default="", help="Routing policy; default: the routers' own")
    parser.add_argument(
        "--output-tokens", type=int, default=100, help="Mean length of an answer in tokens"
    )


@events.init.add_listener  # type: ignore[untyped-decorator]
def set_the_clock(**_: Any) -> None:
    """Have gevent look at the time: --run-time would begin before all this was loaded."""
    gevent.sleep(0)


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
    """Returns equal prompts in every process and run, so that caches may hold them."""
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


class Conversation(FastHttpUser):
    """One caller; its next turn comes after the answer and a pause."""

    abstract = True
    wait_time = between(0.5, 2.0)
    is_ended = False
    """Whether locust has told it to end."""

    def on_start(self) -> None:
        self.rng = random.Random()
        self.options = self.environment.parsed_options
        key = self.options.api_key
        self.key = {"Authorization": f"Bearer {key}"} if key else {}
        """Sent to routers, and not to workers."""
        self.begin(self.rng.choices(SYSTEM_PROMPTS, POPULARITY)[0])

    @task
    def turn(self) -> None:
        self.say(random_tokens(self.rng.randint(*USER_TURN_TOKENS), self.rng))
        if self.rng.random() < 1 / MEAN_TURNS:
            self.begin(self.rng.choices(SYSTEM_PROMPTS, POPULARITY)[0])

    def begin(self, system: Tokens) -> None:
        raise NotImplementedError

    def say(self, said: Tokens) -> None:
        raise NotImplementedError

    def output_tokens(self) -> int:
        return max(1, round(self.rng.expovariate(1 / self.options.output_tokens)))

    def call(
        self,
        name: str,
        request: Callable[[bool], ResponseContextManager],
        use: Callable[[ResponseContextManager], Any] = lambda response: response,
    ) -> Any:
        """Returns what `use` makes of a router's answer; the router is asked again after one of
        REPEATED.

        request: makes one try; its argument says whether there was one before. Only the last one
        counts as failed.
        """
        tries = 0
        while True:
            with request(tries > 0) as response:
                tries += 1
                response.request_meta["name"] = name
                if response.status_code not in REPEATED or tries == TRIES:
                    return use(response)
                response.request_meta["name"] = f"{name}, to be repeated"
                response.success()
                if not self.is_ended:
                    after = (response.headers or {}).get("Retry-After")
                    time.sleep(float(str(after)) if after else PAUSE_S)
                if self.is_ended:
                    return use(response)

    def read(
        self,
        response: ResponseContextManager,
        asked: float,
        first: Callable[[], None] | None = None,
    ) -> list[dict[str, Any]]:
        """The choices of an answer; none unless it came in full.

        Notes `ttft` and `cached`. asked: when, on time.perf_counter's clock. first: called at the
        first event.
        """
        choices: list[dict[str, Any]] = []
        usage, sent = None, time.perf_counter()
        if response.status_code != 200:
            return []
        try:
            while line := response.stream.readline(b"\n"):
                if not line.startswith(b"data: {"):
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise ValueError(str(event["error"]))
                if not choices:
                    self.note("FIRST", "ttft", (time.perf_counter() - asked) * 1000)
                    if first is not None:
                        first()
                choices += event["choices"]
                usage = event.get("usage") or usage
            if usage is None:
                raise ValueError("the answer ended before its usage")
        except (*FAILURE_EXCEPTIONS, ValueError) as error:
            response.failure(error)  # type: ignore[no-untyped-call]
            return []
        response.request_meta["response_time"] += (time.perf_counter() - sent) * 1000
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.note("CACHED", "cached", 100 * cached / usage["prompt_tokens"])
        return choices

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


class Chat(Conversation):
    """Sends text to the router, as OpenAI's clients do."""

    def on_start(self) -> None:
        super().on_start()
        self.model = self.options.model
        if not self.model:
            listed = self.client.get("/v1/models", name="models", headers=self.key)
            cards = orjson.loads(listed.content or b"{}")
            self.model = next((card["id"] for card in cards.get("data", ())), "")

    def begin(self, system: Tokens) -> None:
        self.messages = [{"role": "system", "content": text_of(system)}]

    def say(self, said: Tokens) -> None:
        self.messages.append({"role": "user", "content": text_of(said)})
        body = {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": self.output_tokens(),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        post = partial(
            self.client.post,
            "/v1/chat/completions",
            data=orjson.dumps(body),  # type: ignore[arg-type]  # locust's annotation omits bytes
            headers={**JSON, **self.key},
            stream=True,
            catch_response=True,
        )
        asked = time.perf_counter()
        choices = self.call("chat", lambda _: post(), partial(self.read, asked=asked))
        answer = "".join(choice["delta"].get("content") or "" for choice in choices)
        self.messages.append({"role": "assistant", "content": answer})


class Routed(Conversation):
    """Asks the router for a worker, and carries the request itself."""

    def begin(self, system: Tokens) -> None:
        self.history = list(system)

    def say(self, said: Tokens) -> None:
        self.history += said
        request_id = f"locust-{uuid.uuid4().hex}"
        prompt = np.array(self.history, dtype="<u4").tobytes()
        asked = time.perf_counter()
        # Both ends in greenlets of their own: locust ends a user by an exception wherever it waits,
        # and what the router has reserved would stay so.
        routing = gevent.spawn(self.route, request_id, prompt)
        try:
            if choice := routing.get():
                self.history += self.complete(choice, request_id, prompt, asked)
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

    def route(self, request_id: str, prompt: bytes) -> dict[str, Any] | None:
        """The router's choice, or None if it made none."""
        query = {"request_id": request_id}
        if self.options.policy:
            query["policy"] = self.options.policy

        def request(again: bool) -> ResponseContextManager:
            marked = query | {"retry": "true"} if again else query
            return self.client.post(
                f"/v1/route?{urlencode(marked)}",
                data=prompt,  # type: ignore[arg-type]
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
        self, choice: dict[str, Any], request_id: str, prompt: bytes, asked: float
    ) -> Tokens:
        """Tokens of the worker's answer; empty if it did not arrive in full."""
        max_tokens = self.output_tokens()
        url = (
            f"{choice['address']}/v1/completions?request_id={request_id}&stream=true"
            f"&max_tokens={max_tokens}&stream_interval={-(-max_tokens // CHUNKS_PER_ANSWER)}"
        )
        with self.client.post(
            url,
            data=prompt,  # type: ignore[arg-type]
            headers=OCTETS,
            name="completion",
            stream=True,
            catch_response=True,
        ) as response:
            choices = self.read(response, asked, partial(self.confirm, choice))
        return [token for each in choices for token in each.get("token_ids", [])]

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


def reserved_path(choice: dict[str, Any]) -> str:
    # A decision made without Redis has reserved nothing.
    return f"/v1/requests/{choice.get('reservation_id', choice['request_id'])}"
