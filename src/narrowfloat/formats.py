"""The narrow formats: their elements, blocks, largest values, padding and layout in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch


class Format(NamedTuple):
    """One row of the table of formats (IEEE-like layouts of the OCP 8-bit specification, 2023)."""

    name: str
    code: int  # how operators and csrc name the element; csrc/quantize/tensor.h holds the same
    dtype: torch.dtype
    max: float  # largest finite value; larger ones saturate to it
    nan: int  # the one byte that a NaN becomes, whatever its sign


E4M3 = Format("e4m3", 0, torch.float8_e4m3fn, 448.0, 0x7F)
E5M2 = Format("e5m2", 1, torch.float8_e5m2, 57344.0, 0x7F)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2)}
BY_CODE: dict[int, Format] = {f.code: f for f in FORMATS.values()}
BY_DTYPE: dict[torch.dtype, Format] = {f.dtype: f for f in FORMATS.values()}

# FP4 (OCP MX specification 2023 for E2M1 and UE8M0; NVFP4: arXiv 2509.25149). The element of both
# is E2M1: bits 0 to 2 of a code count up this grid, bit 3 is the sign.
FP4_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Inside the operators every block scale is an E4M3 byte for each group of 16 along the contraction.
GROUP = 16
# The rotation of a group: element i is negated where bit i is 1, then multiplied by the 16 x 16
# Hadamard matrix. One constant, so that both operands of a product are rotated alike.
SIGNS = 0xB274


class BlockFormat(NamedTuple):
    """One row of the table of formats with a scale a block."""

    name: str
    bits: int
    max: float  # largest value of the element
    block: int  # elements along the contraction that share a scale
    scale: torch.dtype  # of a block's scale, as quantize() returns it
    per_tensor: bool  # whether an fp32 scale of the whole tensor comes on top
    nan: int  # the scale byte of a block that holds a NaN or an Inf


NVFP4 = BlockFormat("nvfp4", 4, 6.0, 16, torch.float8_e4m3fn, True, 0x7F)
MXFP4 = BlockFormat("mxfp4", 4, 6.0, 32, torch.float8_e8m0fnu, False, 0xFF)

BLOCK_FORMATS: dict[str, BlockFormat] = {f.name: f for f in (NVFP4, MXFP4)}


class Scaling(NamedTuple):
    """One row of the table of scalings: which neighbours of an operand share a scale."""

    name: str  # as a Cast calls it
    code: int  # as the operators call it; csrc/quantize/block.h holds the same numbers
    format: str  # as quantize() and the recipe of all three GEMMs call it
    block: int  # elements along the contraction that share a scale; 0: all of a row
    square: bool  # whether blocks may be block x block, for weights
    power_of_two: bool  # scales
    family: str = "block"  # of kernels: "tensor", "block" or "fp4"
    tensor_scale: bool = False  # whether there is an fp32 scale of the whole tensor

    @property
    def dtype(self) -> torch.dtype:
        """Of the block scales in the operators: those of mx, nvfp4 and mxfp4 are bytes."""
        return torch.uint8 if self.name == "mx" or self.family == "fp4" else torch.float32


NONE = Scaling("bf16", 0, "bf16", 0, False, False)  # left in bf16
ROW = Scaling("row", 1, "fp8_row", 0, False, False)
BLOCK = Scaling("block", 2, "fp8_block", 128, True, False)  # arXiv 2412.19437
BLOCK_POW2 = Scaling("block_pow2", 3, "fp8_block_pow2", 128, True, True)
MX = Scaling("mx", 4, "mxfp8", 32, False, True)  # OCP MX; rounded up: arXiv 2506.08027
TENSOR = Scaling("tensor", 5, "fp8", 0, False, False, "tensor", True)
VEC16 = Scaling("nvfp4", 6, "nvfp4", 16, True, False, "fp4", True)
VEC32 = Scaling("mxfp4", 7, "mxfp4", 32, False, True, "fp4", True)

SCALINGS: dict[str, Scaling] = {
    s.name: s for s in (NONE, ROW, BLOCK, BLOCK_POW2, MX, TENSOR, VEC16, VEC32)
}
BY_SCALING: dict[int, Scaling] = {s.code: s for s in SCALINGS.values()}
SCALED_FORMATS: dict[str, Scaling] = {s.format: s for s in (ROW, BLOCK, BLOCK_POW2, MX)}
E8M0_NAN = 0xFF  # the scale byte of an mxfp8 block that holds a NaN or an Inf

# dtypes that are quantized, and that a GEMM writes; in the order of csrc's Real
HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)

# cuBLASLt wants FP8 pointers, leading dimensions and contracted sizes on 16 bytes (its manual,
# "cublasLtMatmul: FP8"), so every quantized copy is padded with zeros to multiples of this.
PAD = 16


def padded(size: int) -> int:
    """The smallest multiple of PAD that holds `size`."""
    return -(-size // PAD) * PAD


# An FP4 operand of R rows that is contracted along C: its codes, two a byte, are
# [padded(R), padded32(C) / 2]. Its scales lie in the tiles of 128 rows x 4 groups that cuBLASLt
# reads (its manual, "1D block scaling factors layout").
TILE_ROWS, TILE_GROUPS = 128, 4


def padded32(size: int) -> int:
    """The smallest multiple of 32, a block of mxfp4, that holds `size`."""
    return -(-size // 32) * 32


def codes_shape(rows: int, cols: int) -> tuple[int, int]:
    """Of the packed codes of an FP4 operand [rows, cols]; two codes a byte."""
    return padded(rows), padded32(cols) // 2


def scale_groups(cols: int) -> int:
    """Scale bytes a row of an FP4 operand, those of the padding included."""
    return -(-cols // (GROUP * TILE_GROUPS)) * TILE_GROUPS


def scales_size(rows: int, cols: int) -> int:
    """Bytes of the tiled scales of an FP4 operand [rows, cols]."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * scale_groups(cols)


# An FP8 operand of R rows that is contracted along C, with scales finer than a tensor's: how its
# codes and scales lie in memory, as cuBLASLt reads them (its manual, "Scaling in cuBLASLt").


def block_codes_shape(scaling: Scaling, rows: int, cols: int) -> tuple[int, int]:
    """Of the codes, one a byte, zeros beyond the operand."""
    return padded(rows), padded32(cols) if scaling is MX else padded(cols)


def block_scales_shape(
    scaling: Scaling, square: bool, rows: int, cols: int
) -> tuple[int] | tuple[int, int]:
    """Of the scales: [padded(R)], [ceil(C/128), padded(R)], of squares [ceil(R/128), ceil(C/128)
    to a multiple of 4], or bytes of the tiles of mxfp8."""
    if scaling is ROW:
        return (padded(rows),)
    if scaling is MX:
        return (scales_size(rows, -(-cols // 2)),)  # tiles as for 16 elements a group, of half C
    across = -(-cols // scaling.block)
    if square:
        return -(-rows // scaling.block), -(-across // 4) * 4
    return across, padded(rows)


def get(name: str, who: str = "quantize", also: Iterable[str] = ()) -> Format:
    """The format with one scale a tensor that is called `name`; ValueError names `who` asked and
    what there is, `also` included."""
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(
            f"{who}: expected a format out of {sorted([*FORMATS, *also])}, got {name!r}"
        )
    return found
