"""Which of the operators are GEMMs, for who counts FLOPs or chooses what a checkpoint saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from . import functional_op as functional_op  # defines linear and linear_gradients
from . import w4a16 as w4a16  # defines fp4_weight_matmul
from .spec import Backward

_ops = torch.ops.narrowfloat
_Shape = Sequence[int]


def _of_forward(x: _Shape | None, w: _Shape | None, *rest: Any, out_shape: Any, **_: Any) -> int:
    """y's elements times K: of x, of w, or what a call without both says."""
    k = x[-1] if x is not None else w[-1] if w is not None else rest[-1]
    return 2 * math.prod(out_shape[0]) * k


def _of_backward(dy: _Shape, in_features: int, spec: int) -> int:
    asked = Backward.unpack(spec)
    gemms = int(asked.need_dx) + (asked.dw_dtype is not None)
    return 2 * math.prod(dy) * in_features * gemms


def _linear_backward(*arguments: Any, **_: Any) -> int:
    return _of_backward(arguments[0], *arguments[6:8])


def _delayed_linear_backward(*arguments: Any, **_: Any) -> int:
    return _of_backward(arguments[0], *arguments[5:7])


def _scaled_mm(a: _Shape, b: _Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a) * b[0]


def _scaled_mm_accumulate_(out: _Shape, a: _Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(out) * a[1]


def _fp4_weight_matmul(x: _Shape, *rest: Any, **_: Any) -> int:
    return 2 * math.prod(x) * rest[3]


# As nn.Linear's are counted: 2 M N K a GEMM, and nothing for quantizing and biases.
_FORMULAS: dict[str, Callable[..., int]] = {
    "linear_forward": _of_forward,
    "linear_backward": _linear_backward,
    "delayed_linear_forward": _of_forward,
    "delayed_linear_backward": _delayed_linear_backward,
    "linear": _of_forward,
    "linear_gradients": _linear_backward,
    "scaled_mm": _scaled_mm,
    "scaled_mm_accumulate_": _scaled_mm_accumulate_,
    "fp4_weight_matmul": _fp4_weight_matmul,
}
for _name, _formula in _FORMULAS.items():
    if getattr(_ops, _name) not in flop_registry:  # a module that is reloaded
        register_flop_formula(getattr(_ops, _name))(_formula)

# Every operator that multiplies, torch.ops.narrowfloat.linear_forward.default and so on, as
# torch.utils.checkpoint's policies name operators.
GEMM_OPS: frozenset[Any] = frozenset(getattr(_ops, name).default for name in _FORMULAS)
