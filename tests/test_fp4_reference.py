"""Decides that FP4's numbers are right: against a scalar model, and kernel against reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import assert_same_bits
from torch import Tensor

import narrowfloat as nf
from narrowfloat import formats, numerics_fp4, ops, reference_fp4
from narrowfloat.settings import FP4Quantize, Orientation

F32 = np.float32
FLT_MAX = np.finfo(F32).max
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (5, 13), (16, 32), (33, 72), (129, 257), (300, 136), (0, 16), (16, 0)]

ON = Orientation(True)
BF16 = ON._replace(operand=True)
RANDOM = ON._replace(stochastic=True)
ROTATED = ON._replace(rotated=True)
SIX = ON._replace(four_over_six=True)
OFF = Orientation()
CHOICES = {
    "rows": FP4Quantize(ON),
    "columns": FP4Quantize(OFF, ON),
    "nearest": FP4Quantize(ON, ON),
    "operands": FP4Quantize(BF16, BF16),
    "x": FP4Quantize(BF16, ROTATED),
    "x rotated rows": FP4Quantize(ROTATED, BF16),
    "x four over six": FP4Quantize(BF16._replace(four_over_six=True), SIX._replace(rotated=True)),
    "w": FP4Quantize(BF16, two_d=True),
    "w both": FP4Quantize(ON, BF16, two_d=True),
    "w four over six": FP4Quantize(SIX, SIX, two_d=True),
    "w 1 x 16": FP4Quantize(SIX, SIX),
    "dy": FP4Quantize(BF16._replace(stochastic=True), BF16._replace(stochastic=True, rotated=True)),
    "dy packed": FP4Quantize(RANDOM, RANDOM._replace(rotated=True)),
    "dy scaled up": FP4Quantize(
        RANDOM._replace(scale_up=True), RANDOM._replace(scale_up=True, rotated=True)
    ),
    "dy nearest scaled up": FP4Quantize(ON._replace(scale_up=True), ON._replace(scale_up=True)),
    "w random": FP4Quantize(RANDOM, RANDOM, two_d=True),
    "mx": FP4Quantize(ON, ON, mx=True),
    "mx operands": FP4Quantize(BF16, BF16, mx=True),
    "mx x": FP4Quantize(BF16, ROTATED, mx=True),
    "mx dy": FP4Quantize(
        BF16._replace(stochastic=True), BF16._replace(stochastic=True, rotated=True), mx=True
    ),
    "mx dy packed": FP4Quantize(RANDOM, RANDOM._replace(rotated=True), mx=True),
}
SEED = torch.tensor([0x123456789ABCDEF, -0x0FEDCBA987654321])


def assert_equals_reference(x: Tensor, choices: FP4Quantize, device: str) -> None:
    got = ops.fp4_quantize_op(x.to(device), SEED.to(device), choices.pack())
    want = reference_fp4.fp4_quantize(x, SEED, choices.pack())
    names = ("rows", "scales of rows", "columns", "scales of columns", "tensor scales")
    for a, b, name in zip(got, want, names, strict=True):
        assert_same_bits(a, b, name)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_equals_reference(device: str, shape: tuple[int, int], name: str) -> None:
    for dtype in DTYPES:
        x = torch.randn(shape).to(dtype)
        assert_equals_reference(x, CHOICES[name], device)


@pytest.mark.parametrize("name", ["nearest", "x", "w", "dy", "mx", "mx dy packed"])
def test_layouts(device: str, name: str) -> None:
    base = torch.randn(96, 2 * 80).bfloat16()
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
        got = ops.fp4_quantize_op(x.to(device), SEED.to(device), CHOICES[name].pack())
        want = reference_fp4.fp4_quantize(x.contiguous(), SEED, CHOICES[name].pack())
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
    moved = base.to(device)
    for x in (moved.t(), moved[:, ::2], moved[:, 1:], moved[3:, :77]):  # strides there too
        got = ops.fp4_quantize_op(x, SEED.to(device), CHOICES[name].pack())
        want = reference_fp4.fp4_quantize(x.cpu().contiguous(), SEED, CHOICES[name].pack())
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)


def special(kind: str, dtype: torch.dtype) -> Tensor:
    x = torch.randn(72, 100)
    if kind == "zeros":
        x = x * 0
    elif kind == "tiny":  # top / amax overflows
        x = x * 1e-39
    elif kind == "smallest":
        x = x.sign() * 1e-45
    elif kind == "huge":
        x = x * (6000 if dtype == torch.float16 else 5e37)
    elif kind == "largest":  # bf16 and a rotation overflow
        x = x.sign() * torch.finfo(dtype).max
    elif kind == "outlier":
        x = x * 1e-3
        x[-1, -1] = 1000.0
    elif kind == "scales apart":  # from flushed blocks to the largest
        x = x * torch.logspace(-9, 3, 72)[:, None]
    elif kind == "blocks apart":
        x = x * torch.logspace(-9, 3, 100)
    elif kind in ("nan", "inf", "-inf"):
        x[40, 20] = float(kind)
    elif kind == "all nan":
        x = x * math.nan
    return x.to(dtype)


KINDS = "zeros tiny smallest huge largest outlier nan inf -inf".split() + [
    "scales apart",
    "blocks apart",
    "all nan",
]


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_special_values(device: str, kind: str, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_equals_reference(special(kind, dtype), CHOICES[name], device)


@pytest.mark.parametrize("name", ["nearest", "w four over six", "x", "dy packed", "mx", "mx dy"])
def test_every_bf16_value(device: str, name: str) -> None:
    """All bit patterns, the finite ones, and those without the largest, which flush the others."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = x.reshape(256, 256)
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
    for case in (finite, x, torch.where(finite.abs() < 8, finite, 0)):
        assert_equals_reference(case, CHOICES[name], device)


