"""What the body of a request for an answer asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from app.core.errors import InvalidRequest, cut, shown

PASSED_ON = ("/tokenize", "/detokenize")
"""Paths of which any worker of a model may answer requests, without being reserved."""
COUNT_TOKENS = "/v1/messages/count_tokens"
MODELS = "/v1/models"
_STORED = ("previous_response_id", "conversation", "background")


class Api(StrEnum):
    """The kinds of requests, by what their paths are about."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    RERANK = "rerank"
    RESPONSES = "responses"
    SCORE = "score"


RERANKS, SCORES = ("/v1/rerank", "/v2/rerank", "/rerank"), ("/v1/score", "/score")
PATHS = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/embeddings": Api.EMBEDDINGS,
    "/v1/messages": Api.MESSAGES,
    "/v1/responses": Api.RESPONSES,
    **dict.fromkeys(RERANKS, Api.RERANK),
    **dict.fromkeys(SCORES, Api.SCORE),
}
PROMPTS: Mapping[Api, str] = {
    Api.CHAT: "messages",
    Api.COMPLETIONS: "prompt",
    Api.EMBEDDINGS: "input",
    Api.MESSAGES: "messages",
    Api.RERANK: "documents",
    Api.RESPONSES: "input",
    Api.SCORE: "text_2",
}
"""Where each has its prompt, or most of it."""


_OF_DOOR = frozenset((*PATHS, *PASSED_ON, COUNT_TOKENS, MODELS))


def is_of_door(path: str) -> bool:
    """Whether requests to `path` are for the front door, and so logged and counted as such."""
    return path in _OF_DOOR or path.startswith(MODELS + "/")


@dataclass(frozen=True, slots=True)
class Asked:
    """session: the client's name for what belongs together; "" for none. cache_salt: as the client
    gave it; "": none. user: whom the client names as the one it asks for; "": nobody.

    streams: the answer comes in events. reads_cache: the engine takes what it has cached of the
    prompt. wants_usage: a stream is to end with its usage.
    """

    api: Api
    model: object
    streams: bool
    wants_usage: bool
    session: object
    cache_salt: str
    reads_cache: bool = True
    user: str = ""


def read(api: Api, fields: Mapping[str, Any]) -> Asked:
    """What `fields`, the top-level members of a body, ask for. Raises InvalidRequest."""
    if api is Api.RESPONSES:
        for name in _STORED:
            if fields.get(name):
                raise InvalidRequest(
                    name, "leans on what one engine stored; send the whole input instead"
                )
    streams = fields.get("stream") or False
    if not isinstance(streams, bool):
        raise InvalidRequest("stream", f"must be true or false, got {shown(streams)}")
    options = fields.get("stream_options")
    if options is not None and not (
        isinstance(options, dict) and all(isinstance(v, bool | None) for v in options.values())
    ):
        raise InvalidRequest(
            "stream_options", f"must be an object of booleans, got {shown(options)}"
        )
    return Asked(
        api,
        fields.get("model"),
        streams,
        bool(options and options.get("include_usage")),
        session=_session(fields),
        cache_salt=_salt(fields.get("cache_salt")),
        reads_cache=_reads_cache(api, fields),
        user=_user(fields),
    )


def _reads_cache(api: Api, fields: Mapping[str, Any]) -> bool:
    """Whether the engine takes what it has cached of a prompt. To give the probabilities of all its
    tokens, it computes them all."""
    echoed = "logprobs" if api is Api.COMPLETIONS else "top_logprobs"
    of_echo = fields.get(echoed, 0 if api is Api.CHAT else None) if fields.get("echo") else None
    return fields.get("prompt_logprobs") is None and of_echo is None


def _session(fields: Mapping[str, Any]) -> object:
    """The session that the body names, or what clients of OpenAI name instead."""
    key = fields.get("prompt_cache_key")
    if fields.get("session_id") is not None or not isinstance(key, str) or not key:
        return fields.get("session_id")
    # Any text may be there.
    return hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _user(fields: Mapping[str, Any]) -> str:
    """For whom the client asks, as OpenAI's clients and Anthropic's say it: for the log alone."""
    metadata = fields.get("metadata")
    of_metadata = metadata.get("user_id") if isinstance(metadata, dict) else None
    names = (fields.get("safety_identifier"), fields.get("user"), of_metadata)
    return next((cut(name) for name in names if isinstance(name, str)), "")


def _salt(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not value:
        raise InvalidRequest("cache_salt", f"must be a non-empty string, got {shown(value)}")
    return value
