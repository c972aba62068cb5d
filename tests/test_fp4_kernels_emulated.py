"""Tests of the FP4 kernels without a GPU: their sources are compiled for the CPU
(emulation/cuda_on_cpu.h)."""

from __future__ import annotations

import ctypes
import itertools
from typing import NamedTuple

import emulated
import pytest
import torch
from conftest import assert_same_bits

from narrowfloat.cast import Cast
from narrowfloat.formats import padded
from narrowfloat.reference import linear
from narrowfloat.spec import Quantize

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class How(NamedTuple):
    """One orientation: whether it is wanted, whether as a bf16 operand, and its cast's options."""

    wanted: bool = False
    operand: bool = False
    stochastic: bool = False
    hadamard: bool = False
    four_over_six: bool = False
    scale_up: bool = False


NONE, PACKED, OPERAND = How(), How(True), How(True, True)


class Choices(NamedTuple):
    rows: How
    columns: How
    mx: bool = False
    square: bool = False

    def pack(self) -> int:
        """For the reference's operator."""
        casts = []
        for how in self[:2]:
            options = how._asdict()
            del options["wanted"], options["operand"]
            cast = Cast("e2m1", "mxfp4" if self.mx else "nvfp4", self.square, **options)
            casts.append(cast if how.wanted else None)
        wanted = (how.wanted for how in self[:2])
        return Quantize(*casts, *wanted, *(how.operand for how in self[:2])).pack()


class Side(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("form", "stochastic", "rotated", "six", "up")),
        *((n, ctypes.c_void_p) for n in ("data", "scales", "tensor_scale")),
    ]


class Job(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("type", "rows", "cols", "row_stride", "col_stride")),
        *((n, ctypes.c_int64) for n in ("mx", "square")),
        ("side", Side * 2),
        ("seed", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
    ]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    names = [f"quantize/fp4_{name}" for name in ("amax_kernels", "kernels", "dequantize")]
    found = emulated.build(tmp_path_factory.mktemp("fp4_emulation"), "fp4_entry.cpp", names)
    found.run_fp4.restype = found.run_dequantize.restype = ctypes.c_int64
    return found


def check(library, x: torch.Tensor, choices: Choices, what: str, sums: bool = False) -> None:
    """All that the kernels write, begun as garbage, against the reference."""
    seed = torch.tensor([0x1234567890ABCDEF, -0x7FEDCBA987654321])
    want = linear.quantize(x, choices.pack(), None, seed)
    got = [torch.full_like(t.view(torch.uint8), 0xAB).view(t.dtype) for t in want[:4]]
    want_scales = torch.zeros(4)
    if want[4].numel():
        want_scales[:2] = want[4].view(2, -1)[:, 0]
    scales, total = torch.full((4,), -7.0), torch.full((x.shape[1],), -7.0)
    sides = []
    for k, o in enumerate((choices.rows, choices.columns)):
        form = 0 if not o.wanted else 2 if o.operand else 1
        sides.append(
            Side(form, o.stochastic, o.hadamard, o.four_over_six, o.scale_up,
                 got[2 * k].data_ptr(), got[2 * k + 1].data_ptr(), scales.data_ptr() + 4 * k)
        )  # fmt: skip
    job = Job(
        x.data_ptr(), TYPES[x.dtype], *x.shape, *x.stride(), choices.mx, choices.square,
        (Side * 2)(*sides), seed.data_ptr(), total.data_ptr() if sums else None,
    )  # fmt: skip
    assert library.run_fp4(ctypes.byref(job), ctypes.c_int64(0), ctypes.c_int64(1)) == 1
    names = ("rows", "row scales", "columns", "column scales")
    for g, w, name in zip(got, want[:4], names, strict=True):
        assert_same_bits(g.view(torch.uint8), w.view(torch.uint8), f"{what} {choices} {name}")
    assert_same_bits(scales, want_scales, f"{what} {choices} tensor scales")
    if sums:
        bound = 1e-6 * x.double().abs().sum(0) + 1e-30
        assert ((total.double() - x.double().sum(0)).abs() <= bound).all(), what
    if choices.rows.wanted and not choices.rows.operand:
        m, k = x.shape
        dequantized = torch.full((padded(m), got[0].shape[1] * 2), -7.0).to(torch.bfloat16)
        arguments = [ctypes.c_void_p(t.data_ptr()) for t in (got[0], got[1])]
        sizes = [ctypes.c_int64(m), ctypes.c_int64(k)]
        out = ctypes.c_void_p(dequantized.data_ptr())
        one = ctypes.c_int64(1)
        assert library.run_dequantize(*arguments, *sizes, out, ctypes.c_int64(0), one) == 1
        operand = choices._replace(rows=choices.rows._replace(operand=True))
        asked = linear.quantize(x, operand.pack(), None, seed)[0]
        assert_same_bits(
            dequantized.view(torch.uint8), asked.view(torch.uint8), f"{what} dequantized"
        )


