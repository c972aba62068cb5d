"""Tests of the numbers and the layout of FP8 with rowwise and blockwise scaling: against exact
arithmetic and the reference by tensor."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from conftest import assert_same_bits
from torch import Tensor

from narrowfloat import formats, ops
from narrowfloat.cast import Cast
from narrowfloat.formats import MX, ROW
from narrowfloat.reference import block as reference
from narrowfloat.reference import linear
from narrowfloat.spec import both

HOWS = {
    "row": Cast("e4m3", "row"),
    "row e5m2": Cast("e5m2", "row"),
    "block": Cast("e4m3", "block"),
    "block w": Cast("e4m3", "block", square=True),
    "pow2": Cast("e4m3", "block_pow2"),
    "pow2 w": Cast("e4m3", "block_pow2", square=True),
    "mx": Cast("e4m3", "mx"),
}
# every one also as a bf16 operand where there is that
POWERS = ["pow2", "pow2 w", "mx"]
FORMS = [*((name, False) for name in HOWS), *((name, True) for name in POWERS)]
CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FINITE = CODES[CODES.isfinite()]
GRID = sorted({Fraction(v) for v in FINITE.tolist() if v >= 0})  # index: the code


def made(x: Tensor, how: Cast, as_operand: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of x by the operator, and their scales."""
    choices = both(how, None)._replace(rows_as_operand=as_operand)
    codes, scales, *rest = ops.quantize_op(x, choices.pack())
    assert all(t.numel() == 0 for t in rest)  # no columns, no scale of the tensor
    return codes, scales


def both_ways(x: Tensor, how: Cast, as_operand: bool = False) -> tuple[Tensor, ...]:
    choices = both(how, how)._replace(rows_as_operand=as_operand, columns_as_operand=as_operand)
    return ops.quantize_op(x, choices.pack())


def quantized(x: Tensor, how: Cast) -> reference.Operand:
    """x [R, C] through the operator and out of its layout."""
    return reference.taken(*made(x, how), *x.shape, how.of, how.square)


def values(x: Tensor, how: Cast) -> Tensor:
    return reference.values(quantized(x, how), how.of, how.square)


def smallest_exponent(amax: float) -> int:
    """The smallest integer e with 2^e >= amax / 448, at least -124; exact."""
    e = -124
    while Fraction(2) ** e < Fraction(amax) / 448:
        e += 1
    return e


# ---- scales and codes ----


@pytest.mark.parametrize("name", ["row", "row e5m2", "block", "block w"])
def test_a_block_is_a_tensor_of_its_own(name: str) -> None:
    """fp32 scales: each block has the codes and the scale that it has as a tensor by itself."""
    how = HOWS[name]
    scaling, by_tensor = how.of, both(Cast(how.element), None).pack()
    for rows, cols in ((5, 300), (130, 140)):
        x = torch.randn(rows, cols) * torch.logspace(-30, 8, cols)
        x[2], x[3, 4] = 0, 1e-45
        down, across = reference.blocks_of(scaling, how.square, rows, cols)
        got = quantized(x, how)
        for i, r in enumerate(range(0, rows, down)):
            for j, c in enumerate(range(0, cols, across)):
                part = x[r : r + down, c : c + across]
                codes, _, _, _, scale = linear.quantize(part, by_tensor)
                m, k = part.shape
                assert_same_bits(got.codes[r : r + down, c : c + across], codes[:m, :k])
                assert_same_bits(got.scales[i, j], scale[0])


@pytest.mark.parametrize("name", ["pow2", "pow2 w", "mx"])
def test_every_code_at_every_exponent(name: str) -> None:
    """448 x 2^e in each block makes its scale 2^e: every finite code comes back as it was."""
    how = HOWS[name]
    scaling = how.of
    per_block = scaling.block - 1
    filled = torch.cat([FINITE, torch.zeros(-len(FINITE) % per_block)]).view(-1, per_block)
    x = torch.cat([torch.full((len(filled), 1), 448.0), filled], 1)
    if how.square:  # a block has more room than there are codes
        x = x.reshape(1, -1)
        x = torch.stack([row.roll(i) for i, row in enumerate([x[0, :128], x[0, 128:256]])])
        x[1, 127] = 448
    else:
        x = x.reshape(1, -1)
    for e in (-124, -123, -60, -1, 0, 1, 60, 118, 119):
        scaled = (x.double() * 2.0**e).float()
        assert (scaled.double() == x.double() * 2.0**e).all()
        got = quantized(scaled, how)
        scales = reference.fp32_scales(got.scales)
        assert (scales.double() == 2.0**e).all(), e
        assert_same_bits(got.codes.float(), x)
        if scaling is MX:
            assert (got.scales == e + 127).all()


