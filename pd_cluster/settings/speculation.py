"""How tokens of decoding sequences are drafted ahead. Reads no model."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from pd_cluster.settings.setting import Check, finite, within
from pd_cluster.types import INT32_MAX

Method = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"]
METHODS: tuple[Method, ...] = get_args(Method)
# methods that have weights besides the model's other layers
WITH_WEIGHTS: tuple[Method, ...] = ("draft_model", "eagle3", "mtp")
MTP_TYPES = {  # vLLM's method name for some models -> their model types
    "deepseek_mtp": ("deepseek_v3",),
    "glm4_moe_mtp": ("glm4_moe",),
    "glm4_moe_lite_mtp": ("glm4_moe_lite",),
}
MOST_DRAFTS = 64  # maximum number of drafts of a sequence in a step
DEFAULT_DRAFTS = 16
SampleMethod = Literal["probabilistic", "greedy"]
SAMPLE_METHODS: tuple[SampleMethod, ...] = get_args(SampleMethod)
MOST_MATCHED = 1024  # maximum number of a sequence's last tokens that are looked up
COUNT = within(0, INT32_MAX)
PROBABILITY = Check(lambda value: 0 <= value <= 1, "must be in 0 to 1")


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """The drafters to try, in order, after a request's own prediction and the tokens that its guide forces.

    Names are those of vLLM's `--speculative-config`, except `suffix_decoding_max_cached_tokens` and `mtp_type`.
    """

    methods: tuple[Method, ...] = ()
    # The maximum number of drafts of a sequence in a step; measured times and acceptance decide how many are used.
    num_speculative_tokens: Annotated[int, within(1, MOST_DRAFTS)] = DEFAULT_DRAFTS
    # (first, last, most) for ranges of running sequences, in order. As in vLLM, a number of sequences between two
    # ranges belongs to the earlier range.
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    prompt_lookup_min: Annotated[int, within(1, MOST_MATCHED)] = 5
    prompt_lookup_max: Annotated[int, within(1, MOST_MATCHED)] = 5
    suffix_decoding_max_tree_depth: Annotated[int, within(1, MOST_MATCHED)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, COUNT] = 10_000
    suffix_decoding_max_cached_tokens: Annotated[int, COUNT] = 1_000_000  # tokens of earlier outputs in all trees
    suffix_decoding_max_spec_factor: Annotated[float, finite("must be a number of at least 0")] = 4.0
    suffix_decoding_min_token_prob: Annotated[float, PROBABILITY] = 0.1

    model: str = ""  # the draft model or the head of eagle3: a folder, or a hub's model; mtp uses only the served model
    mtp_type: str = ""  # the name of MTP_TYPES that was given
    revision: str = ""  # of `model`
    quantization: str = ""  # of `model`
    # The longest sequence that a draft model drafts for; 0: the limit of both models.
    max_model_len: Annotated[int, within(1, INT32_MAX)] = 0
    # Drafts are sampled like the request's tokens ("probabilistic"), or each draft is the likeliest token.
    draft_sample_method: SampleMethod = "probabilistic"

    @property
    def with_weights(self) -> Method | None:
        """The method of `methods` that has weights, or None."""
        return next((method for method in self.methods if method in WITH_WEIGHTS), None)

    def most_drafts(self, num_seqs: int) -> int:
        """Returns the maximum number of drafts of a sequence in a step of `num_seqs` sequences."""
        found = self.num_speculative_tokens
        for first, _, most in self.num_speculative_tokens_per_batch_size:
            if first <= num_seqs:
                found = most
        return min(found, self.num_speculative_tokens)
