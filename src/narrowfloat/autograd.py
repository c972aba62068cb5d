"""Decides what a linear layer saves for its backward, and calls one operator each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops, support
from . import recipe as recipes
from .autograd_block import BlockLinearFunction
from .autograd_fp4 import FP4LinearFunction
from .autograd_mixed import MixedLinearFunction, run_forward
from .recipe import AnyRecipe, BlockRecipe, FP4Recipe, MixedRecipe, Recipe
from .reference import check_quantizable
from .reuse import NOT_HELD, NOTHING, Held
from .settings import JOINS, SAVE_X, gradients


class LinearFunction(torch.autograd.Function):
    """y [..., N] = x [..., K] w [N,K]^T + bias [N], and its three gradients.

    Saved for dw: x's FP8 transposed copy [K, M] and scale. Saved for dx: w itself, which costs
    nothing, and its scale; or, where the weight is being reused, its held transposed copy.
    Nothing is saved for a gradient that nobody needs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, held: Held | None
    ) -> Tensor:
        ctx.needs, asked = gradients(ctx.needs_input_grad, w, bias)
        need_dx, need_dw, _ = ctx.needs
        w_rows, w_columns = NOT_HELD if held is None else held
        settings = recipe.forward_settings | (SAVE_X if need_dw else 0)
        y, x_columns, scales = ops.linear_forward(x, w, bias, w_rows.codes, w_rows.scale, settings)
        if need_dx:
            keep = (w if held is None else None, w_columns.codes, w_columns.scale)
        else:
            keep = (None, None, None)
        ctx.save_for_backward(x_columns if need_dw else None, scales, *keep)
        ctx.in_features = w.shape[1]
        ctx.settings = recipe.backward_settings | asked
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ops.refuse_double_backward()
        dx, dw, db = ops.linear_backward(dy, *ctx.saved_tensors, ctx.in_features, ctx.settings)
        need_dx, need_dw, need_db = ctx.needs
        return (
            dx if need_dx else None,
            dw if need_dw else None,
            db if need_db else None,
            None,
            None,
        )


