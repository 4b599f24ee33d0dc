"""LMDeploy's `pipeline`, which makes an engine from a model's folder."""

from __future__ import annotations

from typing import Any, Literal, overload

from pd_cluster.extras.lmdeploy.async_engine import AsyncEngine
from pd_cluster.extras.lmdeploy.engine_configs import BackendConfig
from pd_cluster.extras.lmdeploy.pipeline_setup import DEFAULT_INSTANCE_NUM
from pd_cluster.extras.lmdeploy.prompt_templates import ChatTemplateConfig

Backend = Literal["turbomind", "pytorch"]
# The arguments after model_path and model_name, in the order of each of two versions.
EARLY = ("backend", "backend_config", "chat_template_config", "instance_num", "tp", "log_level")
LATER = ("backend_config", "chat_template_config", "log_level", "backend", "instance_num", "tp")


@overload
def pipeline(
    model_path: str,
    model_name: str | None = None,
    backend_config: BackendConfig | None = None,
    chat_template_config: ChatTemplateConfig | None = None,
    log_level: str = "ERROR",
    *,
    backend: Backend = "turbomind",
    instance_num: int = DEFAULT_INSTANCE_NUM,
    tp: int = 1,
    **kwargs: Any,
) -> AsyncEngine: ...


@overload
def pipeline(
    model_path: str,
    model_name: str | None,
    backend: Backend,
    backend_config: BackendConfig | None = None,
    chat_template_config: ChatTemplateConfig | None = None,
    instance_num: int = DEFAULT_INSTANCE_NUM,
    tp: int = 1,
    log_level: str = "ERROR",
    **kwargs: Any,
) -> AsyncEngine: ...


def pipeline(model_path: str, model_name: str | None = None, *positional: Any, **named: Any) -> AsyncEngine:
    """Returns a ready engine for the model in that folder, or with that id on the Hugging Face hub or in its cache.

    The third argument is `backend` in LMDeploy's first version and `backend_config` in the second; its type decides
    which order applies.

    `model_name` names a built-in chat template that replaces the folder's own. `instance_num`: the number of prompts
    that are answered at a time; its default means the configuration's max_batch_size. `kwargs`: `prefill` and `decode`
    are numbers of worker processes, `arguments` further flags of `pd-cluster serve` for them; `try_unlisted`,
    `language_model_only` and `hf_overrides` are those of `pd_cluster.LLM`.

    Raises ConfigError, ModelError and the like, which name the argument, and TypeError for extra or repeated arguments.
    """
    order = EARLY if positional and isinstance(positional[0], str) else LATER
    if len(positional) > len(order):
        raise TypeError(f"pipeline() takes at most {2 + len(order)} positional arguments, {2 + len(positional)} given")
    for name, value in zip(order, positional, strict=False):
        if name in named:
            raise TypeError(f"pipeline() got multiple values for argument {name!r}")
        named[name] = value
    return AsyncEngine(model_path, model_name, **named)
