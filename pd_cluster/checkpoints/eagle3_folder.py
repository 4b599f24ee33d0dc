"""Reads the folder of an EAGLE-3 head, but not the weights: its config, the locations of tensors, and its identity.

A tensor that is neither part of the head nor a known leftover of training is an error that names it. Only the values of
`d2t` are read: the head's token id i is the model's token id i + d2t[i].
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pd_cluster.checkpoints.eagle3_config import WAY_OUT, Eagle3Config
from pd_cluster.checkpoints.folder_identity import identity_of
from pd_cluster.checkpoints.plain_files import open_plain
from pd_cluster.checkpoints.safetensors_header import read_header
from pd_cluster.checkpoints.tensor_layouts import WeightFolder
from pd_cluster.checkpoints.weight_files import PLAIN_DTYPES, weight_files
from pd_cluster.errors import ModelError

UNSAFE_FILES = ("pytorch_model.bin", "pytorch_model.pt", "pytorch_model.pth")
D2T, T2D, FC, INPUT_NORM, LM_HEAD, EMBEDDING = (
    *("d2t", "t2d", "fc.weight", "input_norm.weight", "lm_head.weight", "embed_tokens.weight"),
)
LAYER, EARLIER_LAYER = "layers.0.", "midlayer."
ONLY_FOR_TRAINING = (T2D, "verifier_norm.weight", "verifier_lm_head.weight")
COMPUTED = "rotary_emb.inv_freq"  # some versions of transformers saved it
INTEGERS = {"I64": "q", "I32": "i"}  # safetensors' names -> `array`'s


class StoredWeight(NamedTuple):
    """A tensor of a safetensors file. `start`: the offset of its bytes."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int


class Eagle3Target(NamedTuple):
    """The model that a head must fit."""

    path: Path
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Eagle3Folder:
    """`weights`: the tensors by name. Names in the layer begin with LAYER; no name begins with "model.".

    `token_ids`: the model's id of each of the head's tokens; None: the ids are equal. `identity`: a digest of the
    config, the weights' headers and a sample of each file.
    """

    path: Path
    config: Eagle3Config
    weights: Mapping[str, StoredWeight]
    token_ids: tuple[int, ...] | None
    identity: str

    @classmethod
    def read(cls, path: Path) -> Eagle3Folder:
        """Raises ModelError that names the file, and the field or tensor."""
        config = Eagle3Config.read(path)
        files = [*weight_files(path)]
        if not files and (found := [name for name in UNSAFE_FILES if (path / name).exists()]):
            raise ModelError(
                f"{path / found[0]}: such files may run code when they are read; save it as model.safetensors"
            )
        identity = identity_of(WeightFolder(path), None, "", lambda key: True)
        weights: dict[str, StoredWeight] = {}
        for name, weight in (pair for file in files for pair in _stored(file)):
            if name in weights:
                raise ModelError(f"{weight.file}: {weight.key}: the head has it twice, also as {weights[name].key}")
            weights[name] = weight
        _check_weights(path, config, weights)
        return cls(path, config, weights, _token_ids(path, config, weights), identity)

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """See Eagle3Config."""
        return self.config.taps(num_layers)

    def check_fits(self, target: Eagle3Target) -> None:
        """Checks that the head fits the model. Raises ModelError that names both values."""
        config = self.config
        where = "" if config.hidden_size == config.target_hidden_size else "target_"
        pairs = (
            (f"{where}hidden_size", config.target_hidden_size, "hidden_size", target.hidden_size),
            ("vocab_size", config.vocab_size, "vocab_size", target.vocab_size),
            ("num_key_value_heads", config.num_kv_heads, "num_key_value_heads", target.num_kv_heads),
            ("head_dim", config.head_dim, "head_dim", target.head_dim),
        )
        for name, own, others, wanted in pairs:
            if own != wanted:
                why = "; the head's layer is in the model's KV blocks" if "head" in name else ""
                raise ModelError(
                    f"{config.file}: {name} {own}: {target.path} has {others} {wanted}{why}; give a head of that "
                    f"model, or method ngram or suffix"
                )
        if EMBEDDING not in self.weights and config.hidden_size != target.hidden_size:
            raise ModelError(
                f"{config.file}: hidden_size {config.hidden_size}: the model's embedding has {target.hidden_size}, and "
                f"there is no {EMBEDDING}; {WAY_OUT}"
            )
        if LM_HEAD not in self.weights and config.hidden_size != target.hidden_size:
            raise ModelError(
                f"{config.file}: hidden_size {config.hidden_size}: the model's output layer takes "
                f"{target.hidden_size}, and there is no {LM_HEAD}; {WAY_OUT}"
            )
        self.taps(target.num_layers)


