"""What of a client's request goes on to an engine, and what of the engine's answer comes back.

The members are those of vLLM 0.11 to 0.33 (entrypoints/openai/protocol.py and its successors) and
SGLang 0.5 (srt/entrypoints/openai/protocol.py). One list is for both: each ignores what only the
other knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from app.core.errors import InvalidRequest, cut
from app.door.asked import RERANKS, SCORES
from app.http.json_body import JsonBody

MAX_UNKNOWN_BYTES = 4096
MAX_UNKNOWN_LISTS = 64
"""Arrays and objects in a member that is not known."""

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
_LIKE_THOSE = re.compile(
    r"transfer|bootstrap|embeds|dp_rank|priority|processor|(\A|_)lora|chat_template\Z"
)
"""Names of what engines may have for routers in another release."""
_INSIDE: Mapping[str, frozenset[str]] = {
    "chat_template_kwargs": frozenset(("chat_template", "tokenize")),
    "vllm_xargs": ONLY_ROUTERS | {"kv_cache_report_mode"},
    "custom_params": ONLY_ROUTERS,
}
"""Members that are objects, and what they may not contain: engines take it for their own."""

_EVERY = ("model", "user", "metadata", "cache_salt", "session_id")
_SAMPLED = (
    *("stream", "temperature", "top_p", "top_k", "tools", "tool_choice", "chat_template_kwargs"),
    *("service_tier", "mm_processor_kwargs", "media_io_kwargs", "prompt_cache_key"),
    *("vllm_xargs", "custom_params", "safety_identifier"),
)
_DECODED = (
    *("stream_options", "max_tokens", "min_tokens", "n", "best_of", "seed", "stop", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty"),
    *("logit_bias", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "ignore_eos"),
    *("stop_token_ids", "allowed_token_ids", "bad_words", "use_beam_search"),
    *("response_format", "structured_outputs", "structural_tag", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern"),
    *("json_schema", "regex", "ebnf", "stop_regex", "truncate_prompt_tokens"),
    *("add_special_tokens", "skip_special_tokens", "spaces_between_special_tokens"),
)
_RENDERED = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "documents"),
    *("chat_template_kwargs", "add_special_tokens", "reasoning_effort", "mm_processor_kwargs"),
)
_CHAT = (
    *_SAMPLED,
    *_DECODED,
    *_RENDERED,
    *("max_completion_tokens", "parallel_tool_calls", "functions", "function_call", "prediction"),
    *("modalities", "audio", "web_search_options", "store", "include_reasoning", "verbosity"),
)
_MESSAGES = (
    *_SAMPLED,
    *("messages", "system", "max_tokens", "stop_sequences", "thinking", "output_config"),
    *("context_management", "mcp_servers", "container"),
)
_SCORED = ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2")
PASSES: Mapping[str, frozenset[str]] = {
    "/v1/chat/completions": frozenset((*_EVERY, *_CHAT)),
    "/v1/completions": frozenset((*_EVERY, *_SAMPLED, *_DECODED, "prompt", "suffix")),
    "/v1/embeddings": frozenset((*_EVERY, *_RENDERED, "input", "encoding_format", "dimensions")),
    "/v1/messages": frozenset((*_EVERY, *_MESSAGES)),
    "/v1/messages/count_tokens": frozenset((*_EVERY, *_MESSAGES)),
    "/v1/responses": frozenset(
        (
            *(*_EVERY, *_SAMPLED, *_DECODED, "input", "instructions", "max_output_tokens"),
            *("include", "reasoning", "text", "prompt", "parallel_tool_calls", "max_tool_calls"),
            *("store", "truncation", "previous_input_messages"),
            *("previous_response_id", "conversation", "background", "client_metadata"),
        )
    ),
    **dict.fromkeys(RERANKS, frozenset((*_EVERY, "query", "documents", "mm_processor_kwargs"))),
    **dict.fromkeys(SCORES, frozenset((*_EVERY, *_SCORED, "mm_processor_kwargs"))),
    "/tokenize": frozenset((*_EVERY, *_RENDERED, "prompt")),
    "/detokenize": frozenset((*_EVERY, "tokens")),
}
"""Path -> members that engines are given whatever their size. All others must be small."""


def check(path: str, body: JsonBody) -> None:
    """Raises InvalidRequest if a member of the body at `path` may not go on to an engine."""
    passes = PASSES[path]
    for name, member in body.members.items():
        text = bytes(member)
        if name in ONLY_ROUTERS or (name not in passes and _LIKE_THOSE.search(name.lower())):
            if text != b"null":
                raise InvalidRequest(cut(name), f"may only be set by a router, got {_shown(text)}")
        elif name not in passes:
            _check_small(name, text)
        elif name in _INSIDE:
            _check_inside(name, text)


def _shown(text: bytes) -> str:
    return cut(text[:MAX_UNKNOWN_BYTES].decode(errors="replace"))


def _check_small(name: str, text: bytes) -> None:
    if len(text) > MAX_UNKNOWN_BYTES or text.count(b"[") + text.count(b"{") > MAX_UNKNOWN_LISTS:
        raise InvalidRequest(
            cut(name), f"is not known, and has over {MAX_UNKNOWN_BYTES} bytes or many arrays"
        )


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
_SAYS_WHO = b"x-stainless-"
_NOT_BACK = _HOP_BY_HOP | {b"content-length", b"server", b"date", b"x-request-id", b"set-cookie"}
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
        if (name in _TO_ENGINES or name.startswith(_SAYS_WHO)) and name not in named
    ]


def headers_back(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Those of an engine's headers, in lower case, that its client gets."""
    headers = list(headers)
    named = _named_by_connection(headers) | _NOT_BACK
    return [
        (name, value) for name, value in headers if name not in named and not name.startswith(_OURS)
    ]


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Headers of this connection alone."""
    values = [value for name, value in headers if name == b"connection"]
    if not values:
        return _NONE
    return frozenset(name.strip().lower() for value in values for name in value.split(b","))
