"""Implements a key's limits as token buckets, in whole numbers, so that rounding loses and gains nothing. Uses no
clock.

A bucket holds at most a minute's worth and fills evenly. Its content is counted in units, `MINUTE_NS` per token, so
each nanosecond adds as many units as the limit has tokens per minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MINUTE_NS = 60 * 10**9
MOST_A_MINUTE = 100_000_000  # so that the units of a full bucket fit into 63 bits


@dataclass(frozen=True, slots=True)
class Bucket:
    """One limit at one moment. `limit`: tokens per minute; 0: no limit, so everything fits."""

    limit: int
    units: int

    @classmethod
    def full(cls, limit: int) -> Bucket:
        return cls(limit, limit * MINUTE_NS)

    @property
    def remaining(self) -> int:
        """Whole tokens."""
        return self.units // MINUTE_NS

    @property
    def reset_ns(self) -> int:
        """Nanoseconds until the bucket is full, if nothing is taken."""
        return self.wait_ns(self.limit)

    def wait_ns(self, num_tokens: int) -> int:
        """Returns the nanoseconds until the bucket has this many tokens, if nothing is taken; 0 if it has them."""
        missing = num_tokens * MINUTE_NS - self.units
        return -(-missing // self.limit) if self.limit and missing > 0 else 0

    def after(self, elapsed_ns: int) -> Bucket:
        return self._with(self.units + self.limit * min(max(elapsed_ns, 0), MINUTE_NS))

    def less(self, num_tokens: int) -> Bucket:
        """Returns the bucket without this many tokens, which it must have. A negative number adds tokens, up to the
        limit.
        """
        return self._with(self.units - num_tokens * MINUTE_NS)

    def limited(self, limit: int) -> Bucket:
        """Returns the bucket under another limit; its content is kept, up to that limit."""
        return Bucket.full(limit) if not self.limit else Bucket(limit, self.units)._with(self.units)

    def _with(self, units: int) -> Bucket:
        return Bucket(self.limit, min(units, self.limit * MINUTE_NS) if self.limit else 0)


class KeyBuckets(NamedTuple):
    """A key's two limits."""

    requests: Bucket
    tokens: Bucket

    def after(self, elapsed_ns: int) -> KeyBuckets:
        return KeyBuckets(*(each.after(elapsed_ns) for each in self))

    def less(self, num_requests: int, num_tokens: int) -> KeyBuckets:
        return KeyBuckets(self.requests.less(num_requests), self.tokens.less(num_tokens))

    def wait_ns(self, num_requests: int, num_tokens: int) -> int:
        """Returns the nanoseconds until both buckets have enough."""
        return max(self.requests.wait_ns(num_requests), self.tokens.wait_ns(num_tokens))


def go_duration(nanoseconds: int) -> str:
    """Formats a duration as Go does, in whole milliseconds, rounded up: 17ms, 1.2s, 6m0s."""
    milliseconds = -(-nanoseconds // 10**6)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
