"""Members and headers that go on to an engine, and headers that come back.

Members go on, but for those that only routers may set: clients are ahead of routers and of engines,
which ignore what they do not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import numpy as np

from app.core.errors import InvalidRequest, cut
from app.core.worker_report import WorkerInfo
from app.door.answer.events import MAX_TOKENS
from app.door.answer.migration import Migrating
from app.door.answer.stream import Stream
from app.door.answer_request import (
    DEFAULT_COMPLETION_TOKENS,
    TRANSFER,
    AnswerRequest,
    Api,
    ids_field,
)
from app.door.prompts.prompts import PromptIds
from app.http.json_body import JsonBody

_NOTHING: Mapping[str, object] = MappingProxyType({})
_ADDED = ("stream_options", "return_token_ids")
_SAY_END = (Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES)
_USAGE_ASKED_FOR = (Api.CHAT, Api.COMPLETIONS)
"""Others tell their usage unasked."""
Headers = Sequence[tuple[bytes, bytes]]


class Recipient(Protocol):
    """The client of an answer. Each method raises ClientStalled if the client takes nothing for too
    long, and all but `send` WorkerFailed if a stream has begun that the answer cannot be."""

    async def start(self, status: int, headers: Headers) -> None: ...

    async def send(self, piece: bytes, *, last: bool = False) -> None: ...

    def offer(self, piece: bytes) -> bool:
        """Sends a piece at once. Returns whether the client keeps up: if it does not, `taken` is to
        be awaited before the next piece."""

    async def taken(self) -> None: ...

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a whole answer. headers: but for its length."""

    async def refuse(self, status: int, headers: Headers, body: bytes, by: WorkerInfo) -> None:
        """Sends an error, as the engine of a worker tells it."""


def renamed(asked_for: object, model: str) -> dict[str, object]:
    """Returns the change to a body that names a model by an alias, which engines do not know."""
    return {} if asked_for in (None, model) else {"model": model}


