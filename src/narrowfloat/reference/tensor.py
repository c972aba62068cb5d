"""FP8 with one scale a tensor, scaled_mm, and the checks that all operators share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats import BY_DTYPE, HIGH_PRECISION, Format, padded

# A tensor's scale in memory is (scale, multiplier, 0, 0): 16 bytes, as cuBLASLt wants it aligned.
SCALE = 4
ONE_OR_WHOLE = (1, SCALE, 2 * SCALE)  # elements of a scale that scaled_mm takes the first of

FLT_MAX = torch.finfo(torch.float32).max
SMALLEST_SCALE = 2.0**-128  # 1 / FLT_MAX in fp32, a subnormal number


def amax(x: Tensor) -> Tensor:
    """max |x| as fp32 []; NaN if any element is NaN; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax().float()


def scale_from_amax(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """(scale, multiplier), fp32 []: real = code * scale, code = cast(real * multiplier).

    An amax of 0 gives 1 and 1. One so small that max / amax overflows gives FLT_MAX's reciprocal
    and FLT_MAX: codes stop short of max, and values from 2^-134 on come back with the format's
    error. Inf gives scale Inf and multiplier 0, NaN gives NaN: every product with such a scale is
    non-finite, so a loss scaler sees the overflow.
    """
    # tensor by tensor: torch divides a scalar, or by one, through a rounded reciprocal
    largest = torch.full_like(amax, fmt.max)
    multiplier = torch.div(largest, amax)
    smallest = multiplier > FLT_MAX
    scale = torch.where(smallest, SMALLEST_SCALE, torch.div(amax, largest))
    both = torch.stack([scale, multiplier.clamp(max=FLT_MAX)])
    both = torch.where(amax == 0, 1.0, torch.where(amax.isnan(), float("nan"), both))
    return both[0], both[1]


def cast(x: Tensor, fmt: Format) -> Tensor:
    """fp32 x to `fmt`: nearest, ties to even, saturating; a NaN becomes the format's one NaN."""
    # clamp first: torch's own casts turn overflow into NaN or Inf, by version and format
    codes = x.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    return torch.where(x.isnan(), fmt.nan, codes).view(fmt.dtype)


def as_rows(x: Tensor) -> Tensor:
    """x [..., K] as [M, K]; K = 0 keeps its M."""
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return x.reshape(rows, x.shape[-1])


def own(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A result t of nobody else, in its shape. No view, as the CUDA kernels' results are none:
    autograd forbids in-place operations on a Function's view."""
    return torch.ops.aten._unsafe_view(t, shape)


def known_or_measured(x: Tensor, fmt: Format, scale: Tensor | None = None) -> Tensor:
    """fp32 [4], (scale, multiplier, 0, 0) of x; a `scale` given, as an earlier call returned it, is
    used instead of measuring x."""
    if scale is None:
        return pad(torch.stack(scale_from_amax(amax(x), fmt)), (0, SCALE - 2))
    check_known_scale(scale)
    return scale.clone()


def check_known_scale(scale: Tensor) -> None:
    """ValueError for what is no scale that an earlier call returned."""
    if scale.shape != (SCALE,) or scale.dtype != torch.float32:
        raise ValueError(
            f"quantize: expected scale as float32 [{SCALE}], as an earlier call returned it, got "
            f"{scale.dtype} {tuple(scale.shape)}"
        )


def codes_of(x: Tensor, fmt: Format, scale: Tensor) -> Tensor:
    """x [R, C] in `fmt` with one scale, [4] as above: [R, C]."""
    return cast(x.float() * scale[1], fmt)


def lay_out(x: Tensor, fmt: Format, scale: Tensor) -> Tensor:
    """codes_of() as an operator returns them: [padded(R), padded(C)], those beyond zeros' with this
    scale (NaN where it is)."""
    rows, cols = x.shape
    zeros = pad(x.float(), (0, padded(cols) - cols, 0, padded(rows) - rows))
    return codes_of(zeros, fmt, scale).contiguous()


def check_scale(scale: Tensor, sizes: tuple[int, ...], name: str, who: str) -> None:
    """ValueError where `scale`, of a whole tensor, is not fp32 with so many elements: what is more
    than that may be scales of rows or blocks, of which the first alone would be taken."""
    if scale.dtype != torch.float32 or scale.numel() not in sizes:
        whole = " or ".join(f"[{size}]" for size in sizes if size > 1)
        expected = f"as float32 {whole}"
        if 1 in sizes:
            expected = f"in float32 with one element, or {whole}"
        raise ValueError(
            f"{who}: expected {name} {expected}, a tensor's scale as quantize returns it, got "
            f"{scale.dtype} {tuple(scale.shape)}"
        )


def _gemm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """fp32 a_scale b_scale (a b^T), whatever autocast is on."""
    with torch.autocast(a.device.type, enabled=False):
        return (a.float() @ b.float().t()) * (a_scale.flatten()[0] * b_scale.flatten()[0])


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """d [M,N] = a_scale b_scale (a [M,K] b [N,K]^T) + bias; operands FP8, scales fp32 of one
    element or as quantize returns them (the first is used), sum in fp32, rounded once to out_dtype.
    `fast` does not change the reference."""
    check_scaled_mm(a, b, a_scale, b_scale, "scaled_mm", bias)
    if out_dtype not in HIGH_PRECISION:
        raise TypeError(
            f"scaled_mm: expected out_dtype out of float32, bfloat16, float16, got {out_dtype}"
        )
    d = _gemm(a, b, a_scale, b_scale)
    if bias is not None:
        d = d + bias.float()
    return d.to(out_dtype)


def scaled_mm_accumulate_(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, fast: bool
) -> None:
    """out [M,N], fp32, bf16 or fp16, += a_scale b_scale (a [M,K] b [N,K]^T), in place; the rest as
    scaled_mm's. Rounded once per call."""
    who = "scaled_mm_accumulate_"
    check_scaled_mm(a, b, a_scale, b_scale, who)
    check_quantizable(out, who, "out")
    check_same_device(a, who, "a", out=out)
    if out.shape != (a.shape[0], b.shape[0]):
        raise ValueError(
            f"{who}: expected out [{a.shape[0]}, {b.shape[0]}] for a [M,K] and b [N,K], got "
            f"{tuple(out.shape)}"
        )
    d = _gemm(a, b, a_scale, b_scale)
    out.copy_(out.float() + d)


def check_tensor(x: object, who: str, name: str) -> None:
    """TypeError for what is no tensor. An operator's tensor may come as None."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: expected {name} to be a tensor, got {type(x).__name__}")


def check_same_device(as_: Tensor, who: str, name: str, **given: Tensor | None) -> None:
    """ValueError for tensors that are not where `as_`, called `name`, is."""
    for what, t in given.items():
        if t is not None and t.device != as_.device:
            raise ValueError(
                f"{who}: expected {what} on {as_.device} as {name} is, got {t.device} "
                "(move it there)"
            )


def check_quantizable(x: Tensor, who: str, name: str = "x") -> None:
    """TypeError or ValueError for what no quantizing kernel takes."""
    check_tensor(x, who, name)
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


def check_matmul(a: Tensor, b: Tensor, who: str, names: tuple[str, str] = ("a", "b")) -> None:
    """TypeError or ValueError for operands that are no a [..., K] and b [K,N]."""
    first, second = names
    for t, name in ((a, first), (b, second)):
        check_quantizable(t, who, name)
    if b.dim() != 2:
        raise ValueError(
            f"{who}: expected {second} [K,N], got {tuple(b.shape)} "
            f"(a batched or one-dimensional {second} is not quantized; call {who} on each "
            f"{second} [K,N])"
        )
    if a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"{who}: expected {first} [..., K] and {second} [K,N] with one K, got "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    check_same_device(a, who, first, **{second: b})


def check_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    who: str,
    bias: Tensor | None = None,
) -> None:
    """TypeError or ValueError for what is no GEMM of two quantized operands; the CUDA operators
    check the same."""
    for name, t in (("a", a), ("b", b), ("a_scale", a_scale), ("b_scale", b_scale)):
        check_tensor(t, who, name)
    for name, q in (("a", a), ("b", b)):
        format_of(q, who, name)
        if q.dim() != 2:
            raise ValueError(f"{who}: expected {name} of two dimensions, got {tuple(q.shape)}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"{who}: expected a [M,K] and b [N,K] with one K, got {tuple(a.shape)} and "
            f"{tuple(b.shape)} (b is multiplied transposed)"
        )
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise TypeError(
            f"{who}: expected at most one float8_e5m2 operand, got two (make one float8_e4m3fn)"
        )
    for name, t in (("a_scale", a_scale), ("b_scale", b_scale)):
        check_scale(t, ONE_OR_WHOLE, name, who)
    if bias is not None:
        check_tensor(bias, who, "bias")
        if bias.shape != b.shape[:1] or bias.dtype not in HIGH_PRECISION:
            raise ValueError(
                f"{who}: expected bias [{b.shape[0]}] in float32, bfloat16 or float16, got "
                f"{tuple(bias.shape)} in {bias.dtype}"
            )
    check_same_device(a, who, "a", b=b, a_scale=a_scale, b_scale=b_scale, bias=bias)


def format_of(q: Tensor, who: str, name: str = "an operand") -> Format:
    """The format of a quantized tensor's dtype; TypeError says what was expected."""
    fmt = BY_DTYPE.get(q.dtype)
    if fmt is None:
        raise TypeError(
            f"{who}: expected {name} in a dtype out of {[str(d) for d in BY_DTYPE]}, got "
            f"{q.dtype} (quantize the operand first)"
        )
    return fmt
