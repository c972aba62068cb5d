"""The operators: their schemas, fakes, and what is typed against them.

A schema is the signature of the function of its name in reference/, which is the CPU's kernel; the
CUDA kernels register from csrc/api/ops.cpp. A fake has the same signature too (a test compares).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import Parameter

from . import _binary, recipe, support
from . import spec as specs
from .formats import HIGH_PRECISION, padded, padded32
from .reference import linear, tensor
from .reference.linear import codes_layout, has_tensor_scale, scales_layout
from .reference.tensor import SCALE, check_linear

_library = torch.library.Library("narrowfloat", "DEF")

# each with the arguments that it changes
_KERNELS: dict[Callable[..., Any], set[str]] = {
    linear.quantize: set(),
    tensor.scaled_mm: set(),
    tensor.scaled_mm_accumulate_: {"out"},
    linear.linear_forward: set(),
    linear.linear_backward: set(),
    linear.delayed_linear_forward: {"history"},
    linear.delayed_linear_backward: {"history"},
}
SCHEMAS: dict[str, str] = {}


_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "int",
    "bool": "bool",
    "torch.dtype": "ScalarType",
    "None": "()",
}


def schema_of(kernel: Callable[..., Any], changed: set[str]) -> str:
    """The schema that a function's signature is. changed: the arguments that it changes."""
    signature = inspect.signature(kernel)
    arguments = []
    for name, parameter in signature.parameters.items():
        kind = "Tensor(a!)" if name in changed else _TYPES[parameter.annotation]
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        arguments.append(f"{kind} {name}{default}")
    returned = signature.return_annotation
    if returned.startswith("tuple"):
        of_each = returned.removeprefix("tuple[").removesuffix("]").split(", ")
        result = f"({', '.join(_TYPES[one] for one in of_each)})"
    else:
        result = _TYPES[returned]
    return f"{kernel.__name__}({', '.join(arguments)}) -> {result}"


for _kernel, _changed in _KERNELS.items():
    SCHEMAS[_kernel.__name__] = schema_of(_kernel, _changed)
    _library.define(
        SCHEMAS[_kernel.__name__],
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
    )
    _library.impl(_kernel.__name__, _kernel, "CPU")


def _no_binary(*_: object) -> None:
    raise NotImplementedError(_binary.problem)


if _binary.problem is not None:  # a CUDA tensor gets the reason, in compiled code too
    for _name in SCHEMAS:
        _library.impl(_name, _no_binary, "CUDA")

# in the order of csrc/api/check.h's ErrorKind
_ERRORS = (RuntimeError, ValueError, TypeError, torch.OutOfMemoryError)


class Operator:
    """An operator whose errors have their types: from torch 2.15 on whatever a compiled kernel
    throws arrives as a RuntimeError with its text, and an argument of another type than the
    schema's always has."""

    def __init__(self, overload: Any) -> None:
        self.overload = overload  # as torch.library.opcheck wants it

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self.overload(*arguments)
        except RuntimeError as error:
            if "Expected a value of type" in str(error):
                raise TypeError(str(error)) from None
            schema = getattr(self.overload, "_schema", None)
            for argument, given in zip(getattr(schema, "arguments", ()), arguments, strict=False):
                if given is None and str(argument.type) == "Tensor":  # an undefined one, in C++
                    raise TypeError(
                        f"{self.overload._opname}: expected {argument.name} to be a tensor, got "
                        "NoneType"
                    ) from None
            kind, text = (0, "") if _binary.module is None else _binary.module.take_error()
            self._refuse_other_kinds(arguments, error)
            if kind == 0 or text not in str(error) or isinstance(error, _ERRORS[kind]):
                raise
            raise _ERRORS[kind](text) from error
        except TypeError as error:  # of a tensor's class that knows no such operator, too
            self._refuse_other_kinds(arguments, error)
            raise

    def _refuse_other_kinds(self, arguments: tuple[Any, ...], error: Exception) -> None:
        """Instead of the text of a dispatcher that has no kernel for a kind of tensor."""
        if not isinstance(self.overload, torch._ops.OpOverload):
            return
        names = [argument.name for argument in self.overload._schema.arguments]
        who = self.overload._opname.removeprefix("delayed_").removesuffix("_forward")
        refuse_other_kinds(who, dict(zip(names, arguments, strict=False)), error)


