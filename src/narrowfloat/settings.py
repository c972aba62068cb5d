"""Decides how the choices of a linear layer's call travel to its operators: as one integer.

Each argument of an operator costs the host time, and the two calls of a layer have eleven such
choices: one integer each took 1.6 us off the forward's dispatch and 2.6 us off the backward's
(benchmarks/results/cpu). csrc/settings.h reads the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .formats import HIGH_PRECISION

# bits 0 to 3: format of x or dy; 4 to 7: format of w (formats.BY_CODE, or IN_BF16); then
FAST = 1 << 8  # accumulation of fprop or dgrad
FAST_WGRAD = 1 << 9
SAVE_X = 1 << 10  # forward: x's transposed copy is wanted
NEED_DX = 1 << 10  # backward
DW_SHIFT = 12  # bits 12 to 15: dtype of dw, 0 where it is not wanted
DB_SHIFT = 16  # bits 16 to 19: dtype of db, likewise
# Of the calls with scales from the steps before (reference_delayed.py):
GUARDED = 1 << 20  # a tensor that outgrew its scale is quantized again
JOINS = 1 << 21  # the call counts for the scales to come

DW = {dtype: code << DW_SHIFT for code, dtype in enumerate(HIGH_PRECISION, 1)}
DB = {dtype: code << DB_SHIFT for code, dtype in enumerate(HIGH_PRECISION, 1)}


def gradients(
    needs: Sequence[bool], w: torch.Tensor, bias: torch.Tensor | None
) -> tuple[tuple[bool, bool, bool], int]:
    """Of x, w and bias: what a layer's backward is asked for, and the bits that ask for it."""
    need_dx, need_dw, need_db = needs[:3]
    bits = NEED_DX if need_dx else 0
    if need_dw:
        bits |= DW[w.dtype]
    if bias is None:
        need_db = False
    elif need_db:
        bits |= DB[bias.dtype]
    return (need_dx, need_dw, need_db), bits


class Forward(NamedTuple):
    """The choices of linear_forward."""

    x_format: int
    w_format: int
    fast: bool = False
    save_x: bool = False

    def pack(self) -> int:
        flags = FAST * self.fast | SAVE_X * self.save_x
        return self.x_format | self.w_format << 4 | flags

    @staticmethod
    def unpack(bits: int) -> Forward:
        return Forward(bits & 15, bits >> 4 & 15, bool(bits & FAST), bool(bits & SAVE_X))


class Backward(NamedTuple):
    """The choices of linear_backward."""

    dy_format: int
    w_format: int
    fast_dgrad: bool = False
    fast_wgrad: bool = False
    need_dx: bool = False
    dw_dtype: torch.dtype | None = None
    db_dtype: torch.dtype | None = None

    def pack(self) -> int:
        flags = FAST * self.fast_dgrad | FAST_WGRAD * self.fast_wgrad | NEED_DX * self.need_dx
        dw = 0 if self.dw_dtype is None else DW[self.dw_dtype]
        db = 0 if self.db_dtype is None else DB[self.db_dtype]
        return self.dy_format | self.w_format << 4 | flags | dw | db

    @staticmethod
    def unpack(bits: int) -> Backward:
        dtypes = (None, *HIGH_PRECISION)
        return Backward(
            bits & 15,
            bits >> 4 & 15,
            bool(bits & FAST),
            bool(bits & FAST_WGRAD),
            bool(bits & NEED_DX),
            dtypes[bits >> DW_SHIFT & 15],
            dtypes[bits >> DB_SHIFT & 15],
        )


# FP4. Of fp4_quantize: six bits an orientation, rows from bit 0 and columns from bit 8, then
FP4_COLUMNS_SHIFT = 8
FP4_MX = 1 << 16  # blocks of 32 with powers of two; else 16 with E4M3 and one scale a tensor
FP4_TWO_D = 1 << 17  # blocks of 16 x 16
# bits of an orientation, in the order of Orientation's fields
FP4_ORIENTATION = (1, 2, 4, 8, 16, 32)
# Of a layer's two calls: bits 0 to 6 in the order of FP4Layer's fields, then SAVE_X or NEED_DX and
# the dtypes of dw and db as above
FP4_LAYER = (1, 2, 4, 8, 16, 32, 64)


class Orientation(NamedTuple):
    """How fp4_quantize makes one orientation of a tensor."""

    wanted: bool = False
    operand: bool = False  # as bf16, code x block scale, for a bf16 product; else packed
    stochastic: bool = False  # rounding; else to nearest
    rotated: bool = False
    four_over_six: bool = False  # per block, its largest value becomes 6 or 4
    scale_up: bool = False  # block scales rounded up: no value saturates

    def pack(self) -> int:
        return sum(bit for bit, on in zip(FP4_ORIENTATION, self, strict=True) if on)

    @staticmethod
    def unpack(bits: int) -> Orientation:
        return Orientation(*(bool(bits & bit) for bit in FP4_ORIENTATION))


class FP4Quantize(NamedTuple):
    """The choices of fp4_quantize."""

    rows: Orientation = Orientation()
    columns: Orientation = Orientation()
    mx: bool = False
    two_d: bool = False

    def pack(self) -> int:
        flags = FP4_MX * self.mx | FP4_TWO_D * self.two_d
        return self.rows.pack() | self.columns.pack() << FP4_COLUMNS_SHIFT | flags

    @staticmethod
    def unpack(bits: int) -> FP4Quantize:
        return FP4Quantize(
            Orientation.unpack(bits),
            Orientation.unpack(bits >> FP4_COLUMNS_SHIFT),
            bool(bits & FP4_MX),
            bool(bits & FP4_TWO_D),
        )


