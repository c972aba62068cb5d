"""Decides what a layer with scales finer than a tensor's saves for its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .recipe import BlockRecipe
from .reuse import NOT_HELD, Held
from .settings import BLOCK_KEEP_W, SAVE_X, gradients


class BlockLinearFunction(torch.autograd.Function):
    """y [..., N] = x [..., K] w [N,K]^T + bias [N] as a BlockRecipe says, and its three gradients.

    Saved for dw: x's columns [K, M] as FP8 codes with their scales, 1.03 byte an element at most;
    x itself where wgrad is in bf16. Saved for dx: w itself, which costs nothing, and the largest
    values of its columns where it is scaled by row; or, where the weight is being reused, its held
    columns. Nothing is saved for a gradient that nobody needs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        recipe: BlockRecipe,
        held: Held | None = None,
    ) -> Tensor:
        ctx.needs, asked = gradients(ctx.needs_input_grad, w, bias)
        need_dx, need_dw, _ = ctx.needs
        w_rows, w_columns = NOT_HELD if held is None else held
        quantized = recipe.wgrad != "bf16"
        settings = (
            recipe.settings
            | (SAVE_X if need_dw and quantized else 0)
            | (BLOCK_KEEP_W if need_dx else 0)
        )
        y, x_columns, x_scales, w_amax = ops.block_linear_forward(
            x, w, bias, settings, w_rows.codes, w_rows.block_scales
        )
        of_x: tuple[Tensor | None, ...] = (None, None)
        if need_dw:
            of_x = (x_columns, x_scales) if quantized else (x, None)
        of_w: tuple[Tensor | None, ...] = (None, None, None, None)
        if need_dx and w_columns.codes is not None:
            of_w = (None, None, w_columns.codes, w_columns.block_scales)
        elif need_dx:
            by_row = recipe.fprop == recipe.dgrad == "row"
            of_w = (w, w_amax if by_row else None, None, None)
        ctx.save_for_backward(*of_x, *of_w)
        ctx.in_features = w.shape[1]
        ctx.settings = recipe.settings | asked
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ops.refuse_double_backward()
        *saved, w_columns, w_columns_scales = ctx.saved_tensors
        grads = ops.block_linear_backward(
            dy, *saved, ctx.in_features, ctx.settings, w_columns, w_columns_scales
        )
        needed = (g if need else None for g, need in zip(grads, ctx.needs, strict=True))
        return (*needed, None, None)
