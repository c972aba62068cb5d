"""Decides what an FP4 layer saves for its backward, and calls one operator each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .recipe import FP4Recipe
from .settings import SAVE_X, gradients


def run_forward(
    ctx: Any,
    needs: tuple[bool, ...],
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    recipe: FP4Recipe,
) -> Tensor:
    """y, with ctx ready for run_backward. needs: of x, w and bias."""
    ctx.needs, asked = gradients(needs, w, bias)
    need_dx, need_dw, _ = ctx.needs
    settings = recipe.settings | (SAVE_X if need_dw else 0)
    y, x_columns, x_columns_scales, scales = ops.fp4_linear_forward(x, w, bias, settings)
    of_x = (x_columns, x_columns_scales, scales) if need_dw else (None, None, None)
    ctx.save_for_backward(*of_x, w if need_dx else None)
    ctx.in_features = w.shape[1]
    ctx.settings = recipe.settings | asked
    ctx.draws = recipe.stochastic_dy and (need_dx or need_dw)
    return y


def run_backward(ctx: Any, dy: Tensor, who: str) -> tuple[Tensor | None, ...]:
    """(dx, dw, db), None where not needed."""
    ops.refuse_double_backward(who)
    seed = ops.draw_seed(dy.device) if ctx.draws else None
    grads = ops.fp4_linear_backward(dy, *ctx.saved_tensors, seed, ctx.in_features, ctx.settings)
    return tuple(grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))


class FP4LinearFunction(torch.autograd.Function):
    """y [..., N] = x [..., K] w [N,K]^T + bias [N] in FP4, and its three gradients.

    Saved for dw: x's columns [K, M] as packed codes with their scales, 0.56 byte an element. Saved
    for dx: w itself, which costs nothing. Nothing is saved for a gradient that nobody needs. Each
    backward draws the seed of its stochastic rounding.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, recipe: FP4Recipe) -> Tensor:
        return run_forward(ctx, ctx.needs_input_grad[:3], x, w, bias, recipe)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (*run_backward(ctx, dy, "linear"), None)
