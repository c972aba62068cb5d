"""Decides that the FP4 kernels compute what the reference says, without a GPU: their sources are
compiled for the CPU (emulation/cuda_on_cpu.h)."""

from __future__ import annotations

import ctypes
import itertools

import emulated
import pytest
import torch
from conftest import assert_same_bits

from narrowfloat import reference_fp4
from narrowfloat.formats import padded
from narrowfloat.settings import FP4Quantize, Orientation

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NONE, PACKED, OPERAND = Orientation(), Orientation(True), Orientation(True, True)


class Side(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("form", "stochastic", "rotated", "six", "up")),
        *((n, ctypes.c_void_p) for n in ("data", "scales", "tensor_scale")),
    ]


class Job(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("type", "rows", "cols", "row_stride", "col_stride")),
        *((n, ctypes.c_int64) for n in ("mx", "two_d")),
        ("side", Side * 2),
        ("seed", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
    ]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    names = ["fp4_measure_kernels", "fp4_quantize_kernels", "fp4_restore"]
    found = emulated.build(tmp_path_factory.mktemp("fp4_emulation"), "fp4_entry.cpp", names)
    found.run_fp4.restype = found.run_restore.restype = ctypes.c_int64
    return found


def check(library, x: torch.Tensor, choices: FP4Quantize, what: str, sums: bool = False) -> None:
    """All that the kernels write, begun as garbage, against the reference."""
    seed = torch.tensor([0x1234567890ABCDEF, -0x7FEDCBA987654321])
    want = reference_fp4.fp4_quantize(x, seed, choices.pack())
    got = [torch.full_like(t.view(torch.uint8), 0xAB).view(t.dtype) for t in want[:4]]
    scales, total = torch.full((4,), -7.0), torch.full((x.shape[1],), -7.0)
    sides = []
    for k, o in enumerate((choices.rows, choices.columns)):
        form = 0 if not o.wanted else 2 if o.operand else 1
        sides.append(
            Side(form, o.stochastic, o.rotated, o.four_over_six, o.scale_up,
                 got[2 * k].data_ptr(), got[2 * k + 1].data_ptr(), scales.data_ptr() + 4 * k)
        )  # fmt: skip
    job = Job(
        x.data_ptr(), TYPES[x.dtype], *x.shape, *x.stride(), choices.mx, choices.two_d,
        (Side * 2)(*sides), seed.data_ptr(), total.data_ptr() if sums else None,
    )  # fmt: skip
    assert library.run_fp4(ctypes.byref(job), ctypes.c_int64(0), ctypes.c_int64(1)) == 1
    names = ("rows", "row scales", "columns", "column scales")
    for g, w, name in zip(got, want[:4], names, strict=True):
        assert_same_bits(g.view(torch.uint8), w.view(torch.uint8), f"{what} {choices} {name}")
    assert_same_bits(scales, want[4], f"{what} {choices} tensor scales")
    if sums:
        bound = 1e-6 * x.double().abs().sum(0) + 1e-30
        assert ((total.double() - x.double().sum(0)).abs() <= bound).all(), what
    if choices.rows.wanted and not choices.rows.operand:
        m, k = x.shape
        restored = torch.full((padded(m), got[0].shape[1] * 2), -7.0).to(torch.bfloat16)
        arguments = [ctypes.c_void_p(t.data_ptr()) for t in (got[0], got[1])]
        sizes = [ctypes.c_int64(m), ctypes.c_int64(k)]
        out = ctypes.c_void_p(restored.data_ptr())
        one = ctypes.c_int64(1)
        assert library.run_restore(*arguments, *sizes, out, ctypes.c_int64(0), one) == 1
        operand = choices._replace(rows=choices.rows._replace(operand=True))
        asked = reference_fp4.fp4_quantize(x, seed, operand.pack())[0]
        assert_same_bits(restored.view(torch.uint8), asked.view(torch.uint8), f"{what} restored")


