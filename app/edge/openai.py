"""The paths of OpenAI's and Anthropic's clients, which engines answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from app.core.errors import (
    AllWorkersBusy,
    NamespaceMissing,
    NoWorkers,
    PromptTooLarge,
    WrongVersion,
)
from app.core.key_rules import Spending
from app.core.types import REQUEST_ID, random_hex
from app.core.worker_report import WorkerInfo
from app.door import asked, members
from app.door.asked import PATHS, PROMPTS, Api
from app.door.carriage import Carriage
from app.door.client import Headers
from app.door.errors import (
    AnswerTimeout,
    ContextTooLong,
    ModelUnavailable,
    RepeatedFailure,
    UnknownModel,
    WorkerFailed,
)
from app.door.forwarding import Outgoing, headers_for_engine
from app.door.lifecycle import Lifecycle
from app.door.migration import can_migrate
from app.door.models import Model
from app.door.record import Stage
from app.door.tracing import Trace
from app.door.transfer.sources import may_have_source
from app.edge.ask import fitting_id, request_id_in, request_of, salt_of
from app.edge.client import Client
from app.edge.errors import dialect_of, ending_of, reason_of
from app.edge.rate_limits import limits_shown
from app.http.json_body import FORM, Fields, FormBody, JsonBody
from app.policy.decision import RouteRequest
from app.router.prompt import check_length

log = logging.getLogger(__name__)

CARRIER = "kvroute.carrier"
"""In a request's scope: what carries it in place of Carriage, and is made as that is."""
MAX_ID = 128


async def answer(client: Client) -> None:
    """Have the worker answer that holds most of the prompt for its load; its answer is passed on
    as it comes."""
    headers, replica, path = client.raw_headers, client.replica, client.scope["path"]
    rules = client.rules
    spending = Spending(rules) if rules is not None and rules.is_limited else None
    api, door, settings = PATHS[path], replica.door, replica.settings
    record = client.record
    record.spending = spending
    if spending is not None:
        replica.router.limiter.check(spending)
    record.request_id = request_id = request_id_in(headers)
    client.about = [(b"x-request-id", request_id.encode())]
    body = await _read(client)
    record.enter(Stage.TOKENS)
    record.asked = generation = asked.read(api, body.fields)
    if replica.keys.isolates:
        body = _salted(client, body, generation)
    again = partial(
        request_of,
        headers,
        settings.policy,
        key_name=client.key_name,
        rules=rules,
        spending=spending,
        holder=client.holder,
        request_id=request_id,
        session=_session(generation.session),
        path=path,
        carried=True,
    )
    asks = again()
    record.model = model = await _model_for(client, generation, body.fields, asks)
    if rules is not None:
        _allow(client, generation.model, model)
    trace = door.tracing.begin(api, headers)
    exchange = _Exchange(client, body, generation, asks, again, trace)
    async with client.watched():
        try:
            await exchange.run(model)
        except BaseException as error:
            exchange.fail(error)
            raise


@dataclass(slots=True)
class _Exchange:
    """One request, and its answer by a worker of any namespace that serves the model.

    asks: who asks; again: the same, as nobody has changed it. life: as far as it has come; None: it
    was not let in yet.
    """

    client: Client
    body: JsonBody
    generation: asked.AnswerRequest
    asks: RouteRequest
    again: Callable[[], RouteRequest]
    trace: Trace
    life: Lifecycle | None = None

    async def run(self, model: Model) -> None:
        """Have a worker of that model answer, or else one of another namespace."""
        client, models = self.client, self.client.replica.door.models
        gave_up = set[str]()
        while True:
            shown = _Shown(client)
            try:
                await self._ask(model, shown)
                return
            except Exception as error:
                gave_up.add(model.namespace)
                if shown.has_begun or not _may_go_on(client, model, error, gave_up):
                    raise
            self.asks = self.again()
            model = await models.find_for(self.generation.model, self.asks.session, gave_up)

    async def _ask(self, model: Model, shown: _Shown) -> None:
        """Raises as Carriage.run, and what tells that the request cannot be answered there."""
        client, generation, fields = self.client, self.generation, self.body.fields
        door, settings = client.replica.door, client.replica.settings
        record = client.record
        record.model = model
        record.request = asks = self.asks
        asks.model, asks.keeps_session = model.name, door.models.is_shared(model)
        if asks.began_ms is None:
            asks.began_ms = model.router.fleet.redis_now_ms
        with self.trace.span("tokens"):
            ids = await door.prompts.of(generation.api, model, fields, client.holder)
        asks.local_only = not may_have_source(generation, fields, ids)
        shown.life = self.life = door.admit(record, ids, self.trace)
        migrates = settings.migrate and can_migrate(generation, fields, ids, model.workers)
        if generation.streams:
            client.waits()
        carriage = client.scope.get(CARRIER, Carriage)(
            door.door,
            self.life,
            Outgoing(self.body, generation, ids, model.name, migrates),
            client.scope["path"],
            _headers_on(client, _engine_id(client.raw_headers, record.request_id)),
            shown,
        )
        await carriage.run()

    def fail(self, error: BaseException) -> None:
        """Note that it has ended by an error."""
        if self.life is None:
            self.trace.fail(error)
            return
        told = ending_of(self.client.ended_by or error)
        record = self.life.record
        record.status = record.status or told.status
        self.life.end(told.outcome, ended_by=told.ended_by)


