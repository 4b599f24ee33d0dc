"""The state of a link between a prefill and a decode instance."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from pd_cluster.errors import told

LinkPhase = Literal["waiting", "opening", "up", "resting", "refused"]


class LinkState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a link from a prefill instance to a decode instance.

    `transports` are those of its lanes, sorted, without repeats. `precision` names the difference between KV cache that
    has landed and KV cache computed at D ("": none; see kv.pool_route.PoolRoute). These two fields are known once the
    link is up. A link at rest opens when a transfer needs it. `reason` says why the link is not up, with settings as
    `errors.called` returns them; /instances shows them as flags.
    """

    phase: LinkPhase
    transports: tuple[str, ...] = ()
    precision: str = ""
    reason: str = ""

    @property
    def is_open(self) -> bool:
        return self.phase == "up"

    @property
    def is_up(self) -> bool:
        """Whether KV cache can be sent over it, at once or after it has been opened."""
        return self.phase in ("up", "resting")

    @property
    def over(self) -> str:
        """Returns the names of its transports, joined into one word."""
        return "+".join(self.transports)

    def __str__(self) -> str:
        if self.is_open:
            return f"up ({self.over}, {self.precision})" if self.precision else f"up ({self.over})"
        return told(f"{self.phase}: {self.reason}") if self.reason else self.phase

    @classmethod
    def parse(cls, text: str) -> LinkState:
        """Parses the result of `str`. Raises ValueError for any other text."""
        if text.startswith("up (") and text.endswith(")"):
            over, _, precision = text[4:-1].partition(", ")
            return cls("up", tuple(over.split("+")), precision)
        name, _, reason = text.partition(": ")
        phase: LinkPhase | None = next((each for each in get_args(LinkPhase) if each == name != "up"), None)
        if phase is None:
            raise ValueError(f"{text[:100]!r} is not a link state")
        return cls(phase, reason=reason)
