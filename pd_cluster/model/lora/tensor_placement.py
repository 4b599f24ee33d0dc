"""Assigns each tensor of an adapter's file to a module of the model. A tensor without a module is an error.

If a rank has a share of the model, A and B are sliced like the weights that they adapt, so that the existing all-reduce
also sums the adapters' parts.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.checkpoints.lora_tensors import LoraTensor, Pair, todays_name
from pd_cluster.errors import ModelError
from pd_cluster.model.lora.adapted_linear import LinearAdapters, LowRank, ModuleFeatures
from pd_cluster.model.lora.embedding_adapters import EmbeddingAdapters, Put
from pd_cluster.model.lora.expert_adapters import BOTH, DOWNS
from pd_cluster.model.lora.lora_targets import LoraTargets
from pd_cluster.model.parallel.parallel_plan import WHOLE, WeightCut
from pd_cluster.model.parallel.weight_slices import take

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def uncut(key: str, shape: tuple[int, ...]) -> WeightCut:
    return WHOLE


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The model's own weights, which determine how adapters are placed."""

    cut: Callable[[str, tuple[int, ...]], WeightCut] = uncut  # this rank's share of a weight, by its name in the files
    name_of: Callable[[str], str] = str  # maps a weight's name in the trained model to its name in the served model
    # A module's weight as the files store it; None: the files have none.
    stored: Callable[[str], torch.Tensor | None] = lambda name: None
    num_ranks: int = 1
    vocab_size: int = 0  # the whole model's


