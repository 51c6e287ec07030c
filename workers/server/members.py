"""Members of a request's body: each is done, or refused by its name.

`kv_transfer_params`, which routers alone send, says what KV the request leaves for another worker,
or has from one, as the two requests of vLLM's NixlConnector do. To the source:
{"do_remote_decode": true}; for a prefix that it holds, without computing anything,
{"do_remote_decode": true, "cached_only": true}. The member of that name in the source's answer goes
to the target as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any

import numpy as np

from app.core.errors import InvalidRequest, shown
from app.core.types import checked_request_id
from workers.engines.base import Sampling
from workers.kv.transfer.tcp import BlockSource

PARAMS = "kv_transfer_params"
CACHED = "remote_prefill_cached_tokens"
"""vLLM's name for tokens that were cached at the source. The target's usage counts no others as
cached: those that the source has just computed were not."""
KEEP_S = 30.0
"""Seconds for which KV that was computed for another worker is kept, unless it is fetched."""
MAX_CHOICES = 128
"""Choices of one answer, all its prompts together."""
MAX_HOST = 255
"""Characters of a host's name; an id has fewer."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
_SAMPLING = tuple(field.name for field in fields_of(Sampling))
GENERATION = frozenset(
    (
        *("model", "stream", "stream_options", "stream_interval", "max_tokens", "min_tokens"),
        *("n", "stop", "ignore_eos", "request_id", "return_token_ids", "cache_salt"),
        PARAMS,
        *_SAMPLING,
    )
)
"""Members that completions and chats have in common."""
_ABOUT = frozenset(
    (
        *("user", "metadata", "service_tier", "safety_identifier", "store"),
        *("prompt_cache_key", "prompt_cache_retention", "session_id"),
    )
)
"""Members that say for whom a request is, and change nothing in its answer."""
_NEUTRAL: Mapping[str, object] = {
    "add_special_tokens": True,
    "best_of": 1,
    "length_penalty": 1,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "tool_choice": "none",
}
"""Values that ask for nothing; of other members null, false, 0 and what is empty."""


def check_members(fields: Mapping[str, Any], done: Collection[str]) -> None:
    """Raises InvalidRequest for the first member that is neither done nor asks for nothing."""
    for name, value in fields.items():
        if name in done or name in _ABOUT:
            continue
        says_something = isinstance(value, np.ndarray) or bool(value)
        asks = value != _NEUTRAL[name] if name in _NEUTRAL else says_something
        if value is not None and asks:
            raise InvalidRequest(name, f"is not supported by this engine, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Travels:
    """The KV of a request's prompt that is for another worker, or comes from one.

    keeps: it is for another worker. held_only: what is held of it, computing nothing. source: who
    keeps KV of the prompt for this worker. cached_tokens: of those, how many were cached there;
    None: unknown.
    """

    keeps: bool = False
    held_only: bool = False
    source: BlockSource | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options of an answer. max_tokens: None: as the path has it."""

    request_id: str | None
    stream: bool
    stream_interval: int
    max_tokens: int | None
    min_tokens: int
    choices: int
    stops: tuple[str, ...]
    sampling: Sampling
    ignore_eos: bool
    salt: str
    travels: Travels


def generated(fields: Mapping[str, Any]) -> GenerationOptions:
    """Returns what the members of GENERATION ask for. Raises InvalidRequest."""
    request_id = fields.get("request_id")
    chosen = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise InvalidRequest("stream_options", f"needs an object, got {shown(options)}")
    return GenerationOptions(
        None if request_id is None else checked_request_id(request_id),
        flag(fields, "stream"),
        count(fields, "stream_interval") or 1,
        count(fields, "max_tokens"),
        count(fields, "min_tokens", least=0) or 0,
        count(fields, "n", most=MAX_CHOICES) or 1,
        stops_in(fields),
        Sampling(**chosen),
        flag(fields, "ignore_eos"),
        salt_in(fields),
        travels(fields),
    )


def travels(fields: Mapping[str, Any]) -> Travels:
    """Raises InvalidRequest."""
    params = fields.get(PARAMS)
    if params is None:
        return Travels()
    if not isinstance(params, dict):
        raise InvalidRequest(PARAMS, f"needs an object, got {shown(params)}")
    keeps, held_only, fetches = (
        flag(params, name, PARAMS)
        for name in ("do_remote_decode", "cached_only", "do_remote_prefill")
    )
    if keeps and fetches:
        raise InvalidRequest(PARAMS, "is either for a source or for a target")
    if not fetches:
        return Travels(keeps, keeps and held_only)
    source = BlockSource(
        _short_text(params, "remote_host"),
        count(params, "remote_port", most=65535, within=PARAMS) or 0,
        _short_text(params, "remote_request_id"),
        count(params, "remote_num_tokens", within=PARAMS) or 0,
    )
    if not (source.port and source.num_tokens):
        raise InvalidRequest(PARAMS, "needs remote_port and remote_num_tokens")
    return Travels(source=source, cached_tokens=count(params, CACHED, least=0, within=PARAMS))


def params_of(kept: BlockSource, cached_tokens: int) -> dict[str, object]:
    """Returns what the target is told. cached_tokens: those not computed for it by the source."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": kept.host,
        "remote_port": kept.port,
        "remote_request_id": kept.transfer_id,
        "remote_num_tokens": kept.num_tokens,
        CACHED: cached_tokens,
    }


def flag(fields: Mapping[str, object], name: str, within: str = "") -> bool:
    """Returns the member's value. within: of which member it is one. Raises InvalidRequest."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(_path(within, name), f"needs true or false, got {shown(value)}")
    return bool(value)


def count(
    fields: Mapping[str, object],
    name: str,
    *,
    least: int = 1,
    most: int | None = None,
    within: str = "",
) -> int | None:
    """Returns the member's value. within: of which member it is one. Raises InvalidRequest."""
    value = fields.get(name)
    if value is None:
        return None
    path = _path(within, name)
    # In Python a boolean is an int, but it is no number.
    if type(value) is not int or value < least:
        raise InvalidRequest(path, f"needs an integer of at least {least}, got {shown(value)}")
    if most is not None and value > most:
        raise InvalidRequest(path, f"needs an integer up to {most}, got {shown(value)}")
    return value


def _short_text(params: Mapping[str, object], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_HOST:
        raise InvalidRequest(_path(PARAMS, name), f"needs a short text, got {shown(value)}")
    return value


def _path(within: str, name: str) -> str:
    return f"{within}.{name}" if within else name


def salt_in(fields: Mapping[str, object]) -> str:
    """Raises InvalidRequest."""
    salt = fields.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidRequest("cache_salt", f"needs a text that is not empty, got {shown(salt)}")
    return salt or ""


def stops_in(fields: Mapping[str, object]) -> tuple[str, ...]:
    """Raises InvalidRequest."""
    value = fields.get("stop")
    stops = [value] if isinstance(value, str) else value or []
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops)
    ):
        raise InvalidRequest(
            "stop", f"needs a text or up to {MAX_STOPS} of them, none empty, got {shown(value)}"
        )
    return tuple(stops)
