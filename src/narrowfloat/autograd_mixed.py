"""Decides what a layer whose products are of different kinds saves for its backward, and which
operators it calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops
from .mixed import MixedLayer
from .recipe import MixedRecipe, Recipe
from .reference import SCALE
from .reuse import NOT_HELD, NOTHING, Held, Quantized
from .settings import BLOCK_KEEP_W, NEED_DX, SAVE_X, gradients


def run_forward(
    mix: MixedLayer,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    w_rows: Quantized = NOTHING,
    save_x: bool = False,
    keep_w: bool = False,
) -> tuple[Tensor, Quantized, Tensor | None]:
    """y, x's columns where save_x, and what was measured of w where keep_w."""
    settings = mix.forward | SAVE_X if save_x else mix.forward
    if mix.fprop == "fp8":
        y, columns, scales = ops.linear_forward(x, w, bias, w_rows.codes, w_rows.scale, settings)
        of_x = scales if keep_w else scales[:SCALE]  # w's would be taken for dx, in another format
        return y, Quantized(columns, None, of_x), scales
    if mix.fprop == "fp4":
        y, columns, of_blocks, scales = ops.fp4_linear_forward(x, w, bias, settings)
        return y, Quantized(columns, of_blocks, scales), None
    settings = settings | BLOCK_KEEP_W if keep_w else settings
    y, columns, of_blocks, w_amax = ops.block_linear_forward(
        x, w, bias, settings, w_rows.codes, w_rows.block_scales
    )
    return y, Quantized(columns, of_blocks, None), w_amax


def _quantized(mix: MixedLayer, x: Tensor) -> Quantized:
    """x's columns as wgrad has them, of wgrad's quantizing operator."""
    if mix.wgrad == "fp8":
        _, columns, scale = ops.quantize_op(x, mix.quantize, False, True)
        return Quantized(columns, None, scale)
    if mix.wgrad == "fp4":
        _, _, columns, of_blocks, scales = ops.fp4_quantize_op(x, None, mix.quantize)
        return Quantized(columns, of_blocks, scales[1:])  # the columns' comes first in a layer's
    _, _, columns, of_blocks = ops.block_quantize_op(x, mix.quantize)
    return Quantized(columns, of_blocks, None)


class _Weight(NamedTuple):
    """What dx has of w."""

    itself: Tensor | None = None
    measured: Tensor | None = None  # by the forward
    columns: Quantized = NOTHING  # where it is reused


def _run_backward(
    kind: str,
    dy: Tensor,
    columns: Quantized,
    w: _Weight,
    seed: Tensor | None,
    in_features: int,
    settings: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db), empty where settings do not ask for them."""
    x, of_blocks, scale = columns
    w_codes, w_of_blocks, w_scale = w.columns
    if kind == "fp8":
        scales = w.measured if scale is None else scale
        return ops.linear_backward(dy, x, scales, w.itself, w_codes, w_scale, in_features, settings)
    if kind == "fp4":
        return ops.fp4_linear_backward(
            dy, x, of_blocks, scale, w.itself, seed, in_features, settings
        )
    return ops.block_linear_backward(
        dy, x, of_blocks, w.itself, w.measured, in_features, settings, w_codes, w_of_blocks
    )


class MixedLinearFunction(torch.autograd.Function):
    """y [..., N] = x [..., K] w [N,K]^T + bias [N] as a MixedRecipe says, or a Recipe that leaves
    an operand in bf16, and its three gradients.

    Saved for dw: x's columns as wgrad has them, x itself where it has x in bf16. Saved for dx: w
    itself, which costs nothing, and what the forward measured of it where dgrad is of that kind;
    or, where the weight is being reused, its held columns. Nothing is saved for a gradient that
    nobody needs. Where dx and dw are of one kind one operator makes both, else one each; db comes
    with dw, or with dx where there is no dw. Each backward draws one seed where FP4 rounds
    stochastically.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        recipe: MixedRecipe | Recipe,
        held: Held | None = None,
    ) -> Tensor:
        mix = recipe.mix
        if mix is None:
            raise ValueError(
                f"MixedLinearFunction: expected a MixedRecipe, or a Recipe with an operand in "
                f"bf16, got {recipe} (LinearFunction computes it)"
            )
        ctx.needs, asked = gradients(ctx.needs_input_grad, w, bias)
        need_dx, need_dw, _ = ctx.needs
        w_rows, w_columns = NOT_HELD if held is None else held
        made = need_dw and mix.columns == "forward"
        reads_w = need_dx and w_columns.codes is None
        keep_w = reads_w and mix.keeps_w
        y, columns, of_w = run_forward(mix, x, w, bias, w_rows, made, keep_w)
        if not made:
            columns = NOTHING
            if need_dw:
                columns = Quantized(x, None, None) if mix.columns == "x" else _quantized(mix, x)
        ctx.save_for_backward(
            *columns,
            w if reads_w else None,
            of_w if keep_w else None,
            *(w_columns if need_dx else NOTHING),
        )
        ctx.mix = mix
        ctx.in_features = w.shape[1]
        ctx.dtypes = asked & ~NEED_DX
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ops.refuse_double_backward()
        mix, k, dtypes = ctx.mix, ctx.in_features, ctx.dtypes
        need_dx, need_dw, need_db = ctx.needs
        saved = ctx.saved_tensors
        columns, w = Quantized(*saved[:3]), _Weight(saved[3], saved[4], Quantized(*saved[5:]))
        draws = (need_dx and mix.draws_dx) or (need_dw and mix.draws_dw)
        seed = ops.draw_seed(dy.device) if draws else None
        dx = dw = db = None
        if need_dx and (mix.joint or not need_dw):
            settings = mix.dx | NEED_DX | dtypes
            dx, dw, db = _run_backward(mix.dgrad, dy, columns, w, seed, k, settings)
        else:
            if need_dx:
                settings = mix.dx | NEED_DX
                dx, _, _ = _run_backward(mix.dgrad, dy, NOTHING, w, seed, k, settings)
            if dtypes:
                settings = mix.dw | dtypes
                _, dw, db = _run_backward(mix.wgrad, dy, columns, _Weight(), seed, k, settings)
        return (
            dx if need_dx else None,
            dw if need_dw else None,
            db if need_db else None,
            None,
            None,
        )
