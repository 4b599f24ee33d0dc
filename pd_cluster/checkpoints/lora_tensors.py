"""Classifies the tensors of a LoRA adapter's file; an unknown tensor is an error that names it.

Names are PEFT's, with or without its prefix. Knows nothing of the model's modules.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pd_cluster.errors import ModelError

_MODULE = r"(?:base_model\.model\.)?(?P<module>[\w.]{1,256}?)"
MATRIX = re.compile(_MODULE + r"\.lora_(?P<side>[AB])(?:\.default)?\.weight")
EMBEDDING = re.compile(_MODULE + r"\.lora_embedding_(?P<side>[AB])(?:\.default)?")
COPY = re.compile(_MODULE + r"\.base_layer\.weight")
WHOLE = re.compile(_MODULE + r"(?:\.modules_to_save(?:\.default)?)?\.weight")
# Experts with stacked weights. PEFT wraps their module once for each adapted tensor.
EXPERTS = re.compile(r"(?P<path>.*\.experts)(?:\.base_layer)?")
OLD_BLOCK, OLD_PARTS = "block_sparse_moe", {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's names
OLD_EXPERT = re.compile(r"(?P<before>.*\.experts\.\d+)\.(?P<part>w[123])")
WHY_NOT = {
    ".lora_magnitude_vector": "DoRA, which also scales the base's products, is not supported",
    ".lora_B.bias": "biases of adapters are not supported",
    ".token_adapter.": "replacing rows of embeddings is not supported",
}


@dataclass(frozen=True, slots=True)
class LoraTensor:
    """One tensor, in bytes [start, stop) of the file.

    A is [rank, in_features], B is [out_features, rank].
    """

    dtype: Literal["F32", "F16", "BF16"]
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A and B of one module."""

    a: LoraTensor
    b: LoraTensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """All tensors of a file, by transformers' module names.

    `experts`: for each module of experts one pair per adapted tensor, at most two. A is [num_experts * rank,
    in_features], expert by expert, and B [out_features, rank * num_experts], rank by rank. `wholes` replace a module's
    weight; `copies` repeat the base's own weights.
    """

    modules: dict[str, Pair]
    embeddings: dict[str, Pair]
    experts: dict[str, tuple[Pair, ...]]
    wholes: dict[str, LoraTensor]
    copies: dict[str, LoraTensor]


def sorted_tensors(file: Path, stored: Mapping[str, LoraTensor], saved: Collection[str]) -> LoraTensors:
    """Sorts tensors. `saved`: suffixes of modules that the file replaces. Raises ModelError that names a tensor."""
    sides: dict[str, dict[str, LoraTensor]] = {}
    embeddings: dict[str, dict[str, LoraTensor]] = {}
    wholes: dict[str, LoraTensor] = {}
    copies: dict[str, LoraTensor] = {}
    for name, tensor in stored.items():
        place = f"{file}: {shown(name)}"
        if why := next((why for part, why in WHY_NOT.items() if part in name), ""):
            raise ModelError(f"{place}: {why}")
        if found := MATRIX.fullmatch(name):
            _add(place, sides.setdefault(found["module"], {}), found["side"], tensor)
        elif found := EMBEDDING.fullmatch(name):
            _add(place, embeddings.setdefault(found["module"], {}), found["side"], tensor)
        elif found := COPY.fullmatch(name):
            _add(place, copies, found["module"], tensor)
        elif (found := WHOLE.fullmatch(name)) and ends_with_one(found["module"], saved):
            _add(place, wholes, found["module"], tensor)
        else:
            raise ModelError(
                f"{place}: not a matrix of a LoRA adapter (MODULE.lora_A.weight or lora_B), nor a module of "
                f"modules_to_save"
            )
    for each in saved:
        if not any(ends_with_one(name, (each,)) for name in wholes):
            raise ModelError(f"{file}: modules_to_save {reprlib.repr(each)}: the file has no weight of this module")
    modules, experts = _apart(_pairs(file, sides, "lora_{}.weight"))
    return LoraTensors(modules, _pairs(file, embeddings, "lora_embedding_{}"), experts, wholes, copies)


def ends_with_one(module: str, ends: Iterable[str]) -> bool:
    """Matches the end of a name, as PEFT's `modules_to_save` does, so "norm" matches every norm of a layer."""
    return module.endswith(tuple(ends))


def shown(name: str) -> str:
    return name if re.fullmatch(r"[\w.]{1,300}", name) else reprlib.repr(name)


def _add(place: str, found: dict[str, LoraTensor], key: str, tensor: LoraTensor) -> None:
    if key in found:
        raise ModelError(f"{place}: the file has this tensor twice")
    found[key] = tensor


def _pairs(file: Path, sides: Mapping[str, Mapping[str, LoraTensor]], form: str) -> dict[str, Pair]:
    """Joins the matrices to pairs. Raises ModelError for a missing matrix or different ranks."""
    pairs = {}
    for name, module in sorted(sides.items()):
        if missing := {"A", "B"} - module.keys():
            raise ModelError(f"{file}: {name}.{form.format(missing.pop())}: missing")
        for side, tensor in module.items():
            if len(tensor.shape) != 2:
                raise ModelError(f"{file}: {name}.{form.format(side)}: shape {list(tensor.shape)}; expected a matrix")
        pair = Pair(module["A"], module["B"])
        if pair.b.shape[1] != pair.rank:
            shapes = f"A {list(pair.a.shape)} and B {list(pair.b.shape)}"
            raise ModelError(f"{file}: {name}: {shapes} have different ranks")
        pairs[name] = pair
    return pairs


def _apart(pairs: Mapping[str, Pair]) -> tuple[dict[str, Pair], dict[str, tuple[Pair, ...]]]:
    """Separates the pairs of linear modules from those of experts with stacked weights."""
    modules: dict[str, Pair] = {}
    experts: dict[str, tuple[Pair, ...]] = {}
    for name, pair in pairs.items():
        if found := EXPERTS.fullmatch(name):
            experts[found["path"]] = (*experts.get(found["path"], ()), pair)
        else:
            modules[name] = pair
    return modules, experts


def todays_name(name: str) -> str:
    """Returns transformers' current name of a Mixtral module."""
    name = name.replace(f".{OLD_BLOCK}.", ".mlp.")
    if found := OLD_EXPERT.fullmatch(name):
        return f"{found['before']}.{OLD_PARTS[found['part']]}"
    return name
