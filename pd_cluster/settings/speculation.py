"""How sequences that decode are drafted ahead. Reads no model."""

from __future__ import annotations

from typing import Literal

import msgspec

Method = Literal["ngram", "suffix"]
DEFAULT_DRAFTS = 16


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """The drafters that are tried, in order, behind a request's own prediction and what its guide forces.

    Names are those of vLLM's `--speculative-config`. `num_speculative_tokens`: the most drafts of a sequence in a step;
    measured times and hits decide how many there are. `num_speculative_tokens_per_batch_size`: (first, last, most) by
    numbers of running sequences.
    """

    methods: tuple[Method, ...] = ()
    num_speculative_tokens: int = DEFAULT_DRAFTS
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def most_drafts(self, num_seqs: int) -> int:
        """Returns the most drafts of a sequence in a step of so many sequences."""
        for first, last, most in self.num_speculative_tokens_per_batch_size:
            if first <= num_seqs <= last:
                return most
        return self.num_speculative_tokens
