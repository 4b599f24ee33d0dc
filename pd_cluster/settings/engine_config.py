"""The settings of one engine, from its model to its KV pool."""

from __future__ import annotations

import os
import reprlib
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.settings.model_names import fault_of_name
from pd_cluster.settings.processor_names import PROCESSORS
from pd_cluster.settings.setting import (
    NUMBERS,
    OBJECT,
    POSITIVE,
    TEXTS,
    Check,
    Form,
    Panel,
    Scope,
    Setting,
    at_least,
    at_most,
    check,
    finite,
    one_of,
    within,
)
from pd_cluster.settings.speculation import Speculation
from pd_cluster.settings.speculative_config import SPECULATION

SHIPPED_MODEL = Path(__file__).parents[1] / "models" / "tiny-chat"
SHIPPED_VISION_MODEL = SHIPPED_MODEL.with_name("tiny-vision")
MAX_BLOCK_SIZE = 4096  # tokens
MAX_TP_SIZE = 256
DEFAULT_NUM_SEQS = 256
MAX_UNIT_SIZE = 64  # instances
ExpertPlacement = Literal["linear", "round_robin"]
EXPERT_PLACEMENTS: tuple[ExpertPlacement, ...] = get_args(ExpertPlacement)
StateCacheMode = Literal["none", "align", "all"]
STATE_CACHE_MODES: tuple[StateCacheMode, ...] = get_args(StateCacheMode)
PREEMPTION_MODES = ("recompute", "swap")
NPU_HEAD_DIMS = ("strict", "wide")
PDL, SKINNY_GATE, SYMMETRIC_SUMS, PROMPT_GRAPHS = "pdl", "skinny-gate", "symmetric-sums", "prompt-graphs"
CUDA_SPEEDUPS = (PDL, SKINNY_GATE, SYMMETRIC_SUMS, PROMPT_GRAPHS)
ATTENTION_BACKENDS = ("auto", "triton", "flashinfer", "sdpa")
FORMATS = ("awq", "gptq", "auto-round", "compressed-tensors", "smoothquant", "fp8", "mxfp4", "modelopt", "ascend")
AT_LOAD = ("fp8", "int8", "int8_wo", "int4_wo", "w4a8")
ONLY_ON_CPU = ("w4a8",)
ALSO_AT_LOAD = {"wint8": "int8_wo", "wint4": "int4_wo"}  # FastDeploy's names
QUANTIZATIONS = tuple(dict.fromkeys((*FORMATS, *AT_LOAD, *ALSO_AT_LOAD)))
DTYPES = ("auto", "float32", "float16", "bfloat16", "float", "half")
KV_CACHE_DTYPES = {  # names of vLLM and related servers -> our names
    **{name: name for name in ("auto", "bfloat16", "int8", "fp8_e4m3", "int4")},
    "fp8": "fp8_e4m3",
    "fp8_per_token_head": "fp8_e4m3",
    "int8_per_token_head": "int8",
    "int8_pertoken": "int8",
    "int4_per_token_head": "int4",
}

ENGINE = partial(Setting, panel=Panel.ENGINE, scope=Scope.ENGINE)
ONE = (at_least(1),)
SOME_SPEEDUPS = Check(lambda names: set(names) <= set(CUDA_SPEEDUPS), f"expected some of {', '.join(CUDA_SPEEDUPS)}")
GIB = (finite("must be a number of GiB"),)
NAME = Form(str, lambda name, written: None if written in ("None", "none") else written, lambda value: value)


def _model(name: str, written: str) -> str:
    if not written:
        raise ConfigError(
            f"{called(name)}: empty or missing; give a model's folder, or a hub's model. Only `pd-cluster up` needs "
            "none: it serves the small model that is shipped with the project"
        )
    return written


MODEL = Form(str, _model, str)


