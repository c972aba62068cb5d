"""Decides that the numbers of FP8 with finer scales are right: against exact arithmetic and the
per-tensor reference, and kernel against reference."""

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

import narrowfloat as nf
from narrowfloat import formats, ops, reference, reference_block
from narrowfloat.formats import BLOCK, BLOCK_POW2, E4M3, E5M2, MX, ROW, Scaling
from narrowfloat.settings import BlockOrientation, BlockQuantize

ALL = {s.format: s for s in (ROW, BLOCK, BLOCK_POW2, MX)}
POWERS = {"fp8_block_pow2": BLOCK_POW2, "mxfp8": MX}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (5, 13), (16, 32), (33, 72), (129, 257), (300, 136), (0, 16), (16, 0), (0, 0)]
# (scaling, flags) of every orientation there is
HOWS = {
    "row": BlockOrientation(ROW.code),
    "row e5m2": BlockOrientation(ROW.code, e5m2=True),
    "block": BlockOrientation(BLOCK.code),
    "block w": BlockOrientation(BLOCK.code, square=True),
    "pow2": BlockOrientation(BLOCK_POW2.code),
    "pow2 w": BlockOrientation(BLOCK_POW2.code, square=True),
    "pow2 operand": BlockOrientation(BLOCK_POW2.code, operand=True),
    "pow2 w operand": BlockOrientation(BLOCK_POW2.code, operand=True, square=True),
    "mx": BlockOrientation(MX.code),
    "mx operand": BlockOrientation(MX.code, operand=True),
}
CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FINITE = CODES[CODES.isfinite()]
GRID = sorted({Fraction(v) for v in FINITE.tolist() if v >= 0})  # index: the code


def scaling_of(how: BlockOrientation) -> Scaling:
    return formats.BY_SCALING[how.scaling]


def quantized(x: Tensor, how: BlockOrientation) -> reference_block.Operand:
    """x [R, C] through the operator and out of its layout."""
    codes, scales, _, _ = ops.block_quantize_op(x, BlockQuantize(how).pack())
    return reference_block.taken(codes, scales, *x.shape, scaling_of(how), how.square)


def values(x: Tensor, how: BlockOrientation) -> Tensor:
    return reference_block.values(quantized(x, how), scaling_of(how), how.square)


def smallest_exponent(amax: float) -> int:
    """The smallest integer e with 2^e >= amax / 448, at least -124; exact."""
    e = -124
    while Fraction(2) ** e < Fraction(amax) / 448:
        e += 1
    return e


# ---- the operator, on each device ----


@pytest.mark.parametrize("name", HOWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_equals_reference(device: str, shape: tuple[int, int], name: str) -> None:
    off = BlockOrientation()
    how = HOWS[name]
    for dtype in DTYPES:
        x = torch.randn(shape).to(dtype)
        for choices in (BlockQuantize(how, how), BlockQuantize(how), BlockQuantize(off, how)):
            got = ops.block_quantize_op(x.to(device), choices.pack())
            want = reference_block.block_quantize(x, choices.pack())
            for a, b, what in zip(got, want, ("rows", "scales", "columns", "scales"), strict=True):
                assert_same_bits(a, b, what)


@pytest.mark.parametrize("name", HOWS)
def test_layouts_of_x(device: str, name: str) -> None:
    base = torch.randn(96, 2 * 80).bfloat16().to(device)
    settings = BlockQuantize(HOWS[name], HOWS[name]).pack()
    for x in (
        base.t(),
        base[:, ::2],
        base[:, 1:],
        base[3:, :77],
        base.view(4, 24, 160).transpose(0, 1),
        base[:1].expand(40, 160),
        base.view(-1)[1 : 1 + 90 * 160].view(90, 160),
        base[0],
    ):
        got = ops.block_quantize_op(x, settings)
        want = reference_block.block_quantize(x.cpu().contiguous(), settings)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)


# ---- scales and codes ----


