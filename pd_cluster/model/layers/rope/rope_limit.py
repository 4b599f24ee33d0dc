"""The rotary positions that requests may specify for a loaded model. Does not use tensors."""

from __future__ import annotations

from dataclasses import dataclass

from pd_cluster.types import RequestSpec


@dataclass(frozen=True, slots=True)
class RopeLimit:
    """How many rows of positions the model uses, and how many different positions it supports.

    `why_not`: a clause that says why requests cannot specify positions; "" if they can.
    """

    num_rows: int = 1
    num_positions: int = 0
    why_not: str = ""

    def problem(self, order: RequestSpec) -> str | None:
        """Returns one line that says why the model cannot use the request's rotary positions, or None if it can."""
        own = order.rope_positions
        if own is None:
            return None
        if self.why_not:
            return f"rope_positions: {self.why_not}; remove the field"
        if len(own.rows) not in (1, self.num_rows):
            return f"rope_positions: {len(own.rows)} rows; this model takes {' or '.join(_counts(self.num_rows))}"
        num_prompt = len(order.prompt_token_ids)
        for row in own.rows:
            if len(row) != num_prompt:
                return f"rope_positions: a row has {len(row)} positions for {num_prompt} prompt tokens; give one each"
        ends = (num_prompt + own.delta, order.most_tokens - 1 + own.delta) if order.most_output_tokens else ()
        bounds = [*map(min, own.rows), *map(max, own.rows), *ends]
        least, most = min(bounds), max(bounds)
        if least < 0 or most >= self.num_positions:
            return (
                f"rope_positions: positions from {least} to {most}, with delta {own.delta}; "
                f"this model supports 0 to {self.num_positions - 1}"
            )
        return None


def _counts(num_rows: int) -> list[str]:
    return ["1"] if num_rows == 1 else ["1", str(num_rows)]
