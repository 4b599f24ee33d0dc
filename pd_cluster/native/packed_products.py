"""Linear layers in C. Their weights, of 32, 16, 8 or 4 bits, are packed once, and multiplied as packed_weights.h
describes.

A row's result depends neither on other rows nor on the number of threads. Activations and results are float32; each
function below states how activations are rounded first, and returns None if the kernels cannot run here.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import pad

from pd_cluster.errors import ModelError
from pd_cluster.native import build

Linear = Callable[[torch.Tensor], torch.Tensor]  # [num_rows, in_features] to [num_rows, out_features]
Activations = Literal["float32", "bfloat16", "int8"]  # the form in which activations are multiplied
Way = Literal["float32", "dot products", "tiles"]

PANEL = 16  # packed_weights.h
# Maximum number of inputs of a span (packed_weights.h) if weights are decoded once for many rows: MOST_NUMBERS if they
# are decoded to float32, otherwise MOST_DECODED.
MOST_DECODED = 128
MOST_NUMBERS = 256
MOST_EXACT_INPUTS = 65_536  # up to this number of inputs, sums of products of codes stay below 2^31
LEAST_MAGNITUDE = 2.0**-100  # rows whose values are all smaller get codes of zero

_ACTIVATIONS: dict[Activations, int] = {"float32": 0, "bfloat16": 1, "int8": 2}
_WAYS: tuple[Way, ...] = ("float32", "dot products", "tiles")
_TILE_INPUTS: dict[Activations, int] = {"bfloat16": 32, "int8": 64}  # inputs per tile instruction
_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class _PackedForm:
    code: int
    word_inputs: int  # inputs per word of 32 bits


_FLOAT32, _BF16 = _PackedForm(0, 1), _PackedForm(1, 2)
_INT8, _INT4, _E4M3 = _PackedForm(2, 4), _PackedForm(3, 8), _PackedForm(4, 4)


class ProductCall(ctypes.Structure):
    """Product in packed_weights.h."""

    _fields_ = (
        *((name, _Int) for name in ("num_rows", "inputs", "outputs", "num_threads", "form", "activations")),
        *((name, _Int) for name in ("group", "span_inputs", "span_padded", "spans_of_group", "num_groups")),
        *((name, _Pointer) for name in ("x", "words", "scales", "zeros", "bias", "out", "scratch")),
    )


libraries: dict[tuple[str, ...], ctypes.CDLL | None] = {}
_loading = threading.Lock()


def load_library(flags: tuple[str, ...]) -> ctypes.CDLL | None:
    """Returns the kernels compiled with these flags; None if they are disabled or unavailable."""
    if not build.are_wanted():
        return None
    with _loading:
        if flags not in libraries:
            try:
                library = build.load(flags)
            except build.KernelsUnavailable:  # the model's loader has logged why
                libraries[flags] = None
            else:
                for function in (library.pd_product, library.pd_scratch_nbytes, library.pd_way):
                    function.argtypes = [_Pointer]
                    function.restype = _Int
                library.pd_product.restype = None
                libraries[flags] = library
        return libraries[flags]


def _way(library: ctypes.CDLL, product: ProductCall) -> Way:
    way: int = library.pd_way(ctypes.addressof(product))
    return _WAYS[way]


def bf16_way(flags: tuple[str, ...] = build.FLAGS) -> Way | None:
    """Returns the way in which bfloat16 weights are multiplied here; None without kernels."""
    library = load_library(flags)
    if library is None:
        return None
    product = ProductCall(num_rows=1, form=_BF16.code, activations=_ACTIVATIONS["bfloat16"])
    return _way(library, product)


def multiplies_bf16() -> bool:
    """Whether this processor has instructions for products of bfloat16, and the kernels use them."""
    return bf16_way() in ("dot products", "tiles")


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int8 codes [..., inputs] and float32 scales [..., 1] of the rows of x: x is about codes * scales.

    Codes are symmetric, with one scale per row: the row's largest magnitude becomes code 127, and ties are rounded to
    even. A row with an infinity or NaN has the scale NaN and codes 0. The kernels compute the same bits.
    """
    most = x.abs().amax(dim=-1, keepdim=True)
    is_finite = most.isfinite()
    inverse = torch.full_like(most, 127.0) / most  # float32 division: `127.0 / most` would be rounded twice
    inverse = torch.where(is_finite & (most >= LEAST_MAGNITUDE), inverse, 0.0)
    codes = torch.where(inverse > 0, x * inverse, 0.0).round().to(torch.int8)
    return codes, torch.where(is_finite, most / 127.0, torch.nan)


