"""Plans how a draft model is loaded with its target model, and checks that the two match.

All this happens before any weight is read.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from msgspec import structs

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.hub import resolve_model
from pd_cluster.errors import ConfigError, called
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.settings.speculation import Speculation
from pd_cluster.text.token_ids import vocabulary_of

log = logging.getLogger(__name__)

PLACE = called("speculative_config")
WAY_OUT = "give another model, or method ngram or suffix"


def with_draft(plan: LoadPlan) -> LoadPlan:
    """Returns the plan, with the plan of a draft model if the settings name one. Raises ConfigError, ModelError."""
    speculation = plan.config.speculation
    if speculation.with_weights != "draft_model":
        return plan
    if plan.device.is_accelerator:
        raise ConfigError(
            f"{PLACE}: model: draft models run on CPUs only, and this is {plan.device.kind}; give method ngram or "
            f"suffix"
        )
    where = f"{PLACE}: model"
    folder = resolve_model(
        speculation.model, speculation.revision, plan.config.download_dir, where, revision_flag=f"{PLACE}: revision"
    )
    config = structs.replace(
        plan.config,
        model=str(folder),
        revision="",
        tokenizer="",
        tokenizer_revision="",
        hf_overrides={},
        quantization=speculation.quantization or None,
        quantize_head=None,
        enable_mm=False,
        language_model_only=True,
        block_size=plan.block_size,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        adapters=AdapterSettings(),
        speculation=Speculation(),
        data_parallel_size=1,
        enable_expert_parallel=False,
    )
    checkpoint = Checkpoint.of(config)
    _check_vocabulary(checkpoint, plan.checkpoint)
    max_model_len = _max_model_len(checkpoint, speculation, plan.max_model_len)
    return replace(
        plan, draft=LoadPlan.of(structs.replace(config, max_model_len=max_model_len), plan.group, plan.device)
    )


def _check_vocabulary(draft: Checkpoint, target: Checkpoint) -> None:
    """Raises ConfigError unless both models have the same tokens with the same ids."""
    own, wanted = int(draft.config["vocab_size"]), int(target.config["vocab_size"])
    if own != wanted:
        raise ConfigError(
            f"{PLACE}: model: {draft.path} has a vocabulary of {own} tokens, but {target.path} has {wanted}; {WAY_OUT}"
        )
    if draft.tokenizer_path is None or target.tokenizer_path is None:
        return
    one, other = vocabulary_of(draft.tokenizer_path), vocabulary_of(target.tokenizer_path)
    if num_others := sum(one.get(token) != token_id for token, token_id in other.items()):
        raise ConfigError(
            f"{PLACE}: model: the tokenizer of {draft.path} lacks {num_others} of the {len(other)} tokens of "
            f"{target.path}, or has other ids for them; {WAY_OUT}"
        )


def _max_model_len(draft: Checkpoint, speculation: Speculation, most: int) -> int:
    """Returns the longest sequence to draft for. Raises ConfigError if the settings exceed the model's positions."""
    wanted, limit = speculation.max_model_len, max(draft.max_position_embeddings, draft.rope.most)
    if wanted > limit:
        raise ConfigError(
            f"{PLACE}: max_model_len {wanted}: {draft.path} has positions for only {limit} tokens; give at most that"
        )
    if not wanted and limit < most:
        log.info("sequences get drafts up to %d tokens, not %d: %s has no more positions", limit, most, draft.path)
    return min(wanted or limit, most)
