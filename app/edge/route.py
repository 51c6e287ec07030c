"""The paths of those who ask where to go, and carry their requests themselves."""

from __future__ import annotations

from app.core.errors import InvalidRequest, shown
from app.core.failures import REPORTED
from app.core.key_rules import Spending
from app.core.outcomes import Ending
from app.core.types import checked_reservation_id
from app.core.worker_report import MAX_CONTEXT
from app.edge import answers, ask, schemas
from app.edge.client import Client

RAW_TOKENS = b"application/octet-stream"


async def find_best_worker(client: Client) -> None:
    """Say where a prompt would be routed now, without reserving anything."""
    replica = client.replica
    settings = replica.settings
    raw = await client.read(settings.max_request_bytes, "--max-request-bytes")
    body, _ = await replica.bodies.read(
        schemas.FindBestWorker, raw, replica.block_size, client.holder
    )
    ask.check_options(client, body)
    prompt = ask.of_hashes(
        body.local_hashes, body.num_tokens, settings.max_prompt_tokens, may_be_longer=True
    )
    request = ask.request_of(
        {},
        settings.policy,
        holder=client.holder,
        isl_tokens=prompt.num_tokens,
        context_tokens=prompt.num_tokens + 1,
        reserve=False,
        local_only=True,
    )
    answer = answers.best_worker(await replica.router.route(request, prompt))
    if client.is_of_client:
        answers.without_overlap(answer)
    await client.answer(answer)


async def route(client: Client) -> None:
    """Choose a worker for a prompt and reserve capacity on it."""
    replica, headers = client.replica, client.raw_headers
    router, settings = replica.router, replica.settings
    came_ms = router.fleet.redis_now_ms
    raw = await client.read(settings.max_request_bytes, "--max-request-bytes")
    options: schemas.RouteOptions
    if headers.get(b"content-type", b"").lower().startswith(RAW_TOKENS):
        # Reading even an empty query takes longer than looking whether there is one.
        has_query = client.scope["query_string"]
        options = ask.options_in_query(client.query_params) if has_query else schemas.RouteOptions()
        ask.check_options(client, options)
        prompt = ask.of_tokens(options, raw, settings.max_prompt_tokens)
    else:
        body, tokens = await replica.bodies.read(
            schemas.RouteBody, raw, replica.block_size, client.holder
        )
        options = body
        if client.scope["query_string"]:
            query = shown(client.url.query)
            raise InvalidRequest("query", f"with JSON, options belong in the body, got {query}")
        ask.check_options(client, options)
        prompt = ask.of_body(body, tokens, settings.max_prompt_tokens)
    retry = options.retry and not await _is_foreign(client, options.request_id or "")
    rules = client.rules
    request = ask.request_of(
        headers,
        options.policy or settings.policy,
        key_name=client.key_name,
        rules=rules,
        spending=Spending(rules) if rules is not None and rules.is_limited else None,
        holder=client.holder,
        request_id=options.request_id,
        session=options.session_id,
        tenant=options.tenant,
        priority=options.priority,
        isl_tokens=prompt.num_tokens,
        context_tokens=prompt.num_tokens + 1,
        came_ms=came_ms,
        reserve=options.reserve,
        explain=options.explain,
        exclude=frozenset(options.exclude),
        retry=retry,
        model=options.lora_name or "",
    )
    # Nobody would ever end what is reserved for a caller that hung up.
    async with client.watched():
        answer = answers.routed(await router.route(request, prompt))
        if client.is_of_client:
            answers.without_overlap(answer)
        await client.answer(answer)


async def _is_foreign(client: Client, request_id: str) -> bool:
    """Whether it is another key's request: for a client there is no such reservation then."""
    if not (client.is_of_client and request_id):
        return False
    return await client.replica.router.is_foreign(request_id, client.key_name)


async def prefill_complete(client: Client) -> None:
    """Report that a request's first token is out. Idempotent."""
    request_id = checked_reservation_id(client.path_params["request_id"])
    is_reserved = not await _is_foreign(
        client, request_id
    ) and await client.replica.router.prefill_complete(request_id)
    await client.answer({"request_id": request_id, "found": is_reserved})


async def source_complete(client: Client) -> None:
    """Report that a request's source has computed the prompt, or is ready to hand it on.

    What it holds of the prompt stays reserved until the first token is out, for --kv-lease-s at
    most. Idempotent.
    """
    request_id = checked_reservation_id(client.path_params["request_id"])
    is_reserved = not await _is_foreign(
        client, request_id
    ) and await client.replica.router.source_complete(request_id)
    await client.answer({"request_id": request_id, "found": is_reserved})


async def release(client: Client) -> None:
    """Report that a request has ended, and release its reservation. Idempotent."""
    request_id = client.path_params["request_id"]
    options = schemas.ReleaseOptions.model_validate(dict(client.query_params))
    router = client.replica.router
    most = max((info.most_tokens for info in router.fleet.infos), default=MAX_CONTEXT)
    if (options.output_tokens or 0) > most:
        raise InvalidRequest(
            "output_tokens", f"no worker takes over {most:,} tokens, got {options.output_tokens:,}"
        )
    ending = Ending(options.output_tokens, options.ttft_ms) if options.output_tokens else None
    checked_reservation_id(request_id)
    was_reserved = not await _is_foreign(client, request_id) and await router.release(
        request_id,
        failure=REPORTED if options.worker_failed else None,
        caller=client.holder,
        ending=ending,
    )
    if was_reserved:
        model = next((name for info in router.fleet.infos for name in info.models), "")
        client.replica.door.reported(model, ending, has_failed=options.worker_failed)
    await client.answer({"request_id": request_id, "found": was_reserved})
