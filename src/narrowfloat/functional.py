"""Functions without a module around them: FP8 and FP4 matmuls, each gradient alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops, recipe, support
from .autograd import LinearFunction, linear, matmul
from .formats import GROUP
from .quantized import FP4Tensor, quantize
from .reference.tensor import (
    SCALE,
    check_linear,
    check_matmul,
    check_quantizable,
    check_same_device,
    check_scaled_mm,
    check_tensor,
    own,
)
from .spec import DW, NEED_DX, both, gradients

_FP8, _NVFP4 = recipe.FP8, recipe.NVFP4


def _operands(a: Tensor, b: Tensor, who: str) -> Tensor:
    for name, q in (("a", a), ("b", b)):
        check_tensor(q, who, name)
        if q.dtype != torch.float8_e4m3fn:
            raise TypeError(
                f"{who}: expected {name} in float8_e4m3fn, already scaled, got {q.dtype} "
                "(narrowfloat.quantize gives one; narrowfloat.linear takes unquantized operands)"
            )
    one = torch.ones((), dtype=torch.float32, device=a.device)
    check_scaled_mm(a, b, one, one, who)
    support.require(_FP8, a.device)
    return one


def fp8_mm(a: Tensor, b: Tensor) -> Tensor:
    """a [M,K], b [N,K], both E4M3 and already scaled -> bf16 [M,N] = a b^T, row-major.

    One GEMM that writes row-major: no transposing kernel. Not differentiable. TypeError for other
    dtypes, ValueError for shapes or devices that do not fit.
    """
    one = _operands(a, b, "fp8_mm")
    return ops.scaled_mm(a, b, one, one, who="fp8_mm")


def fp8_mm_view(a: Tensor, b: Tensor) -> Tensor:
    """fp8_mm's product, bf16, as [M,N] with strides (1, M), column-major as cuBLAS lays it out,
    without a copy: for measuring what a transpose costs. Not differentiable. Errors as for
    fp8_mm()."""
    one = _operands(a, b, "fp8_mm_view")
    return ops.scaled_mm(b, a, one, one, who="fp8_mm_view").t()


def fp8_linear_forward(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], w [N,K], optional bias [N] -> [..., N] in x's dtype, in one call: quantize x and
    w to E4M3, multiply, add the bias. Not differentiable: see narrowfloat.linear, whose errors are
    the same."""
    with torch.no_grad():
        return linear(x, w, bias, _FP8)


