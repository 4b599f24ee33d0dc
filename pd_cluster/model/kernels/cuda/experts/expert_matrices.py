"""The two products of a block's experts, in the kernels' form. Independent of routers, rows and launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pd_cluster.model.kernels.cuda.linear.quantized_linear import E2M1, PLAIN, ROUNDED, WeightCodes, codes_of, rounded
from pd_cluster.model.kernels.cuda.linear.triton_linear import Tiling
from pd_cluster.model.layers.linear_weight import LinearWeight
from pd_cluster.model.layers.whole_rows import WholeRows


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One linear layer of every expert: floats or codes, and biases [experts, outputs]."""

    shape: tuple[int, int, int]  # experts, outputs, inputs
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # floats or codes; the scales and zero points of codes
    codes: WeightCodes | None
    bias: torch.Tensor | None

    @classmethod
    def of(cls, given: torch.Tensor | WeightCodes, bias: torch.Tensor | None = None) -> ExpertMatrices:
        """`given`: contiguous floats [experts, outputs, inputs], or codes."""
        if isinstance(given, WeightCodes):
            zeros = given.scales if given.zeros is None else given.zeros
            tensors, num_inputs = (given.stored, given.scales, zeros), given.num_inputs
        else:
            assert given.is_contiguous()
            tensors, num_inputs = (given, given, given), given.shape[2]
        num_experts, num_outputs, _ = tensors[0].shape
        assert bias is None or (bias.shape == (num_experts, num_outputs) and bias.is_contiguous())
        codes = given if isinstance(given, WeightCodes) else None
        return cls((num_experts, num_outputs, num_inputs), tensors, codes, bias)

    @classmethod
    def from_weight(cls, weight: LinearWeight) -> ExpertMatrices:
        """Makes the matrices from the weight of an ExpertStack."""
        return cls.of(codes_of(weight) or weight.matrix().contiguous(), weight.bias)

    @property
    def has_words(self) -> bool:
        return self.codes is not None and self.codes.kind <= E2M1

    def taken(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the activations in the form that these matrices take; for int8 codes, also the rows' scales."""
        if self.codes is None or self.codes.kind != ROUNDED:
            return x, self.tensors[1]
        return rounded(x, self.codes.inputs)

    def constants(self, tile: Tiling) -> dict[str, object]:
        if self.codes is None:
            plain = {"WIDTH": self.shape[2], "GROUP_SIZE": 1, "NUM_GROUPS": 1, "HAS_ZEROS": False, "OFFSET": 0.0}
            return {"KIND": PLAIN, "BLOCK_K": tile.block_k, **plain}
        found = {name: value for name, value in self.codes.constants.items() if name != "NUM_INPUTS"}
        return {"BLOCK_K": self.codes.block_k(tile), **found}


@dataclass(frozen=True, slots=True)
class BlockMatrices:
    """The products of a block's experts.

    `rows`: set if `down` is divided over ranks by outputs. `down` then reads whole rows, joined from all ranks, and
    computes this rank's outputs.
    """

    gate_up: ExpertMatrices  # hidden_size to 2 * num_features: gates, then ups
    down: ExpertMatrices  # num_features to hidden_size
    rows: WholeRows | None = None

    def check(self, hidden_size: int) -> None:
        """Asserts that the shapes match."""
        num_experts, num_outputs, num_features = self.down.shape
        num_ranks = 1 if self.rows is None else self.rows.ranks.size
        assert hidden_size == (num_outputs if self.rows is None else self.rows.num_outputs)
        assert self.gate_up.shape == (num_experts, 2 * num_features // num_ranks, hidden_size)
