"""A checkpoint folder to a torch module that attends through the paged pool.

transformers builds the modules and reads the safetensors; this file picks the dtype, registers the attention
function, fuses what it can and proves, on small forward passes, that the numbers stayed and every layer used the pool.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pd_cluster.architectures import PLAIN_TYPES
from pd_cluster.checkpoint import Checkpoint
from pd_cluster.device import CPU, Device
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import TORCH_DTYPES, KVPool
from pd_cluster.model.attention import sdpa
from pd_cluster.model.attention.choice import DEFAULT_BLOCK_SIZE, SDPA, Attention, choose_attention
from pd_cluster.model.batch import build_batch
from pd_cluster.model.causal_lm import CausalLM, PlainCausalLM
from pd_cluster.model.cpu.build import KernelsUnavailable, are_wanted
from pd_cluster.model.cpu.ops import CpuOps, supports
from pd_cluster.model.fuse import can_fuse, fuse
from pd_cluster.model.internlm import read_as_llama
from pd_cluster.model.ops import Ops, TorchOps
from pd_cluster.model.packing import pack_modules
from pd_cluster.model.parallel.group import Group
from pd_cluster.model.parallel.layers import Share
from pd_cluster.model.parallel.plan import Plan
from pd_cluster.model.parallel.shard import has_head, read_shard, read_text_part
from pd_cluster.model.proof import check_finite
from pd_cluster.model.rope import USE_LOGN, LogN, put_lengths
from pd_cluster.model.trial import check_fields, prove_packing
from pd_cluster.numerics import overridden
from pd_cluster.types import Request, SamplingParams

log = logging.getLogger(__name__)

PROBE_NUM_TOKENS = 4
PROBE_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}  # relative; in float32 fusing moves about 1e-6
ALIASES = {"float": "float32", "half": "float16"}


def resolve_dtype(wanted: str, checkpoint: Checkpoint, device: Device) -> str:
    """`auto` is the checkpoint's dtype on accelerators and float32 on CPU, where 16 bits are emulated and slow.

    NPUs attend in 16 bits only, so `auto` makes float32 bfloat16 there, which has its range.
    """
    if wanted != "auto":
        return ALIASES.get(wanted, wanted)
    if device.kind == "cpu":
        return "float32"
    found = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32")
    if found == "float32" and device.kind == "npu":
        log.info("the checkpoint's float32 becomes bfloat16: attention on NPUs takes 16 bits")
        return "bfloat16"
    return found


def load_model(
    checkpoint: Checkpoint,
    dtype: str,
    device: Device,
    group: Group | None = None,
    attention_backend: str = "auto",
    block_size: int = DEFAULT_BLOCK_SIZE,
    max_num_seqs: int = 1,
) -> CausalLM:
    """The whole model, or this rank's share of it. Raises ModelError when the weights do not fit the architecture."""
    share = None if group is None or group.size == 1 else Share(plan_of(checkpoint, group.size), group)
    if share is not None and checkpoint.is_unproven:
        raise ModelError(f"--tensor-parallel-size {share.group.size}: no proof would see a wrong split; use 1")
    model = load_plain(checkpoint, dtype, device, share)
    put_lengths(model, checkpoint.rope)
    logn = logn_of(checkpoint)
    layout = layout_of(model.config, block_size, dtype)
    has_sinks = any(hasattr(module, "sinks") for module in model.modules())
    attention = choose_attention(attention_backend, model.config, layout, device, has_sinks, max_num_seqs)
    vocab_size = 0 if share is None else share.plan.vocab_size
    plain = PlainCausalLM(model, vocab_size, None if share is None else share.group, attention, logn)
    if logn is not None or checkpoint.is_unproven or not can_fuse(model):  # some unlisted types have others' classes
        num_packed = prove_packing(plain, device, dtype) if checkpoint.is_unproven else pack_modules(model)
        log.info("model: %s%s", plain.kernels, f", {num_packed} packed modules" if num_packed else "")
        return plain
    expected = _probe_logits(plain, layout, device)
    check_finite(expected, str(checkpoint.path), dtype)
    fused = fuse(model, choose_ops(model.config, device, attention), share)
    error = change_of(_probe_logits(fused, layout, device), expected, dtype)
    if not error <= PROBE_TOLERANCE[dtype]:
        raise ModelError(f"{checkpoint.path}: fusing the layers changed the logits by {error:.1e} of the largest")
    log.info("model: %s", fused.kernels)
    return fused