_OF_A_NAMESPACE = (
    *(NoWorkers, AllWorkersBusy, PromptTooLarge, ContextTooLong, NamespaceMissing, WrongVersion),
    WorkerFailed,
)
"""Errors that mean: these workers cannot answer. Those of another namespace may."""
_OF_THE_REQUEST = (AnswerTimeout, RepeatedFailure)
"""Of these, those after which nobody else is asked."""


def _may_go_on(client: Client, model: Model, error: Exception, gave_up: set[str]) -> bool:
    """Whether another namespace that serves the same name is to answer instead."""
    if not isinstance(error, _OF_A_NAMESPACE) or isinstance(error, _OF_THE_REQUEST):
        return False
    if not client.replica.door.models.has_other(model, gave_up):
        return False
    log.info(
        "namespace %s does not answer, another one is asked: %s; request %s",
        *(model.namespace, reason_of(error), client.record.request_id),
    )
    return True


async def pass_on(client: Client) -> None:
    """Have any worker of the model answer. None is woken for that."""
    body = await _read(client)
    model = _found(client, body.fields.get("model"))
    async with client.watched():
        await _ask_any(client, model, body)


async def count_tokens(client: Client) -> None:
    """Count the tokens of what would be a prompt of the Messages API; a worker counts what is not
    known here."""
    door = client.replica.door
    body = await _read(client)
    client.record.asked = generation = asked.read(Api.MESSAGES, body.fields)
    client.record.model = model = _found(client, generation.model)
    async with client.watched():
        ids = await door.prompts.of(Api.MESSAGES, model, body.fields, client.holder)
        if ids.ids is None:
            await _ask_any(client, model, body)
        else:
            count = ids.num_tokens
            about = {"original_input_tokens": count}  # nothing of it is cleared
            await client.answer({"input_tokens": count, "context_management": about})


def _salted(client: Client, body: JsonBody, generation: asked.AnswerRequest) -> JsonBody:
    """The body, for a tenant that shares no cache with others: with its own salt in it."""
    generation.cache_salt, given = salt_of(client, generation.cache_salt), generation.cache_salt
    if generation.cache_salt == given:
        return body
    return JsonBody.parse(body.changed({"cache_salt": generation.cache_salt}))


def _allow(client: Client, name: object, model: Model | None = None) -> None:
    """Raises UnknownModel for a model that the key may not ask for, as if there were none. model:
    that is meant by a request which names none."""
    rules = client.rules
    name = name if isinstance(name, str) or model is None else model.name
    if rules is not None and isinstance(name, str) and not rules.may_ask(name):
        raise UnknownModel(name)


def _found(client: Client, asked_for: object) -> Model:
    _allow(client, asked_for)
    model = client.replica.door.models.find(asked_for)
    _allow(client, asked_for, model)
    return model


async def _model_for(
    client: Client, generation: asked.AnswerRequest, fields: Fields, asks: RouteRequest
) -> Model:
    """As Models.find_for; a request for a model that sleeps waits until that wakes, if it is one
    that would be answered then."""
    models, settings = client.replica.door.models, client.replica.settings
    if client.rules is not None:
        _allow(client, generation.model)
    try:
        return await models.find_for(generation.model, asks.session)
    except ModelUnavailable as error:
        api = generation.api
        asked.check_answerable(api, fields)
        if isinstance(ids := fields.get(PROMPTS[api]), np.ndarray):
            check_length(PROMPTS[api], len(ids), settings.max_prompt_tokens)
        async with client.watched():
            await models.wake(error, asks)
    return await models.find_for(generation.model, asks.session)