SHAPES = [(1, 1), (5, 13), (16, 32), (33, 72), (129, 257), (300, 136)]


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mx", [False, True])
def test_forms(library, dtype: torch.dtype, shape: tuple[int, int], mx: bool) -> None:
    x = torch.randn(shape).to(dtype)
    for rows, columns in itertools.product((NONE, PACKED, OPERAND), repeat=2):
        check(library, x, FP4Quantize(rows, columns, mx), f"{shape} {dtype}", sums=True)


@pytest.mark.parametrize("shape", [(5, 13), (129, 100), (200, 257)])
@pytest.mark.parametrize("mx", [False, True])
def test_rotated_and_stochastic(library, shape: tuple[int, int], mx: bool) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16)
    for form, stochastic, rotated in itertools.product((PACKED, OPERAND), (0, 1), (0, 1)):
        side = form._replace(stochastic=bool(stochastic), rotated=bool(rotated))
        check(library, x, FP4Quantize(side, side, mx), str(shape))


def test_choices_of_the_block_scale(library) -> None:
    x = torch.randn(150, 140)
    for rows, columns in itertools.product((NONE, PACKED, OPERAND), repeat=2):
        for two_d in (False, True):
            check(library, x, FP4Quantize(rows, columns, False, two_d), "plain")
            six = [s._replace(four_over_six=True) for s in (rows, columns)]
            check(library, x, FP4Quantize(*six, False, two_d), "four over six")
        up = [s._replace(scale_up=True, stochastic=True) for s in (rows, columns)]
        check(library, x, FP4Quantize(*up), "up")


@pytest.mark.parametrize("mx", [False, True])
@pytest.mark.parametrize("kind", ["zeros", "tiny", "subnormal", "huge", "outlier", "nan", "inf"])
def test_values(library, kind: str, mx: bool) -> None:
    x = torch.randn(70, 130)
    factor = {"zeros": 0.0, "tiny": 1e-30, "subnormal": 1e-39, "huge": 1e36}.get(kind, 1.0)
    x *= factor
    if kind == "outlier":
        x[3, 5] = 1e6
        x[40:] *= 1e-5
    if kind in ("nan", "inf"):
        x[69, 100], x[3, 4] = float(kind), -float(kind)
    for six in (False, True):
        plain = PACKED._replace(four_over_six=six and not mx)
        choices = FP4Quantize(plain, plain, mx)
        check(library, x, choices, kind)
    check(library, x, FP4Quantize(OPERAND, PACKED._replace(rotated=True), mx), kind)
    noisy = OPERAND._replace(stochastic=True, rotated=True)
    check(library, x, FP4Quantize(PACKED._replace(stochastic=True), noisy, mx), kind)
    if not mx:  # blocks that are ragged both ways, with the NaN in them
        for rows, columns in ((PACKED, OPERAND), (OPERAND, PACKED)):
            check(library, x, FP4Quantize(rows, columns, False, True), kind)
            check(library, x[:, :103], FP4Quantize(rows, columns, False, True), kind)


def test_every_bf16_value(library) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = x.reshape(256, 256)
    for case in (torch.where(x.isfinite(), x, torch.zeros_like(x)), x):
        for mx in (False, True):
            check(library, case, FP4Quantize(PACKED, OPERAND, mx), "all")
            noisy = PACKED._replace(stochastic=True)
            check(library, case, FP4Quantize(noisy, OPERAND._replace(rotated=True), mx), "all")


def test_layouts(library) -> None:
    base = torch.randn(40, 96, 24)
    for name, x in {
        "transposed": base[0].t(),
        "columns apart": base[0][:, ::2],
        "rows apart": base[0][::2],
        "unaligned": base.flatten()[1 : 1 + 64 * 48].view(64, 48),
        "expanded": base[0, 0, 0].expand(17, 19),
        "no rows": base[0, :0],
        "no columns": base[0, :, :0],
    }.items():
        check(library, x, FP4Quantize(PACKED, OPERAND._replace(rotated=True)), name, sums=True)
