"""Every number of FP4, in plain PyTorch: rotation, random bits, block scales, rounding.

An operand is R rows that a GEMM contracts along C. Elements are E2M1, blocks lie along C, and
each group of 16 has an E4M3 scale byte: value = code x block scale x tensor scale. In mxfp4 the
block scales are powers of two, written relative to the largest, so that both formats are one to
what multiplies them. The CUDA kernels equal this bit for bit; each line that rounds is one fp32
operation there too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cast import Cast
from ..formats import E4M3, FP4_GRID, GROUP, SIGNS, VEC32, padded, padded32
from .tensor import FLT_MAX, cast

# top x 6 is what a tensor's largest value becomes before the block scales are taken out; with
# four over six a block scale is up to 1.5 times as large and must stay below 448 (arXiv 2512.02010)
TOP, TOP_FOUR_OVER_SIX = 448.0, 256.0

# Of nvfp4: so much a tensor is multiplied by at most, for its smallest block scale, 2^-9, to leave
# a multiplier that is an fp32. Block scales are few steps of 2^-9 then: a block's largest value
# becomes 4.5, not 6, so that none is a step too small and saturates. Blocks whose largest value is
# a normal number stay.
LARGEST_MULTIPLIER, TOP_OF_SMALL = 2.0**119, 4.5

BF16_MAX = torch.finfo(torch.bfloat16).max

# Halves between neighbours of the grid. A value on one goes to the even code: up where that is the
# upper one, and where it is the lower one only from the next float on.
_HALVES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True))
_LAST_HALF = (5.0, False)

# Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_WORD = 0xFFFFFFFF


class Operand(NamedTuple):
    """One quantized orientation: value = code x block scale x scale."""

    codes: Tensor  # uint8 [padded(R), padded32(C)], one code a byte, zeros beyond R and C
    scales: Tensor  # uint8 [padded(R), padded32(C) / 16], E4M3, zeros beyond R
    scale: Tensor  # fp32 []


def _fp32(value: float, like: Tensor) -> Tensor:
    # A tensor, not a number: torch divides by, or of, a number through a rounded reciprocal.
    return torch.full((), value, dtype=torch.float32, device=like.device)


def to_bf16(x: Tensor) -> Tensor:
    """x rounded to bf16, as fp32: what is finite stays so, at bf16's largest value if need be."""
    rounded = x.to(torch.bfloat16).float()
    if x.dtype != torch.float32:  # fp16 ends before
        return rounded
    return torch.where(x.isfinite(), rounded.clamp(-BF16_MAX, BF16_MAX), rounded)


