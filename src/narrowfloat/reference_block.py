"""States what FP8 with finer scales than a tensor's means, in plain PyTorch; the CPU's kernels too.

An operand is R rows that a product contracts along C. It has a scale for each row, for each 128
elements of a row (a weight: for each 128 x 128), or, a power of two, for each 32 or 128. The CUDA
kernels equal this bit for bit in codes and scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .formats import (
    BY_SCALING,
    E4M3,
    E5M2,
    E8M0_NAN,
    MX,
    NONE,
    ROW,
    Format,
    Scaling,
    block_codes_shape,
    block_scales_shape,
    padded,
    padded32,
)
from .reference import as_rows, cast, check_linear, check_quantizable, scale_from_amax
from .reference_fp4 import tile, untile
from .settings import BlockLayer, BlockOrientation, BlockQuantize

# Of a power-of-two scale, biased by 127: from here on every code x scale is a bf16, subnormal or
# not (E4M3's smallest is 2^-9, bf16's 2^-133).
SMALLEST_EXPONENT = 3


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
    """2^(biased - 127) in fp32, for int32 from 1 to 254."""
    return (biased << 23).view(torch.float32)


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
    codes = cast(x * over_blocks(multiplier, block, *x.shape), fmt)
    if scaling is not MX:
        return Operand(codes, torch.where(finite, power(biased), float("nan")))
    kept = over_blocks(finite, block, *x.shape)
    codes = torch.where(kept, codes.view(torch.uint8), 0).view(fmt.dtype)
    return Operand(codes, torch.where(finite, biased, E8M0_NAN).to(torch.uint8))


def fp32_scales(scales: Tensor) -> Tensor:
    """fp32 of scales that are fp32 or UE8M0 bytes from SMALLEST_EXPONENT on."""
    if scales.dtype != torch.uint8:
        return scales
    return torch.where(scales == E8M0_NAN, float("nan"), power(scales.to(torch.int32)))


def values(operand: Operand, scaling: Scaling, square: bool = False) -> Tensor:
    """fp32 [R, C], code x scale."""
    shape = operand.codes.shape
    block = blocks_of(scaling, square, *shape)
    return operand.codes.float() * over_blocks(fp32_scales(operand.scales), block, *shape)


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


# ---- operators ----


def _nothing(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(0, dtype=dtype, device=like.device)


def _check_scaling(code: int, who: str) -> Scaling:
    if code not in BY_SCALING:
        raise ValueError(f"{who}: expected a scaling out of {sorted(BY_SCALING)}, got {code}")
    return BY_SCALING[code]


def check_orientation(how: BlockOrientation, who: str) -> Scaling:
    """The scaling of an orientation; ValueError for what there is not."""
    scaling = _check_scaling(how.scaling, who)
    if how.operand and not scaling.power_of_two:
        raise ValueError(
            f"{who}: expected powers of two as scales of a bf16 operand, got {scaling.name} "
            "(code x scale is no bf16 with fp32 scales)"
        )
    if how.e5m2 and scaling is not ROW:
        raise ValueError(f"{who}: expected e5m2 with scales by row, got {scaling.name}")
    if how.square and not scaling.square:
        raise ValueError(f"{who}: expected squares with blocks of 128, got {scaling.name}")
    return scaling


def block_quantize(x: Tensor, settings: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [..., K] taken as [M, K] -> (rows, their scales, columns, their scales).

    settings: a packed BlockQuantize. Rows are [M, K] contracted along K, columns [K, M] along M;
    each as FP8 codes and scales, laid out as lay_out() says, or as bf16 operands [padded(R),
    padded32(C)] without scales; empty where not wanted.
    """
    who = "block_quantize"
    check_quantizable(x, who)
    x2 = as_rows(x)
    made: list[Tensor] = []
    for how, t in zip(BlockQuantize.unpack(settings), (x2, x2.t()), strict=True):
        scaling = check_orientation(how, who)
        if scaling is NONE:
            made += [_nothing(x, E4M3.dtype), _nothing(x)]
            continue
        operand = quantize_operand(t, scaling, E5M2 if how.e5m2 else E4M3, how.square)
        if how.operand:
            made += [operand_form(operand, scaling, how.square), _nothing(x)]
        else:
            made += lay_out(operand, scaling, how.square)
    return made[0], made[1], made[2], made[3]


