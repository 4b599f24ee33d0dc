"""Events that the threads of links to encoders send to the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import StageEvent

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class EncoderReached(StageEvent):
    """The encoder at the other end of a connection is reached, and sends features over this transport."""

    conn: str
    transport: wire.TransportName


@dataclass(frozen=True, slots=True)
class EncoderUnreached(StageEvent):
    """The encoder cannot send features, or can no longer send them. `retry`: a later attempt may succeed."""

    conn: str
    reason: str
    retry: bool


@dataclass(frozen=True, slots=True)
class FeaturesRead(StageEvent):
    """The features of an item, on the host; None: `reason` says why they could not be read."""

    item: int
    features: torch.Tensor | None
    reason: str = ""


FeatureEvent = EncoderReached | EncoderUnreached | FeaturesRead
