"""The paths of OpenAI's and Anthropic's clients, which engines answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
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
from app.door import answer_request, forwarding
from app.door.answer.migration import can_migrate
from app.door.answer_request import PATHS, PROMPTS, Api
from app.door.carriage import Carriage
from app.door.errors import (
    AnswerTimeout,
    ContextTooLong,
    ModelUnavailable,
    RepeatedFailure,
    UnknownModel,
    WorkerFailed,
)
from app.door.forwarding import Outgoing, headers_for_engine
from app.door.lifecycle import UNTRACED, Lifecycle
from app.door.model import Model
from app.door.record import Stage
from app.door.told.tracing import CONTEXT
from app.door.transfer.sources import may_have_source
from app.edge.ask import fitting_id, request_id_in, request_of, salt_of
from app.edge.client import Client
from app.edge.errors import ending_of, reason_of
from app.http.json_body import FORM, Fields, FormBody, JsonBody
from app.policy.decision import RouteRequest
from app.router.prompt import check_length

log = logging.getLogger(__name__)

CARRIER = "kvroute.carrier"
"""Key of a request's scope: the class that carries it in place of Carriage, and is made alike."""
MAX_ID = 128


async def answer(client: Client) -> None:
    """Have the worker answer that holds most of the prompt for its load; its answer is passed on
    as it comes."""
    headers, replica, path = client.raw_headers, client.replica, client.scope["path"]
    life, rules = client.record, client.rules
    if rules is not None and rules.is_limited:
        life.spending = Spending(rules)
        replica.router.limiter.check(life.spending)
    life.request_id = request_id = request_id_in(headers)
    client.about = [(b"x-request-id", request_id.encode())]
    body = await _read(client)
    life.enter(Stage.TOKENS)
    life.asked = generation = answer_request.read(PATHS[path], body.fields)
    if replica.keys.isolates:
        body = _salted(client, body, generation)
    again = partial(
        request_of,
        headers,
        replica.settings.policy,
        key_name=client.key_name,
        rules=rules,
        spending=life.spending,
        holder=client.holder,
        request_id=request_id,
        session=_session(generation.session),
        path=path,
        carried=True,
    )
    life.request = again()
    life.model = await _model_for(client, generation, body.fields, life.request)
    if rules is not None:
        _allow(client, generation.model, life.model)
    life.trace = replica.door.tracing.begin(generation.api, headers)
    async with client.watched():
        try:
            await _answer_by_any(client, life, body, again)
        except BaseException as error:
            _note_error(client, life, error)
            raise


async def _answer_by_any(
    client: Client, life: Lifecycle, body: JsonBody, again: Callable[[], RouteRequest]
) -> None:
    """Has a worker of the request's model answer, or else one of another namespace that serves the
    name. again: makes the request as nobody has changed it."""
    models, asked_for = client.replica.door.models, life.asked.model if life.asked else None
    gave_up = set[str]()
    while True:
        model = life.model
        assert model is not None
        try:
            await _answer_by(client, life, model, body)
            return
        except Exception as error:
            gave_up.add(model.namespace)
            if client.has_begun or not _may_go_on(client, model, error, gave_up):
                raise
        life.request = again()
        life.model = await models.find_for(asked_for, life.request.session, gave_up)


async def _answer_by(client: Client, life: Lifecycle, model: Model, body: JsonBody) -> None:
    """Raises as Carriage.run, and what tells that the request cannot be answered there."""
    door, settings, generation = client.replica.door, client.replica.settings, life.asked
    assert generation is not None
    asks, fields = life.asks, body.fields
    asks.model, asks.keeps_session = model.name, door.models.is_shared(model)
    if asks.began_ms is None:
        asks.began_ms = model.router.fleet.redis_now_ms
    with UNTRACED if life.trace is None else life.trace.span("tokens"):
        ids = await door.prompts.of(generation.api, model, fields, client.holder)
    asks.local_only = not may_have_source(generation, fields, ids)
    life.admit(ids, settings.max_prompt_tokens)
    migrates = settings.migrate and can_migrate(generation, fields, ids, model.workers)
    if generation.streams:
        client.waits()
    headers = _headers_on(client, _engine_id(client.raw_headers, life.request_id))
    if life.trace is None:
        headers += [each for each in client.scope["headers"] if each[0] in CONTEXT]
    client.shows = True
    carriage = client.scope.get(CARRIER, Carriage)(
        door,
        life,
        Outgoing(body, generation, ids, model.name, migrates),
        client.scope["path"],
        headers,
        client,
    )
    await carriage.run()