def test_exponents_against_exact_arithmetic() -> None:
    """At each power of two, its neighbours, the limits, and at random."""
    amaxes = [0.0, 1e-45, 1.2e-38, float(np.finfo(np.float32).max)]
    for e in range(-130, 120):
        for at in (448.0 * 2.0**e, 2.0**e * 256, 2.0**e):
            if at < 3.4e38:
                near = np.float32(at)
                amaxes += [
                    float(near),
                    float(np.nextafter(near, np.float32(0))),
                    float(np.nextafter(near, np.float32(3.4e38))),
                ]
    bits = torch.randint(0, 0x7F800000, (2000,), generator=torch.Generator().manual_seed(0))
    amaxes += bits.to(torch.int32).view(torch.float32).tolist()
    got = reference.exponents(torch.tensor(amaxes, dtype=torch.float32)) - 127
    want = [smallest_exponent(amax) for amax in amaxes]
    wrong = [(a, g, w) for a, g, w in zip(amaxes, got.tolist(), want, strict=True) if g != w]
    assert not wrong, wrong[:5]
    assert 3 <= got.min() + 127 and got.max() + 127 == 247


def nearest(value: Fraction) -> Fraction:
    """To E4M3: nearest, ties to the even code, saturating; of a magnitude."""
    above = next((i for i, v in enumerate(GRID) if v >= value), len(GRID) - 1)
    below = max(above - 1, 0)
    up, down = GRID[above] - value, value - GRID[below]
    if up == down:
        return GRID[above if above % 2 == 0 else below]
    return GRID[above] if up < down or value >= GRID[above] else GRID[below]


@pytest.mark.parametrize("name", ["pow2", "mx"])
def test_codes_against_exact_arithmetic(name: str) -> None:
    torch.manual_seed(1)
    how = HOWS[name]
    for size in (1.0, 1e-37, 3e37, 1e-41, 1.0):
        x = torch.randn(2, 64) * size
        got = values(x, how)
        width = how.of.block
        for r in range(2):
            for c in range(64):
                start = c // width * width
                block = x[r, start : start + width]
                e = smallest_exponent(float(block.abs().max()))
                exact = nearest(Fraction(abs(float(x[r, c]))) / Fraction(2) ** e)
                assert Fraction(abs(float(got[r, c]))) == exact * Fraction(2) ** e
                assert math.copysign(1, got[r, c]) == math.copysign(1, x[r, c])


@pytest.mark.parametrize("name", ["pow2", "mx"])
def test_scales_are_rounded_up(name: str) -> None:
    """Nothing saturates: 500 is 512 with the scale 2, not 448 (O-28)."""
    x = torch.full((1, 32), 0.1)
    x[0, 5] = 500
    assert values(x, HOWS[name])[0, 5] == 512
    x[0, 5] = 448
    got = quantized(x, HOWS[name])
    assert reference.fp32_scales(got.scales).item() == 1 and got.codes[0, 5].float() == 448


