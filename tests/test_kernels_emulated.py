"""Tests of the kernels that quantize with one scale a tensor, without a GPU: their sources are
compiled for the CPU, a fiber a CUDA thread (emulation/cuda_on_cpu.h). What the hardware adds, its
memory model, its own conversions and its speed, is for the tests marked gpu."""

from __future__ import annotations

import ctypes
import itertools
from typing import NamedTuple

import emulated
import pytest
import torch
from conftest import assert_same_bits

from narrowfloat.cast import Cast
from narrowfloat.formats import BY_CODE, E4M3, padded
from narrowfloat.reference import linear
from narrowfloat.reference.delayed import FIRST, MARK, roll, scale_by_history
from narrowfloat.reference.tensor import known_or_measured
from narrowfloat.spec import both

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
        ("history", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("width", "guarded", "joins")),
    ]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory):
    library = emulated.build(
        tmp_path_factory.mktemp("emulation"),
        "entry.cpp",
        ["quantize/amax_history", "quantize/tensor_amax_kernels", "quantize/tensor_kernels"],
    )
    function = library.run_quantize
    function.restype = ctypes.c_int64
    function.roll = library.run_roll
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
        history: torch.Tensor | None = None,
        guarded: bool = False,
        joins: bool = False,
    ) -> None:
        m, k = x.shape
        self.history, self.guarded, self.joins = history, guarded, joins
        self.before = None if history is None else history.clone()
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
            at(self.history), 0 if self.history is None else self.history.numel(),
            self.guarded, self.joins,
        )  # fmt: skip

    def check(self, what: str) -> None:
        given, fmt = self.scale if self.given else None, BY_CODE[self.code]
        if self.history is not None:
            given = scale_by_history(self.x, fmt, self.before, self.guarded, self.joins)
            assert_same_bits(self.history, self.before, f"{what} history")
        cast = Cast(fmt.name)
        rows, _, columns, _, scales = linear.quantize(self.x, both(cast, cast).pack(), given)
        assert_same_bits(self.scale, scales[:4], f"{what} scale")
        if self.rows is not None:
            assert_same_bits(self.rows.view(fmt.dtype), rows, f"{what} rows")
        if self.columns is not None:
            assert_same_bits(self.columns.view(fmt.dtype), columns, f"{what} columns")
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


def measured(x: torch.Tensor) -> torch.Tensor:
    return known_or_measured(x, E4M3)


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


@pytest.mark.parametrize("on", [ONE_LAUNCH, TWO_LAUNCHES])
def test_r27_where_max_over_amax_overflows(run, on: Device) -> None:
    """R-27: around the edge, down to the smallest number; by a history too."""
    for code, exponent in itertools.product((0, 1), (112, 119, 120, 121, 126, 130, 149)):
        x = torch.randn(70, 130).clamp(-1, 1) * 2.0**-exponent
        q = Quantized(x, code)
        quantize(run, q.job(), on=on)
        q.check(f"{code} {exponent}")
        history = torch.zeros(FIRST + 4, dtype=torch.int32)
        history[0] = x.abs().amax().view(torch.int32)
        history[2] = MARK ^ int(history[0])
        q = Quantized(x, code, history=history)
        quantize(run, q.job(), on=on)
        q.check(f"{code} {exponent} by history")


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
    q.scale = measured(q.x)
    with pytest.raises(AssertionError, match="rows: .* differ"):
        q.check("a row less")


def history(covers: float, *before: float, opened: float = 0.0) -> torch.Tensor:
    """A row whose scale covers an amax, int32."""
    row = torch.zeros(FIRST + 5)
    row[0], row[1], row[FIRST : FIRST + len(before)] = covers, opened, torch.tensor(before)
    row = row.view(torch.int32)
    row[2] = MARK ^ int(row[0])
    return row


HISTORIES = {
    "fresh": torch.zeros(FIRST + 5, dtype=torch.int32),
    "garbage": torch.full((FIRST + 5,), 0x4B4B4B4B, dtype=torch.int32),
    "begun": history(0.0, opened=2.0),
    "holds": history(16.0, 3.0, opened=1.0),
    "far": history(3e38, 3e38),
    "outgrown": history(0.5, 0.25, 0.5, opened=9.0),
}