class _Factor(NamedTuple):
    """An operand of a product, unpacked: its value is matrix x scale."""

    matrix: Tensor  # fp32 [R, C]
    scale: Tensor | None  # fp32 [R], by row


def _factor_of(operand: Operand, scaling: Scaling, square: bool = False) -> _Factor:
    if scaling is ROW:
        return _Factor(operand.codes.float(), operand.scales[:, 0])
    return _Factor(values(operand, scaling, square), None)


def _factor(x: Tensor, scaling: Scaling, fmt: Format = E4M3, square: bool = False) -> _Factor:
    if scaling is NONE:
        return _Factor(x.to(torch.bfloat16).float(), None)
    square = square and scaling.square
    return _factor_of(quantize_operand(x, scaling, fmt, square), scaling, square)


def _product(a: _Factor, b: _Factor) -> Tensor:
    """fp32 a b^T, whatever autocast is on. The order of its sums is not left to how the operands
    happen to lie."""
    with torch.autocast(a.matrix.device.type, enabled=False):
        d = a.matrix.contiguous() @ b.matrix.contiguous().t()
    if a.scale is not None:
        d = d * a.scale[:, None]
    return d if b.scale is None else d * b.scale


def keeps_w(choices: BlockLayer) -> bool:
    """Whether the forward measures w's columns for the backward: where it measures rows anyway."""
    return choices.keep_w and choices.fprop == choices.dgrad == ROW.code


def column_amax(w: Tensor) -> Tensor:
    """max |w| of each column of w [N,K], fp32 [padded(K)], 0 beyond. Not its scale, amax / max:
    the multiplier max / amax cannot be had from a rounded one."""
    n, k = w.shape
    amax = block_amax(w.t().float(), (1, max(n, 1)))[:, 0]
    amax = torch.where(amax.isnan(), float("nan"), amax)  # one NaN, whichever came
    return pad(amax, (0, padded(k) - k))


def _held(
    codes: Tensor, scales: Tensor | None, scaling: Scaling, rows: int, cols: int, name: str, op: str
) -> _Factor:
    """A weight's orientation [rows, cols] that block_quantize made beforehand."""
    if scaling is NONE:
        raise ValueError(
            f"{op}: expected no quantized w for a product in bf16, got one (pass w alone)"
        )
    if scales is None:
        raise ValueError(f"{op}: expected {name}_scales for {name}, got none")
    shape = block_codes_shape(scaling, rows, cols)
    of_scales = block_scales_shape(scaling, scaling.square, rows, cols)
    if codes.shape != shape or codes.dtype != E4M3.dtype or scales.shape != of_scales:
        raise ValueError(
            f"{op}: expected {name} as float8_e4m3fn {shape} with scales {of_scales}, as "
            f"narrowfloat quantizes them, got {codes.dtype} {tuple(codes.shape)} with "
            f"{tuple(scales.shape)}"
        )
    return _factor_of(
        taken(codes, scales, rows, cols, scaling, scaling.square), scaling, scaling.square
    )