def refuse_other_kinds(who: str, arguments: dict[str, Any], error: Exception | None = None) -> None:
    """NotImplementedError that names the first argument that is a sparse, nested or sharded tensor,
    or one of a class that made the call fail."""
    unknown = isinstance(error, (NotImplementedError, TypeError))
    for name, t in arguments.items():
        for holds, what, instead in _OTHER_KINDS if isinstance(t, Tensor) else ():
            if holds(t) and (unknown or holds is not _is_of_another_class):
                raise NotImplementedError(
                    f"{who}: expected {name} as a plain tensor, got {what(t)} ({instead})"
                ) from error


def _is_of_another_class(t: Tensor) -> bool:
    return type(t) not in (Tensor, Parameter) and not isinstance(t, (FakeTensor, FunctionalTensor))


# (whether t is one, what to call it, what to do)
_OTHER_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any], str], str], ...] = (
    (
        lambda t: type(t).__name__ == "DTensor",
        lambda t: f"a DTensor, sharded as {t.placements}",
        "the operators have no sharding strategy: give them local tensors, x.to_local(), and make "
        "a DTensor of the result",
    ),
    (
        lambda t: t.layout is torch.jagged,
        lambda t: "a jagged nested tensor",
        "give it x.values(); linear() and the layers do so themselves",
    ),
    (
        lambda t: t.is_nested,
        lambda t: "a nested tensor with the layout torch.strided",
        "make it with layout=torch.jagged, or loop over x.unbind()",
    ),
    (
        lambda t: t.layout is not torch.strided,
        lambda t: f"one with the layout {t.layout}",
        "give it x.to_dense()",
    ),
    (
        _is_of_another_class,
        lambda t: f"a {type(t).__name__}",
        "give it the plain tensor that it wraps",
    ),
)


_ops = torch.ops.narrowfloat
quantize_op = Operator(_ops.quantize.default)
scaled_mm_op = Operator(_ops.scaled_mm.default)
scaled_mm_accumulate_op = Operator(_ops.scaled_mm_accumulate_.default)
linear_forward = Operator(_ops.linear_forward.default)
linear_backward = Operator(_ops.linear_backward.default)
delayed_linear_forward = Operator(_ops.delayed_linear_forward.default)
delayed_linear_backward = Operator(_ops.delayed_linear_backward.default)


def refuse_double_backward(who: str = "linear") -> None:
    """RuntimeError in a backward whose own gradient is wanted: no operator here has one. Not only
    where dy needs a gradient: dx depends on w, dw on x."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{who}: expected to be differentiated once, got create_graph=True "
            "(a quantized layer has no double backward)"
        )


def draw_seed(device: torch.device) -> Tensor:
    """What one call rounds stochastically by, int64 [2], from torch's generator of the device."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def rows_of(x: Tensor) -> int:  # a SymInt while shapes are traced
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows


# The operators' fakes: shapes and dtypes of what the functions of these names return in reference/.


