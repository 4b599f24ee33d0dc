"""Plans, before any weight is read, which experts a rank has. Refuses settings that cannot be combined with expert
parallelism.
"""

from __future__ import annotations

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.expert_counts import num_experts_of
from pd_cluster.devices.device import Device
from pd_cluster.devices.process_groups import why_none
from pd_cluster.errors import ConfigError, called
from pd_cluster.model.layers.expert_share import ExpertShare, ExpertUnit
from pd_cluster.model.parallel.rank_group import Group
from pd_cluster.model.vision.vision_experts import WHOLE_TYPE
from pd_cluster.settings.engine_config import PROMPT_GRAPHS, EngineConfig


def share_of(
    config: EngineConfig, checkpoint: Checkpoint, group: Group, device: Device, unit: ExpertUnit | None
) -> ExpertShare | None:
    """Returns this rank's share of the experts; None: it has all experts, or a slice of each one. Raises ConfigError.

    `unit`: this rank's part of the exchange between the instances of a unit.
    """
    num_experts, num_members = num_experts_of(checkpoint.config), config.data_parallel_size
    if config.enable_expert_parallel and not num_experts:
        raise ConfigError(
            f"{called('enable_expert_parallel')}: {checkpoint.path} ({checkpoint.model_type}) has no experts; remove it"
        )
    size = num_members * group.size
    if not num_experts or size == 1 or not (config.enable_expert_parallel or num_members > 1):
        return None
    flag = _flag(config)
    if num_members > 1 and device.is_accelerator and (why := why_none(device.dist_backend, device)):
        raise ConfigError(
            f"{flag}: instances of a unit exchange the rows of experts, but {why}; remove the flag, and give "
            f"{called('enable_expert_parallel')} with a larger {called('tensor_parallel_size')} to spread the experts "
            f"of one instance"
        )
    if num_members > 1 and unit is None:
        raise ConfigError(f"{flag}: the instances of a unit exchange rows, but this process runs alone; give 1")
    if why := _why_not(config, checkpoint):
        raise ConfigError(f"{flag}: {why}")
    exchange = unit if num_members > 1 else None
    share = ExpertShare(config.unit_rank * group.size + group.rank, size, config.expert_placement_strategy, exchange)
    share.own(num_experts)  # raises
    return share


def _flag(config: EngineConfig) -> str:
    size = config.data_parallel_size
    return f"{called('data_parallel_size')} {size}" if size > 1 else called("enable_expert_parallel")


def _why_not(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """Returns a setting that cannot be combined with experts on several ranks, and what to do; "" if there is none."""
    if config.adapters.enable_lora:
        name = called("enable_lora")
        return f"{name}: adapters do not support experts that are spread over ranks; remove one of the two"
    if (method := config.speculation.with_weights) is not None:
        name = called("speculative_config")
        return (
            f"{name}: method {method}: draft models and heads do not run in a unit of instances; give ngram or suffix"
        )
    if config.data_parallel_size > 1 and PROMPT_GRAPHS in config.cuda_speedups:
        return f"{called('cuda_speedups')} {PROMPT_GRAPHS}: steps that exchange rows cannot be graphs; remove it"
    if checkpoint.is_unproven:
        kind = checkpoint.model_type
        return f"{called('try_unlisted')}: no check would detect that experts of {kind} are spread wrongly; remove it"
    if checkpoint.part_of == WHOLE_TYPE:
        return f"{checkpoint.path}: vision experts of {WHOLE_TYPE} cannot be spread over ranks; remove the setting"
    return ""
