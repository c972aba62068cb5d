"""The only place for operator names and schemas, their fakes, and what is typed against them.

The CUDA implementations register from csrc/ops.cpp, the CPU's are reference.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _binary, recipe, reference, reference_block, reference_delayed, reference_fp4, support
from .formats import (
    BY_CODE,
    BY_SCALING,
    E4M3,
    E5M2,
    HIGH_PRECISION,
    IN_BF16,
    NONE,
    block_codes_shape,
    block_scales_shape,
    codes_shape,
    padded,
    padded32,
    scales_size,
)
from .reference import SCALE, check_linear
from .settings import Backward, BlockLayer, BlockQuantize, Forward, FP4Layer, FP4Quantize

_library = torch.library.Library("narrowfloat", "DEF")

_SCHEMAS = {
    reference.quantize: (
        "quantize(Tensor x, int format, bool rows, bool columns, Tensor? scale=None)"
        " -> (Tensor rows, Tensor columns, Tensor scale)"
    ),
    reference.scaled_mm: (
        "scaled_mm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias,"
        " ScalarType out_dtype, bool fast) -> Tensor"
    ),
    reference.scaled_mm_accumulate_: (
        "scaled_mm_accumulate_(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scale,"
        " Tensor b_scale, bool fast) -> ()"
    ),
    reference.linear_forward: (
        "linear_forward(Tensor x, Tensor w, Tensor? bias, Tensor? w_rows, Tensor? w_scale,"
        " int settings)"
        " -> (Tensor y, Tensor x_columns, Tensor scales)"
    ),
    reference.linear_backward: (
        "linear_backward(Tensor dy, Tensor? x_columns, Tensor? scales, Tensor? w,"
        " Tensor? w_columns, Tensor? w_scale, int in_features, int settings)"
        " -> (Tensor dx, Tensor dw, Tensor db)"
    ),
    reference_delayed.delayed_linear_forward: (
        "delayed_linear_forward(Tensor x, Tensor w, Tensor? bias, Tensor(a!) history,"
        " int settings) -> (Tensor y, Tensor x_columns, Tensor scales)"
    ),
    reference_delayed.delayed_linear_backward: (
        "delayed_linear_backward(Tensor dy, Tensor? x_columns, Tensor? scales, Tensor? w,"
        " Tensor(a!) history, int in_features, int settings)"
        " -> (Tensor dx, Tensor dw, Tensor db)"
    ),
    reference_fp4.fp4_quantize: (
        "fp4_quantize(Tensor x, Tensor? seed, int settings)"
        " -> (Tensor rows, Tensor rows_scales, Tensor columns, Tensor columns_scales,"
        " Tensor scales)"
    ),
    reference_fp4.fp4_linear_forward: (
        "fp4_linear_forward(Tensor x, Tensor w, Tensor? bias, int settings)"
        " -> (Tensor y, Tensor x_columns, Tensor x_columns_scales, Tensor scales)"
    ),
    reference_fp4.fp4_linear_backward: (
        "fp4_linear_backward(Tensor dy, Tensor? x_columns, Tensor? x_columns_scales,"
        " Tensor? scales, Tensor? w, Tensor? seed, int in_features, int settings)"
        " -> (Tensor dx, Tensor dw, Tensor db)"
    ),
    reference_block.block_quantize: (
        "block_quantize(Tensor x, int settings)"
        " -> (Tensor rows, Tensor rows_scales, Tensor columns, Tensor columns_scales)"
    ),
    reference_block.block_linear_forward: (
        "block_linear_forward(Tensor x, Tensor w, Tensor? bias, int settings,"
        " Tensor? w_rows=None, Tensor? w_rows_scales=None)"
        " -> (Tensor y, Tensor x_columns, Tensor x_columns_scales, Tensor w_columns_amax)"
    ),
    reference_block.block_linear_backward: (
        "block_linear_backward(Tensor dy, Tensor? x, Tensor? x_columns_scales, Tensor? w,"
        " Tensor? w_columns_amax, int in_features, int settings, Tensor? w_columns=None,"
        " Tensor? w_columns_scales=None)"
        " -> (Tensor dx, Tensor dw, Tensor db)"
    ),
}
for _kernel, _schema in _SCHEMAS.items():
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _library.impl(_kernel.__name__, _kernel, "CPU")


def _no_binary(*_: object) -> None:
    raise NotImplementedError(_binary.problem)


if _binary.problem is not None:  # a CUDA tensor gets the reason, in compiled code too
    for _kernel in _SCHEMAS:
        _library.impl(_kernel.__name__, _no_binary, "CUDA")

_ERRORS = (RuntimeError, ValueError, TypeError, torch.OutOfMemoryError)  # csrc/check.h: ErrorKind


class Operator:
    """An operator whose errors have their types: from torch 2.15 on whatever a compiled kernel
    throws arrives as a RuntimeError with its text."""

    def __init__(self, overload: Any) -> None:
        self.overload = overload  # as torch.library.opcheck wants it

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self.overload(*arguments)
        except RuntimeError as error:
            kind, text = (0, "") if _binary.module is None else _binary.module.take_error()
            if kind == 0 or text not in str(error) or isinstance(error, _ERRORS[kind]):
                raise
            raise _ERRORS[kind](text) from error


_ops = torch.ops.narrowfloat
quantize_op = Operator(_ops.quantize.default)
scaled_mm_op = Operator(_ops.scaled_mm.default)
scaled_mm_accumulate_op = Operator(_ops.scaled_mm_accumulate_.default)
linear_forward = Operator(_ops.linear_forward.default)
linear_backward = Operator(_ops.linear_backward.default)
delayed_linear_forward = Operator(_ops.delayed_linear_forward.default)
delayed_linear_backward = Operator(_ops.delayed_linear_backward.default)
fp4_quantize_op = Operator(_ops.fp4_quantize.default)
fp4_linear_forward = Operator(_ops.fp4_linear_forward.default)
fp4_linear_backward = Operator(_ops.fp4_linear_backward.default)
block_quantize_op = Operator(_ops.block_quantize.default)
block_linear_forward = Operator(_ops.block_linear_forward.default)
block_linear_backward = Operator(_ops.block_linear_backward.default)


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


def _rows_of(x: Tensor) -> int:  # a SymInt while shapes are traced
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows


# The operators' fakes: shapes and dtypes of what the functions of these names return in
# reference.py, reference_fp4.py and reference_block.py.


@torch.library.register_fake("narrowfloat::quantize")
def _quantize(
    x: Tensor, format: int, rows: bool, columns: bool, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    m, k, dtype = _rows_of(x), x.shape[-1], BY_CODE[format].dtype
    return (
        x.new_empty((padded(m), padded(k)) if rows else (0,), dtype=dtype),
        x.new_empty((padded(k), padded(m)) if columns else (0,), dtype=dtype),
        x.new_empty((SCALE,), dtype=torch.float32),
    )


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
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    w_rows: Tensor | None,
    w_scale: Tensor | None,
    settings: int,
) -> tuple[Tensor, Tensor, Tensor]:
    check_linear(x, w, bias, "linear")
    x_format, _, _, save_x = Forward.unpack(settings)
    save_x = save_x and x_format != IN_BF16
    dtype = BY_CODE.get(x_format, E4M3).dtype
    m, (n, k) = _rows_of(x), w.shape
    return (
        x.new_empty((*x.shape[:-1], n)),
        x.new_empty((padded(k), padded(m)) if save_x else (0,), dtype=dtype),
        x.new_empty((2 * SCALE if w_rows is None else SCALE,), dtype=torch.float32),
    )


@torch.library.register_fake("narrowfloat::linear_backward")
def _linear_backward(
    dy: Tensor,
    x_columns: Tensor | None,
    scales: Tensor | None,
    w: Tensor | None,
    w_columns: Tensor | None,
    w_scale: Tensor | None,
    in_features: int,
    settings: int,
) -> tuple[Tensor, Tensor, Tensor]:
    *_, need_dx, dw_dtype, db_dtype = Backward.unpack(settings)
    n = dy.shape[-1]
    return (
        dy.new_empty((*dy.shape[:-1], in_features) if need_dx else (0,)),
        dy.new_empty((n, in_features) if dw_dtype is not None else (0,), dtype=dw_dtype),
        dy.new_empty((n,) if db_dtype is not None else (0,), dtype=db_dtype),
    )


@torch.library.register_fake("narrowfloat::delayed_linear_forward")
def _delayed_linear_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, history: Tensor, settings: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _linear_forward(x, w, bias, None, None, settings)


@torch.library.register_fake("narrowfloat::delayed_linear_backward")
def _delayed_linear_backward(
    dy: Tensor,
    x_columns: Tensor | None,
    scales: Tensor | None,
    w: Tensor | None,
    history: Tensor,
    in_features: int,
    settings: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _linear_backward(dy, x_columns, scales, w, None, None, in_features, settings)


@torch.library.register_fake("narrowfloat::fp4_quantize")
def _fp4_quantize(
    x: Tensor, seed: Tensor | None, settings: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    m, k = _rows_of(x), x.shape[-1]
    choices = FP4Quantize.unpack(settings)
    made = []
    for how, rows, cols in ((choices.rows, m, k), (choices.columns, k, m)):
        packed = how.wanted and not how.operand
        if how.wanted and how.operand:
            made.append(x.new_empty((padded(rows), padded32(cols)), dtype=torch.bfloat16))
        else:
            made.append(x.new_empty(codes_shape(rows, cols) if packed else (0,), dtype=torch.uint8))
        size = scales_size(rows, cols) if packed else 0
        made.append(x.new_empty((size,), dtype=torch.uint8))
    scales = x.new_empty((reference_fp4.SCALES,), dtype=torch.float32)
    return made[0], made[1], made[2], made[3], scales


@torch.library.register_fake("narrowfloat::fp4_linear_forward")
def _fp4_linear_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, settings: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_linear(x, w, bias, "linear")
    save = FP4Layer.unpack(settings).wanted
    m, (n, k) = _rows_of(x), w.shape
    return (
        x.new_empty((*x.shape[:-1], n)),
        x.new_empty(codes_shape(k, m) if save else (0,), dtype=torch.uint8),
        x.new_empty((scales_size(k, m) if save else 0,), dtype=torch.uint8),
        x.new_empty((reference_fp4.SCALES,), dtype=torch.float32),
    )


@torch.library.register_fake("narrowfloat::fp4_linear_backward")
def _fp4_linear_backward(
    dy: Tensor,
    x_columns: Tensor | None,
    x_columns_scales: Tensor | None,
    scales: Tensor | None,
    w: Tensor | None,
    seed: Tensor | None,
    in_features: int,
    settings: int,
) -> tuple[Tensor, Tensor, Tensor]:
    choices = FP4Layer.unpack(settings)
    n, dw_dtype, db_dtype = dy.shape[-1], choices.dw_dtype, choices.db_dtype
    return (
        dy.new_empty((*dy.shape[:-1], in_features) if choices.wanted else (0,)),
        dy.new_empty((n, in_features) if dw_dtype is not None else (0,), dtype=dw_dtype),
        dy.new_empty((n,) if db_dtype is not None else (0,), dtype=db_dtype),
    )


@torch.library.register_fake("narrowfloat::block_quantize")
def _block_quantize(x: Tensor, settings: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = _rows_of(x), x.shape[-1]
    made = []
    sizes = ((m, k), (k, m))
    for how, (rows, cols) in zip(BlockQuantize.unpack(settings), sizes, strict=True):
        scaling = reference_block.check_orientation(how, "block_quantize")
        codes: tuple[int, ...] = (0,)
        scales: tuple[int, ...] = (0,)
        dtypes = E4M3.dtype, torch.float32
        if how.operand:
            codes, dtypes = (padded(rows), padded32(cols)), (torch.bfloat16, torch.float32)
        elif scaling is not NONE:
            codes = block_codes_shape(scaling, rows, cols)
            scales = block_scales_shape(scaling, how.square, rows, cols)
            dtypes = (E5M2 if how.e5m2 else E4M3).dtype, scaling.dtype
        made += [x.new_empty(codes, dtype=dtypes[0]), x.new_empty(scales, dtype=dtypes[1])]
    return made[0], made[1], made[2], made[3]


@torch.library.register_fake("narrowfloat::block_linear_forward")
def _block_linear_forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    settings: int,
    w_rows: Tensor | None = None,
    w_rows_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_linear(x, w, bias, "linear")
    choices = BlockLayer.unpack(settings)
    wgrad = BY_SCALING[choices.wgrad]
    m, (n, k) = _rows_of(x), w.shape
    save = choices.wanted and wgrad is not NONE
    keep_w = reference_block.keeps_w(choices) and w_rows is None
    scales = block_scales_shape(wgrad, False, k, m) if save else (0,)
    return (
        x.new_empty((*x.shape[:-1], n)),
        x.new_empty(block_codes_shape(wgrad, k, m) if save else (0,), dtype=E4M3.dtype),
        x.new_empty(scales, dtype=wgrad.dtype if save else torch.float32),
        x.new_empty((padded(k) if keep_w else 0,), dtype=torch.float32),
    )


@torch.library.register_fake("narrowfloat::block_linear_backward")
def _block_linear_backward(
    dy: Tensor,
    x: Tensor | None,
    x_columns_scales: Tensor | None,
    w: Tensor | None,
    w_columns_amax: Tensor | None,
    in_features: int,
    settings: int,
    w_columns: Tensor | None = None,
    w_columns_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    choices = BlockLayer.unpack(settings)
    n, dw_dtype, db_dtype = dy.shape[-1], choices.dw_dtype, choices.db_dtype
    return (
        dy.new_empty((*dy.shape[:-1], in_features) if choices.wanted else (0,)),
        dy.new_empty((n, in_features) if dw_dtype is not None else (0,), dtype=dw_dtype),
        dy.new_empty((n,) if db_dtype is not None else (0,), dtype=db_dtype),
    )


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
    for q, name in ((a, "a"), (b, "b")):
        reference.format_of(q, who)
        if q.dim() != 2:
            raise ValueError(f"{who}: expected {name} of two dimensions, got {tuple(q.shape)}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"{who}: expected a [M,K] and b [N,K] with one K, got {tuple(a.shape)} and "
            f"{tuple(b.shape)} (b is multiplied transposed)"
        )
    if out_dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{who}: expected out_dtype out of float32, bfloat16, float16, got {out_dtype}"
        )
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise TypeError(
            f"{who}: expected at most one float8_e5m2 operand, got two (make one float8_e4m3fn)"
        )
    for name, t in (("b", b), ("a_scale", a_scale), ("b_scale", b_scale), ("bias", bias)):
        if t is not None and t.device != a.device:
            raise ValueError(
                f"{who}: expected {name} on {a.device} as a is, got {t.device} (move it there)"
            )
    for name, t in (("a_scale", a_scale), ("b_scale", b_scale)):
        if t.dtype != torch.float32 or t.numel() != 1:
            raise ValueError(
                f"{who}: expected {name} in float32 with one element, got {t.dtype} of shape "
                f"{tuple(t.shape)}"
            )
    n = b.shape[0]
    if bias is not None and (bias.shape != (n,) or bias.dtype not in HIGH_PRECISION):
        raise ValueError(
            f"{who}: expected bias [{n}] in float32, bfloat16 or float16, got "
            f"{tuple(bias.shape)} in {bias.dtype}"
        )
    support.require(recipe.FP8, a.device)
    return scaled_mm_op(a, b, a_scale, b_scale, bias, out_dtype, fast)
