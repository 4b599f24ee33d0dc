"""Roles of instances, legs of requests, and the tiers that keep blocks."""

from __future__ import annotations

from typing import Literal, get_args

Leg = Literal["prefill", "decode", "hybrid"]
Role = Literal["prefill", "decode", "encode"]
ROLES: tuple[Role, ...] = get_args(Role)
Tier = Literal["device", "host", "disk"]  # where an instance has a block, the fastest first
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
