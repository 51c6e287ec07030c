"""The front door's HTTP: raw ASGI, as each call here is in the path of every request."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from app.core.config import RouterSettings
from app.core.errors import KvrouteError
from app.core.settings import parse_names
from app.core.types import checked_request_id, checked_sent_ms
from app.door import asked
from app.door.asked import PATHS, Api
from app.door.body import JsonBody
from app.door.door import Door, Headers, Patience
from app.door.errors import Unauthorized
from app.door.forwarding import Outgoing, headers_for_engine
from app.door.lifecycle import Admitted, Lifecycle
from app.door.migration import can_migrate
from app.door.models import Model, Models
from app.door.outcomes import Outcomes
from app.door.prompts import PromptIds, Prompts
from app.door.tracing import Trace, Tracing
from app.door.upstream import Upstream
from app.edge import answers
from app.edge.keys import Keys
from app.http.body import read_body, resumed
from app.http.protocol import CUT, ON_GONE
from app.router.prompt import Prompt, check_length
from app.router.routers import Routers

log = logging.getLogger(__name__)

OPEN = ("/health", "/readiness")
"""Paths that need no key."""
PASSED_ON = ("/tokenize", "/detokenize")
"""Paths of which any worker of a model may answer requests, without being reserved."""
COUNT_TOKENS = "/v1/messages/count_tokens"
MODELS = "/v1/models"
REFUSAL_S = 10.0
_JSON = (b"content-type", b"application/json")


class ClientStalled(KvrouteError):
    """The client has taken nothing of its answer for too long."""


class ClientGone(KvrouteError):
    """The client hung up."""


class HttpDoor:
    """One replica's front door, while `run` runs."""

    def __init__(
        self, settings: RouterSettings, routers: Routers, keys: Keys, tracing: Tracing
    ) -> None:
        self.models = Models(routers, settings.redis_timeout_ms / 1000)
        self._settings = settings
        self._keys = keys
        self._tracing = tracing
        self._outcomes = Outcomes(routers.own.telemetry.registry, log=settings.access_log)
        self._begun_s = int(time.time())

    async def run(self) -> None:
        """Run until cancelled."""
        settings = self._settings
        upstream = Upstream()
        try:
            self._upstream = upstream
            self.prompts = Prompts(upstream, parse_names(settings.tokenizers), settings.worker_key)
            self._door = Door(upstream, Patience(settings.answer_timeout_s, settings.gap_timeout_s))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.models.run())
                tasks.create_task(self._door.run())
        finally:
            await upstream.close()
            await asyncio.to_thread(self._tracing.close)

    def remarks(self) -> list[str]:
        """What is not as it should be, although requests are answered: `<what>: <why>` each."""
        not_tokenized = self.prompts.state() if hasattr(self, "prompts") else {}
        said = [f"tokenizer of {model}: {why}" for model, why in not_tokenized.items()]
        return said + self._outcomes.alarm.remarks()

    def key_name(self, scope: Scope) -> str:
        """The name of the key that a request carries. Raises Unauthorized."""
        if not self._keys or scope["path"] in OPEN:
            return ""
        headers = dict(scope["headers"])
        given = headers.get(b"authorization")
        if given is None and b"x-api-key" in headers:
            given = b"Bearer " + headers[b"x-api-key"]  # as Anthropic's clients send it
        name = self._keys.name_of(given)
        if name is None:
            raise Unauthorized("No valid API key was given: Authorization: Bearer KEY.")
        return name

    def takes(self, scope: Scope) -> bool:
        """Whether a request is one for the front door."""
        path: str = scope["path"]
        if scope["method"] == "POST":
            return path in PATHS or path in PASSED_ON or path == COUNT_TOKENS
        return scope["method"] == "GET" and (path == MODELS or path.startswith(f"{MODELS}/"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        api = Api.MESSAGES if path == COUNT_TOKENS else PATHS.get(path, Api.CHAT)
        client = _Client(scope, send, self._settings.stalled_s)
        work: Coroutine[Any, Any, None]
        if scope["method"] == "GET":
            work = self._list(path, client)
        elif path in PASSED_ON:
            work = self._pass_on(scope, receive, client)
        elif path == COUNT_TOKENS:
            work = self._count_tokens(scope, receive, client)
        else:
            work = self._answer(api, scope, receive, client)
        try:
            await work
        except ClientDisconnect:
            return
        except Exception as error:
            if not isinstance(error, KvrouteError):
                log.error("%s failed", path, exc_info=error)
            await client.fail(error, api)

    async def _answer(self, api: Api, scope: Scope, receive: Receive, client: _Client) -> None:
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        client.about = [(b"x-request-id", request_id.encode())]
        body = await self._read(scope, receive)
        wanted = asked.read(api, body.fields, headers)
        model = self.models.find(wanted.model)
        trace = self._tracing.begin(api, headers)
        async with _watched(scope) as watch:
            life: Lifecycle | None = None
            try:
                with trace.span("tokens"):
                    ids = await self.prompts.of(api, model, body.fields)
                life = self._admit(scope, headers, request_id, model, wanted, ids, trace)
                await self._door.carry(
                    life,
                    Outgoing(
                        body,
                        wanted,
                        ids,
                        self._settings.migrate
                        and can_migrate(wanted, body.fields, ids, model.workers),
                    ),
                    scope["path"],
                    headers_for_engine(scope["headers"], request_id, self._settings.worker_key),
                    self._settings.policy,
                    _Shown(client, life, self._settings.show_decision),
                )
            except asyncio.CancelledError as error:
                if life is None:
                    trace.fail(error)
                else:
                    life.end("client_gone", ended_by="client")
                if not watch.is_gone:
                    raise
            except ClientStalled:
                assert life is not None
                life.end("client_stalled", ended_by="router")
                raise
            except KvrouteError as error:
                if life is None:
                    trace.fail(error)
                else:
                    life.record.status = answers.status_of(error)
                    life.end(answers.code_of(error), ended_by="router")
                raise
            except Exception as error:
                if life is None:
                    trace.fail(error)
                else:
                    life.end("internal", ended_by="router")
                raise

    def _admit(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        request_id: str,
        model: Model,
        wanted: asked.Asked,
        ids: PromptIds,
        trace: Trace,
    ) -> Lifecycle:
        settings = self._settings
        sent = headers.get(b"x-request-start", b"").decode("latin-1")
        prompt = None
        if ids.ids is not None:
            check_length("messages", ids.num_tokens, settings.max_prompt_tokens)
            prompt = Prompt(
                ids.num_tokens,
                tokens=ids.ids,
                lora_name=model.lora_name,
                # One of its own is cached nowhere.
                cache_namespace=wanted.cache_salt or None if wanted.reads_cache else request_id,
            )
        return Lifecycle(
            Admitted(
                request_id=request_id,
                model=model,
                prompt=prompt,
                num_tokens=ids.num_tokens,
                tokens_from=ids.tokens_from,
                session=wanted.session if settings.session_affinity else "",
                tenant=wanted.tenant if settings.wait_queue else "",
                priority=wanted.priority,
                balancer_id=headers.get(b"x-balancer-id", b"").decode("latin-1"),
                began_ms=checked_sent_ms(sent) or model.router.fleet.redis_now_ms,
                key_name=scope.get("kvroute.key", ""),
            ),
            self._outcomes.ended,
            trace,
        )

    async def _pass_on(self, scope: Scope, receive: Receive, client: _Client) -> None:
        """Have any worker of the model answer."""
        body = await self._read(scope, receive)
        model = self.models.find(body.fields.get("model"))
        async with _watched(scope):
            await self._ask_any(model, body, scope, client)

    async def _ask_any(self, model: Model, body: JsonBody, scope: Scope, client: _Client) -> None:
        request_id = _request_id(dict(scope["headers"]))
        headers = headers_for_engine(scope["headers"], request_id, self._settings.worker_key)
        await self._door.pass_on(model, body.raw, scope["path"], headers, client)

    async def _count_tokens(self, scope: Scope, receive: Receive, client: _Client) -> None:
        """Of what would be a prompt of the Messages API; a worker counts what is not known here."""
        body = await self._read(scope, receive)
        wanted = asked.read(Api.MESSAGES, body.fields, dict(scope["headers"]))
        model = self.models.find(wanted.model)
        async with _watched(scope):
            ids = await self.prompts.of(Api.MESSAGES, model, body.fields)
            if ids.ids is None:
                await self._ask_any(model, body, scope, client)
            else:
                await client.answer({"input_tokens": ids.num_tokens})

    async def _read(self, scope: Scope, receive: Receive) -> JsonBody:
        request = Request(scope, receive)
        return JsonBody.parse(await read_body(request, self._settings.max_request_bytes))

    async def _list(self, path: str, client: _Client) -> None:
        if path == MODELS:
            await client.answer(
                {"object": "list", "data": [self._card(model) for model in self.models]}
            )
        else:
            await client.answer(self._card(self.models.find(path[len(MODELS) + 1 :])))

    def _card(self, model: Model) -> dict[str, object]:
        base = model.root.models[0] if model.root.models else model.name
        return {
            "id": model.name,
            "object": "model",
            "created": self._begun_s,
            "owned_by": "kvroute",
            "root": base,
            "parent": base if model.lora_name else None,
            "max_model_len": model.max_tokens or None,
        }


async def refuse(scope: Scope, send: Send, error: Exception) -> None:
    """Answer a request that is not even looked at."""
    await _Client(scope, send, REFUSAL_S).fail(error, Api.CHAT)


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id")
    if not given:
        return f"req-{uuid.uuid4().hex}"
    return checked_request_id(given.decode("latin-1"))


class _Client:
    """The client of one request. about: headers of every answer."""

    def __init__(self, scope: Scope, send: Send, stalled_s: float) -> None:
        self.about: Headers = ()
        self._cut = scope.get(CUT)
        self._send = send
        self._stalled_s = stalled_s
        self._has_begun = self._has_ended = False

    async def start(self, status: int, headers: Headers) -> None:
        self._has_begun = True
        await self._say(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self.about],
            }
        )

    async def send(self, piece: bytes, *, last: bool = False) -> None:
        self._has_ended = last
        await self._say({"type": "http.response.body", "body": piece, "more_body": not last})

    async def answer(self, content: object) -> None:
        text = orjson.dumps(content)
        await self.start(200, [_JSON, (b"content-length", b"%d" % len(text))])
        await self.send(text, last=True)

    async def _say(self, message: Any) -> None:
        sending = self._send(message).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return
        # Only a client that is behind is waited for, and a deadline for each part would cost.
        try:
            async with asyncio.timeout(self._stalled_s):
                await resumed(sending, waits_for)
        except TimeoutError:
            raise ClientStalled(f"took nothing for {self._stalled_s:g} s") from None

    async def fail(self, error: Exception, api: Api) -> None:
        """Answer with an error; in the midst of an answer, end that with one."""
        if isinstance(error, ClientStalled) and self._cut is not None:
            self._cut()
            return
        if self._has_ended or isinstance(error, ClientStalled):
            raise error
        if self._has_begun:
            await self.send(answers.event_of(error, api), last=True)
            return
        text = answers.body_of(error, api)
        headers = [_JSON, (b"content-length", b"%d" % len(text)), *answers.headers_of(error)]
        await self.start(answers.status_of(error), headers)
        await self.send(text, last=True)