class CodeGrid(NamedTuple):
    """The float32 scales and zeros [N, G] of groups of inputs.

    `group`: the number of inputs in a group, by default K / G; give it if the last group is shorter.
    """

    scales: torch.Tensor | None
    zeros: torch.Tensor | None = None
    group: int | None = None


NO_GRID = CodeGrid(None)


def float32_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, *, flags: tuple[str, ...] = build.FLAGS
) -> Linear | None:
    """Makes a layer from weight [N, K] float32 and bias [N]."""
    assert weight.dtype == torch.float32
    return _pack(_FLOAT32, weight, NO_GRID, bias, "float32", flags)


def bf16_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, *, flags: tuple[str, ...] = build.FLAGS
) -> Linear | None:
    """Makes a layer from weight [N, K] bfloat16 and bias [N]. Activations are rounded to bfloat16; sums are float32."""
    assert weight.dtype == torch.bfloat16
    return _pack(_BF16, weight, NO_GRID, bias, "bfloat16", flags)


def int8_linear(
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    group: int | None = None,
    flags: tuple[str, ...] = build.FLAGS,
) -> Linear | None:
    """Makes a layer from int8 codes [N, K] and float32 scales [N, G]; `quantize_rows` quantizes the activations.

    Within each of the G groups of inputs, sums of products of codes are exact integers; the groups are added in
    float32. `group`: the number of inputs per group, by default K / G; give it if the last group is shorter.
    """
    return _pack(_INT8, codes, CodeGrid(scales, group=group), bias, "int8", flags)


def int8_weight_only_linear(
    codes: torch.Tensor,
    grid: CodeGrid,
    bias: torch.Tensor | None,
    *,
    activations: Activations = "float32",
    flags: tuple[str, ...] = build.FLAGS,
) -> Linear | None:
    """Makes a layer from (codes - zeros) * scales: int8 codes [N, K].

    Activations stay float32 unless `activations` says otherwise.
    """
    return _pack(_INT8, codes, grid, bias, activations, flags)


def int4_linear(
    codes: torch.Tensor,
    grid: CodeGrid,
    bias: torch.Tensor | None,
    *,
    activations: Activations = "float32",
    flags: tuple[str, ...] = build.FLAGS,
) -> Linear | None:
    """Makes a layer from (codes - zeros) * scales: int8 codes [N, K] from -8 to 7, or 0 to 15 with zeros [N, G].

    Activations stay float32 unless `activations` says otherwise. A group of more than 128 inputs is summed in parts,
    which are added in float32. Raises ModelError if a code has more than four bits.
    """
    least, most = (int(code) for code in codes.aminmax()) if codes.numel() else (0, 0)
    if most > 7 and grid.zeros is not None:
        codes, grid = codes - 8, grid._replace(zeros=grid.zeros - 8)
        least, most = least - 8, most - 8
    if least < -8 or most > 7:
        raise ModelError(f"codes from {least} to {most} are not 4-bit codes (-8 to 7, or 0 to 15 with zeros)")
    return _pack(_INT4, codes, grid, bias, activations, flags)


def fp8_weight_only_linear(
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activations: Literal["float32", "bfloat16"] = "float32",
    group: int | None = None,
    flags: tuple[str, ...] = build.FLAGS,
) -> Linear | None:
    """Makes a layer from codes * scales: float8_e4m3fn codes [N, K], float32 scales [N, G].

    Raises ModelError if a code is NaN.
    """
    assert codes.dtype == torch.float8_e4m3fn
    codes = codes.view(torch.int8)
    if bool((codes & 0x7F == 0x7F).any()):
        raise ModelError("a weight of float8_e4m3fn is NaN")
    grid = CodeGrid(scales * 256.0, group=group)  # undoes the factor 2^-8 of the kernels' numbers (packed_weights.h)
    return _pack(_E4M3, codes, grid, bias, activations, flags)


class PackedProduct:
    """Maps x [..., K] to x @ weight.T + bias, [..., N], for packed weights, in float32. The result has x's dtype."""

    __slots__ = ("_kept", "_product", "in_features", "library", "out_features")

    def __init__(self, library: ctypes.CDLL, product: ProductCall, kept: tuple[torch.Tensor | None, ...]) -> None:
        """`kept`: the tensors to which `product` points."""
        self.library, self._product, self._kept = library, product, kept
        self.in_features, self.out_features = int(product.inputs), int(product.outputs)

    @property
    def call(self) -> ProductCall:
        """The product without rows; it points to this layer's memory."""
        return self._product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:  # modules of transformers may pass other dtypes
            return self(x.float()).to(x.dtype)
        assert x.shape[-1] == self.in_features
        x = x.contiguous()
        out = torch.empty(*x.shape[:-1], self.out_features)
        if not out.numel():
            return out
        product = ProductCall.from_buffer_copy(self._product)  # other threads may compute with this layer
        product.num_rows = x.numel() // self.in_features
        product.num_threads = torch.get_num_threads()
        address = ctypes.addressof(product)
        scratch = torch.empty(self.library.pd_scratch_nbytes(address), dtype=torch.uint8)
        product.x, product.out, product.scratch = x.data_ptr(), out.data_ptr(), scratch.data_ptr()
        self.library.pd_product(address)
        return out


