"""Turns a checkpoint folder into a torch module that attends through the paged pool.

transformers builds the modules; this file chooses the dtype and fuses what it can. Small forward passes then check that
the results are unchanged and that every layer used the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.expert_counts import num_experts_of
from pd_cluster.checkpoints.tensor_layouts import WeightFolder
from pd_cluster.checkpoints.weight_files import text_name
from pd_cluster.devices.device import CPU, Device
from pd_cluster.errors import ConfigError, ModelError, called
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.kernels.attention_backend import (
    DEFAULT_BLOCK_SIZE,
    SDPA,
    Attention,
    AttentionOptions,
    choose_attention,
    latents_by_modules,
)
from pd_cluster.model.kernels.cpu.ops import CpuOps, supports
from pd_cluster.model.kernels.cuda_speedups import sped_up
from pd_cluster.model.language_model.cache_declaration import (
    caches_of,
    has_states,
    layout_of_states,
    least_layouts,
)
from pd_cluster.model.language_model.causal_lm import CausalLM, PlainCausalLM
from pd_cluster.model.language_model.fuse_model import can_fuse, fuse, fused_parts, is_known, why_not_deterministic
from pd_cluster.model.language_model.fuse_states import has_kernels
from pd_cluster.model.language_model.fused_lm import FusedCausalLM, Served
from pd_cluster.model.language_model.overwrite_tensors import overwrite
from pd_cluster.model.layers.attention.latent_attention import UpProjection
from pd_cluster.model.layers.expert_share import ExpertBlocks, ExpertShare
from pd_cluster.model.layers.linear_weight import LinearWeight
from pd_cluster.model.layers.ops import Ops, TorchOps
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.layers.packed_modules import pack_modules, packed
from pd_cluster.model.layers.rope.rope_scaling import USE_LOGN, LogN, install_length_rotary, rope_limit_of
from pd_cluster.model.loading import transformers_modules
from pd_cluster.model.loading.load_proof import (
    KEYS,
    ROUNDED,
    STATES,
    check_finite,
    fused_logits,
    probe_batch,
    refusal,
    transformers_logits,
)
from pd_cluster.model.loading.unlisted_model_check import prove_packing
from pd_cluster.model.lora.loaded_adapters import Adapters
from pd_cluster.model.lora.tensor_placement import ModelWeights
from pd_cluster.model.parallel.expert_modules import ExpertModules
from pd_cluster.model.parallel.parallel_layers import RankShare
from pd_cluster.model.parallel.parallel_plan import ParallelPlan
from pd_cluster.model.parallel.rank_group import Group, SingleRank
from pd_cluster.model.parallel.weight_slices import read_named
from pd_cluster.model.vision import vision_experts
from pd_cluster.model.vision.mrope import install_mrope
from pd_cluster.model.weights.quantized_lm_head import quantize_head
from pd_cluster.native.build import KernelsUnavailable, are_wanted
from pd_cluster.native.packed_products import multiplies_bf16
from pd_cluster.settings.engine_config import KV_CACHE_DTYPES, ONLY_ON_CPU
from pd_cluster.types import Request, RequestSpec, Sampling

log = logging.getLogger(__name__)

PROBE_NUM_TOKENS = 4
# The largest accepted change of the logits by fusing, as a share of the largest logit. In float32 fusing changes
# logits by about 1e-6. Where activations are rounded to codes, this can lead to another code.
PROBE_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1, ROUNDED: 0.25}
# The last components of names in the files of all architectures.
HEADS, EMBEDDINGS = ("lm_head", "embed_out"), ("embed_tokens", "wte", "embed_in")
ALIASES = {"float": "float32", "half": "float16"}


def resolve_kv_cache_dtype(wanted: str, dtype: str) -> str:
    """Returns the pool's dtype for a model of `dtype`."""
    found = KV_CACHE_DTYPES[wanted]
    return dtype if found == "auto" else found


