"""What the members of a request mean here: each is done, or refused by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any

import numpy as np

from app.core.errors import InvalidRequest, shown
from app.core.types import checked_request_id
from workers.engines.base import Sampling
from workers.server.transfer import PARAMS, Travels, travels

MAX_CHOICES = 128
"""Of one answer, all its prompts together."""
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
"""What says for whom or whither a request is, and changes nothing in its answer."""
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
"""What asks for nothing; of other members null, false, 0 and what is empty."""


def check_members(fields: Mapping[str, Any], done: Collection[str]) -> None:
    """Raises InvalidRequest for the first that is neither done nor asks for nothing."""
    for name, value in fields.items():
        if name in done or name in _ABOUT:
            continue
        asks = value != _NEUTRAL[name] if name in _NEUTRAL else _says_something(value)
        if value is not None and asks:
            raise InvalidRequest(name, f"is not supported by this engine, got {shown(value)}")


def _says_something(value: object) -> bool:
    return isinstance(value, np.ndarray) or bool(value)


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How an answer is to be generated.

    max_tokens: None: as the path has it. request_id: None: none was given.
    """

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
    """What the members of GENERATION ask for. Raises InvalidRequest."""
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
        stops_in(fields, "stop"),
        Sampling(**chosen),
        flag(fields, "ignore_eos"),
        salt_in(fields),
        travels(fields),
    )


def flag(fields: Mapping[str, object], name: str) -> bool:
    """Raises InvalidRequest."""
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidRequest(name, f"needs true or false, got {shown(value)}")
    return value


def count(
    fields: Mapping[str, object], name: str, *, least: int = 1, most: int | None = None
) -> int | None:
    """Raises InvalidRequest."""
    value = fields.get(name)
    if value is None:
        return None
    # In Python a boolean is an int, but it is no number.
    if type(value) is not int or value < least:
        raise InvalidRequest(name, f"needs an integer of at least {least}, got {shown(value)}")
    if most is not None and value > most:
        raise InvalidRequest(name, f"needs an integer up to {most}, got {shown(value)}")
    return value


def salt_in(fields: Mapping[str, object]) -> str:
    """Raises InvalidRequest."""
    salt = fields.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidRequest("cache_salt", f"needs a text that is not empty, got {shown(salt)}")
    return salt or ""


def stops_in(fields: Mapping[str, object], name: str) -> tuple[str, ...]:
    """Raises InvalidRequest."""
    value = fields.get(name)
    stops = [value] if isinstance(value, str) else value or []
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops)
    ):
        raise InvalidRequest(
            name, f"needs a text or up to {MAX_STOPS} of them, none empty, got {shown(value)}"
        )
    return tuple(stops)
