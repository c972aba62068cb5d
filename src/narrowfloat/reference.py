"""States what every operator means, in plain PyTorch; these functions are the CPU's kernels too.

The CUDA kernels equal these bit for bit in quantized bytes and scales; a product may differ by
the order of its fp32 sum. All of them are written for clarity and run on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .formats import BY_CODE, BY_DTYPE, E4M3, HIGH_PRECISION, IN_BF16, Format, padded
from .settings import Backward, Forward

# A tensor's scale in memory is (scale, multiplier, 0, 0): 16 bytes, as cuBLASLt wants it aligned.
# linear_forward returns x's, then w's.
SCALE = 4

FLT_MAX = torch.finfo(torch.float32).max


def amax(x: Tensor) -> Tensor:
    """max |x| as fp32 []; NaN if any element is NaN; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax().float()


def scale_from_amax(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """(scale, multiplier), fp32 []: real = code * scale, code = cast(real * multiplier).

    An amax of 0 gives 1 and 1. One so small that max / amax overflows keeps the multiplier at
    FLT_MAX (such values flush to zero). Inf gives scale Inf and multiplier 0, NaN gives NaN:
    every product with such a scale is non-finite, so a loss scaler sees the overflow.
    """
    # tensor by tensor: torch divides a scalar, or by one, through a rounded reciprocal
    largest = torch.full_like(amax, fmt.max)
    multiplier = torch.div(largest, amax).clamp(max=FLT_MAX)
    both = torch.stack([torch.div(amax, largest), multiplier])
    both = torch.where(amax == 0, 1.0, torch.where(amax.isnan(), float("nan"), both))
    return both[0], both[1]


def cast(x: Tensor, fmt: Format) -> Tensor:
    """fp32 x to `fmt`: nearest, ties to even, saturating; a NaN becomes the format's one NaN."""
    # clamp first: torch's own casts turn overflow into NaN or Inf, by version and format
    codes = x.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    return torch.where(x.isnan(), fmt.nan, codes).view(fmt.dtype)


def _padded_zeros(x: Tensor) -> Tensor:  # [R, C] -> contiguous [padded(R), padded(C)]
    rows, cols = x.shape
    return pad(x, (0, padded(cols) - cols, 0, padded(rows) - rows))


def _copy(x: Tensor) -> Tensor:  # row-major, in memory of its own
    return x.clone(memory_format=torch.contiguous_format)


def _nothing(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=like.device)


def as_rows(x: Tensor) -> Tensor:
    """x [..., K] as [M, K]; K = 0 keeps its M."""
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return x.reshape(rows, x.shape[-1])


def quantize(
    x: Tensor, fmt_code: int, rows: bool, columns: bool, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., K] taken as [M, K] -> (row-major codes, transposed codes, scales).

    Codes are [padded(M), padded(K)] and [padded(K), padded(M)], those of zeros beyond M and K, each
    an empty tensor where not asked for. Scales are fp32 [4]: (scale, multiplier, 0, 0). A `scale`
    given, as an earlier call returned it, is used instead of measuring x.
    """
    fmt = BY_CODE[fmt_code]
    x2 = as_rows(x)
    if scale is None:
        scale = pad(torch.stack(scale_from_amax(amax(x2), fmt)), (0, SCALE - 2))
    elif scale.shape != (SCALE,) or scale.dtype != torch.float32:
        raise ValueError(
            f"quantize: expected scale as float32 [{SCALE}], as an earlier call returned it, got "
            f"{scale.dtype} {tuple(scale.shape)}"
        )
    else:
        scale = scale.clone()
    q = cast(_padded_zeros(x2.float()) * scale[1], fmt).view(torch.uint8)
    q_rows = _copy(q).view(fmt.dtype) if rows else _nothing(x, fmt.dtype)
    q_columns = _copy(q.t()).view(fmt.dtype) if columns else _nothing(x, fmt.dtype)
    return q_rows, q_columns, scale


def _operand(
    x: Tensor, fmt_code: int, rows: bool, columns: bool, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """quantize(); of an operand IN_BF16 (rows, columns, zeros), without padding."""
    if fmt_code != IN_BF16:
        return quantize(x, fmt_code, rows, columns, scale)
    plain = as_rows(x).to(torch.bfloat16)
    return plain, plain.t(), torch.zeros(SCALE, dtype=torch.float32, device=x.device)


def _product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """fp32 a_scale b_scale (a b^T), whatever autocast is on; an operand in bf16 has no scale."""
    scale = torch.ones((), dtype=torch.float32, device=a.device)
    for operand, its in ((a, a_scale), (b, b_scale)):
        if operand.dtype != torch.bfloat16:
            scale = scale * its.flatten()[0]
    with torch.autocast(a.device.type, enabled=False):
        return (a.float() @ b.float().t()) * scale


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """d [M,N] = a_scale b_scale (a [M,K] b [N,K]^T) + bias; operands FP8, scales fp32 (first
    element used), sum in fp32, rounded once to out_dtype. `fast` does not change the reference."""
    d = _product(a, b, a_scale, b_scale)
    if bias is not None:
        d = d + bias.float()
    return d.to(out_dtype)


def scaled_mm_accumulate_(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, fast: bool
) -> None:
    """out [M,N] += a_scale b_scale (a b^T), in place; rounded once per call."""
    d = _product(a, b, a_scale, b_scale)
    out.copy_(out.float() + d)


def check_quantizable(x: Tensor, who: str, name: str = "x") -> None:
    """TypeError or ValueError for what no quantizing kernel takes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: expected {name} to be a tensor, got {type(x).__name__}")
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{who}: expected {name} in float32, bfloat16 or float16, got {x.dtype} "
            "(convert it first)"
        )
    if x.dim() == 0:
        raise ValueError(
            f"{who}: expected {name} of at least one dimension, got a scalar (use .view(1))"
        )


