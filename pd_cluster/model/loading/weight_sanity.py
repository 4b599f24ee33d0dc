"""Checks that a quantized folder's weights make sense: a trained model can continue a counting sequence.

Tensors do not show the order of the codes in their words, and every order gives finite values of plausible size. Only
the model's predictions reveal a wrong order.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence

import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.pooling_config import MODULES_FILE
from pd_cluster.devices.device import Device
from pd_cluster.errors import ModelError
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import build_batch
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.parallel.rank_group import Group
from pd_cluster.text.token_ids import token_ids_of
from pd_cluster.types import Request, RequestSpec, Sampling

log = logging.getLogger(__name__)

COUNTING = " ".join(str(number) for number in range(1, 21))
# A guess loses ln(vocabulary). The model that we ship loses 0.02 of that, and 1.16 of it with its codes reordered.
MOST_LOSS = 0.75
MOST_TOKENS, LEAST_KINDS = 128, 10


def warn_of_chance(
    model: CausalLM, checkpoint: Checkpoint, layouts: Sequence[KVLayout], device: Device, group: Group
) -> None:
    """Logs a warning if a quantized folder's model predicts a counting sequence hardly better than chance.

    All ranks call this, because they compute a step together; the first one warns. `layouts`: for pools of the model's
    own dtype. Embedding models may no longer be able to count, and protein models never could.
    """
    found = checkpoint.quantization
    is_for_vectors = (checkpoint.path / MODULES_FILE).exists()
    if found is None or found.at_load or is_for_vectors:
        return
    vocab_size = int(checkpoint.config["vocab_size"])  # the whole model's; a rank may have a share
    token_ids = _counting(checkpoint, vocab_size)
    if not group.least(len(token_ids)):  # if one rank cannot read the file, the others must not wait for it
        return
    logits = _logits(model, token_ids, layouts, device)
    if group.rank:
        return
    wanted = torch.tensor(token_ids[-len(logits) :], device=logits.device)
    loss, chance = float(torch.nn.functional.cross_entropy(logits, wanted)), math.log(vocab_size)
    if not loss <= MOST_LOSS * chance:
        log.warning(
            "%s: this model cannot continue 1, 2, 3 (it loses %.1f nats per token; chance loses %.1f): if it was "
            "trained, the codes are not in the order given in %s",
            *(checkpoint.path, loss, chance, found.place),
        )


def _counting(checkpoint: Checkpoint, vocab_size: int) -> list[int]:
    """Returns the tokens of `COUNTING`; empty if they have too few different ids to show anything."""
    if checkpoint.tokenizer_path is None:
        return []
    try:
        token_ids = token_ids_of(checkpoint.tokenizer_path, COUNTING)
    except ModelError as error:  # reported by the processes that need text
        log.debug("cannot check whether the weights make sense: %s", error)
        return []
    token_ids = token_ids[: min(MOST_TOKENS, checkpoint.max_position_embeddings)]
    return token_ids if len(set(token_ids)) >= LEAST_KINDS and max(token_ids) < vocab_size else []


def _logits(model: CausalLM, token_ids: list[int], layouts: Sequence[KVLayout], device: Device) -> torch.Tensor:
    """Returns the logits that predict the tokens of the second half."""
    num_tokens = len(token_ids)
    nums_blocks = [1 if layout.holds.is_state else layout.num_blocks_for(num_tokens) for layout in layouts]
    request = Request("sense", RequestSpec(token_ids, Sampling()), tables=[list(range(count)) for count in nums_blocks])
    with contextlib.ExitStack() as stack:
        sizes = zip(layouts, nums_blocks, strict=True)
        pools = [stack.enter_context(KVPool(layout, count, device)) for layout, count in sizes]
        batch = build_batch([(request, num_tokens)], pools[0], pools[1:])
        batch.sample_rows = torch.arange(num_tokens // 2 - 1, num_tokens - 1, device=batch.slot_mapping.device)
        with torch.inference_mode():
            return model(batch).float()
