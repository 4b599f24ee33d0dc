"""FastDeploy's SamplingParams, documented at https://paddlepaddle.github.io/FastDeploy/offline_inference"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pd_cluster.offline import llm_sampling


@dataclass(slots=True, kw_only=True)
class SamplingParams(llm_sampling.SamplingParams):
    """Like `pd_cluster.SamplingParams`, but `max_tokens` counts the tokens of prompt and answer together.

    None, the default: as many as fit the context.
    """

    max_tokens: int | msgspec.UnsetType | None = None
    max_tokens_includes_prompt: bool = True
