"""What the tests of all recipes share: casts, recipes, tensors, and what a GEMM's operands are."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowfloat as nf
from narrowfloat import ops
from narrowfloat.formats import ROW, TENSOR
from narrowfloat.recipe import GEMMS
from narrowfloat.reference import block, fp4
from narrowfloat.reference.tensor import SCALE
from narrowfloat.spec import both

BF16 = nf.Gemm(None, None)
OPTIONS = ("square", "stochastic", "hadamard", "four_over_six", "scale_up")


def _casts() -> list[nf.Cast]:
    found = []
    for element in ("e4m3", "e5m2", "e2m1"):
        for scaling in ("tensor", "row", "block", "block_pow2", "mx", "nvfp4", "mxfp4"):
            for options in itertools.product((False, True), repeat=len(OPTIONS)):
                try:
                    found.append(nf.Cast(element, scaling, *options))
                except ValueError:  # test_recipe.py says which
                    continue
    return found


ALL_CASTS = _casts()

# ---- recipes ----


def without(*operands: str) -> nf.Recipe:
    """fp8 with these operands in bf16, "fprop.a" to "wgrad.b"."""
    gemms = {gemm: getattr(nf.Recipe(), gemm) for gemm in GEMMS}
    for operand in operands:
        gemm, side = operand.split(".")
        gemms[gemm] = dataclasses.replace(gemms[gemm], **{side: None})
    return nf.Recipe(f"without {' and '.join(operands)}", **gemms)


OPERANDS = [f"{gemm}.{side}" for gemm in GEMMS for side in "ab"]
ROWS = nf.block_recipe("rows of e4m3", "row", "row", "row")
WIDE_X = nf.Recipe(
    "x in e5m2", nf.Gemm("e5m2", "e4m3"), nf.Gemm("e4m3", "e4m3"), nf.Gemm("e4m3", "e5m2")
)
WIDE_W = nf.Recipe("w in e5m2", nf.Gemm("e4m3", "e5m2"), nf.Gemm("e4m3", "e5m2"), nf.Gemm())
NEAREST = nf.fp4_recipe("nearest", stochastic_dy=False, rotate_wgrad=False)
ROW_BLOCKS = nf.fp4_recipe("w 1 x 16", weights_2d=False, four_over_six="w")

# Those that have a name and are one call of the operators without a history.
NAMED = [recipe for recipe in nf.RECIPES.values() if recipe.delayed is None]
# of one family of kernels
UNIFORM = [
    WIDE_X,
    WIDE_W,
    nf.Recipe("fast", *[nf.Gemm("e4m3", "e4m3", "fast")] * 3),
    nf.block_recipe("forward alone", "block", "bf16", "bf16"),
    nf.block_recipe("row and blocks", "row", "block", "row"),
    nf.block_recipe("bf16 forward", "bf16", "row", "mx"),
    nf.block_recipe("e5m2 and bf16", "mx", "row", "bf16", "e5m2"),
    nf.block_recipe("powers", "block_pow2", "mx", "block_pow2"),
    nf.block_recipe("rows of e4m3", "row", "row", "block"),
    nf.block_recipe("nothing", "bf16", "bf16", "bf16"),
    nf.block_recipe("fast rows", "row", "row", "row", "e5m2", ("fprop",)),
    nf.fp4_recipe("plain", "nvfp4", False, False, False),
    nf.fp4_recipe("plain mx", "mxfp4", False, False, False),
    nf.fp4_recipe("plain mx, scaled up", "mxfp4", False, False, False, scale_up_dy=True),
    ROW_BLOCKS,
]
# of several: also what gives one operand two casts
MIXED = [
    nf.mixed_recipe("bf16 dw", "mxfp4", "nvfp4", "bf16"),
    nf.mixed_recipe("bf16 y", "bf16", "fp8", "nvfp4"),
    nf.mixed_recipe("fp4 both ways", "nvfp4", "nvfp4", "mxfp4"),
    nf.mixed_recipe("fp4 backward", "mxfp8", "nvfp4", "nvfp4"),
    nf.mixed_recipe("columns of the forward", "nvfp4", "fp8", NEAREST),
    nf.mixed_recipe("columns anew", "nvfp4", "nvfp4_four_over_six", "nvfp4_four_over_six"),
    nf.mixed_recipe("nearest dx", "fp8", NEAREST, "nvfp4"),
    nf.mixed_recipe("square and not", "nvfp4", ROW_BLOCKS, "nvfp4"),
    nf.mixed_recipe("rows", "fp8_row", ROWS, "fp8_row"),
    nf.mixed_recipe("formats", "fp8", WIDE_X, WIDE_X),
    nf.mixed_recipe("formats of w", WIDE_W, "fp8", "fp8"),
    nf.mixed_recipe("formats of dy", "fp8", "fp8", nf.Recipe("e4", wgrad=nf.Gemm())),
    nf.mixed_recipe("dx", "fp8_block_pow2", "fp8", "mxfp8"),
    nf.mixed_recipe("x in fp8", "fp8", "mxfp8", "fp8_row"),
    nf.Recipe("bf16 dx", dgrad=BF16),
    nf.Recipe("bf16 forward of fp8", fprop=BF16),
    nf.Recipe("fast beside bf16", nf.Gemm("e4m3", "e4m3", "fast"), wgrad=BF16),
    *(without(operand) for operand in OPERANDS),
    without("fprop.a", "wgrad.b"),  # x
    without("fprop.b", "dgrad.b"),  # w
    without("dgrad.a", "wgrad.a"),  # dy
    nf.mixed_recipe("x of fp4", without("fprop.a"), "nvfp4", without("wgrad.b")),
    nf.mixed_recipe("w among blocks", "mxfp8", without("dgrad.b"), "fp8_row"),
    nf.mixed_recipe("dy after bf16", "bf16", without("dgrad.a"), without("wgrad.a")),
]
EVERY = NAMED + UNIFORM + MIXED
# one of each way that operands are laid out and grouped
SOME = [nf.RECIPES[n] for n in ("fp8", "fp8_row", "fp8_block_row_wgrad", "mxfp8", "nvfp4")] + [
    nf.RECIPES["nvfp4_mxfp8_backward"],
    nf.RECIPES["fp8_bf16_wgrad"],
    *(r for r in MIXED if r.name in ("formats", "fp4 both ways", "without dgrad.a")),
]

every = pytest.mark.parametrize("recipe", EVERY, ids=str)
some = pytest.mark.parametrize("recipe", SOME, ids=str)
named = pytest.mark.parametrize("recipe", [*nf.RECIPES.values()], ids=str)


def alone(recipe: nf.Recipe, gemm: str) -> nf.Recipe:
    """The recipe that has one GEMM of another and leaves the others in bf16."""
    return nf.Recipe(gemm, **dict.fromkeys(GEMMS, BF16) | {gemm: getattr(recipe, gemm)})


def tolerance_of(gemm: nf.Gemm, gradient: bool) -> str | None:
    """The name in TOLERANCE, None where both operands are bf16."""
    casts = [cast for cast in gemm.casts if cast is not None]
    if not casts:
        return None
    if gemm.kind == "fp4":
        return casts[0].scaling + (" gradient" if gradient else "")
    return "e5m2" if "e5m2" in [cast.element for cast in casts] else "e4m3"


# ---- tensors ----


def tensors(
    m: int, k: int, n: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, bias, dy"""
    x = torch.randn(m, k, device=device).to(dtype)
    w = (torch.randn(n, k, device=device) * 0.05).to(dtype)
    bias = torch.randn(n, device=device).to(dtype)
    dy = (torch.randn(m, n, device=device) * 1e-3).to(dtype)
    return x, w, bias, dy


