"""Decides how the choices of a linear layer's call travel to its operators: as one integer.

Each argument of an operator costs the host time, and the two calls of a layer have eleven such
choices: one integer each took 1.6 us off the forward's dispatch and 2.6 us off the backward's
(benchmarks/results/cpu). csrc/settings.h reads the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats import HIGH_PRECISION

# bits 0 to 3: format of x or dy; 4 to 7: format of w; then
FAST = 1 << 8  # accumulation of fprop or dgrad
FAST_WGRAD = 1 << 9
SAVE_X = 1 << 10  # forward: x's transposed copy is wanted
NEED_DX = 1 << 10  # backward
DW_SHIFT = 12  # bits 12 to 15: dtype of dw, 0 where it is not wanted
DB_SHIFT = 16  # bits 16 to 19: dtype of db, likewise

DW = {dtype: code << DW_SHIFT for code, dtype in enumerate(HIGH_PRECISION, 1)}
DB = {dtype: code << DB_SHIFT for code, dtype in enumerate(HIGH_PRECISION, 1)}


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
