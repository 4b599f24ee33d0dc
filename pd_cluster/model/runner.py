"""Runs one step's forward pass: a plan's chunks in, logits of the sampled rows out.

On an accelerator decode steps are graphs, and steps may be launched whose tokens the host does not know yet.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.weight_files import num_weights
from pd_cluster.devices.device import Device, resolve, use
from pd_cluster.devices.group import buffers_nbytes
from pd_cluster.devices.streams import capture, mark
from pd_cluster.errors import Closed, ConfigError, ModelError, called
from pd_cluster.kv.layout import num_lanes
from pd_cluster.kv.memory import Move
from pd_cluster.kv.pool import KVPool
from pd_cluster.kv.swap import SwapSpace
from pd_cluster.kv.tier_orders import AnyOrder, LowerKind
from pd_cluster.kv.tier_thread import TierThread
from pd_cluster.model.adapter_devices import are_in_tables, put_adapters
from pd_cluster.model.attention_choice import SDPA, check_backend, check_deterministic, default_block_size
from pd_cluster.model.batch import (
    NO_HIDDEN_STATES,
    Encoded,
    OnLayer,
    RunnerOutput,
    StepInput,
    batch_of,
    on_device,
    sample_rows_of,
    step_input,
)
from pd_cluster.model.capturable import obstacle
from pd_cluster.model.causal_lm import FusedCausalLM, PlainCausalLM
from pd_cluster.model.declared import layout_of
from pd_cluster.model.graph_kinds import check_prompt_graphs, make_graphs, make_prompt_graphs
from pd_cluster.model.graphs import MAX_ONLY_START_S, MAX_START_S, DecodeGraphs, sizes_of
from pd_cluster.model.held_adapters import HeldAdapters
from pd_cluster.model.image_rows import ImagePart
from pd_cluster.model.loader import plan_of, resolve_dtype, resolve_kv_cache_dtype
from pd_cluster.model.parallel.group import Alone, Group
from pd_cluster.model.parts import load_parts
from pd_cluster.model.profile import (
    check_pictures_fit,
    decode_workspace_nbytes,
    nbytes_of_adapters,
    nbytes_of_graphs,
    peak_of_a_step,
    peak_of_images,
)
from pd_cluster.model.prompt_graphs import PromptGraphs, sizes_up_to
from pd_cluster.model.proof import prove
from pd_cluster.model.sampling.on_device import can_choose, choose, tell
from pd_cluster.model.sampling.tokens import After, DeviceTokens
from pd_cluster.model.sense import warn_of_chance
from pd_cluster.model.sizing import (
    check_offload,
    num_host_cache_blocks,
    num_pool_blocks,
    num_step_tokens,
    num_swap_blocks,
)
from pd_cluster.model.speedups import numerics_name, speedups_for
from pd_cluster.model.threads import StepThreads
from pd_cluster.model.trial import prove_lengths, trial
from pd_cluster.model.vision.tower import Tower
from pd_cluster.native.memory import give_freed_back, keep_what_is_freed
from pd_cluster.numerics import Numerics
from pd_cluster.settings.adapters import AdapterSettings
from pd_cluster.settings.engine import PROMPT_GRAPHS, EngineConfig
from pd_cluster.types import Request
from pd_cluster.wire import SleepLevel

log = logging.getLogger(__name__)


ASKING_ROPES = ("dynamic", "longrope")  # transformers' own code compares the step's largest position on the host


class ModelRunner:
    """A loaded model and its KV pool on one device."""

    def __init__(self, config: EngineConfig, group: Group | None = None, device: Device | None = None) -> None:
        """`group`: the ranks that share the model; each of them builds its runner at the same time."""
        self._config = config
        self.group = group or Alone()
        assert self.group.size == config.tensor_parallel_size
        self.device = device = device or resolve(config.device)
        use(device)
        if not device.is_accelerator:
            keep_what_is_freed()
        block_size = config.block_size or default_block_size(device)
        check_backend(config.attention_backend, block_size, device)
        check_adapters(config.adapters, device)
        if config.deterministic:
            check_deterministic(config.attention_backend, device)
        given = config.cuda_speedups, device, config.deterministic, config.enforce_eager
        self._speedups = speedups_for(*given)
        if config.cpu_offload_gb:
            check_offload(config.cpu_offload_gb, device)
        checkpoint = Checkpoint.of(config)
        checkpoint.warn_if_unproven()
        self.max_model_len = checkpoint.max_model_len(config.max_model_len)
        self.eos_token_ids = checkpoint.eos_token_ids
        self.model_identity = checkpoint.identity
        self.tokenizer_file = (checkpoint.tokenizer_path or checkpoint.path) / "tokenizer.json"
        dtype = resolve_dtype(config.dtype, checkpoint, device)
        self.max_num_batched_tokens = self.group.least(num_step_tokens(config, device))
        self._pool: KVPool | None = None
        try:
            with trial(checkpoint):
                self._load(config, checkpoint, dtype, block_size)
            self._prepare(config, checkpoint, dtype)
            self.group.loaded()
        except BaseException:
            self._close_pool()
            raise

    def _prepare(self, config: EngineConfig, checkpoint: Checkpoint, dtype: str) -> None:
        """Captures graphs, and names what changes the loaded model's numbers."""
        device, coded = self.device, checkpoint.quantization
        self.numerics = Numerics(
            device=device.kind,
            dtype=dtype,
            attention_backend=numerics_name(self.model.attention, self._speedups)
            if device.is_accelerator
            else config.attention_backend,
            deterministic=config.deterministic,
            quantization="" if coded is None else coded.numerics_name(not device.is_accelerator),
            quantize_head=checkpoint.head_scheme,
            kv_cache_dtype=self.pool.layout.dtype,
            hf_overrides=checkpoint.hf_overrides,
            rope=checkpoint.rope,
            key_order=self.model.key_order,
            bf16_way=self.model.bf16_way,
        )
        self.prompt_graphs: PromptGraphs | None = None
        self.adapted_graphs: DecodeGraphs | None = None
        self.graphs = self._make_graphs(config)
        # Where the device is the host, nothing is gained.
        spreads = device.traits.spreads_tokens or config.npu_tp_graphs
        self.goes_ahead = device.is_accelerator and (self.group.size == 1 or spreads)
        self.threads = StepThreads()
        self._has_weights = True

    @property
    def pool(self) -> KVPool:
        """Raises Closed after `let_go`."""
        if self._pool is None:
            raise Closed("the KV pool is closed")
        return self._pool

    def _close_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _load(self, config: EngineConfig, checkpoint: Checkpoint, dtype: str, block_size: int) -> None:
        """Loads the model, allocates the pool and runs the proof. Raises ModelError for what must not be served."""
        device = self.device
        self._load_again = partial(
            load_parts, checkpoint, config, dtype, block_size, device, self.group, self._speedups
        )
        self.tower: Tower | None
        self.model, self.tower = self._load_again()
        warn_of_chance(self.model, checkpoint, layout_of(self.model.caches, block_size, dtype), device, self.group)
        if self.tower is not None:
            check_pictures_fit(self.tower.rules, self.max_num_batched_tokens, config.max_num_seqs)
        self.vocab_size = int(checkpoint.config["vocab_size"])
        layout = layout_of(self.model.caches, block_size, resolve_kv_cache_dtype(config.kv_cache_dtype, dtype))
        if self.group.size > 1:
            layout = plan_of(checkpoint, self.group.size).layout_of_rank(layout, self.group.rank)
        is_plain = isinstance(self.model, PlainCausalLM)
        self._obstacle = obstacle(self.model, layout, device) if is_plain and device.is_accelerator else ""
        num_tokens, num_seqs = self.max_num_batched_tokens, config.max_num_seqs
        peak = peak_of_a_step(self.model, layout, num_tokens, num_seqs, self.max_model_len, device)
        peak = max(peak, peak_of_images(self.tower, device))
        check_prompt_graphs(self.model, self._speedups)
        if device.is_accelerator and not self.why_eager(config):
            if PROMPT_GRAPHS in self._speedups:
                most = sizes_up_to(num_seqs)[-1]
                peak += nbytes_of_graphs(self.model, layout, most.num_seqs, device, most.num_tokens)
            peak += nbytes_of_graphs(self.model, layout, sizes_of(config.graph_sizes, num_seqs)[-1], device)
        if device.is_accelerator:
            peak += nbytes_of_adapters(self.model.config, config.adapters, dtype)
        peak += decode_workspace_nbytes(self.model, layout, num_seqs, self.max_model_len)
        num_pairs = num_lanes(layout, config.paired_tp_sizes)
        if nbytes := buffers_nbytes(device, num_pairs, self.group.size > 1):
            log.info("%.2f GiB are left to communicators, %d of them KV pairs", nbytes / 2**30, num_pairs)
        peak += nbytes
        num_blocks = num_pool_blocks(config, layout, self.max_model_len, device, peak)
        self._pool = KVPool(layout, self.group.least(num_blocks), device)
        num_kept = self.group.least(num_host_cache_blocks(config, layout))
        self.tiers: dict[LowerKind, TierThread] = {}
        self.swap = SwapSpace(self.pool, self.group.least(num_swap_blocks(config, layout)), num_kept)
        if device.is_accelerator and self.model.adapters is not None:
            put_adapters(self.model.adapters.places, config.adapters, device, dtype)
        self.held = HeldAdapters(self.model, layout, config.adapters, device)
        self.held.load_named(config.adapters)
        self._dtype = dtype
        self.window = prove(self.model, self.pool, dtype)
        if checkpoint.is_unproven:
            assert isinstance(self.model, PlainCausalLM)  # see load_model
            size = num_weights(checkpoint.path)
            prove_lengths(self.model, self.pool, self.max_model_len, size, checkpoint.rope, dtype)

    def _make_graphs(self, config: EngineConfig) -> DecodeGraphs | None:
        """Returns graphs, some of them captured; None: decode steps run eagerly.

        Ranks that share a model capture and replay the same steps, including their sums: the graph of a step follows
        from its numbers, and those are the same on all ranks.
        """
        if not self.device.is_accelerator:
            return None
        if why := self.why_eager(config):
            log.info("decode steps run eagerly: %s", why)
            return None
        capturing, is_alone = capture(self.device), self.group.size == 1
        graphs = make_graphs(self.model, self.pool, config, self.max_model_len, is_alone, capturing)
        if config.adapters.enable_lora and are_in_tables(
            self.model
        ):  # those without adapters have no launches for them
            decoding = self.model, self.pool, config, self.max_model_len, is_alone, capturing
            self.adapted_graphs = make_graphs(*decoding, config.adapters.max_loras)
        if PROMPT_GRAPHS in self._speedups:
            given = self.model, self.numerics.dtype, self.pool, config, self.max_model_len, is_alone, capturing
            self.prompt_graphs = make_prompt_graphs(*given)
        stop_s = time.monotonic() + (MAX_ONLY_START_S if self.device.traits.captures_at_start_only else MAX_START_S)
        with torch.inference_mode():
            graphs.prepare(lambda: self._all(time.monotonic() < stop_s), self._all)
            if self.prompt_graphs is not None:
                self.prompt_graphs.prepare(lambda: self._all(time.monotonic() < stop_s))
        return graphs

    def _all(self, holds: bool) -> bool:
        """Whether it holds on every rank that shares the model."""
        return bool(self.group.least(int(holds)))

    def why_eager(self, config: EngineConfig) -> str:
        """Returns why an accelerator captures no graphs, or ""."""
        if config.enforce_eager:
            return "--enforce-eager"
        if (rope := rope_type(self.model.config)) in ASKING_ROPES:
            return f"rope_type {rope} asks the device for positions"
        if self.group.size > 1 and not (self.device.traits.captures_sums or config.npu_tp_graphs):
            return "graphs of ranks have not run on NPUs; --npu-tp-graphs captures them"
        if isinstance(self.model, FusedCausalLM):
            return "" if self.model.ops.is_capturable else "SDPA asks the device for lengths"
        if self.model.attention == SDPA.name:
            return "SDPA asks the device for lengths"
        if not self.device.traits.captures_modules:
            return f"its layers are not fused, and graphs of others are untested on {self.device.kind.upper()}"
        return f"in its layers {self._obstacle}" if self._obstacle else ""

    def forward(self, chunks: list[tuple[Request, int]], on_layer: OnLayer | None = None) -> RunnerOutput:
        """See `compute`."""
        return self.compute(self.step_of(chunks), on_layer)

    def compute(self, step: StepInput, on_layer: OnLayer | None = None, is_ahead: bool = False) -> RunnerOutput:
        """Computes the chunks into the pool; returns logits and hidden states of the rows wanted.

        After each layer, `on_layer` receives how many layers of the chunks' keys and values are in the pool; on an
        accelerator, how many have their writes launched. `is_ahead`, on ranks other than 0 only: rank 0 has launched
        the step from tokens on its device.
        """
        input_ids = None
        if is_ahead:
            empty = torch.zeros(len(step.input_ids), dtype=torch.int64, device=self.device.torch_name)
            input_ids = self.group.spread(empty)
        with self.threads.step(len(step.input_ids)):
            logits, hidden_states = self._compute(step, input_ids, on_layer)
        return RunnerOutput(logits.float(), hidden_states)

    def can_launch(self, requests: Sequence[Request]) -> bool:
        return can_choose(requests, self.device)

    def step_of(self, chunks: Sequence[tuple[Request, int]]) -> StepInput:
        step = step_input(chunks, self.pool.layout.block_size, self.held.lora_slots, self.held.prompt_slots)
        return replace(step, images=self.tower.marked(step.images)) if step.images and self.tower is not None else step

    @property
    def encoded(self) -> Encoded:
        return Encoded() if self.tower is None else self.tower.encoded

    def sparing_pixels(self, parts: Sequence[ImagePart], rank: int) -> list[ImagePart]:
        """Returns a step's parts of pictures for another rank, which keeps the same features as this one."""
        assert self.tower is not None or not parts
        return [] if self.tower is None else self.tower.sparing_pixels(parts, rank)

    def launch(
        self, chunks: Sequence[tuple[Request, int]], after: After | None = None, on_layer: OnLayer | None = None
    ) -> DeviceTokens:
        """See engine/step/ahead.py; for runners that go ahead."""
        return self.launch_step(self.step_of(chunks), chunks, after, on_layer)

    def launch_step(
        self,
        step: StepInput,
        chunks: Sequence[tuple[Request, int]],
        after: After | None,
        on_layer: OnLayer | None = None,
    ) -> DeviceTokens:
        """Launches a step on rank 0; the others `compute` it."""
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
        """Returns a token for each of the chunks that catch up, [num_ready] int64."""
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
        self, step: StepInput, input_ids: torch.Tensor | None, on_layer: OnLayer | None = None
    ) -> RunnerOutput:
        """Returns logits in the model's dtype; `input_ids` [num_tokens], on the device, replace the step's."""
        with torch.inference_mode():
            graphs = self.graphs if step.adapters is None else self.adapted_graphs
            if graphs is not None and on_layer is None:
                logits = graphs.compute(step, input_ids)
                if logits is not None:
                    return RunnerOutput(logits, NO_HIDDEN_STATES)
            if self.prompt_graphs is not None:
                logits = self.prompt_graphs.compute(step, input_ids, on_layer)
                if logits is not None:
                    return RunnerOutput(logits, NO_HIDDEN_STATES)
            batch = batch_of(step, self.pool, self.tower is not None and self.tower.rules.sees_whole)
            if input_ids is not None:
                batch.input_ids = input_ids[None]
            if step.images:
                assert self.tower is not None  # see engine/step/limits.py
                batch.images = self.tower.rows(step.images, batch.num_tokens)
            if step.virtual is not None:
                assert self.held.prompts is not None  # see engine/step/limits.py
                batch.virtual = self.held.prompts.rows(step.virtual)
            batch.on_layer = on_layer
            batch.after_layer = self.threads.adjust if self.threads.may_change else None
            logits = self.model(batch)
            states = batch.hidden.states if batch.hidden is not None else None
            # Ranks other than 0 drop them, but a copy to the host is small beside a step that computed prompts.
            return RunnerOutput(logits, NO_HIDDEN_STATES if states is None else states.cpu().float())

    def sleep(self, level: SleepLevel) -> None:
        """Returns memory to the system, or takes it again, between two steps; no block may be in use. On CPU only.

        Level 1: without the KV cache; level 2: without weights, too. Raises ModelError: they cannot be had
        again; TierBusy.
        """
        assert not self.device.is_accelerator
        if level == 2 and self._has_weights:
            del self.model
            self.tower, self._has_weights = None, False
        elif level < 2 and not self._has_weights:
            self._check_files()
            with self.threads.loading():
                self.model, self.tower = self._load_again()
            self.held.adopt(self.model)
            prove(self.model, self.pool, self._dtype)
            self.group.loaded()
            self._has_weights = True
        if level:
            for tier in self.tiers.values():
                tier.settle()
            self.pool.vacate()
            self.swap.vacate()
            gc.collect()
            give_freed_back()

    def order(self, kind: LowerKind, orders: Sequence[AnyOrder]) -> None:
        """Has this rank's thread of a lower tier carry out orders, once all moves so far are made."""
        self.tiers[kind].submit(orders, mark(self.device))

    def close_tiers(self) -> None:
        """Lets the threads of lower tiers write what is queued, for a short while."""
        for tier in self.tiers.values():
            tier.close(CLOSE_S)

    def let_go(self) -> None:
        """Frees weights, adapters, graphs and the KV cache at once; this object is of no use afterwards."""
        self.graphs = self.adapted_graphs = self.prompt_graphs = self.tower = None
        self.held.let_go()
        del self.model, self.swap
        self._close_pool()
        if not self.device.is_accelerator:
            give_freed_back()

    def _check_files(self) -> None:
        """Raises ModelError if the folder is another model by now than the one that others know by its identity."""
        checkpoint = Checkpoint.of(self._config)
        if checkpoint.identity != self.model_identity:
            raise ModelError(f"{checkpoint.path}: it is another model than before the sleep; start all instances again")

    def move(self, moves: Sequence[tuple[Move, int, int]]) -> None:
        """Copies blocks (kind, source, target) in this order; see SwapSpace."""
        self.swap.move(moves)


CLOSE_S = 2.0


def check_adapters(adapters: AdapterSettings, device: Device) -> None:
    """Raises ConfigError for adapters that this kind of device does not compute."""
    if adapters.enable_prompt_adapter and not device.traits.takes_prompt_adapters:
        name = called("enable_prompt_adapter")
        raise ConfigError(f"{name}: prompt adapters are computed on CPUs and CUDA only; give {called('device')} cpu")


def rope_type(config: Any) -> str:
    """Returns the rope_type of a transformers config; where kinds of layers differ, one that asks for positions."""
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in given.values() if isinstance(each, dict)] or [given]
    found = [str(each.get("rope_type", "default")) for each in kinds]
    return next((each for each in found if each in ASKING_ROPES), found[0])
