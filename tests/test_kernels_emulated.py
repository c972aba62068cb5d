"""Decides that the quantizing kernels compute what the reference says, without a GPU: their sources
are compiled for the CPU, a fiber a CUDA thread (emulation/cuda_on_cpu.h). What the hardware adds,
its memory model, its own conversions and its speed, is for the tests marked gpu."""

from __future__ import annotations

import ctypes
import itertools
from typing import NamedTuple

import emulated
import pytest
import torch
from conftest import assert_same_bits

from narrowfloat import reference
from narrowfloat.formats import BY_CODE, padded

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Job(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("type", "rows", "cols", "row_stride")),
        ("col_stride", ctypes.c_int64),
        ("format", ctypes.c_int64),
        ("q_rows", ctypes.c_void_p),
        ("q_columns", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("scale_given", ctypes.c_int64),
        ("column_sums", ctypes.c_void_p),
        ("sums_type", ctypes.c_int64),
    ]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory):
    library = emulated.build(
        tmp_path_factory.mktemp("emulation"), "entry.cpp", ["measure_kernels", "quantize_kernels"]
    )
    function = library.run_quantize
    function.restype = ctypes.c_int64
    return function


class Quantized:
    """One tensor's job and what it writes, filled with garbage first."""

    def __init__(
        self,
        x: torch.Tensor,
        code: int,
        rows: bool = True,
        columns: bool = True,
        scale: torch.Tensor | None = None,
        sums: torch.dtype | None = None,
    ) -> None:
        m, k = x.shape
        self.x, self.code, self.given, self.sums_type = x, code, scale is not None, sums
        garbage = lambda *size: torch.full(size, 0xAB, dtype=torch.uint8)  # noqa: E731
        self.rows = garbage(padded(m), padded(k)) if rows else None
        self.columns = garbage(padded(k), padded(m)) if columns else None
        self.scale = torch.full((4,), -1.0) if scale is None else scale.clone()
        self.sums = None if sums is None else torch.full((k,), -7.0).to(sums)

    def job(self) -> Job:
        at = lambda t: None if t is None else t.data_ptr()  # noqa: E731
        return Job(
            at(self.x), TYPES[self.x.dtype], *self.x.shape, *self.x.stride(), self.code,
            at(self.rows), at(self.columns), at(self.scale), int(self.given),
            at(self.sums), TYPES[self.sums_type or torch.float32],
        )  # fmt: skip

    def check(self, what: str) -> None:
        given = self.scale if self.given else None
        want = reference.quantize(self.x, self.code, True, True, given)
        dtype = BY_CODE[self.code].dtype
        assert_same_bits(self.scale, want[2], f"{what} scale")
        if self.rows is not None:
            assert_same_bits(self.rows.view(dtype), want[0], f"{what} rows")
        if self.columns is not None:
            assert_same_bits(self.columns.view(dtype), want[1], f"{what} columns")
        if self.sums is not None:
            ref = self.x.double().sum(0)
            bound = 2.0**-7 * self.x.double().abs().sum(0) + 1e-30
            assert ((self.sums.double() - ref).abs() <= bound).all(), what


_devices: list[Device] = []


class Device(NamedTuple):
    """A pretended one: multiprocessors, and whether a grid may meet at a barrier."""

    sms: int
    cooperative: bool = True


TWO = Device(2)


def quantize(run, *jobs: Job, on: Device = TWO) -> int:
    """Runs them in one call on a pretended device, a number each: the host code reads it once.
    The number of launches that quantize, negative where the first measures too."""
    if on not in _devices:
        _devices.append(on)
    arguments = (len(jobs), _devices.index(on), *on)
    launches = run((Job * len(jobs))(*jobs), *map(ctypes.c_int64, arguments))
    assert launches != 0, "it threw"
    return launches


ONE_LAUNCH, TWO_LAUNCHES = Device(12), Device(2, cooperative=False)  # the first holds every shape
SHAPES = [(1, 1), (5, 13), (16, 128), (33, 72), (64, 256), (129, 257), (300, 136), (520, 24)]


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("on", [ONE_LAUNCH, TWO_LAUNCHES])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_tensor(run, dtype: torch.dtype, on: Device, shape: tuple[int, int]) -> None:
    for code, (rows, columns) in itertools.product(
        (0, 1), ((True, True), (True, False), (False, True))
    ):
        x = torch.randn(shape).to(dtype)
        q = Quantized(x, code, rows, columns, sums=dtype if columns else None)
        fused = quantize(run, q.job(), on=on)
        assert fused == (-1 if on == ONE_LAUNCH else 1)
        q.check(f"{code} {rows} {columns}")


