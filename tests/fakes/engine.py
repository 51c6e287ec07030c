"""An engine that computes nothing: it caches, tells, answers and falls ill as one that does.

In this process, `async with fake_engine() as engine:` and `engine.faults = Faults(status=500)`. As
a process of its own, `python -m tests.fakes.engine --port 8000`, and POST the members of Faults
that are not their defaults to /faults: `{}` heals it, and GET /faults shows them and what it
counts.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from typing import Any, NamedTuple

import click
import orjson
from aiohttp import web

from app.core.hashing import compute_local_hashes, compute_sequence_hashes
from app.tokens import Unrenderable, chat_of_messages, chat_of_response, load
from tests.fakes import facts
from tests.fakes.dialects import DIALECTS
from tests.fakes.events import EventSockets
from tests.fakes.faults import BREAKS, HANG_S, RAW, WELL, Faults
from tests.fakes.said import TEXT, Refused, Said, said_to
from workers.bridge.events.events import AllBlocksCleared, BlockRemoved, BlockStored
from workers.engines.sim.text import WORDS

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that resets a connection on closing."""
BLOCK_SIZE = 16
MAX_BODY_BYTES = 64 * 2**20
AWAY_LOOK_S = 0.05
TURNS_TO_CONNECT = 5
"""Turns of the loop from a connection that is accepted to one that aiohttp knows, and closes. Where
a listener is closed in between, nobody closes the connection."""
RENDERED = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"),
)
"""Paths whose texts the tokenizer makes ids of."""
_TOKENS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
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


class HeardRequest(NamedTuple):
    """A request that was posted. at_s: monotonic."""

    at_s: float
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    text: str


