"""Builds the drafters of an engine, in the order in which they are tried."""

from __future__ import annotations

import logging

from pd_cluster.engine.draft.chain_drafter import DraftChoice
from pd_cluster.engine.draft.drafter import Drafter
from pd_cluster.engine.draft.forced_drafter import ForcedDrafter
from pd_cluster.engine.draft.head_drafter import HeadDrafter
from pd_cluster.engine.draft.model_drafter import ModelDrafter
from pd_cluster.engine.draft.ngram_drafter import NgramDrafter
from pd_cluster.engine.draft.prediction_drafter import PredictionDrafter
from pd_cluster.engine.draft.suffix_drafter import SuffixDrafter
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.step.drafting import MAX_DRAFT_ROWS, Drafting
from pd_cluster.kv.twin_blocks import TwinBlocks
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.model.sampling.grammar_masks import Guides
from pd_cluster.model.sampling.sampler import Sampler
from pd_cluster.settings.speculation import Method, Speculation

log = logging.getLogger(__name__)

TOKEN_NBYTES = 64  # approximate bytes of memory per token of earlier outputs


def drafting_of(speculation: Speculation, scheduler: StepScheduler, guides: Guides, runner: ModelRunner) -> Drafting:
    """Returns the engine's Drafting, which has no drafters in two cases.

    In the first, a row's logits depend on the other rows of the batch, so drafts would change the output. In the
    second, the model has states, and a state cannot undo a rejected draft.
    """
    if any(pool.layout.holds.is_state for pool in runner.pools):
        return Drafting(scheduler, ())
    if not runner.rows_are_alike:
        if speculation.methods:
            log.warning("speculation is off: in 16 bits drafts would change this model's output; use --dtype float32")
        return Drafting(scheduler, ())
    own = [_drafter(method, speculation, scheduler, runner) for method in speculation.methods]
    # An accelerator's graphs have a limited number of rows.
    most_rows = scheduler.max_num_seqs if runner.goes_ahead else MAX_DRAFT_ROWS
    drafters = [PredictionDrafter(), ForcedDrafter(guides), *own]
    return Drafting(scheduler, drafters, speculation, runner.vocab_size, most_rows)


def _drafter(method: Method, speculation: Speculation, scheduler: StepScheduler, runner: ModelRunner) -> Drafter:
    if method == "ngram":
        return NgramDrafter(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
    if method != "suffix":
        return _drafter_with_weights(method, scheduler, runner)
    return SuffixDrafter(
        speculation.suffix_decoding_max_tree_depth,
        speculation.suffix_decoding_max_cached_requests,
        speculation.suffix_decoding_max_spec_factor,
        speculation.suffix_decoding_min_token_prob,
        TOKEN_NBYTES * speculation.suffix_decoding_max_cached_tokens,
    )


def _drafter_with_weights(method: Method, scheduler: StepScheduler, runner: ModelRunner) -> Drafter:
    limits, grow = runner.draft_limits, scheduler.allocator.grow_for_drafts
    assert limits is not None  # see model/draft/draft_plan.py
    choice = DraftChoice(Sampler(runner.vocab_size, runner.eos_token_ids), limits)
    if method != "draft_model":
        return HeadDrafter(method, runner, choice, grow)
    return ModelDrafter(runner, choice, TwinBlocks(scheduler.blocks, scheduler.block_size), grow)
