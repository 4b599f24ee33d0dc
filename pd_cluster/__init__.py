"""pd-cluster: disaggregated prefill/decode serving for large language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .offline.llm import LLM
    from .offline.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from .offline.sampling import GuidedDecodingParams, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

_MODULES = {  # name -> where it is; imported when it is first asked for: processes without it stay light
    "LLM": "offline.llm",
    "CompletionOutput": "offline.outputs",
    "RequestMetrics": "offline.outputs",
    "RequestOutput": "offline.outputs",
    "GuidedDecodingParams": "offline.sampling",
    "SamplingParams": "offline.sampling",
    "StructuredOutputsParams": "offline.sampling",
}
__all__ = [
    "LLM",
    "CompletionOutput",
    "GuidedDecodingParams",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
