"""Refuses settings that cannot be combined with states, and decides whether sliding windows form a group of layers."""

from __future__ import annotations

from collections.abc import Iterator

from pd_cluster.errors import ConfigError, called
from pd_cluster.model.loading.model_loader import has_fused_layers
from pd_cluster.model.planning.load_plan import LoadPlan


def splits_windows(plan: LoadPlan) -> bool:
    """Whether sliding-window layers may form their own group if other layers attend to all tokens.

    Kernels of accelerators, lower tiers, the twin blocks of draft models and prefix tuning support only one pool.
    """
    config = plan.config
    is_plain = not (config.kv_host_cache_gib or config.adapters.enable_prompt_adapter or plan.checkpoint.is_unproven)
    is_plain = is_plain and not config.disable_hybrid_kv_cache_manager
    return is_plain and plan.draft is None and not plan.device.is_accelerator


def check_states(plan: LoadPlan, is_fused: bool) -> None:
    """Raises ConfigError for settings that cannot be combined with a model whose layers keep states.

    `is_fused`: fused layers, not transformers' modules, compute the model.
    """
    for setting, why in _refused(plan, is_fused):
        raise ConfigError(f"{setting}: {plan.checkpoint.model_type} keeps states, {why}")


def may_fuse(plan: LoadPlan) -> bool:
    """Whether this device may have kernels for states; some reasons against it appear only when weights are loaded."""
    if plan.device.is_accelerator and (not plan.device.traits.runs_triton or plan.config.attention_backend == "sdpa"):
        return False
    return has_fused_layers(plan.checkpoint)


def _refused(plan: LoadPlan, is_fused: bool) -> Iterator[tuple[str, str]]:
    """Yields each refused setting with its value, and the reason."""
    config, adapters = plan.config, plan.config.adapters
    if plan.device.is_accelerator and not is_fused:
        backend = f"{called('attention_backend')} {config.attention_backend}"
        yield (
            f"{called('device')} {plan.device.kind}",
            f"but {backend} has no kernels for states on this device; use cpu",
        )
    if config.kv_host_cache_gib:
        yield (
            f"{called('kv_host_cache')} {config.kv_host_cache_gib:g}",
            "which lower tiers cannot hold; remove the setting",
        )
    if config.disable_hybrid_kv_cache_manager:
        yield called("disable_hybrid_kv_cache_manager"), "which need a pool of their own; remove the setting"
    if config.speculation.methods:
        methods = ", ".join(config.speculation.methods)
        yield f"{called('speculative_config')}: {methods}", "which wrong drafts would change; remove the setting"
    if adapters.enable_prompt_adapter:
        yield called("enable_prompt_adapter"), "which prompt adapters do not supply; remove the setting"
    if adapters.enable_lora:
        yield called("enable_lora"), "and such layers cannot have adapters; remove the setting"
    if plan.checkpoint.is_unproven:
        yield (
            f"{called('try_unlisted')} {plan.checkpoint.model_type}",
            "and unlisted types with states are not supported",
        )
    keeps = config.enable_prefix_caching and config.mamba_cache_mode == "align"
    if keeps and config.mamba_block_size is not None and config.mamba_block_size % plan.block_size:
        yield (
            f"{called('mamba_block_size')} {config.mamba_block_size}",
            f"which are saved at the ends of blocks: give a multiple of {called('block_size')} {plan.block_size}",
        )
