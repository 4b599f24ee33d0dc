"""LMDeploy's engine configurations, of its first and second versions, and their conversion to this engine's settings.

TurboMind's and PyTorch's configurations run the same engine. A field is honoured, reported as unused, or refused with
the reason.
"""

from __future__ import annotations

import logging
import math
import reprlib
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, NamedTuple

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.errors import ConfigError, Naming, flag_of
from pd_cluster.extras.lmdeploy.argument_checks import checks_names, count, idle, refuse
from pd_cluster.kv.kv_layout import keys_and_values, vectors_nbytes
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.lora_settings import MOST_RANK, AdapterSettings, lora_module

log = logging.getLogger(__name__)

DEFAULT_SHARE = 0.5  # the share of the device's memory for the KV cache
GIB = 1 << 30
USE_LOGN = "use_logn_attn"  # also a field of config.json; see model/layers/rope/rope_scaling.py
FLOAT32 = ("float32", "float")
EVICTIONS = {"recompute": "recompute", "copy": "swap"}
DEVICES = {"cpu": "cpu", "cuda": "cuda", "ascend": "npu", "npu": "npu", "auto": "auto"}

AWQ, LLAMA = "awq", "llama"  # values of model_format
KV_CACHE_DTYPES = {0: "auto", 4: "int8", 8: "int8", 16: "fp8_e4m3"}  # quant_policy -> dtype, with kv_bits 8
NOT_HERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "quant_policy": ((0, 4, 8, 16), "expected 0 (none), 4 or 8 (int8) or 16 (fp8)"),
    "kv_bits": ((4, 8), "the KV cache has codes of 4 or 8 bits"),
    "model_format": (
        (None, "", "hf", AWQ, LLAMA),
        "weights are safetensors in the layout that their folder shows (hf, llama, awq); converted ones are refused",
    ),
    "custom_module_map": ((None, {}), "custom modules are not supported"),
}
WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "prefill_interval": ((16,), "prefill and decode share every step"),
    "cache_chunk_size": ((-1,), "the KV pool is allocated once"),
    "max_prefill_iters": ((1,), "prompts are computed in chunks, as many as they need"),
    "use_context_fmha": ((1,), "the attention kernel follows the device"),
    "group_size": ((128,), "the folder of 4-bit weights has its own"),
    "communicator": (("nccl",), "the device decides"),
    "thread_safe": ((False, True), "it always is"),
    "eager_mode": ((False, True), "the device decides"),
}


@checks_names
@dataclass
class TurbomindEngineConfig:
    model_name: str | None = None
    model_format: str | None = None
    tp: int = 1
    session_len: int | None = None
    max_batch_size: int = 128
    cache_max_entry_count: float = DEFAULT_SHARE
    quant_policy: int = 0
    rope_scaling_factor: float = 0.0
    use_logn_attn: bool = False
    _: KW_ONLY
    # fields of other versions
    group_size: int = 128
    max_context_token_num: int = 1
    cache_block_seq_len: int = 128
    cache_chunk_size: int = -1
    num_tokens_per_iter: int = 0
    max_prefill_iters: int = 1
    use_context_fmha: int = 1
    use_dynamic_ntk: bool = False
    kv_bits: int = 8
    dtype: str = "auto"
    enable_prefix_caching: bool = True
    max_prefill_token_num: int = 0
    revision: str | None = None
    download_dir: str | None = None
    communicator: str = "nccl"


@checks_names
@dataclass
class EarlyTurbomindConfig:
    """`EngineConfig` of the module `turbomind`. Its fields are in another order."""

    model_name: str | None = None
    model_format: str | None = None
    group_size: int = 128
    tp: int = 1
    session_len: int | None = None
    max_batch_size: int = 128
    max_context_token_num: int = 1
    cache_max_entry_count: float = DEFAULT_SHARE
    cache_block_seq_len: int = 128
    cache_chunk_size: int = -1
    num_tokens_per_iter: int = 0
    max_prefill_iters: int = 1
    use_context_fmha: int = 1
    quant_policy: int = 0
    rope_scaling_factor: float = 0.0
    use_dynamic_ntk: bool = False
    use_logn_attn: bool = False
    kv_bits: int = 8


@checks_names
@dataclass
class PytorchEngineConfig:
    """LMDeploy's PytorchEngineConfig, and `EngineConfig` of the module `pytorch`, which has no adapters."""

    model_name: str = ""
    tp: int = 1
    session_len: int | None = None
    max_batch_size: int = 128
    eviction_type: str = "recompute"
    prefill_interval: int = 16
    block_size: int = 64
    num_cpu_blocks: int = 0
    num_gpu_blocks: int = 0
    adapters: dict[str, str] | None = None
    _: KW_ONLY
    # fields of other versions
    cache_max_entry_count: float = DEFAULT_SHARE
    dtype: str = "auto"
    enable_prefix_caching: bool = True
    max_prefill_token_num: int = 0
    device_type: str = "auto"
    thread_safe: bool = False
    eager_mode: bool = False
    custom_module_map: dict[str, str] | None = None
    revision: str | None = None
    download_dir: str | None = None
    quant_policy: int = 0
    dp: int = 1
    ep: int = 1


