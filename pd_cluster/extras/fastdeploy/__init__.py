"""FastDeploy's offline interface under its own module paths: `fastdeploy.X` is `pd_cluster.fastdeploy.X`.

The engine is `pd_cluster.LLM`'s. Where FastDeploy's documentation differs from vLLM's, this follows FastDeploy:
`max_tokens` counts the prompt, `outputs` is one answer, and durations begin at the events that FastDeploy's
documentation names.
"""

from pd_cluster.extras.fastdeploy.engine.sampling_params import SamplingParams
from pd_cluster.extras.fastdeploy.entrypoints.llm import LLM

__all__ = ["LLM", "SamplingParams"]
