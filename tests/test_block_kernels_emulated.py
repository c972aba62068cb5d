"""Tests of the kernels of FP8 with rowwise and blockwise scaling, without a GPU: their sources are
compiled for the CPU (emulation/cuda_on_cpu.h)."""

from __future__ import annotations

import ctypes
import itertools
from typing import NamedTuple

import emulated
import pytest
import torch
from conftest import assert_same_bits

from narrowfloat.cast import Cast
from narrowfloat.formats import BLOCK_POW2, E4M3, E5M2, MX, ROW, Format, padded, padded32
from narrowfloat.reference import block, linear
from narrowfloat.reference.fp4 import tile
from narrowfloat.spec import Quantize

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CODES, OPERAND = 1, 2


class How(NamedTuple):
    """One orientation: its cast and whether as a bf16 operand."""

    cast: Cast | None = None
    operand: bool = False


NOTHING = How()
ALL = [
    How(Cast("e4m3", "row")),
    How(Cast("e5m2", "row")),
    How(Cast("e4m3", "block")),
    How(Cast("e4m3", "block", square=True)),
    How(Cast("e4m3", "block_pow2")),
    How(Cast("e4m3", "block_pow2", square=True)),
    How(Cast("e4m3", "block_pow2"), operand=True),
    How(Cast("e4m3", "block_pow2", square=True), operand=True),
    How(Cast("e4m3", "mx")),
    How(Cast("e4m3", "mx"), operand=True),
]


def quantized(x: torch.Tensor, rows: How, columns: How = NOTHING) -> tuple[torch.Tensor, ...]:
    """By the reference: rows, their scales, columns, their scales."""
    casts, forms = zip(rows, columns, strict=True)
    wanted = (cast is not None for cast in casts)
    return linear.quantize(x, Quantize(*casts, *wanted, *forms).pack())[:4]


class Side(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("form", "scaling", "element", "square", "given")),
        *((n, ctypes.c_void_p) for n in ("data", "scales", "amax")),
    ]


class Job(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("type", "rows", "cols", "row_stride", "col_stride")),
        ("side", Side * 2),
        ("sums", ctypes.c_void_p),
    ]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    kernels = "tensor_amax_kernels", "block_amax_kernels", "block_kernels", "block_dequantize"
    names = [f"quantize/{name}" for name in kernels]
    found = emulated.build(tmp_path_factory.mktemp("block_emulation"), "block_entry.cpp", names)
    found.run_block.restype = ctypes.c_int64
    return found


def facts(cast: Cast | None) -> tuple[int, int, int]:
    """(scaling, element, square) as csrc numbers them."""
    return (0, 0, 0) if cast is None else (cast.of.code, cast.element == "e5m2", cast.square)


def garbage(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like.contiguous().view(torch.uint8), 0xAB).view(like.dtype)


def call(library, x: torch.Tensor, sides: list[Side], sums: torch.Tensor | None = None) -> None:
    total = None if sums is None else sums.data_ptr()
    job = Job(x.data_ptr(), TYPES[x.dtype], *x.shape, *x.stride(), (Side * 2)(*sides), total)
    assert library.run_block(ctypes.byref(job), ctypes.c_int64(0), ctypes.c_int64(1)) == 1


def row_amax(x: torch.Tensor) -> torch.Tensor:
    """fp32 [padded(R)] of x [R, C], as the forward keeps it for w's columns."""
    amax = x.float().abs().amax(1) if x.shape[1] else torch.zeros(x.shape[0])
    amax = torch.where(amax.isnan(), float("nan"), amax)
    return torch.nn.functional.pad(amax, (0, padded(x.shape[0]) - x.shape[0]))


def check(
    library, x: torch.Tensor, rows: How, columns: How, what: str = "", sums: bool = False,
    given: bool = False,
) -> None:  # fmt: skip
    """All that the kernels write, begun as garbage, against the reference."""
    what = f"{what} {tuple(x.shape)} {x.dtype} {rows} {columns}"
    want = quantized(x, rows, columns)
    got = [garbage(t) for t in want]
    total = torch.full((x.shape[1],), -7.0) if sums else None
    sides, keep = [], []
    for k, o in enumerate((rows, columns)):
        form = 0 if o.cast is None else OPERAND if o.operand else CODES
        scaling, element, square = facts(o.cast)
        amax = row_amax(x.t() if k else x) if given and scaling == ROW.code else None
        keep.append(amax)
        sides.append(
            Side(form, scaling, element, square, amax is not None, got[2 * k].data_ptr(),
                 got[2 * k + 1].data_ptr(), None if amax is None else amax.data_ptr())
        )  # fmt: skip
    call(library, x, sides, total)
    names = ("rows", "row scales", "columns", "column scales")
    for g, w, name in zip(got, want, names, strict=True):
        as_they_are = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (g, w))
        assert_same_bits(*as_they_are, f"{what} {name}")
    if total is not None:
        bound = 1e-6 * x.double().abs().sum(0) + 1e-30
        assert ((total.double() - x.double().sum(0)).abs() <= bound).all(), what


