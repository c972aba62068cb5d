"""A linear layer's gradients: what is saved for the backward, and which operator is called."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import functional_op, ops, shared_input, support, tensor_kinds
from . import recipe as recipes
from .recipe import Recipe
from .reference.linear import Quantized
from .reference.tensor import check_matmul, check_quantizable
from .shared_input import Reader, SharedInput
from .spec import BACKWARD_JOINS, FORWARD_JOINS, W_MEASURED, Y_DTYPE, gradients
from .weight_cache import CachedWeight

# Compiled, x is quantized by an operator of its own: what several layers do to one x is then one
# node, whose results are saved once, since compilers find common subexpressions.
IN_GRAPH: Any = "in the graph"


class LinearFunction(torch.autograd.Function):
    """y [..., N] = x [..., K] w [N,K]^T + bias [N] as a recipe says, and its three gradients.

    apply(x, w, bias, recipe, state, shared): state is a weight that reuse_weights() quantized, or a
    layer's amax history for a recipe with delayed scaling, which the calls change, forward and
    backward; or None. shared: x that was quantized for several layers, and the bits of
    y's dtype where it is not x's, or None; or IN_GRAPH, for an operator of its own in a graph.

    Saved for dw: x's columns [K, M] as wgrad has them, with their scales; x itself where wgrad has
    it in bf16. Saved for dx: w itself, which costs nothing, and what the forward measured of it; or
    the cached weight's columns. Nothing is saved for a gradient that nobody needs. Each backward
    draws one seed where dy is rounded stochastically. Errors as for linear().
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        state: CachedWeight | Tensor | None = None,
        shared: tuple[SharedInput, int] | None = None,
    ) -> Tensor:
        needs, asked = gradients(ctx.needs_input_grad, w.dtype, bias)
        need_dx, need_dw, _ = needs
        spec, keep_w = recipe.forward_spec, recipe.keep_w if need_dx else 0
        x_given = x_scale = history = None
        if shared is IN_GRAPH:
            shared = (shared_input.quantized(x, recipe, need_dw), 0)
        if shared is not None:
            x_given = shared[0].rows
            spec |= shared[1]
        elif need_dw:
            spec |= recipe.save_x
        columns: tuple[Tensor | None, ...] = ()
        if state is None and x_given is None:
            y, x_columns, x_scales, scales = ops.linear_forward(x, w, bias, spec | keep_w)
        elif isinstance(state, Tensor):
            history = state  # other calls change it meanwhile
            spec |= keep_w | (FORWARD_JOINS if asked else 0)  # evaluation leaves no trace
            asked |= BACKWARD_JOINS if asked else 0
            y, x_columns, x_scales, scales = ops.delayed_linear_forward(x, w, bias, state, spec)
        else:
            if state is not None and need_dx and state.columns is not None:
                columns, keep_w = state.columns, 0
            given = operands_given(x_given, state)
            y, x_columns, x_scales, scales = ops.linear_forward(x, w, bias, spec | keep_w, *given)
        if not need_dw:
            x_columns = x_scales = None
        elif not recipe.save_x:
            x_columns, x_scales = x, None
        elif shared is not None:
            x_columns, x_scales, x_scale = shared[0].columns
        elif not recipe.saves_x_scales:
            x_scales = None
        has_scales = keep_w or (need_dw and recipe.saves_x_scale and shared is None)
        ctx.save_for_backward(
            x_columns,
            x_scales,
            scales if has_scales else None,
            w if need_dx and not columns else None,
            *(columns if x_scale is None else (x_scale, *columns)),
        )
        draws = (need_dx and recipe.draws_dx) or (need_dw and recipe.draws_dw)
        spec = recipe.backward_spec | asked | (W_MEASURED if keep_w else 0)
        # what is no tensor, in one attribute: host time
        ctx.call = needs, spec, w.shape[1], draws, x_scale is not None, history
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ops.refuse_double_backward()
        saved, (needs, spec, k, draws, has_x_scale, history) = ctx.saved_tensors, ctx.call
        if history is not None:
            x_columns, _, scales, w = saved
            grads = ops.delayed_linear_backward(dy, x_columns, scales, w, history, k, spec)
        else:
            seed = ops.draw_seed(dy.device) if draws else None
            if len(saved) == 4:
                grads = ops.linear_backward(dy, *saved, seed, k, spec)
            else:
                more = saved[4:] if has_x_scale else (None, *saved[4:])
                grads = ops.linear_backward(dy, *saved[:4], seed, k, spec, *more)
        need_dx, need_dw, need_db = needs
        return (
            grads[0] if need_dx else None,
            grads[1] if need_dw else None,
            grads[2] if need_db else None,
            None,
            None,
            None,
        )


def operands_given(x: Quantized | None, w: CachedWeight | None) -> tuple[Tensor | None, ...]:
    """What linear_forward takes after its spec."""
    if x is None:
        return () if w is None else w.rows_arguments
    return x if w is None or w.rows is None else (*x, *w.rows)


# What each kind of recipe had when it had a Function of its own.
DelayedLinearFunction = FP4LinearFunction = LinearFunction
BlockLinearFunction = MixedLinearFunction = LinearFunction

