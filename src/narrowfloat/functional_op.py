"""The linear layer as one operator with a registered derivative, for what does not see Functions:
torch.export, the pipeline tracer, functorch's transforms.

Eager calls go past it: a registered formula takes a bare call from 4.1 to 7.9 us (a CPU).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from . import ops
from .recipe import Recipe
from .reference.linear import scales_layout
from .reference.tensor import check_quantizable
from .spec import DB, DW, NEED_DX, SAVE_X, W_MEASURED, Backward
from .weight_cache import CachedWeight

_library = torch.library.Library("narrowfloat", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_library.define(
    "linear(Tensor x, Tensor w, Tensor? bias, int forward_spec, int backward_spec, bool draws)"
    " -> (Tensor y, Tensor x_columns, Tensor x_columns_scales, Tensor scales)",
    tags=_TAGS,
)
_library.define(
    "linear_gradients(Tensor dy, Tensor? x_columns, Tensor? x_columns_scales, Tensor scales,"
    " Tensor w, Tensor? seed, int in_features, int spec) -> (Tensor dx, Tensor dw, Tensor db)",
    tags=_TAGS,
)


# x's block scales travel from the one to the other with one dimension. As [ceil(M / 128), K] they
# would hold whoever traces few tokens to few: how they lie in memory depends on whether there is
# one such row.


@torch.library.impl(_library, "linear", "CompositeExplicitAutograd")
def _linear(
    x: Tensor, w: Tensor, bias: Tensor | None, forward_spec: int, backward_spec: int, draws: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, x_columns, x_columns_scales, scales = ops.linear_forward(x, w, bias, forward_spec)
    return y, x_columns, x_columns_scales.view(-1), scales


@torch.library.impl(_library, "linear_gradients", "CompositeExplicitAutograd")
def _linear_gradients(
    dy: Tensor, x_columns: Tensor | None, x_columns_scales: Tensor | None, scales: Tensor,
    w: Tensor, seed: Tensor | None, in_features: int, spec: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_quantizable(dy, "linear_gradients", "dy")
    if x_columns_scales is not None:
        shape, _ = scales_layout(Backward.unpack(spec).wgrad_b, in_features, ops.rows_of(dy))
        if x_columns_scales.numel() == math.prod(shape):  # else the operator refuses them
            x_columns_scales = x_columns_scales.view(shape)
    return ops.linear_backward(dy, x_columns, x_columns_scales, scales, w, seed, in_features, spec)


@torch.library.register_fake("narrowfloat::linear")
def _fake_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, forward_spec: int, backward_spec: int, draws: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return ops.fake_forward(x, w, bias, forward_spec, flat_scales=True)


@torch.library.register_fake("narrowfloat::linear_gradients")
def _fake_linear_gradients(
    dy: Tensor, x_columns: Tensor | None, x_columns_scales: Tensor | None, scales: Tensor,
    w: Tensor, seed: Tensor | None, in_features: int, spec: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return ops._linear_backward(dy, None, None, None, None, None, in_features, spec)


def has_tangent(t: Tensor | None) -> bool:
    """Whether forward mode is at work on t."""
    if forward_ad._current_level < 0 or t is None:
        return False
    return forward_ad.unpack_dual(t).tangent is not None


# Compiled, a Function's gradients under torch.func.grad are zeros on torch 2.11, right on 2.15.
_COMPILES_GRAD = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 15)


@torch.compiler.assume_constant_result  # Dynamo guards the transforms themselves
def is_asked_for() -> bool:
    """Whether whoever compiles needs the operator: torch.export, or forward mode, which refuses it.
    A function of its own: up to torch 2.11 Dynamo takes is_exporting() itself for True."""
    kinds = torch._C._functorch.TransformType
    stack = [i.key() for i in torch._C._functorch.get_interpreter_stack() or []]
    if kinds.Grad in stack and not _COMPILES_GRAD:
        raise NotImplementedError(
            f"narrowfloat.linear: expected torch 2.15 or newer for torch.func.grad under "
            f"torch.compile, got {torch.__version__} (compile without the transform, or transform "
            "without compiling)"
        )
    return torch.compiler.is_exporting() or kinds.Jvp in stack


def refuse_forward_mode(*_: Any) -> Any:
    raise NotImplementedError(
        "narrowfloat.linear: expected operands without tangents, got a dual tensor (quantized "
        "layers have no forward mode; use reverse mode, or nn.Linear for jvp)"
    )


def _refuse_vmap(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "narrowfloat.linear: expected no vmap over a quantized layer, got one (a scale would be "
        "shared by the whole batch: give linear() the batch as leading dimensions, or loop)"
    )


class _Below(NamedTuple):
    """How to call the operator without its derivative: the transforms around it, where there are
    any, go on as they are."""

    keys: Any
    grad: bool
    forward_grad: bool

    def __call__(self, name: str, *arguments: Any) -> tuple[Tensor, ...]:
        op = getattr(torch.ops.narrowfloat, name).default
        modes = torch.set_grad_enabled(self.grad), _set_fwd_grad_enabled(self.forward_grad)
        with modes[0], modes[1], torch._C._AutoDispatchBelowAutograd():
            keys = self.keys & torch._C._after_autograd_keyset
            found: tuple[Tensor, ...] = op.redispatch(keys, *arguments)
        return found


class _Linear(_SingleLevelFunction):
    """The derivative of the operator linear."""

    jvp = staticmethod(refuse_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(below: _Below, *arguments: Any) -> tuple[Tensor, ...]:
        return below("linear", *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, x, w, bias, forward_spec, backward_spec, draws = inputs
        _, columns, columns_scales, scales = output
        ctx.mark_non_differentiable(*output[1:])
        x_saved = (columns, columns_scales) if forward_spec & SAVE_X else (x, None)
        ctx.save_for_backward(*x_saved, scales, w)
        ctx.spec, ctx.draws, ctx.in_features = backward_spec, draws, w.shape[1]
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        x_columns, x_scales, scales, w = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:4]
        need_dx, need_dw, need_db = needs
        spec = ctx.spec | (NEED_DX if need_dx else 0) | (DW[w.dtype] if need_dw else 0)
        if need_db and ctx.bias_dtype is not None:
            spec |= DB[ctx.bias_dtype]
        if torch._C._functorch.is_batchedtensor(dy):
            _refuse_vmap()  # before a seed is drawn, which vmap refuses in its own words
        seed = ops.draw_seed(dy.device) if ctx.draws and (need_dx or need_dw) else None
        if not need_dw:
            x_columns = x_scales = None
        grads = torch.ops.narrowfloat.linear_gradients(
            dy, x_columns, x_scales, scales, w, seed, ctx.in_features, spec
        )
        needed = (g if need else None for g, need in zip(grads, needs, strict=True))
        return (None, *needed, None, None, None)


class _LinearGradients(_SingleLevelFunction):
    """That the operator linear_gradients has none."""

    jvp = staticmethod(refuse_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(below: _Below, *arguments: Any) -> tuple[Tensor, ...]:
        return below("linear_gradients", *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(
            "linear: expected to be differentiated once, got a gradient of its gradients "
            "(a quantized layer has no double backward)"
        )


# Not register_autograd(): what that makes drops tangents where gradients are off, and functorch
# refuses it. Below functorch's transforms, where an operator's kernel is called, each level is one
# of autograd's own.
def _kernel(function: type[_SingleLevelFunction]) -> Callable[..., Any]:
    def call_function(keys: Any, *arguments: Any) -> Any:
        below = _Below(keys, torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled())
        with enable_single_level_autograd_function():
            return function.apply(below, *arguments)  # type: ignore[attr-defined]

    return call_function


_FUNCTIONS = {"linear": _Linear, "linear_gradients": _LinearGradients}
for _name, _function in _FUNCTIONS.items():
    _library.impl(_name, _kernel(_function), "Autograd", with_keyset=True)
for _name in (*_FUNCTIONS, *ops.SCHEMAS):
    torch.library.register_vmap(f"narrowfloat::{_name}", _refuse_vmap)


@torch.compiler.assume_constant_result  # Dynamo would hide the text of what is raised in a trace
def _refuse_history(name: str) -> None:
    raise NotImplementedError(
        f"narrowfloat.linear: expected a recipe with current scaling where a layer is exported or "
        f"transformed with gradients, got {name} (its amax history changes in place; use 'fp8', or "
        "export under torch.no_grad())"
    )


def call(
    x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, state: CachedWeight | Tensor | None
) -> Tensor:
    """y, with gradients where they are on. A cached weight is not looked at: whoever traces keeps
    the weight itself. NotImplementedError for delayed scaling with gradients."""
    graded = torch.is_grad_enabled()
    if isinstance(state, Tensor):
        if graded:
            _refuse_history(recipe.name)
        return ops.delayed_linear_forward(x, w, bias, state, recipe.forward_spec)[0]
    forward, backward = recipe.forward_spec, recipe.backward_spec
    if graded:  # who will ask for which gradient is not known yet
        forward |= recipe.save_x | recipe.keep_w
        backward |= W_MEASURED if recipe.keep_w else 0
    draws = recipe.draws_dx or recipe.draws_dw
    return torch.ops.narrowfloat.linear(x, w, bias, forward, backward, draws)[0]
