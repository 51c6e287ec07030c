"""The paths of OpenAI's and Anthropic's clients, which engines answer."""

from __future__ import annotations

import time
from typing import Any

from app.core.worker_report import WorkerInfo
from app.door import asked, members
from app.door.asked import COUNT_TOKENS, MODELS, PASSED_ON, PATHS, Api
from app.door.door import Headers
from app.door.errors import ModelUnavailable
from app.door.forwarding import Outgoing, headers_for_engine
from app.door.lifecycle import Lifecycle
from app.door.migration import can_migrate
from app.door.models import Model
from app.door.record import Stage
from app.door.sources import may_have_source
from app.edge import schemas
from app.edge.ask import request_id_in, request_of
from app.edge.client import Client
from app.edge.errors import ending_of
from app.edge.routes import Route, body_of, parameters_of
from app.http.json_body import JsonBody

BEGUN_S = int(time.time())
"""When this process began: models have no other date."""


async def answer(client: Client) -> None:
    """Have the worker answer that holds most of the prompt for its load; its answer is passed on
    as it comes."""
    headers, replica, path = client.raw_headers, client.replica, client.scope["path"]
    api, door, settings = PATHS[path], replica.door, replica.settings
    record = client.record
    record.request_id = request_id = request_id_in(headers)
    client.about = [(b"x-request-id", request_id.encode())]
    body = await _read(client)
    record.enter(Stage.TOKENS)
    record.asked = generation = asked.read(api, body.fields)
    record.model = model = await _model(client, generation.model)
    record.request = request_of(
        headers,
        settings.policy,
        request_id=request_id,
        session=generation.session,
        came_ms=model.router.fleet.redis_now_ms,
        model=model.name,
        carried=True,
    )
    trace = door.tracing.begin(api, headers)
    life: Lifecycle | None = None
    async with client.watched():
        try:
            with trace.span("tokens"):
                ids = await door.prompts.of(api, model, body.fields)
            record.request.local_only = not may_have_source(generation, body.fields, ids)
            life = door.admit(record, ids, trace)
            migrates = settings.migrate and can_migrate(generation, body.fields, ids, model.workers)
            await door.door.carry(
                life,
                Outgoing(body, generation, ids, migrates),
                path,
                _headers_on(client, request_id),
                _Shown(client, life, settings.show_decision),
            )
        except BaseException as error:
            if life is None:
                trace.fail(error)
            else:
                told = ending_of(error)
                life.record.status = life.record.status or told.status
                life.end(told.outcome, ended_by=told.ended_by)
            raise


async def pass_on(client: Client) -> None:
    """Have any worker of the model answer."""
    body = await _read(client)
    client.record.model = model = await _model(client, body.fields.get("model"))
    async with client.watched():
        await _ask_any(client, model, body)


async def count_tokens(client: Client) -> None:
    """Count the tokens of what would be a prompt of the Messages API; a worker counts what is not
    known here."""
    door = client.replica.door
    body = await _read(client)
    client.record.asked = generation = asked.read(Api.MESSAGES, body.fields)
    client.record.model = model = await _model(client, generation.model)
    async with client.watched():
        ids = await door.prompts.of(Api.MESSAGES, model, body.fields)
        if ids.ids is None:
            await _ask_any(client, model, body)
        else:
            count = ids.num_tokens
            about = {"original_input_tokens": count}  # nothing of it is cleared
            await client.answer({"input_tokens": count, "context_management": about})


async def models(client: Client) -> None:
    """List the models that have a live worker, and those that sleep until a request comes."""
    known = client.replica.door.models
    cards = [*map(_card, known), *map(_card_asleep, known.sleeping())]
    await client.answer({"object": "list", "data": cards})


async def one_model(client: Client) -> None:
    """Describe a model."""
    known, name = client.replica.door.models, client.path_params["model"]
    card = _card_asleep(name) if name in known.sleeping() else _card(known.find(name))
    await client.answer(card)


async def _model(client: Client, name: object) -> Model:
    """As Models.find; a request for a model that sleeps waits until it is awake."""
    models = client.replica.door.models
    try:
        return models.find(name)
    except ModelUnavailable as error:
        asks = request_of(client.raw_headers, client.replica.settings.policy)
        async with client.watched():
            await models.wake(error, asks.tenant, asks.priority)
    return models.find(name)


def _card_asleep(name: str) -> dict[str, object]:
    """Of a model of which nothing else is known."""
    about = {"id": name, "object": "model", "created": BEGUN_S, "owned_by": "kvroute"}
    return {**about, "root": name, "parent": None, "max_model_len": None, "asleep": True}


def _card(model: Model) -> dict[str, object]:
    base = model.root.models[0] if model.root.models else model.name
    return {
        "id": model.name,
        "object": "model",
        "created": BEGUN_S,
        "owned_by": "kvroute",
        "root": base,
        "parent": base if model.lora_name else None,
        "max_model_len": model.max_tokens or None,
        "asleep": False,
    }


async def _read(client: Client) -> JsonBody:
    body = await JsonBody.read(await client.read(client.replica.settings.max_request_bytes))
    members.check(client.scope["path"], body)
    return body


def _headers_on(client: Client, request_id: str) -> list[tuple[bytes, bytes]]:
    worker_key = client.replica.settings.worker_key
    return headers_for_engine(client.scope["headers"], request_id, worker_key)


async def _ask_any(client: Client, model: Model, body: JsonBody) -> None:
    client.record.request_id = request_id = request_id_in(client.raw_headers)
    headers = _headers_on(client, request_id)
    door = client.replica.door.door
    await door.pass_on(model, body.changed({}), client.scope["path"], headers, client)


class _Shown:
    """A client that is told where its answer comes from, or why its tokens were not known."""

    def __init__(self, client: Client, life: Lifecycle, show_decision: bool) -> None:
        self._client = client
        self._life = life
        self._show_decision = show_decision
        self.send = client.send

    async def start(self, status: int, headers: Headers) -> None:
        await self._client.start(status, [*headers, *self._shown()])

    async def refuse(self, status: int, headers: Headers, body: bytes, by: WorkerInfo) -> None:
        await self._client.refuse(status, [*headers, *self._shown()], body, by)

    def _shown(self) -> Headers:
        record = self._life.record
        shown = []
        tokens_from = self._life.admitted.tokens_from
        if tokens_from.startswith("blind:"):
            shown.append((b"x-kvroute-tokens", tokens_from.encode()))
        if self._show_decision and record.decision is not None:
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


def _posted(path: str, endpoint: Any, *errors: int) -> Route:
    is_anthropic = path in (COUNT_TOKENS, "/v1/messages")
    return Route(
        "POST",
        path,
        endpoint,
        *(400, 401, 404, 408, 413, *errors),
        error=schemas.AnthropicError if is_anthropic else schemas.OpenAIError,
        openapi_extra=body_of(schemas.Generation),
        name=path.strip("/").replace("/", "_"),
    )


_FAILURES = (429, 502, 503)
ROUTES = [
    *(_posted(path, answer, 409, *_FAILURES) for path in PATHS),
    _posted(COUNT_TOKENS, count_tokens, *_FAILURES),
    *(_posted(path, pass_on, 502, 503) for path in PASSED_ON),
    Route("GET", MODELS, models, 401, error=schemas.OpenAIError),
    Route(
        "GET",
        MODELS + "/{model:any_text}",
        one_model,
        *(401, 404, 503),
        error=schemas.OpenAIError,
        openapi_extra={"parameters": parameters_of(schemas.ModelName, "path")},
    ),
]
