"""transformers' config of a whole multimodal model."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.errors import ModelError


def whole_config(checkpoint: Checkpoint) -> Any:
    """Returns the whole model's config; if config.json has another form, converted to transformers' form.

    Raises ModelError for invalid values.
    """
    try:
        if (whole := checkpoint.whole) is not None:
            return CONFIG_MAPPING[str(whole["model_type"])].from_dict(whole)
        return AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
    except Exception as error:  # also huggingface_hub's errors for values of the wrong type
        raise ModelError(f"{checkpoint.path / 'config.json'}: {' '.join(str(error).split())}") from error