def resolve_dtype(wanted: str, checkpoint: Checkpoint, device: Device) -> str:
    """Returns `wanted`, or for `auto` on accelerators the checkpoint's dtype.

    On a CPU `auto` is bfloat16 if the checkpoint's dtype is bfloat16, the processor can multiply it and the model's
    layers are fused; otherwise float32, because 16 bits would be emulated slowly. NPUs attend only in 16 bits, so there
    `auto` turns float32 into bfloat16, which has the same range.
    """
    if wanted != "auto":
        return ALIASES.get(wanted, wanted)
    found = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32")
    if device.traits.emulates_16_bits:
        if found != "bfloat16" or not multiplies_bf16() or not _is_plain_and_fused(checkpoint):
            return "float32"
        log.info("dtype bfloat16, like the checkpoint: this processor multiplies it; activations stay float32")
        return "bfloat16"
    if found == "float32" and not device.traits.attends_in_float32:
        log.info("dtype bfloat16 instead of the checkpoint's float32: attention on NPUs requires 16 bits")
        return "bfloat16"
    return found


def _is_plain_and_fused(checkpoint: Checkpoint) -> bool:
    """Whether the model's weights are not quantized and its layers can be fused."""
    if checkpoint.quantization is not None or checkpoint.is_unproven or logn_of(checkpoint) is not None:
        return False
    if checkpoint.vision is not None and checkpoint.part_of == vision_experts.WHOLE_TYPE:
        return False  # see can_fuse
    return has_fused_layers(checkpoint)


def has_fused_layers(checkpoint: Checkpoint) -> bool:
    """Whether the layers of a model with this type and config can be fused."""
    config = transformers_modules.config_of(checkpoint)
    kind = type(config)
    return kind in AutoModelForCausalLM._model_mapping and is_known(AutoModelForCausalLM._model_mapping[kind], config)


@dataclass(frozen=True, slots=True)
class LoadChoices:
    """The settings with which a model is loaded, and this rank's share of the experts.

    `is_deterministic`: on an accelerator, accepts only models that compute each row in the same way in every batch.
    `speedups`: see model/kernels/cuda_speedups.py.
    """

    attention_backend: str = "auto"
    block_size: int = DEFAULT_BLOCK_SIZE
    max_num_seqs: int = 1
    is_deterministic: bool = False
    kv_cache_dtype: str = "auto"
    npu_head_dims: str = "strict"
    speedups: Sequence[str] = ()
    experts: ExpertShare | None = None


USUAL = LoadChoices()


def load_model(
    checkpoint: Checkpoint,
    dtype: str,
    device: Device,
    group: Group | None = None,
    choices: LoadChoices = USUAL,
) -> CausalLM:
    """Loads the whole model, or this rank's share. Raises ModelError if the weights do not fit the architecture.

    The checks here use pools of the model's own dtype. Raises ConfigError.
    """
    _check_device(checkpoint, device)
    share = _share_of(checkpoint, group, choices.experts is not None)
    experts = _experts_of(checkpoint, choices.experts)
    model = _modules_of(checkpoint, dtype, device, share, group or SingleRank(), experts)
    logn = logn_of(checkpoint)
    rope_limit = rope_limit_of(model, checkpoint, logn is not None)
    with refusal(model):
        caches = caches_of(model)
    layout = least_layouts(caches, choices.block_size, resolve_kv_cache_dtype(choices.kv_cache_dtype, dtype))[0]
    has_sinks = any(hasattr(module, "sinks") for module in model.modules())
    if choices.is_deterministic and device.is_accelerator:
        check_rows(model, checkpoint, logn)
    wanted, is_deterministic = choices.attention_backend, choices.is_deterministic
    _check_backend(checkpoint, wanted)
    if layout.has_latents and not can_fuse(model):
        attention = latents_by_modules(wanted, is_deterministic, device)
    else:
        options = AttentionOptions(choices.max_num_seqs, is_deterministic, choices.npu_head_dims, dtype)
        attention = choose_attention(wanted, model.config, layout, device, has_sinks, options)
    attention = sped_up(attention, choices.speedups)
    plain = PlainCausalLM(model, caches, share, attention, logn, rope_limit)
    if checkpoint.vision is not None:
        plain.take_deep_features()
    takes_adapters = checkpoint.takes_adapters and not has_states(caches)  # layer_group_limits.py refuses both together
    adapters = adapters_of(checkpoint, share) if takes_adapters else None
    own = replace(layout, dtype=dtype)
    if logn is not None or not _is_fused(model, checkpoint, layout, device, attention):
        _check_dense(layout, checkpoint, dtype)
        is_unproven, by = checkpoint.is_unproven, linears_by(attention)
        num_packed = prove_packing(plain, device, dtype) if is_unproven else pack_modules(model, by)
        log.info("model: %s%s", plain.kernels, f", {num_packed} packed modules" if num_packed else "")
        if adapters is not None:
            _adapt(plain, model, adapters, 0 if share is None else share.plan.vocab_size, own, device)
        return plain
    check = _check_of(plain, own, device, checkpoint)
    values = {module.values.shape[2] for module in model.modules() if isinstance(module, UpProjection)}
    served = Served(caches, rope_limit, adapters, None if experts is None else ExpertBlocks(experts.share))
    fused = fuse(model, choose_ops(layout, device, attention, values), served, share)
    check(fused)
    log.info("model: %s", fused.kernels)
    return fused


