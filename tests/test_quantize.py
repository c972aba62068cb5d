"""Decides that quantizing is right: over every code, and kernel equals reference bit for bit."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from conftest import assert_same_bits

import narrowfloat as nf
from narrowfloat import formats, ops, reference

FORMATS = sorted(formats.FORMATS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def decoded(fmt: formats.Format) -> np.ndarray:
    """The value of each of the 256 codes, from the format's definition alone."""
    exponent_bits, mantissa_bits, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}[fmt.name]
    values = np.empty(256)
    for code in range(256):
        sign = -1.0 if code >> 7 else 1.0
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = code & ((1 << mantissa_bits) - 1)
        top = (1 << exponent_bits) - 1
        if fmt.name == "e4m3" and exponent == top and mantissa == 7:
            values[code] = np.nan
        elif fmt.name == "e5m2" and exponent == top:
            values[code] = np.nan if mantissa else sign * np.inf
        elif exponent == 0:
            values[code] = sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            values[code] = sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    return values


def test_decoding_is_torchs_own() -> None:
    for fmt in formats.FORMATS.values():
        ours = decoded(fmt)
        theirs = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).double().numpy()
        np.testing.assert_array_equal(ours, theirs)


def quantized(x: torch.Tensor, fmt: str, device: str) -> nf.QuantizedTensor:
    q = nf.quantize(x.to(device), fmt)
    return q._replace(data=q.data.cpu(), scale=q.scale.cpu())


def with_unit_scale(values: torch.Tensor, fmt: formats.Format) -> torch.Tensor:
    """values and, in a column of their own, the format's largest: its scale is then 1."""
    rows = values.reshape(-1, 1)
    return torch.cat([rows, torch.full_like(rows, fmt.max)], 1)


@pytest.mark.parametrize("fmt_name", FORMATS)
def test_every_code_comes_back(device: str, fmt_name: str) -> None:
    fmt = formats.FORMATS[fmt_name]
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(fmt.dtype).float()
    finite = values.isfinite()
    q = quantized(with_unit_scale(values[finite], fmt), fmt_name, device)
    assert q.scale == 1
    assert_same_bits(q.data[:, 0].view(torch.uint8), codes[finite])
    assert_same_bits(q.dequantize()[:, 0], values[finite])


@pytest.mark.parametrize("fmt_name", FORMATS)
def test_rounding_between_neighbours(device: str, fmt_name: str) -> None:
    """Midpoints go to the even code, anything beside them to the nearer one: all neighbours."""
    fmt = formats.FORMATS[fmt_name]
    values = decoded(fmt)[:128]
    codes = np.flatnonzero(np.isfinite(values))
    low, high = values[codes[:-1]], values[codes[1:]]
    middle = (low + high) / 2  # exact in fp32
    even = np.where(codes[:-1] % 2 == 0, low, high)
    above = np.nextafter(middle.astype(np.float32), np.float32(np.inf))
    below = np.nextafter(middle.astype(np.float32), np.float32(0))
    x = torch.tensor(np.concatenate([middle, above, below]), dtype=torch.float32)
    right = np.concatenate([even, high, low])
    for sign in (1, -1):
        q = quantized(with_unit_scale(sign * x, fmt), fmt_name, device)
        np.testing.assert_array_equal(q.dequantize()[:, 0].numpy(), sign * right)


@pytest.mark.parametrize("fmt_name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value(device: str, fmt_name: str, dtype: torch.dtype) -> None:
    """All 65,536 bit patterns of the input, the finite ones alone and with each special value."""
    fmt = formats.FORMATS[fmt_name]
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype).reshape(256, 256)
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
    for case in (finite, finite / 2**10, x):
        rows, columns, scale = ops.quantize_op(case.to(device), fmt.code, True, True)
        want = reference.quantize(case, fmt.code, True, True)
        assert_same_bits(scale, want[2], "scale")
        assert_same_bits(rows, want[0], "rows")
        assert_same_bits(columns, want[1], "columns")