@pytest.mark.parametrize("name", ["row", "row e5m2", "block", "block w"])
def test_a_block_is_a_tensor_of_its_own(name: str) -> None:
    """fp32 scales: each block has the codes and the scale that it has as a tensor by itself."""
    how = HOWS[name]
    scaling, fmt = scaling_of(how), E5M2 if how.e5m2 else E4M3
    for rows, cols in ((5, 300), (130, 140)):
        x = torch.randn(rows, cols) * torch.logspace(-30, 8, cols)
        x[2], x[3, 4] = 0, 1e-45
        down, across = reference_block.blocks_of(scaling, how.square, rows, cols)
        got = quantized(x, how)
        for i, r in enumerate(range(0, rows, down)):
            for j, c in enumerate(range(0, cols, across)):
                part = x[r : r + down, c : c + across]
                codes, _, scale = reference.quantize(part, fmt.code, True, False)
                m, k = part.shape
                assert_same_bits(got.codes[r : r + down, c : c + across], codes[:m, :k])
                assert_same_bits(got.scales[i, j], scale[0])


@pytest.mark.parametrize("name", ["pow2", "pow2 w", "mx"])
def test_every_code_at_every_exponent(name: str) -> None:
    """448 x 2^e in each block makes its scale 2^e: every finite code comes back as it was."""
    how = HOWS[name]
    scaling = scaling_of(how)
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
        scales = reference_block.fp32_scales(got.scales)
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
    got = reference_block.exponents(torch.tensor(amaxes, dtype=torch.float32)) - 127
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
        width = scaling_of(how).block
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
    assert reference_block.fp32_scales(got.scales).item() == 1 and got.codes[0, 5].float() == 448


def test_properties_of_any_block() -> None:
    """Whatever the bits: no NaN from finite values, an error within half a step, signs kept."""
    floats = st.integers(0, 0xFFFFFFFF).map(
        lambda bits: struct.unpack("<f", struct.pack("<I", bits))[0]
    )

    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
    @hypothesis.given(st.lists(floats, min_size=1, max_size=40), st.sampled_from(sorted(HOWS)))
    def check(numbers: list[float], name: str) -> None:
        how = HOWS[name]._replace(operand=False)
        scaling = scaling_of(how)
        x = torch.tensor(numbers, dtype=torch.float32)[None]
        got = quantized(x, how)
        back = reference_block.values(got, scaling, how.square)
        block = reference_block.blocks_of(scaling, how.square, *x.shape)
        bad = reference_block.block_amax(x, block)
        bad = ~reference_block.over_blocks(bad, block, *x.shape).isfinite()
        assert not back[bad].isfinite().any()
        if scaling.power_of_two:
            scales = reference_block.fp32_scales(got.scales)
            over = reference_block.over_blocks(scales, block, *x.shape)
            good, real = back[~bad].double(), x[~bad].double()
            # the last binade of fp32 may round to 2^128
            step = torch.maximum(real.abs() * 2**-4, over[~bad].double() * 2**-10)
            assert (((good - real).abs() <= step) | good.isinf()).all()
            assert (torch.signbit(good) == torch.signbit(real)).all()
        elif not how.e5m2:
            amax = x[~bad].abs().max() if (~bad).any() else torch.zeros(())
            # below, the multiplier is cut off at FLT_MAX
            if amax > 1e-35:
                assert back[~bad].isfinite().all()
                assert (back[~bad].double().abs() <= amax.double() * (1 + 1e-6)).all()
        assert back[~bad].isnan().sum() == 0

    check()


