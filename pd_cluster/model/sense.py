"""Whether a quantized folder's numbers mean anything: a model that was trained knows how counting goes on.

Tensors do not tell the order of the codes in their words: each order gives finite numbers of the right size. Only what
the model predicts shows a wrong one.
"""

from __future__ import annotations

import logging
import math

import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.pooling import MODULES_FILE
from pd_cluster.devices.device import Device
from pd_cluster.errors import ModelError
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import KVPool
from pd_cluster.model.batch import build_batch
from pd_cluster.model.causal_lm import CausalLM
from pd_cluster.text.token_ids import token_ids_of
from pd_cluster.types import Order, Request, Sampling

log = logging.getLogger(__name__)

COUNTING = " ".join(str(number) for number in range(1, 21))
# Equal chances lose ln(vocabulary). The shipped model loses 0.02 of it, and 1.16 with its codes reordered.
MOST_LOSS = 0.75


def warn_of_chance(model: CausalLM, checkpoint: Checkpoint, layout: KVLayout, device: Device, is_first: bool) -> None:
    """Logs a warning if a quantized folder's model predicts counting hardly better than chance.

    Its ranks call this together, as it computes a step, and the first one warns. `layout`: of a pool of the model's own
    dtype. Models made for vectors may have forgotten how to count.
    """
    found = checkpoint.quantization
    is_for_vectors = (checkpoint.path / MODULES_FILE).exists()
    if found is None or found.at_load or checkpoint.tokenizer_path is None or is_for_vectors:
        return
    try:
        token_ids = token_ids_of(checkpoint.tokenizer_path, COUNTING)
    except ModelError as error:  # whoever needs text fails with it, in another process
        log.debug("whether the weights make sense is not known: %s", error)
        return
    vocab_size = model.config.vocab_size
    token_ids = token_ids[: checkpoint.max_position_embeddings]
    if len(token_ids) < 2 or max(token_ids) >= vocab_size:
        return
    loss, chance = _loss(model, token_ids, layout, device), math.log(vocab_size)
    if is_first and not loss <= MOST_LOSS * chance:
        log.warning(
            "%s: this model does not know how 1, 2, 3 goes on (it loses %.1f nats a token, and chance %.1f): if it was "
            "trained, its tensors are in another order than %s says",
            *(checkpoint.path, loss, chance, found.place),
        )


def _loss(model: CausalLM, token_ids: list[int], layout: KVLayout, device: Device) -> float:
    """Returns the mean loss of the second half's tokens, in nats."""
    num_tokens = len(token_ids)
    num_blocks = layout.num_blocks_for(num_tokens)
    request = Request("sense", Order(token_ids, Sampling()), block_table=list(range(num_blocks)))
    pool = KVPool(layout, num_blocks, device)
    batch = build_batch([(request, num_tokens)], pool)
    first = num_tokens // 2 - 1
    batch.sample_rows = torch.arange(first, num_tokens - 1, device=batch.slot_mapping.device)
    with torch.inference_mode():
        logits = model(batch).float()
    pool.close()
    wanted = torch.tensor(token_ids[first + 1 :], device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits, wanted))
