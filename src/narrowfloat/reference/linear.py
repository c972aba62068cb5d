"""The operators quantize, linear_forward and linear_backward, and their names with delayed scaling.

Each operand is quantized as its Cast says and then multiplied in fp32. The casts and flags of a
call are one integer, its spec: spec.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import spec as specs
from ..cast import Cast, kind_of, scaling_of
from ..formats import (
    E4M3,
    FORMATS,
    ROW,
    TENSOR,
    block_codes_shape,
    block_scales_shape,
    codes_shape,
    padded32,
    scales_size,
)
from . import block, fp4, fp4_numerics, tensor
from .delayed import check_history, scale_by_history
from .tensor import SCALE, as_rows, check_linear, check_quantizable, check_same_device, own


class Quantized(NamedTuple):
    """An operand [R, C], quantized along C, as it lies in memory; None where its cast has none."""

    codes: Tensor | None = None
    scales: Tensor | None = None  # of rows or blocks
    scale: Tensor | None = None  # of the tensor: fp32 [4], (scale, multiplier or 0, 0, 0)


def codes_layout(cast: Cast | None, rows: int, cols: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the codes of an operand [rows, cols]; of none, an empty tensor's."""
    if cast is None:
        return (0,), E4M3.dtype
    if cast.of.family == "fp4":
        return codes_shape(rows, cols), torch.uint8
    return block_codes_shape(cast.of, rows, cols), FORMATS[cast.element].dtype


