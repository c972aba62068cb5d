"""FP8 with rowwise and blockwise scaling, in plain PyTorch.

An operand is R rows that a GEMM contracts along C. It has a scale for each row, for each 128
elements of a row (a weight: for each 128 x 128), or, a power of two, for each 32 or 128. The CUDA
kernels equal this bit for bit in codes and scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats import (
    E4M3,
    E8M0_NAN,
    MX,
    ROW,
    Format,
    Scaling,
    block_codes_shape,
    block_scales_shape,
    padded,
    padded32,
)
from .fp4 import tile, untile
from .tensor import cast, scale_from_amax

# Of a power-of-two scale that is made here, biased by 127: from here on every code x scale is a
# bf16, subnormal or not (E4M3's smallest is 2^-9, bf16's 2^-133), so that a bf16 GEMM is exact.
# OCP's smallest, 0, is read where a tensor comes with it.
SMALLEST_EXPONENT = 3

# With the largest scale, 2^120, what rounds to the code 256 would be 2^128, which neither fp32 nor
# bf16 has: values saturate at 240 x 2^120.
LARGEST_EXPONENT, LARGEST = 247, 240 * 2.0**120


class Operand(NamedTuple):
    """One quantized orientation [R, C]; real = code x scale."""

    codes: Tensor  # FP8 [R, C]
    scales: Tensor  # fp32, or UE8M0 bytes in mxfp8: one a block, see blocks_of()


def blocks_of(scaling: Scaling, square: bool, rows: int, cols: int) -> tuple[int, int]:
    """(rows, columns) of a block of an operand [rows, cols]."""
    return (scaling.block if square else 1), scaling.block or max(cols, 1)


def over_blocks(per_block: Tensor, block: tuple[int, int], rows: int, cols: int) -> Tensor:
    """per_block [ceil(R / block), ceil(C / block)] at each element: [R, C]."""
    return per_block.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """max |x| of each block of x [R, C], fp32 [ceil(R / block), ceil(C / block)]; NaN wins."""
    rows, cols = x.shape
    down, across = -(-rows // block[0]), -(-cols // block[1])
    if block[1] == 1:  # a row, however short, has a scale
        across = 1
    x = pad(x, (0, across * block[1] - cols, 0, down * block[0] - rows))
    return x.abs().view(down, block[0], across, block[1]).amax((1, 3))


def exponents(amax: Tensor) -> Tensor:
    """Biased by 127, of the smallest power of two >= amax / 448, at least SMALLEST_EXPONENT:
    int32. Of a finite amax alone."""
    # 448 is 1.75 x 2^8: what is above carries into the exponent
    return ((amax.view(torch.int32) + 0x1FFFFF >> 23) - 8).clamp(min=SMALLEST_EXPONENT)


def power(biased: Tensor) -> Tensor:
    """2^(biased - 127) in fp32, for int32 from 0, a subnormal number, to 254."""
    bits = torch.where(biased == 0, 1 << 22, biased << 23)
    return bits.view(torch.float32)


def quantize_operand(
    x: Tensor, scaling: Scaling, fmt: Format = E4M3, square: bool = False
) -> Operand:
    """x [R, C] (fp32, bf16 or fp16, taken as fp32) in `fmt` with scales as `scaling` has them.

    Scales with fp32: of a row or block with an Inf Inf (its multiplier is 0), with a NaN NaN, as a
    tensor's. Powers of two: NaN for either; in mxfp8 the codes of such a block are 0.
    """
    x = x.float()
    block = blocks_of(scaling, square, *x.shape)
    amax = block_amax(x, block)
    if not scaling.power_of_two:
        scale, multiplier = scale_from_amax(amax, fmt)
        return Operand(cast(x * over_blocks(multiplier, block, *x.shape), fmt), scale)
    finite = amax.isfinite()
    biased = exponents(torch.where(finite, amax, 0.0))
    multiplier = torch.where(finite, power(254 - biased), float("nan"))
    saturates = over_blocks(biased == LARGEST_EXPONENT, block, *x.shape)
    x = torch.where(saturates, x.clamp(-LARGEST, LARGEST), x)
    codes = cast(x * over_blocks(multiplier, block, *x.shape), fmt)
    if scaling is not MX:
        return Operand(codes, torch.where(finite, power(biased), float("nan")))
    kept = over_blocks(finite, block, *x.shape)
    codes = torch.where(kept, codes.view(torch.uint8), 0).view(fmt.dtype)
    return Operand(codes, torch.where(finite, biased, E8M0_NAN).to(torch.uint8))


def fp32_scales(scales: Tensor) -> Tensor:
    """fp32 of scales that are fp32 or UE8M0 bytes."""
    if scales.dtype != torch.uint8:
        return scales
    return torch.where(scales == E8M0_NAN, float("nan"), power(scales.to(torch.int32)))


def scales_at(operand: Operand, scaling: Scaling, square: bool = False) -> Tensor:
    """fp32 [R, C], the scale of each element."""
    shape = operand.codes.shape
    block = blocks_of(scaling, square, *shape)
    return over_blocks(fp32_scales(operand.scales), block, *shape)


def values(operand: Operand, scaling: Scaling, square: bool = False) -> Tensor:
    """fp32 [R, C], code x scale."""
    return operand.codes.float() * scales_at(operand, scaling, square)


# ---- layouts ----


def _filled(t: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    rows, cols = t.shape
    return pad(t, (0, shape[1] - cols, 0, shape[0] - rows), value=value).contiguous()


def lay_out(operand: Operand, scaling: Scaling, square: bool = False) -> tuple[Tensor, Tensor]:
    """(codes, scales) as block_quantize returns them: formats.block_codes_shape and
    block_scales_shape. Codes beyond are 0; scales of rows beyond 1, of squares and in tiles 0."""
    rows, cols = operand.codes.shape
    codes = _filled(operand.codes.view(torch.uint8), block_codes_shape(scaling, rows, cols), 0)
    codes = codes.view(operand.codes.dtype)
    if scaling is MX:
        return codes, tile(operand.scales, rows, -(-cols // 2))
    shape = block_scales_shape(scaling, square, rows, cols)
    if square:
        return codes, _filled(operand.scales, shape, 0.0)
    scales = _filled(operand.scales.t(), (operand.scales.shape[1], padded(rows)), 1.0)
    return codes, scales.contiguous().view(shape)


def taken(
    codes: Tensor, scales: Tensor, rows: int, cols: int, scaling: Scaling, square: bool = False
) -> Operand:
    """lay_out()'s inverse, for an operand [rows, cols]."""
    codes = codes[:rows, :cols]
    if scaling is MX:
        return Operand(codes, untile(scales, rows, -(-cols // 2)))
    if square:
        return Operand(codes, scales[:, : -(-cols // scaling.block)])
    across = 1 if scaling is ROW else scales.shape[0]
    return Operand(codes, scales.view(across, padded(rows)).t()[:rows])


def operand_form(operand: Operand, scaling: Scaling, square: bool = False) -> Tensor:
    """bf16 [padded(R), padded32(C)], code x scale, exact: what a bf16 product multiplies."""
    rows, cols = operand.codes.shape
    v = values(operand, scaling, square)
    bits = v.bfloat16().view(torch.int16)  # the bits of a NaN are torch's own choice
    bits = torch.where(v.isnan(), 0x7FC0, bits)
    return _filled(bits, (padded(rows), padded32(cols)), 0).view(torch.bfloat16)


def column_amax(w: Tensor) -> Tensor:
    """max |w| of each column of w [N,K], fp32 [padded(K)], 0 beyond. Not its scale, amax / max:
    the multiplier max / amax cannot be had from a rounded one."""
    n, k = w.shape
    amax = block_amax(w.t().float(), (1, max(n, 1)))[:, 0]
    amax = torch.where(amax.isnan(), float("nan"), amax)  # one NaN, whichever came
    return pad(amax, (0, padded(k) - k))
