"""Runs one step's forward pass: a plan's chunks in, logits of the sampled rows out.

On an accelerator decode steps are graphs, and steps may be launched whose tokens the host does not know yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pd_cluster.checkpoint import Checkpoint
from pd_cluster.config import EngineConfig
from pd_cluster.device import Device, resolve, use
from pd_cluster.kv.pool import KVPool
from pd_cluster.kv.swap import Kind, SwapSpace
from pd_cluster.model.attention.choice import check_backend, default_block_size
from pd_cluster.model.batch import StepInput, batch_of, step_ahead, step_input
from pd_cluster.model.causal_lm import CausalLM, FusedCausalLM, PlainCausalLM
from pd_cluster.model.choice import can_choose, choose, tell
from pd_cluster.model.cpu.memory import keep_what_is_freed
from pd_cluster.model.graphs import DecodeGraphs
from pd_cluster.model.loader import layout_of, load_model, plan_of, resolve_dtype
from pd_cluster.model.parallel.group import Alone, Group
from pd_cluster.model.profile import peak_of_a_step
from pd_cluster.model.proof import prove
from pd_cluster.model.sizing import num_pool_blocks, num_swap_blocks
from pd_cluster.model.tokens import After, DeviceTokens
from pd_cluster.model.trial import prove_lengths, trial
from pd_cluster.numerics import Numerics
from pd_cluster.streams import capture
from pd_cluster.types import Request
from pd_cluster.weight_files import num_weights

log = logging.getLogger(__name__)

OnLayer = Callable[[int], None]

NPU_STREAMS = 1800  # for graphs; 2,048 are there, by what others who capture on NPUs have found
ASKING_ROPES = ("dynamic", "longrope")  # transformers' own code compares the step's largest position on the host


class ModelRunner:
    """A loaded model and its KV pool on one device."""

    def __init__(self, config: EngineConfig, group: Group | None = None, device: Device | None = None) -> None:
        """`group`: the ranks that share the model; every one of them builds its runner at the same time."""
        self.group = group or Alone()
        assert self.group.size == config.tensor_parallel_size
        self.device = device = device or resolve(config.device)
        use(device)
        if not device.is_accelerator:
            keep_what_is_freed()
        block_size = config.block_size or default_block_size(device)
        check_backend(config.attention_backend, block_size, device)
        checkpoint = Checkpoint.of(config)
        checkpoint.warn_if_unproven()
        self.max_model_len = checkpoint.max_model_len(config.max_model_len)
        self.eos_token_ids = checkpoint.eos_token_ids
        self.model_identity = checkpoint.identity
        self.tokenizer_file = (checkpoint.tokenizer_path or checkpoint.path) / "tokenizer.json"
        dtype = resolve_dtype(config.dtype, checkpoint, device)
        with trial(checkpoint):
            self._load(config, checkpoint, dtype, block_size)
        self.numerics = Numerics(
            device=device.kind,
            dtype=dtype,
            attention_backend=config.attention_backend if device.kind == "cpu" else self.model.attention,
            hf_overrides=checkpoint.hf_overrides,
            rope=checkpoint.rope,
        )
        self._graphs = self._make_graphs(config)
        # Where the device is the host, why should it; and HCCL's broadcast of tokens has never been tried.
        self.goes_ahead = device.is_accelerator and (self.group.size == 1 or device.kind != "npu")
        self.group.loaded()

    def _load(self, config: EngineConfig, checkpoint: Checkpoint, dtype: str, block_size: int) -> None:
        """Model, pool and proof. Raises ModelError for what must not be served."""
        device, backend = self.device, config.attention_backend
        self.model = load_model(checkpoint, dtype, device, self.group, backend, block_size, config.max_num_seqs)
        self.vocab_size = int(checkpoint.config["vocab_size"])
        layout = layout_of(self.model.config, block_size, dtype)
        if self.group.size > 1:
            layout = plan_of(checkpoint, self.group.size).layout_of_rank(layout, self.group.rank)
        peak = peak_of_a_step(self.model, layout, config, self.max_model_len, device)
        num_blocks = num_pool_blocks(config, layout, self.max_model_len, device, peak)
        self.pool = KVPool(layout, self.group.least(num_blocks), device)
        self.swap = SwapSpace(self.pool, self.group.least(num_swap_blocks(config, layout)))
        self.window = prove(self.model, self.pool)
        if checkpoint.is_unproven:
            assert isinstance(self.model, PlainCausalLM)  # see load_model
            size = num_weights(checkpoint.path)
            prove_lengths(self.model, self.pool, self.max_model_len, size, checkpoint.rope)

    def _make_graphs(self, config: EngineConfig) -> DecodeGraphs | None:
        """Only for fused layers, which are known to launch the same again and never to ask the device.

        Ranks that share a model capture and replay the same steps, their sums among what is captured: which graph
        serves a step follows from its numbers, and those are the same on all ranks.
        """
        if not self.device.is_accelerator:
            return None
        if config.enforce_eager:
            why = "--enforce-eager"
        elif not isinstance(self.model, FusedCausalLM):
            why = "its layers are not fused"
        elif (rope := rope_type(self.model.config)) in ASKING_ROPES:
            why = f"rope_type {rope} asks the device for positions"
        elif self.group.size > 1 and self.device.kind == "npu":
            why = "how many streams HCCL's sums take in a graph is not known here"
        elif self.model.ops.attention == "SDPA":
            why = "SDPA asks the device for lengths"
        else:
            longest = min(self.max_model_len, config.max_seq_len_to_capture or self.max_model_len)
            return make_graphs(self.model, self.pool, config.max_num_seqs, longest)
        log.info("decode steps run eagerly: %s", why)
        return None

    def forward(self, chunks: list[tuple[Request, int]], on_layer: OnLayer | None = None) -> torch.Tensor:
        """See `compute`."""
        return self.compute(step_input(chunks, self.pool.layout.block_size), on_layer)

    def compute(self, step: StepInput, on_layer: OnLayer | None = None, is_ahead: bool = False) -> torch.Tensor:
        """Computes the chunks into the pool; returns logits [num_samples, vocab_size] float32 of the rows wanted.

        `on_layer` is told after each layer how many layers of the chunks' keys and values are in the pool; on an
        accelerator, that what writes them was launched. `is_ahead`, on ranks other than 0 only: rank 0 has launched
        the step from tokens that its device has.
        """
        input_ids = None
        if is_ahead:
            empty = torch.zeros(len(step.rows), dtype=torch.int64, device=self.device.torch_name)
            input_ids = self.group.spread(empty)
        return self._logits(step, input_ids, on_layer).float()

    def can_launch(self, requests: Sequence[Request]) -> bool:
        return can_choose(requests, self.device)

    def step_of(self, requests: Sequence[Request], after: After | None) -> StepInput:
        """One token of each."""
        block_size = self.pool.layout.block_size
        if after is not None:
            return step_ahead(requests, block_size)
        return step_input([(request, 1) for request in requests], block_size)

    def launch(self, requests: Sequence[Request], after: After | None = None) -> DeviceTokens | None:
        """See engine/ahead.py; for runners that go ahead."""
        if not self.can_launch(requests):
            return None
        return self.launch_step(self.step_of(requests, after), requests, after)

    def launch_step(self, step: StepInput, requests: Sequence[Request], after: After | None) -> DeviceTokens:
        """On rank 0: the others `compute` it."""
        with torch.inference_mode():
            input_ids = None if after is None else self.group.spread(after.tokens.rows(after.rows))
            logits = self._logits(step, input_ids)
            token_ids = choose(logits, requests, input_ids, self.eos_token_ids, self.device)
            return DeviceTokens(token_ids, self.device, tell(logits, token_ids, requests, self.device))

    def _logits(self, step: StepInput, input_ids: torch.Tensor | None, on_layer: OnLayer | None = None) -> torch.Tensor:
        """In the model's dtype; `input_ids` [num_tokens], on the device, take the place of the step's."""
        with torch.inference_mode():
            if self._graphs is not None and on_layer is None:
                logits = self._graphs.compute(step, input_ids)
                if logits is not None:
                    return logits
            batch = batch_of(step, self.pool)
            if input_ids is not None:
                batch.input_ids = input_ids[None]
            batch.on_layer = on_layer
            return self.model(batch)

    def move(self, moves: Sequence[tuple[Kind, int, int]]) -> None:
        """Copies blocks (kind, source, target) in this order; see SwapSpace."""
        self.swap.move(moves)


def rope_type(config: Any) -> str:
    """Of a transformers config."""
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def make_graphs(model: CausalLM, pool: KVPool, max_num_seqs: int, longest: int) -> DecodeGraphs:
    """For contexts of up to `longest` tokens.

    On an NPU every layer of a graph takes one of its streams, which are few, and attention finds its own way.
    """
    how = capture(pool.device)
    if pool.device.kind != "npu":
        return DecodeGraphs(model, pool, max_num_seqs, longest, how)
    most = NPU_STREAMS // (pool.layout.num_layers + 1)
    return DecodeGraphs(model, pool, max_num_seqs, longest, how, most, is_for_any_context=True)
