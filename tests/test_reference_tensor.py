"""Tests of FP8's numbers with one scale a tensor: over every code, and for any input."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from conftest import assert_same_bits

import narrowfloat as nf
from narrowfloat import formats

FORMATS = sorted(formats.FORMATS)


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


def test_sizes_are_padded_to_the_least_that_cublaslt_takes() -> None:
    """Its rules in numbers (formats.py), not by the functions that every layout is made with."""
    assert [formats.padded(n) for n in (0, 1, 15, 16, 17, 32, 100)] == [0, 16, 16, 16, 32, 32, 112]
    assert [formats.padded32(n) for n in (0, 1, 31, 32, 33, 100)] == [0, 32, 32, 32, 64, 128]
    assert formats.codes_shape(33, 100) == (48, 64) and formats.codes_shape(16, 32) == (16, 16)
    groups = [formats.scale_groups(n) for n in (0, 1, 64, 65, 128)]
    assert groups == [0, 4, 4, 8, 8]
    assert formats.scales_size(128, 64) == 512 and formats.scales_size(129, 65) == 2048
