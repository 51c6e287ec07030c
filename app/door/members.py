"""What of a client's request goes on to an engine, and what of the engine's answer comes back.

Members go on, but for those that only routers may set: clients are ahead of routers and of engines,
which ignore what they do not know. Those are of vLLM 0.11 to 0.33 (entrypoints/openai/protocol.py
and its successors) and SGLang 0.5 (srt/entrypoints/openai/protocol.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from app.core.errors import InvalidRequest, cut
from app.http.json_body import JsonBody

SHOWN_BYTES = 4096
"""Of a member that is refused, before what is shown of it is made."""

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
an adapter that it may not ask for, or run a template or code of its own."""
_LIKE_ROUTERS_ONLY = re.compile(
    r"transfer|bootstrap|embeds|dp_rank|priority|processor|(\A|_)lora|chat_template\Z"
)
"""Names of what engines may have for routers in another release."""
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
_DROPPED_OF_ANSWERS = _HOP_BY_HOP | {
    b"content-length",
    b"server",
    b"date",
    b"x-request-id",
    b"set-cookie",
}
_OURS = b"x-kvroute-"

_NONE: frozenset[bytes] = frozenset()

Headers = Iterable[tuple[bytes, bytes]]


def headers_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Those of a client's headers, in lower case, that engines are given."""
    headers = list(headers)
    named = _named_by_connection(headers)
    return [
        (name, value)
        for name, value in headers
        if (name in _TO_ENGINES or name.startswith(_CLIENT_LIBRARY_HEADERS)) and name not in named
    ]


def headers_back(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Those of an engine's headers, in lower case, that its client gets."""
    headers = list(headers)
    named = _named_by_connection(headers) | _DROPPED_OF_ANSWERS
    return [
        (name, value) for name, value in headers if name not in named and not name.startswith(_OURS)
    ]


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Headers of this connection alone."""
    values = [value for name, value in headers if name == b"connection"]
    if not values:
        return _NONE
    return frozenset(name.strip().lower() for value in values for name in value.split(b","))