def _note_error(client: Client, life: Lifecycle, error: BaseException) -> None:
    client.shows = False
    if life.ids is None:
        if life.trace is not None:
            life.trace.fail(error)
        return
    told = ending_of(client.ended_by or error)
    life.status = life.status or told.status
    life.end(told.outcome, ended_by=told.ended_by)


_OF_A_NAMESPACE = (
    *(NoWorkers, AllWorkersBusy, PromptTooLarge, ContextTooLong, NamespaceMissing, WrongVersion),
    WorkerFailed,
)
"""Errors that mean: these workers cannot answer. Those of another namespace may."""
_OF_THE_REQUEST = (AnswerTimeout, RepeatedFailure)
"""Errors after which nobody else is asked."""


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
    client.record.asked = generation = answer_request.read(Api.MESSAGES, body.fields)
    client.record.model = model = _found(client, generation.model)
    async with client.watched():
        ids = await door.prompts.of(Api.MESSAGES, model, body.fields, client.holder)
        if ids.ids is None:
            await _ask_any(client, model, body)
        else:
            count = ids.num_tokens
            about = {"original_input_tokens": count}  # nothing of it is cleared
            await client.answer({"input_tokens": count, "context_management": about})


def _salted(client: Client, body: JsonBody, generation: answer_request.AnswerRequest) -> JsonBody:
    """Returns the body with the salt of a tenant that shares no cache with others."""
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
    client: Client, generation: answer_request.AnswerRequest, fields: Fields, asks: RouteRequest
) -> Model:
    """Returns the model that is asked for. A request for one that sleeps waits until it wakes, if
    the request would be answered then. Raises as Models.find_for."""
    models, settings = client.replica.door.models, client.replica.settings
    if client.rules is not None:
        _allow(client, generation.model)
    try:
        return await models.find_for(generation.model, asks.session)
    except ModelUnavailable as error:
        api = generation.api
        answer_request.check_answerable(api, fields)
        if isinstance(ids := fields.get(PROMPTS[api]), np.ndarray):
            check_length(PROMPTS[api], len(ids), settings.max_prompt_tokens)
        async with client.watched():
            await models.wake(error, asks)
    return await models.find_for(generation.model, asks.session)


async def _read(client: Client) -> JsonBody:
    """Returns the body, once models are known."""
    await client.replica.door.models.until_known()
    most = client.replica.settings.max_request_bytes
    raw = await client.read(most, "--max-request-bytes")
    kind = _form_of(client)
    body = FormBody.of_form(raw, kind) if kind else await JsonBody.read(raw)
    forwarding.check(body)
    return body


def _form_of(client: Client) -> bytes:
    """Returns the content type of a form, where one may be; b"" for JSON."""
    kind = client.raw_headers.get(b"content-type", b"")
    is_form = client.scope["path"].startswith(answer_request.AUDIO) and kind.lower().startswith(
        FORM
    )
    return kind if is_form else b""


def _session(named: object) -> str | None:
    """Returns the session that a body names; None if nothing could be one."""
    return fitting_id(named, REQUEST_ID, "session_id") or None if isinstance(named, str) else None


def _engine_id(headers: Mapping[bytes, bytes], request_id: str) -> str:
    """Returns the id that engines know a request by. Clients may give several the same id, as when
    they try one again, and an engine would take them for one."""
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
            await door.any_worker.answer(
                *(model, body, path, headers, client, record, client.holder)
            )
            return
        except WorkerFailed as error:
            gave_up.add(model.namespace)
            if client.status or not _may_go_on(client, model, error, gave_up):
                raise
        model = door.models.find(body.fields.get("model"), gave_up)
