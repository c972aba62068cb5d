"""States what the FP4 operators mean, in plain PyTorch; these functions are the CPU's kernels too.

numerics_fp4.py decides the numbers; here they get their layout in memory, and products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .formats import GROUP, TILE_GROUPS, TILE_ROWS, padded32, scale_groups
from .numerics_fp4 import Operand, e4m3, grid, quantize_operand
from .reference import as_rows, check_linear, check_quantizable
from .settings import FP4Layer, FP4Quantize, Orientation

SCALES = 4  # the tensor scales of a call: those of rows, of columns, 0, 0


def pack(codes: Tensor) -> Tensor:
    """Codes [R, C], one a byte -> [R, C/2], element 0 in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """pack()'s inverse: uint8 [R, C/2] -> [R, C]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def tile(scales: Tensor, rows: int, cols: int) -> Tensor:
    """Scale bytes of an operand [rows, cols] in the 128 x 4 tiles of cuBLASLt, flat.

    scales: uint8 [rows or more, groups of cols or more]. With Ct = scale_groups(cols), that of row
    r and group c lies at
    ((r / 128) * (Ct / 4) + c / 4) * 512 + (r % 32) * 16 + (r % 128) / 32 * 4 + c % 4;
    padding is 0.
    """
    groups = scale_groups(cols)
    across, down = groups // TILE_GROUPS, -(-rows // TILE_ROWS)
    scales = scales[:rows, :groups]
    full = pad(scales, (0, groups - scales.shape[1], 0, down * TILE_ROWS - scales.shape[0]))
    return full.view(down, 4, 32, across, TILE_GROUPS).permute(0, 3, 2, 1, 4).reshape(-1)


def untile(tiled: Tensor, rows: int, cols: int) -> Tensor:
    """tile()'s inverse: flat -> uint8 [rows, ceil(cols / 16)]."""
    across, down = scale_groups(cols) // TILE_GROUPS, -(-rows // TILE_ROWS)
    full = tiled.view(down, across, 32, 4, TILE_GROUPS).permute(0, 3, 2, 1, 4)
    full = full.reshape(down * TILE_ROWS, across * TILE_GROUPS)
    return full[:rows, : -(-cols // GROUP)]


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 code x block scale, exact: codes [R, C], one a byte, scales [R, C / 16] E4M3 bytes."""
    return (grid(codes).unflatten(1, (-1, GROUP)) * e4m3(scales)[..., None]).flatten(1)


def operand_form(operand: Operand) -> Tensor:
    """bf16 [padded(R), padded32(C)], code x block scale: what a bf16 product multiplies."""
    v = values(operand.codes, operand.scales)
    bits = v.bfloat16().view(torch.int16)  # exact; the bits of a NaN are torch's own choice
    return torch.where(v.isnan(), 0x7FC0, bits).view(torch.bfloat16)


def unpacked(codes: Tensor, scales: Tensor, rows: int, cols: int) -> Tensor:
    """fp32 [rows, cols], code x block scale, of a packed operand and its tiled scales."""
    per_group = untile(scales, rows, padded32(cols))
    return values(unpack(codes)[:rows], per_group)[:, :cols]


def dequantize(codes: Tensor, scales: Tensor, scale: Tensor, rows: int, cols: int) -> Tensor:
    """fp32 [rows, cols] of a packed operand, its tiled scales and its tensor scale. What was
    rotated stays so."""
    return unpacked(codes, scales, rows, cols) * scale


def _nothing(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=like.device)


def _check_choices(choices: FP4Quantize, seed: Tensor | None, who: str) -> None:
    if choices.mx and choices.two_d:
        raise ValueError(f"{who}: expected blocks of 16 x 16 or mx, got both")
    for how in choices[:2]:
        if how.four_over_six and (how.stochastic or choices.mx):
            raise ValueError(
                f"{who}: expected four over six with nearest rounding and without mx, got "
                f"{'mx' if choices.mx else 'stochastic rounding'}"
            )
        if choices.two_d and how.rotated:
            raise ValueError(f"{who}: expected blocks of 16 x 16 without a rotation, got both")
    check_seed(seed, any(how.wanted and how.stochastic for how in choices[:2]), who)


def check_seed(seed: Tensor | None, needed: bool, who: str) -> None:
    """ValueError where stochastic rounding lacks its seed."""
    if needed and (seed is None or seed.dtype != torch.int64 or seed.shape != (2,)):
        got = "None" if seed is None else f"{seed.dtype} {tuple(seed.shape)}"
        raise ValueError(
            f"{who}: expected a seed, int64 [2], for stochastic rounding, got {got} "
            "(torch.randint draws one)"
        )


def fp4_quantize(
    x: Tensor, seed: Tensor | None, settings: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [..., K] taken as [M, K] -> (rows, their scales, columns, their scales, tensor scales).

    settings: a packed FP4Quantize. Rows are [M, K] contracted along K, columns [K, M] along M; each
    packed, uint8 [padded(R), padded32(C) / 2] with tiled scales, or as bf16 operands
    [padded(R), padded32(C)] without; empty where not wanted. Tensor scales: fp32 [4], (rows,
    columns, 0, 0). seed: int64 [2], for stochastic rounding.
    """
    check_quantizable(x, "fp4_quantize")
    choices = FP4Quantize.unpack(settings)
    _check_choices(choices, seed, "fp4_quantize")
    x2 = as_rows(x)
    made: list[Tensor] = []
    scales = [torch.zeros((), dtype=torch.float32, device=x.device)] * SCALES
    for at, (how, t) in enumerate(zip(choices[:2], (x2, x2.t()), strict=True)):
        if not how.wanted:
            made += [_nothing(x), _nothing(x)]
            continue
        operand = quantize_operand(t, how, choices.mx, choices.two_d, seed, at)
        scales[at] = operand.scale
        if how.operand:
            made += [operand_form(operand), _nothing(x)]
        else:
            made += [pack(operand.codes), tile(operand.scales, *t.shape)]
    return made[0], made[1], made[2], made[3], torch.stack(scales)


class _Factor(NamedTuple):
    """An operand of a product, unpacked: its value is matrix x scale."""

    matrix: Tensor  # fp32 [R, C]
    scale: Tensor  # fp32 []


def _factor(
    x: Tensor, how: Orientation, choices: FP4Layer, two_d: bool, seed: Tensor | None, at: int
) -> _Factor:
    rows, cols = x.shape
    operand = quantize_operand(x, how, choices.mx, two_d, seed, at)
    return _Factor(values(operand.codes, operand.scales)[:rows], operand.scale)


def _product(a: _Factor, b: _Factor) -> Tensor:
    """fp32 a b^T, whatever autocast is on."""
    with torch.autocast(a.matrix.device.type, enabled=False):
        return (a.matrix @ b.matrix.t()) * (a.scale * b.scale)


def orientations_of_x(choices: FP4Layer, save: bool) -> FP4Quantize:
    """How a layer quantizes x: rows for y, columns for dw."""
    rows = Orientation(True, True, four_over_six=choices.four_over_six_x)
    columns = rows._replace(operand=False, rotated=choices.rotate)
    return FP4Quantize(rows, columns if save else Orientation(), choices.mx)


def orientations_of_dy(choices: FP4Layer, rows: bool, columns: bool) -> FP4Quantize:
    """How a layer quantizes dy: rows for dx, columns for dw."""
    how = Orientation(True, True, stochastic=choices.stochastic_dy, scale_up=choices.scale_up_dy)
    return FP4Quantize(
        how if rows else Orientation(),
        how._replace(rotated=choices.rotate) if columns else Orientation(),
        choices.mx,
    )


def fp4_linear_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, settings: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [..., N] = x [..., K] w [N,K]^T + bias, operands quantized by settings, a packed FP4Layer.

    Returns (y, x's columns packed, their tiled scales, fp32 [4]: the columns' tensor scale and
    zeros); the columns are empty, their scale 0, unless they are wanted. The sum is in fp32 and
    rounded once.
    """
    check_linear(x, w, bias, "linear")
    choices = FP4Layer.unpack(settings)
    x2 = as_rows(x)
    of_x = orientations_of_x(choices, choices.wanted)
    of_w = Orientation(True, True, four_over_six=choices.four_over_six_w)
    y = _product(
        _factor(x2, of_x.rows, choices, False, None, 0),
        _factor(w, of_w, choices, choices.two_d_w, None, 0),
    )
    if bias is not None:
        y = y + bias.float()
    y = y.to(x.dtype).view(*x.shape[:-1], w.shape[0])
    if not choices.wanted:
        none = torch.zeros(SCALES, dtype=torch.float32, device=x.device)
        return y, _nothing(x), _nothing(x), none
    columns = quantize_operand(x2.t(), of_x.columns, choices.mx, False, None, 1)
    scales = pad(columns.scale.view(1), (0, SCALES - 1))
    return y, pack(columns.codes), tile(columns.scales, *x2.t().shape), scales


def fp4_linear_backward(
    dy: Tensor,
    x_columns: Tensor | None,
    x_columns_scales: Tensor | None,
    scales: Tensor | None,
    w: Tensor | None,
    seed: Tensor | None,
    in_features: int,
    settings: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx [..., K], dw [N,K], db [N]) of fp4_linear_forward, each empty where settings, a packed
    FP4Layer, do not ask for it.

    dx needs w, quantized anew: with 16 x 16 blocks to the numbers that the forward saw, else
    along N. dw needs what the forward returned of x. seed, int64 [2]: where dy is rounded
    stochastically. db sums dy unquantized.
    """
    who = "linear_backward"
    check_quantizable(dy, who, "dy")
    given = {
        "x_columns": x_columns,
        "x_columns_scales": x_columns_scales,
        "scales": scales,
        "w": w,
        "seed": seed,
    }
    for name, t in given.items():
        if t is not None and t.device != dy.device:
            raise ValueError(
                f"{who}: expected {name} on {dy.device} as dy is, got {t.device} (move it there)"
            )
    choices = FP4Layer.unpack(settings)
    dw_dtype, db_dtype = choices.dw_dtype, choices.db_dtype
    need_dx, need_dw = choices.wanted, dw_dtype is not None
    check_seed(seed, choices.stochastic_dy and (need_dx or need_dw), who)
    k = in_features
    dy2 = as_rows(dy)
    if need_dx and _given(w, "w").shape != (dy.shape[-1], k):
        raise ValueError(
            f"{who}: expected w {(dy.shape[-1], k)} for dy [..., {dy.shape[-1]}], got "
            f"{tuple(_given(w, 'w').shape)}"
        )
    of_dy = orientations_of_dy(choices, need_dx, need_dw)
    dx, dw, db = (dy.new_empty(0, dtype=d or dy.dtype) for d in (dy.dtype, dw_dtype, db_dtype))
    if need_dx:
        of_w = Orientation(True, True, four_over_six=choices.four_over_six_w)
        dx = _product(
            _factor(dy2, of_dy.rows, choices, False, seed, 0),
            _factor(_given(w, "w").t(), of_w, choices, choices.two_d_w, None, 1),
        )
        dx = dx.to(dy.dtype).view(*dy.shape[:-1], k)
    if need_dw:
        columns = _factor(dy2.t(), of_dy.columns, choices, False, seed, 1)
        width = columns.matrix.shape[1]
        packed, tiled = _given(x_columns, "x_columns"), _given(x_columns_scales, "x_columns_scales")
        x = _Factor(unpacked(packed, tiled, k, width), _given(scales, "scales").flatten()[0])
        dw = _product(columns, x).to(dw_dtype)
    if db_dtype is not None:
        db = dy2.float().sum(0).to(db_dtype)
    return dx, dw, db


def _given(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"linear_backward: expected {name} for this gradient, got None (pass it)")
    return tensor
