"""An engine that shows itself as vLLM, computes nothing, and falls ill on demand.

In this process, `async with sick_engine() as engine:` and `engine.faults = Faults(status=500)`. As
a process of its own, `python -m tests.sick_engine --port 8000`, and POST the members of Faults that
are not their defaults to /faults: `{}` heals it, and GET /faults shows them and what it counts.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
import struct
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import click
import orjson
from aiohttp import web

from app.core.hashing import compute_local_hashes, compute_sequence_hashes
from tests.engine_dialects import DIALECTS, FAULT, Chat
from workers.bridge.events.events import BlockRemoved, BlockStored, EngineEvent
from workers.vllm_face.event_socket import EventSocket

HANG_S = 86_400.0
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that resets a connection on closing."""
BLOCK_SIZE = 16
MAX_BODY_BYTES = 64 * 2**20
NUM_TOKENS = 8
"""Of an answer that is not limited."""

How = Literal[
    "well",
    "error first",
    "error before tokens",
    "error within",
    "empty",
    "unfinished",
    "reset first",
    "reset within",
    "silent",
    "hang",
    "stall",
]

JSON, PAGE, EVENTS = "application/json", "text/html", "text/event-stream"
SIGN_IN = b"<!doctype html><title>Sign in</title>"
FOREIGN: Mapping[str, tuple[int, dict[str, str], bytes]] = {
    "a page": (200, {"content-type": PAGE}, SIGN_IN),
    "a page as JSON": (200, {"content-type": JSON}, SIGN_IN),
    "a page as events": (200, {"content-type": EVENTS}, SIGN_IN),
    "a page as text": (200, {"content-type": "text/plain"}, SIGN_IN),
    "elsewhere": (302, {"location": "/login", "content-type": PAGE}, SIGN_IN),
    "elsewhere for good": (308, {"location": "https://127.0.0.1/"}, b""),
    "as before": (304, {}, b""),
    "no content": (204, {}, b""),
    "accepted": (202, {"content-type": JSON}, b'{"id":"later"}'),
    "other JSON": (200, {"content-type": JSON}, b'{"status":"ok"}'),
    "a word of JSON": (200, {"content-type": JSON}, b'"ok"'),
    "half": (200, {"content-type": JSON}, b'{"id":"x","data":[{"index":0}],"choices":[{"text":""}'),
    "zipped": (200, {"content-type": JSON, "content-encoding": "gzip"}, gzip.compress(b"{}")),
    "an end alone": (200, {"content-type": EVENTS}, b"data: [DONE]\n\n"),
    "half an event": (200, {"content-type": EVENTS}, b'data: {"choices":[{"del'),
}
"""Status, headers and body of answers that are none of any API, and come at once."""


@dataclass(frozen=True, slots=True)
class Faults:
    """health_s, metrics_s, tokenize_s: how late these answer; HANG_S: never. *_status: what they
    answer; 0: the connection is reset.

    more_running, more_waiting: of what /metrics shows, those that are not its own. kv_usage: what
    it shows, 0-1; None: its own. lists_models: whether /v1/models has any. max_model_len:
    instead of its own.

    how: an answer goes. status: of answers, which come at once unless it is 200. body: of such an
    answer, instead of the dialect's. error_event: instead of the dialect's.
    foreign: which of FOREIGN comes instead of an answer.
    prefill_s, token_s: instead of its own; None: its own. whole_s: that answers which are not
    streamed take longer. only: text in the bodies that these faults are for, such as a model's
    name; "": all. times: for so many; 0: all. away_s: so long, from now on, it accepts nothing, and
    all connections are reset.
    """

    health_s: float = 0.0
    health_status: int = 200
    metrics_s: float = 0.0
    metrics_status: int = 200
    tokenize_s: float = 0.0
    tokenize_status: int = 200
    models_status: int = 200
    lists_models: bool = True
    max_model_len: int | None = None
    more_running: int = 0
    more_waiting: int = 0
    kv_usage: float | None = None
    how: How = "well"
    status: int = 200
    retry_after: str = ""
    body: str | None = None
    error_event: str = ""
    foreign: str = ""
    prefill_s: float | None = None
    token_s: float | None = None
    whole_s: float = 0.0
    only: str = ""
    times: int = 0
    away_s: float = 0.0


