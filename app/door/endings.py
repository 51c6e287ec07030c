"""Why an engine's answer ends: the reason of each of its choices, in each dialect. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ABORTED, CUT = "aborted", "cut"
"""How an answer fails at its end: by a reason that is a failure, or as it ends without one."""
FAILURES = frozenset(("abort", "aborted", "cancelled", "canceled", "error", "failed"))
"""Reasons that are none of the request's: the engine shut down, was paused, or gave it up."""
ABORTS = re.compile(
    rb'"(?:finish_reason|stop_reason|status|type|reason)"\s*:\s*"(?:%b)"'
    % "|".join(sorted(FAILURES)).encode()
)
"""What is in each whole answer with such a reason. Texts may have it, too."""
MAY_END = re.compile(
    rb'"(?:finish|stop)_reason"\s*:\s*["{]|data:\s*\[DONE\]'
    rb'|"type"\s*:\s*"(?:message_stop|response\.(?:completed|incomplete|cancelled))"'
)
"""What is in each event with a reason, or behind the last one. Texts may have it, too."""
_RESPONSE_ENDINGS = ("response.completed", "response.incomplete", "response.cancelled")


def reasons_of(fields: Mapping[str, Any]) -> dict[int, str]:
    """Returns the reason of each choice that ends with an event, or with a whole answer, by the
    choice's number. A choice that goes on has none; nor has one whose reason is empty."""
    choices = fields.get("choices")
    if isinstance(choices, list):
        reasons = {}
        for at, choice in enumerate(choices):
            reason = choice.get("finish_reason") if isinstance(choice, dict) else None
            if isinstance(reason, dict):  # as SGLang names it on its own path
                reason = reason.get("type")
            if reason:
                reasons[choice.get("index", at)] = str(reason)
        return reasons
    kind, response = fields.get("type"), fields.get("response")
    if fields.get("object") == "response":
        response = fields
    elif kind not in _RESPONSE_ENDINGS:
        told = fields.get("delta") if kind == "message_delta" else fields
        reason = told.get("stop_reason") if isinstance(told, dict) else None
        return {0: str(reason)} if kind in ("message", "message_delta") and reason else {}
    response = response if isinstance(response, dict) else {}
    details, status = response.get("incomplete_details"), response.get("status")
    if status == "incomplete" and isinstance(details, dict):
        status = details.get("reason") or status
    return {0: str(status or kind).removeprefix("response.")}
