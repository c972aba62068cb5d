"""Tests of quantizing, by every cast: the operator equals the reference bit for bit, and what
quantize() gives a user. test_reference_*.py test the reference's numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, skip_where_it_does_not_run
from torch import Tensor

import narrowfloat as nf
from narrowfloat import formats, ops, spec
from narrowfloat.cast import Cast
from narrowfloat.reference import linear
from narrowfloat.reference.tensor import SCALE
from narrowfloat.spec import Quantize, both

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEED = torch.tensor([0x123456789ABCDEF, -0x0FEDCBA987654321])

TENSOR, TENSOR5 = Cast("e4m3"), Cast("e5m2")
ROW, ROW5, MX = Cast("e4m3", "row"), Cast("e5m2", "row"), Cast("e4m3", "mx")
BLOCK, BLOCK_2D = Cast("e4m3", "block"), Cast("e4m3", "block", square=True)
POW2, POW2_2D = Cast("e4m3", "block_pow2"), Cast("e4m3", "block_pow2", square=True)


def nvfp4(**options: bool) -> Cast:
    return Cast("e2m1", "nvfp4", **options)


def mxfp4(**options: bool) -> Cast:
    return Cast("e2m1", "mxfp4", **options)


def operands(rows: Cast | None, columns: Cast | None) -> Quantize:
    """Both as bf16 operands."""
    made = both(rows, columns)
    return made._replace(rows_as_operand=made.want_rows, columns_as_operand=made.want_columns)


CHOICES = {
    "tensor": both(TENSOR, TENSOR),
    "tensor e5m2": both(TENSOR5, TENSOR5),
    "row": both(ROW, ROW),
    "row e5m2": both(ROW5, ROW5),
    "block": both(BLOCK, BLOCK),
    "block w": both(BLOCK_2D, BLOCK_2D),
    "pow2": both(POW2, POW2),
    "pow2 w": both(POW2_2D, POW2_2D),
    "pow2 operands": operands(POW2, POW2),
    "pow2 w operands": operands(POW2_2D, POW2_2D),
    "mx": both(MX, MX),
    "mx operands": operands(MX, MX),
    "nvfp4": both(nvfp4(), nvfp4()),
    "nvfp4 operands": operands(nvfp4(), nvfp4()),
    "nvfp4 x": both(nvfp4(), nvfp4(hadamard=True))._replace(rows_as_operand=True),
    "nvfp4 x rotated rows": both(nvfp4(hadamard=True), nvfp4())._replace(columns_as_operand=True),
    "nvfp4 x four over six": both(
        nvfp4(four_over_six=True), nvfp4(four_over_six=True, hadamard=True)
    )._replace(rows_as_operand=True),
    "nvfp4 w": operands(nvfp4(square=True), None),
    "nvfp4 w both": both(nvfp4(square=True), nvfp4(square=True))._replace(columns_as_operand=True),
    "nvfp4 w four over six": both(*[nvfp4(square=True, four_over_six=True)] * 2),
    "nvfp4 w 1 x 16": both(*[nvfp4(four_over_six=True)] * 2),
    "nvfp4 dy": operands(nvfp4(stochastic=True), nvfp4(stochastic=True, hadamard=True)),
    "nvfp4 dy packed": both(nvfp4(stochastic=True), nvfp4(stochastic=True, hadamard=True)),
    "nvfp4 dy scaled up": both(
        nvfp4(stochastic=True, scale_up=True),
        nvfp4(stochastic=True, scale_up=True, hadamard=True),
    ),
    "nvfp4 dy nearest scaled up": both(*[nvfp4(scale_up=True)] * 2),
    "nvfp4 w random": both(*[nvfp4(square=True, stochastic=True)] * 2),
    "mxfp4": both(mxfp4(), mxfp4()),
    "mxfp4 operands": operands(mxfp4(), mxfp4()),
    "mxfp4 x": both(mxfp4(), mxfp4(hadamard=True))._replace(rows_as_operand=True),
    "mxfp4 dy": operands(mxfp4(stochastic=True), mxfp4(stochastic=True, hadamard=True)),
    "mxfp4 dy packed": both(mxfp4(stochastic=True), mxfp4(stochastic=True, hadamard=True)),
    # two kinds at once
    "row, row e5m2": both(ROW, ROW5),
    "row e5m2, block": both(ROW5, BLOCK),
    "block w, pow2": both(BLOCK_2D, POW2),
    "pow2 operand, mx": both(POW2, MX)._replace(rows_as_operand=True),
    "mx, mx operand": both(MX, MX)._replace(columns_as_operand=True),
    "mx operand, row": both(MX, ROW)._replace(rows_as_operand=True),
    "tensor, tensor e5m2": both(TENSOR, TENSOR5),
    "tensor, row": both(TENSOR, ROW),
    "nvfp4, tensor": both(nvfp4(), TENSOR),
    "mx, nvfp4 rotated": both(MX, nvfp4(hadamard=True)),
    "nvfp4, mxfp4": both(nvfp4(), mxfp4()),
    "nvfp4 w, nvfp4": both(nvfp4(square=True), nvfp4()),
}
# one of each way that a kernel goes, for tests that are long
FEW = ["tensor", "row e5m2", "block", "pow2 w", "pow2 operands", "mx", "nvfp4", "nvfp4 x",
       "nvfp4 w", "nvfp4 w four over six", "nvfp4 dy", "nvfp4 dy packed", "mxfp4", "mxfp4 dy",
       "mxfp4 dy packed"]  # fmt: skip
NAMES = ("rows", "scales of rows", "columns", "scales of columns", "tensor scales")


def casts_of(choices: Quantize) -> list[Cast]:
    return [cast for cast in choices[:2] if cast is not None]


def seed_of(choices: Quantize) -> Tensor | None:
    return SEED if any(cast.stochastic for cast in casts_of(choices)) else None


def assert_equals_reference(x: Tensor, choices: Quantize, what: str = "") -> None:
    """x, anywhere and with any strides, through the operator."""
    seed = seed_of(choices)
    got = ops.quantize_op(x, choices.pack(), None, None if seed is None else seed.to(x.device))
    want = linear.quantize(x.cpu().contiguous(), choices.pack(), None, seed)
    for a, b, name in zip(got, want, NAMES, strict=True):
        assert a.dtype == b.dtype, (what, name)
        assert_same_bits(a, b, f"{what} {tuple(x.shape)} {x.dtype} {name}")


def ways(choices: Quantize) -> list[Quantize]:
    """Both orientations and each alone."""
    if not (choices.want_rows and choices.want_columns):
        return [choices]
    return [choices, choices._replace(want_columns=False), choices._replace(want_rows=False)]


def special(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape)
    if kind == "zeros":
        x = x * 0
    elif kind == "tiny":  # largest / amax overflows
        x = x * 1e-39
    elif kind == "tinier":
        x = x * 1e-42
    elif kind == "smallest":
        x = x.sign() * 1e-45
    elif kind == "small":
        x = x * 1e-30
    elif kind == "huge":
        x = x * (6000 if dtype == torch.float16 else 1e37)
    elif kind == "largest":  # bf16 and a rotation overflow
        x = x.sign() * torch.finfo(dtype).max
    elif kind == "outlier":
        x = x * 1e-3
        x.view(-1)[-1] = 1000.0
    elif kind == "rows apart":  # from flushed blocks to the largest
        x = x * torch.logspace(-9, 3, shape[0])[:, None]
    elif kind == "columns apart":
        x = x * torch.logspace(-9, 3, shape[1])
    elif kind == "elements apart":
        x = x * 10.0 ** torch.randint(-3, 3, shape)
    elif kind in ("nan", "inf", "-inf"):
        x.view(-1)[x.numel() // 2] = float(kind)
    elif kind in ("nan at the edges", "inf at the edges"):
        value = float(kind.split()[0])
        x[-1, -1], x[0, -1], x[3, 4] = value, -value, -value
    elif kind == "all nan":
        x = x * math.nan
    return x.to(dtype)


OF_ANY_SHAPE = ("zeros", "tinier", "huge", "outlier", "nan", "inf", "-inf")
KINDS = [
    *OF_ANY_SHAPE, "tiny", "smallest", "small", "largest", "rows apart", "columns apart",
    "elements apart", "nan at the edges", "inf at the edges", "all nan",
]  # fmt: skip
SHAPES = [
    (1, 1), (5, 13), (16, 16), (16, 32), (33, 72), (64, 128), (128, 64), (129, 257), (300, 136),
    (3, 200), (1000, 72), (33, 1), (1, 1030), (300, 520), (0, 16), (16, 0), (0, 0),
]  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_kernel_equals_reference(device: str, shape: tuple[int, int], name: str) -> None:
    """Casts by tensor also of special values at each shape: a reduction over all of it."""
    choices = CHOICES[name]
    by_tensor = all(cast.scaling == "tensor" for cast in casts_of(choices)) and 0 not in shape
    for dtype in DTYPES if device == "cuda" else DTYPES[1:2]:
        for kind in ("normal", *(OF_ANY_SHAPE if by_tensor else ())):
            x = special(kind, shape, dtype).to(device)
            for choice in ways(choices):
                assert_equals_reference(x, choice, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("shape", [(500, 144), (1024, 2056), (3000, 24)], ids=str)
def test_many_tiles(cuda: str, shape: tuple[int, int], name: str) -> None:
    for dtype in DTYPES[:2]:
        x = special("elements apart", shape, dtype).to(cuda)
        for choice in ways(CHOICES[name]):
            assert_equals_reference(x, choice)


# Elements: up to 4.3 million one launch measures and quantizes, beyond two launches do, with tiles
# of 64 rows to 13 million and of 128 from there on (16-bit; an H200).
LARGE = [
    (2048, 2304), (4100, 1500), (4096, 2048), (4096, 4096), (4104, 5000), (300, 70000),
    (70000, 300), (8192, 4096), (12345, 2056), (3, 9000000),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LARGE)
def test_large_tensors(cuda: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """By tensor, around the size where one launch becomes two; ragged edges, many tiles a block.
    The reference runs on the GPU here."""
    x = torch.randn(shape, device=cuda, dtype=dtype)
    x[-1, -1] = 77.0
    choices = both(TENSOR, TENSOR).pack()
    got = ops.quantize_op(x, choices)
    want = linear.quantize(x, choices)
    assert got[4][0].item() == np.float32(77.0) / np.float32(448.0)
    for a, b, name in zip(got, want, NAMES, strict=True):
        same = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (a, b))
        assert torch.equal(*same), name


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_special_values(device: str, kind: str, name: str) -> None:
    for dtype in DTYPES if device == "cuda" else DTYPES[:2]:
        assert_equals_reference(special(kind, (72, 100), dtype).to(device), CHOICES[name], kind)
    if device == "cuda":  # several tiles
        x = special(kind, (270, 300), torch.bfloat16).to(device)
        assert_equals_reference(x, CHOICES[name], kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CHOICES)
def test_every_16_bit_value(device: str, name: str, dtype: torch.dtype) -> None:
    """All bit patterns, with what is not finite and without, also without the largest, which flush
    the others."""
    choices = CHOICES[name]
    if device == "cpu" and (name not in FEW or (dtype == torch.float16 and name != "tensor")):
        pytest.skip("the reference has one code for all of these")
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype).reshape(256, 256)
    x = x.to(device)
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
    cases = {
        "finite": finite,
        "small": finite / 2**10,
        "without the largest": torch.where(finite.abs() < 8, finite, 0),
        "all": x,
        "all, transposed": x.t(),
    }
    for what, case in cases.items():
        assert_equals_reference(case, choices, what)


@pytest.mark.parametrize("name", CHOICES)
def test_strides(device: str, name: str) -> None:
    """Every layout gives the bits of its contiguous copy, and the input is left alone."""
    if device == "cpu" and name not in FEW:
        pytest.skip("the reference has one code for all of these")
    many = 40 if device == "cuda" else 5
    base, flat = torch.randn(many, 96, 24, device=device), torch.randn(1 + 96 * 160, device=device)
    for dtype in DTYPES if device == "cuda" or name == "tensor" else DTYPES[1:2]:
        b, f = base.to(dtype), flat.to(dtype)
        wide = f[1:].view(96, 160).clone()
        for what, x in {
            "transposed": b[0].t(),
            "wide transposed": wide.t(),
            "every second column": wide[:, ::2],
            "every second row": b[0][::2],
            "columns off 16 bytes": wide[:, 1:],
            "ragged rows on 16 bytes": wide[3:, :77],
            "permuted": b.permute(1, 0, 2),
            "permuted, last moved": b.permute(2, 1, 0),
            "dimensions moved": wide.view(4, 24, 160).transpose(0, 1),
            "unaligned": f[1 : 1 + 64 * 48].view(64, 48),
            "unaligned wide": f[1 : 1 + 90 * 160].view(90, 160),
            "unaligned transposed": f[1 : 1 + 64 * 48].view(48, 64).t(),
            "expanded rows": wide[:1].expand(40, 160),
            "expanded columns": b[0, :, :1].expand(96, 33),
            "expanded scalar": b[0, 0, 0].expand(17, 19),
            "one row of a transposed": b[0].t()[3:4],
            "sliced": b[:, 5:70, 3:20],
            "vector": b[0, :, 3],
            "row": wide[0],
            "no rows": b[0, :0],
            "no columns": b[0, :, :0],
        }.items():
            before = x.clone()
            assert_equals_reference(x, CHOICES[name], what)
            assert_same_bits(x, before, what)


@pytest.mark.parametrize("name", CHOICES)
def test_what_is_not_wanted_is_empty(device: str, name: str) -> None:
    """Its cast may be given all the same; a tensor scale is in its orientation's place."""
    x = torch.randn(40, 72, device=device)
    choices = CHOICES[name]
    seed = None if seed_of(choices) is None else SEED.to(device)
    every = ops.quantize_op(x, choices.pack(), None, seed)
    for choice in (*ways(choices), Quantize(*choices[:2])):
        made = ops.quantize_op(x, choice.pack(), None, seed)
        scales = torch.zeros(2, SCALE)
        wanted = choice.want_rows, choice.want_columns
        for side, (cast, is_wanted) in enumerate(zip(choice[:2], wanted, strict=True)):
            codes, block_scales = made[2 * side : 2 * side + 2]
            if not is_wanted:
                assert codes.shape == block_scales.shape == (0,)
                assert (codes.dtype, block_scales.dtype) == (torch.float8_e4m3fn, torch.float32)
                continue
            assert_same_bits(codes, every[2 * side])
            assert_same_bits(block_scales, every[2 * side + 1])
            if linear.has_tensor_scale(cast):
                scales[side] = every[4].view(2, SCALE)[side]
        if scales.any():
            assert_same_bits(made[4], scales.flatten())
        else:
            assert made[4].shape == (0,) and made[4].dtype == torch.float32


