"""pd-cluster: disaggregated prefill/decode serving for large language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .offline.async_llm import AsyncEngineArgs, AsyncLLMEngine, EngineArgs
    from .offline.llm_adapters import LoRARequest, PromptAdapterRequest
    from .offline.llm_outputs import CompletionOutput, RequestMetrics, RequestOutput
    from .offline.llm_pooling import (
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
    )
    from .offline.llm_sampling import (
        GuidedDecodingParams,
        GuidedDecodingRequest,
        LLMGuidedOptions,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from .offline.lmdeploy.async_engine import AsyncEngine
    from .offline.lmdeploy.engine_configs import PytorchEngineConfig, TurbomindEngineConfig
    from .offline.lmdeploy.generation_config import GenerationConfig, GenOut, Response
    from .offline.lmdeploy.pipeline import pipeline
    from .offline.lmdeploy.pipeline_vision_config import VisionConfig
    from .offline.lmdeploy.prompt_templates import ChatTemplateConfig
    from .offline.offline_llm import LLM

__version__ = "0.1.0"

_MODULES = {  # name -> its module, imported on first use, so that other processes stay small
    "AsyncEngineArgs": "offline.async_llm",
    "AsyncLLMEngine": "offline.async_llm",
    "EngineArgs": "offline.async_llm",
    "LLM": "offline.offline_llm",
    "LoRARequest": "offline.llm_adapters",
    "PromptAdapterRequest": "offline.llm_adapters",
    "CompletionOutput": "offline.llm_outputs",
    "RequestMetrics": "offline.llm_outputs",
    "RequestOutput": "offline.llm_outputs",
    "EmbeddingOutput": "offline.llm_pooling",
    "EmbeddingRequestOutput": "offline.llm_pooling",
    "PoolingOutput": "offline.llm_pooling",
    "PoolingParams": "offline.llm_pooling",
    "PoolingRequestOutput": "offline.llm_pooling",
    "GuidedDecodingParams": "offline.llm_sampling",
    "GuidedDecodingRequest": "offline.llm_sampling",
    "LLMGuidedOptions": "offline.llm_sampling",
    "RequestOutputKind": "offline.llm_sampling",
    "SamplingParams": "offline.llm_sampling",
    "StructuredOutputsParams": "offline.llm_sampling",
    "AsyncEngine": "offline.lmdeploy.async_engine",
    "ChatTemplateConfig": "offline.lmdeploy.prompt_templates",
    "GenOut": "offline.lmdeploy.generation_config",
    "GenerationConfig": "offline.lmdeploy.generation_config",
    "PytorchEngineConfig": "offline.lmdeploy.engine_configs",
    "Response": "offline.lmdeploy.generation_config",
    "TurbomindEngineConfig": "offline.lmdeploy.engine_configs",
    "VisionConfig": "offline.lmdeploy.pipeline_vision_config",
    "pipeline": "offline.lmdeploy.pipeline",
}
__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "ChatTemplateConfig",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "GenOut",
    "GenerationConfig",
    "GuidedDecodingParams",
    "GuidedDecodingRequest",
    "LLMGuidedOptions",
    "LoRARequest",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptAdapterRequest",
    "PytorchEngineConfig",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "Response",
    "SamplingParams",
    "StructuredOutputsParams",
    "TurbomindEngineConfig",
    "VisionConfig",
    "pipeline",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
