"""Reads a prompt adapter's folder in PEFT's format, without torch: prompt tuning, p-tuning, prefix tuning.

PEFT saves the outputs of its prompt encoders, so p-tuning is stored like prompt tuning: a tensor `prompt_embeddings`
with a row per virtual token. In prefix tuning, a row has the keys and values of all layers.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_cluster.checkpoints.lora_folder import (
    CONFIG_FILE,
    MAX_CONFIG_NBYTES,
    MAX_WEIGHTS_NBYTES,
    WEIGHTS_FILE,
    LoraFolder,
    opened,
    stored_tensors,
)
from pd_cluster.checkpoints.lora_tensors import LoraTensor
from pd_cluster.checkpoints.plain_files import digest_file, read_digested
from pd_cluster.errors import ModelError
from pd_cluster.types.variants import PromptKind, prompt_variant

TENSOR = "prompt_embeddings"
KINDS: dict[str, PromptKind] = {"PROMPT_TUNING": "prompt", "P_TUNING": "prompt", "PREFIX_TUNING": "prefix"}
MAX_TOKENS = 65_535
# Fields that describe only the training or the base.
NO_EFFECT = (
    *(
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "peft_version",
        "auto_mapping",
    ),
    *("num_virtual_tokens", "token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers"),
    *("modules_to_save", "prompt_tuning_init", "prompt_tuning_init_text", "prompt_tuning_init_state_dict_path"),
    *("prompt_tuning_init_state_dict_key", "tokenizer_name_or_path", "tokenizer_kwargs", "prefix_projection"),
    *("encoder_hidden_size", "encoder_num_layers", "encoder_dropout", "encoder_reparameterization_type"),
)


@dataclass(frozen=True, slots=True)
class PromptFolder:
    """`tensor`, [num_tokens, width]: embeddings, or keys and values of all layers. `digest`: see variants.py.

    `file_nbytes`: the size of the tensor's file.
    """

    path: Path
    kind: PromptKind
    tensor: LoraTensor
    digest: str
    file_nbytes: int

    @property
    def file(self) -> Path:
        return self.path / WEIGHTS_FILE

    @property
    def num_tokens(self) -> int:
        return self.tensor.shape[0]

    @classmethod
    def read(cls, path: Path, max_tokens: int = 0) -> PromptFolder:
        """Reads everything except the values. `max_tokens` 0: no limit. Raises ModelError that names file and field."""
        given = config_of(path)
        config = path / CONFIG_FILE
        if (kind := given.get("peft_type")) not in KINDS:
            raise ModelError(f"{config}: peft_type {reprlib.repr(kind)}: not one of {', '.join(KINDS)}")
        _check_supported(config, given)
        file = path / WEIGHTS_FILE
        with opened(path, WEIGHTS_FILE, MAX_WEIGHTS_NBYTES) as stream:
            found, size = stored_tensors(file, stream)
            tensor = _only_tensor(file, found)
            _check_rows(config, given, tensor.shape[0], max_tokens)
            stream.seek(0)
            digest = hashlib.sha256(KINDS[str(kind)].encode() + b"\0")
            if digest_file(stream, digest) != size:
                raise ModelError(f"{file}: changed while it was read; load it again")
        name = prompt_variant(KINDS[str(kind)], tensor.shape[0], digest.hexdigest())
        return cls(path, KINDS[str(kind)], tensor, name, size)

    def weights(self) -> mmap.mmap:
        """Returns the whole file. Raises ModelError if it changed since `read`."""
        digest = hashlib.sha256(self.kind.encode() + b"\0")
        with opened(self.path, WEIGHTS_FILE, self.file_nbytes) as stream:
            data = read_digested(stream, self.file_nbytes, digest)
        if not self.digest.endswith(digest.hexdigest()):
            raise ModelError(f"{self.file}: changed while it was loaded; load it again")
        return data


def _only_tensor(file: Path, found: Mapping[str, LoraTensor]) -> LoraTensor:
    """Raises ModelError."""
    for name in found:
        if name != TENSOR:
            raise ModelError(f"{file}: {reprlib.repr(name)}: a prompt adapter has only {TENSOR}")
    tensor = found[TENSOR]
    if len(tensor.shape) != 2:
        raise ModelError(f"{file}: {TENSOR}: shape {list(tensor.shape)}; expected a matrix")
    return tensor


def _check_rows(config: Path, given: Mapping[str, Any], num_tokens: int, max_tokens: int) -> None:
    """Raises ModelError."""
    if given.get("num_virtual_tokens") != num_tokens:
        wanted = reprlib.repr(given.get("num_virtual_tokens"))
        raise ModelError(f"{config}: num_virtual_tokens {wanted}, but {TENSOR} has {num_tokens} rows")
    if num_tokens > (max_tokens or MAX_TOKENS):
        limit = f"--max-prompt-adapter-token {max_tokens}; raise that" if max_tokens else f"the limit of {MAX_TOKENS}"
        raise ModelError(f"{config}: num_virtual_tokens {num_tokens} is above {limit}")


AdapterFolder = LoraFolder | PromptFolder


def read_adapter(path: Path, max_rank: int, max_tokens: int = 0) -> AdapterFolder:
    """Reads the folder of an adapter of any kind. Raises ModelError."""
    if path.is_dir() and config_of(path).get("peft_type") in KINDS:
        return PromptFolder.read(path, max_tokens)
    return LoraFolder.read(path, max_rank)


def config_of(path: Path) -> Mapping[str, Any]:
    """Returns the content of adapter_config.json. Raises ModelError."""
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder")
    with opened(path, CONFIG_FILE, MAX_CONFIG_NBYTES) as stream:
        try:
            given = json.loads(stream.read(MAX_CONFIG_NBYTES + 1))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path / CONFIG_FILE}: not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ModelError(f"{path / CONFIG_FILE}: expected a JSON object")
    return given


def _check_supported(config: Path, given: Mapping[str, Any]) -> None:
    """Raises ModelError for an unsupported field that changes results."""
    if (number := given.get("num_transformer_submodules")) not in (None, 1):
        raise ModelError(f"{config}: num_transformer_submodules {reprlib.repr(number)}: only decoders are served")
    if given.get("modules_to_save"):
        raise ModelError(f"{config}: modules_to_save: whole modules beside the adapter are not replaced")
    for name, value in given.items():
        if name not in NO_EFFECT and value:
            raise ModelError(
                f"{config}: {name} {reprlib.repr(value)}: this field is not known here, and may change what is computed"
            )