def _is_fused(model: Any, checkpoint: Checkpoint, layout: KVLayout, device: Device, attention: Attention) -> bool:
    """Whether fused layers replace transformers' modules."""
    without_kernels = layout.has_latents and device.is_accelerator and not attention.make_ops
    if without_kernels or checkpoint.is_unproven:  # an unlisted type may use a listed type's class
        return False
    return can_fuse(model) and has_kernels(model, _ops_of(attention))


def _check_of(
    plain: PlainCausalLM, layout: KVLayout, device: Device, checkpoint: Checkpoint
) -> Callable[[FusedCausalLM], None]:
    """Computes a model's logits; returns a check that its fused layers give the same. Both may raise ModelError."""
    states = layout_of_states(plain.caches)
    layouts, course = ([layout], KEYS) if states is None else ([layout, states], STATES)
    is_long = layout.has_index or states is not None
    expected = transformers_logits(plain, course, device) if is_long else probe_logits(plain, layout, device)
    check_finite(expected, str(checkpoint.path), layout.dtype)
    bound = ROUNDED if plain.rounds_activations else layout.dtype
    if layout.has_index:  # the last bits decide between keys with equal scores, so one sequence may differ
        bound = ROUNDED

    def check(fused: FusedCausalLM) -> None:
        actual = fused_logits(fused, layouts, course, device) if is_long else probe_logits(fused, layout, device)
        error = change_of(actual, expected, bound)
        if not error <= PROBE_TOLERANCE[bound]:
            raise ModelError(f"{checkpoint.path}: fusing the layers changed the logits by {error:.1e} of the largest")

    return check


def _check_device(checkpoint: Checkpoint, device: Device) -> None:
    """Raises ConfigError if this device does not support products of the checkpoint's weights."""
    found = checkpoint.quantization
    asked = {f"{called('quantize_head')} {checkpoint.head_scheme}": checkpoint.head_scheme}
    if found is not None:
        asked[found.place] = "w4a8" if found.is_w4a8 else found.at_load
    for place, scheme in asked.items():
        if device.is_accelerator and scheme in ONLY_ON_CPU:
            raise ConfigError(
                f"{place}: only CPUs multiply 4-bit weights with int8 activations, and this is "
                f"{device.kind}; use a w4a16 folder, or an unquantized one with --quantization int4_wo"
            )


def _check_dense(layout: KVLayout, checkpoint: Checkpoint, dtype: str) -> None:
    """Raises ConfigError for a model with sparse attention that is not fused."""
    if layout.has_index:
        raise ConfigError(
            f"{called('dtype')} {dtype}: {checkpoint.model_type} supports sparse attention only in fused layers, which "
            f"are float32, or bfloat16 on CPUs that can multiply it; use auto"
        )


def _share_of(checkpoint: Checkpoint, group: Group | None, has_whole_experts: bool) -> RankShare | None:
    """Returns this rank's share of the model; None: it has everything, except perhaps experts. Raises ModelError."""
    if group is None or group.size == 1:
        return None
    if checkpoint.is_unproven:
        setting = called("tensor_parallel_size")
        raise ModelError(f"{setting} {group.size}: no check would detect a wrong split; use 1")
    return RankShare(plan_of(checkpoint, group.size, has_whole_experts), group)