BackendConfig = TurbomindEngineConfig | EarlyTurbomindConfig | PytorchEngineConfig
# A setting -> LMDeploy's name.
NAMES = {
    "max_model_len": "session_len",
    "dtype": "dtype",
    "device": "device_type",
    "max_num_seqs": "max_batch_size",
    "num_blocks": "num_gpu_blocks",
    "gpu_memory_utilization": "cache_max_entry_count",
    "preemption_mode": "eviction_type",
    "swap_space": "num_cpu_blocks",
    "max_num_batched_tokens": "max_prefill_token_num",
    "tensor_parallel_size": "tp",
    "data_parallel_size": "dp",
    "enable_expert_parallel": "ep",
    "quantization": "model_format",
    "revision": "revision",
    "download_dir": "download_dir",
    "model": "model_path",
}


def naming_of(config: BackendConfig) -> Naming:
    """Returns the names of settings in this configuration; a setting without a field is named by its flag."""
    names = {**NAMES, "block_size": _block_field(asdict(config))}
    return lambda setting: names.get(setting) or flag_of(setting)


def _block_field(given: dict[str, Any]) -> str:
    return "cache_block_seq_len" if "cache_block_seq_len" in given else "block_size"


class Engine(NamedTuple):
    """`remarks`: arguments without effect."""

    config: EngineConfig
    remarks: list[str]


def engine_of(model_path: str, config: BackendConfig) -> Engine:
    """Converts the configuration. Raises ConfigError that names the field."""
    owner = "EngineConfig" if isinstance(config, EarlyTurbomindConfig) else type(config).__name__
    given = asdict(config)
    refuse(owner, given, NOT_HERE)
    remarks = idle(given, WITHOUT_EFFECT)
    if given.get("model_format") == LLAMA:
        remarks.append("model_format='llama' (the folder's files show their layout)")
    if given.get("kv_bits") == 4 and not given["quant_policy"]:
        remarks.append("kv_bits=4 (quant_policy 0 quantizes nothing)")
    fields: dict[str, Any] = {
        "generation_config": "vllm",  # GenerationConfig has all defaults
        "revision": _text(owner, "revision", given.get("revision")),
        "download_dir": _text(owner, "download_dir", given.get("download_dir")),
        "hf_overrides": _positions(owner, given),
        "tensor_parallel_size": count(owner, "tp", config.tp, 1),
        "max_num_seqs": count(owner, "max_batch_size", config.max_batch_size, 1),
        "enable_prefix_caching": _switch(owner, "enable_prefix_caching", given.get("enable_prefix_caching", True)),
        "dtype": given.get("dtype", "auto"),
        "quantization": AWQ if given.get("model_format") == AWQ else None,
        "kv_cache_dtype": _kv_cache_dtype(owner, given),
        "device": _one_of(owner, "device_type", given.get("device_type", "auto"), DEVICES),
        "adapters": _adapters(owner, given.get("adapters")),
    }
    if config.session_len is not None:
        fields["max_model_len"] = count(owner, "session_len", config.session_len, 1)
    block = _block_field(given)
    fields["block_size"] = count(owner, block, given[block], 1)
    fields |= _budget(owner, given) | _pool(owner, given)
    if isinstance(config, PytorchEngineConfig):
        fields |= _experts(owner, config)
        fields |= _swap(owner, config, EngineConfig(model=model_path, **fields), remarks)
    return Engine(EngineConfig(model=model_path, **fields), remarks)


def _experts(owner: str, config: PytorchEngineConfig) -> dict[str, Any]:
    """Converts `dp` and `ep`; `ep` must be 1 or the number of all ranks. Raises ConfigError."""
    size, num_ranks = count(owner, "dp", config.dp, 1), count(owner, "ep", config.ep, 1)
    if num_ranks not in (1, size * config.tp):
        raise ConfigError(
            f"{owner}.ep {num_ranks}: experts are spread over all ranks, dp {size} times tp {config.tp}; give "
            f"{size * config.tp}, or 1"
        )
    return {"data_parallel_size": size, "enable_expert_parallel": num_ranks > 1}


def _kv_cache_dtype(owner: str, given: dict[str, Any]) -> str:
    """Returns the pool's dtype. `quant_policy` 4 means 8 bits, as documented; in later versions it means 4 bits."""
    policy, bits = given["quant_policy"], given.get("kv_bits", 8)
    if bits == 4 and policy:
        if policy != 4:
            raise ConfigError(f"{owner}.kv_bits 4: only with quant_policy=4, not {policy}")
        return "int4"
    if policy == 4:
        log.info("quant_policy 4: the KV cache has 8 bits, as documented; for later versions' 4 bits give kv_bits=4")
    return KV_CACHE_DTYPES[policy]