@pytest.mark.parametrize("cast", [TENSOR, TENSOR5], ids=lambda cast: cast.element)
def test_a_given_scale(device: str, cast: Cast) -> None:
    """Is used instead of what is measured, in each orientation, and comes back."""
    for dtype in DTYPES:
        x = torch.randn(100, 72).to(dtype).to(device)
        made = ops.quantize_op(x, both(cast, cast).pack())
        assert_same_bits(made[4][:SCALE], made[4][SCALE:])
        for choice in ways(both(cast, cast)):
            again = ops.quantize_op(x, choice.pack(), made[4][:SCALE].clone())
            for side, wanted in enumerate(choice[2:4]):
                if wanted:
                    assert_same_bits(again[2 * side], made[2 * side])
                    assert_same_bits(again[4].view(2, SCALE)[side], made[4][:SCALE])
            other = torch.tensor([2.0, 0.5, 0.0, 0.0])
            got = ops.quantize_op(x, choice.pack(), other.to(device))
            want = linear.quantize(x.cpu(), choice.pack(), other)
            for a, b, name in zip(got, want, NAMES, strict=True):
                assert_same_bits(a, b, name)


def test_refused(device: str) -> None:
    """The operator itself refuses bits that say no cast there is, and what a cast lacks."""
    x = torch.randn(32, 32, device=device)
    for cast, options, word in (
        (MX, ("e5m2",), "e5m2"),
        (BLOCK, ("e5m2",), "e5m2"),
        (POW2, ("e5m2",), "e5m2"),
        (MX, ("square",), "square"),
        (ROW, ("square",), "square"),
        (TENSOR, ("square",), "square"),
        (mxfp4(), ("square",), "square"),
        (BLOCK, ("stochastic",), "stochastic"),
        (TENSOR, ("hadamard",), "hadamard"),
        (ROW, ("scale_up",), "scale_up"),
        (mxfp4(), ("four_over_six",), "four.over.six"),
        (TENSOR, ("four_over_six",), "four.over.six"),
        (nvfp4(), ("four_over_six", "stochastic"), "four.over.six"),
        (nvfp4(), ("square", "hadamard"), "square"),
        (None, ("e5m2",), ""),
        (None, ("square",), ""),
    ):
        wrong = spec.bits_of(cast) | sum(spec.bit(f"cast.{o}") for o in options)
        for side in ("rows", "columns"):
            packed = spec.bit(f"quantize.{side}", wrong) | spec.bit(f"quantize.want_{side}")
            with pytest.raises(ValueError, match=f"quantize: .*expected.*{word}"):
                ops.quantize_op(x, packed, None, SEED.to(device))
    for code in range(len(formats.BY_SCALING), 1 << spec.LAYOUT["cast.scaling"][1]):
        packed = spec.bit("quantize.rows", spec.bit("cast.scaling", code))
        with pytest.raises(ValueError, match="quantize: .*expected a scaling"):
            ops.quantize_op(x, packed | spec.bit("quantize.want_rows"))
    for cast in (TENSOR, ROW, BLOCK):
        for choices in (operands(cast, None), operands(None, cast)):
            with pytest.raises(ValueError, match="powers of two as scales of a bf16 operand"):
                ops.quantize_op(x, choices.pack())
    for cast in (nvfp4(stochastic=True), mxfp4(stochastic=True)):
        for seed in (None, SEED.int(), SEED[:1]):
            seed = None if seed is None else seed.to(device)
            with pytest.raises(ValueError, match="quantize: expected a seed.*stochastic rounding"):
                ops.quantize_op(x, both(cast, None).pack(), None, seed)
    for scale in (torch.ones(3), torch.ones(SCALE).double()):
        with pytest.raises(ValueError, match=r"quantize: expected scale as float32 \[4\]"):
            ops.quantize_op(x, both(TENSOR, None).pack(), scale.to(device))
    for cast in (TENSOR, ROW, MX, nvfp4()):
        with pytest.raises(TypeError, match="quantize: expected x in float32"):
            ops.quantize_op(x.double(), both(cast, None).pack())


