"""Decides what a layer with scales finer than a tensor's saves for its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .recipe import BlockRecipe
from .settings import BLOCK_KEEP_W, SAVE_X, gradients


class BlockLinearFunction(torch.autograd.Function):
    """y [..., N] = x [..., K] w [N,K]^T + bias [N] as a BlockRecipe says, and its three gradients.

    Saved for dw: x's columns [K, M] as FP8 codes with their scales, 1.03 byte an element at most;
    x itself where wgrad is in bf16. Saved for dx: w itself, which costs nothing, and the largest
    values of its columns where it is scaled by row. Nothing is saved for a gradient that nobody
    needs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, recipe: BlockRecipe) -> Tensor:
        ctx.needs, asked = gradients(ctx.needs_input_grad, w, bias)
        need_dx, need_dw, _ = ctx.needs
        quantized = recipe.wgrad != "bf16"
        settings = (
            recipe.settings
            | (SAVE_X if need_dw and quantized else 0)
            | (BLOCK_KEEP_W if need_dx else 0)
        )
        y, x_columns, x_scales, w_amax = ops.block_linear_forward(x, w, bias, settings)
        of_x: tuple[Tensor | None, ...] = (None, None)
        if need_dw:
            of_x = (x_columns, x_scales) if quantized else (x, None)
        by_row = recipe.fprop == recipe.dgrad == "row"
        ctx.save_for_backward(*of_x, w if need_dx else None, w_amax if need_dx and by_row else None)
        ctx.in_features = w.shape[1]
        ctx.settings = recipe.settings | asked
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ops.refuse_double_backward()
        grads = ops.block_linear_backward(dy, *ctx.saved_tensors, ctx.in_features, ctx.settings)
        return (*(g if need else None for g, need in zip(grads, ctx.needs, strict=True)), None)
