"""The four functions the project was started from: FP8 products without a module around them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats, ops, recipe, support
from .autograd import linear
from .reference import check_linear, check_quantizable
from .settings import Backward

_FP8 = recipe.RECIPES["fp8"]


def _operands(a: Tensor, b: Tensor, who: str) -> Tensor:
    for name, q in (("a", a), ("b", b)):
        if q.dtype != torch.float8_e4m3fn:
            raise TypeError(
                f"{who}: expected {name} in float8_e4m3fn, already scaled, got {q.dtype} "
                "(narrowfloat.quantize gives one; narrowfloat.linear takes unquantized operands)"
            )
    support.require(_FP8, a.device)
    return torch.ones((), dtype=torch.float32, device=a.device)


def fp8_mm(a: Tensor, b: Tensor) -> Tensor:
    """a [M,K], b [N,K], both E4M3 and already scaled -> bf16 [M,N] = a b^T, row-major.

    One GEMM that writes row-major: no transposing kernel. Not differentiable.
    """
    one = _operands(a, b, "fp8_mm")
    return ops.scaled_mm(a, b, one, one, who="fp8_mm")


def fp8_mm_view(a: Tensor, b: Tensor) -> Tensor:
    """fp8_mm's product as [M,N] with strides (1, M), column-major as cuBLAS lays it out, without
    a copy: for measuring what a transpose costs. Not differentiable."""
    one = _operands(a, b, "fp8_mm_view")
    return ops.scaled_mm(b, a, one, one, who="fp8_mm_view").t()


def fp8_linear_forward(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], w [N,K], optional bias [N] -> [..., N] in x's dtype, in one call: quantize x and
    w to E4M3, multiply, add the bias. Not differentiable: see narrowfloat.linear."""
    with torch.no_grad():
        return linear(x, w, bias, _FP8)


def fp8_linear_backward(
    g: Tensor, x: Tensor, w: Tensor, masks: tuple[bool, bool, bool] = (True, True, True)
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(grad_input [..., K], grad_weight [N,K], grad_bias [N]) for g [..., N], x [..., K], w [N,K].

    Each only where its mask asks, else None; all in x's dtype. g is quantized to E5M2.
    """
    check_linear(x, w, None, "fp8_linear_backward")
    if g.shape != (*x.shape[:-1], w.shape[0]):
        raise ValueError(
            f"fp8_linear_backward: expected g {(*x.shape[:-1], w.shape[0])} for x "
            f"{tuple(x.shape)} and w {tuple(w.shape)}, got {tuple(g.shape)}"
        )
    if len(masks) != 3:
        raise ValueError(f"fp8_linear_backward: expected three masks, got {len(masks)}")
    check_quantizable(g, "fp8_linear_backward", "g")
    if g.device != x.device:
        raise ValueError(
            f"fp8_linear_backward: expected g on {x.device} as x is, got {g.device} (move it there)"
        )
    support.require(_FP8, x.device)
    need_dx, need_dw, need_db = masks
    x_columns = x_scale = None
    wanted = Backward.unpack(_FP8.backward_settings)._replace(
        need_dx=need_dx,
        dw_dtype=x.dtype if need_dw else None,
        db_dtype=x.dtype if need_db else None,
    )
    with torch.no_grad():
        if need_dw:
            _, x_columns, x_scale = ops.quantize_op(
                x, formats.FORMATS[_FP8.wgrad.b].code, False, True
            )
        dx, dw, db = ops.linear_backward(
            g.to(x.dtype),
            x_columns,
            x_scale,
            w if need_dx else None,
            None,
            None,
            w.shape[1],
            wanted.pack(),
        )
    return (dx if need_dx else None, dw if need_dw else None, db if need_db else None)
