"""A draft head: one layer behind a model's own that guesses the token after the next one (EAGLE-3, MTP).

It reads pairs of a token and the model's states of the token before. Pair j, of token j and the states of token j - 1,
has token j's slot of the pool's last layer and its rotary position. So a block's bytes follow from the tokens up to its
end, here as in the other layers, and slot 0 has no pair: its attention begins at FIRST_KEY.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pd_cluster.model.language_model.fused_lm import FusedCausalLM

FIRST_KEY = 1


@dataclass(frozen=True, slots=True)
class DraftHead:
    """`model` has one layer, of index `num_hidden_layers` of the model that it drafts for, and reads `batch.pairs`.

    Its `batch.hidden.states` are what the next pair of a chain of drafts takes as its states. `taps`: see batch.Taps.
    `project` makes states of what was tapped, [num_tokens, max(1, len(taps)) * hidden_size] to [num_tokens,
    hidden_size], once for each token. `token_ids`: those of the columns of its logits, [vocab_size of the head] int64;
    None: the model's own. `identity`: instances whose heads have the same one compute the same keys and values.
    """

    model: FusedCausalLM
    identity: str
    project: Callable[[torch.Tensor], torch.Tensor]
    taps: tuple[int, ...] = ()
    token_ids: torch.Tensor | None = None

    def in_model_vocabulary(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Returns logits [num_rows, vocab_size] of the model's tokens; those that the head does not know have -inf."""
        if self.token_ids is None:
            return logits
        whole = logits.new_full((len(logits), vocab_size), -torch.inf)
        whole[:, self.token_ids] = logits
        return whole