def _stored(file: Path) -> Iterator[tuple[str, StoredWeight]]:
    """Yields the tensors of a file with the names that `weights` uses. Raises ModelError."""
    try:
        with open_plain(file) as stream:
            header = read_header(file, stream)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}; copy or download it again") from error
    for key, entry in header.entries.items():
        name = key.removeprefix("model.")
        if name.startswith(EARLIER_LAYER):
            name = LAYER + name.removeprefix(EARLIER_LAYER)
        start = len(header.data) + entry["data_offsets"][0]
        yield name, StoredWeight(file, key, str(entry["dtype"]), tuple(entry["shape"]), start)


def _shapes(config: Eagle3Config) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Returns the shapes of a head's required and optional tensors."""
    size, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    read, number = config.target_hidden_size, config.num_taps
    needed: dict[str, tuple[int, ...]] = {
        "norm.weight": (size,),
        **{f"{LAYER}{name}.weight": (size,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        f"{LAYER}self_attn.q_proj.weight": (queries, 2 * size),
        **{f"{LAYER}self_attn.{name}_proj.weight": (keys, 2 * size) for name in "kv"},
        f"{LAYER}self_attn.o_proj.weight": (size, queries),
        **{f"{LAYER}mlp.{name}_proj.weight": (inner, size) for name in ("gate", "up")},
        f"{LAYER}mlp.down_proj.weight": (size, inner),
    }
    if config.norms_heads:
        needed |= {f"{LAYER}self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    if number:
        needed[FC] = (size, number * read)
        needed |= {INPUT_NORM: (number * read,)} if config.norms_before_fc else {}
        needed |= {f"fc_norm.{at}.weight": (read,) for at in range(number)} if config.norms_each_tap else {}
    own = config.draft_vocab_size or config.vocab_size
    return needed, {EMBEDDING: (config.vocab_size, size), LM_HEAD: (own, size), D2T: (own,)}


def _check_weights(path: Path, config: Eagle3Config, weights: Mapping[str, StoredWeight]) -> None:
    """Raises ModelError for a missing or unknown tensor, and for a wrong shape or dtype."""
    needed, optional = _shapes(config)
    if missing := next((name for name in needed if name not in weights), None):
        raise ModelError(f"{path}: {missing}: missing in its *.safetensors; copy or download it again")
    for name, weight in weights.items():
        place, shape = f"{weight.file}: {weight.key}", needed.get(name, optional.get(name))
        if name in ONLY_FOR_TRAINING or name.endswith(COMPUTED):
            continue
        if shape is None:
            raise ModelError(f"{place}: a head as {config.file} describes it has no such tensor; {WAY_OUT}")
        if weight.shape != shape:
            raise ModelError(f"{place}: shape {list(weight.shape)}, and by {config.file} it must be {list(shape)}")
        dtypes = tuple(INTEGERS) if name == D2T else PLAIN_DTYPES
        if weight.dtype not in dtypes:
            raise ModelError(f"{place}: dtype {weight.dtype}; expected one of {', '.join(dtypes)}")
    if LM_HEAD not in weights and config.is_tied:
        raise ModelError(f"{config.file}: tie_word_embeddings true: save the head with its {LM_HEAD}")
    if LM_HEAD not in weights and (config.draft_vocab_size or config.vocab_size) != config.vocab_size:
        raise ModelError(f"{path}: {LM_HEAD}: missing, and draft_vocab_size is {config.draft_vocab_size}; {WAY_OUT}")


def _token_ids(path: Path, config: Eagle3Config, weights: Mapping[str, StoredWeight]) -> tuple[int, ...] | None:
    """Returns `Eagle3Folder.token_ids`. Raises ModelError for a smaller vocabulary without `d2t`, and for wrong ids."""
    own = config.draft_vocab_size or config.vocab_size
    if D2T not in weights:
        if own != config.vocab_size:
            raise ModelError(
                f"{path}: {D2T}: missing, and draft_vocab_size {own} is not vocab_size {config.vocab_size}; {WAY_OUT}"
            )
        return None
    weight = weights[D2T]
    offsets = array(INTEGERS[weight.dtype])
    with open_plain(weight.file) as stream:
        stream.seek(weight.start)
        offsets.frombytes(stream.read(own * offsets.itemsize))
    if sys.byteorder == "big":
        offsets.byteswap()
    found = tuple(at + offset for at, offset in enumerate(offsets))
    for at, token_id in enumerate(found):
        if not 0 <= token_id < config.vocab_size:
            raise ModelError(
                f"{weight.file}: {weight.key}[{at}] {offsets[at]}: token {token_id} is not one of the model's "
                f"{config.vocab_size}; the values must be offsets, id of the model minus id of the head"
            )
    return None if found == tuple(range(config.vocab_size)) else found
