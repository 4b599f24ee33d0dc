"""The plan of a runner: everything that can be determined before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.errors import ConfigError, called
from pd_cluster.model.kernels.attention_backend import check_backend, check_deterministic, default_block_size
from pd_cluster.model.kernels.cuda_speedups import speedups_for
from pd_cluster.model.layers.expert_share import ExpertShare, ExpertUnit
from pd_cluster.model.loading.model_loader import resolve_dtype, resolve_kv_cache_dtype
from pd_cluster.model.parallel.rank_group import Group
from pd_cluster.model.planning.expert_plan import share_of
from pd_cluster.model.planning.pool_sizing import check_offload, num_step_tokens
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.lora_settings import AdapterSettings


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The settings, with defaults filled in, for a checkpoint on a device. `group`: the ranks that share the model."""

    config: EngineConfig
    checkpoint: Checkpoint
    group: Group
    device: Device
    dtype: str  # the model's dtype
    block_size: int
    speedups: tuple[str, ...]
    max_model_len: int
    max_num_batched_tokens: int
    experts: ExpertShare | None = None  # None: this rank has all experts, or a slice of each
    draft: LoadPlan | None = None  # the plan of this model's draft model; see draft_plan.py

    @classmethod
    def of(cls, config: EngineConfig, group: Group, device: Device, unit: ExpertUnit | None = None) -> LoadPlan:
        """Makes the plan; all ranks of the group call this at the same time. Raises ConfigError, ModelError.

        `unit`: see `share_of`.
        """
        assert group.size == config.tensor_parallel_size
        block_size = config.block_size or default_block_size(device)
        check_backend(config.attention_backend, block_size, device)
        check_adapters(config.adapters, device)
        if config.deterministic:
            check_deterministic(config.attention_backend, device)
        speedups = speedups_for(config.cuda_speedups, device, config.deterministic, config.enforce_eager)
        if config.cpu_offload_gb:
            check_offload(config.cpu_offload_gb, device)
        checkpoint = Checkpoint.of(config)
        checkpoint.warn_if_unproven()
        return cls(
            config=config,
            checkpoint=checkpoint,
            group=group,
            device=device,
            block_size=block_size,
            speedups=speedups,
            max_model_len=checkpoint.max_model_len(config.max_model_len),
            dtype=resolve_dtype(config.dtype, checkpoint, device),
            max_num_batched_tokens=group.least(num_step_tokens(config, device)),
            experts=share_of(config, checkpoint, group, device, unit),
        )

    @property
    def kv_dtype(self) -> str:
        return resolve_kv_cache_dtype(self.config.kv_cache_dtype, self.dtype)

    @property
    def tokenizer_file(self) -> Path:
        return (self.checkpoint.tokenizer_path or self.checkpoint.path) / "tokenizer.json"

    @property
    def is_alone(self) -> bool:
        """Whether no other rank shares the model."""
        return self.group.size == 1

    @property
    def goes_ahead(self) -> bool:
        """Whether steps are launched with tokens that the host does not have yet; on CPUs this would gain nothing."""
        if self.exchanges_rows:  # members of a unit agree on each step before its launch
            return False
        spreads = self.device.traits.spreads_tokens or self.config.npu_tp_graphs
        return self.device.is_accelerator and (self.is_alone or spreads)

    @property
    def exchanges_rows(self) -> bool:
        """Whether instances of a unit share the experts."""
        return self.experts is not None and self.experts.exchange is not None


def check_adapters(adapters: AdapterSettings, device: Device) -> None:
    """Raises ConfigError for adapters that this kind of device does not support."""
    if adapters.enable_prompt_adapter and not device.traits.takes_prompt_adapters:
        name = called("enable_prompt_adapter")
        raise ConfigError(f"{name}: prompt adapters run on CPUs and CUDA only; give {called('device')} cpu")
