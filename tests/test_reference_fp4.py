"""Tests of FP4's numbers: against a scalar model, known answers and exact means."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import assert_same_bits
from every import ALL_CASTS

import narrowfloat as nf
from narrowfloat import formats
from narrowfloat.cast import Cast
from narrowfloat.reference import fp4, fp4_numerics, linear
from narrowfloat.spec import Quantize, both

F32 = np.float32
FLT_MAX = np.finfo(F32).max
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SEED = torch.tensor([0x123456789ABCDEF, -0x0FEDCBA987654321])
NVFP4 = Cast("e2m1", "nvfp4")


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
    how = Cast("e2m1", "nvfp4", four_over_six=six, scale_up=up)
    got = fp4_numerics.quantize_operand(x, how)
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
        words = fp4_numerics.philox(c, k)  # type: ignore[arg-type]
        assert " ".join(f"{int(word):08x}" for word in words) == answer


def test_random_bytes_are_uniform_and_apart() -> None:
    rows, columns = (fp4_numerics.random_bytes(SEED, 64, 64, 64, at) for at in (0, 1))
    assert rows.min() == 0 and rows.max() == 255
    for r in (rows, columns):
        counts = torch.bincount(r.flatten(), minlength=256).double()
        expected = r.numel() / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * math.sqrt(2 * 255)
    other = fp4_numerics.random_bytes(SEED + torch.tensor([0, 1]), 64, 64, 64, 0)
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
    matrix = fp4_numerics.rotate(torch.eye(16))  # row i: the image of element i
    assert torch.equal(matrix @ matrix.t(), 16 * torch.eye(16))
    signs = torch.tensor([-1.0 if formats.SIGNS >> i & 1 else 1.0 for i in range(16)])
    assert torch.equal(matrix[:, 0], signs)  # H's first row is ones
    hadamard = matrix * signs[:, None]
    assert torch.equal(hadamard, hadamard.t())
    assert hadamard[3, 5] == (-1) ** bin(3 & 5).count("1")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_stochastic_rounding_keeps_the_mean(format: str) -> None:
    """Between any two neighbours: the mean over many bytes is the value to 1/256 of the gap."""
    u = torch.linspace(0, 3, 4097)
    every = torch.arange(256)
    codes = fp4_numerics.round_stochastic(u[:, None].expand(-1, 256), every.expand(4097, -1))
    means = fp4_numerics.grid(codes).double().mean(1)
    gaps = torch.where(u < 1, 0.5, torch.where(u < 2, 1.0, 2.0))
    assert ((means - 2 * u).abs() <= gaps / 512 + 1e-9).all()
    x = torch.rand(4, 64).bfloat16() + 0.1
    how = Cast("e2m1", format, stochastic=True, scale_up=True)
    total = torch.zeros(4, 64)
    for n in range(400):
        q = fp4_numerics.quantize_operand(x, how, torch.tensor([n, 7]))
        total += (fp4.values(q.codes, q.scales) * q.scale)[:4, :64]
    assert (total.mean() / 400 / x.float().mean() - 1).abs() < 2e-3


def test_tiles() -> None:
    rows, cols = 300, 200
    groups = 13
    scales = torch.randint(1, 120, (rows, groups), dtype=torch.uint8)
    tiled = fp4.tile(scales, rows, cols)
    assert tiled.numel() == formats.scales_size(rows, cols) == 384 * 16
    seen = torch.zeros(tiled.numel(), dtype=torch.bool)
    for r in range(rows):
        for c in range(groups):
            at = ((r // 128) * 4 + c // 4) * 512 + (r % 32) * 16 + r % 128 // 32 * 4 + c % 4
            assert tiled[at] == scales[r, c]
            seen[at] = True
    assert (tiled[~seen] == 0).all()
    assert torch.equal(fp4.untile(tiled, rows, cols), scales)


@pytest.mark.parametrize(
    "choices",
    {
        "nvfp4": both(NVFP4, NVFP4),
        "nvfp4 w": both(*[Cast("e2m1", "nvfp4", square=True)] * 2),
        "nvfp4 x": both(NVFP4, Cast("e2m1", "nvfp4", hadamard=True)),
        "mxfp4": both(*[Cast("e2m1", "mxfp4")] * 2),
    }.values(),
)
def test_forms_are_one_number(choices: Quantize) -> None:
    """The bf16 operand is code x block scale of the packed form."""
    x = torch.randn(40, 72)
    x[3, 20] = math.inf
    packed, bf16 = (
        linear.quantize(x, choices._replace(rows_as_operand=o, columns_as_operand=o).pack())
        for o in (False, True)
    )
    for at, (r, c) in ((0, (40, 96)), (2, (72, 64))):
        codes, scales = packed[at : at + 2]
        assert_same_bits(
            fp4.unpacked(codes, scales, r, c).nan_to_num(1234.0),
            bf16[at][:r].float().nan_to_num(1234.0),
        )
        assert (bf16[at][r:] == 0).all()
        nan = bf16[at].view(torch.int16)[bf16[at].isnan()]
        assert nan.numel() > 0 and (nan == 0x7FC0).all()


def test_squares_are_the_same_across() -> None:
    """rows and columns of 16 x 16 blocks are each other's transpose, ties of four over six too."""
    x = torch.randn(80, 112)
    for six in (False, True):
        how = Cast("e2m1", "nvfp4", square=True, four_over_six=six)
        rows, rs, columns, cs, scales = linear.quantize(x, both(how, how).pack())
        a = fp4.dequantize(rows, rs, scales[0], 80, 112)
        b = fp4.dequantize(columns, cs, scales[4], 112, 80)
        assert torch.equal(a, b.t())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("how", [c for c in ALL_CASTS if c.element == "e2m1"], ids=str)
def test_a_block_that_is_not_finite_has_codes_of_zero(how: nf.Cast, value: float) -> None:
    """Without a sign too, whatever those of its values; its scale says NaN."""
    x = torch.randn(48, 64) - 1
    x[3, 5] = value
    made = fp4_numerics.quantize_operand(x, how, torch.tensor([1, 2]))
    bad = made.scales == 0x7F
    assert bad.any() and not bad.all()
    assert not made.codes.unflatten(1, (-1, 16))[bad].any()
