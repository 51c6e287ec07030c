"""Turns the bodies that clients send into chains of blocks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar, cast

import numpy as np
from fastapi import Request
from numpy.typing import NDArray

from app.api import schemas
from app.core.config import RouterSettings
from app.core.errors import InvalidRequest, shown
from app.core.hashing import (
    Tokens,
    compute_local_hashes,
    compute_sequence_hashes,
    seed_for,
    token_bytes,
)
from app.core.types import LocalHash, SequenceHash
from app.router.router import Router

try:
    import simdjson
except ImportError:  # there is no wheel for the newest Python yet
    simdjson = None  # type: ignore[assignment]

M = TypeVar("M", schemas.RouteBody, schemas.FindBestWorker)


def parse(model: type[M], raw: bytes) -> tuple[M, bytes | None]:
    """The body; and its `token_ids`, as from `token_bytes`, if they are not in the body.

    simdjson writes an array of numbers into a buffer, without an object for each. That takes half
    the time of the fastest parser that makes objects, and a fifth of pydantic's. pydantic gets the
    other fields, and the whole body if that is not plainly valid, as it knows how to report why.
    """
    # Only objects; and simdjson would accept a byte order mark and read on.
    if simdjson is not None and raw.startswith(b"{"):
        with suppress(InvalidRequest, LookupError, RuntimeError, TypeError, ValueError):
            return _fields(model, raw)
    return model.model_validate_json(raw), None


def _fields(model: type[M], raw: bytes) -> tuple[M, bytes | None]:
    """As `parse`. Raises if the body is not plainly valid."""
    # A new parser each time, which takes no longer: a parser keeps all that it has read.
    document: Any = simdjson.Parser().parse(raw)
    fields: dict[str, Any] = {}
    tokens: bytes | None = None
    hashes: list[int] | None = None
    # Buffers are flat, so arrays that become one must not contain arrays.
    num_arrays = 0
    for name in document:
        if name not in model.model_fields:
            raise ValueError(f"{name} is unknown; looking up each of many would take minutes")
        if name in fields:
            raise ValueError(f"{name} comes twice, and simdjson shows only the first")
        value = document[name]
        if not isinstance(value, simdjson.Array):
            fields[name] = value
            continue
        num_arrays += 1
        if name == "token_ids":
            tokens, fields[name] = token_bytes(_unsigned(value)), []
        elif name == "local_hashes":
            hashes, fields[name] = _unsigned(value).tolist(), []
        else:
            fields[name] = value.as_list()
            num_arrays += sum(isinstance(inner, list) for inner in fields[name])
    # Looking for the only one from both ends takes a sixth of the time of counting.
    is_only = num_arrays == 1 and raw.find(b"[") == raw.rfind(b"[")
    if not is_only and raw.count(b"[") != num_arrays:
        raise ValueError("there are other arrays in arrays")
    body = model.model_validate(fields)
    if hashes is not None:
        body.local_hashes = hashes
    return body, tokens


def _unsigned(numbers: simdjson.Array) -> NDArray[np.uint64]:
    """Raises TypeError or ValueError if one is not an integer in [0, 2^64), or there are none."""
    return np.frombuffer(numbers.as_buffer(of_type="u"), np.uint64)


def options_in_query(request: Request) -> schemas.RouteOptions:
    """The options that accompany raw tokens. Raises ValidationError."""
    if not request.scope["query_string"]:
        return schemas.RouteOptions()
    fields: dict[str, Any] = dict(request.query_params)
    if "exclude" in fields:
        fields["exclude"] = request.query_params.getlist("exclude")
    return schemas.RouteOptions.model_validate(fields, strict=False)


async def chain_of(
    router: Router, settings: RouterSettings, body: schemas.RouteBody, tokens: bytes | None
) -> tuple[list[SequenceHash], int]:
    """Sequence hashes of the full blocks of a body's prompt, and its length in tokens.

    tokens: as `parse` gives them. Raises InvalidRequest, and what `Router.block_size` does.
    """
    if (body.token_ids is None) == (body.local_hashes is None):
        raise InvalidRequest("token_ids", "give either token_ids, or local_hashes and num_tokens")
    if body.token_ids is not None:
        if body.num_tokens is not None:
            raise InvalidRequest(
                "num_tokens", "is only allowed with local_hashes; token_ids are counted"
            )
        given = body.token_ids if tokens is None else tokens
        return await chain_of_tokens(router, settings, body, given, body.mm_hashes)
    for name in ("mm_hashes", "lora_name", "cache_namespace"):
        if getattr(body, name) not in (None, ""):
            raise InvalidRequest(
                name, "is only allowed with token_ids; local_hashes already cover it"
            )
    if body.num_tokens is None:
        raise InvalidRequest("num_tokens", "is required with local_hashes")
    assert body.local_hashes is not None
    chain = await chain_of_hashes(router, settings, body.local_hashes, body.num_tokens, body.policy)
    return chain, body.num_tokens


async def chain_of_tokens(
    router: Router,
    settings: RouterSettings,
    options: schemas.RouteOptions,
    tokens: Tokens,
    mm_hashes: list[list[int]] | None = None,
) -> tuple[list[SequenceHash], int]:
    """As `chain_of`. mm_hashes: for each full block, those of images and the like that touch it."""
    # Rounded up, as hashing reports bytes that are left over.
    num_tokens = -(-len(tokens) // 4) if isinstance(tokens, bytes) else len(tokens)
    _check_length("token_ids", num_tokens, settings)
    block_size = await router.block_size(options.policy or settings.policy)
    if mm_hashes is not None and len(mm_hashes) != num_tokens // block_size:
        raise InvalidRequest(
            "mm_hashes",
            f"got {len(mm_hashes)} lists, but {num_tokens} tokens are {num_tokens // block_size} "
            f"full blocks of {block_size}",
        )
    seed = seed_for(options.lora_name, options.cache_namespace)
    local = compute_local_hashes(tokens, block_size, seed=seed, mm_hashes=mm_hashes)
    return compute_sequence_hashes(local), num_tokens


async def chain_of_hashes(
    router: Router,
    settings: RouterSettings,
    local_hashes: list[int],
    num_tokens: int,
    policy: str | None = None,
) -> list[SequenceHash]:
    """As `chain_of`, from hashes that the client computed."""
    _check_length("num_tokens", num_tokens, settings)
    block_size = await router.block_size(policy or settings.policy)
    if len(local_hashes) * block_size > num_tokens:
        raise InvalidRequest(
            "local_hashes",
            f"{len(local_hashes)} full blocks of {block_size} tokens do not fit "
            f"into num_tokens {num_tokens}",
        )
    return compute_sequence_hashes(cast(list[LocalHash], local_hashes))


def _check_length(field: str, num_tokens: int, settings: RouterSettings) -> None:
    if not 1 <= num_tokens <= settings.max_prompt_tokens:
        raise InvalidRequest(
            field, f"got {shown(num_tokens)} tokens; 1 to {settings.max_prompt_tokens} are allowed"
        )