def fp8_linear_backward(
    g: Tensor, x: Tensor, w: Tensor, masks: tuple[bool, bool, bool] = (True, True, True)
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(grad_input [..., K], grad_weight [N,K], grad_bias [N]) for g [..., N], x [..., K], w [N,K].

    Each only where its mask asks, else None; all in x's dtype. g is quantized to E5M2. TypeError or
    ValueError for operands that do not fit.
    """
    check_linear(x, w, None, "fp8_linear_backward")
    check_quantizable(g, "fp8_linear_backward", "g")
    if g.shape != (*x.shape[:-1], w.shape[0]):
        raise ValueError(
            f"fp8_linear_backward: expected g {(*x.shape[:-1], w.shape[0])} for x "
            f"{tuple(x.shape)} and w {tuple(w.shape)}, got {tuple(g.shape)}"
        )
    if not isinstance(masks, Sequence) or len(masks) != 3:
        raise ValueError(f"fp8_linear_backward: expected three masks, got {masks!r}")
    if g.device != x.device:
        raise ValueError(
            f"fp8_linear_backward: expected g on {x.device} as x is, got {g.device} (move it there)"
        )
    support.require(_FP8, x.device)
    (need_dx, need_dw, need_db), asked = gradients(masks, x.dtype, x)
    x_columns = x_scale = None
    with torch.no_grad():
        if need_dw:
            x_columns, _, x_scale = _columns(x, _FP8)
        dx, dw, db = ops.linear_backward(
            g.to(x.dtype), x_columns, None, None, w if need_dx else None, None, w.shape[1],
            _FP8.backward_spec | asked, x_scale,
        )  # fmt: skip
    return (dx if need_dx else None, dw if need_dw else None, db if need_db else None)


def _columns(x: Tensor, of: recipe.Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales of blocks, scale of the tensor) of x as wgrad has it."""
    spec = both(None, of.wgrad.casts[1]).pack()
    _, _, codes, scales, tensor_scales = ops.quantize_op(x, spec)
    return codes, scales, tensor_scales[SCALE:]


def fp4_quantize(x: Tensor) -> FP4Tensor:
    """x (fp32, bf16 or fp16, [..., K]) to E2M1 in nvfp4: packed codes, block scales and a scale of
    the tensor. As quantize(x, "nvfp4"), which has more formats and options, and the same errors. No
    gradient: see FP4QuantizeFunction."""
    return quantize(x, "nvfp4")


def fp4_dequantize(q: FP4Tensor) -> Tensor:
    """The values [..., K] of q, of the shape and in the dtype that were quantized. TypeError for
    anything but an FP4Tensor."""
    if not isinstance(q, FP4Tensor):
        raise TypeError(
            f"fp4_dequantize: expected q to be an FP4Tensor, got {type(q).__name__} "
            "(narrowfloat.fp4_quantize gives one)"
        )
    return q.dequantize()


def fp4_matmul(A: Tensor, B: Tensor) -> Tensor:
    """A [..., M,K] B [K,N] -> [..., M,N] in nvfp4; raw operands (fp32, bf16 or fp16), quantized
    inside. Differentiable, as matmul(A, B, "nvfp4"), which takes other recipes too; errors as for
    matmul()."""
    check_matmul(A, B, "fp4_matmul", ("A", "B"))
    return matmul(A, B, _NVFP4)


def fp4_matmul_backward_A(grad: Tensor, B: Tensor) -> Tensor:
    """grad [..., M,N] B^T, for B [K,N] -> [..., M,K] in grad's dtype: the gradient of A. grad is
    rounded stochastically, B in blocks of 16 x 16. TypeError or ValueError for operands that do not
    fit."""
    who = "fp4_matmul_backward_A"
    _check_gradient(grad, B, "B", who)
    if B.dim() != 2 or grad.shape[-1] != B.shape[1]:
        raise ValueError(
            f"{who}: expected grad [..., M,N] and B [K,N] with one N, got {tuple(grad.shape)} and "
            f"{tuple(B.shape)}"
        )
    with torch.no_grad():
        seed = ops.draw_seed(grad.device)
        spec = _NVFP4.backward_spec | NEED_DX
        return ops.linear_backward(grad, None, None, None, B.t(), seed, B.shape[0], spec)[0]


def fp4_matmul_backward_B(A: Tensor, grad: Tensor) -> Tensor:
    """A^T grad, for A [..., M,K] and grad [..., M,N] -> [K,N] in A's dtype: the gradient of B. Both
    are rotated along the contraction, grad is rounded stochastically. TypeError or ValueError for
    operands that do not fit."""
    who = "fp4_matmul_backward_B"
    _check_gradient(grad, A, "A", who)
    if grad.shape[:-1] != A.shape[:-1]:
        raise ValueError(
            f"{who}: expected A [..., M,K] and grad [..., M,N] with one [..., M], got "
            f"{tuple(A.shape)} and {tuple(grad.shape)}"
        )
    with torch.no_grad():
        columns, scales, scale = _columns(A, _NVFP4)
        seed = ops.draw_seed(grad.device)
        spec = _NVFP4.backward_spec | DW[A.dtype]
        _, dw, _ = ops.linear_backward(
            grad, columns, scales, None, None, seed, A.shape[-1], spec, scale
        )
    return dw.t()


def _check_gradient(grad: Tensor, other: Tensor, name: str, who: str) -> None:
    check_quantizable(grad, who, "grad")
    check_quantizable(other, who, name)
    if other.device != grad.device:
        raise ValueError(
            f"{who}: expected {name} on {grad.device} as grad is, got {other.device} "
            "(move it there)"
        )
    support.require(_NVFP4, grad.device)


class FP4MatMulFunction(torch.autograd.Function):
    """A [..., M,K] B [K,N] -> [..., M,N] in nvfp4, with both gradients: apply(A, B), fp32, bf16 or
    fp16. Errors as for matmul()."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor) -> Tensor:
        check_matmul(A, B, "FP4MatMulFunction", ("A", "B"))
        support.require(_NVFP4, A.device)
        return LinearFunction.forward(ctx, A, B.t(), None, _NVFP4)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, *_ = LinearFunction.backward(ctx, dy)
        return dx, None if dw is None else dw.t()


class FP4QuantizeFunction(torch.autograd.Function):
    """x [..., K] -> (grid values in x's dtype and shape, scales in fp32 of the same shape):
    apply(x). Their product is x rounded to nvfp4. The gradient of the grid values passes
    to x unchanged. Errors as for quantize()."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        q = quantize(x, "nvfp4")
        scales = q.scales.float() * q.scale  # [..., ceil(K / 16)]
        scales = own(scales.repeat_interleave(GROUP, -1)[..., : q.width], x.shape)
        codes = q._replace(scales=torch.ones_like(q.scales), scale=torch.ones_like(q.scale))
        ctx.mark_non_differentiable(scales)
        return own(codes.dequantize(), x.shape), scales

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return grad


class FP4DequantizeFunction(torch.autograd.Function):
    """(grid values, scales), both [..., K], as FP4QuantizeFunction gives them -> their product in
    the dtype of the values: apply(values, scales). The gradient passes to the values unchanged.
    TypeError or ValueError for two that do not fit."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scales: Tensor) -> Tensor:
        who = "FP4DequantizeFunction"
        check_quantizable(values, who, "values")
        check_tensor(scales, who, "scales")
        if scales.dtype != torch.float32:
            raise ValueError(
                f"{who}: expected scales in torch.float32, got {scales.dtype} "
                "(FP4QuantizeFunction gives them, a block's scale times the tensor's)"
            )
        check_same_device(values, who, "values", scales=scales)
        if values.shape != scales.shape:
            raise ValueError(
                f"{who}: expected values and scales of one shape, got "
                f"{tuple(values.shape)} and {tuple(scales.shape)}"
            )
        return (values.float() * scales).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
