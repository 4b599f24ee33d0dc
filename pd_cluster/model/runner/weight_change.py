"""Changes the weights of a loaded model on an accelerator, where graphs refer to their memory.

Weights are copied into that memory if the model's parts allow it. Otherwise the caller frees the parts and the graphs,
loads the parts again and captures the graphs again. Knows nothing of versions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from pd_cluster.devices.device import is_out_of_memory, reserved_nbytes, synchronize
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.graphs.step_graphs import StepGraphs, capture_graphs, why_eager
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.language_model.overwrite_tensors import CannotOverwrite
from pd_cluster.model.loading.load_proof import check_finite, prove
from pd_cluster.model.loading.model_loader import overwrite_weights, probe_logits
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.runner.loaded_parts import LoadedParts

log = logging.getLogger(__name__)


def overwrite_parts(plan: LoadPlan, parts: LoadedParts) -> bool:
    """Copies the weights of the plan's folder into the memory of the parts. Draft models and draft heads stay.

    Returns whether it did so on every rank; otherwise the parts are unusable. All ranks call this at the same time.
    Raises ModelError.
    """
    why = _overwrite(plan, parts)
    if why:
        log.warning("weights are loaded into new memory, and graphs captured again: %s", why)
    else:
        synchronize(plan.device)
    reserved_nbytes(plan.device)  # frees the memory that the last layer took
    return bool(plan.group.least(int(not why)))


def _overwrite(plan: LoadPlan, parts: LoadedParts) -> str:
    """Returns why the weights could not be overwritten, or ""."""
    if not isinstance(parts.model, FusedCausalLM):
        return "the model's layers are not fused"
    if parts.tower is not None:
        return "the model has a vision tower"
    if parts.head is not None and parts.head.is_of_model:
        return "the draft head's layers change, too"
    try:
        overwrite_weights(parts.model, plan.checkpoint, plan.dtype, plan.device, plan.group, plan.experts)
    except CannotOverwrite as error:
        return str(error)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return "the device has no memory for a temporary copy of a layer"
    return ""


def prove_again(plan: LoadPlan, parts: LoadedParts, pools: Sequence[KVPool]) -> None:
    """Raises ModelError if the overwritten model must not serve."""
    prove(parts.model, pools, plan.dtype)
    if len(pools) == 1:
        logits = probe_logits(parts.model, replace(pools[0].layout.without_head, dtype=plan.dtype), plan.device)
        check_finite(logits, str(plan.checkpoint.path), plan.dtype)


def graphs_again(plan: LoadPlan, parts: LoadedParts, pools: Sequence[KVPool]) -> StepGraphs:
    """Captures the graphs of parts that were loaded again; no block of the pools may be in use."""
    layout = pools[0].layout
    return capture_graphs(plan, parts.model, pools[0], why_eager(plan, parts.model, layout))
