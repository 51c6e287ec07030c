"""What goes to an engine: the client's own members, but for the few that change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from app.core.worker_report import WorkerInfo
from app.door import members
from app.door.asked import DEFAULT_COMPLETION_TOKENS, AnswerRequest, Api
from app.door.engines import TRANSFER, ids_field
from app.door.members import Headers
from app.door.migration import Migrating
from app.door.prompts import PromptIds
from app.door.stream import MAX_TOKENS, Stream, Whole
from app.http.json_body import JsonBody

_NOTHING: Mapping[str, object] = MappingProxyType({})
Parser = Stream | Whole | Migrating


def headers_for_engine(
    headers: Headers, request_id: str, worker_key: str, kind: bytes = b"application/json"
) -> list[tuple[bytes, bytes]]:
    """A client's headers as they go on, with our own in place of what is between it and us. kind:
    of the body."""
    sent = members.headers_on(headers)
    sent += [(b"content-type", kind), (b"x-request-id", request_id.encode())]
    if worker_key:
        sent.append((b"authorization", b"Bearer " + worker_key.encode()))
    return sent


def renamed(asked_for: object, model: str) -> dict[str, object]:
    """What of a body changes that names a model by an alias: engines do not know it."""
    return {} if asked_for in (None, model) else {"model": model}


@dataclass(slots=True)
class Outgoing:
    """One request as each kind of engine takes it.

    model: that it is for, as engines know it. can_migrate: its answer names the ids of its tokens,
    so that another worker can go on with it.
    """

    body: JsonBody
    asked: AnswerRequest
    ids: PromptIds
    model: str
    can_migrate: bool = False
    _output: Sequence[int] = ()
    _made: dict[tuple[str, frozenset[str]], bytes] = field(default_factory=dict)

    def parser(self) -> Parser:
        """What sees a stream."""
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
        """That an answer of that worker can count: its context, for each of the texts."""
        return min(MAX_TOKENS, (worker.max_model_len or MAX_TOKENS) * self.asked.num_choices)

    def goes_on(self, output: Sequence[int]) -> bool:
        """From now on ask for what comes behind these tokens of the answer; False: nothing may."""
        self._output = output
        self._made.clear()
        limit = self._limit()
        return limit is None or limit[1] > len(output)

    def for_source(self, worker: WorkerInfo, params: Mapping[str, object]) -> bytes:
        """The body for a worker that keeps the prompt's KV for another, as `params` say: of the
        answer, it asks for one token."""
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
        """The body for an engine of that kind. params: of what it fetches, if it does. members: of
        the body, besides. without: of what is added here, what the engine refuses."""
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
        """Returns which of the members that are added for a worker are named in an engine's words.
        Ids stay that say the answer so far."""
        ids = "" if self._output else self._field_for(worker)
        words = words.replace(b"prompt_token_ids", TRANSFER.encode())  # which have them in it
        added = filter(None, (*_ADDED, ids))
        return frozenset(name for name in added if re.search(rb"\b%b\b" % name.encode(), words))

    def _field_for(self, worker: WorkerInfo) -> str:
        """Where it takes ids, if it is sent any; else ""."""
        are_sent = self.ids.are_sent or bool(self._output)
        return ids_field(self.asked.api, worker.engine) if are_sent else ""

    def _ids_for(self, field_name: str, params: Mapping[str, object]) -> dict[str, object]:
        """The members that name the ids of the prompt and say how its KV travels."""
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
        limit, least = self._limit(), self.body.fields.get("min_tokens")
        if self._output and limit is not None:
            changes[limit[0]] = limit[1] - len(self._output)
        if self._output and least:
            changes["min_tokens"] = max(0, least - len(self._output))
        return self.body.changed(changes)

    def _limit(self) -> tuple[str, int] | None:
        """The member that limits the tokens of the answer, and its value."""
        for name in ("max_completion_tokens", "max_tokens"):
            if self.body.fields.get(name) is not None:
                return name, self.body.fields[name]
        if self.asked.api is Api.COMPLETIONS:
            return "max_tokens", DEFAULT_COMPLETION_TOKENS
        return None


_ADDED = ("stream_options", "return_token_ids")
_SAY_END = (Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES)
_USAGE_ASKED_FOR = (Api.CHAT, Api.COMPLETIONS)
"""Others always say it."""