class DelayedLinearFunction(torch.autograd.Function):
    """LinearFunction with scales from the steps before: `history`, which its calls change, forward
    and backward (reference_delayed.py). Saved are the same tensors."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, history: Tensor
    ) -> Tensor:
        ctx.needs, asked = gradients(ctx.needs_input_grad, w, bias)
        need_dx, need_dw, _ = ctx.needs
        joins = JOINS if asked else 0  # evaluation leaves no trace
        y, x_columns, scales = ops.delayed_linear_forward(
            x,
            w,
            bias,
            history,
            recipe.forward_settings | recipe.history_settings | joins | (SAVE_X if need_dw else 0),
        )
        ctx.save_for_backward(x_columns if need_dw else None, scales, w if need_dx else None)
        ctx.history = history  # other calls change it meanwhile
        ctx.in_features = w.shape[1]
        ctx.settings = recipe.backward_settings | recipe.history_settings | joins | asked
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ops.refuse_double_backward()
        grads = ops.delayed_linear_backward(
            dy, *ctx.saved_tensors, ctx.history, ctx.in_features, ctx.settings
        )
        dx, dw, db = (grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))
        return dx, dw, db, None, None


# What Function.apply calls once it has looked for functorch's transforms; the look alone is 3 of
# the 8 us that an empty function costs (benchmarks/results/cpu).
_apply = super(torch.autograd.Function, LinearFunction).apply
_apply_delayed = super(torch.autograd.Function, DelayedLinearFunction).apply
_apply_fp4 = super(torch.autograd.Function, FP4LinearFunction).apply
_apply_block = super(torch.autograd.Function, BlockLinearFunction).apply
_apply_mixed = super(torch.autograd.Function, MixedLinearFunction).apply


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    recipe: str | AnyRecipe = "fp8",
    *,
    held: Held | None = None,
    history: Tensor | None = None,
) -> Tensor:
    """y [..., N] = x [..., K] w [N,K]^T + bias [N] with both operands quantized by `recipe`.

    x, w, bias: fp32, bf16 or fp16 in any mix, any sizes and strides, all on one device. y has
    the dtype of x, or autocast's where it is on; each gradient has its tensor's dtype. w is
    quantized from its own dtype (a master weight in fp32 is not rounded to bf16 first, but in FP4
    every operand is). Differentiable once. `held` is a weight that reuse_weights() already
    quantized. `history` is a layer's, where the recipe takes scales from the steps before; without
    one every tensor is measured, as in the first step.

    TypeError or ValueError for operands that do not fit; NotImplementedError where the device
    cannot run the recipe, with the reason.
    """
    if type(recipe) is not Recipe:
        recipe = recipes.get(recipe)
    compiling = torch.compiler.is_compiling()
    if compiling:  # what was found of devices changes; a compiled graph must not depend on it
        check_quantizable(x, "linear")
        support.require(recipe, x.device)
    else:
        plain = type(recipe) is Recipe and recipe.mix is None
        ready = support.ready if plain else support.ready_for(recipe)
        if getattr(x, "device", None) not in ready:
            check_quantizable(x, "linear")
            support.require(recipe, x.device)
    kind = "cuda" if x.is_cuda else "cpu"
    if torch.is_autocast_enabled(kind) and x.is_floating_point():
        x = x.to(torch.get_autocast_dtype(kind))
    if not isinstance(recipe, Recipe):  # one look on the way of small layers, which the host bounds
        if isinstance(recipe, FP4Recipe):
            return _linear_fp4(x, w, bias, recipe)
        if isinstance(recipe, BlockRecipe):
            return _linear_block(x, w, bias, recipe, held)
        return _linear_mixed(x, w, bias, recipe, held)
    if recipe.mix is not None:
        return _linear_mixed(x, w, bias, recipe, held)
    if history is not None and recipe.delayed is not None:
        return _linear_delayed(x, w, bias, recipe, history)
    if torch.is_grad_enabled():
        if compiling or torch._C._are_functorch_transforms_active():
            return LinearFunction.apply(x, w, bias, recipe, held)
        return _apply(x, w, bias, recipe, held)
    # A Function would not know that nothing is to be saved.
    rows = NOTHING if held is None else held.rows
    return ops.linear_forward(x, w, bias, rows.codes, rows.scale, recipe.forward_settings)[0]


def _linear_delayed(
    x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, history: Tensor
) -> Tensor:
    if not torch.is_grad_enabled():
        settings = recipe.forward_settings | recipe.history_settings
        return ops.delayed_linear_forward(x, w, bias, history, settings)[0]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return DelayedLinearFunction.apply(x, w, bias, recipe, history)
    return _apply_delayed(x, w, bias, recipe, history)


def _linear_fp4(x: Tensor, w: Tensor, bias: Tensor | None, recipe: FP4Recipe) -> Tensor:
    if not torch.is_grad_enabled():
        return ops.fp4_linear_forward(x, w, bias, recipe.settings)[0]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return FP4LinearFunction.apply(x, w, bias, recipe)
    return _apply_fp4(x, w, bias, recipe)


def _linear_block(
    x: Tensor, w: Tensor, bias: Tensor | None, recipe: BlockRecipe, held: Held | None
) -> Tensor:
    if not torch.is_grad_enabled():
        rows = NOTHING if held is None else held.rows
        held_rows = rows.codes, rows.block_scales
        return ops.block_linear_forward(x, w, bias, recipe.settings, *held_rows)[0]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return BlockLinearFunction.apply(x, w, bias, recipe, held)
    return _apply_block(x, w, bias, recipe, held)


def _linear_mixed(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    recipe: MixedRecipe | Recipe,
    held: Held | None,
) -> Tensor:
    if not torch.is_grad_enabled():
        rows = NOTHING if held is None else held.rows
        return run_forward(recipe.mix, x, w, bias, rows)[0]  # type: ignore[arg-type]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return MixedLinearFunction.apply(x, w, bias, recipe, held)
    return _apply_mixed(x, w, bias, recipe, held)


def matmul(a: Tensor, b: Tensor, recipe: str | AnyRecipe = "fp8") -> Tensor:
    """a [..., M,K] b [K,N] -> [..., M,N], as torch.matmul, both operands quantized by `recipe`.

    a may have one dimension or more, b has two (a batch of b is refused: quantize a loop over
    it). Dtypes, gradients and errors as for linear().
    """
    check_quantizable(a, "matmul")
    check_quantizable(b, "matmul")
    if b.dim() != 2:
        raise ValueError(
            f"matmul: expected b [K,N], got {tuple(b.shape)} "
            "(a batched or one-dimensional b is not quantized; call matmul on each b [K,N])"
        )
    if a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"matmul: expected a [..., K] and b [K,N] with one K, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )
    return linear(a, b.t(), None, recipe)
