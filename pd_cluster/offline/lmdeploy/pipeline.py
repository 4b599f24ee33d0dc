"""LMDeploy's `pipeline`: the one call from a model's folder to something that answers prompts."""

from __future__ import annotations

from typing import Any, Literal

from pd_cluster.offline.lmdeploy.async_engine import AsyncEngine
from pd_cluster.offline.lmdeploy.engine_configs import BackendConfig
from pd_cluster.offline.lmdeploy.setup import DEFAULT_INSTANCE_NUM
from pd_cluster.offline.lmdeploy.templates import ChatTemplateConfig


def pipeline(
    model_path: str,
    model_name: str | None = None,
    backend_config: BackendConfig | None = None,
    chat_template_config: ChatTemplateConfig | None = None,
    log_level: str = "ERROR",
    backend: Literal["turbomind", "pytorch"] = "turbomind",
    instance_num: int = DEFAULT_INSTANCE_NUM,
    tp: int = 1,
    **kwargs: Any,
) -> AsyncEngine:
    """A ready engine for the model in that folder, or of that id in the local Hugging Face cache.

    `model_name` names a built-in chat template that takes the place of the folder's own. `instance_num`: prompts that
    are answered at a time; its default stands for the configuration's max_batch_size. `kwargs`: `prefill` and `decode`
    are numbers of worker processes, `arguments` further flags of `pd-cluster serve` for them.

    Raises ConfigError, ModelError and the like, which name the argument.
    """
    return AsyncEngine(
        model_path,
        model_name,
        backend,
        backend_config,
        chat_template_config,
        instance_num,
        tp,
        log_level=log_level,
        **kwargs,
    )