def check_linear(x: Tensor, w: Tensor, bias: Tensor | None, who: str) -> None:
    """TypeError or ValueError for operands that do not make a linear layer; the CUDA operators
    check the same."""
    check_quantizable(x, who, "x")
    check_quantizable(w, who, "w")
    if w.dim() != 2:
        raise ValueError(f"{who}: expected w [N,K], got {w.dim()} dimensions {tuple(w.shape)}")
    if x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"{who}: expected x [..., K] and w [N,K] with one K, got {tuple(x.shape)} and "
            f"{tuple(w.shape)} (w is multiplied transposed)"
        )
    for name, t in (("w", w), ("bias", bias)):
        if t is not None and t.device != x.device:
            raise ValueError(
                f"{who}: expected {name} on {x.device} as x is, got {t.device} (move it there)"
            )
    if bias is not None:
        check_quantizable(bias, who, "bias")
        if bias.shape != w.shape[:1]:
            raise ValueError(f"{who}: expected bias [{w.shape[0]}], got {tuple(bias.shape)}")


def linear_forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    w_rows: Tensor | None,
    w_scale: Tensor | None,
    settings: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [..., N] = x [..., K] w [N,K]^T + bias, operands quantized per tensor, or one IN_BF16.

    w_rows, w_scale: a weight that is quantized already; settings: a packed Forward. Returns (y,
    x's transposed codes if save_x else empty, x's scales [4] and, unless it came quantized, w's
    after them [8]). Of an operand in bf16 the codes are empty and the scales zeros.
    """
    check_linear(x, w, bias, "linear")
    x_format, w_format, fast, save_x = Forward.unpack(settings)
    if w_rows is not None and IN_BF16 in (x_format, w_format):
        raise ValueError("linear: expected no quantized w beside an operand in bf16, got one")
    n, k = w.shape
    m = as_rows(x).shape[0]
    x_rows, x_columns, x_scale = _operand(x, x_format, True, save_x)
    if x_format == IN_BF16:
        x_columns = _nothing(x, E4M3.dtype)
    scales = x_scale
    if w_rows is None or w_scale is None:
        w_rows, _, w_scale = _operand(w, w_format, True, False)
        scales = torch.cat([x_scale, w_scale])
    y = scaled_mm(x_rows[:m, :k], w_rows[:n, :k], x_scale, w_scale, bias, x.dtype, fast)
    return y.view(*x.shape[:-1], n), x_columns, scales


def linear_backward(
    dy: Tensor,
    x_columns: Tensor | None,
    scales: Tensor | None,
    w: Tensor | None,
    w_columns: Tensor | None,
    w_scale: Tensor | None,
    in_features: int,
    settings: int,
    dy_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx [..., K], dw [N,K], db [N]) of linear_forward, each empty where the settings, a packed
    Backward, do not ask for it.

    scales: those of linear_forward; with x's alone, [4], w is measured anew. dx needs w, or
    w_columns and w_scale, its transposed codes. dw needs x_columns, or x itself in their place to
    take it as bf16. db sums dy unquantized. dy_scale: known before, not of the operator; else dy is
    measured.
    """
    check_quantizable(dy, "linear_backward", "dy")
    for name, t in (("x_columns", x_columns), ("scales", scales), ("w", w)):
        if t is not None and t.device != dy.device:
            raise ValueError(
                f"linear_backward: expected {name} on {dy.device} as dy is, got {t.device} "
                "(move it there)"
            )
    dy_format, w_format, fast_dgrad, fast_wgrad, need_dx, dw_dtype, db_dtype = Backward.unpack(
        settings
    )
    k, n = in_features, dy.shape[-1]
    dy2 = as_rows(dy)
    m = dy2.shape[0]
    x_itself = x_columns is not None and x_columns.dtype in HIGH_PRECISION
    if w_columns is not None and (x_itself or IN_BF16 in (dy_format, w_format)):
        raise ValueError(
            "linear_backward: expected no quantized w beside an operand in bf16, got one"
        )
    dx = _nothing(dy, dy.dtype)
    dw = _nothing(dy, dw_dtype or dy.dtype)
    db = _nothing(dy, db_dtype or dy.dtype)
    dy_rows, dy_columns, dy_scale = _operand(
        dy2, dy_format, need_dx, dw_dtype is not None, dy_scale
    )
    if need_dx:
        if w_columns is None:
            known = scales is not None and scales.numel() >= 2 * SCALE
            w_scale = scales[SCALE:] if known else None  # type: ignore[index]
            _, w_columns, w_scale = _operand(_given(w, "w"), w_format, False, True, w_scale)
        dx = scaled_mm(
            dy_rows[:m, :n],
            w_columns[:k, :n],
            dy_scale,
            _given(w_scale, "w_scale"),
            None,
            dy.dtype,
            fast_dgrad,
        ).view(*dy.shape[:-1], k)
    if dw_dtype is not None:
        x_columns = _given(x_columns, "x_columns")
        if x_itself:
            _, columns, scales = _operand(x_columns, IN_BF16, False, True)
            if columns.shape != (k, m):
                raise ValueError(
                    f"linear_backward: expected x [..., {k}] of {m} rows, got "
                    f"{tuple(x_columns.shape)}"
                )
            x_columns = columns
        dw = scaled_mm(
            dy_columns[:n, :m],
            x_columns[:k, :m],
            dy_scale,
            _given(scales, "scales"),
            None,
            dw_dtype,
            fast_wgrad,
        )
    if db_dtype is not None:
        db = dy2.float().sum(0).to(db_dtype)
    return dx, dw, db


def _given(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"linear_backward: expected {name} for this gradient, got None (pass it)")
    return tensor


def format_of(q: Tensor, who: str) -> Format:
    """The format of a quantized tensor's dtype; TypeError says what was expected."""
    fmt = BY_DTYPE.get(q.dtype)
    if fmt is None:
        raise TypeError(
            f"{who}: expected a dtype out of {[str(d) for d in BY_DTYPE]}, got {q.dtype} "
            "(quantize the operand first)"
        )
    return fmt
