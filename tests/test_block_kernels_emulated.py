"""Decides that the kernels of FP8 with finer scales compute what the reference says, without a GPU:
their sources are compiled for the CPU (emulation/cuda_on_cpu.h)."""

from __future__ import annotations

import ctypes
import itertools

import emulated
import pytest
import torch
from conftest import assert_same_bits

from narrowfloat import reference_block
from narrowfloat.formats import (
    BLOCK,
    BLOCK_POW2,
    E4M3,
    E5M2,
    MX,
    NONE,
    ROW,
    Format,
    Scaling,
    padded,
    padded32,
)
from narrowfloat.settings import BlockOrientation, BlockQuantize

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CODES, OPERAND = 1, 2
NOTHING = BlockOrientation()
ALL = [
    BlockOrientation(ROW.code),
    BlockOrientation(ROW.code, e5m2=True),
    BlockOrientation(BLOCK.code),
    BlockOrientation(BLOCK.code, square=True),
    BlockOrientation(BLOCK_POW2.code),
    BlockOrientation(BLOCK_POW2.code, square=True),
    BlockOrientation(BLOCK_POW2.code, operand=True),
    BlockOrientation(BLOCK_POW2.code, operand=True, square=True),
    BlockOrientation(MX.code),
    BlockOrientation(MX.code, operand=True),
]


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
    names = ["measure_kernels", "block_measure_kernels", "block_quantize_kernels", "block_restore"]
    found = emulated.build(tmp_path_factory.mktemp("block_emulation"), "block_entry.cpp", names)
    found.run_block.restype = ctypes.c_int64
    return found


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
    library, x: torch.Tensor, rows: BlockOrientation, columns: BlockOrientation, what: str = "",
    sums: bool = False, given: bool = False,
) -> None:  # fmt: skip
    """All that the kernels write, begun as garbage, against the reference."""
    what = f"{what} {tuple(x.shape)} {x.dtype} {rows} {columns}"
    want = reference_block.block_quantize(x, BlockQuantize(rows, columns).pack())
    got = [garbage(t) for t in want]
    total = torch.full((x.shape[1],), -7.0) if sums else None
    sides, keep = [], []
    for k, o in enumerate((rows, columns)):
        form = 0 if o.scaling == NONE.code else OPERAND if o.operand else CODES
        amax = row_amax(x.t() if k else x) if given and o.scaling == ROW.code else None
        keep.append(amax)
        sides.append(
            Side(form, o.scaling, int(o.e5m2), o.square, amax is not None, got[2 * k].data_ptr(),
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
        codes, scales = (garbage(t) for t in reference_block.block_quantize(x, ROW.code)[:2])
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


@pytest.mark.parametrize(("scaling", "square"), [(BLOCK_POW2, 0), (BLOCK_POW2, 1), (MX, 0)])
def test_restored(library, scaling: Scaling, square: int) -> None:
    for shape in [*SHAPES, (17, 300), (300, 17), (260, 700)]:
        x = torch.randn(shape) * 10.0 ** torch.randint(-38, 6, shape)
        x[0, -1] = float("nan")
        as_codes = BlockOrientation(scaling.code, square=bool(square))
        codes, scales = reference_block.block_quantize(x, as_codes.pack())[:2]
        operand = as_codes._replace(operand=True).pack()
        want = reference_block.block_quantize(x, operand)[0]
        got = garbage(want)
        sizes = map(ctypes.c_int64, shape)
        at = [ctypes.c_void_p(t.data_ptr()) for t in (codes, scales)]
        how = ctypes.c_int64(scaling.code), ctypes.c_int64(square)
        library.run_block_restore(*how, *at, *sizes, ctypes.c_void_p(got.data_ptr()))
        assert_same_bits(got, want, f"{shape}")


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
        library.run_tensor_restore(ctypes.c_int64(fmt is E5M2), *at[:2], *sizes, *at[2:])
        assert (got.isnan() == want.isnan()).all()
        assert_same_bits(got.nan_to_num(), want.nan_to_num(), f"{rows} {cols}")
        assert alpha.tolist() == [scale[0].item(), 0.0, -7.0]


@pytest.mark.parametrize("square", [False, True])
def test_spread(library, square: bool) -> None:
    for shape in [*SHAPES, (17, 300)]:
        x = torch.randn(shape) * 10.0 ** torch.randint(-38, 6, shape)
        x[0, -1] = float("nan")
        operand = reference_block.quantize_operand(x, BLOCK_POW2, E4M3, square)
        scales = reference_block.lay_out(operand, BLOCK_POW2, square)[1]
        down = operand.scales.repeat_interleave(128, 0)[: shape[0]] if square else operand.scales
        wide = down.repeat_interleave(4, 1)[:, : -(-shape[1] // 32)]
        exponent = (wide.contiguous().view(torch.int32) >> 23).to(torch.uint8)
        bytes_ = torch.where(wide.isnan(), 0xFF, exponent).to(torch.uint8)
        want = reference_block.tile(bytes_, shape[0], -(-shape[1] // 2))
        got = garbage(want)
        sizes = map(ctypes.c_int64, (square, *shape))
        at = ctypes.c_void_p(scales.data_ptr())
        library.run_block_spread(at, *sizes, ctypes.c_void_p(got.data_ptr()))
        assert_same_bits(got, want, f"{shape}")
