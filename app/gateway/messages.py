"""Messages between an endpoint picker and a gateway: Envoy's ext_proc, protocol 1.0.0 of the
Gateway API Inference Extension. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct

from app.gateway import ext_proc

Request = Any
"""A ProcessingRequest. What makes these has no types."""
Response = Any
_said = ext_proc.ProcessingResponse
Headers = Sequence[tuple[bytes, bytes]]

ENDPOINT = "x-gateway-destination-endpoint"
"""Header with the endpoints of a request, `ip:port`, separated by commas: the next is tried if one
is not reached."""
SERVED = "x-gateway-destination-endpoint-served"
"""Metadata with the endpoint that has answered."""
SUBSET = "x-gateway-destination-endpoint-subset"
"""Metadata with the endpoints to which a gateway confines a request."""
TEST_SELECTION = b"test-epp-endpoint-selection"
LB, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"
"""Namespaces of metadata."""
CHUNK_BYTES = 62_000
"""Gateways take no longer pieces of a body than 64 kB."""

NONE, STREAMED, FULL_DUPLEX_STREAMED = map(
    ext_proc.BODY_MODES.index, ("NONE", "STREAMED", "FULL_DUPLEX_STREAMED")
)
"""Ways in which bodies pass a picker."""
MAX_HEAD_BYTES = 128 * 1024
"""Size of a message without a body: its headers, metadata and attributes are looked at one by
one."""
_BODIES = ("request_body", "response_body")


def parsed(text: bytes) -> Request | None:
    """Returns what a gateway says, or None if it is none of the protocol, or too long."""
    is_long = len(text) > MAX_HEAD_BYTES
    # Bodies are the fields 4 and 5: what begins with another one is not even parsed.
    if is_long and text[0] >> 3 not in (4, 5):
        return None
    try:
        said = ext_proc.ProcessingRequest.FromString(text)
    except DecodeError:
        return None
    return None if is_long and not any(map(said.HasField, _BODIES)) else said


def headers_of(headers: Any) -> list[tuple[bytes, bytes]]:
    """Returns all headers, pseudo-headers included. A gateway fills in one of two fields."""
    return [
        (header.key.lower().encode(), header.raw_value or header.value.encode())
        for header in headers.headers
    ]


def metadata_in(request: Request, namespace: str, name: str) -> str | None:
    """Returns metadata as text, or None if the request has none. Lists are joined by commas."""
    found = request.metadata_context.filter_metadata.get(namespace)
    if found is None or name not in found.fields:
        return None
    value = found.fields[name]
    if value.HasField("list_value"):
        return ",".join(each.string_value for each in value.list_value.values)
    return str(value.string_value)


def attribute_in(request: Request, name: str) -> str:
    for about in request.attributes.values():
        if name in about.fields:
            return str(about.fields[name].string_value)
    return ""


def problem_of(first: Request | None) -> str:
    """Returns why the gateway's filter cannot be served as it is set, or "" if it can."""
    if first is None:
        return f"no message of ext_proc, or over {MAX_HEAD_BYTES} bytes"
    if not first.HasField("request_headers"):
        return "request_header_mode: needs SEND"
    said = first.protocol_config
    if first.request_headers.end_of_stream or not first.HasField("protocol_config"):
        return ""
    if said.request_body_mode != FULL_DUPLEX_STREAMED:
        mode = _mode(said.request_body_mode)
        return f"request_body_mode: needs FULL_DUPLEX_STREAMED, got {mode}"
    if said.response_body_mode not in (NONE, STREAMED, FULL_DUPLEX_STREAMED):
        mode = _mode(said.response_body_mode)
        return f"response_body_mode: needs NONE, STREAMED or FULL_DUPLEX_STREAMED, got {mode}"
    return ""


def _mode(number: int) -> str:
    return ext_proc.BODY_MODES[number] if number < len(ext_proc.BODY_MODES) else str(number)


def goes_to(endpoints: str, headers: Headers, without: Iterable[bytes], body: bytes) -> Response:
    """Returns the first answer to a request. headers: those to set. without: those to remove. body:
    only its length is said here."""
    more = [(ENDPOINT.encode(), endpoints.encode()), (b"content-length", b"%d" % len(body))]
    about = Struct()
    about.update({LB: {ENDPOINT: endpoints}})
    mutation = ext_proc.HeaderMutation(
        set_headers=_set([*headers, *more]), remove_headers=[name.decode() for name in without]
    )
    common = ext_proc.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    return _said(request_headers=ext_proc.HeadersResponse(response=common), dynamic_metadata=about)


def pieces(body: bytes, *, has_trailers: bool) -> Iterator[Response]:
    for begin in range(0, max(1, len(body)), CHUNK_BYTES):
        is_last = not has_trailers and begin + CHUNK_BYTES >= len(body)
        yield _said(request_body=_piece(body[begin : begin + CHUNK_BYTES], is_last))
    if has_trailers:
        yield _said(request_trailers=ext_proc.TrailersResponse())


def answer_headers(status: int, headers: Headers) -> Response:
    common = ext_proc.CommonResponse()
    headers = [each for each in headers if each[0] != b"content-length"]
    if status >= 400:  # others are the engine's own
        headers.append((b":status", b"%d" % status))
    common.header_mutation.set_headers.extend(_set(headers))
    return _said(response_headers=ext_proc.HeadersResponse(response=common))


def answer_piece(piece: bytes, *, mode: int, is_last: bool) -> Response:
    """Returns a piece of an answer as it goes on. mode: how the gateway passes bodies; only
    FULL_DUPLEX_STREAMED lets them change."""
    is_duplex = mode == FULL_DUPLEX_STREAMED
    body = _piece(piece, is_last) if is_duplex else ext_proc.BodyResponse()
    return _said(response_body=body)


def answer_trailers() -> Response:
    return _said(response_trailers=ext_proc.TrailersResponse())


def _piece(body: bytes, is_last: bool) -> ext_proc.BodyResponse:
    streamed = ext_proc.StreamedBodyResponse(body=body, end_of_stream=is_last)
    mutation = ext_proc.BodyMutation(streamed_response=streamed)
    return ext_proc.BodyResponse(response=ext_proc.CommonResponse(body_mutation=mutation))


def at_once(status: int, headers: Headers, body: bytes) -> Response:
    mutation = ext_proc.HeaderMutation(
        set_headers=_set([each for each in headers if each[0] != b"content-length"])
    )
    answer = ext_proc.ImmediateResponse(headers=mutation, body=body, details="kvroute")
    answer.status.code = status
    return _said(immediate_response=answer)


def _set(headers: Headers) -> list[Any]:
    return [
        ext_proc.HeaderValueOption(
            header=ext_proc.HeaderValue(key=name.decode("latin-1"), raw_value=value),
            append_action=ext_proc.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in headers
    ]