# ---- what a user gets ----

# name: (result, elements a block, dtype of the scales, relative error of Gaussian data)
FORMATS = {
    "e4m3": (nf.QuantizedTensor, None, torch.float32, 0.045),
    "e5m2": (nf.QuantizedTensor, None, torch.float32, 0.08),
    "fp8_row": (nf.BlockTensor, 0, torch.float32, 0.045),
    "fp8_block": (nf.BlockTensor, 128, torch.float32, 0.045),
    "fp8_block_pow2": (nf.BlockTensor, 128, torch.float32, 0.045),
    "mxfp8": (nf.BlockTensor, 32, torch.float8_e8m0fnu, 0.045),
    "nvfp4": (nf.FP4Tensor, 16, torch.float8_e4m3fn, 0.12),
    "mxfp4": (nf.FP4Tensor, 32, torch.float8_e8m0fnu, 0.14),
}
FP4 = ("nvfp4", "mxfp4")
USER_SHAPES = [
    (5,), (37,), (4, 17), (4, 31), (7, 33), (3, 5, 48), (2, 3, 200), (1, 1), (0,), (0, 7), (7, 0),
    (0, 40), (4, 0), (2, 0, 16), (0, 0),
]  # fmt: skip


def test_there_are_no_other_formats() -> None:
    assert set(FORMATS) == {
        *formats.FORMATS,
        *formats.SCALED_FORMATS,
        *formats.BLOCK_FORMATS,
    }


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", USER_SHAPES, ids=str)
def test_quantize(device: str, format: str, shape: tuple[int, ...]) -> None:
    kind, block, scales_dtype, error = FORMATS[format]
    for dtype in DTYPES:
        x = torch.randn(shape, device=device).to(dtype).requires_grad_()
        q = nf.quantize(x, format)
        assert isinstance(q, kind) and (q.format, q.dtype) == (format, dtype)
        if format in FP4:
            assert q.data.shape == (*shape[:-1], -(-shape[-1] // 2)) and q.width == shape[-1]
            assert q.data.dtype == torch.uint8
        else:
            assert q.data.shape == shape
            assert q.data.dtype == formats.FORMATS["e5m2" if format == "e5m2" else "e4m3"].dtype
        if block is not None:
            assert q.scales.shape == (*shape[:-1], -(-shape[-1] // block) if block else 1)
            assert q.scales.dtype == scales_dtype
        if kind is not nf.BlockTensor:
            assert q.scale.shape == () and q.scale.dtype == torch.float32
            if format == "mxfp4" or 0 in shape:
                assert q.scale.item() == 1
        assert not q.data.requires_grad
        back = q.dequantize()
        assert back.shape == shape and back.dtype == dtype and not back.requires_grad
        assert q.dequantize(torch.float32).dtype == torch.float32
        if x.numel():
            room = error if x.numel() > 100 else 1.5 * error
            assert (back - x).float().norm() <= room * x.float().norm()


def test_quantized_tensor(device: str) -> None:
    x = torch.randn(2, 3, 50, device=device, dtype=torch.bfloat16, requires_grad=True)
    q = nf.quantize(x)
    data, scale, name, dtype = q
    assert (name, dtype) == ("e4m3", torch.bfloat16)
    assert data.shape == x.shape and data.dtype == torch.float8_e4m3fn and scale.dim() == 0
    assert ((q.dequantize(torch.float32) - x).abs() <= x.abs() / 16 + scale * 2**-10).all()


@pytest.mark.parametrize("shape", [(0,), (0, 7), (7, 0), (2, 0, 7), (0, 0)])
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    q = nf.quantize(torch.empty(shape, device=device))
    assert q.data.shape == shape and q.scale.item() == 1
    assert q.dequantize().shape == shape


@pytest.mark.parametrize("format", FORMATS)
def test_a_view_of_what_the_operator_makes(device: str, format: str) -> None:
    """quantize() has the rows of the operator, without padding, one to one."""
    x = torch.randn(3, 5, 50, device=device)
    skip_where_it_does_not_run("nvfp4" if format in FP4 else "fp8", device)
    scaling = {s.format: s.name for s in formats.SCALINGS.values()}.get(format, "tensor")
    element = format if format in formats.FORMATS else "e2m1" if format in FP4 else "e4m3"
    q = nf.quantize(x, format)
    rows = ops.quantize_op(x, both(Cast(element, scaling), None).pack())[0]
    assert q.data.stride(-1) == 1
    assert_same_bits(q.data.reshape(15, -1), rows[:15, : q.data.shape[-1]])


@pytest.mark.parametrize("format", ["fp8_block", "fp8_block_pow2"])
def test_quantize_squares(device: str, format: str) -> None:
    x = torch.randn(130, 300, device=device)
    q = nf.quantize(x, format, two_d=True)
    assert q.two_d and q.scales.shape == (2, 3)
    assert (q.dequantize() - x).norm() < 0.03 * x.norm()
    assert_same_bits(nf.quantize(x.t(), format, two_d=True).scales.t(), q.scales)


def test_quantize_options(device: str) -> None:
    x = torch.randn(64, 96, device=device)

    def error(**options: bool) -> float:
        return ((nf.quantize(x, "nvfp4", **options).dequantize() - x).norm() / x.norm()).item()

    assert error(four_over_six=True) < error() < error(two_d=True) < error(stochastic=True)
    first, second = (nf.quantize(x, "mxfp4", stochastic=True) for _ in range(2))
    assert not torch.equal(first.data, second.data) and torch.equal(
        first.scales.view(torch.uint8), second.scales.view(torch.uint8)
    )


@pytest.mark.parametrize("format", FP4)
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


def test_errors(device: str) -> None:
    x = torch.ones(4, 8, device=device)
    for format, option in itertools.product(
        ("e4m3", "e5m2"), ("two_d", "four_over_six", "stochastic")
    ):
        with pytest.raises(
            ValueError, match="expected two_d, four_over_six and stochastic to be False"
        ):
            nf.quantize(x, format, **{option: True})
    for format, given in (
        ("mxfp4", "two_d"),
        ("mxfp4", "four_over_six"),
        ("mxfp8", "two_d"),
        ("fp8_row", "two_d"),
        ("fp8_block", "stochastic"),
        ("mxfp8", "four_over_six"),
    ):
        with pytest.raises(ValueError, match=f"quantize: expected .* False for {format}"):
            nf.quantize(x, format, **{given: True})
    for format in ("e3m4", "fp4", "mxfp6", None):
        with pytest.raises(
            ValueError,
            match="expected a format out of .*'e4m3', 'e5m2', 'fp8_block', 'fp8_block_pow2', "
            "'fp8_row', 'mxfp4', 'mxfp8', 'nvfp4'",
        ):
            nf.quantize(x, format)
    for format in FORMATS:
        with pytest.raises(TypeError, match="float32, bfloat16 or float16, got torch.float64"):
            nf.quantize(x.double(), format)
        with pytest.raises(ValueError, match="at least one dimension"):
            nf.quantize(torch.ones((), device=device), format)
        with pytest.raises(TypeError, match="to be a tensor"):
            nf.quantize([1.0], format)
