"""What an operator is told beside its tensors, as one integer a call: the layout of its bits.

Each argument of an operator costs the host time, and the two calls of a layer have some twenty
choices: one integer each took 1.6 us off the forward's dispatch and 2.6 us off the backward's
(benchmarks/results/cpu). LAYOUT states the bits; csrc/linear/spec.h reads the same ones, and a test
compares it with what was compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from .cast import Cast
from .formats import BY_SCALING, HIGH_PRECISION, NONE

CAST_BITS = 10

# name -> (first bit, bits). A cast's own bits, then those of each call; a dtype is 0 where there is
# none, else its place in HIGH_PRECISION from 1.
LAYOUT: dict[str, tuple[int, int]] = {
    "cast.scaling": (0, 4),  # formats.Scaling.code; 0: left in bf16
    "cast.e5m2": (4, 1),  # element, else e4m3; those of FP4 are e2m1
    "cast.square": (5, 1),
    "cast.stochastic": (6, 1),
    "cast.hadamard": (7, 1),
    "cast.four_over_six": (8, 1),
    "cast.scale_up": (9, 1),
    # linear_forward
    "forward.fprop_a": (0, CAST_BITS),  # x [M,K]
    "forward.fprop_b": (10, CAST_BITS),  # w [N,K]
    "forward.wgrad_b": (20, CAST_BITS),  # x's columns [K,M]
    "forward.fast": (30, 1),  # accumulation
    "forward.save_x": (31, 1),  # x's columns are wanted
    "forward.keep_w": (32, 1),  # what is measured of w is wanted, for dgrad
    "forward.guarded": (33, 1),  # delayed scaling: what outgrew its scale is quantized again
    "forward.joins": (34, 1),  # delayed scaling: the call counts for the scales to come
    "forward.y_dtype": (35, 2),  # where it is not x's
    # linear_backward
    "backward.dgrad_a": (0, CAST_BITS),  # dy [M,N]
    "backward.dgrad_b": (10, CAST_BITS),  # w's columns [K,N]
    "backward.wgrad_a": (20, CAST_BITS),  # dy's columns [N,M]
    "backward.wgrad_b": (30, CAST_BITS),  # x's columns [K,M]
    "backward.fast_dgrad": (40, 1),
    "backward.fast_wgrad": (41, 1),
    "backward.need_dx": (42, 1),
    "backward.dw_dtype": (43, 2),
    "backward.db_dtype": (45, 2),
    "backward.w_measured": (47, 1),  # scales end with what the forward measured of w
    "backward.guarded": (48, 1),
    "backward.joins": (49, 1),
    # quantize
    "quantize.rows": (0, CAST_BITS),
    "quantize.columns": (10, CAST_BITS),
    "quantize.want_rows": (20, 1),
    "quantize.want_columns": (21, 1),
    "quantize.rows_as_operand": (22, 1),  # bf16, code x block scale, as a bf16 GEMM takes it
    "quantize.columns_as_operand": (23, 1),
}


def bit(name: str, value: int = 1) -> int:
    """`value` in its place."""
    shift, width = LAYOUT[name]
    if value >> width:
        raise ValueError(f"spec: expected {name} in {width} bits, got {value}")
    return value << shift


def read(spec: int, name: str) -> int:
    shift, width = LAYOUT[name]
    return spec >> shift & (1 << width) - 1


SAVE_X, KEEP_W = bit("forward.save_x"), bit("forward.keep_w")
NEED_DX, W_MEASURED = bit("backward.need_dx"), bit("backward.w_measured")
# delayed scaling, in both calls
FORWARD_GUARDED, FORWARD_JOINS = bit("forward.guarded"), bit("forward.joins")
BACKWARD_GUARDED, BACKWARD_JOINS = bit("backward.guarded"), bit("backward.joins")
DW = {dtype: bit("backward.dw_dtype", code) for code, dtype in enumerate(HIGH_PRECISION, 1)}
DB = {dtype: bit("backward.db_dtype", code) for code, dtype in enumerate(HIGH_PRECISION, 1)}
Y_DTYPE = {dtype: bit("forward.y_dtype", code) for code, dtype in enumerate(HIGH_PRECISION, 1)}


_FLAGS = ("square", "stochastic", "hadamard", "four_over_six", "scale_up")


def bits_of(cast: Cast | None) -> int:
    """A cast's own bits."""
    if cast is None:
        return 0
    bits = bit("cast.scaling", cast.of.code) | bit("cast.e5m2", cast.element == "e5m2")
    return bits | sum(bit(f"cast.{name}", getattr(cast, name)) for name in _FLAGS)


