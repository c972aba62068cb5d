"""What quantize() gives a user: codes, scales, and the way back."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from . import formats, ops, recipe, support
from .cast import Cast, elements_of
from .formats import GROUP, HIGH_PRECISION, MXFP4, BlockFormat, Format, Scaling, padded, padded32
from .reference.block import Operand, scales_at, taken
from .reference.fp4 import unpack, untile
from .reference.fp4_numerics import e4m3, grid
from .reference.tensor import FLT_MAX, as_rows, check_quantizable
from .spec import both

EXPONENT = 23  # where it starts in the bits of an fp32

_LARGEST = {dtype: torch.finfo(dtype).max for dtype in HIGH_PRECISION}  # a constant when traced


Made = TypeVar("Made", "QuantizedTensor", "FP4Tensor", "BlockTensor")


def _refuse(kind: type, what: str, expected: str, got: object, todo: str) -> None:
    raise ValueError(f"{kind.__name__}: expected {what} {expected}, got {got} ({todo})")


def _seen(t: object) -> str:
    return f"{t.dtype} {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t, with bytes seen as the `dtype` of 8 bits that is wanted, and torch's pairs of E2M1 codes
    as bytes."""
    bytes_ = t.dtype is torch.uint8 and dtype.itemsize == 1
    pairs = t.dtype is torch.float4_e2m1fn_x2 and dtype is torch.uint8
    return t.view(dtype) if bytes_ or pairs else t


def _checked(
    kind: type, name: str, t: Tensor, dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...], layout: str, device: torch.device,
) -> Tensor:  # fmt: skip
    """t, as one of `dtypes`; ValueError where it is not, or of another shape or device."""
    seen = t if t.dtype in dtypes else _as(t, dtypes[0])
    # traced, a comparison of sizes would be a guard
    right = t.dim() == len(shape) and (torch.compiler.is_compiling() or tuple(t.shape) == shape)
    if seen.dtype not in dtypes or not right:
        names = " or ".join(str(dtype) for dtype in dtypes)
        has_bytes = dtypes[0].itemsize == 1 and dtypes[0] is not torch.uint8
        bytes_too = ", or its bytes as torch.uint8" if has_bytes else ""
        _refuse(kind, name, f"as {names} {shape}{bytes_too}", _seen(t), layout)
    if t.device != device:
        _refuse(kind, name, f"on {device} as data is", t.device, "move it there")
    return seen


def _checks_itself(kind: type[Made]) -> type[Made]:
    """Lets a NamedTuple, which may not define __new__ itself, hold its fields to what its docstring
    says whenever one is made: called, by _replace() or _make(), and unpickled.

    Where `data` is no tensor nothing is looked at: torch's pytrees put what they please there.
    """
    plain = kind.__new__

    @functools.wraps(plain)
    def new(cls: type[Made], *fields: Any, **named: Any) -> Made:
        made: Made = plain(cls, *fields, **named)
        data: Any = made.data
        if not isinstance(data, Tensor):
            return made
        return tuple.__new__(cls, made._held())

    kind.__new__ = new  # type: ignore[assignment]
    kind._make = classmethod(lambda cls, fields: cls(*fields))  # type: ignore[assignment]
    return kind


def _check_named(kind: type, made: Made, names: Iterable[str]) -> None:
    for name, t in made._asdict().items():
        if name in ("scale", "scales") and not isinstance(t, Tensor):
            _refuse(kind, name, "as a tensor", _seen(t), "torch.tensor(...) makes one")
    if not isinstance(made.format, str) or made.format not in names:
        _refuse(kind, "a format", f"out of {sorted(names)}", repr(made.format), "see quantize()")
    if not isinstance(made.dtype, torch.dtype) or not made.dtype.is_floating_point:
        _refuse(kind, "dtype", "of floating point", made.dtype, "what dequantize() gives")