def test_properties_of_any_block() -> None:
    """Whatever the bits: no NaN from finite values, an error within half a step, signs kept."""
    floats = st.integers(0, 0xFFFFFFFF).map(
        lambda bits: struct.unpack("<f", struct.pack("<I", bits))[0]
    )

    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
    @hypothesis.given(st.lists(floats, min_size=1, max_size=40), st.sampled_from(sorted(HOWS)))
    def check(numbers: list[float], name: str) -> None:
        how = HOWS[name]
        scaling = how.of
        x = torch.tensor(numbers, dtype=torch.float32)[None]
        got = quantized(x, how)
        back = reference.values(got, scaling, how.square)
        block = reference.blocks_of(scaling, how.square, *x.shape)
        bad = reference.block_amax(x, block)
        bad = ~reference.over_blocks(bad, block, *x.shape).isfinite()
        assert not back[bad].isfinite().any()
        if scaling.power_of_two:
            scales = reference.fp32_scales(got.scales)
            over = reference.over_blocks(scales, block, *x.shape)
            good, real = back[~bad].double(), x[~bad].double()
            # the last binade of fp32 may round to 2^128
            step = torch.maximum(real.abs() * 2**-4, over[~bad].double() * 2**-10)
            assert (((good - real).abs() <= step) | good.isinf()).all()
            assert (torch.signbit(good) == torch.signbit(real)).all()
        elif how.element == "e4m3":
            amax = x[~bad].abs().max() if (~bad).any() else torch.zeros(())
            # below, the multiplier is cut off at FLT_MAX
            if amax > 1e-35:
                assert back[~bad].isfinite().all()
                assert (back[~bad].double().abs() <= amax.double() * (1 + 1e-6)).all()
        assert back[~bad].isnan().sum() == 0

    check()