def model_name(model: str) -> str:
    """Returns a model's default name for clients: the last part of a folder's path, or a hub's name unchanged.

    Raises ConfigError for a folder whose name is unsuitable.
    """
    if not os.path.isabs(model) and not os.path.isdir(model):
        return model
    name = os.path.basename(os.path.abspath(model)) or model
    if fault := fault_of_name(name):
        way_out = f"give the model a name by {called('served_model_name')}"
        raise ConfigError(f"{called('model')} {reprlib.repr(model)}: the folder's name {fault}; {way_out}")
    return name


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines what an engine computes, and how. None: decided when the model is loaded."""

    model: Annotated[
        str,
        Setting(
            "The model's folder, or a hub's model; required.",
            Panel.BASIC,
            Scope.ENGINE,
            default="",
            form=MODEL,
        ),
    ]
    tensor_parallel_size: Annotated[
        int,
        ENGINE(
            "Number of devices that share the model; default: as in the rank table.",
            default=None,
            checks=(*ONE, at_most(MAX_TP_SIZE)),
        ),
    ] = 1
    data_parallel_size: Annotated[
        int,
        ENGINE(
            "Number of instances of one role that share a model's experts.",
            checks=(*ONE, at_most(MAX_UNIT_SIZE)),
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        ENGINE("Give each rank whole experts instead of parts of all; implied by --data-parallel-size above 1."),
    ] = False
    expert_placement_strategy: Annotated[
        ExpertPlacement,
        ENGINE(
            "linear: each rank has consecutive experts; round_robin: the experts are dealt out in turn.",
            checks=(one_of(EXPERT_PLACEMENTS),),
        ),
    ] = "linear"
    revision: Annotated[str, ENGINE("Branch, tag or commit of the model on the hub.")] = ""
    download_dir: Annotated[str, ENGINE("Folder for models from the hub; default: the hub's own cache.")] = ""
    tokenizer: Annotated[str, ENGINE("Folder or hub id of a tokenizer to use instead of the model's.")] = ""
    tokenizer_revision: Annotated[str, ENGINE("Branch, tag or commit of the tokenizer.")] = ""
    skip_tokenizer_init: Annotated[
        bool, ENGINE("Serve a model folder without a tokenizer; prompts must be token ids.")
    ] = False
    hf_overrides: Annotated[
        dict[str, Any], ENGINE("JSON object whose values replace those of config.json.", form=OBJECT)
    ] = {}
    max_model_len: Annotated[int | None, ENGINE("Maximum number of prompt and output tokens together.", checks=ONE)] = (
        None
    )
    max_num_seqs: Annotated[
        int,
        ENGINE(
            "Maximum number of sequences in a step; lowered if a model's states do not fit in memory.",
            checks=ONE,
        ),
    ] = DEFAULT_NUM_SEQS
    max_num_batched_tokens: Annotated[
        int | None,
        ENGINE(
            "Maximum number of tokens in a step; longer prompts are chunked. Default: 2048; 8192 on a GPU with 70 GB.",
            checks=ONE,
        ),
    ] = None
    dtype: Annotated[
        str,
        ENGINE(
            "auto, float32, float16 or bfloat16. auto: the model's own; on a CPU float32, or bfloat16 if it is fast.",
            checks=(one_of(DTYPES),),
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        ENGINE(
            f"Quantizes plain weights at load: fp8, int8 (activations too), int8_wo or wint8, int4_wo or wint4, w4a8 "
            f"(CPU). Quantized folders are recognized without it: {', '.join(FORMATS)}.",
            checks=(one_of(QUANTIZATIONS),),
            form=NAME,
        ),
    ] = None
    quantize_head: Annotated[
        str | None,
        ENGINE(
            "Quantize the output layer at load: fp8, int8, int8_wo or wint8, int4_wo or wint4, w4a8 (CPU).",
            checks=(one_of((*AT_LOAD, *ALSO_AT_LOAD)),),
            form=NAME,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        ENGINE(
            "Data type of the KV cache: auto (the model's), bfloat16, int8, fp8_e4m3 (or fp8) or int4.",
            checks=(one_of(tuple(KV_CACHE_DTYPES)),),
        ),
    ] = "auto"
    device: Annotated[str, ENGINE("auto, cpu, cuda or npu. auto: the accelerator, if the host has one.")] = "auto"
    enforce_eager: Annotated[bool, ENGINE("Never capture graphs, even if the device supports them.", has_off=True)] = (
        False
    )
    max_seq_len_to_capture: Annotated[
        int | None,
        ENGINE(
            "Maximum context length, in tokens, for which graphs are used; default: any.",
            also=("max_context_len_to_capture",),
            checks=ONE,
        ),
    ] = None
    graph_sizes: Annotated[
        tuple[int, ...],
        ENGINE(
            "Batch sizes for which graphs are captured. A single number N: 1, 2, 4 and multiples of 8 up to N.",
            also=("cuda_graph_sizes", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
            checks=(Check(lambda sizes: all(size >= 1 for size in sizes), "must be at least 1 each"),),
            form=NUMBERS,
            is_several=True,
        ),
    ] = ()
    attention_backend: Annotated[
        str,
        ENGINE(
            "auto, triton (a GPU's auto), flashinfer (must be installed) or sdpa. On CPU: auto or sdpa.",
            checks=(one_of(ATTENTION_BACKENDS),),
        ),
    ] = "auto"
    npu_head_dims: Annotated[
        str,
        ENGINE(
            "On NPUs, strict: packed attention only for the operator's head sizes; wide: also for other sizes that "
            "pass a check.",
            checks=(one_of(NPU_HEAD_DIMS),),
        ),
    ] = "strict"
    npu_tp_graphs: Annotated[
        bool,
        ENGINE(
            "On NPUs with several ranks, decode with graphs and launch steps ahead. Not yet tested on hardware.",
        ),
    ] = False
    cuda_speedups: Annotated[
        tuple[str, ...],
        ENGINE(
            "Unmeasured speed-ups for NVIDIA GPUs: pdl, skinny-gate, symmetric-sums, prompt-graphs. Off by default.",
            metavar="NAME",
            checks=(SOME_SPEEDUPS,),
            form=TEXTS,
            is_several=True,
        ),
    ] = ()
    deterministic: Annotated[
        bool,
        ENGINE(
            "Make a request's results bitwise independent of its batch. Slower on a GPU; refused on NPUs.",
        ),
    ] = False
    try_unlisted: Annotated[
        tuple[str, ...],
        ENGINE(
            "Serve this unlisted model_type if it passes a check at load.",
            metavar="TYPE",
            form=TEXTS,
        ),
    ] = ()
    language_model_only: Annotated[bool, ENGINE("Serve only the text model of a multimodal model.")] = False
    enable_mm: Annotated[bool, ENGINE("Refuse to start with a model that takes no images.")] = False
    mm_encoder_cache_tokens: Annotated[
        int,
        ENGINE(
            "Image tokens whose features each rank caches for later chunks and requests. 0: none.",
            checks=(at_least(0),),
        ),
    ] = 8192
    block_size: Annotated[
        int | None,
        ENGINE(
            "Tokens in a KV cache block; default: 16, or 128 on NPUs.",
            checks=(*ONE, at_most(MAX_BLOCK_SIZE, " tokens")),
        ),
    ] = None
    num_blocks: Annotated[
        int | None, ENGINE("Number of blocks in the KV pool.", also=("num_gpu_blocks_override",), checks=ONE)
    ] = None
    kv_cache_memory_gib: Annotated[float | None, ENGINE("Size of the KV pool, in GiB.", checks=GIB)] = None
    gpu_memory_utilization: Annotated[
        float | None,
        ENGINE(
            "Share of memory for this instance, unless a flag gives the size of the pool. On a CPU: of the free "
            "memory. GPU default: 0.9.",
            also=("device_memory_utilization",),
            checks=(within(0, 1),),
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool, ENGINE("Keep KV blocks of finished requests for later prompts with the same prefix.", has_off=True)
    ] = True
    preemption_mode: Annotated[
        str,
        ENGINE(
            "How a preempted sequence continues: recompute or swap.",
            checks=(one_of(PREEMPTION_MODES),),
        ),
    ] = "recompute"
    swap_space_gib: Annotated[float, ENGINE("GiB of host memory for preempted sequences.", checks=GIB)] = 4.0
    kv_host_cache_gib: Annotated[
        float,
        ENGINE(
            "GiB of host memory for evicted KV blocks, which are loaded when that is faster than recomputing.",
            also=("kv_offloading_size",),
            after="enable_prefix_caching",
            checks=GIB,
        ),
    ] = 0.0
    disable_hybrid_kv_cache_manager: Annotated[
        bool,
        ENGINE(
            "Keep layers with sliding windows in the same pool as the others. Needed to pair with instances that "
            "have --kv-host-cache.",
            has_off=True,
        ),
    ] = False
    state_cache_gib: Annotated[
        float | None,
        ENGINE(
            "GiB of KV memory for states cached for later requests. Default: a quarter of the KV memory.",
            checks=GIB,
        ),
    ] = None
    mamba_cache_mode: Annotated[
        StateCacheMode,
        ENGINE(
            "Which states are cached for later requests: none; align: those at ends of prompts and every "
            "--mamba-block-size tokens; all.",
            checks=(one_of(STATE_CACHE_MODES),),
        ),
    ] = "align"
    mamba_block_size: Annotated[
        int | None,
        ENGINE(
            "Tokens between cached states of a long prompt; a multiple of --block-size. Default: about 1,024.",
            checks=ONE,
        ),
    ] = None
    mamba_ssm_cache_dtype: Annotated[
        str, ENGINE("Data type of states: auto or float32, which are the same.", checks=(one_of(("auto", "float32")),))
    ] = "auto"
    cpu_offload_gb: Annotated[
        float,
        ENGINE(
            "GiB of weights in host memory; has no effect on a CPU, and must be 0 on accelerators.",
            checks=GIB,
        ),
    ] = 0.0
    growth_tokens: Annotated[int, ENGINE("Output tokens for which a decode instance reserves blocks in advance.")] = 128
    seed: Annotated[
        int | None,
        Setting("Seed of the generator that draws seeds for requests without one.", Panel.REQUESTS, Scope.ENGINE),
    ] = None
    generation_config: Annotated[
        str,
        Setting(
            "Source of sampling defaults: auto (the model's generation_config.json), vllm (none), or another folder.",
            Panel.REQUESTS,
            Scope.ENGINE,
            after="max_logprobs",
        ),
    ] = "auto"
    adapters: AdapterSettings = AdapterSettings()
    speculation: Annotated[
        Speculation,
        ENGINE(
            "JSON object with vLLM's keys (method: ngram, suffix, draft_model, eagle3, mtp or a list): how tokens "
            "are drafted. Default: only from a request's prediction and guide.",
            name="speculative_config",
            form=SPECULATION,
        ),
    ] = Speculation()
    logits_processors: Annotated[
        tuple[str, ...],
        ENGINE(
            "Class of vLLM's interface that changes logits before a token is chosen. It must be importable where "
            "engines run, and it disables drafting.",
            metavar="MODULE:CLASS",
            form=PROCESSORS,
            is_several=True,
        ),
    ] = ()
    unit_rank: int = 0  # among `data_parallel_size` instances
    num_local_ranks: int = 1  # ranks that share this host's memory
    paired_tp_sizes: tuple[int, ...] = ()  # sizes of the instances with which KV cache is exchanged over device pairs

    def __post_init__(self) -> None:
        check(self)
        if self.enable_mm and self.language_model_only:
            one, other = called("enable_mm"), called("language_model_only")
            raise ConfigError(f"{one}: {other} serves no images; give only one of them")
        if (coded := self.speculation.quantization) and not (rule := one_of(QUANTIZATIONS)).accepts(coded):
            raise ConfigError(f"{called('speculative_config')}: quantization {coded!r}: {rule.says}")
        if (method := self.speculation.with_weights) is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"{called('speculative_config')}: method {method} needs {called('tensor_parallel_size')} 1, but it is "
                f"{self.tensor_parallel_size}; give 1, or method ngram or suffix"
            )
        if method == "mtp" and self.speculation.model not in ("", self.model):
            raise ConfigError(
                f"{called('speculative_config')}: model {self.speculation.model}: mtp drafts with layers of "
                f"{called('model')} {self.model} itself; leave it out"
            )
        if self.logits_processors and self.speculation.methods:
            raise ConfigError(
                f"{called('speculative_config')}: method {', '.join(self.speculation.methods)}: there are no drafts "
                f"with {called('logits_processors')}; give only one of them"
            )
        if self.kv_host_cache_gib and not self.enable_prefix_caching:
            one, other = called("kv_host_cache"), called("enable_prefix_caching")
            raise ConfigError(f"{one}: needs the prefix cache, but {other} is off; turn it on, or leave {one} out")
        if self.preemption_mode == "swap" and not self.swap_space_gib:
            mode, space = called("preemption_mode"), called("swap_space")
            raise ConfigError(f"{mode} swap: needs memory to swap to; give {space} GIB")


class RopeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Two values of config.json that have flags of their own; `into` adds them to the overrides."""

    rope_scaling: Annotated[
        dict[str, Any],
        ENGINE("JSON object that replaces config.json's rope_scaling.", form=OBJECT, after="hf_overrides"),
    ] = {}
    rope_theta: Annotated[
        float | None, ENGINE("Replaces config.json's rope_theta.", checks=(POSITIVE,), after="rope_scaling")
    ] = None

    def into(self, overrides: dict[str, Any]) -> dict[str, Any]:
        """Returns all overrides of config.json. Raises ConfigError for a value that is given twice."""
        own = {"rope_scaling": self.rope_scaling or None, "rope_theta": self.rope_theta}
        given = {name: value for name, value in own.items() if value is not None}
        for name in [each for each in given if each in overrides]:
            both = f"{called(name)}: {called('hf_overrides')} has {name}"
            raise ConfigError(f"{both}, too; give only one of them")
        return overrides | given