def rotate(x: Tensor) -> Tensor:
    """H (d x) of each group x [..., 16] in fp32: d the fixed signs, H of +-1, not over 4. A sum
    that overflows is Inf."""
    signs = [-1.0 if SIGNS >> i & 1 else 1.0 for i in range(GROUP)]
    v = x * torch.tensor(signs, device=x.device)
    for h in (1, 2, 4, 8):
        pairs = v.unflatten(-1, (GROUP // (2 * h), 2, h))
        low, high = pairs.unbind(-2)
        v = torch.stack([low + high, low - high], -2).flatten(-3)
    return v


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words for each counter of four words; int64 tensors that hold 32 bits each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        # 64 bits wrap in a signed integer too, and the shift is masked
        first, second = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _WORD) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32 & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = k0 + _PHILOX_WEYL[0] & _WORD, k1 + _PHILOX_WEYL[1] & _WORD
    return c0, c1, c2, c3


def random_bytes(
    seed: Tensor, rows: int, groups: int, real_groups: int, orientation: int
) -> Tensor:
    """int64 [rows, groups, 16], each 0 to 255; group g of row r has the counter r real_groups + g.

    seed: int64 [2]. Orientation (0 rows, 1 columns) gives the two of one call bytes of their own.
    """
    of_rows = torch.arange(rows, device=seed.device)[:, None] * real_groups
    index = of_rows + torch.arange(groups, device=seed.device)
    low, high = seed & _WORD, seed >> 32 & _WORD
    last = (high[1] << 1 | orientation) & _WORD
    counter = (index & _WORD, index >> 32 & _WORD, low[1], last)
    words = torch.stack(philox(counter, (low[0], high[0])), -1)  # [rows, groups, 4]
    shifts = torch.tensor([0, 8, 16, 24], device=seed.device)
    return (words[..., None] >> shifts & 255).flatten(-2)


def round_nearest(v: Tensor) -> Tensor:
    """Magnitude codes 0 to 7 of v >= 0 (fp32): nearest, ties to even, saturating at 6."""
    infinity = torch.tensor(float("inf"))
    limits = [
        torch.tensor(half) if up else torch.nextafter(torch.tensor(half), infinity)
        for half, up in (*_HALVES, _LAST_HALF)
    ]
    return torch.bucketize(v, torch.stack(limits).to(v.device), out_int32=True, right=True)


def round_stochastic(u: Tensor, r: Tensor) -> Tensor:
    """Magnitude codes of 2 u >= 0 (fp32) with random bytes r: up with the probability of the
    distance to the lower neighbour over the gap, in steps of 1/256; what is over 6 saturates."""
    u = u.double()  # exact below
    index = torch.where(u < 2, 4 + 2 * (u - 1), 6 + (u - 2).clamp(max=1))
    index = torch.where(u < 1, 4 * u, index)
    return (torch.round(index * 65536).long() + r * 256 + 128) >> 16


def grid(codes: Tensor) -> Tensor:
    """fp32 values of E2M1 codes 0 to 15; code 8 is -0."""
    values = torch.tensor([*FP4_GRID, *(-v for v in FP4_GRID)], device=codes.device)
    return values[codes.long()]


def e4m3(scales: Tensor) -> Tensor:
    """fp32 values of scale bytes."""
    return scales.view(torch.float8_e4m3fn).float()


def _over_blocks(per_group: Tensor, mx: bool, square: bool) -> Tensor:
    """The largest of each block, at each of its groups; [R, G] both ways."""
    rows, groups = per_group.shape
    if per_group.numel() == 0:
        return per_group
    if mx:
        blocks = per_group.view(rows, groups // 2, 2)
        return blocks.amax(2, keepdim=True).expand_as(blocks).reshape(rows, groups)
    if square:
        blocks = per_group.view(rows // GROUP, GROUP, groups)
        return blocks.amax(1, keepdim=True).expand_as(blocks).reshape(rows, groups)
    return per_group


def _in_order(terms: Tensor, dim: int) -> Tensor:
    """The sum along dim of 16, each fp32 addition rounded, from the first to the last."""
    first, *rest = terms.unbind(dim)
    for term in rest:
        first = first + term
    return first


class _Scaling(NamedTuple):
    scales: Tensor  # uint8 [R, G]
    multipliers: Tensor  # fp32 [R, G]: code = round(value x multiplier)
    scale: Tensor  # fp32 []


def _multipliers(scales: Tensor, tensor_multiplier: Tensor) -> Tensor:
    one = _fp32(1.0, scales)
    divisors = e4m3(scales) * torch.div(one, tensor_multiplier)
    return torch.div(torch.ones_like(divisors), divisors).clamp(max=FLT_MAX)


def _errors(
    wanted: Tensor,
    magnitudes: Tensor,
    scales: Tensor,
    multipliers: Tensor,
    square: bool,
    by_rows: bool,
) -> Tensor:
    """Squared error of each block; [R, G]. wanted: magnitudes times the tensor's multiplier, which
    code x scale should be. So two scales that give one block the same values have the same error,
    to the bit: both differences round the same numbers."""
    codes = round_nearest(magnitudes * multipliers[..., None])
    d = grid(codes) * e4m3(scales)[..., None] - wanted  # the product is exact
    squares = d * d
    if square:
        rows, groups, _ = squares.shape
        blocks = squares.view(rows // GROUP, GROUP, groups, GROUP)
        # each row's sum, then those in order: of the tensor's rows, in both orientations
        inner, outer = (3, 1) if by_rows else (1, 2)
        e = _in_order(_in_order(blocks, inner), outer)[:, None].expand(-1, GROUP, -1)
        return e.reshape(rows, groups)
    return _in_order(squares, 2)


def _scale_nvfp4(
    magnitudes: Tensor, amax: Tensor, bamax: Tensor, how: Cast, by_rows: bool
) -> _Scaling:
    top = _fp32((TOP_FOUR_OVER_SIX if how.four_over_six else TOP) * 6, amax)
    multiplier = torch.div(top, amax)
    smallest = (multiplier > LARGEST_MULTIPLIER) & (amax > 0)
    scale = torch.where(smallest, 1 / LARGEST_MULTIPLIER, torch.div(amax, top))
    multiplier = torch.where(amax == 0, 1.0, multiplier.clamp(max=LARGEST_MULTIPLIER))
    scale = torch.where(amax == 0, 1.0, scale)

    part = torch.where(smallest, _fp32(1 / TOP_OF_SMALL, amax), _fp32(1 / 6, amax))
    wanted = (bamax * (multiplier * part)).clamp(max=FLT_MAX)
    scales = cast(wanted, E4M3).view(torch.uint8)
    if how.scale_up:
        scales = scales + ((e4m3(scales) < wanted) & (scales < 0x7E))
    multipliers = _multipliers(scales, multiplier)
    if how.four_over_six:
        wanted = (bamax * (multiplier * 0.25)).clamp(max=FLT_MAX)
        scales4 = cast(wanted, E4M3).view(torch.uint8)
        multipliers4 = _multipliers(scales4, multiplier)
        exact = magnitudes * multiplier
        six = _errors(exact, magnitudes, scales, multipliers, how.square, by_rows)
        four = _errors(exact, magnitudes, scales4, multipliers4, how.square, by_rows)
        better = (four < six) & (scales != 0)  # a tie keeps 6, and a block without a scale is 0
        scales = torch.where(better, scales4, scales)
        multipliers = torch.where(better, multipliers4, multipliers)
    return _Scaling(scales, multipliers, scale)


def _power(biased: Tensor) -> Tensor:
    """2^(biased - 127) in fp32, for biased from 1 to 254."""
    return (biased << 23).view(torch.float32)


def _mx_exponents(amax: Tensor) -> Tensor:
    """Of the smallest power of two >= amax / 6, biased by 127, at least 1."""
    return ((amax.view(torch.int32) + 0x3FFFFF >> 23) - 2).clamp(min=1)


def _scale_mxfp4(amax: Tensor, bamax: Tensor) -> _Scaling:
    # Relative to the largest scale, which becomes 2^8. From 10 on, the tensor's scale is normal.
    largest = _mx_exponents(amax).clamp(min=10)
    exponents = _mx_exponents(bamax)
    relative = exponents - largest + 8
    flushed = (bamax == 0) | (relative < -9)  # 2^-9 is the smallest E4M3
    scales = cast(_power(relative.clamp(-9, 8) + 127), E4M3).view(torch.uint8)
    scale = torch.where(amax == 0, 1.0, _power(largest - 8))
    return _Scaling(torch.where(flushed, 0, scales), _power(254 - exponents), scale)


def quantize_operand(
    x: Tensor,
    how: Cast,
    seed: Tensor | None = None,
    orientation: int = 0,
) -> Operand:
    """x [R, C] (fp32, bf16 or fp16) as an FP4 operand that is contracted along C.

    orientation: 1 where x is a tensor's transposed view. seed, int64 [2]: for stochastic rounding.
    A block with a NaN or an Inf has the scale NaN and codes 0. mxfp4 does not ask scale_up: its
    scales are rounded up as they are.
    """
    rows, cols = x.shape
    mx, square = how.of is VEC32, how.square
    x = to_bf16(x)
    x = pad(x, (0, padded32(cols) - cols, 0, padded(rows) - rows)).contiguous()
    values = x.unflatten(1, (padded32(cols) // GROUP, GROUP))
    if how.hadamard:
        values = rotate(values)
        cols = padded(cols)  # a rotated group is full
    finite = values.isfinite()
    magnitudes = torch.where(finite, values.abs(), 0.0)
    group_amax = magnitudes.amax(2)
    amax = group_amax.amax() if group_amax.numel() else _fp32(0.0, x)
    bad = _over_blocks((~finite).any(2).to(torch.uint8), mx, square).bool()
    bamax = torch.where(bad, 0.0, _over_blocks(group_amax, mx, square))
    magnitudes = torch.where(bad[..., None], 0.0, magnitudes)

    if mx:
        scaling = _scale_mxfp4(amax, bamax)
    else:
        by_rows = orientation == 0
        scaling = _scale_nvfp4(magnitudes, amax, bamax, how, by_rows)
    scales, multipliers, scale = scaling
    if how.hadamard:
        scale = scale * 0.25

    if how.stochastic:
        if seed is None:
            raise ValueError(
                "quantize: expected a seed, int64 [2], for stochastic rounding, got None"
            )
        r = random_bytes(seed, values.shape[0], values.shape[1], padded(cols) // GROUP, orientation)
        codes = round_stochastic(magnitudes * (multipliers * 0.5)[..., None], r)
    else:
        codes = round_nearest(magnitudes * multipliers[..., None])
    codes = codes.to(torch.uint8) | values.signbit().to(torch.uint8) << 3
    codes = torch.where((scales == 0)[..., None], 0, codes)  # without a sign
    codes = torch.where(bad[..., None], 0, codes).flatten(1)
    scales = torch.where(bad, E4M3.nan, scales)
    # -0 of a rotated zero may lie beyond, and the scale of a 16 x 16 block does
    codes[rows:], scales[rows:], codes[:, cols:] = 0, 0, 0
    return Operand(codes, scales, scale)