class TensorPlacement:
    """Places one adapter's tensors. Methods raise ModelError."""

    def __init__(self, places: LoraTargets, weights: ModelWeights, folder: LoraFolder) -> None:
        self._places, self._weights, self._folder = places, weights, folder
        self._numbers = AdapterTensors(folder)

    def puts(self) -> list[Put]:
        """Returns functions that store the parts of the adapter in a slot; on an error no slot has changed.

        All shapes are checked before any tensor is read, so an adapter that does not fit is never read.
        """
        self._parts()
        self._numbers.read()
        return self._parts()

    def _parts(self) -> list[Put]:
        tensors = self._folder.tensors
        self._check_device()
        puts = [self._embedding_part(name, pair) for name, pair in tensors.embeddings.items()]
        puts += [self._whole_part(name, stored) for name, stored in tensors.wholes.items()]
        for name, stored in tensors.copies.items():
            self._check_copy(name, stored)
        found: dict[int, tuple[LinearAdapters, list[tuple[slice, LowRank]]]] = {}

        def add(name: str, low: LowRank) -> None:
            key = self._key_of(name)
            if key not in self._places.linear:
                raise ModelError(
                    f"{self._numbers.place(name)}: this model has no linear layer of this name that can have adapters"
                )
            site, part = self._places.linear[key]
            own = self._low_rank(self._numbers.place(name), key, part, low)
            found.setdefault(id(site), (site, []))[1].append((part.outputs, own))

        for name, pair in tensors.modules.items():
            if name in tensors.wholes:
                raise ModelError(f"{self._numbers.place(name)}: the file also contains this module as a whole")
            add(name, self._numbers.pair(name, pair))
        for name, pairs in tensors.experts.items():
            for part, low in self._experts_parts(name, pairs):
                add(part, low)
        return [*puts, *(partial(_put, site, parts) for site, parts in found.values())]

    def _check_device(self) -> None:
        tensors, head = self._folder.tensors, self._places.head
        ends = [*tensors.embeddings, *tensors.wholes, *tensors.experts]
        ends += [name for name in tensors.modules if head is not None and self._key_of(name) == head[0]]
        if self._places.rows.is_on_device and ends:
            raise ModelError(
                f"{self._numbers.place(ends[0])}: on this device only linear layers of decoder layers have adapters; "
                "serve this adapter on CPUs"
            )

    def _key_of(self, name: str) -> str:
        return self._weights.name_of(f"{todays_name(name)}.weight").removesuffix(".weight")

    def _experts_parts(self, name: str, pairs: Sequence[Pair]) -> Iterator[tuple[str, LowRank]]:
        """Splits matrices that stack all experts; their shapes show which product they belong to."""
        key, seen = self._key_of(name), set[str]()
        if key not in self._places.experts:
            raise ModelError(
                f"{self._numbers.place(name)}: this model has no experts of this name that can have adapters"
            )
        num_experts = sum(place.startswith(f"{key}.") and place.endswith(f".{DOWNS}") for place in self._places.linear)
        for pair in pairs:
            shape = pair.b.shape[0], pair.a.shape[1]
            part = next((part for part in (BOTH, DOWNS) if self._whole_shape(f"{key}.0.{part}") == shape), "")
            if not part or part in seen:
                given = f"A {list(pair.a.shape)} and B {list(pair.b.shape)}"
                raise ModelError(f"{self._numbers.place(name)}: {given} fit neither product of this model's experts")
            seen.add(part)
            rank = self._folder.settings.rank_of(f"{name}.{part}")
            if pair.rank != num_experts * rank:
                raise ModelError(
                    f"{self._numbers.place(name)}: A has {pair.rank} rows, but {num_experts} experts of rank {rank} "
                    f"need {num_experts * rank}"
                )
            whole = self._numbers.pair(f"{name}.{part}", pair)
            a, b = whole.a.view(num_experts, rank, -1), whole.b.view(-1, rank, num_experts)
            for index in range(num_experts):
                yield f"{name}.{index}.{part}", LowRank(a[index], b[:, :, index])

    def _whole_shape(self, key: str) -> tuple[int, int]:
        """Returns out_features and in_features of a module over all ranks."""
        _, part = self._places.linear[key]
        shape = part.outputs.stop - part.outputs.start, part.in_features
        cut = self._weights.cut(f"{key}.weight", (shape[0], shape[1]))
        if cut.pieces is None:
            return shape
        whole = [*shape]
        whole[cut.dim] *= self._weights.num_ranks
        return whole[0], whole[1]

    def _embedding_part(self, name: str, pair: Pair) -> Put:
        site = self._embedding_site(name)
        if name in self._folder.tensors.wholes:
            raise ModelError(f"{self._numbers.place(name)}: the file also contains this module as a whole")
        if (pair.a.shape[1], pair.b.shape[0]) != site.shape:
            raise ModelError(
                f"{self._numbers.place(name)}: A {list(pair.a.shape)} and B {list(pair.b.shape)} do not fit this "
                f"model's embedding of {site.shape[0]} tokens with {site.shape[1]} features each"
            )
        low = self._numbers.pair(name, pair)
        return lambda slot: site.put(slot, low)

    def _embedding_site(self, name: str) -> EmbeddingAdapters:
        if self._places.embedding is None or self._places.embedding[0] != self._key_of(name):
            raise ModelError(
                f"{self._numbers.place(name)}: this model has no embedding of this name that can have adapters"
            )
        return self._places.embedding[1]

    def _whole_part(self, name: str, stored: LoraTensor) -> Put:
        key, place = self._key_of(name), self._numbers.place(name)
        if (norm := self._places.norms.sites.get(key)) is not None:
            _check_shape(place, stored.shape, tuple(norm.norm.weight.shape))
            weight = self._numbers.tensor(name, stored)
            return lambda slot: norm.put_whole(slot, weight)
        if self._places.head is not None and self._places.head[0] == key:
            site, part = self._places.head[1], self._places.linear[key][1]
            matrix = self._numbers.tensor(name, stored)
            if matrix.dim() == 2:
                cut = self._weights.cut(f"{key}.weight", (matrix.shape[0], matrix.shape[1]))
                matrix = matrix if cut.pieces is None else take(matrix, cut)
            _check_shape(place, tuple(matrix.shape), (part.outputs.stop, part.in_features))
            if self._weights.vocab_size and stored.shape[0] != self._weights.vocab_size:
                _check_shape(place, stored.shape, (self._weights.vocab_size, part.in_features))
            return lambda slot: site.put_whole(slot, matrix)
        if self._places.embedding is not None and self._places.embedding[0] == key:
            embedding = self._places.embedding[1]
            _check_shape(place, stored.shape, embedding.shape)
            whole = self._numbers.tensor(name, stored, keeps_dtype=True)
            return lambda slot: embedding.put_whole(slot, whole)
        raise ModelError(
            f"{place}: the adapter replaces this module as a whole (modules_to_save); only the embedding, the output "
            f"layer and, in fused models, norms over whole rows can be replaced"
        )

    def _check_copy(self, name: str, stored: LoraTensor) -> None:
        """Checks that a base weight that PEFT saved with the adapter equals the model's."""
        own = self._weights.stored(self._key_of(name))
        given = self._numbers.tensor(f"{name}.base_layer", stored, keeps_dtype=True)
        if own is None or own.shape != given.shape or not (given.is_meta or torch.equal(own.to(given.dtype), given)):
            raise ModelError(
                f"{self._numbers.place(name)}.base_layer.weight: differs from this model's weight, and the adapter is "
                f"valid only with the weight saved in its file; if the base was not changed, save the adapter with "
                f"save_embedding_layers=False"
            )

    def _low_rank(self, place: str, key: str, part: ModuleFeatures, low: LowRank) -> LowRank:
        """Returns this rank's share, with output features in the layer's order. Raises ModelError."""
        a, b = low.a, low.b
        given = f"A {list(a.shape)} and B {list(b.shape)}"
        cut = self._weights.cut(f"{key}.weight", (b.shape[0], a.shape[1]))
        if cut.pieces is not None:
            a, b = (a, take(b, cut)) if cut.dim == 0 else (take(a, cut), b)
        out_features = part.outputs.stop - part.outputs.start
        if a.shape[1] != part.in_features or b.shape[0] != out_features:
            share = "" if cut.pieces is None else " for this rank's share"
            raise ModelError(
                f"{place}: {given} do not fit this model's layer, which has {part.in_features} inputs and "
                f"{out_features} outputs{share}"
            )
        return LowRank(a, b.clone() if part.order is None else b[part.order])


