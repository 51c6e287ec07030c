"""Words in which engines say what is wrong, in whichever form. No I/O."""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import orjson

from app.core.errors import cut, printable, without_values
from app.core.pace import Pace
from app.door.answer.events import events_in, fields_of, tells_error
from app.http.json_body import JsonBody

MAX_WORDS = 200
"""Characters that logs have."""
MAX_TEXT = 400
"""Characters that are looked at: engines may repeat the whole request."""
MAX_SAID_BYTES = 16 * 1024
REPEATED = 10
"""Characters that are a request's own words if they come in it, too."""
MAX_COMPARED = 64 * 2**20
"""Bytes: a tenth of a second."""
MAX_KNOWN = 200
OMITTED = "…"
_LOCATION = re.compile(r"'loc': [(\[]([^)\]]*)")
_SAYS = re.compile(r"'msg': (?:'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\")")
_NAME = re.compile(r"'([^']*)'")
_INPUT = re.compile(r"""(?s)['"]?\binput['"]?\s*[:=].*""")
"""Matches what pydantic repeats of a request."""
_IDS = re.compile(r"\d+(?:\s*,\s*\d+){3,}(?:\s*,?\s*\.\.\.)?")
_WORD = re.compile(r"\S+")


class Cause(NamedTuple):
    """message: for the client, whose own values it may repeat."""

    message: str
    field: str | None = None
    code: str = ""


def cause_in(body: bytes) -> Cause | None:
    """Returns what the body of an answer says is wrong; None if it has no known form."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return _cause(answer) if isinstance(answer, dict) else None


def _cause(answer: dict[str, Any]) -> Cause | None:
    response = answer.get("response")
    if isinstance(response, dict) and response.get("error"):
        answer = response
    error = answer.get("error") or answer.get("detail", answer)
    if isinstance(error, list):  # as FastAPI lists what is invalid
        return _invalid(str(error[:1]))
    if isinstance(error, str):
        return Cause(error)
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    return Cause(
        _plain(error["message"]).message,
        _text(error.get("param") or error.get("field")) or _plain(error["message"]).field,
        _text(error.get("code")) or "",
    )


def _text(value: Any) -> str | None:
    return cut(value) if isinstance(value, str) else None


def _plain(message: str) -> Cause:
    return _invalid(message) if _LOCATION.search(message) else Cause(message)


def _invalid(listed: str) -> Cause:
    says, location = _SAYS.search(listed), _LOCATION.search(listed)
    message = (says[1] or says[2] or "") if says else listed
    names = _NAME.findall(location[1]) if location else []
    field = next((name for name in names if name != "body"), None)
    return Cause(f"{field}: {message}" if field else message, field)


class EngineWords:
    """Engines' words as logs may have them: a line, with nothing of the request in it.

    To look for what they repeat takes a millisecond for each MiB of a request. Words that were
    found to repeat nothing are kept; past MAX_COMPARED a second, new ones are left out.
    """

    def __init__(self) -> None:
        self._own: OrderedDict[bytes, str] = OrderedDict()
        self._compared = Pace(MAX_COMPARED)

    def of(self, said: bytes, asked: JsonBody) -> str:
        """Returns words as logs may have them; "" if there are none, or too many. said: the body of
        an answer, or events."""
        if len(said) > MAX_SAID_BYTES:
            return ""
        words = self._own.get(said)
        if words is not None:
            self._own.move_to_end(said)
            return words
        text = _text_of(said)
        values = _values(asked)
        if not self._compared.allows(time.monotonic(), len(values) * (1 + text.count(" "))):
            return ""
        kept = _without_repeated(text, values)
        words = cut(printable(kept), MAX_WORDS)
        if kept == text:
            self._own[said] = words
            if len(self._own) > MAX_KNOWN:
                self._own.popitem(last=False)
        return words


def _text_of(said: bytes) -> str:
    cause = cause_in(said)
    if cause is None:
        for event in events_in(said):
            if tells_error(event) and (fields := fields_of(event)) is not None:
                cause = _cause(fields)
    text = cause.message if cause is not None else said.decode(errors="replace")
    text = without_values(" ".join(text[:MAX_TEXT].split()))
    return _IDS.sub(OMITTED, _INPUT.sub(OMITTED, text))


def _values(asked: JsonBody) -> bytes:
    return b"\n".join(bytes(value) for name, value in asked.members.items() if name != "model")


def _without_repeated(text: str, values: bytes) -> str:
    """Returns `text` without what `values` have, too, from the beginning of a word on."""
    kept, at = [], 0
    for word in _WORD.finditer(text):
        if word.start() < at:
            continue
        length = _num_repeated(text, word.start(), values)
        if length:
            kept += [text[at : word.start()], OMITTED]
            at = word.start() + length
    return "".join([*kept, text[at:]])


def _num_repeated(text: str, at: int, values: bytes) -> int:
    """Returns how many characters from `at` come in `values`, as JSON may write them; 0: too few to
    tell."""
    if at + REPEATED > len(text) or not _comes_in(text[at : at + REPEATED], values):
        return 0
    least, most = REPEATED, len(text) - at
    while least < most:
        middle = (least + most + 1) // 2
        if _comes_in(text[at : at + middle], values):
            least = middle
        else:
            most = middle - 1
    return least


def _comes_in(part: str, values: bytes) -> bool:
    spelled = {json.dumps(part), json.dumps(part, ensure_ascii=False)}
    return any(text[1:-1].encode(errors="surrogatepass") in values for text in spelled)
