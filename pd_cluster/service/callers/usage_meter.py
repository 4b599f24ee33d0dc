"""Meters one request of one API key, from first byte to last. Routes call it to count the request (before its body is
read) and to reserve its tokens (when its size is known, before anything is computed).
Unused tokens are given back, however the request ends. Knows nothing of keys, of the storage of limits, or of routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pd_cluster.cluster.tenancy.tenant_counts import Limit, Outcome, TenantCounts
from pd_cluster.cluster.tenancy.token_buckets import Bucket, KeyBuckets
from pd_cluster.errors import RateLimited, RequestError
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.schema.error_bodies import CLIENT_CLOSED_REQUEST
from pd_cluster.types import MAX_UNSENT

REFUSALS = (429, 503)  # refusals that are not the client's fault


class Account(Protocol):
    """Access to a key's limits. `key_id` is the key's public name."""

    @property
    def key_id(self) -> str: ...

    def take(self, num_requests: int, num_tokens: int) -> tuple[bool, KeyBuckets]:
        """Takes requests and tokens from the limits. Raises Unauthorized when the key is gone, or Unavailable."""

    def give_back(self, num_tokens: int) -> KeyBuckets | None:
        """Gives tokens back. Returns the new state, or None if the key is gone or its state is unavailable; then the
        tokens are lost until the limit refills.
        """


class Meter:
    """Meters one request. `account` None: the key has no limits, and its requests are only counted."""

    def __init__(self, tenant: str, counts: TenantCounts, account: Account | None = None) -> None:
        self._tenant = tenant
        self._counts = counts
        self._account = account
        self._generations: list[Generation] = []
        self._num_reserved = 0
        self._buckets: KeyBuckets | None = None  # as last seen
        self._is_counted = False
        self._limit: Limit | None = None  # the limit that refused the request
        self._status = 0
        self._is_whole = False  # the answer's last byte has been sent
        self._has_failed = False
        self._is_left = False  # the client left before the end

    def count(self) -> None:
        """Counts the request, once. Raises RateLimited, Unauthorized, Unavailable."""
        if self._is_counted:
            return
        self._is_counted = True
        if self._account is None:
            return
        is_let_in, self._buckets = self._account.take(1, 0)
        if not is_let_in:
            raise self._refused("requests", self._buckets.requests, self._buckets.wait_ns(1, 0), "")

    def reserve(self, generations: Sequence[Generation]) -> None:
        """Reserves all generations' maximum tokens. Raises RateLimited, RequestError."""
        self._generations += generations
        if self._account is None:
            return
        wanted = sum(map(most_tokens, generations))
        is_let_in, self._buckets = self._account.take(0, wanted)
        if is_let_in:
            self._num_reserved = wanted
            return
        limit = self._buckets.tokens.limit
        asked = f"prompts and max_tokens of all sequences are {wanted} tokens"
        if wanted > limit:
            raise RequestError(
                f"{asked}, but the API key {self._account.key_id!r} has {limit} a minute: the request can never be "
                f"served; send a shorter prompt, or lower max_tokens, n or best_of",
                param="max_tokens",
                code="larger_than_rate_limit",
            )
        raise self._refused("tokens", self._buckets.tokens, self._buckets.wait_ns(1, wanted), f"; {asked}")

    def settle(self) -> None:
        """Gives back unused tokens, once."""
        generations, self._generations = self._generations, []
        if not generations:
            return
        used = [(each, used_tokens(each)) for each in generations]
        self._has_failed = any(
            each.stream is not None and not each.is_prompt_only and not each.stream.is_over for each in generations
        )
        sent = [(len(each.prompt_token_ids), number) for each, number in used if each.stream is not None]
        self._counts.computed(self._tenant, sum(prompt for prompt, _ in sent), sum(number for _, number in sent))
        if self._account is not None and self._num_reserved:
            left = self._num_reserved - sum(charged_tokens(each, number, self._is_left) for each, number in used)
            self._num_reserved = 0
            self._buckets = self._account.give_back(left) or self._buckets

    def answers(self, status: int, is_computed: bool) -> KeyBuckets | None:
        """Notes the start of the answer; returns the limits to report, if any. `is_computed`: the whole answer is
        computed already.
        """
        self._status = status
        self._is_left = status == CLIENT_CLOSED_REQUEST
        if is_computed:
            self.settle()
        return self._buckets if self._is_counted else None

    def has_answered(self) -> None:
        self.settle()
        self._is_whole = True

    def is_left(self) -> None:
        """Notes that the client left before the end."""
        self._is_left = True

    def ends(self) -> None:
        """Notes the end of the request, whatever ended it."""
        self.settle()
        if self._is_counted:
            self._counts.ended(self._tenant, self._outcome())

    def _refused(self, limit: Limit, bucket: Bucket, wait_ns: int, more: str) -> RateLimited:
        assert self._account is not None
        self._limit = limit
        self._counts.limited(self._tenant, limit)
        wait_s = max(1, -(-wait_ns // 10**9))
        return RateLimited(
            f"the API key {self._account.key_id!r} has {bucket.limit} {limit} a minute, and {bucket.remaining} left"
            f"{more}; try again in {wait_s} s",
            retry_after_s=wait_s,
        )

    def _outcome(self) -> Outcome:
        if self._limit is not None:
            return "limited"
        if self._is_left or (self._status and not self._is_whole):
            return "aborted"
        if 400 <= self._status < 500 or self._status in REFUSALS:
            return "refused"
        return "failed" if self._has_failed or not 200 <= self._status < 400 else "finished"


def most_tokens(generation: Generation) -> int:
    """Returns the maximum tokens of a generation: its prompt once, and the longest answer of each computed sequence."""
    order = generation.order
    return len(order.prompt_token_ids) + order.num_decoding * order.most_output_tokens


def used_tokens(generation: Generation) -> int:
    """Returns the output tokens so far, of all sequences. Computed tokens after a stop string do not count."""
    if generation.stream is None:
        return 0
    return sum(each.num_taken if each.is_over else each.num_delivered for each in generation.stream.sequences)


def charged_tokens(generation: Generation, num_output_tokens: int, is_left: bool = False) -> int:
    """Returns the tokens that a generation has used so far; 0 before it was sent to an instance.

    In a beam search, every beam is charged as many tokens as the longest one. A search without an answer may be nearly
    complete, so it is charged in full. If the client left (`is_left`), tokens that may still wait to be sent together
    are charged, too.
    """
    if generation.stream is None:
        return 0
    if is_left and generation.stream.order.gathers:  # only tokens after the first may wait to be sent
        begun = [each for each in generation.stream.sequences if each.num_delivered and not each.is_over]
        most = generation.sampling.max_tokens
        num_output_tokens += sum(min(MAX_UNSENT, max(0, most - each.num_delivered)) for each in begun)
    if width := generation.sampling.beam_width:
        if not num_output_tokens:
            return most_tokens(generation)
        num_output_tokens = width * max(each.num_delivered for each in generation.stream.sequences)
    return len(generation.prompt_token_ids) + num_output_tokens