@dataclass(slots=True)
class Outgoing:
    """One request as each kind of engine takes it. model: its name at engines. can_migrate: the
    answer names the ids of its tokens, so that another worker can go on with it."""

    body: JsonBody
    asked: AnswerRequest
    ids: PromptIds
    model: str
    can_migrate: bool = False
    _output: Sequence[int] = ()
    _made: dict[tuple[str, frozenset[str]], bytes] = field(default_factory=dict)

    def parser(self) -> Stream | Migrating:
        """Returns what follows the stream that answers the request."""
        drops_usage = not self.asked.wants_usage
        says_end = self.asked.api in _SAY_END
        if not self.can_migrate:
            return Stream(
                drops_usage=drops_usage, says_end=says_end, num_choices=self.asked.num_choices
            )
        return Migrating(
            prompt_tokens=self.ids.num_tokens, drops_usage=drops_usage, says_end=says_end
        )

    def most_tokens(self, worker: WorkerInfo) -> int:
        """Returns the tokens that an answer can have: the worker's context for each choice."""
        return min(MAX_TOKENS, (worker.max_model_len or MAX_TOKENS) * self.asked.num_choices)

    def goes_on(self, output: Sequence[int]) -> bool:
        """Asks from now on for what comes behind `output`. Returns whether anything may."""
        self._output = output
        self._made.clear()
        limit = self._limit()
        return limit is None or limit[1] > len(output)

    def for_source(self, worker: WorkerInfo, params: Mapping[str, object]) -> bytes:
        """Returns the body for a worker that keeps the prompt's KV for another, as `params` say: it
        asks for one token."""
        changes = self._ids_for(self._field_for(worker), params)
        changes |= renamed(self.asked.model, self.model)
        changes |= {"max_tokens": 1, "stream": False}
        if self.body.fields.get("max_completion_tokens") is not None:
            changes["max_completion_tokens"] = 1
        return self.body.changed(changes, without=("stream_options", "min_tokens"))

    def for_worker(
        self,
        worker: WorkerInfo,
        params: Mapping[str, object] = _NOTHING,
        members: Mapping[str, object] = _NOTHING,
        without: frozenset[str] = frozenset(),
    ) -> bytes:
        """Returns the body for a worker. params: what it fetches. members: more members. without:
        members that are added here otherwise, and that its engine refuses."""
        field_name = self._field_for(worker)
        field_name = "" if field_name in without else field_name
        if params or members:
            return self._make(field_name, params, members, without)
        body = self._made.get((field_name, without))
        if body is None:
            body = self._make(field_name, params, members, without)
            self._made[field_name, without] = body
        return body

    def named_in(self, words: bytes, worker: WorkerInfo) -> frozenset[str]:
        """Returns the members added for a worker that an engine's words name. Ids of the answer so
        far are never among them."""
        ids = "" if self._output else self._field_for(worker)
        words = words.replace(b"prompt_token_ids", TRANSFER.encode())  # which have them in it
        added = filter(None, (*_ADDED, ids))
        return frozenset(name for name in added if re.search(rb"\b%b\b" % name.encode(), words))

    def _field_for(self, worker: WorkerInfo) -> str:
        are_sent = self.ids.are_sent or bool(self._output)
        return ids_field(self.asked.api, worker.engine) if are_sent else ""

    def _ids_for(self, field_name: str, params: Mapping[str, object]) -> dict[str, object]:
        ids = self.ids.ids
        if field_name and self._output:
            ids = [*np.asarray(ids).tolist(), *self._output]
        if field_name == TRANSFER:
            params = {**params, "prompt_token_ids": ids}
        changes: dict[str, object] = {TRANSFER: dict(params)} if params else {}
        if field_name and field_name != TRANSFER:
            changes[field_name] = ids
        return changes

    def _make(
        self,
        field_name: str,
        params: Mapping[str, object],
        members: Mapping[str, object],
        without: frozenset[str],
    ) -> bytes:
        changes = {**self._ids_for(field_name, params), **members}
        changes |= renamed(self.asked.model, self.model)
        adds_usage = self.asked.streams and not self.asked.wants_usage
        if adds_usage and self.asked.api in _USAGE_ASKED_FOR and "stream_options" not in without:
            options = self.body.fields.get("stream_options") or {}
            changes["stream_options"] = {**options, "include_usage": True}
        if self.can_migrate and "return_token_ids" not in without:
            changes["return_token_ids"] = True
        if self._output:
            limit, least = self._limit(), self.body.fields.get("min_tokens")
            if limit is not None:
                changes[limit[0]] = limit[1] - len(self._output)
            if least:
                changes["min_tokens"] = max(0, least - len(self._output))
        return self.body.changed(changes)

    def _limit(self) -> tuple[str, int] | None:
        """Returns the member that limits the tokens of the answer, and its value."""
        for name in ("max_completion_tokens", "max_tokens"):
            if self.body.fields.get(name) is not None:
                return name, self.body.fields[name]
        if self.asked.api is Api.COMPLETIONS:
            return "max_tokens", DEFAULT_COMPLETION_TOKENS
        return None


SHOWN_BYTES = 4096
"""Bytes of a refused member that are decoded to be shown."""

ONLY_ROUTERS = frozenset(
    (
        # The state of a prompt: whose it is and where.
        *("kv_transfer_params", "ec_transfer_params", "session_params", "extra_key", "rid"),
        # A prompt in another form than the one that is routed by.
        *("prompt_token_ids", "input_ids", "input_embeds", "prompt_embeds"),
        # Which engine, and when.
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
        *("routed_dp_rank", "data_parallel_rank", "priority", "request_id"),
        # Another model, or code.
        *("lora_path", "lora_request", "chat_template", "custom_logit_processor"),
        "logits_processors",
    )
)
"""Members by which a client could read what others cached, choose its engine, overtake others, use
an adapter that it may not ask for, or run a template or code of its own. They are of vLLM 0.11 to
0.33 (entrypoints/openai/protocol.py and its successors) and SGLang 0.5
(srt/entrypoints/openai/protocol.py)."""
_LIKE_ROUTERS_ONLY = re.compile(
    r"transfer|bootstrap|embeds|dp_rank|priority|processor|(\A|_)lora|chat_template\Z"
)
"""Names that engines of another release may have for routers alone."""
_INSIDE: Mapping[str, frozenset[str]] = {
    "chat_template_kwargs": frozenset(("chat_template", "tokenize")),
    "vllm_xargs": ONLY_ROUTERS | {"kv_cache_report_mode"},
    "custom_params": ONLY_ROUTERS,
    "mm_processor_kwargs": frozenset(),
}
"""Members that are objects, and what they may not contain: engines take it for their own."""