def _product(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes x scales, both fp32, in `dtype`: rounded once. What is finite stays so."""
    largest = _LARGEST.get(dtype, FLT_MAX)
    real = codes * scales
    finite = codes.isfinite() & scales.isfinite()
    return torch.where(finite, real.clamp(-largest, largest), real).to(dtype)


@_checks_itself
class QuantizedTensor(NamedTuple):
    """A tensor in a narrow format: real = data * scale.

    data: codes in the format's torch dtype, the shape of the original; scale: fp32 [];
    format: its name; dtype: what the original had.

    Codes may come as their bytes in uint8 and are then seen as the format's dtype. ValueError for
    other shapes, dtypes or devices, where a tensor is put together by hand.
    """

    data: Tensor
    scale: Tensor
    format: str
    dtype: torch.dtype

    def _held(self) -> tuple[Any, ...]:
        kind = QuantizedTensor
        _check_named(kind, self, formats.FORMATS)
        fmt, shape = formats.FORMATS[self.format], tuple(self.data.shape)
        device = self.data.device
        data = _checked(kind, "data", self.data, (fmt.dtype,), shape, "codes", device)
        scale = _checked(kind, "scale", self.scale, (torch.float32,), (), "one a tensor", device)
        return data, scale, self.format, self.dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, of the original's shape, multiplied in fp32 and rounded once to `dtype`
        (default: the original's). What the product or the rounding would make infinite is the
        largest of `dtype`; with a scale that is Inf or NaN values are so too."""
        data, scale, *_ = self._held()  # what torch.compile makes has not been looked at
        return _product(data.float(), scale, dtype or self.dtype)


@_checks_itself
class FP4Tensor(NamedTuple):
    """A tensor [..., K] in FP4: real = code * scales * scale, with a scale each block along K.

    data: uint8 [..., ceil(K / 2)], two E2M1 codes a byte, element 0 in the low nibble (after the
    last of an odd K comes a zero); scales: [..., ceil(K / 16)] float8_e4m3fn in nvfp4,
    [..., ceil(K / 32)] float8_e8m0fnu in mxfp4; scale: fp32 [], 1 in mxfp4; format: its name;
    dtype: what the original had; width: K.

    In mxfp4 a block of zeros has the byte 0, 2^-127; the smallest scale of another is 2^-126.

    Scales may come as their bytes in uint8 and are then seen as their dtype. ValueError for other
    shapes, dtypes or devices, where a tensor is put together by hand; of blocks of 16 x 16 that is
    a scale for each row of 16 all the same.
    """

    data: Tensor
    scales: Tensor
    scale: Tensor
    format: str
    dtype: torch.dtype
    width: int

    def _held(self) -> tuple[Any, ...]:
        kind = FP4Tensor
        _check_named(kind, self, formats.BLOCK_FORMATS)
        fmt, k, device = formats.BLOCK_FORMATS[self.format], self.width, self.data.device
        leading = tuple(self.data.shape[:-1])
        data = _checked(
            kind, "data", self.data, (torch.uint8,), (*leading, -(-k // 2)),
            "two codes of the width a byte", device,
        )  # fmt: skip
        scales = _checked(
            kind, "scales", self.scales, (fmt.scale,), (*leading, -(-k // fmt.block)),
            f"one for each {fmt.block} of the width", device,
        )  # fmt: skip
        scale = _checked(kind, "scale", self.scale, (torch.float32,), (), "one a tensor", device)
        return data, scales, scale, self.format, self.dtype, k

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, of the original's shape, multiplied in fp32 and rounded once to `dtype`
        (default: the original's). What the product or the rounding would make infinite is the
        largest of `dtype`; with a scale that is NaN values are so too."""
        block = formats.BLOCK_FORMATS[self.format].block
        data, scales, scale, *_ = self._held()  # what torch.compile makes has not been looked at
        codes = grid(unpack(as_rows(data))[:, : self.width])
        scales = as_rows(scales).float().repeat_interleave(block, 1)[:, : self.width]
        real = _product(_product(codes, scales, torch.float32), scale, dtype or self.dtype)
        return real.view(*data.shape[:-1], self.width)


@_checks_itself
class BlockTensor(NamedTuple):
    """A tensor [..., K] in FP8 with rowwise or blockwise scaling: real = data * scale.

    data: E4M3 codes in torch's dtype (E5M2 ones too in "fp8_row"), the shape of the original.
    scales: of "fp8_row" fp32 [..., 1]; of "fp8_block" and "fp8_block_pow2" fp32
    [..., ceil(K / 128)], with two_d [ceil(M / 128), ceil(K / 128)] of the original as [M, K]; of
    "mxfp8" float8_e8m0fnu [..., ceil(K / 32)]. format: its name; dtype: what the original had;
    two_d: blocks of 128 x 128.

    In "mxfp8" and "fp8_block_pow2" the smallest scale that quantize() makes, which a block of zeros
    has too, is 2^-124: down to there each value is a bf16. OCP's smaller ones, to the byte 0,
    2^-127, are read.

    Codes and scales of 8 bits may come as their bytes in uint8 and are then seen as their dtype.
    ValueError for other shapes, dtypes or devices, where a tensor is put together by hand.
    """

    data: Tensor
    scales: Tensor
    format: str
    dtype: torch.dtype
    two_d: bool = False

    def _held(self) -> tuple[Any, ...]:
        kind = BlockTensor
        _check_named(kind, self, formats.SCALED_FORMATS)
        scaling, device = formats.SCALED_FORMATS[self.format], self.data.device
        if self.two_d and not scaling.square:
            _refuse(kind, "two_d", f"False in {self.format}", True, "its blocks lie in a row")
        shape = tuple(self.data.shape)
        if not shape:
            _refuse(kind, "data", "of at least one dimension", "a scalar", "use .view(1)")
        dtypes = tuple(formats.FORMATS[name].dtype for name in elements_of(scaling))
        data = _checked(kind, "data", self.data, dtypes, shape, "codes", device)
        *leading, k = shape
        across = -(-k // scaling.block) if scaling.block else 1
        expected, layout = (*leading, across), f"one for each {scaling.block or 'all'} of a row"
        if self.two_d:
            expected = (-(-math.prod(leading) // scaling.block), across)
            layout = f"one for each {scaling.block} x {scaling.block}"
        of = torch.float8_e8m0fnu if scaling is formats.MX else torch.float32
        scales = _checked(kind, "scales", self.scales, (of,), expected, layout, device)
        return data, scales, self.format, self.dtype, self.two_d

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, of the original's shape, multiplied in fp32 and rounded once to `dtype`
        (default: the original's). What the product or the rounding would make infinite is the
        largest of `dtype`; with a scale that is Inf or NaN values are so too."""
        scaling = formats.SCALED_FORMATS[self.format]
        data, scales, *_ = self._held()  # what torch.compile makes has not been looked at
        codes, scales = as_rows(data), as_rows(scales)
        if scaling is formats.MX:
            scales = scales.view(torch.uint8)
        over = scales_at(Operand(codes, scales), scaling, self.two_d)
        return _product(codes.float(), over, dtype or self.dtype).view(data.shape)


@overload
def quantize(x: Tensor, format: Literal["e4m3", "e5m2"] = "e4m3") -> QuantizedTensor: ...
@overload
def quantize(
    x: Tensor,
    format: Literal["nvfp4", "mxfp4"],
    *,
    two_d: bool = False,
    four_over_six: bool = False,
    stochastic: bool = False,
) -> FP4Tensor: ...
@overload
def quantize(
    x: Tensor,
    format: Literal["fp8_row", "fp8_block", "fp8_block_pow2", "mxfp8"],
    *,
    two_d: bool = False,
) -> BlockTensor: ...
@overload
def quantize(
    x: Tensor,
    format: str,
    *,
    two_d: bool = False,
    four_over_six: bool = False,
    stochastic: bool = False,
) -> QuantizedTensor | FP4Tensor | BlockTensor: ...
def quantize(
    x: Tensor,
    format: str = "e4m3",
    *,
    two_d: bool = False,
    four_over_six: bool = False,
    stochastic: bool = False,
) -> QuantizedTensor | FP4Tensor | BlockTensor:
    """Quantize x (fp32, bf16 or fp16, any shape).

    "e4m3" and "e5m2" have one scale, amax / max, for the whole tensor. They round to nearest even
    and saturate. NaN or Inf anywhere makes the scale non-finite; a zero tensor gives zeros and the
    scale 1.

    "nvfp4" and "mxfp4" have a scale for each 16 or 32 elements of the last dimension. x is rounded
    to bf16 first, finite values beyond bf16's largest to that. NaN or Inf makes the scale of its
    block NaN, and zeros of its codes. two_d (nvfp4): blocks of 16 x 16. four_over_six (nvfp4): each
    block maps its largest value to 6 or to 4, whichever has the smaller squared error, summed in
    fp32; a tie is 6. stochastic: up or down by chance, with torch's generator, so that the mean of
    what bf16 has of x is kept (an fp32 -0.6 averages -0.6015625); each call draws anew.

    "fp8_row", "fp8_block", "fp8_block_pow2" and "mxfp8" are E4M3 with a scale for each row, 128,
    128 or 32 elements of the last dimension, fp32 or, of the latter two, powers of two, rounded up,
    from 2^-124 on. NaN or Inf makes the scale of its row or block non-finite. two_d (fp8_block,
    fp8_block_pow2): blocks of 128 x 128.

    x is [..., K], of at least one dimension. TypeError for another dtype, ValueError for another
    format or for options that it has not.

    The result carries no gradient. `data` is a view whose rows start on 16-byte boundaries, so the
    last dimension's stride is 1 but it need not be contiguous.
    """
    check_quantizable(x, "quantize")
    block_format = formats.BLOCK_FORMATS.get(format) if isinstance(format, str) else None
    if block_format is not None:
        if block_format is MXFP4 and (two_d or four_over_six):
            raise ValueError(
                f"quantize: expected two_d and four_over_six to be False for mxfp4, got {two_d} "
                f"and {four_over_six} (its blocks are 1 x 32, its scales powers of two)"
            )
        how = Cast("e2m1", format, two_d, stochastic=stochastic, four_over_six=four_over_six)
        return _quantize_fp4(x.detach(), block_format, how)
    scaling = formats.SCALED_FORMATS.get(format) if isinstance(format, str) else None
    if scaling is not None:
        if four_over_six or stochastic or (two_d and not scaling.square):
            raise ValueError(
                f"quantize: expected four_over_six, stochastic and, but for fp8_block and "
                f"fp8_block_pow2, two_d to be False for {format}, got {four_over_six}, "
                f"{stochastic}, {two_d}"
            )
        return _quantize_block(x.detach(), scaling, two_d)
    fmt = formats.get(format, also=[*formats.SCALED_FORMATS, *formats.BLOCK_FORMATS])
    if two_d or four_over_six or stochastic:
        raise ValueError(
            f"quantize: expected two_d, four_over_six and stochastic to be False for {format}, got "
            f"{two_d}, {four_over_six}, {stochastic} (they are for {sorted(formats.BLOCK_FORMATS)}"
            ", two_d for fp8_block and fp8_block_pow2 too)"
        )
    return _quantize_fp8(x.detach(), fmt)


def _quantize_fp8(x: Tensor, fmt: Format) -> QuantizedTensor:
    support.require(recipe.FP8, x.device)
    rows, *_, scale = ops.quantize_op(x, both(Cast(fmt.name), None).pack())
    data = _view(rows, x.shape[:-1], x.shape[-1], padded(x.shape[-1]))
    return QuantizedTensor(data, scale[0], fmt.name, x.dtype)


def _quantize_block(x: Tensor, scaling: Scaling, two_d: bool) -> BlockTensor:
    support.require(recipe.FP8, x.device)  # each chip quantizes, whatever it multiplies
    how = Cast("e4m3", scaling.name, square=two_d)
    rows, scales, *_ = ops.quantize_op(x, both(how, None).pack())
    leading, k = x.shape[:-1], x.shape[-1]
    data = _view(rows, leading, k, rows.shape[1])
    operand = taken(rows, scales, as_rows(x).shape[0], k, scaling, two_d)
    scales = operand.scales.contiguous()
    if scaling is formats.MX:
        scales = scales.view(torch.float8_e8m0fnu)
    if not two_d:
        scales = scales.view(*leading, scales.shape[1])
    return BlockTensor(data, scales, scaling.format, x.dtype, two_d)


def _quantize_fp4(x: Tensor, fmt: BlockFormat, how: Cast) -> FP4Tensor:
    support.require(recipe.RECIPES[fmt.name], x.device)
    seed = ops.draw_seed(x.device) if how.stochastic else None
    rows, tiled, _, _, tensor_scales = ops.quantize_op(x, both(how, None).pack(), None, seed)
    k, scale = x.shape[-1], tensor_scales[0]
    m = as_rows(x).shape[0]
    data = _view(rows, x.shape[:-1], -(-k // 2), padded32(k) // 2)
    scales = untile(tiled, m, k)[:, :: fmt.block // GROUP].contiguous()
    scales = scales.view(*x.shape[:-1], scales.shape[1])
    if fmt is MXFP4:
        scales, scale = _as_e8m0(scales, scale), torch.ones_like(scale)
    else:
        scales = scales.view(fmt.scale)
    return FP4Tensor(data, scales, scale, fmt.name, x.dtype, k)


def _as_e8m0(scales: Tensor, scale: Tensor) -> Tensor:
    """E4M3 bytes of powers of two relative to `scale`, a power of two -> UE8M0. Zero, which only
    has codes of zero, becomes the smallest."""
    exponents = ((e4m3(scales) * scale).view(torch.int32) >> EXPONENT).to(torch.uint8)
    nan = scales == formats.E4M3.nan
    return torch.where(nan, MXFP4.nan, exponents).view(MXFP4.scale)


def _view(rows: Tensor, leading: torch.Size, width: int, row_stride: int) -> Tensor:
    """The first `width` of each row as [*leading, width], without a copy."""
    strides = [1]
    stride = row_stride
    for size in reversed(leading):
        strides.append(stride)
        stride *= size
    return rows.as_strided((*leading, width), tuple(reversed(strides)))