@pytest.mark.parametrize("on", [ONE_LAUNCH, TWO_LAUNCHES])
@pytest.mark.parametrize("name", list(HISTORIES))
def test_scales_by_history(run, name: str, on: Device) -> None:
    """Codes, scales and what the call leaves in the history, with and without the guard, counted
    and not; a NaN or an Inf surfaces and does not count."""
    cases = [(dtype, (300, 136), None) for dtype in TYPES]
    cases += [(torch.bfloat16, (33, 72), special) for special in (float("nan"), float("-inf"))]
    for dtype, shape, special in cases:
        x = torch.randn(shape)
        x[0, 0] = 4.0  # the largest, whatever was drawn
        x = x.clamp(-4, 4).to(dtype)
        if special is not None:
            x[-1, -1] = special
        for code, guarded, joins in ((0, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 1)):
            row = HISTORIES[name].clone()
            q = Quantized(
                x, code, sums=torch.float32, history=row, guarded=bool(guarded), joins=bool(joins)
            )
            launches = quantize(run, q.job(), on=on)
            assert launches == (-1 if on == ONE_LAUNCH else 1)
            q.sums = None if special is not None else q.sums
            q.check(f"{name} {dtype} {shape} {special} {code} {guarded} {joins}")


@pytest.mark.parametrize("on", [Device(1), Device(2), Device(6), Device(2, False)])
def test_two_tensors_by_history(run, on: Device) -> None:
    """A layer's calls: x and w by theirs; dy by its own with w's scale of before."""
    every = {"guarded": True, "joins": True}
    for first, second in itertools.product(("fresh", "holds", "outgrown"), repeat=2):
        for dtypes in ((torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)):
            x, w = torch.randn(140, 72).to(dtypes[0]), torch.randn(136, 72).to(dtypes[1])
            dy = torch.randn(140, 136).to(dtypes[0])
            a = Quantized(x, 0, history=HISTORIES[first].clone(), **every)
            b = Quantized(w, 0, columns=False, history=HISTORIES[second].clone(), **every)
            quantize(run, a.job(), b.job(), on=on)
            scale = b.scale.clone()
            a.check(f"x {first} {second}"), b.check(f"w {first} {second}")
            c = Quantized(dy, 1, sums=torch.float32, history=HISTORIES[first].clone(), **every)
            d = Quantized(w, 0, rows=False, scale=scale)
            quantize(run, c.job(), d.job(), on=on)
            c.check(f"dy {first}"), d.check("w again")


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_a_given_scale_that_is_not_finite_beside_a_history(run, special: float) -> None:
    """w's codes are written though its scale of before means nothing: none is left as it was."""
    w = torch.randn(136, 72)
    w[7, 5] = special
    scale = measured(w)
    dy = torch.randn(140, 136)
    c = Quantized(dy, 1, history=HISTORIES["holds"].clone(), guarded=True, joins=True)
    d = Quantized(w, 0, rows=False, scale=scale)
    launches = quantize(run, c.job(), d.job(), on=TWO_LAUNCHES)
    assert launches > 0, "expected the launch that measures meanwhile"
    c.check("dy"), d.check("w")


@pytest.mark.parametrize("latest", [False, True])
@pytest.mark.parametrize("margin", [0, 3, 64])
@pytest.mark.parametrize("length", [1, 2, 16, 128, 129, 1024])
def test_histories_roll(run, latest: bool, margin: int, length: int) -> None:
    layers = []
    for i in range(3):
        rows = torch.zeros(3, FIRST + length)
        rows[:, FIRST:] = torch.rand(3, length) * 10.0 ** torch.randint(-30, 30, (3, length))
        rows[:, 0], rows[:, 1] = torch.rand(3), torch.rand(3) * 10.0**i
        rows[1, 1] = 0.0  # took part in nothing
        rows = rows.view(torch.int32)
        rows[:, 2] = MARK ^ rows[:, 0]
        layers.append(rows)
    layers[2][0, 2] += 1  # says nothing
    layers.append(torch.zeros(3, FIRST + length, dtype=torch.int32))
    for _ in range(2):
        want = [rows.clone() for rows in layers]
        for rows in want:
            roll(rows, latest, margin)
        addresses = (ctypes.c_void_p * len(layers))(*(rows.data_ptr() for rows in layers))
        sizes = map(ctypes.c_int64, (len(layers), 3, FIRST + length, int(latest)))
        assert run.roll(addresses, *sizes, ctypes.c_double(2.0**margin)) == 1
        for rows, expected in zip(layers, want, strict=True):
            assert_same_bits(rows, expected, "history")
            valid = rows[:, 2] == MARK ^ rows[:, 0]
            rows[valid, 1] = torch.rand(3).view(torch.int32)[valid]  # the next step