def special(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(shape)
    if kind == "zeros":
        x = torch.zeros(shape)
    elif kind == "tiny":  # max / amax overflows
        x = x * 1e-42
    elif kind == "huge":
        x = x * (60000 / 8 if dtype == torch.float16 else 1e37)
    elif kind == "one outlier":
        x = x * 1e-3
        x.view(-1)[-1] = 1000.0
    elif kind in ("nan", "inf", "-inf"):
        x.view(-1)[x.numel() // 2] = float(kind)
    return x.to(dtype)


SHAPES = [
    (1, 1),
    (5, 13),
    (16, 16),
    (64, 128),
    (128, 64),
    (129, 257),
    (3, 200),
    (1000, 72),
    (33, 1),
    (1, 1030),
    (300, 520),
]


@pytest.mark.parametrize("fmt_name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(
    device: str, fmt_name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    code = formats.FORMATS[fmt_name].code
    for kind in ("normal", "zeros", "tiny", "huge", "one outlier", "nan", "inf", "-inf"):
        x = special(kind, shape, dtype)
        for rows, columns in ((True, True), (True, False), (False, True)):
            got = ops.quantize_op(x.to(device), code, rows, columns)
            want = reference.quantize(x, code, rows, columns)
            for g, w, what in zip(got, want, ("rows", "columns", "scale"), strict=True):
                assert_same_bits(g, w, f"{kind} {what}")
    again = ops.quantize_op(x.to(device), code, True, True, got[2])  # with the scale given
    assert_same_bits(again[0], reference.quantize(x, code, True, True)[0], "given scale")


# Elements: up to 4.3 million one launch measures and quantizes, beyond two launches do, with tiles
# of 64 rows to 13 million and of 128 from there on (16-bit; an H200).
LARGE = [
    (2048, 2304),
    (4100, 1500),
    (4096, 2048),
    (4096, 4096),
    (4104, 5000),
    (300, 70000),
    (70000, 300),
    (8192, 4096),
    (12345, 2056),
    (3, 9000000),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LARGE)
def test_large_tensors(cuda: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Around the size where one launch becomes two; ragged edges, many tiles a block. The
    reference runs on the GPU here."""
    x = torch.randn(shape, device=cuda, dtype=dtype)
    x[-1, -1] = 77.0
    got = ops.quantize_op(x, 0, True, True)
    want = reference.quantize(x, 0, True, True)
    assert got[2][0].item() == np.float32(77.0) / np.float32(448.0)
    for g, w, what in zip(got, want, ("rows", "columns", "scale"), strict=True):
        assert (
            torch.equal(g.view(torch.uint8), w.view(torch.uint8))
            if g.dtype.itemsize == 1
            else (torch.equal(g, w))
        ), what


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(device: str, dtype: torch.dtype) -> None:
    """Every layout gives the bits of its contiguous copy, and the input is left alone."""
    base = torch.randn(40, 96, 24).to(dtype).to(device)
    flat = torch.randn(1 + 64 * 48).to(dtype).to(device)
    for name, x in {
        "transposed": base[0].t(),
        "every second column": base[0][:, ::2],
        "every second row": base[0][::2],
        "permuted": base.permute(1, 0, 2),
        "permuted, last moved": base.permute(2, 1, 0),
        "unaligned": flat[1:].view(64, 48),
        "unaligned transposed": flat[1:].view(48, 64).t(),
        "expanded rows": base[0, :1].expand(50, 24),
        "expanded columns": base[0, :, :1].expand(96, 33),
        "expanded scalar": base[0, 0, 0].expand(17, 19),
        "one row of a transposed": base[0].t()[3:4],
        "sliced": base[:, 5:70, 3:20],
        "vector": base[0, :, 3],
    }.items():
        before = x.clone()
        got = ops.quantize_op(x, 0, True, True)
        want = ops.quantize_op(x.contiguous(), 0, True, True)
        for g, w, what in zip(got, want, ("rows", "columns", "scale"), strict=True):
            assert_same_bits(g, w, f"{name} {what}")
        assert_same_bits(x, before, name)


@pytest.mark.parametrize("shape", [(0,), (0, 7), (7, 0), (2, 0, 7), (0, 0)])
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    q = nf.quantize(torch.empty(shape, device=device))
    assert q.data.shape == shape and q.scale.item() == 1
    assert q.dequantize().shape == shape


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    data=st.data(),
    fmt_name=st.sampled_from(FORMATS),
    rows=st.integers(1, 9),
    cols=st.integers(1, 20),
)
def test_properties(data: st.DataObject, fmt_name: str, rows: int, cols: int) -> None:
    """For any finite input: the largest magnitude maps to the largest code, no value moves by
    more than half a step, signs stay."""
    fmt = formats.FORMATS[fmt_name]
    bits = st.floats(-(2.0**100), 2.0**100, width=32, allow_nan=False)
    x = torch.tensor(data.draw(st.lists(bits, min_size=rows * cols, max_size=rows * cols)))
    x = x.view(rows, cols)
    q = nf.quantize(x, fmt_name)
    real = q.dequantize().double()
    amax = x.abs().max().double()
    assert q.scale.isfinite() and q.scale > 0
    if amax == 0:
        assert (real == 0).all()
        return
    if amax < fmt.max * 2.0**-126:
        return  # the multiplier is kept at FLT_MAX and the values flush
    step = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[fmt_name]
    smallest = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}[fmt_name]
    bound = torch.maximum(x.double().abs() * step, amax / fmt.max * smallest / 2) * (1 + 1e-5)
    assert ((real - x.double()).abs() <= bound).all()
    assert (real * x.double() >= 0).all()
    largest = q.data.float().abs().max()
    assert largest == fmt.max


def test_quantized_tensor(device: str) -> None:
    x = torch.randn(2, 3, 50, device=device, dtype=torch.bfloat16, requires_grad=True)
    q = nf.quantize(x)
    data, scale, name, dtype = q
    assert (name, dtype) == ("e4m3", torch.bfloat16)
    assert data.shape == x.shape and data.dtype == torch.float8_e4m3fn and scale.dim() == 0
    assert not data.requires_grad
    assert q.dequantize().dtype == torch.bfloat16
    assert q.dequantize(torch.float32).dtype == torch.float32
    assert ((q.dequantize(torch.float32) - x).abs() <= x.abs() / 16 + scale * 2**-10).all()


def test_errors(device: str) -> None:
    with pytest.raises(ValueError, match="expected a format out of"):
        nf.quantize(torch.ones(3, device=device), "e3m4")
    with pytest.raises(TypeError, match="float32, bfloat16 or float16, got torch.float64"):
        nf.quantize(torch.ones(3, device=device, dtype=torch.float64))
    with pytest.raises(ValueError, match="at least one dimension"):
        nf.quantize(torch.ones((), device=device))
    with pytest.raises(TypeError, match="to be a tensor"):
        nf.quantize([1.0])  # type: ignore[arg-type]
