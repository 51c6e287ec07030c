"""Messages of Envoy's ext_proc, from envoy/service/ext_proc/v3/external_processor.proto, with the
fields that are used here, and of gRPC's health. All others are ignored when they come.

They come from no package: xds-protos puts files of its own in the place of OpenTelemetry's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

_PACKAGE = "kvroute.ext_proc"
_Field = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
    "enum": _Field.TYPE_INT32,
}
_STRUCT = "google.protobuf.Struct"

MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "enum")},
    "HeaderMap": {"headers": (1, "[HeaderValue]")},
    "Metadata": {"filter_metadata": (1, "{Struct}")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProtocolConfiguration": {"request_body_mode": (1, "enum"), "response_body_mode": (2, "enum")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "attributes": (9, "{Struct}"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "HeaderMutation": {
        "set_headers": (1, "[HeaderValueOption]"),
        "remove_headers": (2, "[string]"),
    },
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"body": (1, "bytes"), "streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "enum")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, "Struct"),
    },
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "enum")},
}
"""Message -> field -> number and type. `[T]`: several; `{T}`: by name."""
OVERWRITE_IF_EXISTS_OR_ADD = 2
"""An append_action."""
BODY_MODES = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED", "GRPC")


def _described(message: Any, name: str, number: int, kind: str) -> None:
    inner = kind.strip("[]{}")
    several = inner != kind
    field = message.field.add(name=name, number=number, label=3 if several else 1)
    if kind.startswith("{"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _described(entry, "key", 1, "string")
        _described(entry, "value", 2, inner)
        field.type, field.type_name = _Field.TYPE_MESSAGE, entry.name
    elif inner in _KINDS:
        field.type = _KINDS[inner]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{_STRUCT}" if inner == "Struct" else f".{_PACKAGE}.{inner}"


def _classes() -> Mapping[str, Any]:
    # Of proto2 each field says whether it is set; the bytes are the same.
    file = descriptor_pb2.FileDescriptorProto(
        name="kvroute/ext_proc.proto", package=_PACKAGE, syntax="proto2"
    )
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _described(message, field, number, kind)
    pool = descriptor_pool.Default()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in MESSAGES}
    return {name: message_factory.GetMessageClass(each) for name, each in found.items()}


_CLASSES = _classes()
BodyMutation = _CLASSES["BodyMutation"]
BodyResponse = _CLASSES["BodyResponse"]
CommonResponse = _CLASSES["CommonResponse"]
HeaderMap = _CLASSES["HeaderMap"]
HeaderMutation = _CLASSES["HeaderMutation"]
HeaderValue = _CLASSES["HeaderValue"]
HeaderValueOption = _CLASSES["HeaderValueOption"]
HeadersResponse = _CLASSES["HeadersResponse"]
HealthCheckRequest = _CLASSES["HealthCheckRequest"]
HealthCheckResponse = _CLASSES["HealthCheckResponse"]
ImmediateResponse = _CLASSES["ImmediateResponse"]
ProcessingRequest = _CLASSES["ProcessingRequest"]
ProcessingResponse = _CLASSES["ProcessingResponse"]
StreamedBodyResponse = _CLASSES["StreamedBodyResponse"]
TrailersResponse = _CLASSES["TrailersResponse"]
