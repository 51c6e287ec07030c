"""A stream that goes on at another worker when its own has failed. No I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np
import orjson

from app.core.worker_report import WorkerInfo
from app.door import blame
from app.door.answer.events import (
    DONE,
    FAILURES,
    Events,
    events_in,
    fields_of,
    first_end,
    reasons_in,
    said_in,
    tells_error,
    tokens_in,
    usage_in,
)
from app.door.answer.stream import Stream
from app.door.answer_request import AnswerRequest, Api, ids_field, returns_ids
from app.door.prompts.prompts import PromptIds

_CONTINUABLE = frozenset(
    (
        *("model", "messages", "prompt", "stream", "stream_options"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop_token_ids"),
        *("temperature", "top_p", "top_k", "min_p", "logit_bias", "repetition_penalty"),
        *("add_special_tokens", "add_generation_prompt", "chat_template_kwargs", "documents"),
        *("reasoning_effort", "skip_special_tokens", "spaces_between_special_tokens"),
        *("user", "session_id", "prompt_cache_key", "cache_salt", "safety_identifier"),
        *("metadata", "store", "service_tier", "modalities"),
    )
)
"""Members of a body with which a worker that gets the tokens so far as its prompt says what the
first one would have. Of others nobody knows: stop strings, grammars, tool calls, seeds and log
probabilities have a state that tokens do not show; penalties for presence and frequency count the
tokens of the answer alone."""
_COUNTS = ("max_tokens", "max_completion_tokens", "min_tokens")
_IDS = re.compile(rb'"(prompt_)?token_ids"\s*:\s*\[([\d,\s]*)\]')
_IDS_BEGIN, _PLAIN_IDS = b'token_ids":[', re.compile(rb'"token_ids":\[[\d,]*\]')
"""Ids as vLLM writes them; events that have ids in other words are looked at one by one."""
_SAYS = re.compile(rb'"(?:content|text)"\s*:\s*"[^"]')
_THINKS = re.compile(rb'"reasoning(?:_content)?"\s*:\s*"[^"]')
_MAX_EVENT_BYTES = 8 * 1024 * 1024
"""One has the ids of the whole prompt."""
_LAST = b"data: [DONE]\n\n"


def can_migrate(
    asked: AnswerRequest, fields: Mapping[str, Any], ids: PromptIds, workers: Iterable[WorkerInfo]
) -> bool:
    """Whether the answer to a request with the members `fields` can go on at another of `workers`
    than the one where it began."""
    if not asked.streams or asked.api not in (Api.CHAT, Api.COMPLETIONS) or ids.ids is None:
        return False
    others = {
        name
        for name, value in fields.items()
        if name not in _CONTINUABLE and (isinstance(value, np.ndarray) or value)
    }
    if fields.get("tool_choice") == "none":
        others -= {"tools", "tool_choice"}
    if fields.get("n") == 1:
        others -= {"n"}
    if any(type(fields[name]) is not int for name in _COUNTS if fields.get(name) is not None):
        return False
    options = fields.get("stream_options") or {}
    return (
        not others
        and not options.keys() - {"include_usage"}
        and all(
            ids_field(asked.api, worker.engine) and returns_ids(worker.engine) for worker in workers
        )
    )


def _are_ids(ids: object) -> TypeGuard[list[int]]:
    return type(ids) is list and {*map(type, ids)} == {int} and 0 <= min(ids) <= max(ids) < 2**32


class Migrating:
    """The events of a stream as its client sees them: as if one worker said them all.

    prompt_tokens: length of the prompt.
    """

    def __init__(self, *, prompt_tokens: int, drops_usage: bool, says_end: bool = True) -> None:
        self.output: list[int] = []
        """The tokens whose text was passed on. A half character is not: engines that get one as the
        end of a prompt do not say its other half alone."""
        self.has_first_token = False
        """Whether the worker that says the rest has begun."""
        self.is_finished = False
        """Whether the last token is among them."""
        self._broken = ""
        self._is_refused = False
        """Whether it said that the client is at fault."""
        self._untold: list[int] = []
        """The tokens behind `output`."""
        self._is_known = True
        self._names_none = False
        """Whether the engine says text without its ids: nobody could go on."""
        self._thinks = False
        self._before = 0
        """How many tokens other workers said."""
        self._is_continued = False
        self._prompt_tokens = prompt_tokens
        self._stream = Stream(drops_usage=drops_usage, says_end=says_end)
        self._frame: dict[str, Any] = {}
        self._events = Events(_MAX_EVENT_BYTES)

    @property
    def can_go_on(self) -> bool:
        """Not in the midst of thoughts: the parser of another worker would take the rest of them
        for what it is to say."""
        return self._is_known and not self._thinks and not self.is_finished

    @property
    def num_said(self) -> int:
        return max(self._stream.num_said, len(self.output) + len(self._untold))

    @property
    def broken(self) -> str:
        """How the worker failed, if it said so; its event is not passed on."""
        return self._broken or self._stream.broken

    @property
    def error(self) -> bytes:
        return self._stream.error

    @property
    def has_ended(self) -> bool:
        return self.is_finished or self._stream.has_ended

    @property
    def tail(self) -> bytes:
        return self._stream.tail

    start = b""

    def goes_on(self) -> None:
        """Lets another worker say the rest."""
        self._before = len(self.output)
        self._is_continued = bool(self._frame)
        self._events = Events(_MAX_EVENT_BYTES)
        self._untold = []
        self.has_first_token = False
        self._broken = ""

    def passed(self, piece: bytes) -> bytes:
        """Returns what is to be passed on once `piece` has come."""
        are_whole = not self._events.held and piece.endswith(b"\n\n")
        text = piece if are_whole else self._events.whole(piece)
        if not text.endswith((b"\n\n", b"\n\r\n")):
            self._is_known = self._is_known and not text
            return self._stream.passed(text)
        if self._names_none:
            passed = self._stream.passed(text)
            self.is_finished = self._stream.is_finished
            return passed
        if passed := self._of_tokens(text):
            return passed
        begin = 0 if self._frame else len(next(events_in(text)))
        passed = self._by_event(text[:begin])
        end = first_end(text)
        cut = len(text) if end < 0 else max(begin, text.rfind(b"\n\n", begin, end) + 2)
        told = self._of_tokens(text[begin:cut])
        return passed + told + self._by_event(text[cut if told else begin :])

    def _by_event(self, events: bytes) -> bytes:
        passed = b""
        for event in events_in(events):
            if self.broken:
                break
            passed += self._stream.passed(self._passed(event))
        return passed

    def _of_tokens(self, events: bytes) -> bytes:
        """Returns events as they are passed on that say text and its ids, in the midst of the first
        worker's answer, and nothing else; b"": some may be others."""
        if not self._frame or self._is_continued or self.broken or not events:
            return b""
        if (told := tokens_in(events)) is None or events.count(_IDS_BEGIN) != len(told):
            return b""
        output = self._untold.copy()
        for choice in told:
            (says, thinks), ids = said_in(choice), choice.get("token_ids")
            if not says or thinks or not _are_ids(ids):
                return b""
            output += ids
        self.has_first_token, self._thinks = True, False
        self._stream.num_said += len(told)
        self.output += output
        self._untold = []
        return _PLAIN_IDS.sub(b'"token_ids":null', events)

    def rest(self) -> bytes:
        """Returns what is left when the answer has ended."""
        return self._stream.passed(self._events.rest()) + self._stream.rest()

    def ending(self) -> bytes:
        """Returns the end of an answer whose worker failed after the last token."""
        if usage_in(self.tail) is not None:
            return _LAST
        num_output = len(self.output) + len(self._untold)
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": num_output}
        usage = counts | {"total_tokens": self._prompt_tokens + num_output}
        last = orjson.dumps(self._frame | {"choices": [], "usage": usage})
        return self._stream.passed(b"data: " + last + b"\n\n" + _LAST)

    def _passed(self, event: bytes) -> bytes:
        reasons = reasons_in(event)
        if self.can_go_on and (broken := self._broken_by(event, reasons.values())):
            self._broken = broken
            return b""
        self.has_first_token = self.has_first_token or event.startswith(b"data:")
        lists = [match[2] for match in _IDS.finditer(event) if not match[1]]
        try:
            ids = [int(number) for one in lists for number in one.split(b",") if number.strip()]
        except ValueError:
            lists, ids = [], []
        self._untold += ids
        self._is_known = self._is_known and max(ids, default=0) < 2**32
        says, thinks = _SAYS.search(event), _THINKS.search(event)
        if says or thinks:
            self._is_known = self._is_known and bool(lists)
            self._names_none |= not (lists or self.output or self._is_continued)
            self._thinks = thinks is not None
            self.output += self._untold
            self._untold = []
        self.is_finished = self.is_finished or bool(reasons)
        event = _IDS.sub(rb'"\1token_ids":null', event)
        if not self._frame:
            fields = fields_of(event) or {}
            self._frame = {
                name: fields[name]
                for name in ("id", "object", "created", "model")
                if isinstance(fields.get(name), str | int)
            }
        if not self._is_continued:
            return event
        try:
            return self._continued(event)
        except (AttributeError, KeyError, TypeError):  # no event as engines have them
            return event

    def _continued(self, event: bytes) -> bytes:
        """Returns an event of a later worker as part of the first one's answer."""
        fields = fields_of(event) or {}
        choices, usage = fields.get("choices"), fields.get("usage")
        if choices is None:
            return event
        for choice in choices:
            delta = choice.get("delta", {})
            delta.pop("role", None)
            contents = (choice.get("text"), choice.get("finish_reason"), *delta.values())
            if not any(contents):
                return b""
        if usage:
            usage["prompt_tokens"] -= self._before
            usage["completion_tokens"] += self._before
            details = usage.get("prompt_tokens_details") or {}
            if details.get("cached_tokens"):
                details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
        return b"data: " + orjson.dumps(fields | self._frame) + b"\n\n"

    def _broken_by(self, event: bytes, reasons: Collection[str]) -> str:
        """Returns how an answer that has not come to its end breaks off by an event; "": it does
        not, or by the client's own fault."""
        if tells_error(event):
            self._is_refused = True
            return blame.ERROR_EVENT if blame.of_event(event) is not None else ""
        if not FAILURES.isdisjoint(reasons):
            return blame.ABORTED
        return blame.CUT if DONE.search(event) and not self._is_refused else ""
