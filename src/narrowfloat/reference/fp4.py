"""How FP4 operands lie in memory, in plain PyTorch; fp4_numerics.py has their numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats import GROUP, TILE_GROUPS, TILE_ROWS, padded32, scale_groups
from .fp4_numerics import Operand, e4m3, grid


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