def logn_of(checkpoint: Checkpoint) -> LogN | None:
    """When an override asks for it."""
    return LogN(checkpoint.max_position_embeddings) if checkpoint.overrides.get(USE_LOGN) else None


def change_of(logits: torch.Tensor, expected: torch.Tensor, dtype: str) -> float:
    """Of rows of logits, as a share of the largest: the worst row's; in 16 bits that of the middle one.

    There a router may choose another of two experts that are almost equal, which changes all that follows.
    """
    errors = ((logits - expected).abs().amax(-1) / expected.abs().max()).sort().values
    return float(errors[-1] if dtype == "float32" else errors[len(errors) // 2])


def choose_ops(config: Any, device: Device = CPU, attention: Attention = SDPA) -> Ops:
    """On CUDA Triton's kernels around the attention that was chosen, on NPUs torch-npu's operators; on CPU the C
    kernels, which have their own, unless SDPA was asked for, they cannot be built, do not know the shape or
    PD_CLUSTER_CPU_KERNELS is 0.
    """
    if device.kind == "npu" and attention.write_and_attend is not None:
        from pd_cluster.model.npu.ops import NpuOps

        return NpuOps(attention.write_and_attend, attention.name)
    if attention.attend_batch is not None:
        from pd_cluster.model.cuda.ops import CudaOps  # Triton may be missing

        return CudaOps(attention.attend_batch, attention.name)
    if device.is_accelerator or attention.is_asked_for or not are_wanted() or not supports(config):
        return TorchOps()
    try:
        return CpuOps()
    except KernelsUnavailable as error:
        log.warning("no C kernels, the forward pass is slower: %s", error)
        return TorchOps()


def plan_of(checkpoint: Checkpoint, tp_size: int) -> Plan:
    """Raises ModelError: no plan, or sizes that cannot be split."""
    return Plan(config_of(checkpoint), tp_size)


def config_of(checkpoint: Checkpoint) -> Any:
    """Returns transformers' config with the checkpoint's overrides; that of the text model where it is served alone.

    Raises ModelError for values that cannot be.
    """
    overrides = checkpoint.overrides
    if not checkpoint.part_of and not overrides and not checkpoint.is_translated:
        return AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
    try:
        settings = text_settings(checkpoint.path, overrides) if checkpoint.part_of else checkpoint.config
        return CONFIG_MAPPING[checkpoint.model_type].from_dict(settings)
    except Exception as error:  # also what huggingface_hub has for values of another type
        place = f"--hf-overrides {checkpoint.hf_overrides}" if overrides else str(checkpoint.path / "config.json")
        raise ModelError(f"{place}: {' '.join(str(error).split())}") from error


def text_settings(folder: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a multimodal folder's text model, as transformers has it."""
    whole: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = whole.text_config
    own = {name: value for name, value in text.to_dict().items() if name != "model_type"}
    if text.model_type in PLAIN_TYPES:  # it has three-dimensional positions, whose parts are equal in texts
        rope = {name: value for name, value in (own.get("rope_parameters") or {}).items() if "mrope" not in name}
        own["rope_parameters"] = {**rope, "rope_type": "default"} if rope.get("rope_type") == "mrope" else rope
    # Models differ in which of the two configs counts; untied output layers have weights in the files.
    is_tied = any(getattr(config, "tie_word_embeddings", False) for config in (whole, text))
    own["tie_word_embeddings"] = is_tied and not has_head(folder)
    return overridden(own, overrides)


def load_plain(checkpoint: Checkpoint, dtype: str, device: Device, share: Share | None = None) -> torch.nn.Module:
    """transformers' model as it is, attending through the pool. Raises ModelError as above."""
    AttentionInterface.register(sdpa.NAME, sdpa.forward)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    source: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.path}
    if checkpoint.overrides:
        source["config"] = config_of(checkpoint)
    architecture: Any = AutoModelForCausalLM
    if share is not None or checkpoint.part_of or checkpoint.is_translated:
        local = config_of(checkpoint) if share is None else share.plan.local_config()
        if checkpoint.is_translated:
            plan, rank = (None, 0) if share is None else (share.plan, share.group.rank)
            weights = read_as_llama(checkpoint.path, checkpoint.config, plan, rank)
        elif share is not None:
            weights = read_shard(checkpoint.path, share.plan, share.group.rank, bool(checkpoint.part_of))
        else:
            weights = read_text_part(checkpoint.path)
        architecture = AutoModelForCausalLM._model_mapping[type(local)]
        source = {"pretrained_model_name_or_path": None, "config": local, "state_dict": weights}
    try:
        model, info = architecture.from_pretrained(
            **source,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=sdpa.NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **straight_to(device),
        )
    except torch.OutOfMemoryError as error:
        raise _too_large(checkpoint, dtype, device) from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if error.args == (sdpa.NAME,):
            raise ModelError(
                f"{checkpoint.path}: {checkpoint.config['model_type']} has attention functions of its own instead of "
                f"those that transformers lets others register; this architecture cannot be served"
            ) from error
        raise ModelError(f"{checkpoint.path}: cannot load the model: {error}") from error
    wrong = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    if wrong:
        raise ModelError(
            f"{checkpoint.path}: {len(wrong)} weights have another shape than config.json says: {wrong[0]}"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"{checkpoint.path}: the safetensors lack {len(missing)} weights, such as {missing[0]}")
    if checkpoint.is_unproven:
        check_fields(model)
    layer_types = set(getattr(model.config, "layer_types", None) or ())
    if layer_types - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{checkpoint.path}: layer_types {sorted(layer_types)}: only full and sliding are supported")
    if share is not None:
        share.install(model)
    try:
        loaded: torch.nn.Module = model.eval().to(device.torch_name)
    except torch.OutOfMemoryError as error:
        raise _too_large(checkpoint, dtype, device) from error
    return loaded


def _too_large(checkpoint: Checkpoint, dtype: str, device: Device) -> ConfigError:
    where = f"{device.torch_name} in {dtype}"
    return ConfigError(f"{checkpoint.path}: the weights do not fit {where}; give more devices, or another --dtype")


def straight_to(device: Device) -> dict[str, Any]:
    """transformers fills an accelerator's memory from several threads, where its helper library is installed."""
    if device.is_accelerator and importlib.util.find_spec("accelerate") is not None:
        return {"device_map": {"": device.torch_name}}
    return {}  # first to the host, and from there in one piece


def layout_of(config: Any, block_size: int, dtype: str) -> KVLayout:
    """The KV layout of a transformers config."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        k_head_dim=head_dim,
        v_head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def _probe_logits(model: CausalLM, layout: KVLayout, device: Device) -> torch.Tensor:
    """Logits [PROBE_NUM_TOKENS, vocab_size] of a few tokens, in a pool of their own."""
    vocab_size = model.config.vocab_size
    token_ids = [i * (vocab_size - 1) // PROBE_NUM_TOKENS for i in range(PROBE_NUM_TOKENS)]
    num_blocks = layout.num_blocks_for(PROBE_NUM_TOKENS)
    probe = Request("probe", token_ids, SamplingParams(), block_table=list(range(num_blocks)))
    pool = KVPool(layout, num_blocks, device)
    batch = build_batch([(probe, PROBE_NUM_TOKENS)], pool)
    batch.sample_rows = torch.arange(PROBE_NUM_TOKENS, device=batch.positions.device)
    with torch.inference_mode():
        logits = model(batch).float()
    pool.close()
    return logits
