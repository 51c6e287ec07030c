"""The body of a request for an answer, as a door reads it, and what engines take besides."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import UnionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.core.errors import InvalidRequest, cut, shown

AUDIO = "/v1/audio/"
PASSED_ON = (
    *("/tokenize", "/detokenize", "/pooling", "/classify"),
    *(AUDIO + what for what in ("transcriptions", "translations", "speech")),
)
"""Paths of which any worker of a model may answer requests, without being reserved."""
COUNT_TOKENS = "/v1/messages/count_tokens"
MODELS = "/v1/models"
_IN_USER = re.compile(r"""session(?:_id)?["'_:\s-]{1,8}([0-9A-Za-z][0-9A-Za-z-]{7,63})""")
"""Claude Code names its session in `metadata.user_id`: `user_…_account_…_session_<uuid>`, or as a
member of JSON."""
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
"""Members with the prompt, or most of it."""
_BATCHES = (Api.COMPLETIONS, Api.EMBEDDINGS, Api.RERANK, Api.SCORE)
"""APIs whose prompts may be several, each of up to a context."""


_DOOR_PATHS = frozenset((*PATHS, *PASSED_ON, COUNT_TOKENS, MODELS))


def is_of_door(path: str) -> bool:
    """Whether requests to `path` are for the front door, and so logged and counted as such."""
    return path in _DOOR_PATHS or path.startswith(MODELS + "/")


@dataclass(slots=True)
class AnswerRequest:
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
    output_room: int = 0
    num_choices: int = 1
    """Choices of the answer: `n` for each prompt."""


def read(api: Api, fields: Mapping[str, Any]) -> AnswerRequest:
    """Reads the top-level members of a body. Raises InvalidRequest."""
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
    prompts = fields.get(PROMPTS[api]) if api in _BATCHES else None
    num_prompts = len(prompts) if isinstance(prompts, list) else 1
    given_n = fields.get("n")
    return AnswerRequest(
        api,
        fields.get("model"),
        streams,
        bool(options and options.get("include_usage")),
        session=_session(fields),
        cache_salt=_salt(fields.get("cache_salt")),
        reads_cache=_reads_cache(api, fields),
        user=_user(fields),
        output_room=output_room(api, fields),
        num_choices=max(1, num_prompts) * max(1, given_n if type(given_n) is int else 1),
    )


DEFAULT_COMPLETION_TOKENS = 16
"""Output tokens of a completion that names no limit."""
_LENGTHS_OF: Mapping[Api, tuple[str, ...]] = {
    Api.CHAT: ("max_completion_tokens", "max_tokens"),
    Api.COMPLETIONS: ("max_tokens",),
    Api.MESSAGES: ("max_tokens",),
    Api.RESPONSES: ("max_output_tokens",),
}


def output_room(api: Api, fields: Mapping[str, Any]) -> int:
    """Returns the output tokens that an engine must have room for, as engines judge: all that are
    asked for, or else one."""
    names = _LENGTHS_OF.get(api)
    if names is None:
        return 0
    given = next((value for name in names if (value := fields.get(name)) is not None), None)
    if given is None and api is Api.COMPLETIONS:
        given = DEFAULT_COMPLETION_TOKENS
    return max(1, given) if type(given) is int else 1


def _reads_cache(api: Api, fields: Mapping[str, Any]) -> bool:
    """Whether the engine takes what it has cached of a prompt. To give the probabilities of all its
    tokens, it computes them all."""
    echoed = "logprobs" if api is Api.COMPLETIONS else "top_logprobs"
    of_echo = fields.get(echoed, 0 if api is Api.CHAT else None) if fields.get("echo") else None
    return fields.get("prompt_logprobs") is None and of_echo is None


def _session(fields: Mapping[str, Any]) -> object:
    """Returns the session that the body names, or what clients of OpenAI name instead."""
    key = fields.get("prompt_cache_key")
    if fields.get("session_id") is not None:
        return fields["session_id"]
    if isinstance(key, str) and key:
        # Any text may be there.
        return hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=16).hexdigest()
    metadata = fields.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    match = _IN_USER.search(user) if isinstance(user, str) else None
    return match and match[1]


def _user(fields: Mapping[str, Any]) -> str:
    """Returns whom the client asks for, as clients of OpenAI and Anthropic name them, for the log;
    "" for nobody."""
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


def given_ids(prompt: object) -> NDArray[np.uint32] | None:
    """Returns the ids that a client gives as its prompt; None if it gives text. Raises
    InvalidRequest."""
    if not isinstance(prompt, np.ndarray):
        return None
    if (
        prompt.ndim != 1
        or not len(prompt)
        or prompt.dtype.kind not in "iu"
        or (prompt.dtype.kind == "i" and prompt.min() < 0)
        or prompt.max() >= 2**32
    ):
        raise InvalidRequest("prompt", "not all are token ids, which are integers below 2^32")
    return prompt.astype(np.uint32)