def scales_layout(cast: Cast | None, rows: int, cols: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the scales of rows or blocks, likewise."""
    if cast is None or cast.of is TENSOR:
        return (0,), torch.float32
    if cast.of.family == "fp4":
        return (scales_size(rows, cols),), torch.uint8
    return block_scales_shape(cast.of, cast.square, rows, cols), cast.of.dtype


def has_tensor_scale(cast: Cast | None) -> bool:
    return cast is not None and cast.of.tensor_scale


def _nothing(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(0, dtype=dtype, device=like.device)


def _given(t: Tensor | None, name: str, who: str) -> Tensor:
    if t is None:
        raise ValueError(f"{who}: expected {name}, got None (pass it)")
    return t


def check_seed(seed: Tensor | None, needed: bool, who: str) -> None:
    """ValueError where stochastic rounding lacks its seed."""
    if needed and (seed is None or seed.dtype != torch.int64 or seed.shape != (2,)):
        got = "None" if seed is None else f"{seed.dtype} {tuple(seed.shape)}"
        raise ValueError(
            f"{who}: expected a seed, int64 [2], for stochastic rounding, got {got} "
            "(torch.randint draws one)"
        )


# ---- one operand ----


def quantize_operand(
    x: Tensor, cast: Cast, scale: Tensor | None = None, seed: Tensor | None = None, side: int = 0
) -> Quantized:
    """x [R, C] quantized along C, as it lies in memory. scale: known, of a cast by tensor. side: 1
    where x is a tensor's transposed view, which has random bits of its own."""
    if cast.of is TENSOR:
        fmt = FORMATS[cast.element]
        scale = tensor.known_or_measured(x, fmt, scale)
        return Quantized(tensor.lay_out(x, fmt, scale), None, scale)
    if cast.of.family == "fp4":
        made = fp4_numerics.quantize_operand(x, cast, seed, side)
        scale = pad(made.scale.view(1), (0, SCALE - 1))
        return Quantized(fp4.pack(made.codes), fp4.tile(made.scales, *x.shape), scale)
    operand = block.quantize_operand(x, cast.of, FORMATS[cast.element], cast.square)
    return Quantized(*block.lay_out(operand, cast.of, cast.square))


def _operand_form(x: Tensor, cast: Cast, seed: Tensor | None, side: int) -> Quantized:
    """bf16 [padded(R), padded32(C)], code x block scale, exact, and the tensor's scale [4]."""
    if cast.of.family == "fp4":
        made = fp4_numerics.quantize_operand(x, cast, seed, side)
        return Quantized(fp4.operand_form(made), None, pad(made.scale.view(1), (0, SCALE - 1)))
    if not cast.of.power_of_two:
        raise ValueError(
            f"quantize: expected powers of two as scales of a bf16 operand, got {cast.scaling} "
            "(code x scale is no bf16 with fp32 scales)"
        )
    operand = block.quantize_operand(x, cast.of, E4M3, cast.square)
    return Quantized(block.operand_form(operand, cast.of, cast.square))


class _Factor(NamedTuple):
    """An operand of a GEMM, unpacked: its value is matrix x row x scale."""

    matrix: Tensor  # fp32 [R, C]; FP4's C is padded
    row: Tensor | None = None  # fp32 [R]
    scale: Tensor | None = None  # fp32 []


def _factor(
    x: Tensor, cast: Cast | None, scale: Tensor | None = None, seed: Tensor | None = None,
    side: int = 0,
) -> _Factor:  # fmt: skip
    """Of x [R, C], quantized now."""
    if cast is None:
        return _Factor(x.to(torch.bfloat16).float())
    if cast.of is TENSOR:
        fmt = FORMATS[cast.element]
        scale = tensor.known_or_measured(x, fmt, scale)
        return _Factor(tensor.codes_of(x, fmt, scale).float(), None, scale[0])
    if cast.of.family == "fp4":
        made = fp4_numerics.quantize_operand(x, cast, seed, side)
        return _Factor(fp4.values(made.codes, made.scales)[: x.shape[0]], None, made.scale)
    operand = block.quantize_operand(x, cast.of, FORMATS[cast.element], cast.square)
    return _factor_of_blocks(operand, cast)


def _factor_of_blocks(operand: block.Operand, cast: Cast) -> _Factor:
    if cast.of is ROW:
        return _Factor(operand.codes.float(), operand.scales[:, 0])
    return _Factor(block.values(operand, cast.of, cast.square))


def _factor_of(
    q: Quantized, cast: Cast | None, rows: int, cols: int, name: str, who: str
) -> _Factor:
    """Of an operand [rows, cols] that was quantized before."""
    if cast is None:
        raise ValueError(
            f"{who}: expected no quantized {name[0]} for a GEMM in bf16, got one "
            f"(pass {name[0]} alone)"
        )
    codes = _given(q.codes, name, who)
    scales, scale = q.scales, q.scale
    plain = name.removesuffix("_codes")
    its_scale = "x_scale, or scales," if name == "x_columns" else f"{plain}_scale"
    shape, dtype = codes_layout(cast, rows, cols)
    if codes.shape != shape or codes.dtype != dtype:
        raise ValueError(
            f"{who}: expected {name} as {dtype} {shape}, as narrowfloat quantizes it in the "
            f"recipe's format, got {codes.dtype} {tuple(codes.shape)}"
        )
    if cast.of is not TENSOR:
        scales = _given(scales, f"{plain}_scales for {name}", who)
        shape, dtype = scales_layout(cast, rows, cols)
        if scales.shape != shape or scales.dtype != dtype:
            raise ValueError(
                f"{who}: expected {plain}_scales as {dtype} {shape}, as narrowfloat quantizes "
                f"them, got {scales.dtype} {tuple(scales.shape)}"
            )
    if has_tensor_scale(cast):
        scale = _given(scale, f"{its_scale} for {name}", who)
        tensor.check_scale(scale, (SCALE, 2 * SCALE), its_scale, who)
        scale = scale.flatten()[0]
    if cast.of is TENSOR or scales is None:
        return _Factor(codes[:rows, :cols].float(), None, scale)
    if cast.of.family == "fp4":
        return _Factor(fp4.unpacked(codes, scales, rows, padded32(cols)), None, scale)
    return _factor_of_blocks(block.taken(codes, scales, rows, cols, cast.of, cast.square), cast)


def _gemm(a: _Factor, b: _Factor) -> Tensor:
    """fp32 a b^T, whatever autocast is on. The order of its sums is not left to how the operands
    happen to lie."""
    with torch.autocast(a.matrix.device.type, enabled=False):
        d = a.matrix.contiguous() @ b.matrix.contiguous().t()
    if a.row is not None:
        d = d * a.row[:, None]
    if b.row is not None:
        d = d * b.row
    if a.scale is not None and b.scale is not None:
        return d * (a.scale * b.scale)
    one = a.scale if b.scale is None else b.scale
    return d if one is None else d * one


# ---- the operators ----


def quantize(
    x: Tensor, spec: int, scale: Tensor | None = None, seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [..., K] taken as [M, K] -> (rows, their scales, columns, their scales, tensor scales).

    spec: a packed Quantize. Rows are [M, K] contracted along K, columns [K, M] along M; each as
    codes and scales of rows or blocks (codes_layout(), scales_layout()), or as a bf16 operand
    [padded(R), padded32(C)]; empty where not wanted. Tensor scales: fp32 [8], the rows' (scale,
    multiplier, 0, 0) and the columns', zeros where there is none; empty where neither has one.
    scale: fp32 [4], known before, for casts by tensor. seed: int64 [2], for stochastic rounding.
    """
    who = "quantize"
    check_quantizable(x, who)
    choices = specs.Quantize.unpack(spec, who)
    check_same_device(x, who, "x", scale=scale, seed=seed)
    if scale is not None:
        tensor.check_known_scale(scale)
    x2 = as_rows(x)
    made: list[Tensor] = []
    scales = torch.zeros(2, SCALE, dtype=torch.float32, device=x.device)
    any_scale = False
    sides = (
        (choices.rows, choices.want_rows, choices.rows_as_operand),
        (choices.columns, choices.want_columns, choices.columns_as_operand),
    )
    for side, (t, (cast, wanted, as_operand)) in enumerate(zip((x2, x2.t()), sides, strict=True)):
        if not wanted or cast is None:
            made += [_nothing(x, E4M3.dtype), _nothing(x)]
            continue
        check_seed(seed, cast.stochastic, who)
        if as_operand:
            q = _operand_form(t, cast, seed, side)
        else:
            q = quantize_operand(t, cast, scale, seed, side)
        made += [_given(q.codes, "codes", who), _nothing(x) if q.scales is None else q.scales]
        if has_tensor_scale(cast):
            scales[side], any_scale = _given(q.scale, "scale", who), True
    return made[0], made[1], made[2], made[3], scales.flatten() if any_scale else _nothing(x)


def linear_forward(
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
    """y [..., N] = x [..., K] w [N,K]^T + bias, operands quantized by spec, a packed Forward.

    x_codes, x_scales, x_scale: x that quantize made beforehand, as fprop has it; x then gives its
    shape, and y's dtype unless the spec says it, or is None: y is [rows, N] of the spec's dtype.
    w_codes, w_scales, w_scale: w likewise; w then gives its sizes, or is None: out_features and
    in_features say them.

    Returns (y, x's columns as wgrad has them, their scales of rows or blocks, scales). The columns
    are empty unless they are wanted. scales, fp32: where the columns have a tensor scale and are
    wanted, its [4]; then, where it is wanted and w is not given quantized, what was measured of w
    for dgrad: its tensor scale [4], or the largest values of its columns [padded(K)] where it is
    scaled by row. The sum is in fp32 and rounded once.
    """
    return _forward(
        x, w, bias, spec, Quantized(x_codes, x_scales, x_scale),
        Quantized(w_codes, w_scales, w_scale), (rows, out_features, in_features), None,
    )  # fmt: skip


def _check_forward(
    x: Tensor | None, w: Tensor | None, bias: Tensor | None, of_x: Quantized, of_w: Quantized,
    sizes: tuple[int, int, int], choices: specs.Forward,
) -> tuple[tuple[int, ...], int, int, int, torch.dtype, Tensor]:  # fmt: skip
    """(leading sizes, M, N, K, y's dtype, a tensor of the device)."""
    who = "linear"
    m, n, k = sizes
    if x is not None and w is not None:
        check_linear(x, w, bias, who)
    like = x if x is not None else _given(of_x.codes, "x, or x_codes", who)
    if x is None and w is not None:
        check_quantizable(w, who, "w")
        if w.dim() != 2:
            raise ValueError(f"{who}: expected w [N,K], got {w.dim()} dimensions {tuple(w.shape)}")
    if x is None and choices.save_x:
        raise ValueError(f"{who}: expected x itself for its columns, got none (give them yourself)")
    if x is None and choices.y_dtype is None:
        raise ValueError(f"{who}: expected y's dtype in the spec where x is absent, got none")
    if x is None:
        leading: tuple[int, ...] = (m,)
    else:
        check_quantizable(x, who)
        leading, m, k = tuple(x.shape[:-1]), as_rows(x).shape[0], x.shape[-1]
    if w is None:
        _given(of_w.codes, "w, or w_codes", who)
    else:
        n, k = w.shape
    check_same_device(
        like, who, "x", w=w, bias=bias, x_scales=of_x.scales, x_scale=of_x.scale,
        w_codes=of_w.codes, w_scales=of_w.scales, w_scale=of_w.scale,
    )  # fmt: skip
    if min(m, n, k) < 0:
        raise ValueError(
            f"{who}: expected rows, out_features and in_features from 0 on, got {m}, {n} and {k}"
        )
    if bias is not None:
        check_quantizable(bias, who, "bias")
        if bias.shape != (n,):
            raise ValueError(f"{who}: expected bias [{n}], got {tuple(bias.shape)}")
    dtype = choices.y_dtype if x is None or choices.y_dtype is not None else x.dtype
    return leading, m, n, k, dtype, like  # type: ignore[return-value]


def _forward(
    x: Tensor | None, w: Tensor | None, bias: Tensor | None, spec: int, of_x: Quantized,
    of_w: Quantized, sizes: tuple[int, int, int], history: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    who = "linear"
    choices = specs.Forward.unpack(spec, who)
    a_cast, b_cast, columns_cast = choices[:3]
    kind_of(a_cast, b_cast, who)
    leading, m, n, k, dtype, like = _check_forward(x, w, bias, of_x, of_w, sizes, choices)
    x2 = None if x is None else as_rows(x)
    of_history: list[Tensor | None] = [None, None]
    if history is not None:
        for at, (t, cast) in enumerate(((x2, a_cast), (w, b_cast))):
            of_history[at] = _scale_by_history(t, cast, history[at], choices.guarded, choices.joins)
    if of_x.codes is None:
        a = _factor(_given(x2, "x", who), a_cast, of_history[0])
    else:
        a = _factor_of(of_x, a_cast, m, k, "x_codes", who)
    if of_w.codes is None:
        b = _factor(_given(w, "w", who), b_cast, of_history[1])
    else:
        b = _factor_of(of_w, b_cast, n, k, "w_codes", who)
    y = _gemm(a, b)
    if bias is not None:
        y = y + bias.float()
    y = own(y.to(dtype), (*leading, n))

    columns, columns_scales = _nothing(like, E4M3.dtype), _nothing(like)
    scales: list[Tensor] = []
    if choices.save_x and columns_cast is not None:
        known = of_history[0]
        q = quantize_operand(_given(x2, "x", who).t(), columns_cast, known, None, 1)
        columns = _given(q.codes, "codes", who)
        columns_scales = columns_scales if q.scales is None else q.scales
        if q.scale is not None:
            scales.append(q.scale)
    if choices.keep_w and of_w.codes is None and b_cast is not None:
        scales += _measured(_given(w, "w", who), b_cast, of_history[1])
    return y, columns, columns_scales, torch.cat(scales) if scales else _nothing(like)


def _measured(w: Tensor, cast: Cast, known: Tensor | None) -> list[Tensor]:
    """What the forward has measured of w that dgrad can take over."""
    if cast.of is TENSOR:
        return [tensor.known_or_measured(w, FORMATS[cast.element], known)]
    return [block.column_amax(w)] if cast.of is ROW else []


def _scale_by_history(
    t: Tensor | None, cast: Cast | None, row: Tensor, guarded: bool, joins: bool
) -> Tensor:
    if t is None or cast is None or cast.of is not TENSOR:
        raise ValueError("linear: expected formats with one scale a tensor with a history")
    return scale_by_history(t, FORMATS[cast.element], row, guarded, joins)


def linear_backward(
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
    """(dx [..., K], dw [N,K], db [N]) of linear_forward, each empty where spec, a packed Backward,
    does not ask for it.

    dx needs w, quantized anew along N, or w_codes, w_scales and w_scale: w's columns [K,N] that
    quantize made beforehand. Where the spec says w_measured, scales end with what the forward
    measured of w (by row the reference measures it anew all the same). dw needs x_columns with its
    scales, as the forward returned them, or x itself where wgrad has it in bf16; its tensor scale
    is x_scale, or what scales begin with. db sums dy unquantized. seed, int64 [2]: where dy is
    rounded stochastically.
    """
    choices = specs.Backward.unpack(spec)
    of_w = Quantized(w_codes, w_scales, w_scale)
    return _backward(
        dy, Quantized(x_columns, x_columns_scales, x_scale), scales, w, of_w, seed, in_features,
        choices, None,
    )  # fmt: skip


def _backward(
    dy: Tensor, of_x: Quantized, scales: Tensor | None, w: Tensor | None, of_w: Quantized,
    seed: Tensor | None, k: int, choices: specs.Backward, dy_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    who = "linear_backward"
    check_quantizable(dy, who, "dy")
    check_same_device(
        dy, who, "dy", x_columns=of_x.codes, x_columns_scales=of_x.scales, x_scale=of_x.scale,
        scales=scales, w=w, w_codes=of_w.codes, w_scales=of_w.scales, w_scale=of_w.scale, seed=seed,
    )  # fmt: skip
    dw_dtype, db_dtype = choices.dw_dtype, choices.db_dtype
    dy2, n = as_rows(dy), dy.shape[-1]
    m = dy2.shape[0]
    dx, dw, db = (dy.new_empty(0, dtype=d or dy.dtype) for d in (dy.dtype, dw_dtype, db_dtype))
    if choices.need_dx:
        kind_of(choices.dgrad_a, choices.dgrad_b, who)
        check_seed(seed, choices.dgrad_a is not None and choices.dgrad_a.stochastic, who)
        if of_w.codes is None:
            b = _weight_columns(w, scales, n, k, choices)
        else:
            b = _factor_of(of_w, choices.dgrad_b, k, n, "w_codes", who)
        dx = _gemm(_factor(dy2, choices.dgrad_a, dy_scale, seed, 0), b)
        dx = own(dx.to(dy.dtype), (*dy.shape[:-1], k))
    if dw_dtype is not None:
        kind_of(choices.wgrad_a, choices.wgrad_b, who)
        check_seed(seed, choices.wgrad_a is not None and choices.wgrad_a.stochastic, who)
        b = _input_columns(of_x, scales, m, k, choices.wgrad_b)
        dw = _gemm(_factor(dy2.t(), choices.wgrad_a, dy_scale, seed, 1), b).to(dw_dtype)
    if db_dtype is not None:
        db = dy2.float().sum(0).to(db_dtype)
    return dx, dw, db


def _weight_columns(
    w: Tensor | None, scales: Tensor | None, n: int, k: int, choices: specs.Backward
) -> _Factor:
    w = _given(w, "w for dx", "linear_backward")
    check_quantizable(w, "linear_backward", "w")
    if w.shape != (n, k):
        raise ValueError(
            f"linear_backward: expected w {(n, k)} for dy [..., {n}], got {tuple(w.shape)}"
        )
    known = None
    if choices.w_measured and scaling_of(choices.dgrad_b) is TENSOR:
        known = _given(scales, "scales", "linear_backward").flatten()[-SCALE:]
        if known.shape != (SCALE,) or known.dtype != torch.float32:
            raise ValueError(
                f"linear_backward: expected scales as float32 [{SCALE}] or more, as the forward "
                f"returns them, got {known.dtype} {tuple(known.shape)}"
            )
    return _factor(w.t(), choices.dgrad_b, known, None, 1)


def _input_columns(
    of_x: Quantized, scales: Tensor | None, m: int, k: int, cast: Cast | None
) -> _Factor:
    who = "linear_backward"
    x = _given(of_x.codes, "x_columns for dw", who)
    if cast is None:
        check_quantizable(x, who, "x")
        x = as_rows(x)
        if x.shape != (m, k):
            raise ValueError(f"{who}: expected x [..., {k}] of {m} rows, got {tuple(x.shape)}")
        return _factor(x.t(), None)
    scale = of_x.scale
    if scale is None and has_tensor_scale(cast) and scales is not None:
        scale = scales[:SCALE]
    q = Quantized(x, of_x.scales, scale)
    return _factor_of(q, cast, k, m, "x_columns", who)


def delayed_linear_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, history: Tensor, spec: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """linear_forward with scales by amax history, int32 [3, FIRST + steps], which it changes where
    the spec says that the call joins."""
    check_history(history, "linear")
    return _forward(x, w, bias, spec, Quantized(), Quantized(), (0, 0, 0), history)


def delayed_linear_backward(
    dy: Tensor,
    x_columns: Tensor | None,
    scales: Tensor | None,
    w: Tensor | None,
    history: Tensor,
    in_features: int,
    spec: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """linear_backward with dy's scale by amax history."""
    choices = specs.Backward.unpack(spec)
    check_quantizable(dy, "linear_backward", "dy")
    check_history(history, "linear_backward")
    dy_scale = None
    if choices.need_dx or choices.dw_dtype is not None:
        cast = choices.dgrad_a if choices.need_dx else choices.wgrad_a
        dy_scale = _scale_by_history(as_rows(dy), cast, history[2], choices.guarded, choices.joins)
    of_x = Quantized(x_columns, None, None)
    return _backward(dy, of_x, scales, w, Quantized(), None, in_features, choices, dy_scale)
