"""What quantize() gives a user: codes, scales, and the way back."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import formats, ops, recipe, support
from .cast import Cast
from .formats import GROUP, MXFP4, BlockFormat, Format, Scaling, padded, padded32
from .reference.block import Operand, taken, values
from .reference.fp4 import unpack, untile
from .reference.fp4_numerics import e4m3, grid
from .reference.tensor import as_rows, check_quantizable
from .spec import both

EXPONENT = 23  # where it starts in the bits of an fp32


class QuantizedTensor(NamedTuple):
    """A tensor in a narrow format: real = data * scale.

    data: codes in the format's torch dtype, the shape of the original; scale: fp32 [];
    format: its name; dtype: what the original had.
    """

    data: Tensor
    scale: Tensor
    format: str
    dtype: torch.dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, of the original's shape, multiplied in fp32 and rounded once to `dtype`
        (default: the original's)."""
        return (self.data.float() * self.scale).to(dtype or self.dtype)


class FP4Tensor(NamedTuple):
    """A tensor [..., K] in FP4: real = code * scales * scale, with a scale each block along K.

    data: uint8 [..., ceil(K / 2)], two E2M1 codes a byte, element 0 in the low nibble (after the
    last of an odd K comes a zero); scales: [..., ceil(K / 16)] float8_e4m3fn in nvfp4,
    [..., ceil(K / 32)] float8_e8m0fnu in mxfp4; scale: fp32 [], 1 in mxfp4; format: its name;
    dtype: what the original had; width: K.
    """

    data: Tensor
    scales: Tensor
    scale: Tensor
    format: str
    dtype: torch.dtype
    width: int

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, of the original's shape, multiplied in fp32 and rounded once to `dtype`
        (default: the original's)."""
        block = formats.BLOCK_FORMATS[self.format].block
        codes = grid(unpack(as_rows(self.data))[:, : self.width])
        scales = as_rows(self.scales).float().repeat_interleave(block, 1)[:, : self.width]
        real = codes * scales * self.scale
        return real.to(dtype or self.dtype).view(*self.data.shape[:-1], self.width)


class BlockTensor(NamedTuple):
    """A tensor [..., K] in FP8 with rowwise or blockwise scaling: real = data * scale.

    data: E4M3 codes in torch's dtype, the shape of the original. scales: of "fp8_row" fp32
    [..., 1]; of "fp8_block" and "fp8_block_pow2" fp32 [..., ceil(K / 128)], with two_d
    [ceil(M / 128), ceil(K / 128)] of the original as [M, K]; of "mxfp8" float8_e8m0fnu
    [..., ceil(K / 32)]. format: its name; dtype: what the original had; two_d: blocks of 128 x 128.
    """

    data: Tensor
    scales: Tensor
    format: str
    dtype: torch.dtype
    two_d: bool = False

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, of the original's shape, multiplied in fp32 and rounded once to `dtype`
        (default: the original's)."""
        scaling = formats.SCALED_FORMATS[self.format]
        codes, scales = as_rows(self.data), as_rows(self.scales)
        if scaling is formats.MX:
            scales = scales.view(torch.uint8)
        real = values(Operand(codes, scales), scaling, self.two_d)
        return real.to(dtype or self.dtype).view(self.data.shape)


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
    to bf16 first. NaN or Inf makes the scale of its block NaN, and zeros of its codes. two_d
    (nvfp4): blocks of 16 x 16. four_over_six (nvfp4): each block maps its largest value to 6 or to
    4, whichever has the smaller squared error; a tie is 6. stochastic: up or down by chance, with
    torch's generator, so that the mean is kept; each call draws anew.

    "fp8_row", "fp8_block", "fp8_block_pow2" and "mxfp8" are E4M3 with a scale for each row, 128,
    128 or 32 elements of the last dimension, fp32 or, of the latter two, powers of two, rounded up.
    NaN or Inf makes the scale of its row or block non-finite. two_d (fp8_block, fp8_block_pow2):
    blocks of 128 x 128.

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