SHAPES = [(1, 1), (5, 13), (33, 72), (129, 257), (300, 136), (128, 256)]


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", SHAPES)
def test_forms(library, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(shape).to(dtype)
    for how in ALL:
        check(library, x, how, how, sums=True)


def test_one_side_or_two_kinds(library) -> None:
    x = torch.randn(140, 136).to(torch.bfloat16)
    for how in ALL:
        check(library, x, how, NOTHING)
        check(library, x, NOTHING, how)
    for rows, columns in itertools.pairwise(ALL):
        check(library, x, rows, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_given_maxima(library, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = torch.randn(shape).to(dtype)
        x[0, 0] = float("nan")
        check(library, x, ALL[0], ALL[1], given=True)


@pytest.mark.parametrize("dtype", list(TYPES))
def test_maxima_alone(library, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = torch.randn(shape).to(dtype)
        x[-1, -1] = float("nan")
        x[0, -1] = float("-inf")
        got = torch.full((padded(shape[1]),), -7.0)
        codes, scales = (garbage(t) for t in quantized(x, ALL[0])[:2])
        rows = Side(CODES, ROW.code, 0, 0, 0, codes.data_ptr(), scales.data_ptr(), None)
        call(library, x, [rows, Side(0, 0, 0, 0, 0, None, None, got.data_ptr())])
        assert_same_bits(got, row_amax(x.t()), f"{shape} {dtype}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["zeros", "tiny", "subnormal", "huge", "outlier", "nan", "inf"])
def test_values(library, kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(70, 200)
    factor = {"zeros": 0.0, "tiny": 1e-30, "subnormal": 1e-39, "huge": 1e36}.get(kind, 1.0)
    x *= factor
    if kind == "outlier":
        x[3, 5] = 1e6
        x[40:] *= 1e-5
    if kind in ("nan", "inf"):
        x[69, 199], x[3, 4] = float(kind), -float(kind)
    x = x.to(dtype)
    for how in ALL:
        check(library, x, how, how, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r27_r28_ends_of_fp32(library, dtype: torch.dtype) -> None:
    """R-27, R-28: amax where max / amax overflows, from block to block; and the largest values,
    beside a NaN and an Inf in other blocks."""
    most = torch.finfo(dtype).max
    small = torch.randn(70, 200) * 2.0 ** -torch.arange(100, 170).clamp(max=140)[:, None]
    large = torch.full((70, 200), 3.1e38).copysign(torch.randn(70, 200))
    large[::7, ::5], large[3, 100] = most, -most
    large[40:, :50] = 1.0
    for x in (small, large):
        for bad in (0.0, float("nan"), float("inf")):
            x[69, 199] = bad
            for how in ALL:
                check(library, x.to(dtype), how, how, f"{bad}")


def test_every_bf16_value(library) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = x.reshape(256, 256)
    for how in ALL:
        check(library, torch.where(x.isfinite(), x, torch.zeros_like(x)), how, how, "finite")
    check(library, x, ALL[0], ALL[2], "all")
    check(library, x.t(), ALL[4], ALL[8], "all")


def test_layouts(library) -> None:
    base = torch.randn(40, 96, 24)
    for name, x in {
        "transposed": base[0].t(),
        "columns apart": base[0][:, ::2],
        "rows apart": base[0][::2],
        "unaligned": base.flatten()[1 : 1 + 64 * 48].view(64, 48),
        "ragged rows on 16 bytes": base.flatten()[: 64 * 48].view(64, 48)[:, :45],
        "expanded": base[0, 0, 0].expand(17, 19),
        "no rows": base[0, :0],
        "no columns": base[0, :, :0],
    }.items():
        for how in ALL:
            check(library, x, how, how, name, sums=how is ALL[0])
        for how in ALL[::3]:
            check(library, x.to(torch.bfloat16), how, how, name)


def test_plain_bf16(library) -> None:
    for dtype, shape in itertools.product(TYPES, SHAPES):
        x = torch.randn(shape).to(dtype)
        m, k = shape
        want = [
            torch.nn.functional.pad(t.bfloat16(), (0, padded32(c) - c, 0, padded(r) - r))
            for t, r, c in ((x, m, k), (x.t(), k, m))
        ]
        got = [garbage(t) for t in want]
        call(library, x, [Side(OPERAND, 0, 0, 0, 0, t.data_ptr(), None, None) for t in got])
        for g, w in zip(got, want, strict=True):
            assert_same_bits(g, w.contiguous(), f"{shape} {dtype}")


@pytest.mark.parametrize("how", [ALL[4], ALL[5], ALL[8]])
def test_dequantized(library, how: How) -> None:
    for shape in [*SHAPES, (17, 300), (300, 17), (260, 700)]:
        x = torch.randn(shape) * 10.0 ** torch.randint(-38, 6, shape)
        x[0, -1] = float("nan")
        codes, scales = quantized(x, how)[:2]
        want = quantized(x, how._replace(operand=True))[0]
        got = garbage(want)
        scaling, _, square = map(ctypes.c_int64, facts(how.cast))
        sizes = map(ctypes.c_int64, shape)
        at = [ctypes.c_void_p(t.data_ptr()) for t in (codes, scales)]
        to = ctypes.c_void_p(got.data_ptr())
        library.run_block_dequantize(scaling, square, *at, *sizes, to)
        assert_same_bits(got, want, f"{shape}")


def test_r25_every_scale_of_an_operand(library) -> None:
    """R-25: every E8M0 byte with every code that is a number, also those that no kernel here makes:
    below 2^-124 the bf16 nearest to code x scale."""
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256).clone()
    codes[codes & 0x7F == 0x7F] = 0
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8)
    operand = block.Operand(codes.view(E4M3.dtype), scales)
    want = block.operand_form(operand, MX)
    got, tiled = garbage(want), tile(scales, 256, 128)
    scaling, sizes = ctypes.c_int64(MX.code), (ctypes.c_int64(256), ctypes.c_int64(256))
    at = [ctypes.c_void_p(t.data_ptr()) for t in (codes, tiled)]
    to = ctypes.c_void_p(got.data_ptr())
    library.run_block_dequantize(scaling, ctypes.c_int64(0), *at, *sizes, to)
    assert_same_bits(got, want)


def test_r25_every_power_of_two_spread(library) -> None:
    """R-25: fp32 powers of two, 2^-127 too, to their bytes."""
    bytes_ = torch.arange(256).to(torch.uint8)[:, None]
    scales = block.fp32_scales(bytes_)
    laid_out = block.lay_out(
        block.Operand(torch.zeros(256, 128, dtype=torch.uint8).view(E4M3.dtype), scales), BLOCK_POW2
    )[1]
    want = tile(bytes_.repeat_interleave(4, 1), 256, 64)
    got = garbage(want)
    at, to = ctypes.c_void_p(laid_out.data_ptr()), ctypes.c_void_p(got.data_ptr())
    library.run_block_spread(at, *map(ctypes.c_int64, (0, 256, 128)), to)
    assert_same_bits(got, want)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_codes_of_one_scale(library, fmt: Format) -> None:
    """All codes as bf16, unscaled, and the scale as alpha. Of the NaN any will do."""
    for rows, cols in [(1, 1), (16, 16), (33, 72), (256, 300)]:
        shape = padded(rows), padded(cols)
        codes = torch.arange(shape[0] * shape[1]).to(torch.uint8).view(shape)
        want = codes.view(fmt.dtype).float().bfloat16()
        scale, alpha = torch.tensor([0.3, 7.0, 0.0, 0.0]), torch.full((3,), -7.0)
        got = garbage(want)
        at = [ctypes.c_void_p(t.data_ptr()) for t in (codes, scale, got, alpha)]
        sizes = ctypes.c_int64(rows), ctypes.c_int64(cols)
        library.run_tensor_dequantize(ctypes.c_int64(fmt is E5M2), *at[:2], *sizes, *at[2:])
        assert (got.isnan() == want.isnan()).all()
        assert_same_bits(got.nan_to_num(), want.nan_to_num(), f"{rows} {cols}")
        assert alpha.tolist() == [scale[0].item(), 0.0, -7.0]


@pytest.mark.parametrize("square", [False, True])
def test_spread(library, square: bool) -> None:
    for shape in [*SHAPES, (17, 300)]:
        x = torch.randn(shape) * 10.0 ** torch.randint(-38, 6, shape)
        x[0, -1] = float("nan")
        operand = block.quantize_operand(x, BLOCK_POW2, E4M3, square)
        scales = block.lay_out(operand, BLOCK_POW2, square)[1]
        down = operand.scales.repeat_interleave(128, 0)[: shape[0]] if square else operand.scales
        wide = down.repeat_interleave(4, 1)[:, : -(-shape[1] // 32)]
        exponent = (wide.contiguous().view(torch.int32) >> 23).to(torch.uint8)
        bytes_ = torch.where(wide.isnan(), 0xFF, exponent).to(torch.uint8)
        want = tile(bytes_, shape[0], -(-shape[1] // 2))
        got = garbage(want)
        sizes = map(ctypes.c_int64, (square, *shape))
        at = ctypes.c_void_p(scales.data_ptr())
        library.run_block_spread(at, *sizes, ctypes.c_void_p(got.data_ptr()))
        assert_same_bits(got, want, f"{shape}")