# ---- against a scalar model, written from the formats' definitions ----

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def nearest_even(value: float, table: np.ndarray | list[float]) -> int:
    """Index of the nearest entry; between two the even one."""
    distances = np.abs(np.asarray(table, dtype=np.float64) - float(value))
    best = np.flatnonzero(distances == distances.min())
    return int(best[0] if best[0] % 2 == 0 else best[-1])


def model_nvfp4(x: np.ndarray, six: bool, up: bool) -> tuple[np.ndarray, np.ndarray, np.floating]:
    """(codes, scale bytes, tensor scale) of fp32 x [R, 16 G], block by block."""
    rows, cols = x.shape
    top = F32(256 * 6 if six else 448 * 6)
    amax = np.abs(x).max()
    s = min(top / amax, FLT_MAX)
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((rows, cols // 16), np.uint8)
    for r in range(rows):
        for g in range(cols // 16):
            block = x[r, 16 * g : 16 * g + 16]
            made = []
            for part in [F32(1 / 6), F32(0.25)] if six else [F32(1 / 6)]:
                wanted = min(np.abs(block).max() * F32(s * part), FLT_MAX)
                byte = nearest_even(wanted, E4M3)
                if up and E4M3[byte] < wanted and byte < 0x7E:
                    byte += 1
                value = F32(E4M3[byte])
                mine, error = np.zeros(16, np.uint8), F32(0)
                if byte:
                    multiplier = min(F32(1) / F32(value * F32(F32(1) / s)), FLT_MAX)
                    for i, v in enumerate(np.abs(block) * multiplier):
                        index = nearest_even(v, GRID)
                        mine[i] = index | (8 if np.signbit(block[i]) else 0)
                        difference = F32(F32(GRID[index]) - v)
                        error = F32(error + F32(difference * difference))
                made.append((F32(F32(error * value) * value), byte, mine))
            best = made[1] if len(made) > 1 and made[1][0] < made[0][0] else made[0]
            scales[r, g], codes[r, 16 * g : 16 * g + 16] = best[1], best[2]
    return codes, scales, amax / top


@pytest.mark.parametrize("six, up", [(False, False), (True, False), (False, True)])
def test_nvfp4_is_the_model(six: bool, up: bool) -> None:
    x = torch.randn(20, 64) * torch.logspace(-4, 2, 20)[:, None]
    x[3, 16:32] = 0
    x = x.bfloat16().float()
    how = ON._replace(four_over_six=six, scale_up=up)
    got = numerics_fp4.quantize_operand(x, how)
    codes, scales, scale = model_nvfp4(x.numpy(), six, up)
    np.testing.assert_array_equal(got.codes[:20].numpy(), codes)
    np.testing.assert_array_equal(got.scales[:20].numpy(), scales)
    assert got.scale.item() == scale


def test_mxfp4_is_the_model() -> None:
    x = (torch.randn(20, 64) * torch.logspace(-7, 2, 20)[:, None]).bfloat16()
    x[3, 32:] = 0
    q = nf.quantize(x, "mxfp4")
    assert q.scale == 1 and q.scales.dtype == torch.float8_e8m0fnu
    largest = x.abs().max().item()
    exponent_of_all = math.ceil(math.log2(largest / 6))
    for r in range(20):
        for b in range(2):
            block = x[r, 32 * b : 32 * b + 32].double()
            amax = block.abs().max().item()
            if amax == 0 or math.ceil(math.log2(amax / 6)) < exponent_of_all - 17:
                assert (q.dequantize()[r, 32 * b : 32 * b + 32] == 0).all()
                continue
            exponent = math.ceil(math.log2(amax / 6))
            assert q.scales.view(torch.uint8)[r, b] == exponent + 127
            values = [
                math.copysign(GRID[nearest_even(abs(v) / 2.0**exponent, GRID)], v) for v in block
            ]
            got = q.dequantize(torch.float64)[r, 32 * b : 32 * b + 32]
            assert (got == torch.tensor(values, dtype=torch.float64) * 2.0**exponent).all()


def test_philox_is_random123s() -> None:
    """The known answers that come with Random123, for philox4x32 10."""
    for counter, key, answer in (
        ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ):
        c, k = (tuple(torch.tensor(word) for word in words) for words in (counter, key))
        words = numerics_fp4.philox(c, k)  # type: ignore[arg-type]
        assert " ".join(f"{int(word):08x}" for word in words) == answer


def test_random_bytes_are_uniform_and_apart() -> None:
    rows, columns = (numerics_fp4.random_bytes(SEED, 64, 64, 64, at) for at in (0, 1))
    assert rows.min() == 0 and rows.max() == 255
    for r in (rows, columns):
        counts = torch.bincount(r.flatten(), minlength=256).double()
        expected = r.numel() / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * math.sqrt(2 * 255)
    other = numerics_fp4.random_bytes(SEED + torch.tensor([0, 1]), 64, 64, 64, 0)
    for a, b in (
        (rows, columns),
        (rows, other),
        (rows[1:], rows[:-1]),
        (rows[:, 1:], rows[:, :-1]),
    ):
        r = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1]
        assert r.abs() < 0.02


def test_rotation_is_orthogonal() -> None:
    """H over 4 is orthonormal and its own inverse; the signs are those of the constant."""
    matrix = numerics_fp4.rotate(torch.eye(16))  # row i: the image of element i
    assert torch.equal(matrix @ matrix.t(), 16 * torch.eye(16))
    signs = torch.tensor([-1.0 if formats.SIGNS >> i & 1 else 1.0 for i in range(16)])
    assert torch.equal(matrix[:, 0], signs)  # H's first row is ones
    hadamard = matrix * signs[:, None]
    assert torch.equal(hadamard, hadamard.t())
    assert hadamard[3, 5] == (-1) ** bin(3 & 5).count("1")


@pytest.mark.parametrize("mx", [False, True])
def test_stochastic_rounding_keeps_the_mean(mx: bool) -> None:
    """Between any two neighbours: the mean over many bytes is the value to 1/256 of the gap."""
    u = torch.linspace(0, 3, 4097)
    every = torch.arange(256)
    codes = numerics_fp4.round_stochastic(u[:, None].expand(-1, 256), every.expand(4097, -1))
    means = numerics_fp4.grid(codes).double().mean(1)
    gaps = torch.where(u < 1, 0.5, torch.where(u < 2, 1.0, 2.0))
    assert ((means - 2 * u).abs() <= gaps / 512 + 1e-9).all()
    x = torch.rand(4, 64).bfloat16() + 0.1
    how = RANDOM._replace(scale_up=True)
    total = torch.zeros(4, 64)
    for n in range(400):
        q = numerics_fp4.quantize_operand(x, how, mx, seed=torch.tensor([n, 7]))
        total += (reference_fp4.values(q.codes, q.scales) * q.scale)[:4, :64]
    assert (total.mean() / 400 / x.float().mean() - 1).abs() < 2e-3


def test_tiles() -> None:
    rows, cols = 300, 200
    groups = 13
    scales = torch.randint(1, 120, (rows, groups), dtype=torch.uint8)
    tiled = reference_fp4.tile(scales, rows, cols)
    assert tiled.numel() == formats.scales_size(rows, cols) == 384 * 16
    seen = torch.zeros(tiled.numel(), dtype=torch.bool)
    for r in range(rows):
        for c in range(groups):
            at = ((r // 128) * 4 + c // 4) * 512 + (r % 32) * 16 + r % 128 // 32 * 4 + c % 4
            assert tiled[at] == scales[r, c]
            seen[at] = True
    assert (tiled[~seen] == 0).all()
    assert torch.equal(reference_fp4.untile(tiled, rows, cols), scales)


@pytest.mark.parametrize("name", ["nearest", "w both", "x", "mx"])
def test_forms_are_one_number(name: str) -> None:
    """The bf16 operand is code x block scale of the packed form."""
    x = torch.randn(40, 72)
    x[3, 20] = math.inf
    choices = CHOICES[name]
    sides = [side._replace(wanted=True) for side in choices[:2]]
    packed, bf16 = (
        reference_fp4.fp4_quantize(
            x,
            None,
            choices._replace(
                rows=sides[0]._replace(operand=o), columns=sides[1]._replace(operand=o)
            ).pack(),
        )
        for o in (False, True)
    )
    for at, (r, c) in ((0, (40, 96)), (2, (72, 64))):
        codes, scales = packed[at : at + 2]
        assert_same_bits(
            reference_fp4.unpacked(codes, scales, r, c).nan_to_num(1234.0),
            bf16[at][:r].float().nan_to_num(1234.0),
        )
        assert (bf16[at][r:] == 0).all()
        nan = bf16[at].view(torch.int16)[bf16[at].isnan()]
        assert nan.numel() > 0 and (nan == 0x7FC0).all()


def test_two_d_is_the_same_across() -> None:
    """rows and columns of 16 x 16 blocks are each other's transpose, ties of four over six too."""
    x = torch.randn(80, 112)
    for how in (ON, SIX):
        rows, rs, columns, cs, scales = reference_fp4.fp4_quantize(
            x, None, FP4Quantize(how, how, two_d=True).pack()
        )
        a = reference_fp4.dequantize(rows, rs, scales[0], 80, 112)
        b = reference_fp4.dequantize(columns, cs, scales[1], 112, 80)
        assert torch.equal(a, b.t())


def test_refused() -> None:
    x = torch.randn(32, 32)
    for choices, seed, words in (
        (FP4Quantize(RANDOM), None, "seed.*stochastic rounding"),
        (FP4Quantize(RANDOM), SEED.int(), "seed.*stochastic rounding"),
        (FP4Quantize(RANDOM), SEED[:1], "seed.*stochastic rounding"),
        (FP4Quantize(SIX._replace(stochastic=True)), SEED, "four over six"),
        (FP4Quantize(SIX, mx=True), SEED, "four over six"),
        (FP4Quantize(ON, mx=True, two_d=True), SEED, "16 x 16"),
        (FP4Quantize(ROTATED, two_d=True), SEED, "16 x 16"),
    ):
        with pytest.raises(ValueError, match=f"fp4_quantize: expected.*{words}"):
            ops.fp4_quantize_op(x, seed, choices.pack())
    with pytest.raises(TypeError, match="fp4_quantize: expected x in float32"):
        ops.fp4_quantize_op(x.double(), None, FP4Quantize(ON).pack())


# ---- what a user gets ----


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", [(37,), (4, 17), (4, 31), (3, 5, 48), (2, 0, 16), (4, 0), (1, 1)])
def test_quantize(device: str, format: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device).bfloat16().requires_grad_()
    q = nf.quantize(x, format)
    block = {"nvfp4": 16, "mxfp4": 32}[format]
    assert isinstance(q, nf.FP4Tensor) and q.format == format and q.width == shape[-1]
    assert q.data.shape == (*shape[:-1], -(-shape[-1] // 2)) and q.data.dtype == torch.uint8
    assert q.scales.shape == (*shape[:-1], -(-shape[-1] // block))
    assert q.scale.shape == () and q.scale.dtype == torch.float32
    back = q.dequantize()
    assert back.shape == x.shape and back.dtype == torch.bfloat16 and not back.requires_grad
    assert q.dequantize(torch.float32).dtype == torch.float32
    if x.numel() > 20:
        error = (back - x).float().norm() / x.float().norm()
        assert error < {"nvfp4": 0.12, "mxfp4": 0.14}[format]


def test_quantize_options(device: str) -> None:
    x = torch.randn(64, 96, device=device)

    def error(**options: bool) -> float:
        return ((nf.quantize(x, "nvfp4", **options).dequantize() - x).norm() / x.norm()).item()

    assert error(four_over_six=True) < error() < error(two_d=True) < error(stochastic=True)
    first, second = (nf.quantize(x, "mxfp4", stochastic=True) for _ in range(2))
    assert not torch.equal(first.data, second.data) and torch.equal(
        first.scales.view(torch.uint8), second.scales.view(torch.uint8)
    )
    with pytest.raises(
        ValueError, match="expected two_d, four_over_six and stochastic to be False"
    ):
        nf.quantize(x, "e4m3", stochastic=True)
    for option in ("two_d", "four_over_six"):
        with pytest.raises(ValueError, match="False for mxfp4"):
            nf.quantize(x, "mxfp4", **{option: True})
    with pytest.raises(ValueError, match="'e4m3', 'e5m2', .*'mxfp4', .*'nvfp4'"):
        nf.quantize(x, "fp4")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_nonfinite_blocks_are_nan_and_no_others(device: str, format: str) -> None:
    x = torch.randn(4, 96, device=device)
    x[1, 40] = math.inf
    x[2, 3] = math.nan
    q = nf.quantize(x, format)
    block = {"nvfp4": 16, "mxfp4": 32}[format]
    nan = q.dequantize().isnan()
    want = torch.zeros_like(nan)
    want[1, 40 // block * block :][:block] = True
    want[2, :block] = True
    assert torch.equal(nan, want)
    byte = {"nvfp4": 0x7F, "mxfp4": 0xFF}[format]
    assert (q.scales.view(torch.uint8) == byte).sum() == 2
    clean = x.nan_to_num(0, 0, 0)
    assert torch.equal(q.dequantize()[0], nf.quantize(clean, format).dequantize()[0])