_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_BOUNDS = {
    "n": (1.0, math.inf),
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""Numbers that no engine takes beyond these. They take texts of numbers, too."""
_LISTS: Mapping[str, type | UnionType] = {"tools": list, "stop": str | list}
_SCORED = (
    *(("text_1", "text_2"), ("queries", "documents"), ("queries", "items")),
    ("data_1", "data_2"),
)
"""Members that are compared, under the names of several releases of engines."""


def prompt_sizes(api: Api, fields: Mapping[str, Any]) -> list[int]:
    """Returns the bytes of each prompt in a body that may have several, four for each id; of other
    bodies, nothing."""
    if api in (Api.COMPLETIONS, Api.EMBEDDINGS):
        return _sizes(fields.get(PROMPTS[api]))
    pairs = {Api.RERANK: (("query", "documents"),), Api.SCORE: _SCORED}.get(api, ())
    pair = next((pair for pair in pairs if all(_has(fields, name) for name in pair)), None)
    if pair is None:
        return []
    # One text is compared with each of the others, or each with that at its place.
    first, second = (_sizes(fields[name]) for name in pair)
    first *= len(second) if len(first) == 1 else 1
    return [sum(both) for both in zip(first, second, strict=False)]


def _sizes(prompts: object) -> list[int]:
    """Returns one size for a list of numbers, or for what is no list."""
    listed = prompts if isinstance(prompts, list) else [prompts]
    return [
        4 * len(one)
        if isinstance(one, np.ndarray)
        else len(str("" if one is None else one).encode(errors="surrogatepass"))
        for one in listed
    ]


def check_answerable(api: Api, fields: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for what no engine would answer: without a prompt, with no room for an
    answer, or with members that mean nothing."""
    if api in (Api.CHAT, Api.MESSAGES) or (api is Api.EMBEDDINGS and fields.get("messages")):
        _check_messages(fields.get("messages"))
    elif api is Api.SCORE:
        if not any(all(_has(fields, name) for name in pair) for pair in _SCORED):
            raise InvalidRequest(PROMPTS[api], "is missing, or what is to be compared with it")
    else:
        for name in ("query", PROMPTS[api]) if api is Api.RERANK else (PROMPTS[api],):
            if not _has(fields, name):
                raise InvalidRequest(name, f"needs a prompt, got {shown(fields.get(name))}")
    if api is Api.COMPLETIONS and given_ids(fields["prompt"]) is None:
        prompt = fields["prompt"]
        # Ids are an array, unless some are none.
        prompts = prompt if isinstance(prompt, list) else [prompt]
        if not all(isinstance(one, str | list | np.ndarray) and len(one) for one in prompts):
            raise InvalidRequest("prompt", f"must be texts or token ids, got {shown(prompt)}")
    for name in _LENGTHS:
        value = fields.get(name)
        is_needed = api is Api.MESSAGES and name == "max_tokens"
        if (is_needed or value is not None) and not (type(value) is int and value >= 0):
            raise InvalidRequest(name, f"needs a number of tokens, got {shown(value)}")
    for name, (least, most) in _BOUNDS.items():
        value = fields.get(name)
        if value is not None and not least <= _number(value) <= most:
            wants = f"a number from {least:g} to {most:g}"
            raise InvalidRequest(name, f"needs {wants}, got {shown(value)}")
    for name, kind in _LISTS.items():
        value = fields.get(name)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest(name, f"needs a list, got {shown(value)}")


def _number(value: object) -> float:
    """Returns a member as a number; NaN if it is none."""
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", f"needs a list of messages, got {shown(messages)}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest("messages", f"each needs a role, got {shown(message)}")


def _has(fields: Mapping[str, Any], name: str) -> bool:
    """Whether there is any text, or list, or picture, in that member."""
    value = fields.get(name)
    return isinstance(value, str | list | dict | np.ndarray) and len(value) > 0


TRANSFER = "kv_transfer_params"
"""Member by which vLLM takes ids, and is told how KV travels."""
_VLLM_TAKES_IDS = (0, 32)
_VERSION = re.compile(r"(\d+)\.(\d+)")


@lru_cache(maxsize=256)
def ids_field(api: Api, engine: str) -> str:
    """Returns the member in which an engine takes ids that were rendered here; "" if none. engine:
    kind and version."""
    kind, _, version = engine.partition(" ")
    if kind == "openai":
        return ""  # of the API, only text is sure
    if api is Api.COMPLETIONS:
        return "prompt"
    if kind == "sglang":
        return "input_ids" if api is Api.CHAT else ""
    if kind.startswith("kvroute"):
        return TRANSFER
    if kind == "vllm":
        match = _VERSION.match(version)
        if match and (int(match[1]), int(match[2])) >= _VLLM_TAKES_IDS:
            return TRANSFER
    return ""


def returns_ids(engine: str) -> bool:
    """Whether an engine's events name the ids of their tokens if `return_token_ids` asks for
    them."""
    return engine.startswith(("vllm", "kvroute"))
