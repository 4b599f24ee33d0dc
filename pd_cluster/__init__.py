"""pd-cluster: disaggregated prefill/decode serving for large language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .offline.async_llm import AsyncEngineArgs, AsyncLLMEngine, EngineArgs
    from .offline.llm import LLM
    from .offline.lmdeploy.async_engine import AsyncEngine
    from .offline.lmdeploy.engine_configs import PytorchEngineConfig, TurbomindEngineConfig
    from .offline.lmdeploy.messages import GenerationConfig, GenOut, Response
    from .offline.lmdeploy.pipeline import pipeline
    from .offline.lmdeploy.templates import ChatTemplateConfig
    from .offline.lmdeploy.vision_config import VisionConfig
    from .offline.lora import LoRARequest, PromptAdapterRequest
    from .offline.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from .offline.pooling import (
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
    )
    from .offline.sampling import (
        GuidedDecodingParams,
        GuidedDecodingRequest,
        LLMGuidedOptions,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"

_MODULES = {  # name -> its module, imported on first use: processes that do not need it stay light
    "AsyncEngineArgs": "offline.async_llm",
    "AsyncLLMEngine": "offline.async_llm",
    "EngineArgs": "offline.async_llm",
    "LLM": "offline.llm",
    "LoRARequest": "offline.lora",
    "PromptAdapterRequest": "offline.lora",
    "CompletionOutput": "offline.outputs",
    "RequestMetrics": "offline.outputs",
    "RequestOutput": "offline.outputs",
    "EmbeddingOutput": "offline.pooling",
    "EmbeddingRequestOutput": "offline.pooling",
    "PoolingOutput": "offline.pooling",
    "PoolingParams": "offline.pooling",
    "PoolingRequestOutput": "offline.pooling",
    "GuidedDecodingParams": "offline.sampling",
    "GuidedDecodingRequest": "offline.sampling",
    "LLMGuidedOptions": "offline.sampling",
    "RequestOutputKind": "offline.sampling",
    "SamplingParams": "offline.sampling",
    "StructuredOutputsParams": "offline.sampling",
    "AsyncEngine": "offline.lmdeploy.async_engine",
    "ChatTemplateConfig": "offline.lmdeploy.templates",
    "GenOut": "offline.lmdeploy.messages",
    "GenerationConfig": "offline.lmdeploy.messages",
    "PytorchEngineConfig": "offline.lmdeploy.engine_configs",
    "Response": "offline.lmdeploy.messages",
    "TurbomindEngineConfig": "offline.lmdeploy.engine_configs",
    "VisionConfig": "offline.lmdeploy.vision_config",
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
