"""Roles of instances, legs of requests, and the places that blocks are kept in."""

from __future__ import annotations

from typing import Literal, get_args

Leg = Literal["prefill", "decode", "hybrid"]
Role = Literal["prefill", "decode", "encode"]
ROLES: tuple[Role, ...] = get_args(Role)
Tier = Literal["device", "host", "disk"]  # where an instance has a block, the quickest first
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