class FakeEngine:
    """A fake engine, as `fake_engine` starts it.

    kind: vllm, sglang, or openai, of which only the API is known. publishes: KV events. reset:
    whether /reset_prefix_cache is there. words, natural: see `said_to`. text: what it says instead,
    as one token. refuses: members of requests. tokenizer: folder of one; "": a text's bytes are its
    ids.

    says: what a GET of a path answers: bytes, an object, a status, or what a call returns; with
    `says` given, that alone. choose: the faults that a request gets; None: `faults`. paths: answers
    to posts at paths that it would lack.

    requests: how many came, by path. heard: the latest that were posted. running, waiting: now.
    started, finished: since the beginning. aborted: that clients gave up. broken: streams that it
    left after their first token.
    """

    def __init__(
        self,
        *,
        kind="vllm",
        models=("m",),
        adapters=(),
        publishes=True,
        reset=False,
        prefill_s=0.0,
        token_s=0.0,
        slots=256,
        max_model_len=32_768,
        kv_blocks=10_000,
        words=(TEXT,),
        natural=0,
        text="",
        refuses=("logprobs",),
        tokenizer="",
        says=None,
    ):
        self.url = ""
        self.requests = Counter()
        self.heard = deque(maxlen=2000)
        self.running = self.waiting = self.started = self.finished = self.aborted = 0
        self.broken = self._speaking = 0
        self.text = text
        self.choose = None
        self.paths = {}
        self._models, self._adapters = tuple(models), tuple(adapters)
        self._prefill_s, self._token_s = prefill_s, token_s
        self._slots = asyncio.Semaphore(slots)
        self._max_model_len = max_model_len
        self._words, self._natural, self._refuses = words, natural, frozenset(refuses)
        self._has_reset, self._root = reset, tokenizer
        self._renderer = load(tokenizer) if tokenizer else None
        self._faults = WELL
        self._times_left = 0
        self._changed = asyncio.Event()
        self._away = None
        self._runner = self._listener = None
        self.events = EventSockets(wire="sglang" if kind == "sglang" else "vllm")
        self.cache = Cache(kv_blocks)
        self._blocks_in_use = 0
        self._counters = Counter()
        self.started_s = time.time()
        self.says = self._facts(kind, publishes) if says is None else says

    @property
    def faults(self):
        return self._faults

    @faults.setter
    def faults(self, faults):
        """Also of the requests that run."""
        if faults.how == "stall" != self._faults.how:
            self.broken += self._speaking
        self._faults, self._times_left = faults, faults.times
        self._changed.set()
        self._changed = asyncio.Event()
        if faults.away_s:
            self._away = asyncio.create_task(self._be_away(faults.away_s))

    @property
    def max_model_len(self):
        """Longer prompts are refused."""
        return self.faults.max_model_len or self._max_model_len

    @property
    def num_open(self):
        """Connections."""
        assert self._runner is not None
        assert self._runner.server is not None
        return len(self._runner.server.connections)

    @property
    def asked(self):
        """The latest requests for answers."""
        return [one for one in self.heard if one.path in DIALECTS]

    @property
    def bodies(self):
        return [one.body for one in self.asked]

    @property
    def counts(self):
        names = ("running", "waiting", "started", "finished", "aborted", "broken")
        return {name: getattr(self, name) for name in names} | {"requests": dict(self.requests)}

    @asynccontextmanager
    async def serving(self, port):
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/faults", self._show),
                web.post("/faults", self._change),
                web.get("/{path:.*}", self._get),
                web.post("/{path:.*}", self._post),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        async with self.events:
            try:
                await self._listen(port)
                yield
            finally:
                if self._away is not None:
                    self._away.cancel()
                await self._stop_listening()
                await self._runner.cleanup()

    async def _listen(self, port):
        assert self._runner is not None
        self._listener = socket.create_server(("127.0.0.1", port))
        await web.SockSite(self._runner, self._listener).start()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    async def _stop_listening(self):
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener = None
        for _ in range(TURNS_TO_CONNECT):
            await asyncio.sleep(0)
        for site in list(self._runner.sites):
            await site.stop()

    async def _be_away(self, seconds):
        assert self._runner is not None
        assert self._runner.server is not None
        await self._stop_listening()
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

    async def _show(self, _):
        return web.json_response({"faults": asdict(self.faults), **self.counts})

    async def _change(self, request):
        self.faults = Faults(**await request.json())
        return await self._show(request)

    def _facts(self, kind, publishes):
        told = {"/health": b"", "/v1/models": lambda: self._cards(kind)}
        if kind == "vllm":
            told["/version"] = {"version": VERSIONS[kind]}
            told["/kv_event_sources"] = self.events.told if publishes else {}
            told["/metrics"] = lambda: "".join(f"{line}\n" for line in self._exposed()).encode()
        if kind == "sglang":
            ports = {"endpoint_port_base": self.events.events_port, "topic": "", "dp_size": 1}
            ports |= {"replay_endpoint_port_base": self.events.replay_port}
            of_events = facts.SGLANG_INFO["kv_events"] | ports | {"block_size": BLOCK_SIZE}
            about = {"max_total_num_tokens": self.cache.num_blocks * BLOCK_SIZE, "dp_size": 1}
            about |= {"kv_events": of_events if publishes else None}
            told["/server_info"] = facts.sglang(**about)["/server_info"]
            told["/v1/loads"] = lambda: {"loads": [self._load()]}
        return told

    def _cards(self, kind):
        listed = facts.cards(kind, self._models, self._adapters, self.max_model_len, self._root)
        return listed if self.faults.lists_models else listed | {"data": []}

    @property
    def _kv_usage(self):
        usage = self.faults.kv_usage
        return min(1.0, self._blocks_in_use / self.cache.num_blocks) if usage is None else usage

    def _exposed(self):
        config = {
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks": self.cache.num_blocks,
            "kv_cache_size_tokens": self.cache.num_blocks * BLOCK_SIZE,
            "enable_prefix_caching": True,
        }
        gauges = {
            "num_requests_running": self.running + self.faults.more_running,
            "num_requests_waiting": self.waiting + self.faults.more_waiting,
            "kv_cache_usage_perc": self._kv_usage,
        }
        counters = {name: self._counters[name] for name in _COUNTERS}
        return facts.exposed(self._models[0], self.started_s, config, gauges, counters)

    def _load(self):
        return {
            "dp_rank": 0,
            "num_running_reqs": self.running + self.faults.more_running,
            "num_waiting_reqs": self.waiting + self.faults.more_waiting,
            "token_usage": self._kv_usage,
            "cache_hit_rate": 0.0,
        }

    async def _get(self, request):
        faults, path = self.faults, request.path
        late_s, status = {
            "/health": (faults.health_s, faults.health_status),
            "/metrics": (faults.metrics_s, faults.metrics_status),
            "/v1/models": (0.0, faults.models_status),
        }.get(path, (0.0, 200))
        what = self.says.get(path, 404)
        return await self._said(request, late_s, status, what() if callable(what) else what)

    async def _said(self, request, late_s, status, what):
        self.requests[request.path] += 1
        await asyncio.sleep(late_s)
        if not status:
            _reset(request.transport)
        if isinstance(what, int):
            return web.Response(status=what)
        body = what if isinstance(what, bytes) else orjson.dumps(what)
        kind = None if isinstance(what, bytes) else "application/json"
        return web.Response(
            status=status or 200, body=body if status == 200 else b"", content_type=kind
        )

    # What clients ask.

    async def _post(self, request):
        path = request.path
        text = await request.text()
        body = orjson.loads(text) if text else {}
        heard = HeardRequest(time.monotonic(), path, dict(request.headers), body, text)
        self.heard.append(heard)
        faults = self._faults_of(heard)
        if path == "/reset_prefix_cache" and self._has_reset:
            return await self._said(request, 0.0, 200, {"success": self._forget()})
        if path in self.paths:
            return await self._said(request, 0.0, 200, self.paths[path](heard))
        if path not in DIALECTS and path not in _TOKENS:
            return await self._said(request, 0.0, 404, 404)
        if faults.raw:
            self.requests[path] += 1
            return await self._raw(request, faults.raw)
        if path in _TOKENS:
            late_s, status = faults.tokenize_s, faults.tokenize_status
            return await self._said(request, late_s, status, await self._tokens_said(path, body))
        self.requests[path] += 1
        return await self._answer(request, heard, faults)

    async def _tokens_said(self, path, body):
        if path == "/detokenize":
            return {"prompt": bytes(one % 256 for one in body["tokens"]).decode(errors="replace")}
        [ids] = await self._prompts_of(path.removesuffix("/count_tokens"), body)
        if path != "/tokenize":
            return {"input_tokens": len(ids)}
        return {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}

    async def _prompts_of(self, path, body):
        """The ids of each prompt: those that a body gives, else its text's."""
        sent = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = sent or body.get("input_ids") or body.get("prompt")
        if isinstance(prompt, list) and prompt:
            if isinstance(prompt[0], int):
                return [prompt]
            return [await self._ids_of(path, {"prompt": one}) for one in prompt]
        return [await self._ids_of(path, body)]

    async def _ids_of(self, path, body):
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            if not all(isinstance(one, int) for one in prompt):
                raise web.HTTPBadRequest(text='{"error":{"message":"prompt: not ids"}}')
            return prompt
        if self._renderer is not None and path in RENDERED:
            with suppress(Unrenderable):  # media: it is opaque
                return await _rendered(self._renderer, path, body)
        said = [prompt, body.get("system"), body.get("input"), body.get("query")]
        said += [one.get("content") for one in body.get("messages") or ()]
        return list("\n".join(str(one) for one in said if one).encode()) or [0]

    async def _answer(self, request, heard, faults):
        body = heard.body
        dialect_of = DIALECTS[request.path]
        if faults.status != 200 or faults.body is not None:
            return _at_once(dialect_of.refusal(faults.status), faults.status, faults)
        prompts = await self._prompts_of(request.path, body)
        try:
            said = self._says(request.path, body, prompts)
        except Refused as refused:
            told = dialect_of.refusal(refused.status, refused.message, refused.field)
            return _at_once(told, refused.status)
        dialect = dialect_of(body, said, [len(ids) for ids in prompts])
        if faults.how == "reset first":
            _reset(request.transport)
            await asyncio.sleep(HANG_S)
        ids = [one for prompt in prompts for one in prompt]
        try:
            with self._counted(), ExitStack() as speaking:
                if faults.how == "silent":
                    await self._while_ill("silent")
                if body.get("stream"):
                    return await self._stream(request, dialect, ids, faults, speaking)
                return await self._whole(request, dialect, ids, faults)
        except ConnectionResetError:  # it has gone, and aiohttp would log that as an error
            return web.Response()

    def _says(self, path, body, prompts):
        """Raises Refused."""
        if path == "/v1/messages" and not body.get("max_tokens"):
            where = {"type": "missing", "loc": ("body", "max_tokens"), "msg": "Field required"}
            raise Refused(str([where]))
        for name in self._refuses:
            if body.get(name):
                raise Refused(f"{name} is not supported", name)
        if not isinstance(body.get("n") or 1, int):
            raise Refused("n is no number", "n")
        if any(len(ids) >= self.max_model_len for ids in prompts):
            raise Refused(f"This model's maximum context length is {self.max_model_len} tokens.")
        return Said([self.text]) if self.text else said_to(body, self._words, self._natural)

    def _faults_of(self, heard):
        if self.choose is not None:
            return self.choose(heard)
        faults = self.faults
        if faults.only not in heard.text or (faults.times and not self._times_left):
            return WELL
        self._times_left -= heard.path in DIALECTS
        return faults

    async def _raw(self, request, name):
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        answer = RAW[name]
        with suppress(ConnectionError):
            for part in (answer,) if isinstance(answer, bytes) else answer():
                if transport.is_closing():  # else asyncio logs a line for each further part
                    break
                transport.write(part)
                await request.protocol._drain_helper()
        transport.close()
        await asyncio.sleep(HANG_S)
        return web.Response()

    @contextmanager
    def _counted(self):
        self.started += 1
        try:
            yield
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        self.finished += 1
        self._counters["request_success_total"] += 1

    async def _stream(self, request, dialect, ids, faults, speaking):
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        how = faults.how
        if how == "hang":
            await self._while_ill("hang")
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
                speaking.enter_context(self._counts_as_speaking())
            await answer.write(dialect.token(number))
            if number == dialect.num_tokens // 2 and how in BREAKS:
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
    def _counts_as_speaking(self):
        self._speaking += 1
        try:
            yield
        finally:
            self._speaking -= 1

    async def _whole(self, request, dialect, ids, faults):
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
            await self._while_ill("hang")
        await answer.write(body[: len(body) // 2])
        if how == "reset within":
            _reset(request.transport)
            await asyncio.sleep(HANG_S)
        await answer.write(body[len(body) // 2 :])
        return answer

    async def _tokens(self, dialect, ids, faults):
        """The numbers of the answer's tokens, as they come."""
        prefill_s = self._prefill_s if faults.prefill_s is None else faults.prefill_s
        token_s = self._token_s if faults.token_s is None else faults.token_s
        count = self._counters
        async with self._slot(-(-(len(ids) + dialect.num_tokens) // BLOCK_SIZE)):
            dialect.cached_tokens = min(self.cache.overlap(ids), _most_cached(len(ids)))
            await asyncio.sleep(prefill_s)
            await self._while_ill("stall")
            self.events.publish(self.cache.store(ids))
            count["prompt_tokens_total"] += len(ids)
            count["prompt_tokens_cached_total"] += dialect.cached_tokens
            count["time_to_first_token_seconds_count"] += 1
            count["request_prefill_time_seconds_count"] += 1
            count["request_prefill_time_seconds_sum"] += prefill_s
            count["request_prompt_tokens_sum"] += len(ids)
            count["request_prefill_kv_computed_tokens_sum"] += len(ids) - dialect.cached_tokens
            for number in range(dialect.num_tokens):
                if number:
                    await asyncio.sleep(token_s)
                    await self._while_ill("stall")
                    count["inter_token_latency_seconds_count"] += 1
                    count["inter_token_latency_seconds_sum"] += token_s
                count["generation_tokens_total"] += 1
                count["iteration_tokens_total_count"] += 1
                yield number

    @asynccontextmanager
    async def _slot(self, num_blocks):
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

    async def _while_ill(self, how):
        while self.faults.how == how:
            await self._changed.wait()

    def _forget(self):
        """Drop all blocks, unless requests hold some."""
        if not self.running:
            self._drop_blocks()
        return not self.running

    def _drop_blocks(self):
        self.cache = Cache(self.cache.num_blocks)
        self.events.publish([AllBlocksCleared()])


class Cache:
    """The blocks of prompts, of which those go first that were used longest ago, and of a prompt
    the last ones."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self._held = OrderedDict()

    def overlap(self, ids):
        """Leading tokens that it has."""
        num_blocks = 0
        for block in chain_of(ids):
            if block not in self._held:
                break
            num_blocks += 1
        return num_blocks * BLOCK_SIZE

    def store(self, ids):
        chain = chain_of(ids)
        begin = self.overlap(ids) // BLOCK_SIZE
        for block in reversed(chain):
            self._held[block] = None
            self._held.move_to_end(block)
        gone = [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self.num_blocks)]
        events = []
        if chain[begin:]:
            tokens = ids[begin * BLOCK_SIZE : len(chain) * BLOCK_SIZE]
            parent = chain[begin - 1] if begin else None
            events.append(BlockStored(chain[begin:], parent, tokens, BLOCK_SIZE))
        return [*events, BlockRemoved(gone)] if gone else events


def chain_of(ids):
    local = compute_local_hashes(ids, BLOCK_SIZE)
    return [int(block) for block in compute_sequence_hashes(local)]


def _most_cached(num_tokens):
    """Tokens of a prompt, in whole blocks: the last one is always computed."""
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


async def _rendered(renderer, path, body):
    """Raises Unrenderable."""
    if body.get("prompt") is not None:
        return (await renderer.of_text(body["prompt"])).tolist()
    fields = dict(body)
    if fields.get("tool_choice") != "none":
        fields.pop("tool_choice", None)
    if path == "/v1/responses":
        return (await renderer.of_response(chat_of_response(fields))).tolist()
    chat = chat_of_messages(fields, renderer.habits) if path == "/v1/messages" else fields
    return (await renderer.of_chat(chat)).tolist()


def _at_once(said, status, faults=WELL):
    headers = dict(faults.headers)
    headers.setdefault("content-type", "application/json")
    body = orjson.dumps(said) if faults.body is None else faults.body
    return web.Response(
        status=status, body=body.encode() if isinstance(body, str) else body, headers=headers
    )


def _reset(transport):
    assert isinstance(transport, asyncio.Transport)
    raw = transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()


@asynccontextmanager
async def fake_engine(port=0, **options):
    """A well one, which listens on 127.0.0.1. port: 0 takes a free one. options: of FakeEngine."""
    engine = FakeEngine(**options)
    async with engine.serving(port):
        yield engine


@click.command()
@click.option("--port", default=0)
@click.option("--kind", default="vllm")
@click.option("--model", default="m", help="Several names of it have commas between them.")
@click.option("--publishes", default=True)
@click.option("--reset", default=True)
@click.option("--prefill-s", default=0.2)
@click.option("--token-s", default=0.05)
@click.option("--slots", default=256)
@click.option("--max-model-len", default=32_768)
@click.option("--kv-blocks", default=10_000)
@click.option("--natural", default=0, help="It then says words, and so many.")
@click.option("--tokenizer", default="")
def main(port, model, **options):
    """Run such an engine until it is ended."""

    async def run():
        chosen = options | {"models": model.split(",")}
        chosen["words"] = [f"{word} " for word in WORDS] if options["natural"] else (TEXT,)
        async with fake_engine(port, **chosen) as engine:
            click.echo(f"listening on {engine.url}", err=True)
            await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    main()