AWAY_LOOK_S = 0.05
WELL = Faults()
_BREAKS: tuple[How, ...] = ("reset within", "error within", "unfinished")


class HeardRequest(NamedTuple):
    """A request for an answer. at_s: monotonic."""

    at_s: float
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


class SickEngine:
    """See `sick_engine`.

    requests: how many came, by path. asked: the latest ones for answers. running, waiting: now.
    started, finished: since the beginning. aborted: that clients gave up. broken: streams that it
    left after their first token.
    """

    def __init__(
        self,
        *,
        models: Iterable[str] = ("m",),
        adapters: Iterable[str] = (),
        prefill_s: float = 0.0,
        token_s: float = 0.0,
        slots: int = 256,
        max_model_len: int = 32_768,
        kv_blocks: int = 10_000,
    ) -> None:
        self.url = ""
        self.requests: Counter[str] = Counter()
        self.asked: deque[HeardRequest] = deque(maxlen=1000)
        self.running = self.waiting = self.started = self.finished = self.aborted = 0
        self.broken = self._speaking = 0
        self._models, self._adapters = tuple(models), tuple(adapters)
        self._prefill_s, self._token_s = prefill_s, token_s
        self._slots = asyncio.Semaphore(slots)
        self._max_model_len = max_model_len
        self._faults = WELL
        self._times_left = 0
        self._changed = asyncio.Event()
        self._away: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._events: EventSocket | None = None
        self._cache = Cache(kv_blocks)
        self._blocks_in_use = 0
        self._counters: Counter[str] = Counter()
        self._started_s = time.time()

    @property
    def faults(self) -> Faults:
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        """Also of the requests that run."""
        if faults.how == "stall" != self._faults.how:
            self.broken += self._speaking
        self._faults, self._times_left = faults, faults.times
        self._changed.set()
        self._changed = asyncio.Event()
        if faults.away_s:
            self._away = asyncio.create_task(self._be_away(faults.away_s))

    @property
    def max_model_len(self) -> int:
        """Longer prompts are refused."""
        return self.faults.max_model_len or self._max_model_len

    @property
    def counts(self) -> dict[str, Any]:
        names = ("running", "waiting", "started", "finished", "aborted", "broken")
        return {name: getattr(self, name) for name in names} | {"requests": dict(self.requests)}

    @asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator[None]:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(self._routes())
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self._events = EventSocket("127.0.0.1")
        await self._runner.setup()
        async with asyncio.TaskGroup() as tasks:
            replaying = tasks.create_task(self._events.run())
            try:
                await self._listen(port)
                yield
            finally:
                if self._away is not None:
                    self._away.cancel()
                replaying.cancel()
                await asyncio.wait([replaying])
                self._events.close()
                await self._runner.cleanup()

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/faults", self._show),
            web.post("/faults", self._change),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            web.get("/version", self._version),
            web.get("/v1/models", self._list_models),
            web.get("/kv_event_sources", self._sources),
            web.post("/tokenize", self._tokenize),
            *(web.post(path, self._answer) for path in DIALECTS),
        ]

    async def _listen(self, port: int) -> None:
        assert self._runner is not None
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        [address] = self._runner.addresses
        self.url = f"http://127.0.0.1:{address[1]}"

    async def _be_away(self, seconds: float) -> None:
        assert self._runner is not None
        assert self._runner.server is not None
        for site in list(self._runner.sites):
            await site.stop()
        self.broken += self._speaking
        back_s = time.monotonic() + seconds
        while time.monotonic() < back_s:
            # Time and again: what was accepted before may be connected only now.
            for connection in self._runner.server.connections:
                if connection.transport is not None:
                    _reset(connection.transport)
            await asyncio.sleep(min(seconds, AWAY_LOOK_S))
        await self._listen(int(self.url.rpartition(":")[2]))

    # What tests, agents and routers ask.

    async def _show(self, _: web.Request) -> web.Response:
        return web.json_response({"faults": asdict(self.faults), **self.counts})

    async def _change(self, request: web.Request) -> web.Response:
        self.faults = Faults(**await request.json())
        return await self._show(request)

    async def _health(self, request: web.Request) -> web.Response:
        return await self._said(request, self.faults.health_s, self.faults.health_status, b"")

    async def _version(self, request: web.Request) -> web.Response:
        return await self._said(request, 0.0, 200, {"version": "0.33.0"})

    async def _list_models(self, request: web.Request) -> web.Response:
        cards = [
            {
                "id": name,
                "object": "model",
                "owned_by": "vllm",
                "parent": parent,
                "max_model_len": self.max_model_len,
            }
            for names, parent in ((self._models, None), (self._adapters, self._models[0]))
            for name in names
        ]
        listed = {"object": "list", "data": cards if self.faults.lists_models else []}
        return await self._said(request, 0.0, self.faults.models_status, listed)

    async def _sources(self, request: web.Request) -> web.Response:
        assert self._events is not None
        return await self._said(request, 0.0, 200, self._events.sources())

    async def _metrics(self, request: web.Request) -> web.Response:
        text = "".join(f"{line}\n" for line in self._exposed()).encode()
        return await self._said(request, self.faults.metrics_s, self.faults.metrics_status, text)

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = _tokens_of(await request.json())
        answer = {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}
        return await self._said(
            request, self.faults.tokenize_s, self.faults.tokenize_status, answer
        )

    async def _said(
        self, request: web.Request, late_s: float, status: int, content: object
    ) -> web.Response:
        self.requests[request.path] += 1
        await asyncio.sleep(late_s)
        if not status:
            _reset(request.transport)
        body = content if isinstance(content, bytes) else orjson.dumps(content)
        return web.Response(status=status or 200, body=body if status == 200 else b"")

    def _exposed(self) -> Iterator[str]:
        faults, labels = self.faults, f'engine="0",model_name="{self._models[0]}"'
        usage = faults.kv_usage
        if usage is None:
            usage = min(1.0, self._blocks_in_use / self._cache.num_blocks)
        config = {
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks": self._cache.num_blocks,
            "kv_cache_size_tokens": self._cache.num_blocks * BLOCK_SIZE,
            "enable_prefix_caching": True,
        }
        shown = ",".join(f'{name}="{value}"' for name, value in config.items())
        yield f"process_start_time_seconds {self._started_s}"
        yield f"vllm:cache_config_info{{{labels},{shown}}} 1.0"
        yield f'vllm:engine_sleep_state{{{labels},sleep_state="awake"}} 1.0'
        yield f"vllm:num_requests_running{{{labels}}} {self.running + faults.more_running}"
        yield f"vllm:num_requests_waiting{{{labels}}} {self.waiting + faults.more_waiting}"
        yield f"vllm:kv_cache_usage_perc{{{labels}}} {usage}"
        for name in _COUNTERS:
            yield f"vllm:{name}{{{labels}}} {self._counters[name]}"

    # What clients ask.

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests[request.path] += 1
        text = await request.text()
        body = orjson.loads(text)
        self.asked.append(HeardRequest(time.monotonic(), request.path, dict(request.headers), body))
        faults = self._faults_of(text)
        ids = _tokens_of(body)
        dialect = DIALECTS[request.path](body, len(ids), _num_tokens(body))
        if faults.foreign:
            status, headers, body = FOREIGN[faults.foreign]
            return web.Response(status=status, headers=headers, body=body)
        if faults.status != 200:
            return _refused(dialect, faults.status, faults)
        if len(ids) >= self.max_model_len:
            said = f"This model's maximum context length is {self.max_model_len} tokens."
            return _refused(dialect, 400, faults, said)
        if faults.how == "reset first":
            _reset(request.transport)
            await asyncio.sleep(HANG_S)
        try:
            with self._counted(), ExitStack() as said:
                if faults.how == "silent":
                    await self._while_sick("silent")
                if body.get("stream"):
                    return await self._stream(request, dialect, ids, faults, said)
                return await self._whole(request, dialect, ids, faults)
        except ConnectionResetError:  # it has gone, and aiohttp would log that as an error
            return web.Response()

    def _faults_of(self, text: str) -> Faults:
        """Those that a request with this body gets."""
        faults = self.faults
        if faults.only not in text or (faults.times and not self._times_left):
            return WELL
        self._times_left -= 1
        return faults

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.started += 1
        try:
            yield
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        self.finished += 1
        self._counters["request_success_total"] += 1

    async def _stream(
        self, request: web.Request, dialect: Chat, ids: list[int], faults: Faults, said: ExitStack
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        how = faults.how
        if how == "hang":
            await self._while_sick("hang")
        if how == "empty":
            return answer
        if how in ("error first", "error before tokens"):
            begin = b"" if how == "error first" else dialect.begin()
            await answer.write(begin + (faults.error_event.encode() or dialect.error()))
            return answer
        async for number in self._tokens(dialect, ids, faults):
            if number == 0:
                # As vLLM: its headers go out at once, and all else with the first token.
                await answer.write(dialect.begin())
                said.enter_context(self._counts_as_speaking())
            await answer.write(dialect.token(number))
            if number == dialect.num_tokens // 2 and how in _BREAKS:
                self.broken += 1
                if how == "reset within":
                    _reset(request.transport)
                    await asyncio.sleep(HANG_S)
                if how == "error within":
                    await answer.write(faults.error_event.encode() or dialect.error())
                return answer
        await answer.write(dialect.end())
        return answer

    @contextmanager
    def _counts_as_speaking(self) -> Iterator[None]:
        self._speaking += 1
        try:
            yield
        finally:
            self._speaking -= 1

    async def _whole(
        self, request: web.Request, dialect: Chat, ids: list[int], faults: Faults
    ) -> web.StreamResponse:
        how = faults.how
        if how in ("error first", "error before tokens"):
            return web.json_response(dialect.refusal(500))
        if how == "empty":
            return web.Response()
        async for _ in self._tokens(dialect, ids, faults):
            pass
        await asyncio.sleep(faults.whole_s)
        body = orjson.dumps(dialect.whole())
        if how in ("unfinished", "error within"):
            return web.Response(body=body[: len(body) // 2], content_type="application/json")
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        answer.content_length = len(body)
        await answer.prepare(request)
        if how == "hang":
            await self._while_sick("hang")
        await answer.write(body[: len(body) // 2])
        if how == "reset within":
            _reset(request.transport)
            await asyncio.sleep(HANG_S)
        await answer.write(body[len(body) // 2 :])
        return answer

    async def _tokens(self, dialect: Chat, ids: list[int], faults: Faults) -> AsyncIterator[int]:
        """The numbers of the answer's tokens, as they come."""
        prefill_s = self._prefill_s if faults.prefill_s is None else faults.prefill_s
        token_s = self._token_s if faults.token_s is None else faults.token_s
        count = self._counters
        async with self._slot(-(-(len(ids) + dialect.num_tokens) // BLOCK_SIZE)):
            dialect.cached_tokens = min(self._cache.overlap(ids), max(0, len(ids) - 1))
            await asyncio.sleep(prefill_s)
            await self._while_sick("stall")
            self._publish(self._cache.store(ids))
            count["prompt_tokens_total"] += len(ids)
            count["prompt_tokens_cached_total"] += dialect.cached_tokens
            count["time_to_first_token_seconds_count"] += 1
            count["request_prefill_time_seconds_count"] += 1
            count["request_prefill_time_seconds_sum"] += prefill_s  # type: ignore[assignment]
            count["request_prompt_tokens_sum"] += len(ids)
            count["request_prefill_kv_computed_tokens_sum"] += len(ids) - dialect.cached_tokens
            for number in range(dialect.num_tokens):
                if number:
                    await asyncio.sleep(token_s)
                    await self._while_sick("stall")
                    count["inter_token_latency_seconds_count"] += 1
                    count["inter_token_latency_seconds_sum"] += token_s  # type: ignore[assignment]
                count["generation_tokens_total"] += 1
                count["iteration_tokens_total_count"] += 1
                yield number

    @asynccontextmanager
    async def _slot(self, num_blocks: int) -> AsyncIterator[None]:
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        self._blocks_in_use += num_blocks
        try:
            yield
        finally:
            self._slots.release()
            self.running -= 1
            self._blocks_in_use -= num_blocks

    async def _while_sick(self, how: How) -> None:
        while self.faults.how == how:
            await self._changed.wait()

    def _publish(self, events: list[EngineEvent]) -> None:
        assert self._events is not None
        self._events.publish(events)


_COUNTERS = (
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "time_to_first_token_seconds_count",
    "generation_tokens_total",
    "request_success_total",
    "request_prefill_time_seconds_count",
    "request_prefill_time_seconds_sum",
    "request_prompt_tokens_sum",
    "request_prefill_kv_computed_tokens_sum",
    "inter_token_latency_seconds_count",
    "inter_token_latency_seconds_sum",
    "iteration_tokens_total_count",
)


class Cache:
    """The blocks of prompts, of which the oldest go first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def overlap(self, ids: list[int]) -> int:
        """Leading tokens that it has."""
        num_blocks = 0
        for block in _chain(ids):
            if block not in self._held:
                break
            num_blocks += 1
        return num_blocks * BLOCK_SIZE

    def store(self, ids: list[int]) -> list[EngineEvent]:
        """What an engine says of it."""
        chain = _chain(ids)
        begin = self.overlap(ids) // BLOCK_SIZE
        for block in chain:
            self._held[block] = None
            self._held.move_to_end(block)
        gone = [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self.num_blocks)]
        events: list[EngineEvent] = [BlockRemoved(gone)] if gone else []
        if chain[begin:]:
            tokens = ids[begin * BLOCK_SIZE : len(chain) * BLOCK_SIZE]
            parent = chain[begin - 1] if begin else None
            events.append(BlockStored(chain[begin:], parent, tokens, BLOCK_SIZE))
        return events


def _chain(ids: list[int]) -> list[int]:
    local = compute_local_hashes(ids, BLOCK_SIZE)
    return [int(block) for block in compute_sequence_hashes(local)]


def _tokens_of(body: Mapping[str, Any]) -> list[int]:
    """The ids of a body's prompt: those that it gives, else its text's bytes."""
    sent = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    prompt = sent or body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    said = [prompt, body.get("system"), body.get("input")]
    said += [one.get("content") for one in body.get("messages") or () if isinstance(one, dict)]
    texts = (one if isinstance(one, str) else orjson.dumps(one).decode() for one in said if one)
    return list("\n".join(texts).encode()) or [0]


def _num_tokens(body: Mapping[str, Any]) -> int:
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    return next((body[name] for name in names if body.get(name)), NUM_TOKENS)


def _refused(dialect: Chat, status: int, faults: Faults, said: str = FAULT) -> web.Response:
    headers = {"retry-after": faults.retry_after} if faults.retry_after else None
    text = faults.body
    if text is None:
        text = orjson.dumps(dialect.refusal(status)).decode().replace(FAULT, said)
    return web.Response(status=status, text=text, headers=headers, content_type="application/json")


def _reset(transport: asyncio.BaseTransport | None) -> None:
    assert isinstance(transport, asyncio.Transport)
    raw: socket.socket = transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()


@asynccontextmanager
async def sick_engine(port: int = 0, **options: Any) -> AsyncIterator[SickEngine]:
    """A well one, which listens on 127.0.0.1. port: 0 takes a free one. options: of SickEngine."""
    engine = SickEngine(**options)
    async with engine.serving(port):
        yield engine


@click.command()
@click.option("--port", default=0)
@click.option("--model", default="m")
@click.option("--prefill-s", default=0.2)
@click.option("--token-s", default=0.05)
@click.option("--slots", default=256)
@click.option("--max-model-len", default=32_768)
@click.option("--kv-blocks", default=10_000)
def main(port: int, model: str, **options: Any) -> None:
    """Run such an engine until it is ended."""

    async def run() -> None:
        async with sick_engine(port, models=[model], **options) as engine:
            click.echo(f"listening on {engine.url}", err=True)
            await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    main()