def check(body: JsonBody) -> None:
    """Raises InvalidRequest if a member of the body may not go on to an engine."""
    for name, member in body.members.items():
        if name in ONLY_ROUTERS or (
            name not in _INSIDE and _LIKE_ROUTERS_ONLY.search(name.lower())
        ):
            if (text := bytes(member)) != b"null":
                raise InvalidRequest(cut(name), f"may only be set by a router, got {_shown(text)}")
        elif name in _INSIDE:
            _check_inside(name, bytes(member))
    # As it stands, or with letters escaped.
    if b"uuid" in body.text or rb"\u006" in body.text or rb"\u007" in body.text:
        for name, value in body.fields.items():
            if _names_media(value):
                raise InvalidRequest(name, "uuid of a part may only be set by a router")


def _names_media(value: object) -> bool:
    """Whether a part of a message has a `uuid`. vLLM knows an image, and all KV behind it, by that
    alone: a client that names another one's gets what that one has sent."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict) and isinstance(parts := value.get("content"), list):
            left += parts
            if any(isinstance(part, dict) and part.get("uuid") is not None for part in parts):
                return True
    return False


def _shown(text: bytes) -> str:
    return cut(text[:SHOWN_BYTES].decode(errors="replace"))


def _check_inside(name: str, text: bytes) -> None:
    if not text.startswith(b"{"):
        return
    try:
        inside = JsonBody.parse(text)
    except InvalidRequest as error:
        raise InvalidRequest(name, str(error)) from None
    for refused in sorted(_INSIDE[name] & inside.members.keys()):
        raise InvalidRequest(name, f"{refused} may only be set by a router")


_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
    )
)
_TO_ENGINES = frozenset(
    (
        *(b"accept", b"accept-language", b"user-agent", b"anthropic-version", b"anthropic-beta"),
        *(b"openai-organization", b"openai-project", b"openai-beta"),
        *(b"x-forwarded-for", b"x-forwarded-proto", b"x-real-ip", b"forwarded"),
        *(b"x-session-id", b"x-correlation-id", b"baggage"),
    )
)
"""Engines obey some headers (X-Vllm-Priority, X-Data-Parallel-Rank), so that only these go on."""
_CLIENT_LIBRARY_HEADERS = b"x-stainless-"
_DROPPED_HEADERS = _HOP_BY_HOP | {
    b"content-length",
    b"server",
    b"date",
    b"x-request-id",
    b"set-cookie",
}
_OURS = b"x-kvroute-"


def headers_for_engine(
    headers: Headers, request_id: str, worker_key: str, kind: bytes = b"application/json"
) -> list[tuple[bytes, bytes]]:
    """Returns a client's headers as they go on, with a router's own. headers: names in lower case.
    kind: of the body."""
    named = _named_by_connection(headers)
    sent = [
        (name, value)
        for name, value in headers
        if (name in _TO_ENGINES or name.startswith(_CLIENT_LIBRARY_HEADERS)) and name not in named
    ]
    sent += [(b"content-type", kind), (b"x-request-id", request_id.encode())]
    if worker_key:
        sent.append((b"authorization", b"Bearer " + worker_key.encode()))
    return sent


def headers_back(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Returns those of an engine's headers that its client gets. headers: names in lower case."""
    named = _named_by_connection(headers) | _DROPPED_HEADERS
    return [
        (name, value) for name, value in headers if name not in named and not name.startswith(_OURS)
    ]


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Returns the names of headers that are of one connection alone."""
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(name.strip().lower() for value in values for name in value.split(b","))
