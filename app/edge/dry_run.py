"""Where a prompt would go now, and who holds how much of it: nothing is reserved."""

from __future__ import annotations

import asyncio
from math import isfinite
from typing import Any

import msgspec
import orjson

from app.console.schemas import PrefixAsked
from app.core.errors import InvalidRequest, KvrouteError
from app.core.keys import Keyspace
from app.core.types import SequenceHash, new_id
from app.door.asked import Api
from app.edge import ask
from app.edge.services import Services
from app.http.json_body import Fields
from app.ops import holders
from app.policy.decision import Decision, RouteRequest
from app.router.prompt import Prompt, check_length
from app.router.router import Router

TIMEOUT_S = 2.0
"""For a decision: a request may wait for a worker, and a dry run for nothing."""
MAX_HOLDERS = 200
FORMS = ("text", "messages", "token_ids", "local_hashes", "hashes")


async def dry_run(replica: Services, body: PrefixAsked, holder: str) -> dict[str, Any]:
    """As answers.PrefixShown. holder: who asks. Raises InvalidRequest, RedisUnavailable and
    NamespaceMissing."""
    router = replica.router
    if replica.block_size is None:
        await router.refresh()
    block_size = replica.block_size or 1
    prompt, tokens_from = await _prompt(replica, body, holder)
    chain = await prompt.chain(block_size) if isinstance(prompt, Prompt) else prompt
    num_tokens = prompt.num_tokens if isinstance(prompt, Prompt) else len(chain) * block_size + 1
    request = RouteRequest(
        f"dry-run-{new_id()}",
        chain,
        isl_tokens=num_tokens,
        policy=body.policy or replica.settings.policy,
        reserve=False,
        explain=True,
        holder=holder,
    )
    decision, why_not = await _decided(router, request)
    keyspace = Keyspace(router.namespace)
    held = await holders.prefix(router.redis, keyspace, chain, num_tokens) if chain else {}
    most = sorted(held.items(), key=lambda item: -item[1].held.total)[:MAX_HOLDERS]
    return {
        "tokens": num_tokens,
        "full_blocks": len(chain),
        "block_size": block_size,
        "tokens_from": tokens_from,
        "holders": {
            "columns": ("worker", "device", "host", "disk", "total", "reused"),
            "rows": [
                [name, o.device, o.host, o.disk, o.total, reused] for name, (o, reused) in most
            ],
        },
        "route": decision and _shown(decision),
        "route_error": why_not,
    }


async def _decided(router: Router, request: RouteRequest) -> tuple[Decision | None, str | None]:
    """The decision, or why there is none."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await router.route(request), None
    except TimeoutError:
        return None, f"no decision within {TIMEOUT_S:g} s"
    except InvalidRequest:
        raise
    except KvrouteError as error:
        return None, str(error)


async def _prompt(
    replica: Services, body: PrefixAsked, holder: str
) -> tuple[Prompt | list[SequenceHash], str]:
    """The prompt, or its chain, and who made its tokens. Raises InvalidRequest."""
    most = replica.settings.max_prompt_tokens
    given = [name for name in FORMS if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            "text", f"give one of {', '.join(FORMS)}, got {' and '.join(given) or 'none'}"
        )
    if body.hashes is not None:
        check_length("hashes", len(body.hashes), most)
        return [SequenceHash(number) for number in body.hashes], "client"
    if body.local_hashes is not None:
        if body.num_tokens is None:
            raise InvalidRequest("num_tokens", "is required with local_hashes")
        return ask.of_hashes(body.local_hashes, body.num_tokens, most), "client"
    if body.token_ids is not None:
        return _of_tokens(body, body.token_ids, most), "client"
    return await _rendered(replica, body, most, holder)


async def _rendered(
    replica: Services, body: PrefixAsked, most: int, holder: str
) -> tuple[Prompt, str]:
    namespace = replica.router.namespace
    name, served = replica.door.models.named(body.model)
    model = served.models.get(namespace)
    if model is None:
        others = " and ".join(map(repr, served.models))
        raise InvalidRequest("model", f"{name} is of namespace {others}; this shows {namespace!r}")
    api, field = (Api.CHAT, "messages") if body.text is None else (Api.COMPLETIONS, "text")
    asked = {"messages": body.messages, "tools": body.tools, "prompt": body.text}
    members = {name: msgspec.Raw(orjson.dumps(value)) for name, value in asked.items() if value}
    prompt = await replica.door.prompts.of(api, model, Fields(members), holder)
    if prompt.ids is None:
        why = prompt.tokens_from
        raise InvalidRequest(field, f"cannot be tokenized here ({why}): give token_ids")
    body.lora_name = body.lora_name or model.lora_name
    return _of_tokens(body, prompt.ids, most), prompt.tokens_from


def _of_tokens(body: PrefixAsked, tokens: Any, most: int) -> Prompt:
    num_tokens = -(-len(tokens) // 4) if isinstance(tokens, bytes) else len(tokens)
    check_length("token_ids", num_tokens, most)
    return Prompt(
        num_tokens, tokens=tokens, lora_name=body.lora_name, cache_namespace=body.cache_namespace
    )


def _shown(decision: Decision) -> dict[str, Any]:
    rows = [
        {
            "worker": str(c.info.key),
            "eligible": c.eligible,
            "requests": c.load.requests,
            "overlap_blocks": c.overlap.total,
            "queue_s": c.queue_s,
            "cost": c.cost if isfinite(c.cost) else None,
            **{name: value if isfinite(value) else None for name, value in c.terms.items()},
        }
        for c in sorted(decision.candidates, key=lambda c: c.cost)
    ]
    terms = list(decision.candidates[0].terms) if decision.candidates else []
    return {
        "worker": str(decision.worker.key),
        "policy": decision.policy,
        "locality": decision.locality.value,
        "locality_text": decision.locality.text,
        "best_worker": decision.best.worker,
        "best_blocks": decision.best.blocks,
        "tied": decision.tied,
        "degraded": decision.degraded,
        "trust": decision.trust,
        "terms": terms,
        "candidates": rows[:MAX_HOLDERS],
    }
