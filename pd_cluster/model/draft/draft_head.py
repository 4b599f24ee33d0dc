"""A draft head: one layer after the model's last that predicts the token after the next one (EAGLE-3, MTP).

The head reads pairs of a token and the model's states of the preceding token. Pair j consists of token j and the states
of token j - 1. The pair's keys and values are stored in token j's slot of the pool's last layer, and the pair has token
j's rotary position. So a block's bytes depend only on the tokens up to its end, as in other layers. Slot 0 has no pair,
so attention begins at FIRST_KEY.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pd_cluster.model.language_model.fused_lm import FusedCausalLM

FIRST_KEY = 1


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A loaded head. In a chain of drafts, `batch.hidden.states` of its model are the states of the next pair."""

    model: FusedCausalLM  # one layer, with index `num_hidden_layers` of the target model; it reads `batch.pairs`
    # Instances with the same head identity and the same weights compute the same keys and values.
    identity: str
    # Maps tapped values [num_tokens, max(1, len(taps)) * hidden_size] to states [num_tokens, hidden_size], once per
    # token.
    project: Callable[[torch.Tensor], torch.Tensor]
    taps: tuple[int, ...] = ()  # see AuxiliaryStates
    token_ids: torch.Tensor | None = None  # [vocab_size of the head] int64: tokens of logit columns; None: the model's
    is_of_model: bool = False  # whether its layers are part of the model's files

    def in_model_vocabulary(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Returns logits [num_rows, vocab_size] of the model's tokens; -inf for tokens that the head does not have."""
        if self.token_ids is None:
            return logits
        whole = logits.new_full((len(logits), vocab_size), -torch.inf)
        whole[:, self.token_ids] = logits
        return whole