class FP4Layer(NamedTuple):
    """The choices of fp4_linear_forward and fp4_linear_backward."""

    mx: bool = False
    two_d_w: bool = False  # blocks of w are 16 x 16 (nvfp4 alone)
    rotate: bool = False  # both operands of wgrad
    stochastic_dy: bool = False
    four_over_six_x: bool = False
    four_over_six_w: bool = False
    scale_up_dy: bool = False
    wanted: bool = False  # forward: x's columns, SAVE_X; backward: dx, NEED_DX
    dw_dtype: torch.dtype | None = None
    db_dtype: torch.dtype | None = None

    def pack(self) -> int:
        flags = sum(bit for bit, on in zip(FP4_LAYER, self, strict=False) if on)
        dw = 0 if self.dw_dtype is None else DW[self.dw_dtype]
        db = 0 if self.db_dtype is None else DB[self.db_dtype]
        return flags | NEED_DX * self.wanted | dw | db

    @staticmethod
    def unpack(bits: int) -> FP4Layer:
        dtypes = (None, *HIGH_PRECISION)
        wanted = bool(bits & NEED_DX)
        dw, db = dtypes[bits >> DW_SHIFT & 15], dtypes[bits >> DB_SHIFT & 15]
        return FP4Layer._make((*(bool(bits & bit) for bit in FP4_LAYER), wanted, dw, db))


# FP8 with finer scales than a tensor's. Of block_quantize: eight bits an orientation, rows from bit
# 0 and columns from bit 8: a scaling's code in three (0: not wanted), then the flags of
# BlockOrientation in its order.
BLOCK_COLUMNS_SHIFT = 8
BLOCK_ORIENTATION = (1 << 3, 1 << 4, 1 << 5)
# Of a layer's two calls: the scalings of fprop, dgrad and wgrad in bits 0 to 8, then
BLOCK_E5M2 = 1 << 9  # dy, where its products are scaled by row
# bit 10: SAVE_X or NEED_DX, and the dtypes of dw and db, as above
BLOCK_FAST = 1 << 11  # accumulation of fprop, where it is scaled by row
BLOCK_FAST_DGRAD = 1 << 20
BLOCK_FAST_WGRAD = 1 << 21
BLOCK_KEEP_W = 1 << 22  # forward: the largest values of w's columns are wanted, for dx


class BlockOrientation(NamedTuple):
    """How block_quantize makes one orientation of a tensor."""

    scaling: int = 0
    operand: bool = False  # as bf16, code x scale, for a bf16 product; powers of two alone
    e5m2: bool = False  # element; else e4m3. By row alone
    square: bool = False  # blocks of 128 x 128

    def pack(self) -> int:
        flags = zip(BLOCK_ORIENTATION, self[1:], strict=True)
        return self.scaling | sum(bit for bit, on in flags if on)

    @staticmethod
    def unpack(bits: int) -> BlockOrientation:
        return BlockOrientation(bits & 7, *(bool(bits & bit) for bit in BLOCK_ORIENTATION))


class BlockQuantize(NamedTuple):
    """The choices of block_quantize."""

    rows: BlockOrientation = BlockOrientation()
    columns: BlockOrientation = BlockOrientation()

    def pack(self) -> int:
        return self.rows.pack() | self.columns.pack() << BLOCK_COLUMNS_SHIFT

    @staticmethod
    def unpack(bits: int) -> BlockQuantize:
        return BlockQuantize(
            BlockOrientation.unpack(bits), BlockOrientation.unpack(bits >> BLOCK_COLUMNS_SHIFT)
        )


class BlockLayer(NamedTuple):
    """The choices of block_linear_forward and block_linear_backward."""

    fprop: int = 0  # codes of scalings
    dgrad: int = 0
    wgrad: int = 0
    e5m2_dy: bool = False
    fast_fprop: bool = False
    fast_dgrad: bool = False
    fast_wgrad: bool = False
    wanted: bool = False  # forward: x's columns, SAVE_X; backward: dx, NEED_DX
    keep_w: bool = False  # forward: amax of w's columns, where fprop and dgrad are by row
    dw_dtype: torch.dtype | None = None
    db_dtype: torch.dtype | None = None

    def pack(self) -> int:
        flags = (
            BLOCK_E5M2 * self.e5m2_dy
            | BLOCK_FAST * self.fast_fprop
            | BLOCK_FAST_DGRAD * self.fast_dgrad
            | BLOCK_FAST_WGRAD * self.fast_wgrad
            | NEED_DX * self.wanted
            | BLOCK_KEEP_W * self.keep_w
        )
        dw = 0 if self.dw_dtype is None else DW[self.dw_dtype]
        db = 0 if self.db_dtype is None else DB[self.db_dtype]
        return self.fprop | self.dgrad << 3 | self.wgrad << 6 | flags | dw | db

    @staticmethod
    def unpack(bits: int) -> BlockLayer:
        dtypes = (None, *HIGH_PRECISION)
        return BlockLayer(
            bits & 7,
            bits >> 3 & 7,
            bits >> 6 & 7,
            bool(bits & BLOCK_E5M2),
            bool(bits & BLOCK_FAST),
            bool(bits & BLOCK_FAST_DGRAD),
            bool(bits & BLOCK_FAST_WGRAD),
            bool(bits & NEED_DX),
            bool(bits & BLOCK_KEEP_W),
            dtypes[bits >> DW_SHIFT & 15],
            dtypes[bits >> DB_SHIFT & 15],
        )
