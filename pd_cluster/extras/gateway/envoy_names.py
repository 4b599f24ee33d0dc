"""Names and numbers of Envoy's external processor and of gRPC's health service; messages.proto defines the messages."""

from __future__ import annotations

PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
FULL_DUPLEX_STREAMED = 4  # ProcessingMode.BodySendMode
OVERWRITE_OR_ADD = 2  # HeaderValueOption.HeaderAppendAction
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