def _empty(like: Tensor, layout: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
    return like.new_empty(layout[0], dtype=layout[1])


@torch.library.register_fake("narrowfloat::quantize")
def _quantize(
    x: Tensor, spec: int, scale: Tensor | None = None, seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    m, k = rows_of(x), x.shape[-1]
    choices = specs.Quantize.unpack(spec)
    made: list[Tensor] = []
    any_scale = False
    for (rows, cols), cast, wanted, as_operand in (
        ((m, k), choices.rows, choices.want_rows, choices.rows_as_operand),
        ((k, m), choices.columns, choices.want_columns, choices.columns_as_operand),
    ):
        cast = cast if wanted else None
        any_scale |= has_tensor_scale(cast)
        if cast is not None and as_operand:
            made.append(x.new_empty((padded(rows), padded32(cols)), dtype=torch.bfloat16))
            cast = None
        else:
            made.append(_empty(x, codes_layout(cast, rows, cols)))
        made.append(_empty(x, scales_layout(cast, rows, cols)))
    scales = x.new_empty((2 * SCALE if any_scale else 0,), dtype=torch.float32)
    return made[0], made[1], made[2], made[3], scales


@torch.library.register_fake("narrowfloat::scaled_mm")
def _scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@torch.library.register_fake("narrowfloat::scaled_mm_accumulate_")
def _scaled_mm_accumulate_(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, fast: bool
) -> None:
    return None


@torch.library.register_fake("narrowfloat::linear_forward")
def _linear_forward(
    x: Tensor | None,
    w: Tensor | None,
    bias: Tensor | None,
    spec: int,
    x_codes: Tensor | None = None,
    x_scales: Tensor | None = None,
    x_scale: Tensor | None = None,
    w_codes: Tensor | None = None,
    w_scales: Tensor | None = None,
    w_scale: Tensor | None = None,
    rows: int = 0,
    out_features: int = 0,
    in_features: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = rows, out_features, in_features
    return fake_forward(x, w, bias, spec, x_codes, w_codes, sizes)


def fake_forward(
    x: Tensor | None,
    w: Tensor | None,
    bias: Tensor | None,
    spec: int,
    x_codes: Tensor | None = None,
    w_codes: Tensor | None = None,
    sizes: tuple[int, int, int] = (0, 0, 0),
    flat_scales: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """linear_forward's fake. flat_scales: those of x's columns with one dimension."""
    choices = specs.Forward.unpack(spec)
    if x is not None and w is not None:
        check_linear(x, w, bias, "linear")
    like = x if x is not None else x_codes
    if like is None:
        raise ValueError("linear: expected x, or x_codes, got None (pass it)")
    m = sizes[0] if x is None else rows_of(x)
    n, k = sizes[1:] if w is None else w.shape
    columns = choices.wgrad_b if choices.save_x else None
    length = SCALE if has_tensor_scale(columns) else 0
    if choices.keep_w and w_codes is None and choices.fprop_b is not None:
        length += {"tensor": SCALE, "row": padded(k)}.get(choices.fprop_b.scaling, 0)
    of_scales, scale_dtype = scales_layout(columns, k, m)
    if flat_scales:
        of_scales = (math.prod(of_scales),)
    return (
        like.new_empty((m, n), dtype=choices.y_dtype)
        if x is None
        else x.new_empty((*x.shape[:-1], n), dtype=choices.y_dtype),
        _empty(like, codes_layout(columns, k, m)),
        _empty(like, (of_scales, scale_dtype)),
        like.new_empty((length,), dtype=torch.float32),
    )


@torch.library.register_fake("narrowfloat::linear_backward")
def _linear_backward(
    dy: Tensor,
    x_columns: Tensor | None,
    x_columns_scales: Tensor | None,
    scales: Tensor | None,
    w: Tensor | None,
    seed: Tensor | None,
    in_features: int,
    spec: int,
    x_scale: Tensor | None = None,
    w_codes: Tensor | None = None,
    w_scales: Tensor | None = None,
    w_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    choices = specs.Backward.unpack(spec)
    n, dw_dtype, db_dtype = dy.shape[-1], choices.dw_dtype, choices.db_dtype
    return (
        dy.new_empty((*dy.shape[:-1], in_features) if choices.need_dx else (0,)),
        dy.new_empty((n, in_features) if dw_dtype is not None else (0,), dtype=dw_dtype),
        dy.new_empty((n,) if db_dtype is not None else (0,), dtype=db_dtype),
    )


@torch.library.register_fake("narrowfloat::delayed_linear_forward")
def _delayed_linear_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, history: Tensor, spec: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _linear_forward(x, w, bias, spec)


@torch.library.register_fake("narrowfloat::delayed_linear_backward")
def _delayed_linear_backward(
    dy: Tensor,
    x_columns: Tensor | None,
    scales: Tensor | None,
    w: Tensor | None,
    history: Tensor,
    in_features: int,
    spec: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _linear_backward(dy, x_columns, None, scales, w, None, in_features, spec)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
    who: str = "scaled_mm",
) -> Tensor:
    """d [M,N] = a_scale b_scale (a [M,K] b [N,K]^T) + bias [N]; a, b FP8, scales fp32 of one
    element, sum in fp32, one rounding to out_dtype (fp32, bf16, fp16).

    An operand whose sizes are not multiples of 16 or whose rows do not start on 16 bytes is copied
    with zero padding inside. TypeError for other dtypes, ValueError for shapes or devices that do
    not match.
    """
    tensor.check_scaled_mm(a, b, a_scale, b_scale, who, bias)
    for name, t in (("a_scale", a_scale), ("b_scale", b_scale)):
        if t.numel() != 1:
            raise ValueError(
                f"{who}: expected {name} in float32 with one element, got {t.dtype} of shape "
                f"{tuple(t.shape)}"
            )
    if out_dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{who}: expected out_dtype out of float32, bfloat16, float16, got {out_dtype}"
        )
    support.require(recipe.FP8, a.device)
    return scaled_mm_op(a, b, a_scale, b_scale, bias, out_dtype, fast)