def block_linear_forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    settings: int,
    w_rows: Tensor | None = None,
    w_rows_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [..., N] = x [..., K] w [N,K]^T + bias, quantized by settings, a packed BlockLayer.

    w_rows, w_rows_scales: w as fprop wants it, that block_quantize made beforehand; w then gives
    the sizes. Returns (y, x's columns as wgrad wants them, their scales, column_amax(w)). The
    columns are empty unless they are wanted and wgrad is quantized, w's maxima unless they are,
    fprop and dgrad are both by row and w was not quantized beforehand. The sum is in fp32 and
    rounded once.
    """
    check_linear(x, w, bias, "linear")
    choices = BlockLayer.unpack(settings)
    fprop, wgrad = (_check_scaling(c, "linear") for c in (choices.fprop, choices.wgrad))
    x2, (n, k) = as_rows(x), w.shape
    if w_rows is None:
        of_w = _factor(w, fprop, square=True)
    else:
        of_w = _held(w_rows, w_rows_scales, fprop, n, k, "w_rows", "linear")
    y = _product(_factor(x2, fprop), of_w)
    if bias is not None:
        y = y + bias.float()
    y = y.to(x.dtype).view(*x.shape[:-1], n)
    columns, columns_scales = _nothing(x, E4M3.dtype), _nothing(x)
    if choices.wanted and wgrad is not NONE:
        columns, columns_scales = lay_out(quantize_operand(x2.t(), wgrad), wgrad)
    w_amax = _nothing(x)
    if keeps_w(choices) and w_rows is None:
        w_amax = column_amax(w)
    return y, columns, columns_scales, w_amax


def block_linear_backward(
    dy: Tensor,
    x: Tensor | None,
    x_columns_scales: Tensor | None,
    w: Tensor | None,
    w_columns_amax: Tensor | None,
    in_features: int,
    settings: int,
    w_columns: Tensor | None = None,
    w_columns_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx [..., K], dw [N,K], db [N]) of block_linear_forward, each empty where settings, a packed
    BlockLayer, do not ask for it.

    dx needs w, quantized anew along N: in squares to the numbers that the forward saw.
    w_columns_amax: what the forward measured, else w is measured anew (the reference always does).
    Or it needs w_columns and w_columns_scales, w along N that block_quantize made beforehand.
    dw needs x: the columns that the forward returned and their scales, or x itself where wgrad is
    in bf16. db sums dy unquantized.
    """
    who = "linear_backward"
    check_quantizable(dy, who, "dy")
    given = {"x": x, "x_columns_scales": x_columns_scales, "w": w}
    given |= {"w_columns_amax": w_columns_amax}
    given |= {"w_columns": w_columns, "w_columns_scales": w_columns_scales}
    for name, t in given.items():
        if t is not None and t.device != dy.device:
            raise ValueError(
                f"{who}: expected {name} on {dy.device} as dy is, got {t.device} (move it there)"
            )
    choices = BlockLayer.unpack(settings)
    dgrad, wgrad = (_check_scaling(c, who) for c in (choices.dgrad, choices.wgrad))
    fmt = E5M2 if choices.e5m2_dy else E4M3
    dw_dtype, db_dtype = choices.dw_dtype, choices.db_dtype
    k, n = in_features, dy.shape[-1]
    dy2 = as_rows(dy)
    m = dy2.shape[0]
    dx, dw, db = (dy.new_empty(0, dtype=d or dy.dtype) for d in (dy.dtype, dw_dtype, db_dtype))
    if choices.wanted:
        if w_columns is not None:
            of_w = _held(w_columns, w_columns_scales, dgrad, k, n, "w_columns", who)
        else:
            w = _given(w, "w")
            if w.shape != (n, k):
                raise ValueError(
                    f"{who}: expected w {(n, k)} for dy [..., {n}], got {tuple(w.shape)}"
                )
            of_w = _factor(w.t(), dgrad, square=True)
        of_dy = fmt if dgrad is ROW else E4M3
        dx = _product(_factor(dy2, dgrad, of_dy), of_w)
        dx = dx.to(dy.dtype).view(*dy.shape[:-1], k)
    if dw_dtype is not None:
        x = _given(x, "x")
        if wgrad is NONE:
            of_x = _factor(as_rows(x).t(), NONE)
        else:
            scales = _given(x_columns_scales, "x_columns_scales")
            of_x = _factor_of(taken(x, scales, k, m, wgrad), wgrad)
        of_dy = fmt if wgrad is ROW else E4M3
        dw = _product(_factor(dy2.t(), wgrad, of_dy), of_x).to(dw_dtype)
    if db_dtype is not None:
        db = dy2.float().sum(0).to(db_dtype)
    return dx, dw, db


def _given(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"linear_backward: expected {name} for this gradient, got None (pass it)")
    return tensor