SHAPES = [(1, 1), (5, 13), (16, 32), (33, 72), (129, 257), (300, 136)]


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mx", [False, True])
def test_forms(library, dtype: torch.dtype, shape: tuple[int, int], mx: bool) -> None:
    x = torch.randn(shape).to(dtype)
    for rows, columns in itertools.product((NONE, PACKED, OPERAND), repeat=2):
        check(library, x, Choices(rows, columns, mx), f"{shape} {dtype}", sums=True)


@pytest.mark.parametrize("shape", [(5, 13), (129, 100), (200, 257)])
@pytest.mark.parametrize("mx", [False, True])
def test_rotated_and_stochastic(library, shape: tuple[int, int], mx: bool) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16)
    for form, stochastic, rotated in itertools.product((PACKED, OPERAND), (0, 1), (0, 1)):
        side = form._replace(stochastic=bool(stochastic), hadamard=bool(rotated))
        check(library, x, Choices(side, side, mx), str(shape))


def test_choices_of_the_block_scale(library) -> None:
    x = torch.randn(150, 140)
    for rows, columns in itertools.product((NONE, PACKED, OPERAND), repeat=2):
        for square in (False, True):
            check(library, x, Choices(rows, columns, False, square), "plain")
            six = [s._replace(four_over_six=True) for s in (rows, columns)]
            check(library, x, Choices(*six, False, square), "four over six")
        up = [s._replace(scale_up=True, stochastic=True) for s in (rows, columns)]
        check(library, x, Choices(*up), "up")


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
        choices = Choices(plain, plain, mx)
        check(library, x, choices, kind)
    check(library, x, Choices(OPERAND, PACKED._replace(hadamard=True), mx), kind)
    noisy = OPERAND._replace(stochastic=True, hadamard=True)
    check(library, x, Choices(PACKED._replace(stochastic=True), noisy, mx), kind)
    if not mx:  # blocks that are ragged both ways, with the NaN in them
        for rows, columns in ((PACKED, OPERAND), (OPERAND, PACKED)):
            check(library, x, Choices(rows, columns, False, True), kind)
            check(library, x[:, :103], Choices(rows, columns, False, True), kind)


EVERY_FORM = [PACKED, OPERAND, PACKED._replace(stochastic=True), PACKED._replace(hadamard=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mx", [False, True])
def test_r27_r28_ends_of_fp32(library, dtype: torch.dtype, mx: bool) -> None:
    """R-27, R-28: amax where 6 x 448 / amax overflows, from block to block; and the largest values,
    beside a NaN and an Inf in other blocks."""
    most = torch.finfo(dtype).max
    small = torch.randn(70, 200) * 2.0 ** -torch.arange(108, 178).clamp(max=140)[:, None]
    large = torch.full((70, 200), 3.1e38).copysign(torch.randn(70, 200))
    large[::7, ::5], large[3, 100] = most, -most
    large[40:, :50] = 1.0
    large[:, 150:] = 1e35  # these can be rotated
    for x, bad in itertools.product((small, large), (0.0, float("nan"), float("inf"))):
        x[69, 199] = bad
        for side in EVERY_FORM:
            check(library, x.to(dtype), Choices(side, side, mx), f"{bad}")
        view = x.to(dtype)[:, 1:]  # not aligned
        check(library, view, Choices(PACKED, OPERAND._replace(hadamard=True), mx), f"{bad}")
        if mx:
            continue
        six, up = PACKED._replace(four_over_six=True), PACKED._replace(scale_up=True)
        for square in (False, True):
            check(library, x.to(dtype), Choices(six, six, False, square), f"{bad} six")
            check(library, x.to(dtype), Choices(up, up, False, square), f"{bad} up")


def test_r30_ties(library) -> None:
    """R-30: blocks that 6 and 4 make the same values, among others, in every form."""
    x = torch.zeros(48, 64)
    x[:, ::16], x[:, 1::16] = 10, 9
    x[16:32] *= torch.rand(16, 64)
    x[32:, 2::16] = 3.5
    six = [form._replace(four_over_six=True) for form in (PACKED, OPERAND)]
    turned = [form._replace(hadamard=True) for form in six]
    for form in (*six, *turned):
        check(library, x, Choices(form, form), "ties")
        if not form.hadamard:
            check(library, x, Choices(form, form, False, True), "ties")


def test_every_bf16_value(library) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = x.reshape(256, 256)
    for case in (torch.where(x.isfinite(), x, torch.zeros_like(x)), x):
        for mx in (False, True):
            check(library, case, Choices(PACKED, OPERAND, mx), "all")
            noisy = PACKED._replace(stochastic=True)
            check(library, case, Choices(noisy, OPERAND._replace(hadamard=True), mx), "all")


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
        check(library, x, Choices(PACKED, OPERAND._replace(hadamard=True)), name, sums=True)
