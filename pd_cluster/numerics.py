"""What decides a model's numbers beside its files: both ends of a link must agree, and a prefix's root has it too.

Read without torch. What positions mean to a model is in model/rope.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

FLAGS = {"dtype": "--dtype", "attention_backend": "--attention-backend", "hf_overrides": "--hf-overrides"}
DYNAMIC, LONGROPE = "dynamic", "longrope"
UNBOUNDED = 1 << 30  # tokens; the base grows with any length
ROPE_NAMES = {"dynamic": DYNAMIC, "longrope": LONGROPE, "su": LONGROPE}  # "su": longrope's first name


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """How positions beyond those that a model was trained with are turned, where that depends on a request's length.

    `kind` "dynamic" (NTK): the base grows with the length. "longrope": one set of factors up to `reach` tokens,
    another one beyond. A request's length is that of its prompt and the most tokens that it may get: it is known when
    the request comes and stays the same, so that all its keys are turned alike, wherever and whenever it is computed.
    """

    kind: str = ""  # "": positions mean the same in every request
    reach: int = 0  # tokens; shorter requests are turned as if there were no such thing
    most: int = 0  # tokens that a request may have, where more than `reach` are asked for

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rope:
        """Of a config.json. transformers names the fields in two ways."""
        given = config.get("rope_parameters") or config.get("rope_scaling")
        if not isinstance(given, dict):
            return cls()
        kind = ROPE_NAMES.get(str(given.get("rope_type", given.get("type"))), "")
        trained = int(config.get("max_position_embeddings") or 0)
        if kind == DYNAMIC:
            return cls(kind=kind, reach=trained, most=UNBOUNDED)
        if kind == LONGROPE:
            name = "original_max_position_embeddings"
            reach = min(trained, int(given.get(name) or config.get(name) or trained))
            return cls(kind=kind, reach=reach, most=trained)
        return cls()

    def length(self, num_tokens: int) -> int:
        """The one number that decides how a request of so many tokens is turned; 0: as a short one."""
        if num_tokens <= self.reach or not self.kind:
            return 0
        return num_tokens if self.kind == DYNAMIC else self.reach + 1


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """Of one instance. `attention_backend` is as it was asked for, `hf_overrides` canonical JSON."""

    dtype: str = "float32"
    attention_backend: str = "auto"
    hf_overrides: str = "{}"
    rope: Rope = Rope()

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def difference(self, other: Numerics) -> tuple[str, str, str] | None:
        """The flag that differs, its value here and there."""
        for name, flag in FLAGS.items():
            own, others = getattr(self, name), getattr(other, name)
            if own != others:
                return flag, own, others
        return ("rope_scaling", str(self.rope), str(other.rope)) if self.rope != other.rope else None


def canonical(overrides: Mapping[str, Any]) -> str:
    """The same text for the same overrides."""
    return json.dumps(overrides, sort_keys=True, separators=(",", ":"))


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with `overrides` in place of its own values; a mapping is merged into the one that is there.

    Positions have two names, `rope_parameters` and `rope_scaling`: an override of either goes into the one that
    config.json has.
    """
    merged = dict(config)
    for name, value in overrides.items():
        key = name
        if name in ("rope_scaling", "rope_parameters") and isinstance(config.get("rope_parameters"), dict):
            key = "rope_parameters"
            if isinstance(value, dict) and "type" in value:
                value = {**value, "rope_type": value["type"]}
        if name == "rope_theta" and isinstance(config.get("rope_parameters"), dict):
            key, value = "rope_parameters", {"rope_theta": value}
        before = merged.get(key)
        merged[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return merged