class AdapterTensors:
    """The tensors of an adapter's file, in float32, with B scaled. Before `read`, only their shapes are available.

    Methods raise ModelError.
    """

    def __init__(self, folder: LoraFolder) -> None:
        self.folder = folder
        self._data: mmap.mmap | None = None

    def read(self) -> None:
        self._data = self.folder.weights()

    def place(self, name: str) -> str:
        return f"{self.folder.file}: {name}"

    def pair(self, name: str, pair: Pair) -> LowRank:
        low = LowRank(self.tensor(name, pair.a), self.tensor(name, pair.b).clone())
        low.b.mul_(self.folder.settings.scale_of(name))
        if self._data is not None and not low.b.isfinite().all():
            raise ModelError(f"{self.place(name)}: values overflow float32 after scaling (lora_alpha)")
        return low

    def tensor(self, name: str, stored: LoraTensor, keeps_dtype: bool = False) -> torch.Tensor:
        """Returns a tensor of the file. Raises ModelError if it contains NaN or infinity."""
        if self._data is None:
            return torch.empty(stored.shape, dtype=DTYPES[stored.dtype] if keeps_dtype else None, device="meta")
        count = math.prod(stored.shape)
        found = torch.frombuffer(self._data, dtype=DTYPES[stored.dtype], count=count, offset=stored.start)
        if not found.isfinite().all():
            raise ModelError(f"{self.place(name)}: contains NaN or infinity")
        return (found if keeps_dtype else found.float()).view(stored.shape).clone()


def _put(site: LinearAdapters, parts: Sequence[tuple[slice, LowRank]], slot: int) -> None:
    site.put(slot, parts)


def _check_shape(place: str, given: Sequence[int], wanted: Sequence[int]) -> None:
    if list(given) != list(wanted):
        raise ModelError(f"{place}: shape {list(given)}; this model's module has {list(wanted)}")
