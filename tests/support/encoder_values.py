"""Constants shared by the encoder tests and the processes that they start."""

from __future__ import annotations

import torch

from pd_cluster import wire
from pd_cluster.extras.encoders.encoder_links import EncoderTerms
from pd_cluster.extras.encoders.feature_files import FeatureEndpoint
from pd_cluster.numerics import Numerics
from pd_cluster.transport.transport_interface import Checksum
from pd_cluster.types import Image, LinkState, RequestSpec, Sampling, Span

PLACE = FeatureEndpoint("127.0.0.1", 5.0, 30.0, Checksum())
TERMS = EncoderTerms("model", Numerics(), PLACE)
UP = LinkState("up", ("shm",))
OPENING = wire.EncoderOpen("model", Numerics(), ["shm", "dist"])
SHAPE = (2, 3, 8)
FEATURES = torch.arange(48, dtype=torch.float32).reshape(SHAPE)


def order_of(*digests: bytes, num_tokens: int = 4, salt: str = "") -> RequestSpec:
    spans = tuple(Span(at * num_tokens, (at + 1) * num_tokens, each) for at, each in enumerate(digests))
    images = tuple(Image(2, 2, b"p") for _ in digests)
    return RequestSpec([1] * (len(digests) * num_tokens + 1), Sampling(), cache_salt=salt, spans=spans, images=images)


A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