def _pack(
    form: _PackedForm,
    codes: torch.Tensor,
    grid: CodeGrid,
    bias: torch.Tensor | None,
    activations: Activations,
    flags: tuple[str, ...],
) -> Linear | None:
    scales, zeros, group = grid
    library = load_library(flags)
    if library is None:
        return None
    outputs, inputs = codes.shape
    assert outputs
    assert inputs
    num_groups = 1 if scales is None else scales.shape[1]
    group = group or -(-inputs // num_groups)
    if -(-inputs // group) != num_groups:
        raise ModelError(f"{inputs} inputs cannot have {num_groups} scales of {group} inputs each")
    product = ProductCall(
        num_rows=1, inputs=inputs, outputs=outputs, form=form.code, group=group, num_groups=num_groups
    )
    product.activations = _ACTIVATIONS[activations]
    way = _way(library, product)
    is_decoded = form not in (_INT8, _BF16) or way == "float32" or (form is _INT8 and activations == "bfloat16")
    if activations == "int8" and group > MOST_EXACT_INPUTS:
        raise ModelError(f"a scale covers {group} inputs: sums of so many products of codes need more than 32 bits")
    most = (MOST_NUMBERS if way == "float32" else MOST_DECODED) if is_decoded else group
    decoded = (4 if way == "float32" else 8) if is_decoded else 1
    num_spans, span, padded = _spans(group, math.lcm(form.word_inputs, decoded), activations, most)
    product.spans_of_group, product.span_inputs, product.span_padded = num_spans, span, padded
    if activations == "int8":
        codes = codes + 8 if form is _INT4 else codes.view(torch.uint8) ^ 0x80
    kept = (
        _panels(_words(_padded(codes, group, num_spans, span, padded), form)),
        None if scales is None else _panels(scales.float()),
        None if zeros is None else _panels(zeros.float()),
        None if bias is None else pad(bias.detach().float(), (0, -outputs % PANEL)).contiguous(),
    )
    product.words, product.scales, product.zeros, product.bias = (
        None if each is None else each.data_ptr() for each in kept
    )
    return PackedProduct(library, product, kept)


def _spans(group: int, unit: int, activations: Activations, most: int) -> tuple[int, int, int]:
    """Returns the number of spans per group, the inputs of a span, and its inputs with padding.

    The last two are multiples of `unit`; a padded span consists of equal tiles.
    """
    span = _round_up(-(-group // -(-group // most)), unit)
    num_tiles = -(-span // _TILE_INPUTS.get(activations, span))
    return -(-group // span), span, num_tiles * _round_up(-(-span // num_tiles), unit)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _padded(codes: torch.Tensor, group: int, num_spans: int, span: int, padded: int) -> torch.Tensor:
    """Returns codes [N, K] with each span padded with zeros: [N, inputs of all padded spans]."""
    outputs, inputs = codes.shape
    codes = pad(codes, (0, -inputs % group)).view(outputs, -1, group)
    codes = pad(codes, (0, num_spans * span - group)).view(outputs, -1, span)
    return pad(codes, (0, padded - span)).view(outputs, -1)


def _words(codes: torch.Tensor, form: _PackedForm) -> torch.Tensor:
    """Returns codes [N, K] as int32 words [N, K / word_inputs]."""
    if form is _INT4:  # each byte has one of inputs 0 to 3 in its low half, and one of inputs 4 to 7 in its high half
        low, high = codes.view(len(codes), -1, 2, 4).to(torch.uint8).unbind(2)
        codes = (low & 0xF | high << 4).view(len(codes), -1)
    return codes.contiguous().view(torch.int32)


def _panels(rows: torch.Tensor) -> torch.Tensor:
    """Returns rows [N, K] of 32-bit elements as [panel, K, PANEL], padded with zeros to whole panels."""
    rows = pad(rows, (0, 0, 0, -len(rows) % PANEL))
    return rows.view(-1, PANEL, rows.shape[1]).transpose(1, 2).contiguous()