class _Shown:
    """A client that is told where its answer comes from, or why its tokens were not known."""

    def __init__(self, client: _Client, life: Lifecycle, show_decision: bool) -> None:
        self._client = client
        self._life = life
        self._show_decision = show_decision
        self.send = client.send

    async def start(self, status: int, headers: Headers) -> None:
        record = self._life.record
        shown = list(headers)
        if record.admitted.tokens_from.startswith("blind:"):
            shown.append((b"x-kvroute-tokens", record.admitted.tokens_from.encode()))
        if self._show_decision and record.decision is not None:
            decision = record.decision
            overlap = f"{decision.overlap.total}/{decision.isl_blocks}"
            shown.append((b"x-kvroute-worker", str(decision.worker.key).encode()))
            shown.append((b"x-kvroute-overlap", overlap.encode()))
        await self._client.start(status, shown)


class _watched:  # noqa: N801 - used like asyncio.timeout
    """Cancels what is done for a client as soon as that hangs up. Its body has been read.

    is_gone: whether it did.
    """

    def __init__(self, scope: Scope) -> None:
        self.is_gone = False
        self._watch = scope[ON_GONE]

    async def __aenter__(self) -> _watched:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch(self._cancel)
        return self

    def _cancel(self) -> None:
        self.is_gone = True
        self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._watch(None)
        if self.is_gone:
            self._task.uncancel()
        return self.is_gone and kind is not None and issubclass(kind, asyncio.CancelledError)