def _positions(owner: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns overrides of config.json for positions beyond the model's own: dynamic NTK, and log-n attention.

    Neither has an effect up to `max_position_embeddings`; with NTK, `session_len` may exceed it. Without a factor, the
    rotary base depends only on the length.
    """
    factor = given.get("rope_scaling_factor", 0.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not (factor == 0 or 1 <= factor < math.inf):
        raise ConfigError(
            f"{owner}.rope_scaling_factor {reprlib.repr(factor)}: must be a number of at least 1, or 0 for the model's "
            f"own"
        )
    is_dynamic = _switch(owner, "use_dynamic_ntk", given.get("use_dynamic_ntk", False))
    overrides: dict[str, Any] = {}
    if factor or is_dynamic:
        overrides["rope_scaling"] = {"rope_type": "dynamic"} | ({"factor": float(factor)} if factor else {})
    if _switch(owner, USE_LOGN, given.get(USE_LOGN, False)):
        overrides[USE_LOGN] = True
    return overrides


def _adapters(owner: str, given: Any) -> AdapterSettings:
    """Converts {name: folder}. A step may use all adapters, whatever their ranks."""
    if not given:
        return AdapterSettings()
    if not isinstance(given, dict) or not all(isinstance(each, str) for pair in given.items() for each in pair):
        raise ConfigError(f"{owner}.adapters {reprlib.repr(given)}: expected a dict from names to folders")
    modules = tuple(lora_module("adapters", name, path) for name, path in given.items())
    return AdapterSettings(enable_lora=True, lora_modules=modules, max_loras=len(modules), max_lora_rank=MOST_RANK)


def _text(owner: str, name: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{owner}.{name} {reprlib.repr(value)}: must be a text")
    return value or ""


def _budget(owner: str, given: dict[str, Any]) -> dict[str, int]:
    """Returns the tokens of a step: the lowest value of the fields that set it."""
    nothing = {"max_context_token_num": 1, "num_tokens_per_iter": 0, "max_prefill_token_num": 0}
    asked = [
        count(owner, name, given[name], default)
        for name, default in nothing.items()
        if name in given and given[name] != default
    ]
    return {"max_num_batched_tokens": min(asked)} if asked else {}


def _pool(owner: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the pool's size; a number of blocks takes precedence over a share of the memory."""
    share = given["cache_max_entry_count"]
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ConfigError(
            f"{owner}.cache_max_entry_count {reprlib.repr(share)}: must be a share of the memory, above 0 and below 1"
        )
    if num_blocks := count(owner, "num_gpu_blocks", given.get("num_gpu_blocks", 0), 0):
        return {"num_blocks": num_blocks}
    return {"gpu_memory_utilization": float(share)}


def _swap(owner: str, config: PytorchEngineConfig, engine: EngineConfig, remarks: list[str]) -> dict[str, Any]:
    mode = _one_of(owner, "eviction_type", config.eviction_type, EVICTIONS)
    num_blocks = count(owner, "num_cpu_blocks", config.num_cpu_blocks, 0)
    if mode == "recompute":
        if num_blocks:
            remarks.append(f"num_cpu_blocks={num_blocks} (eviction_type 'recompute' moves nothing to the host)")
        return {"preemption_mode": mode}
    room = {"swap_space_gib": num_blocks * _block_nbytes(engine, config) / GIB} if num_blocks else {}
    return {"preemption_mode": mode, **room}


def _block_nbytes(engine: EngineConfig, config: PytorchEngineConfig) -> int:
    """Returns the size of a KV block of the whole model. Raises ModelError."""
    model = Checkpoint.of(engine).config
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    num_heads = model.get("num_key_value_heads") or model["num_attention_heads"]
    dtype = model.get("dtype") or model.get("torch_dtype") or "float32"
    own = "float32" if str(dtype if config.dtype == "auto" else config.dtype) in FLOAT32 else "bfloat16"
    pool = own if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    nbytes = vectors_nbytes(keys_and_values(head_dim), pool)
    return int(model["num_hidden_layers"] * num_heads * nbytes * config.block_size)


def _switch(owner: str, name: str, value: Any) -> bool:
    """Returns a bool. Raises ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{owner}.{name} {reprlib.repr(value)}: must be True or False")
    return value


def _one_of(owner: str, name: str, value: Any, known: dict[str, str]) -> str:
    """Returns the meaning of a known value. Raises ConfigError."""
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{owner}.{name} {reprlib.repr(value)}: expected {' or '.join(known)}")
    return known[value]