def transposed(*of: Tensor) -> tuple[Tensor, ...]:
    """The same values, the other index running first."""
    return tuple(t.t().contiguous().t() for t in of)


def run(
    x: Tensor, w: Tensor, bias: Tensor | None, dy: Tensor, recipe: Any, needs: str = "xwb"
) -> list[Tensor | None]:
    """y, dx, dw, db, with the same draw each time."""
    leaves = [
        None if t is None else t.detach().clone(memory_format=torch.preserve_format)
        for t in (x, w, bias)
    ]
    for leaf, name in zip(leaves, "xwb", strict=True):
        if leaf is not None:
            leaf.requires_grad_(name in needs)
    y = nf.linear(leaves[0], leaves[1], leaves[2], recipe)
    if y.requires_grad:
        torch.manual_seed(7)
        y.backward(dy)
    return [y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)]


def quantized(
    t: Tensor, cast: nf.Cast, columns: bool = False, seed: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """(codes, scales of rows or blocks, scale of the tensor) of t's rows, or of its columns, by the
    quantize operator; None where the cast has none."""
    choices = both(None, cast) if columns else both(cast, None)
    made = ops.quantize_op(t, choices.pack(), None, seed if cast.stochastic else None)
    codes, scales = made[2:4] if columns else made[:2]
    scale = made[4][SCALE:] if columns else made[4][:SCALE]
    return codes, None if cast.of is TENSOR else scales, scale if cast.of.tensor_scale else None


def values(
    t: Tensor, cast: nf.Cast | None, columns: bool = False, seed: Tensor | None = None
) -> Tensor:
    """fp64 [R, C], or [C, R] of columns: what a GEMM multiplies where it is told this cast. In FP4
    C is padded, and what was rotated stays so."""
    rows, cols = reversed(t.shape) if columns else t.shape
    if cast is None:
        return (t.t() if columns else t).bfloat16().double()
    codes, scales, scale = quantized(t, cast, columns, seed)
    if cast.of is TENSOR:
        return codes[:rows, :cols].double() * scale[0].double()
    if cast.of.family == "fp4":
        # fp32 need not hold the product
        return fp4.unpacked(codes, scales, rows, codes.shape[1] * 2).double() * scale[0].double()
    operand = block.taken(codes, scales, rows, cols, cast.of, cast.square)
    if cast.of is ROW:
        return operand.codes.double() * operand.scales.double()
    return block.values(operand, cast.of, cast.square).double()