async def _read(client: Client) -> JsonBody:
    """The body, once models are known."""
    await client.replica.door.models.until_known()
    most = client.replica.settings.max_request_bytes
    raw = await client.read(most, "--max-request-bytes")
    kind = _form_of(client)
    body = FormBody.of_form(raw, kind) if kind else await JsonBody.read(raw)
    members.check(body)
    return body


def _form_of(client: Client) -> bytes:
    """Returns the content type of a form, where one may be; b"" for JSON."""
    kind = client.raw_headers.get(b"content-type", b"")
    is_form = client.scope["path"].startswith(asked.AUDIO) and kind.lower().startswith(FORM)
    return kind if is_form else b""


def _session(named: object) -> str | None:
    """What a body names as its session; None: nothing that could be one."""
    return fitting_id(named, REQUEST_ID, "session_id") or None if isinstance(named, str) else None


def _engine_id(headers: Mapping[bytes, bytes], request_id: str) -> str:
    """What engines know a request by. Clients may give several the same id, as when they try one
    again, and an engine would take them for one."""
    if b"x-request-id" not in headers:
        return request_id
    return f"{request_id[: MAX_ID - 9]}-{random_hex(4)}"


def _headers_on(
    client: Client, request_id: str, kind: bytes = b"application/json"
) -> list[tuple[bytes, bytes]]:
    worker_key = client.replica.settings.worker_key
    return headers_for_engine(client.scope["headers"], request_id, worker_key, kind)


async def _ask_any(client: Client, model: Model, body: JsonBody) -> None:
    record, rules = client.record, client.rules
    record.request_id = request_id = request_id_in(client.raw_headers)
    if rules is not None and rules.is_limited:
        record.spending = Spending(rules)
        await client.replica.router.let_in(record.spending)
    kind = _form_of(client) or b"application/json"
    headers = _headers_on(client, _engine_id(client.raw_headers, request_id), kind)
    door, path = client.replica.door, client.scope["path"]
    gave_up = set[str]()
    while True:
        record.model = model
        try:
            await door.door.any_worker.answer(
                *(model, body, path, headers, client, record, client.holder)
            )
            return
        except WorkerFailed as error:
            gave_up.add(model.namespace)
            if client.status or not _may_go_on(client, model, error, gave_up):
                raise
        model = door.models.find(body.fields.get("model"), gave_up)


class _Shown:
    """A client that is told where its answer comes from, or why its tokens were not known."""

    life: Lifecycle
    """Only once the request is let in."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.has_begun = False
        """Whether anything of an answer has gone out."""
        self.send = client.send

    async def start(self, status: int, headers: Headers) -> None:
        self.has_begun = True
        await self._client.start(status, [*headers, *self._shown()])

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self._client.whole(status, [*headers, *self._shown()], body)

    async def refuse(self, status: int, headers: Headers, body: bytes, by: WorkerInfo) -> None:
        self.has_begun = True
        await self._client.refuse(status, [*headers, *self._shown()], body, by)

    def _shown(self) -> Headers:
        record = self.life.record
        shown = []
        tokens_from = self.life.admitted.tokens_from
        if tokens_from.startswith("blind:"):
            shown.append((b"x-kvroute-tokens", tokens_from.encode()))
        if record.spending is not None:
            shown += limits_shown(
                record.spending.rules, record.spending.left, dialect_of(self._client.scope["path"])
            )
        replica = self._client.replica
        hides = replica.keys.isolates and self._client.is_of_client
        if replica.settings.show_decision and not hides and record.decision is not None:
            decision = record.decision
            overlap = f"{decision.overlap.total}/{decision.isl_blocks}"
            if decision.bound_blocks:
                overlap += f"; bound={decision.bound_blocks}"
            shown.append((b"x-kvroute-worker", str(decision.worker.key).encode()))
            shown.append((b"x-kvroute-overlap", overlap.encode()))
            shown.append((b"x-kvroute-trust", decision.trust.encode()))
            if decision.source is not None:
                shown.append((b"x-kvroute-source", str(decision.source.worker.key).encode()))
        return shown