# ---- specials ----


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name, as_operand", FORMS)
def test_what_is_not_finite_stays_in_its_block(name: str, as_operand: bool, value: float) -> None:
    how = HOWS[name]
    scaling = how.of
    x = torch.randn(140, 300)
    x[5, 9] = value
    clean = x.clone()
    clean[5, 9] = 0
    down, across = reference.blocks_of(scaling, how.square, 140, 300)
    inside = torch.zeros(140, 300, dtype=torch.bool)
    inside[5 // down * down : 5 // down * down + down, :across] = True
    if as_operand:
        codes, scales = made(x, how, True)
        other = made(clean, how, True)[0]
        bits = codes[:140, :300].view(torch.int16)
        assert (bits[inside] == 0x7FC0).all()
        assert torch.equal(bits[~inside], other[:140, :300].view(torch.int16)[~inside])
        assert not codes[140:].view(torch.int16).any() and scales.numel() == 0
        return
    got, other = quantized(x, how), quantized(clean, how)
    codes, other_codes = (q.codes.view(torch.uint8) for q in (got, other))
    assert torch.equal(codes[~inside], other_codes[~inside])
    if scaling is MX:
        assert got.scales[5, 0] == 0xFF and not codes[inside].any()
    elif scaling.power_of_two or math.isnan(value):
        assert got.scales[5 // down, 0].isnan() and (codes[inside] == 0x7F).all()
    else:
        assert got.scales[5 // down, 0] == math.inf
        assert codes[5, 9] == 0x7F and ((codes[inside] & 0x7F) != 0).sum() == 1
    back = reference.values(got, scaling, how.square)
    assert not back[inside].isfinite().any() and back[~inside].isfinite().all()


@pytest.mark.parametrize("name", HOWS)
def test_zero_and_subnormal_blocks(name: str) -> None:
    how = HOWS[name]
    scaling = how.of
    x = torch.zeros(3, 256)
    x[1] = -0.0
    got = quantized(x, how)
    scales = reference.fp32_scales(got.scales)
    assert (scales == (2.0**-124 if scaling.power_of_two else 1)).all()
    assert (got.codes.view(torch.uint8)[:, :256] == torch.tensor([[0], [0x80], [0]])).all()
    for tiny in (1e-45, 1e-40, 2.0**-126):
        x = torch.full((3, 256), tiny)
        got = quantized(x, how)
        scales = reference.fp32_scales(got.scales)
        assert scales.isfinite().all() and got.codes.float().isfinite().all()
        back = reference.values(got, scaling, how.square)
        assert ((back.double() - x.double()).abs() <= x.double()).all()


def test_a_block_does_not_see_its_neighbours() -> None:
    """Each block's values are the same whatever the others are; in squares too."""
    for name, how in HOWS.items():
        x = torch.randn(256, 512)
        other = x * 1e-20
        other[:128, 128:256] = x[:128, 128:256]
        if how.of is ROW:
            continue
        a, b = values(x, how), values(other, how)
        assert torch.equal(a[:128, 128:256], b[:128, 128:256]), name


# ---- layout ----


@pytest.mark.parametrize("name, as_operand", FORMS)
@pytest.mark.parametrize("rows, cols", [(1, 1), (33, 72), (129, 257), (200, 136), (16, 512)])
def test_padding(name: str, as_operand: bool, rows: int, cols: int) -> None:
    how = HOWS[name]
    scaling = how.of
    x = torch.randn(rows, cols) - 4  # no zeros
    codes, scales, columns, column_scales, _ = both_ways(x, how, as_operand)
    for c, s, t in ((codes, scales, x), (columns, column_scales, x.t())):
        r, k = t.shape
        size = c.element_size()
        bits = c.view({1: torch.uint8, 2: torch.int16}[size])
        inside = bits[:r, :k]
        assert (bits != 0).sum() == (inside != 0).sum()
        wide = as_operand or scaling is MX
        assert c.shape == (formats.padded(r), formats.padded32(k) if wide else formats.padded(k))
        assert c.is_contiguous() and s.is_contiguous()
        if as_operand:
            assert c.dtype == torch.bfloat16 and s.shape == (0,)
        elif scaling is ROW:
            assert s.shape == (formats.padded(r),) and (s[r:] == 1).all()
        elif scaling is MX:
            groups = formats.padded32(k) // 32
            assert s.shape == ((r + 127 & ~127) * (groups + 3 & ~3),)
            assert s.dtype == torch.uint8 and (s != 0).sum() == r * groups
        elif how.square:
            down, across = -(-r // 128), -(-k // 128)
            assert s.shape == (down, -(-across // 4) * 4) and not s[:, across:].any()
        else:
            assert s.shape == (-(-k // 128), formats.padded(r)) and (s[:, r:] == 1).all()


def test_where_a_scale_lies() -> None:
    """Each scale at its place, by the formulas of the contract with cuBLASLt."""
    rows, cols = 150, 700
    x = torch.randn(rows, cols)
    for name in ("mx", "pow2", "block w"):
        how = HOWS[name]
        scaling = how.of
        plain = reference.quantize_operand(x, scaling, square=how.square).scales
        _, scales = made(x, how)
        across = formats.padded32(cols) // 32 + 3 & ~3
        for r in range(plain.shape[0]):
            for c in range(plain.shape[1]):
                if scaling is MX:
                    tile = (r // 128) * (across // 4) + c // 4
                    at = scales[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4]
                else:
                    at = scales[r, c] if how.square else scales[c, r]
                assert at == plain[r, c]


@pytest.mark.parametrize("name, as_operand", FORMS)
def test_columns_are_rows_of_the_transposed(name: str, as_operand: bool) -> None:
    how = HOWS[name]
    x = torch.randn(140, 300)
    choices = both(None, how)._replace(columns_as_operand=as_operand)
    columns = ops.quantize_op(x, choices.pack())
    assert columns[0].shape == columns[1].shape == columns[4].shape == (0,)
    assert (columns[0].dtype, columns[1].dtype) == (torch.float8_e4m3fn, torch.float32)
    for a, b in zip(columns[2:4], made(x.t(), how, as_operand), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(
    "name, as_operand", [("block w", False), ("pow2 w", False), ("pow2 w", True)]
)
def test_squares_are_the_same_numbers_both_ways(name: str, as_operand: bool) -> None:
    """fprop and dgrad see one weight."""
    x = torch.randn(200, 300)
    rows, rows_scales, columns, columns_scales, _ = both_ways(x, HOWS[name], as_operand)
    assert_same_bits(rows[:200, :300], columns[:300, :200].t())
    if not as_operand:
        assert_same_bits(rows_scales[:2, :3], columns_scales[:3, :2].t())


@pytest.mark.parametrize("name", POWERS)
def test_an_operand_is_code_times_scale_exactly(name: str) -> None:
    """Every code at the smallest scale, subnormal numbers of bf16 among them, and random ones."""
    how = HOWS[name]
    smallest = torch.cat([FINITE, torch.full((2,), 448.0)]).double() * 2.0**-124
    for x in (smallest.float().view(1, -1), torch.randn(140, 300) * torch.logspace(-38, 37, 300)):
        operand = made(x, how, True)[0]
        r, c = x.shape
        assert_same_bits(operand[:r, :c].float(), values(x, how))