def _experts_of(checkpoint: Checkpoint, share: ExpertShare | None) -> ExpertModules | None:
    """Returns this rank's experts; None: it has all experts, or a slice of each one. Raises ModelError."""
    if share is None:
        return None
    return ExpertModules(share, num_experts_of(checkpoint.config), transformers_modules.config_of(checkpoint))


def _modules_of(
    checkpoint: Checkpoint,
    dtype: str,
    device: Device,
    share: RankShare | None,
    group: Group,
    own_experts: ExpertModules | None,
) -> Any:
    """Returns transformers' model, with a quantized head, rotary positions and picture experts where they apply.

    Returns only when all members of a unit have connected.
    """
    model = transformers_modules.load_plain(checkpoint, dtype, device, share, own_experts)
    if own_experts is not None and own_experts.share.exchange is not None:
        own_experts.share.exchange.form()
    if checkpoint.head_scheme:
        quantize_head(model, checkpoint.head_scheme)
    install_length_rotary(model, checkpoint.rope)
    if checkpoint.vision is not None:
        install_mrope(model, checkpoint, device)
        if checkpoint.part_of == vision_experts.WHOLE_TYPE:
            vision_experts.install_vision_experts(model, checkpoint, TORCH_DTYPES[dtype], device, group)
    return model


def overwrite_weights(
    fused: FusedCausalLM, checkpoint: Checkpoint, dtype: str, device: Device, group: Group, experts: ExpertShare | None
) -> None:
    """Copies a checkpoint's weights into the memory of a model's weights, to which graphs refer.

    Until they are copied, the new weights are on the host, except one layer, which is on the device. `experts`: as at
    the first load; not of a unit. Raises ModelError, and CannotOverwrite if a part differs in more than the values of
    its tensors; the model is then unusable.
    """
    share = _share_of(checkpoint, group, experts is not None)
    modules = _modules_of(checkpoint, dtype, CPU, share, group, _experts_of(checkpoint, experts))
    with torch.inference_mode():
        for old, new in fused_parts(modules, fused, device, share, experts):
            overwrite(old, new)
            del new
    if fused.adapters is not None:
        fused.adapters.compare_with(adapters_of(checkpoint, share))


def _check_backend(checkpoint: Checkpoint, attention_backend: str) -> None:
    """Raises ConfigError if pictures need bidirectional attention, which the attention backend lacks."""
    if attention_backend == "flashinfer" and checkpoint.vision is not None and checkpoint.vision.rules.sees_whole:
        raise ConfigError(
            f"{called('attention_backend')} flashinfer: this model's pictures need bidirectional attention, which "
            f"this backend lacks; use auto"
        )


def _adapt(
    plain: PlainCausalLM, model: Any, adapters: Adapters, vocab_size: int, layout: KVLayout, device: Device
) -> None:
    """Attaches adapters to a transformers model's modules; watches one step to find which modules can have them."""
    adapters.places.take_over(model)
    adapters.places.attach_embedding_and_head(model, vocab_size or plain.config.vocab_size)
    plain.adapters = adapters
    with adapters.places.watched(PROBE_NUM_TOKENS):
        probe_logits(plain, layout, device)


def adapters_of(checkpoint: Checkpoint, share: RankShare | None) -> Adapters:
    """Returns an empty set of adapters for a model, or for one rank's share of it."""

    def name_of(key: str) -> str:
        return text_name(key) or key

    names = name_of if checkpoint.part_of else str
    weights = ModelWeights(name_of=names, stored=lambda name: stored_weight(checkpoint.weights, name, names))
    if share is not None:
        plan, rank = share.plan, share.group.rank
        cut = partial(plan.cut, rank=rank)
        weights = replace(weights, cut=cut, num_ranks=plan.size, vocab_size=plan.vocab_size)
    return Adapters(weights)


def stored_weight(folder: WeightFolder, module: str, name_of: Callable[[str], str]) -> torch.Tensor | None:
    """Returns the weight of an embedding or output layer as the files store it; for a tied output layer, that is the
    embedding's weight.
    """
    last = module.rpartition(".")[2]
    names = [module, *(HEADS if last in HEADS else ()), *(EMBEDDINGS if last in (*HEADS, *EMBEDDINGS) else ())]
    for end in names:
        found = read_named(folder, lambda key, end=end: key if _ends_with(name_of(key), f"{end}.weight") else "")  # type: ignore[misc]
        if found:
            return next(iter(found.values()))
    return None


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def check_rows(model: torch.nn.Module, checkpoint: Checkpoint, logn: LogN | None) -> None:
    """Raises ConfigError unless all kernels of the model compute a row in the same way for every number of rows."""
    why = why_not_deterministic(model)
    if logn is not None or checkpoint.is_unproven:
        why = "log-n attention and unlisted architectures run as transformers' modules"
    if why:
        raise ConfigError(f"{called('deterministic')}: {why}, so results depend on the batch; remove the setting")


