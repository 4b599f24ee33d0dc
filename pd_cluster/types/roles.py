"""Roles of instances and legs of requests."""

from __future__ import annotations

from typing import Literal

Leg = Literal["prefill", "decode", "hybrid"]
Role = Literal["prefill", "decode"]
