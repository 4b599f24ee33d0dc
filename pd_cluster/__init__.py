"""pd-cluster: disaggregated prefill/decode serving for large language models."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .extras.lmdeploy.async_engine import AsyncEngine
    from .extras.lmdeploy.engine_configs import PytorchEngineConfig, TurbomindEngineConfig
    from .extras.lmdeploy.generation_config import GenerationConfig, GenOut, Response
    from .extras.lmdeploy.pipeline import pipeline
    from .extras.lmdeploy.pipeline_vision_config import VisionConfig
    from .extras.lmdeploy.prompt_templates import ChatTemplateConfig
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
    "AsyncEngine": "extras.lmdeploy.async_engine",
    "ChatTemplateConfig": "extras.lmdeploy.prompt_templates",
    "GenOut": "extras.lmdeploy.generation_config",
    "GenerationConfig": "extras.lmdeploy.generation_config",
    "PytorchEngineConfig": "extras.lmdeploy.engine_configs",
    "Response": "extras.lmdeploy.generation_config",
    "TurbomindEngineConfig": "extras.lmdeploy.engine_configs",
    "VisionConfig": "extras.lmdeploy.pipeline_vision_config",
    "pipeline": "extras.lmdeploy.pipeline",
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


# Paths below this package that are named as other projects' modules -> the extras' modules that provide them.
_PATHS = {
    "fastdeploy": "fastdeploy",
    "messages": "lmdeploy.messages",
    "pytorch": "lmdeploy.pytorch",
    "turbomind": "lmdeploy.turbomind",
    "vl": "lmdeploy.vl",
}


def _extra(path: str, used_by: str) -> Any:
    return import_module(f"{__name__}.extra_table").load(path, used_by)


class _OtherPaths:
    """Imports an extra's module under its public path. Python uses this finder only for paths without a file."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        package, _, below = name.partition(".")
        if package != __name__ or below.partition(".")[0] not in _PATHS:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # importlib.abc is heavy

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        first, dot, below = module.__name__.partition(".")[2].partition(".")
        found = _extra(_PATHS[first] + dot + below, module.__name__)
        public = {name: value for name, value in vars(found).items() if not name.startswith("_")}
        vars(module).update(public, __doc__=found.__doc__, __all__=getattr(found, "__all__", [*public]))


sys.meta_path.append(_OtherPaths())


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _MODULES[name]
    extra = place.removeprefix("extras.")
    module = import_module(f"{__name__}.{place}") if extra == place else _extra(extra, f"{__name__}.{name}")
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
