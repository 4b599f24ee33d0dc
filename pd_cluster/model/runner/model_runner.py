"""Runs a step's forward pass: takes the planned chunks and returns the logits of the sampled rows.

On an accelerator decode steps run as graphs, and a step may be launched before the host has its tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.replaced_weights import Stamp
from pd_cluster.devices.device import reserved_nbytes
from pd_cluster.devices.device_streams import mark
from pd_cluster.errors import Closed, ModelError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_memory import GroupMove
from pd_cluster.kv.swap_space import SwapSpace
from pd_cluster.kv.tier_commands import AnyTierCommand, LowerKind
from pd_cluster.kv.tier_thread import TierThread
from pd_cluster.model.draft.draft_head import DraftHead
from pd_cluster.model.draft.draft_pairs import HeadOutput, HeadPairs, PairChunk, draft_pairs, write_pairs
from pd_cluster.model.graphs.step_graphs import StepGraphs
from pd_cluster.model.inputs.forward_batch import (
    NO_HIDDEN_STATES,
    AuxiliaryStates,
    EncoderTotals,
    OnLayer,
    RunnerOutput,
    batch_of,
    on_device,
    sizes_of_blocks,
)
from pd_cluster.model.inputs.image_rows import ImagePart
from pd_cluster.model.inputs.step_input import NO_DRAFTS, Drafts, StepInput, keeps_of, sample_rows_of, step_input
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.loading.load_proof import prove
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.runner.loaded_parts import LoadedParts, load_parts
from pd_cluster.model.runner.model_adapters import ModelAdapters
from pd_cluster.model.runner.step_threads import StepThreads
from pd_cluster.model.runner.weight_change import graphs_again, overwrite_parts, prove_again
from pd_cluster.model.runner.weight_versions import check_stamp, plan_from
from pd_cluster.model.sampling.device_sampling import can_choose, choose, tell
from pd_cluster.model.sampling.device_tokens import After, DeviceTokens
from pd_cluster.model.vision.vision_tower import Tower
from pd_cluster.native.malloc_settings import give_freed_back
from pd_cluster.numerics import Numerics
from pd_cluster.types import Request, StateCopy
from pd_cluster.wire import SleepLevel

CLOSE_S = 2.0


class KVMemory(NamedTuple):
    """The pool and the swap space of each group of layers."""

    pools: tuple[KVPool, ...]
    swaps: tuple[SwapSpace, ...]
    max_num_seqs: int  # the number of sequences whose states fit at once
    # The draft model's pool, which has as many blocks as the main pool: see kv/twin_blocks.py.
    twin: KVPool | None = None


class DraftLimits(NamedTuple):
    """The longest sequence that a draft model drafts for, and whether it drafts the most likely tokens."""

    max_model_len: int
    is_greedy: bool


class LoadProof(NamedTuple):
    """Results of the checks at load. `window`: the sliding window of all layers, see `prove`."""

    window: int | None
    numerics: Numerics


class ModelRunner:
    """A loaded model and its KV pool on one device. See load_runner.py."""

    def __init__(
        self,
        plan: LoadPlan,
        parts: LoadedParts,
        memory: KVMemory,
        held: ModelAdapters,
        proof: LoadProof,
        graphs: StepGraphs,
    ) -> None:
        self._plan = plan
        self._parts: LoadedParts | None = parts  # None: the weights are not in memory
        self._memory: KVMemory | None = memory  # None: closed
        self.group, self.device = plan.group, plan.device
        self._unit = None if plan.experts is None else plan.experts.exchange
        self.max_model_len, self.max_num_batched_tokens = plan.max_model_len, plan.max_num_batched_tokens
        self.model_folder = plan.checkpoint.path  # the weights that were loaded at start
        self.model_identity, self.tokenizer_file = plan.checkpoint.identity, plan.tokenizer_file
        self.eos_token_ids, self.vocab_size = plan.checkpoint.eos_token_ids, int(plan.checkpoint.config["vocab_size"])
        self.goes_ahead = plan.goes_ahead and len(memory.pools) == 1  # with states, the host must first choose copies
        self.max_num_seqs = memory.max_num_seqs
        self._further_sizes = sizes_of_blocks(memory.pools[1:])
        self.held, self.graphs = held, graphs
        self.window, self.numerics = proof
        self.head_pairs = HeadPairs(plan.block_size)
        self.tiers: dict[LowerKind, TierThread] = {}
        self.threads = StepThreads()

    @property
    def pools(self) -> tuple[KVPool, ...]:
        """Returns the pool of each group of layers. Raises Closed after `let_go`."""
        return self._kv_memory.pools

    @property
    def swaps(self) -> tuple[SwapSpace, ...]:
        """Returns the swap space of each group of layers. Raises Closed after `let_go`."""
        return self._kv_memory.swaps

    @property
    def pool(self) -> KVPool:
        """Returns the pool of group 0. Raises Closed after `let_go`."""
        return self._kv_memory.pools[0]

    @property
    def swap(self) -> SwapSpace:
        """Returns the swap space of group 0. Raises Closed after `let_go`."""
        return self._kv_memory.swaps[0]

    @property
    def draft_limits(self) -> DraftLimits | None:
        """Returns None without a draft model or head.

        A draft model needs all blocks of a sequence. A sequence longer than the sliding window has released some, so it
        gets no drafts.
        """
        speculation, draft = self._plan.config.speculation, self._plan.draft
        if draft is None and self.head is None:
            return None
        most = self.max_model_len if draft is None else draft.max_model_len
        most = most if self.window is None else min(most, self.window)
        return DraftLimits(most, speculation.draft_sample_method == "greedy")

    @property
    def _kv_memory(self) -> KVMemory:
        if self._memory is None:
            raise Closed("the KV pool is closed")
        return self._memory

    @property
    def model(self) -> CausalLM:
        """Returns the model. Raises Closed during a sleep without weights, and after `let_go`."""
        if self._parts is None:
            raise Closed("the model's weights are not in memory")
        return self._parts.model

    @property
    def head(self) -> DraftHead | None:
        """Returns the draft head; None without one, and while the weights are not in memory."""
        return None if self._parts is None else self._parts.head

    @property
    def tower(self) -> Tower | None:
        """Returns the vision tower; None without one, and while the weights are not in memory."""
        return None if self._parts is None else self._parts.tower

    @property
    def rows_are_alike(self) -> bool:
        """Whether the other rows of a step change a row's results only by rounding.

        True on accelerators, and on CPUs with float32 sums. torch's own 16-bit products on CPUs vary more, and in 16
        bits the two best tokens are often nearly tied.
        """
        return self.device.is_accelerator or self._plan.dtype == "float32" or bool(self.model.bf16_way)

    def forward(
        self,
        chunks: list[tuple[Request, int]],
        on_layer: OnLayer | None = None,
        drafts: Drafts = NO_DRAFTS,
        keeps: Sequence[StateCopy] = (),
    ) -> RunnerOutput:
        """Computes the chunks like `compute`, and the draft head's pairs for prompts and for blocks that become full.

        `keeps`: the copies of states to make, for models with states.
        """
        if (head := self.head) is None:
            return self.compute(self.step_of(chunks, drafts, keeps=keeps), on_layer)
        if blank := self.head_pairs.unpaired_blocks(chunks):
            self.pool.clear(blank, self.pool.layout.num_model_layers)
        lacking = self.head_pairs.lacking(chunks)
        taps = AuxiliaryStates(head.taps)
        output = self.compute(self.step_of(chunks, drafts, lacking), on_layer, taps=taps)
        pairs = self.head_pairs.take(chunks, drafts, lacking, torch.cat(taps.states, dim=1))
        if pairs:
            with torch.inference_mode(), self.threads.step(sum(len(each.token_ids) for each in pairs)):
                write_pairs(head, self.pool, pairs)
        if on_layer is not None:
            on_layer(self.pool.layout.num_layers)
        return output

    def compute(
        self,
        step: StepInput,
        on_layer: OnLayer | None = None,
        is_ahead: bool = False,
        taps: AuxiliaryStates | None = None,
    ) -> RunnerOutput:
        """Computes the chunks, writes to the pool, and returns the requested logits and hidden states.

        After each layer, `on_layer` receives the number of layers whose keys and values for the chunks are in the pool;
        on an accelerator, a write counts as soon as it is launched. `is_ahead`, only on ranks other than 0: rank 0 has
        launched this step with tokens that only its device has so far.
        """
        input_ids = None
        if is_ahead:
            empty = torch.zeros(len(step.input_ids), dtype=torch.int64, device=self.device.torch_name)
            input_ids = self.group.spread(empty)
        with self.threads.step(len(step.input_ids)):
            logits, hidden_states = self._compute(step, input_ids, on_layer, taps)
        return RunnerOutput(logits.float(), hidden_states)

    def compute_draft(self, step: StepInput) -> torch.Tensor:
        """Runs the draft model, which writes to the twins of the rows' blocks; returns the requested float32 logits.

        It runs on this rank's own cores only.
        """
        twin = self._kv_memory.twin
        assert self._parts is not None
        assert self._parts.draft is not None
        assert twin is not None  # see load_runner.py
        with torch.inference_mode():
            return self._parts.draft(batch_of(step, twin)).float()

    def draft_pairs(self, chunks: Sequence[PairChunk], are_tapped: bool) -> HeadOutput:
        """Computes pairs for the draft head; see draft/draft_pairs.py."""
        assert self.head is not None
        with torch.inference_mode():
            return draft_pairs(self.head, self.pool, chunks, are_tapped, self.vocab_size)

    def can_launch(self, requests: Sequence[Request]) -> bool:
        return can_choose(requests, self.device)

    def step_of(
        self,
        chunks: Sequence[tuple[Request, int]],
        drafts: Drafts = NO_DRAFTS,
        again: Sequence[Request] = (),
        keeps: Sequence[StateCopy] = (),
    ) -> StepInput:
        block_size = self.pool.layout.block_size
        step = step_input(chunks, block_size, self.held.slots, drafts, again, self._further_sizes)
        if keeps:
            step = replace(step, keeps=keeps_of(chunks, keeps))
        return replace(step, images=self.tower.marked(step.images)) if step.images and self.tower is not None else step

    @property
    def encoded(self) -> EncoderTotals:
        return EncoderTotals() if self.tower is None else self.tower.encoded

    def without_foreign_pixels(self, parts: Sequence[ImagePart], rank: int) -> list[ImagePart]:
        """Returns the picture parts of a step for another rank, with pixels only for the pictures that it computes."""
        assert self.tower is not None or not parts
        return [] if self.tower is None else self.tower.without_foreign_pixels(parts, rank)

    def launch(
        self, chunks: Sequence[tuple[Request, int]], after: After | None = None, on_layer: OnLayer | None = None
    ) -> DeviceTokens:
        """Launches a step's forward pass and sampling, if `goes_ahead` is set; see engine/step/look_ahead.py."""
        return self.launch_step(self.step_of(chunks), chunks, after, on_layer)

    def launch_step(
        self,
        step: StepInput,
        chunks: Sequence[tuple[Request, int]],
        after: After | None,
        on_layer: OnLayer | None = None,
    ) -> DeviceTokens:
        """Launches a step on rank 0; the other ranks call `compute`."""
        with torch.inference_mode():
            input_ids = None if after is None else self.group.spread(after.input_ids(step))
            logits, _ = self._compute(step, input_ids, on_layer)
            ready = [request for request, count in zip(chunks, step.rows[:, 3], strict=True) if count]
            token_ids = self._choose(logits, ready, step, input_ids)
            requests = [request for request, _ in ready]
            return DeviceTokens(token_ids, self.device, tell(logits, token_ids, requests, self.device))

    def _choose(
        self, logits: torch.Tensor, ready: list[tuple[Request, int]], step: StepInput, input_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the next token of each chunk that reaches the end of its sequence, [num_ready] int64."""
        if not ready:
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        requests, last_ids = [request for request, _ in ready], None
        unknown = [num_tokens > request.num_behind for request, num_tokens in ready]
        if input_ids is not None and any(unknown):
            last_ids = input_ids
            if len(ready) < len(input_ids):
                rows = on_device({"rows": sample_rows_of(step)}, self.device)["rows"]
                last_ids = input_ids.index_select(0, rows)
        return choose(logits, requests, last_ids, self.eos_token_ids, self.device, unknown)

    def _compute(
        self,
        step: StepInput,
        input_ids: torch.Tensor | None,
        on_layer: OnLayer | None = None,
        taps: AuxiliaryStates | None = None,
    ) -> RunnerOutput:
        """Returns logits in the model's dtype; `input_ids` [num_tokens], on the device, replace the step's own."""
        with torch.inference_mode():
            graphs = self.graphs.decode if step.adapters is None else self.graphs.adapted
            if graphs is not None and on_layer is None:
                logits = graphs.compute(step, input_ids)
                if logits is not None:
                    return RunnerOutput(logits, NO_HIDDEN_STATES)
            if self.graphs.prompts is not None:
                logits = self.graphs.prompts.compute(step, input_ids, on_layer)
                if logits is not None:
                    return RunnerOutput(logits, NO_HIDDEN_STATES)
            sees_whole = self.tower is not None and self.tower.rules.sees_whole
            batch = batch_of(step, self.pool, sees_whole, self.pools[1:])
            if input_ids is not None:
                batch.input_ids = input_ids[None]
            if step.images:
                assert self.tower is not None  # see engine/step/engine_limits.py
                batch.images = self.tower.rows(step.images, batch.num_tokens)
            if step.virtual is not None:
                assert self.held.prompts is not None  # see engine/step/engine_limits.py
                batch.virtual = self.held.prompts.rows(step.virtual)
            batch.on_layer, batch.taps = on_layer, taps
            batch.after_layer = self.threads.adjust if self.threads.may_change else None
            logits = self.model(batch)
            states = batch.hidden.states if batch.hidden is not None else None
            # Ranks other than 0 discard the states, but copying them costs little in a step that computes prompts.
            return RunnerOutput(logits, NO_HIDDEN_STATES if states is None else states.cpu().float())

    def expect(self, rows: Sequence[int]) -> None:
        """Sets the number of rows of each member of the unit in the next step."""
        assert self._unit is not None
        self._unit.rows = rows

    def take_part(self) -> None:
        """Computes this rank's experts for the rows of the unit's other members, when it has no rows of its own."""
        assert self._unit is not None
        with torch.inference_mode(), self.threads.step(sum(self._unit.rows or ())):
            self.model.take_part()

    def sleep(self, level: SleepLevel) -> None:
        """Frees memory, or loads it again, between two steps; no block may be in use. CPU only.

        Level 1 frees the KV cache, level 2 also the weights; levels 0 and 1 load the weights again if they were freed.
        Raises ModelError if that fails, and TierBusy.
        """
        assert not self.device.is_accelerator
        if level == 2:
            self._parts = None
        elif self._parts is None:
            self._parts = self._loaded_again()
        if level:
            for tier in self.tiers.values():
                tier.settle()
            memory = self._kv_memory
            for pool in memory.pools if memory.twin is None else (*memory.pools, memory.twin):
                pool.vacate()
            for swap in memory.swaps:
                swap.vacate()
            gc.collect()
            give_freed_back()

    def change_weights(self, path: str, stamp: Stamp) -> None:
        """Replaces the weights by those of another folder, between two steps; no block may be in use.

        If the new weights can be copied into the memory of the old ones, graphs stay; otherwise they are captured
        again. Raises ModelError if the files have changed since `stamp` was taken, or cannot be loaded.
        """
        plan = plan_from(self._plan, path)
        check_stamp(path, stamp)
        self._plan, on_device = plan, self.device.is_accelerator
        if on_device and self._parts is not None and overwrite_parts(plan, self._parts):
            prove_again(plan, self._parts, self.pools)
            return
        self.graphs, self._parts = StepGraphs(), None  # first, so that only one version is in memory
        gc.collect()
        if on_device:
            reserved_nbytes(self.device)  # frees the memory of graphs and weights
        self._parts = self._loaded_again()
        if on_device:
            self.graphs = graphs_again(plan, self._parts, self.pools)
        else:
            give_freed_back()

    def order(self, kind: LowerKind, orders: Sequence[AnyTierCommand]) -> None:
        """Queues commands for this rank's thread of a lower tier, to run after all block moves issued so far."""
        self.tiers[kind].submit(orders, mark(self.device))

    def close_tiers(self) -> None:
        """Gives the threads of lower tiers a short time to finish their queued writes."""
        for tier in self.tiers.values():
            tier.close(CLOSE_S)

    def let_go(self) -> None:
        """Frees weights, adapters, graphs and the KV cache at once; do not use this object afterwards."""
        self.graphs, self._parts = StepGraphs(), None
        self.held.let_go()
        memory, self._memory = self._memory, None
        if memory is not None:
            for pool in memory.pools if memory.twin is None else (*memory.pools, memory.twin):
                pool.close()
        if not self.device.is_accelerator:
            give_freed_back()

    def _loaded_again(self) -> LoadedParts:
        """Loads the parts again. Raises ModelError if the folder now holds a model with another identity, because other
        instances rely on the identity.
        """
        checkpoint = Checkpoint.of(self._plan.config, self._plan.checkpoint)
        if checkpoint.identity != self._plan.checkpoint.identity:
            raise ModelError(f"{checkpoint.path}: the model has changed during the sleep; restart all instances")
        if (draft := self._plan.draft) is not None and Checkpoint.of(
            draft.config
        ).identity != draft.checkpoint.identity:
            raise ModelError(
                f"{draft.checkpoint.path}: the draft model has changed during the sleep; restart the instance"
            )
        with self.threads.loading():
            parts = load_parts(self._plan)
        # The identity of a head that belongs to the model changes when weights are replaced.
        if (head := parts.head) is not None and not (head.is_of_model or head.identity == self.pool.layout.draft_head):
            place = self._plan.config.speculation.model or checkpoint.path
            raise ModelError(f"{place}: the draft head has changed during the sleep; restart all instances")
        self.held.adopt(parts.model)
        prove(parts.model, self.pools, self._plan.dtype)
        self.group.loaded()
        return parts

    def move(self, moves: Sequence[GroupMove]) -> None:
        """Copies or clears blocks (kind, source, target, group) in the given order; see SwapSpace.

        Groups share no blocks, so the groups' moves can be done one group after another.
        """
        for at, swap in enumerate(self.swaps):
            own = [(kind, source, target) for kind, source, target, group in moves if group == at]
            if own:
                swap.move(own)