@lru_cache(maxsize=1024)
def cast_of(bits: int, who: str) -> Cast | None:
    """The cast that its bits say; ValueError where they say none that there is."""
    scaling = BY_SCALING.get(read(bits, "cast.scaling"))
    if scaling is None:
        raise ValueError(f"{who}: expected a scaling out of {sorted(BY_SCALING)}, got {bits:#x}")
    if scaling is NONE:
        if bits:
            raise ValueError(f"{who}: expected no options of an operand in bf16, got {bits:#x}")
        return None
    element = "e2m1" if scaling.family == "fp4" else "e4m3"
    if read(bits, "cast.e5m2"):
        element = "e5m2"
    try:
        return Cast(element, scaling.name, *(bool(read(bits, f"cast.{f}")) for f in _FLAGS))
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from None


def _dtype(spec: int, name: str) -> torch.dtype | None:
    return (None, *HIGH_PRECISION)[read(spec, name)]


class Forward(NamedTuple):
    """linear_forward's choices, as the reference reads them."""

    fprop_a: Cast | None
    fprop_b: Cast | None
    wgrad_b: Cast | None
    fast: bool
    save_x: bool
    keep_w: bool
    guarded: bool
    joins: bool
    y_dtype: torch.dtype | None

    @staticmethod
    def unpack(spec: int, who: str = "linear") -> Forward:
        casts = [cast_of(read(spec, f"forward.{n}"), who) for n in Forward._fields[:3]]
        flags = [bool(read(spec, f"forward.{n}")) for n in Forward._fields[3:8]]
        return Forward._make((*casts, *flags, _dtype(spec, "forward.y_dtype")))


class Backward(NamedTuple):
    """linear_backward's choices, as the reference reads them."""

    dgrad_a: Cast | None
    dgrad_b: Cast | None
    wgrad_a: Cast | None
    wgrad_b: Cast | None
    fast_dgrad: bool
    fast_wgrad: bool
    need_dx: bool
    w_measured: bool
    guarded: bool
    joins: bool
    dw_dtype: torch.dtype | None
    db_dtype: torch.dtype | None

    @staticmethod
    def unpack(spec: int, who: str = "linear_backward") -> Backward:
        casts = [cast_of(read(spec, f"backward.{n}"), who) for n in Backward._fields[:4]]
        flags = [bool(read(spec, f"backward.{n}")) for n in Backward._fields[4:10]]
        dtypes = [_dtype(spec, f"backward.{n}") for n in Backward._fields[10:]]
        return Backward._make((*casts, *flags, *dtypes))


class Quantize(NamedTuple):
    """The quantize operator's choices: an orientation's cast, whether it is wanted, and whether as
    the bf16 operand of a GEMM."""

    rows: Cast | None = None
    columns: Cast | None = None
    want_rows: bool = False
    want_columns: bool = False
    rows_as_operand: bool = False
    columns_as_operand: bool = False

    def pack(self) -> int:
        spec = bit("quantize.rows", bits_of(self.rows))
        spec |= bit("quantize.columns", bits_of(self.columns))
        return spec | sum(bit(f"quantize.{n}") for n in self._fields[2:] if getattr(self, n))

    @staticmethod
    def unpack(spec: int, who: str = "quantize") -> Quantize:
        casts = [cast_of(read(spec, f"quantize.{n}"), who) for n in Quantize._fields[:2]]
        flags = [bool(read(spec, f"quantize.{n}")) for n in Quantize._fields[2:]]
        return Quantize._make((*casts, *flags))


def both(rows: Cast | None, columns: Cast | None) -> Quantize:
    """Those orientations that have a cast."""
    return Quantize(rows, columns, rows is not None, columns is not None)


def gradients(
    needs: Sequence[bool], w_dtype: torch.dtype, bias: torch.Tensor | None
) -> tuple[tuple[bool, bool, bool], int]:
    """Of x, w and bias: what a layer's backward is asked for, and the bits that ask for it."""
    need_dx, need_dw, *rest = needs
    need_db = bias is not None and rest[0]
    bits = NEED_DX if need_dx else 0
    if need_dw:
        bits |= DW[w_dtype]
    if need_db and bias is not None:
        bits |= DB[bias.dtype]
    return (need_dx, need_dw, need_db), bits