def logn_of(checkpoint: Checkpoint) -> LogN | None:
    """Returns log-n attention if an override enables it, otherwise None."""
    return LogN(checkpoint.trained_positions) if checkpoint.overrides.get(USE_LOGN) else None


def change_of(logits: torch.Tensor, expected: torch.Tensor, dtype: str) -> float:
    """Returns the largest change in a row as a share of the largest logit: of the worst row, or in 16 bits the median
    row.

    In 16 bits a router may choose the other of two almost equal experts, which changes everything after it.
    """
    errors = ((logits - expected).abs().amax(-1) / expected.abs().max()).sort().values
    return float(errors[-1] if dtype == "float32" else errors[len(errors) // 2])


def choose_ops(
    layout: KVLayout, device: Device = CPU, attention: Attention = SDPA, latent_values: Collection[int] = ()
) -> Ops:
    """Chooses the operations of fused layers for a pool. `latent_values`: see kernels/cpu/ops.py.

    On CUDA these are Triton kernels around the chosen attention, on NPUs torch-npu's operators. On CPU these are C
    kernels with their own attention. torch replaces the C kernels if SDPA was requested, if they cannot be built or do
    not support the shape, or if PD_CLUSTER_CPU_KERNELS is 0.
    """
    if attention.make_ops is not None:
        return attention.make_ops(attention)
    if device.is_accelerator or attention.is_asked_for or not are_wanted() or not supports(layout, latent_values):
        return TorchOps()
    try:
        return CpuOps(pool_dtype=layout.dtype, has_latents=layout.has_latents)
    except KernelsUnavailable as error:
        log.warning("C kernels are not available, so the forward pass is slower: %s", error)
        return TorchOps()


def _ops_of(attention: Attention) -> Ops:
    """Returns operations that have the same state kernels as the operations that `choose_ops` returns."""
    return TorchOps() if attention.make_ops is None else attention.make_ops(attention)


def linears_by(attention: Attention) -> Callable[[LinearWeight], Linear]:
    """Returns the function that makes layers from weights in other forms, for a model with transformers' modules."""
    return packed if attention.make_ops is None else attention.make_ops(attention).linear


def plan_of(checkpoint: Checkpoint, tp_size: int, has_whole_experts: bool = False) -> ParallelPlan:
    """See `ParallelPlan`. Raises ModelError without a plan, or if sizes cannot be split."""
    return ParallelPlan(transformers_modules.config_of(checkpoint), tp_size, has_whole_experts)


def probe_logits(model: CausalLM, layout: KVLayout, device: Device) -> torch.Tensor:
    """Returns the logits [PROBE_NUM_TOKENS, vocab_size] of a few tokens, computed in a temporary pool."""
    vocab_size = model.config.vocab_size
    token_ids = [i * (vocab_size - 1) // PROBE_NUM_TOKENS for i in range(PROBE_NUM_TOKENS)]
    layouts = [layout, *least_layouts(model.caches, layout.block_size, layout.dtype)[1:]]
    with ExitStack() as stack:
        nums_blocks = [each.num_blocks_for(1 if each.holds.is_state else PROBE_NUM_TOKENS) for each in layouts]
        pools = [
            stack.enter_context(KVPool(each, num_blocks, device))
            for each, num_blocks in zip(layouts, nums_blocks, strict=True)
        ]
        probe = Request("probe", RequestSpec(token_ids, Sampling()), tables=[list(range(num)) for num in nums_blocks])
        batch = probe_batch([(probe, PROBE_NUM_TOKENS)], pools)
        batch.sample_rows = torch.arange(PROBE_NUM_TOKENS, device=batch.slot_mapping.device)
        with torch.inference_mode():
            return model(batch).float()
