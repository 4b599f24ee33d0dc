"""Holds all adapters of a loaded model, LoRA and prompt adapters, by digest."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.checkpoints.prompt_adapter_folder import AdapterFolder, PromptFolder
from pd_cluster.devices.device import CPU, Device
from pd_cluster.errors import ConfigError, called
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.model.inputs.step_input import AdapterSlots
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.lora.loaded_adapters import Adapters
from pd_cluster.model.lora.prompt_adapters import PromptAdapters
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.types.variants import num_virtual_tokens


class ModelAdapters:
    """`variants`: the slots of the loaded adapters by digest, updated when adapters are loaded and dropped.

    `named`: the paths of the adapters that the settings name, by digest.
    """

    def __init__(self, model: CausalLM, layout: KVLayout, settings: AdapterSettings, device: Device = CPU) -> None:
        self._lora = model.adapters
        self.named: dict[str, str] = {}
        self.prompts: PromptAdapters | None = None
        if settings.enable_prompt_adapter:
            width = model.config.get_text_config().hidden_size
            self.prompts = PromptAdapters(width, layout, model.embedding_factor, model.key_features, device)
        self.slots = AdapterSlots(
            None if self._lora is None else self._lora.slots, None if self.prompts is None else self.prompts.slots
        )
        self.variants: Mapping[str, int] = ChainMap(*(slots for slots in self.slots if slots is not None))

    def adopt(self, model: CausalLM) -> None:
        """Moves the loaded adapters to `model`, the same model loaded again."""
        if self._lora is not None:
            assert model.adapters is not None
            self._lora.adopt(model.adapters)
            model.adapters = self._lora

    def let_go(self) -> None:
        """Frees all adapters when the model is closed."""
        self._lora = self.prompts = None

    def load_named(self, settings: AdapterSettings) -> None:
        """Loads every adapter that the settings name, to check it; if there are too many, only the last stay loaded.

        Raises ModelError, ConfigError.
        """
        most = settings.max_cpu_loras
        for module in settings.lora_modules:
            lora = LoraFolder.read(Path(module.path), settings.max_lora_rank)
            if most is not None and lora.digest not in self.variants and len(self._lora_needed.slots) >= most:
                self.drop_adapter(next(iter(self._lora_needed.slots)))
            self.load_adapter(lora)
            self.named[lora.digest] = module.path
        for module in settings.prompt_adapters:
            prompt = PromptFolder.read(Path(module.path), settings.max_prompt_adapter_token)
            self.load_adapter(prompt)
            self.named[prompt.digest] = module.path

    def load_adapter(self, folder: AdapterFolder, slot: int | None = None) -> None:
        """Loads an adapter, on any thread; afterwards requests may use it. Raises ModelError, ConfigError.

        Does nothing if the adapter is already loaded. `slot`: the adapter's slot on rank 0.
        """
        if isinstance(folder, PromptFolder):
            self._prompts_needed.load(folder, slot)
        else:
            self._lora_needed.load(folder, slot)

    def drop_adapter(self, digest: str) -> None:
        """Removes an adapter that no request uses; call it between steps."""
        self._holder_of(digest).drop(digest)

    def next_slot(self, digest: str) -> int:
        """Returns a slot that no adapter of the same type has used yet. Raises ConfigError."""
        return self._holder_of(digest).next_slot()

    def _holder_of(self, digest: str) -> Adapters | PromptAdapters:
        return self._prompts_needed if num_virtual_tokens(digest) else self._lora_needed

    @property
    def _lora_needed(self) -> Adapters:
        if self._lora is None:
            raise ConfigError(f"{called('enable_lora')}: this process was started without it")
        return self._lora

    @property
    def _prompts_needed(self) -> PromptAdapters:
        if self.prompts is None:
            raise ConfigError(f"{called('enable_prompt_adapter')}: this process was started without it")
        return self.prompts
