"""Maps the names of adapters to digests of their contents.

A name is resolved once, when a request arrives; a later change of the name does not affect the request.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.checkpoints.prompt_adapter_folder import PromptFolder
from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.lora_settings import AdapterSettings


def digests_of(settings: AdapterSettings, model_names: Collection[str]) -> dict[str, str]:
    """Maps names of adapters to their digests. `model_names`: the model's names. Raises ConfigError, ModelError."""
    found = {}
    for setting, modules in (("lora_modules", settings.lora_modules), ("prompt_adapters", settings.prompt_adapters)):
        if name := next((each.name for each in modules if each.name in model_names), ""):
            raise ConfigError(f"{called(setting)} {name}: the model itself has this name; use another name")
    for module in settings.lora_modules:
        found[module.name] = LoraFolder.read(Path(module.path), settings.max_lora_rank).digest
    for module in settings.prompt_adapters:
        found[module.name] = PromptFolder.read(Path(module.path), settings.max_prompt_adapter_token).digest
    return found
