"""FastDeploy's offline interface under its own module paths: `fastdeploy.X` is `pd_cluster.fastdeploy.X`.

The engine is the one of `pd_cluster.LLM`; what FastDeploy's document has otherwise than vLLM's is so here: `max_tokens`
counts the prompt, `outputs` is one answer, and durations begin where its document says.
"""

from pd_cluster.fastdeploy.engine.sampling_params import SamplingParams
from pd_cluster.fastdeploy.entrypoints.llm import LLM

__all__ = ["LLM", "SamplingParams"]
