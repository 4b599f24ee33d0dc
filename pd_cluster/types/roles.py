"""Roles of instances, legs of requests, and the places that blocks are kept in."""

from __future__ import annotations

from typing import Literal

Leg = Literal["prefill", "decode", "hybrid"]
Role = Literal["prefill", "decode"]
Tier = Literal["device", "host", "disk"]  # where an instance has a block, the quickest first
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
