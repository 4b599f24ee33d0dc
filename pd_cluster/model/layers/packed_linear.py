"""Linear layers with repacked weights, which are faster on CPU: in oneDNN's layout, or in that of the C kernels.

Fixed rules choose the layout, without measurements, so a checkpoint gives the same values in every process of a
machine. On x86-64, float32 weights are packed for oneDNN if the CPU has AVX-512. With AVX2 only, where oneDNN takes
twice the time for a few rows, they are packed for the C kernels. bfloat16 weights are packed for the C kernels if these
can run; all others stay plain. Unlike MKL, packed layers give a row the same values for any number of rows.
"""

from __future__ import annotations

import logging
import platform

import torch
from torch.nn.functional import linear, pad

from pd_cluster.native import float_products
from pd_cluster.native.packed_products import Linear as Linear
from pd_cluster.native.packed_products import bf16_linear, float32_linear

log = logging.getLogger(__name__)

# A product may waste this many multiplications on padding; that is cheaper than compiling for another number of rows.
MOST_PADDED = 16 << 20
SIZES_PER_OCTAVE = 8
LEAST_ROWS = 4
TRIED_ROWS = 7
TESTED_ROWS = (1, 2, 3, 17, 64)
MOST_INPUTS_OF_ONE_ROW = (
    1024  # up to this width a row has the same bits alone as with others: see tests/model/test_packed_linear.py
)


class PackedLinear:
    """`x @ weight.T + bias` with a weight in oneDNN's own layout; the plain weight is not kept.

    oneDNN compiles for every number of rows, which takes a millisecond, and caches about a thousand results. So the
    number of rows is rounded up by padding. With more than 1,024 inputs oneDNN adds up a single row in another order
    (AVX-512), so fewer than four rows are padded to four. Four rows take as long as one; two or three take longer.

    `few` computes up to 96 rows faster. It is used only if it gave the same bits in a test with this weight.
    """

    __slots__ = ("_bias", "_most_padding", "_run", "_weight", "few", "in_features", "least_rows")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default
        self.least_rows = LEAST_ROWS if weight.shape[1] > MOST_INPUTS_OF_ONE_ROW else 1
        self._most_padding = MOST_PADDED // max(1, weight.numel())
        self.in_features = weight.shape[1]
        few = float_products.few_rows(self._weight, (weight.shape[0], self.in_features), bias)
        self.few = few if few is not None and self._agrees(few) else None
        warn_of_batch_dependence(self)

    def _agrees(self, few: float_products.FloatProducts) -> bool:
        x = torch.randn(TRIED_ROWS, self.in_features, generator=torch.Generator().manual_seed(0))
        return torch.equal(few(x), self.by_onednn(x))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.few is not None and 0 < x.numel() <= float_products.MOST_ROWS * self.in_features and self._fits(x):
            return self.few(x)
        return self.by_onednn(x)

    def _fits(self, x: torch.Tensor) -> bool:
        return x.dtype == torch.float32 and x.shape[-1] == self.in_features and x.device.type == "cpu"

    def by_onednn(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[-2]
        if num_rows < self.least_rows:
            padding = self.least_rows - num_rows if num_rows else 0
        else:
            padding = padded(num_rows, self._most_padding) - num_rows
        if padding:
            x = pad(x, (0, 0, 0, padding))
        result: torch.Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return result[..., :num_rows, :] if padding else result


class PlainLinear:
    """Computes the same product with the weight in its original layout."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight.detach()
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


_tried_inputs: set[int] = set()


def warn_of_batch_dependence(layer: PackedLinear) -> None:
    """Logs an error, once per number of inputs, if a row's bits depend on the number of rows in the product.

    The constants above hold for oneDNN in the tested versions of torch; another version may add in another order.
    """
    if layer.in_features in _tried_inputs:
        return
    _tried_inputs.add(layer.in_features)
    x = torch.randn(TESTED_ROWS[-1], layer.in_features, generator=torch.Generator().manual_seed(1))
    expected = layer(x)
    for num_rows in TESTED_ROWS:
        if not torch.equal(layer(x[:num_rows]), expected[:num_rows]):
            log.error(
                "torch %s computes other bits for %d rows of %d inputs than for %d rows: greedy output may depend on "
                "the rest of the batch; use torch 2.11 to 2.14",
                torch.__version__,
                num_rows,
                layer.in_features,
                len(x),
            )
            return


def packs(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and platform.machine() == "x86_64"
        and weight.numel() > 0
    )


def padded(num_rows: int, most: int) -> int:
    """Rounds up to one of eight sizes per octave, at most `most` apart, because a few extra rows cost little."""
    step = min(num_rows // SIZES_PER_OCTAVE, most)
    step = 1 << step.bit_length() - 1 if step > 1 else 1
    return -(-num_rows // step) * step


def pack_floats(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Makes a layer from a weight for which `packs` is true."""
    bias = None if bias is None else bias.detach()
    own = None if float_products.can_run() else float32_linear(weight.detach(), bias)
    return own or PackedLinear(weight, bias)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Makes a layer from weight [out_features, in_features] and bias [out_features]; the caller drops its own weight.

    On a CPU, a bfloat16 layer takes float32 activations (model/language_model/mixed_precision.py).
    """
    if packs(weight):
        return pack_floats(weight, bias)
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
        narrow = bf16_linear(weight.detach(), bias)
        if narrow is not None:
            return narrow
    return PlainLinear(weight, bias)


def make_expert_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Makes the layer of one of many experts. If the C kernels are available, one call computes all experts."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel():
        packed = float32_linear(weight.detach(), bias)
        if packed is not None:
            return packed
    return make_linear(weight, bias)
