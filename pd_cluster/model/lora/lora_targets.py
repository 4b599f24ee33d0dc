"""The modules of a model that can have adapters, by their names in transformers.

A fused layer may join several of them. For a transformers model, one watched step at load shows which modules can have
adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pd_cluster.devices.device import Device
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.expert_weights import ExpertLayers
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.layers.packed_modules import PackedExperts, PackedModule
from pd_cluster.model.lora.adapted_linear import (
    AdaptedLinear,
    AdaptedModule,
    DeviceTable,
    LinearAdapters,
    ModuleFeatures,
    StepRows,
)
from pd_cluster.model.lora.embedding_adapters import AdaptedEmbedding, EmbeddingAdapters, Norms, OutputLayerAdapters
from pd_cluster.model.lora.expert_adapters import RoutedRows, attach_experts

MakeTable = Callable[[list[slice], int], DeviceTable]


class LoraTargets:
    """`linear`: the linear layers in decoder layers, experts included, and the output layer."""

    def __init__(self) -> None:
        self.rows = StepRows()
        self.head_rows = StepRows()  # the rows whose logits are requested
        self.norms = Norms(self.rows)
        self.linear: dict[str, tuple[LinearAdapters, ModuleFeatures]] = {}
        self.head: tuple[str, OutputLayerAdapters] | None = None
        self.embedding: tuple[str, EmbeddingAdapters] | None = None
        self.experts: dict[str, RoutedRows] = {}  # name of a block's module -> rows of its experts

    def beside(
        self, layer: Linear, path: str, modules: dict[str, tuple[int, int]], order: torch.Tensor | None
    ) -> Linear:
        """Returns the layer with adapters.

        `modules`: out_features and in_features of the modules of `path` that the layer joins, in order. `order`: the
        layer's output feature i is feature `order[i]` of the joined modules; each module's features stay contiguous.
        """
        site, first = LinearAdapters(self.rows), 0
        for name, (out_features, in_features) in modules.items():
            outputs = slice(first, first + out_features)
            own = None if order is None else order[outputs] - first
            assert own is None or torch.equal(own.sort().values, torch.arange(out_features))
            self.linear[f"{path}.{name}"] = site, ModuleFeatures(in_features, outputs, own)
            first += out_features
        return AdaptedLinear(layer, site)

    def attach_head(self, layer: Linear, name: str, out_features: int, in_features: int) -> Linear:
        """Returns the output layer with adapters."""
        site = self._head_site(name, out_features, in_features)
        return AdaptedLinear(layer, site)

    def _head_site(self, name: str, out_features: int, in_features: int) -> OutputLayerAdapters:
        site = OutputLayerAdapters(self.head_rows)
        self.head = name, site
        self.linear[name] = site, ModuleFeatures(in_features, slice(0, out_features))
        return site

    def attach_embedding(
        self, embed: Callable[[torch.Tensor], torch.Tensor], name: str, shape: tuple[int, int], factor: float = 1.0
    ) -> AdaptedEmbedding:
        """Returns the embedding with adapters. `shape`: vocab_size and hidden_size of the whole model."""
        site = EmbeddingAdapters(self.rows, shape, factor)
        self.embedding = name, site
        return AdaptedEmbedding(embed, site)

    def attach_experts(self, layers: ExpertLayers, path: str) -> None:
        """Attaches adapters to the layers of all experts of a block."""
        rows = RoutedRows(self.rows)
        places = attach_experts(rows, layers)
        self.linear |= {f"{path}.{name}": place for name, place in places.items()}
        self.experts[path] = rows

    def take_over(self, model: torch.nn.Module, prefix: str = "") -> None:
        """Attaches adapters to the linear modules and experts of a transformers model, or of a part of it.

        Watch a step afterwards, see `watched`: modules that do not compute the step's rows cannot have adapters.
        """
        for path, parent in list(model.named_modules()):
            for name, child in list(parent.named_children()):
                whole = ".".join(part for part in (prefix, path, name) if part)
                if not any(part.isdigit() for part in whole.split(".")):
                    continue  # not in a decoder layer
                if isinstance(child, PackedExperts):
                    self.attach_experts(child.layers, whole)
                elif (features := _features(child)) is not None:
                    site = LinearAdapters(self.rows)
                    setattr(parent, name, AdaptedModule(child, site, *features))
                    self.linear[whole] = site, ModuleFeatures(features[1], slice(0, features[0]))

    def attach_embedding_and_head(self, model: Any, vocab_size: int) -> None:
        """Attaches adapters to the embedding and the output layer of a transformers model."""
        names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
        head, embed = model.get_output_embeddings(), model.get_input_embeddings()
        if head is not None and (features := _features(head)) is not None:
            site = self._head_site(names[id(head)], *features)
            model.set_output_embeddings(AdaptedModule(head, site, *features))
        inner = getattr(embed, "inner", embed)
        factor = float(getattr(inner, "scalar_embed_scale", 1.0))
        shape = vocab_size, int(inner.weight.shape[1])
        model.set_input_embeddings(self.attach_embedding(embed, names[id(embed)], shape, factor))

    def move_to(self, device: Device, make: MakeTable) -> None:
        """Makes this device compute the adapters; call it before any is loaded. `make`: builds a table from a layer's
        output slices and number of inputs.
        """
        self.rows.device, self.rows.has_tables = device, True
        for site, modules, num_inputs in self._layers():
            site.table, site.there = None, make(modules, num_inputs)

    def _layers(self) -> list[tuple[LinearAdapters, list[slice], int]]:
        """Returns the layers that compute all rows of a step, with their modules' output slices and input sizes."""
        found: dict[int, tuple[LinearAdapters, list[slice], int]] = {}
        for site, part in self.linear.values():
            if site.rows is self.rows:
                found.setdefault(id(site), (site, [], part.in_features))[1].append(part.outputs)
        return list(found.values())

    def begin(self, batch: ForwardBatch) -> None:
        """Starts a step."""
        if batch.adapted_rows is not None:
            self.rows.use(batch.adapted_rows)
        else:
            self.rows.begin(batch.adapters, batch.query_lens)
        if not self.rows.is_on_device:  # on a device the head has no adapters, because it computes only some rows
            self.head_rows.take(self.rows, batch.sample_rows)

    @contextmanager
    def watched(self, num_rows: int) -> Iterator[None]:
        """Watches a step of `num_rows` rows whose logits are all requested.

        Afterwards only the modules that computed exactly these rows, once, can have adapters.
        """
        sites: list[LinearAdapters | EmbeddingAdapters | RoutedRows] = [
            site for site, _ in self.linear.values() if not isinstance(site.rows, RoutedRows)
        ]
        sites += [*self.experts.values(), *([self.embedding[1]] if self.embedding is not None else [])]
        for site in sites:
            site.nums_rows = []
        yield
        for path, rows in list(self.experts.items()):
            if rows.nums_rows != [num_rows]:
                del self.experts[path]
        for name, (site, _) in list(self.linear.items()):
            seen = site.rows
            is_right = seen in self.experts.values() if isinstance(seen, RoutedRows) else site.nums_rows == [num_rows]
            if not is_right:
                del self.linear[name]
        if self.embedding is not None and self.embedding[1].nums_rows != [num_rows]:
            self.embedding = None
        if self.head is not None and self.head[0] not in self.linear:
            self.head = None
        for site in sites:
            site.nums_rows = None

    def move_adapters_from(self, old: LoraTargets) -> None:
        """Takes over the adapters of `old`, from the same model loaded before; these targets have none yet."""
        self.rows.place, self.rows.places = old.rows.place, old.rows.places
        self.rows.device, self.rows.has_tables = old.rows.device, old.rows.has_tables
        for name, (site, _) in self.linear.items():
            before, _ = old.linear[name]
            site.table, site.additions, site.there = before.table, before.additions, before.there
        if self.head is not None and old.head is not None:
            self.head[1].wholes = old.head[1].wholes
        if self.embedding is not None and old.embedding is not None:
            self.embedding[1].low, self.embedding[1].wholes = old.embedding[1].low, old.embedding[1].wholes
        for name, norm in self.norms.sites.items():
            norm.wholes = old.norms.sites[name].wholes

    def drop(self, slot: int) -> None:
        """Removes the content of a slot."""
        for site, _ in self.linear.values():
            site.drop(slot)
        for norm in self.norms.sites.values():
            norm.drop(slot)
        if self.embedding is not None:
            self.embedding[1].drop(slot)


def _features(module: Any) -> tuple[int, int] | None:
    """Returns out_features and in_features of a linear module of a known class, otherwise None."""
    if isinstance(module, PackedModule) or type(module) is torch.nn.Linear:
        return int(module.out_features), int(module.in_features)
    if type(module).__name__ == "Conv1D":  # in GPT-2; its weight is transposed
        return int(module.weight.shape[1]), int(module.weight.shape[0])
    return None
