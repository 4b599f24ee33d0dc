"""Protocol buffers' messages of Envoy's external processor and of gRPC's health service, as far as a picker needs them.

Field numbers are those of envoy/service/ext_proc/v3/external_processor.proto, envoy/config/core/v3/base.proto,
envoy/type/v3/http_status.proto, envoy/extensions/filters/http/ext_proc/v3/processing_mode.proto and
grpc/health/v1/health.proto; tests/unit/test_gateway.py compares Envoy's. Messages have names of their own, which don't
travel. Enums are int32 here, which is the same on the wire; a map is its repeated entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

PACKAGE = "pd_cluster.gateway"
PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
FULL_DUPLEX_STREAMED = 4  # ProcessingMode.BodySendMode
OVERWRITE_OR_ADD = 2  # HeaderValueOption.HeaderAppendAction
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
STRUCT = ".google.protobuf.Struct"


class Field(NamedTuple):
    """`kind`: bool, bytes, int32, string, or a message; `many`: repeated. `one_of`: the name of its choice, or ""."""

    number: int
    name: str
    kind: str
    one_of: str = ""
    many: bool = False


MESSAGES: dict[str, tuple[Field, ...]] = {
    "HeaderValue": (Field(1, "key", "string"), Field(2, "value", "string"), Field(3, "raw_value", "bytes")),
    "HeaderMap": (Field(1, "headers", "HeaderValue", many=True),),
    "HeaderValueOption": (Field(1, "header", "HeaderValue"), Field(3, "append_action", "int32")),
    "HeaderMutation": (Field(1, "set_headers", "HeaderValueOption", many=True),),
    "MetadataEntry": (Field(1, "key", "string"), Field(2, "value", STRUCT)),
    "Metadata": (Field(1, "filter_metadata", "MetadataEntry", many=True),),
    "ProtocolConfiguration": (Field(1, "request_body_mode", "int32"), Field(2, "response_body_mode", "int32")),
    "HttpHeaders": (Field(1, "headers", "HeaderMap"), Field(3, "end_of_stream", "bool")),
    "HttpBody": (Field(1, "body", "bytes"), Field(2, "end_of_stream", "bool")),
    "HttpTrailers": (Field(1, "trailers", "HeaderMap"),),
    "ProcessingRequest": (
        Field(2, "request_headers", "HttpHeaders", "request"),
        Field(3, "response_headers", "HttpHeaders", "request"),
        Field(4, "request_body", "HttpBody", "request"),
        Field(5, "response_body", "HttpBody", "request"),
        Field(6, "request_trailers", "HttpTrailers", "request"),
        Field(7, "response_trailers", "HttpTrailers", "request"),
        Field(8, "metadata_context", "Metadata"),
        Field(10, "observability_mode", "bool"),
        Field(11, "protocol_config", "ProtocolConfiguration"),
    ),
    "StreamedBodyResponse": (Field(1, "body", "bytes"), Field(2, "end_of_stream", "bool")),
    "BodyMutation": (Field(3, "streamed_response", "StreamedBodyResponse", "mutation"),),
    "CommonResponse": (
        Field(2, "header_mutation", "HeaderMutation"),
        Field(3, "body_mutation", "BodyMutation"),
        Field(5, "clear_route_cache", "bool"),
    ),
    "HeadersResponse": (Field(1, "response", "CommonResponse"),),
    "BodyResponse": (Field(1, "response", "CommonResponse"),),
    "TrailersResponse": (Field(1, "header_mutation", "HeaderMutation"),),
    "HttpStatus": (Field(1, "code", "int32"),),
    "ImmediateResponse": (
        Field(1, "status", "HttpStatus"),
        Field(2, "headers", "HeaderMutation"),
        Field(3, "body", "bytes"),
        Field(5, "details", "string"),
    ),
    "ProcessingResponse": (
        Field(1, "request_headers", "HeadersResponse", "response"),
        Field(2, "response_headers", "HeadersResponse", "response"),
        Field(3, "request_body", "BodyResponse", "response"),
        Field(4, "response_body", "BodyResponse", "response"),
        Field(5, "request_trailers", "TrailersResponse", "response"),
        Field(6, "response_trailers", "TrailersResponse", "response"),
        Field(7, "immediate_response", "ImmediateResponse", "response"),
        Field(8, "dynamic_metadata", STRUCT),
    ),
    "HealthCheckRequest": (Field(1, "service", "string"),),
    "HealthCheckResponse": (Field(1, "status", "int32"),),
}
_KINDS = {"bool": 8, "bytes": 12, "int32": 5, "string": 9}  # FieldDescriptorProto.Type
_MESSAGE, _SINGLE, _REPEATED = 11, 1, 3


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="pd_cluster_gateway.proto", package=PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for one_of in dict.fromkeys(field.one_of for field in fields if field.one_of):
            message.oneof_decl.add(name=one_of)
        for field in fields:
            kind = _KINDS.get(field.kind)
            made = message.field.add(
                name=field.name, number=field.number, label=_REPEATED if field.many else _SINGLE, type=kind or _MESSAGE
            )
            if kind is None:
                made.type_name = field.kind if field.kind.startswith(".") else f".{PACKAGE}.{field.kind}"
            if field.one_of:
                made.oneof_index = 0
    return file


_pool = descriptor_pool.Default()
_pool.Add(_file())
CLASSES: dict[str, Any] = {
    name: message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES
}
ProcessingRequest = CLASSES["ProcessingRequest"]
ProcessingResponse = CLASSES["ProcessingResponse"]
HealthCheckRequest = CLASSES["HealthCheckRequest"]
HealthCheckResponse = CLASSES["HealthCheckResponse"]
