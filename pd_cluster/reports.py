"""What a worker says of itself outside of the mailbox: JSON over HTTP, and from its rank process to its parent."""

from __future__ import annotations

from typing import Literal

import msgspec

from pd_cluster.types import Role
from pd_cluster.wire import LayoutInfo


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a worker. Ports only: hosts always come from the rank table."""

    name: str
    role: Role
    state: Literal["loading", "ready", "failed", "draining"]
    server_ip: str
    device_ids: list[str]
    epoch: int
    pid: int
    control_port: int = 0
    model_identity: str = ""
    max_model_len: int = 0
    layout: LayoutInfo | None = None
    num_blocks: int = 0
    tp_size: int = 1
    error: str = ""
    table_digest: str = ""


class RankReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank process tells its parent, one JSON line each."""

    state: Literal["ready", "failed"]
    error: str = ""
    lost: str = ""  # which other rank was lost, when that is why it ends
    control_port: int = 0
    model_identity: str = ""
    max_model_len: int = 0
    layout: LayoutInfo | None = None
    num_blocks: int = 0