# What Function.apply calls once it has looked for functorch's transforms; the look alone is 3 of
# the 8 us that an empty function costs (benchmarks/results/cpu).
_apply = super(torch.autograd.Function, LinearFunction).apply


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "fp8",
    *,
    cached: CachedWeight | None = None,
    history: Tensor | None = None,
    layer: Reader | None = None,
) -> Tensor:
    """y [..., N] = x [..., K] w [N,K]^T + bias [N] with both operands quantized by `recipe`.

    x, w, bias: fp32, bf16 or fp16 in any mix, any sizes and strides, all on one device. y has
    the dtype of x, or autocast's where it is on; each gradient has its tensor's dtype. w is
    quantized from its own dtype (a master weight in fp32 is not rounded to bf16 first, but in FP4
    every operand is). Differentiable once, in reverse mode. `cached` is a weight that
    reuse_weights() already quantized. `history` is a layer's amax history, for a recipe with
    delayed scaling; without one every tensor is measured, as in the first step. `layer` is whose
    call this is: an x that several layers read is quantized once (shared_input).

    A jagged nested tensor x [B, j, ..., K] is taken as its rows, and y is nested alike; a scale is
    that of all of them.

    TypeError or ValueError for operands that do not fit; NotImplementedError where the device
    cannot run the recipe, with the reason, in forward mode, and for sparse, sharded (DTensor) and
    other tensors that are no plain ones.
    """
    if type(recipe) is not Recipe:
        recipe = recipes.get(recipe)
    if type(x) is not Tensor:
        found = _of_another_kind(x, w, bias, recipe, cached, history)
        if found is not None:
            return found
    compiling = torch.compiler.is_compiling()
    # what was found of devices changes; a compiled graph must not depend on it
    if compiling or getattr(x, "device", None) not in support.ready(recipe.kinds):
        check_quantizable(x, "linear")
        support.require(recipe, x.device)
    kind, dtype, casts = "cuda" if x.is_cuda else "cpu", x.dtype, False
    if torch.is_autocast_enabled(kind) and x.is_floating_point():
        dtype = torch.get_autocast_dtype(kind)
        casts = dtype != x.dtype
    state = cached if history is None or recipe.delayed is None else history
    if compiling:  # what Dynamo sees of a Function has no forward mode to refuse
        as_operator = functional_op.is_asked_for()
    else:
        as_operator = _transformed(x, w, bias)
    if as_operator:
        return functional_op.call(x.to(dtype) if casts else x, w, bias, recipe, state)
    grads, shared = torch.is_grad_enabled(), None
    # a GEMM that reads x itself needs it cast
    if layer is not None and not compiling and not (casts and recipe.reads_x):
        shared = shared_input.take(x, recipe, dtype, layer, grads and w.requires_grad)
    if casts and shared is None:
        x = x.to(dtype)
    if compiling and recipe.x_spec:
        if grads:
            return LinearFunction.apply(x, w, bias, recipe, state, IN_GRAPH)
        shared = shared_input.quantized(x, recipe, False)
    y_dtype = Y_DTYPE[dtype] if casts and shared is not None and not compiling else 0
    if grads:
        apply = LinearFunction.apply if compiling else _apply
        return apply(x, w, bias, recipe, state, None if shared is None else (shared, y_dtype))
    # A Function would not know that nothing is to be saved.
    if isinstance(state, Tensor):
        return ops.delayed_linear_forward(x, w, bias, state, recipe.forward_spec)[0]
    given = operands_given(None if shared is None else shared.rows, state)
    return ops.linear_forward(x, w, bias, recipe.forward_spec | y_dtype, *given)[0]


def _of_another_kind(
    x: Any,
    w: Any,
    bias: Any,
    recipe: Recipe,
    cached: CachedWeight | None,
    history: Tensor | None,
) -> Tensor | None:
    """linear() of a torch.fx proxy or of a jagged nested tensor; None for whatever is as a plain
    tensor to the operators, or refused by them."""
    if tensor_kinds.is_proxy(x):
        if history is not None:
            raise NotImplementedError(
                f"narrowfloat.linear: expected a recipe with current scaling where a layer's own "
                f"forward is traced by torch.fx, got {recipe} (its amax history is no part of a "
                "graph; trace a model around the layer, without hooks on it, or use 'fp8')"
            )
        return tensor_kinds.call_of(linear, x, w, bias, recipe=recipe)
    if tensor_kinds.is_jagged(x):
        rows = partial(linear, w=w, bias=bias, recipe=recipe, cached=cached, history=history)
        return tensor_kinds.of_values(x, rows, "linear")
    return None


def _transformed(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Whether a transform of functorch is at work; NotImplementedError in forward mode, which is
    refused here since an operator without a formula would drop the tangents."""
    if forward_ad._current_level >= 0 and any(map(functional_op.has_tangent, (x, w, bias))):
        functional_op.refuse_forward_mode()
    return torch._C._are_functorch_transforms_active()


def matmul(a: Tensor, b: Tensor, recipe: str | Recipe = "fp8") -> Tensor:
    """a [..., M,K] b [K,N] -> [..., M,N], as torch.matmul, both operands quantized by `recipe`.

    a may have one dimension or more, b has two (a batch of b is refused: quantize a loop over
    it). Dtypes, gradients and errors as for linear().
    """
    if tensor_kinds.is_proxy(a) or tensor_kinds.is_proxy(b):
        named = recipes.get(recipe)
        return tensor_kinds.call_of(matmul, a, b, recipe=named)
    check_quantizable(a, "matmul", "a")
    check_quantizable(b, "matmul", "b")
    if (a.is_nested and not tensor_kinds.is_jagged(a)) or b.is_nested:
        ops.refuse_other_kinds("matmul", {"b": b} if b.is_nested else {"a": a})
    check_matmul(a, b, "matmul")
    return linear(a, b.t(), None, recipe)