# ---- specials ----


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", HOWS)
def test_what_is_not_finite_stays_in_its_block(name: str, value: float) -> None:
    how = HOWS[name]
    scaling = scaling_of(how)
    x = torch.randn(140, 300)
    x[5, 9] = value
    clean = x.clone()
    clean[5, 9] = 0
    down, across = reference_block.blocks_of(scaling, how.square, 140, 300)
    inside = torch.zeros(140, 300, dtype=torch.bool)
    inside[5 // down * down : 5 // down * down + down, :across] = True
    if how.operand:
        codes, scales, _, _ = ops.block_quantize_op(x, BlockQuantize(how).pack())
        other = ops.block_quantize_op(clean, BlockQuantize(how).pack())[0]
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
    back = reference_block.values(got, scaling, how.square)
    assert not back[inside].isfinite().any() and back[~inside].isfinite().all()


@pytest.mark.parametrize("name", HOWS)
def test_zero_and_subnormal_blocks(name: str) -> None:
    how = HOWS[name]._replace(operand=False)
    scaling = scaling_of(how)
    x = torch.zeros(3, 256)
    x[1] = -0.0
    got = quantized(x, how)
    scales = reference_block.fp32_scales(got.scales)
    assert (scales == (2.0**-124 if scaling.power_of_two else 1)).all()
    assert (got.codes.view(torch.uint8)[:, :256] == torch.tensor([[0], [0x80], [0]])).all()
    for tiny in (1e-45, 1e-40, 2.0**-126):
        x = torch.full((3, 256), tiny)
        got = quantized(x, how)
        scales = reference_block.fp32_scales(got.scales)
        assert scales.isfinite().all() and got.codes.float().isfinite().all()
        back = reference_block.values(got, scaling, how.square)
        assert ((back.double() - x.double()).abs() <= x.double()).all()


def test_a_block_does_not_see_its_neighbours() -> None:
    """Each block's values are the same whatever the others are; in squares too."""
    for name, how in HOWS.items():
        x = torch.randn(256, 512)
        other = x * 1e-20
        other[:128, 128:256] = x[:128, 128:256]
        if scaling_of(how) is ROW or how.operand:
            continue
        a, b = values(x, how), values(other, how)
        assert torch.equal(a[:128, 128:256], b[:128, 128:256]), name


# ---- layout ----


@pytest.mark.parametrize("name", HOWS)
@pytest.mark.parametrize("rows, cols", [(1, 1), (33, 72), (129, 257), (200, 136), (16, 512)])
def test_padding(name: str, rows: int, cols: int) -> None:
    how = HOWS[name]
    scaling = scaling_of(how)
    x = torch.randn(rows, cols) - 4  # no zeros
    codes, scales, columns, column_scales = ops.block_quantize_op(x, BlockQuantize(how, how).pack())
    for c, s, t in ((codes, scales, x), (columns, column_scales, x.t())):
        r, k = t.shape
        size = c.element_size()
        bits = c.view({1: torch.uint8, 2: torch.int16}[size])
        inside = bits[:r, :k]
        assert (bits != 0).sum() == (inside != 0).sum()
        wide = how.operand or scaling is MX
        assert c.shape == (formats.padded(r), formats.padded32(k) if wide else formats.padded(k))
        assert c.is_contiguous() and s.is_contiguous()
        if how.operand:
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
        scaling = scaling_of(how)
        plain = reference_block.quantize_operand(x, scaling, square=how.square).scales
        _, scales, _, _ = ops.block_quantize_op(x, BlockQuantize(how).pack())
        across = formats.padded32(cols) // 32 + 3 & ~3
        for r in range(plain.shape[0]):
            for c in range(plain.shape[1]):
                if scaling is MX:
                    tile = (r // 128) * (across // 4) + c // 4
                    at = scales[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4]
                else:
                    at = scales[r, c] if how.square else scales[c, r]
                assert at == plain[r, c]


@pytest.mark.parametrize("name", HOWS)
def test_columns_are_rows_of_the_transposed(name: str) -> None:
    how = HOWS[name]
    x = torch.randn(140, 300)
    columns = ops.block_quantize_op(x, BlockQuantize(BlockOrientation(), how).pack())
    assert columns[0].shape == columns[1].shape == (0,)
    assert (columns[0].dtype, columns[1].dtype) == (torch.float8_e4m3fn, torch.float32)
    rows = ops.block_quantize_op(x.t(), BlockQuantize(how).pack())
    for a, b in zip(columns[2:], rows[:2], strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("name", ["block w", "pow2 w", "pow2 w operand"])
def test_squares_are_the_same_numbers_both_ways(name: str) -> None:
    """fprop and dgrad see one weight."""
    how = HOWS[name]
    x = torch.randn(200, 300)
    rows, rows_scales, columns, columns_scales = ops.block_quantize_op(
        x, BlockQuantize(how, how).pack()
    )
    assert_same_bits(rows[:200, :300], columns[:300, :200].t())
    if not how.operand:
        assert_same_bits(rows_scales[:2, :3], columns_scales[:3, :2].t())


@pytest.mark.parametrize("name", ["pow2 operand", "pow2 w operand", "mx operand"])
def test_an_operand_is_code_times_scale_exactly(name: str) -> None:
    """Every code at the smallest scale, subnormal numbers of bf16 among them, and random ones."""
    how = HOWS[name]
    packed = how._replace(operand=False)
    smallest = torch.cat([FINITE, torch.full((2,), 448.0)]).double() * 2.0**-124
    for x in (smallest.float().view(1, -1), torch.randn(140, 300) * torch.logspace(-38, 37, 300)):
        operand = ops.block_quantize_op(x, BlockQuantize(how).pack())[0]
        r, c = x.shape
        want = values(x, packed)
        assert_same_bits(operand[:r, :c].float(), want)


# ---- the parts that quantize() shows ----


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("shape", [(5,), (7, 33), (2, 3, 200), (1, 1), (0, 40), (4, 0)], ids=str)
def test_quantize(device: str, format: str, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        x = torch.randn(shape, device=device).to(dtype)
        q = nf.quantize(x, format)
        assert isinstance(q, nf.BlockTensor) and q.format == format and q.dtype == dtype
        assert q.data.shape == shape and q.data.dtype == torch.float8_e4m3fn
        block = ALL[format].block
        assert q.scales.shape == (*shape[:-1], -(-shape[-1] // block) if block else 1)
        kind = torch.float8_e8m0fnu if format == "mxfp8" else torch.float32
        assert q.scales.dtype == kind
        back = q.dequantize()
        assert back.shape == shape and back.dtype == dtype
        assert q.dequantize(torch.float32).dtype == torch.float32
        if x.numel():
            assert (back.float() - x.float()).norm() <= 0.045 * x.float().norm()


@pytest.mark.parametrize("format", ["fp8_block", "fp8_block_pow2"])
def test_quantize_squares(device: str, format: str) -> None:
    x = torch.randn(130, 300, device=device)
    q = nf.quantize(x, format, two_d=True)
    assert q.two_d and q.scales.shape == (2, 3)
    assert (q.dequantize() - x).norm() < 0.03 * x.norm()
    assert_same_bits(nf.quantize(x.t(), format, two_d=True).scales.t(), q.scales)


def test_quantize_carries_no_gradient(device: str) -> None:
    x = torch.randn(4, 40, device=device, requires_grad=True)
    assert not nf.quantize(x, "mxfp8").dequantize().requires_grad


def test_errors(device: str) -> None:
    x = torch.ones(4, 8, device=device)
    for how, text in (
        (BlockOrientation(ROW.code, operand=True), "powers of two as scales of a bf16 operand"),
        (BlockOrientation(BLOCK.code, operand=True), "powers of two as scales of a bf16 operand"),
        (BlockOrientation(MX.code, e5m2=True), "e5m2 with scales by row"),
        (BlockOrientation(BLOCK.code, e5m2=True), "e5m2 with scales by row"),
        (BlockOrientation(MX.code, square=True), "squares with blocks of 128"),
        (BlockOrientation(ROW.code, square=True), "squares with blocks of 128"),
        (BlockOrientation(5), "a scaling"),
    ):
        for choices in (BlockQuantize(how), BlockQuantize(columns=how)):
            with pytest.raises(ValueError, match=f"block_quantize: expected {text}"):
                ops.block_quantize_op(x, choices.pack())
    with pytest.raises(TypeError, match="float64"):
        ops.block_quantize_op(x.double(), 1)
    for format, given in (
        ("mxfp8", {"two_d": True}),
        ("fp8_row", {"two_d": True}),
        ("fp8_block", {"stochastic": True}),
        ("mxfp8", {"four_over_six": True}),
    ):
        with pytest.raises(ValueError, match=f"quantize: expected .* False for {format}"):
            nf.quantize(x, format, **given)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="'fp8_block', 'fp8_block_pow2', 'fp8_row', 'mxfp4'"):
        nf.quantize(x, "mxfp6")