@pytest.mark.parametrize("on", [ONE_LAUNCH, TWO_LAUNCHES])
def test_layouts(run, on: Device) -> None:
    base, flat = torch.randn(40, 96, 24), torch.randn(1 + 64 * 48)
    for dtype in TYPES:
        b, f = base.to(dtype), flat.to(dtype)
        for name, x in {
            "transposed": b[0].t(),
            "columns apart": b[0][:, ::2],
            "rows apart": b[0][::2],
            "unaligned": f[1:].view(64, 48),
            "unaligned transposed": f[1:].view(48, 64).t(),
            "expanded rows": b[0, :1].expand(50, 24),
            "expanded": b[0, 0, 0].expand(17, 19),
            "empty rows": b[0, :0],
            "empty columns": b[0, :, :0],
        }.items():
            q = Quantized(x, 0, sums=torch.float32)
            quantize(run, q.job(), on=on)
            q.check(f"{name} {dtype}")


@pytest.mark.parametrize("kind", ["zeros", "tiny", "huge", "nan", "inf", "-inf"])
@pytest.mark.parametrize("on", [ONE_LAUNCH, TWO_LAUNCHES])
def test_values(run, kind: str, on: Device) -> None:
    for dtype, code in itertools.product(TYPES, (0, 1)):
        x = torch.randn(70, 130)
        if kind in ("nan", "inf", "-inf"):
            x[69, 100] = float(kind)
        elif kind != "huge":
            x *= {"zeros": 0.0, "tiny": 1e-42}[kind]
        else:
            x *= 6000 if dtype == torch.float16 else 1e37
        q = Quantized(x.to(dtype), code)
        quantize(run, q.job(), on=on)
        q.check(f"{dtype} {code}")


def test_every_16_bit_value(run) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype).reshape(256, 256)
        finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
        for code, case in itertools.product((0, 1), (finite, x)):
            q = Quantized(case, code)
            quantize(run, q.job())
            q.check(f"{dtype} {code}")


@pytest.mark.parametrize("on", [Device(1), Device(2), Device(6), Device(2, False)])
def test_two_tensors(run, on: Device) -> None:
    """A layer's calls: x and w measured; dy with its sums and w with the scale of before; of one
    type and of two, so many tiles that a block has several, fewer tiles than blocks."""
    for (m, k, n), dtypes in itertools.product(
        ((300, 200, 136), (40, 136, 264), (500, 100, 100), (16, 16, 16)),
        ((torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)),
    ):
        what = f"{m} {k} {n} {dtypes}"
        x, w = torch.randn(m, k).to(dtypes[0]), torch.randn(n, k).to(dtypes[1])
        dy = torch.randn(m, n).to(dtypes[0])
        first = Quantized(x, 0), Quantized(w, 0, columns=False)
        quantize(run, *(q.job() for q in first), on=on)
        for q in first:
            q.check(what)
        back = (
            Quantized(dy, 1, sums=torch.float32),
            Quantized(w, 0, rows=False, scale=first[1].scale),
        )
        quantize(run, *(q.job() for q in back), on=on)
        for q in back:
            q.check(what)


def test_sums_alone(run) -> None:
    """A layer of which only the bias trains writes no codes."""
    for dy in (torch.randn(100, 70), torch.randn(70, 100).t()):
        q = Quantized(dy, 1, rows=False, columns=False, scale=torch.ones(4), sums=torch.float32)
        job = q.job()
        job.scale = None
        quantize(run, job)
        q.check("sums")


def test_what_is_not_written_shows(run) -> None:
    """Outputs begin as garbage, so a kernel that leaves any of them out is seen: here, one that is
    told of a row less."""
    q = Quantized(torch.randn(17, 13), 0, sums=torch.float32)
    job = q.job()
    job.rows = 16
    quantize(run, job)
    q.scale = reference.quantize(q.x, 0, True, True)[2]
    with pytest.raises(AssertionError, match="rows: .* differ"):
        q.check("a row less")
