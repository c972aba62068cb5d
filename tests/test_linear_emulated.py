"""Decides that the operators' host code does what the reference says, without a GPU: all of it is
compiled for the CPU with its kernels, on a device that each test chooses and with a plain loop as
cuBLASLt (emulation/linear_entry.cpp)."""

from __future__ import annotations

import ctypes
import itertools
import re
import zlib
from collections.abc import Iterator
from typing import Any

import emulated
import pytest
import test_fuzz_arguments
import torch
from conftest import assert_same_bits

import narrowfloat as nf
from narrowfloat import ops, recipe, spec
from narrowfloat.cast import Cast
from narrowfloat.recipe import Gemm, Recipe
from narrowfloat.reference import delayed
from narrowfloat.reference.delayed import FIRST
from narrowfloat.reference.linear import has_tensor_scale

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = F32, BF16, F16
CAPABILITIES = 89, 90, 100, 120
RECENT = 130000  # cuBLASLt, which has everything
SEED = torch.tensor([0x1234567, 0x89ABCDE])

T4, T5 = Cast("e4m3"), Cast("e5m2")
ROW, ROW5, MX = Cast("e4m3", "row"), Cast("e5m2", "row"), Cast("e4m3", "mx")
POW2, POW2_2D = Cast("e4m3", "block_pow2"), Cast("e4m3", "block_pow2", square=True)
BLOCK, BLOCK_2D = Cast("e4m3", "block"), Cast("e4m3", "block", square=True)
NV, NV_2D = Cast("e2m1", "nvfp4"), Cast("e2m1", "nvfp4", square=True)
NV_SR, NV_H = Cast("e2m1", "nvfp4", stochastic=True), Cast("e2m1", "nvfp4", hadamard=True)
NV_ALL = Cast("e2m1", "nvfp4", stochastic=True, hadamard=True, scale_up=True)
MXFP4, MXFP4_H = Cast("e2m1", "mxfp4"), Cast("e2m1", "mxfp4", hadamard=True)
MXFP4_ALL = Cast("e2m1", "mxfp4", stochastic=True, hadamard=True)
BOTH_BF16 = Gemm(None, None)

MIXED = {
    # one operand in bf16
    "x": Recipe("x", Gemm(None, T4), Gemm(T5, T4), Gemm(T5, T4)),
    "w": Recipe("w", Gemm(T4, None), Gemm(T5, T4), Gemm(T5, T4)),
    "dy": Recipe("dy", Gemm(T4, T4), Gemm(None, T4), Gemm(T5, T4)),
    "w columns": Recipe("w columns", Gemm(T4, T4), Gemm(T5, None), Gemm(T5, T4)),
    "dy columns": Recipe("dy columns", Gemm(T4, T4), Gemm(T5, T4), Gemm(None, T4)),
    "x columns": Recipe("x columns", Gemm(T4, T4), Gemm(T5, T4), Gemm(T5, None)),
    # GEMMs in bf16
    "bf16": recipe.BF16,
    "bf16 fprop": Recipe("", BOTH_BF16, Gemm(T5, T4), Gemm(T5, T4)),
    "bf16 dgrad": Recipe("", Gemm(T4, T4), BOTH_BF16, Gemm(T5, T4)),
    "nvfp4 alone in fprop": Recipe("", Gemm(NV, NV_2D), BOTH_BF16, BOTH_BF16),
    # other mixes
    "tensor, row, nvfp4": Recipe("", Gemm(T4, T4), Gemm(ROW5, ROW), Gemm(NV_ALL, NV_H)),
    "nvfp4, tensor, row": Recipe("", Gemm(NV, NV_2D), Gemm(T5, T4), Gemm(ROW5, ROW)),
    "row, nvfp4, tensor": Recipe("", Gemm(ROW, ROW), Gemm(NV_SR, NV_2D), Gemm(T5, T4)),
    "mx, pow2, mxfp4": Recipe("", Gemm(MX, MX), Gemm(POW2, POW2_2D), Gemm(MXFP4_ALL, MXFP4_H)),
    "mxfp4, nvfp4, mx": Recipe("", Gemm(MXFP4, MXFP4), Gemm(NV_SR, NV_2D), Gemm(MX, MX)),
    "row, tensor, tensor": Recipe("", Gemm(ROW, ROW), Gemm(T5, T4), Gemm(T5, T4)),
    "tensor of two elements": Recipe("", Gemm(T4, T4), Gemm(T4, T4), Gemm(T4, T5)),
    "nvfp4 and mxfp4 of dy": Recipe("", Gemm(NV, NV), Gemm(MXFP4, MXFP4), Gemm(NV, NV)),
    "nvfp4 square and not": Recipe("", Gemm(NV, NV_2D), Gemm(NV_SR, NV), Gemm(NV, NV)),
    "fast": Recipe("", Gemm(T4, T4, "fast"), Gemm(ROW5, ROW, "fast"), Gemm(T5, T4, "fast")),
}
ALL = {**nf.RECIPES, **MIXED}
CURRENT = {name: r for name, r in ALL.items() if r.delayed is None}
ALIGNED, RAGGED, SMALL = (32, 48, 64), (33, 100, 72), (5, 17, 9)
RAGGED_N = 33, 100, 64  # w lies well but for its number of rows
EMPTY = (0, 16, 16), (4, 0, 8), (4, 8, 0), (0, 0, 0)
LARGER = 130, 144, 272  # more blocks than one of everything


class Operators:
    """The operators of csrc on CPU tensors; the reference's are torch.ops.narrowfloat's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.end_of_call.restype = ctypes.c_char_p
        self.device(90)

    def device(
        self, capability: int, version: int = RECENT, multiprocessors: int = 2,
        cooperative: bool = True, garbage: int = 0xFF, finite: bool = True,
    ) -> None:  # fmt: skip
        """What the next calls run on. garbage: what memory begins as. finite: operands of GEMMs
        are, so that one that was left as garbage shows."""
        chosen = capability, version, multiprocessors, cooperative, garbage, finite
        self.library.pretend_device(*map(ctypes.c_int64, chosen))

    def __call__(self, name: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
        try:
            made = getattr(torch.ops.narrowfloat_emulated, name).default(*arguments)
        except RuntimeError as error:  # as ops.Operator gives it its type back
            text = ctypes.c_char_p()
            kind = (RuntimeError, ValueError, TypeError)[
                self.library.take_error(ctypes.byref(text))
            ]
            self.library.end_of_call()
            raise kind(str(error)) from None
        else:
            fault = self.library.end_of_call()
        assert fault is None, f"{name}: {fault.decode()}"
        return (made,) if isinstance(made, torch.Tensor) else made


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Operators:
    path = emulated.build_operators(tmp_path_factory.mktemp("linear_emulation"))
    namespace = torch.library.Library("narrowfloat_emulated", "DEF")
    for schema in ops.SCHEMAS.values():
        namespace.define(schema)
    torch.ops.load_library(path)
    found = Operators(ctypes.CDLL(str(path)))
    found.namespace = namespace  # type: ignore[attr-defined]
    return found


@pytest.fixture
def operators(library: Operators) -> Iterator[Operators]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of small tensors
    yield library
    torch.set_num_threads(threads)
    library.device(90)


def reference(name: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    made = getattr(torch.ops.narrowfloat, name).default(*arguments)
    return (made,) if isinstance(made, torch.Tensor) else made


# ---- comparing ----


def same_layout(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{what}: {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}"
    )


def same_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    same_layout(got, want, what)
    if got.element_size() == 1:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    assert_same_bits(got, want, what)


def close(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor, what: str) -> None:
    """terms: magnitudes of what was summed, whose rounding the two may do in another order."""
    same_layout(got, want, what)
    if not want.numel():
        return
    g, w = got.double(), want.double()
    step = 0.0 if got.dtype == F32 else torch.finfo(got.dtype).eps
    excess = (g - w).abs() - (1e-6 * terms.double().reshape(want.shape) + step * w.abs())
    wrong = ~((excess <= 0) | (g == w) | (g.isnan() & w.isnan()))
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {want.numel()} differ, at {wrong.nonzero()[0].tolist()} "
        f"{g[wrong][0].item():.6g} for {w[wrong][0].item():.6g}"
    )


def tensors(
    m: int, n: int, k: int, dtype: torch.dtype, what: str = ""
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, w, bias, dy. Values differ in size by row and column, so that a scale in another's place
    shows."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{m} {n} {k} {what}".encode()))

    def drawn(*shape: int) -> torch.Tensor:
        t = torch.randn(shape, generator=generator)
        for dim in range(len(shape)):
            sizes = [1] * len(shape)
            sizes[dim] = shape[dim]
            t = t * 4.0 ** torch.randint(-1, 2, sizes, generator=generator)
        return t.to(dtype)

    return drawn(m, k), drawn(n, k), drawn(n), drawn(m, n)


def as_rows(t: torch.Tensor, cols: int) -> torch.Tensor:
    rows = 1
    for size in t.shape[:-1]:
        rows *= size
    return t.reshape(rows, cols)


def coarse(t: torch.Tensor) -> torch.Tensor:
    """[R, C] magnitudes that those of a quantized t do not exceed, rotated or not: of each 16 along
    C the sum."""
    rows, cols = t.shape
    across = -(-cols // 16)
    groups = torch.nn.functional.pad(t.double().abs(), (0, -cols % 16)).reshape(rows, across, 16)
    return groups.sum(2).repeat_interleave(16, 1)[:, :cols]


def terms_of(a: torch.Tensor, b: torch.Tensor, rotated: bool) -> torch.Tensor:
    """|a| |b|^T of a GEMM of two operands, quantized. A quantized value may be larger than its own,
    by a step of the coarsest format."""
    if rotated:
        return coarse(a) @ coarse(b).t() + 1e-30
    return 1.5 * (a.double().abs() @ b.double().abs().t()) + 1e-30


def rotates(gemm: Gemm) -> bool:
    a = gemm.casts[0]
    return a is not None and (a.hadamard or a.stochastic)


# ---- one layer ----


def check_forward(
    operators: Operators, r: Recipe, what: str, x: torch.Tensor, w: torch.Tensor,
    bias: torch.Tensor | None = None, bits: int | None = None, given: tuple[Any, ...] = (),
    absent: tuple[bool, bool] = (False, False),
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The forward, which is returned, against the reference. given: arguments behind the spec.
    absent: x and w are not passed."""
    if bits is None:
        bits = r.forward_spec | r.save_x | r.keep_w
    passed = None if absent[0] else x, None if absent[1] else w, bias, bits, *given
    got, want = operators("linear_forward", *passed), reference("linear_forward", *passed)
    compare_forward(got, want, what, x, w, bias)
    return want


def compare_forward(
    got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], what: str, x: torch.Tensor,
    w: torch.Tensor, bias: torch.Tensor | None,
) -> None:  # fmt: skip
    terms = terms_of(as_rows(x, w.shape[1]), w, False)
    if bias is not None:  # which an epilogue may take rounded as y is
        step = 0.0 if want[0].dtype == F32 else torch.finfo(want[0].dtype).eps
        terms = terms + bias.double().abs() * (1 + 1e6 * step)
    close(got[0], want[0], terms, f"{what} y")
    names = "x_columns", "x_columns_scales", "scales"
    for g, expected, name in zip(got[1:], want[1:], names, strict=True):
        same_bits(g, expected, f"{what} {name}")


def wanted_bits(needs: tuple[bool, ...], dw: torch.dtype, db: torch.dtype) -> int:
    bits = spec.NEED_DX if needs[0] else 0
    return bits | (spec.DW[dw] if needs[1] else 0) | (spec.DB[db] if needs[2] else 0)


def check_backward(
    operators: Operators, r: Recipe, what: str, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor,
    saved: tuple[torch.Tensor, ...], needs: tuple[bool, ...] = (True, True, True),
    db_dtype: torch.dtype = F32, measured: bool = True, given: tuple[Any, ...] = (),
) -> None:  # fmt: skip
    """The backward against the reference. saved: what the forward returned."""
    bits = r.backward_spec | wanted_bits(needs, w.dtype, db_dtype)
    bits |= spec.W_MEASURED if r.keep_w and measured else 0
    columns = saved[1] if r.save_x else x
    held = len(given) > 1 and given[1] is not None  # w's columns, quantized
    passed = dy, columns, saved[2], saved[3], None if held else w, SEED, w.shape[1], bits, *given
    got, want = operators("linear_backward", *passed), reference("linear_backward", *passed)
    compare_backward(got, want, what, r, dy, x, w)


def compare_backward(
    got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], what: str, r: Recipe,
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor,
) -> None:  # fmt: skip
    dy2, x2 = as_rows(dy, w.shape[0]), as_rows(x, w.shape[1])
    terms = (
        terms_of(dy2, w.t(), rotates(r.dgrad)),
        terms_of(dy2.t(), x2.t(), rotates(r.wgrad)),
        dy2.double().abs().sum(0),
    )
    for g, expected, t, name in zip(got, want, terms, ("dx", "dw", "db"), strict=True):
        close(g, expected, t, f"{what} {name}")


def run_layer(
    operators: Operators, name: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    what, r = f"{name} {shape} {dtype}", ALL[name]
    x, w, bias, dy = tensors(*shape, dtype, name)
    saved = check_forward(operators, r, what, x, w, bias)
    check_backward(operators, r, what, dy, x, w, saved, db_dtype=dtype)


def refused(name: str, capability: int, version: int = RECENT) -> bool:
    """fp32 scales by blocks are Hopper's."""
    if capability == 90 and version >= 120900:
        return False
    casts = [c for g in recipe.GEMMS for c in getattr(ALL[name], g).casts]
    return any(c is not None and c.scaling == "block" for c in casts)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", list(CURRENT))
def test_layers(operators: Operators, name: str, capability: int) -> None:
    operators.device(capability)
    if refused(name, capability):
        with pytest.raises(ValueError, match="expected fp32 scales by blocks of 128 on sm_90"):
            run_layer(operators, name, ALIGNED, F32)
        return
    number = zlib.crc32(f"{name} {capability}".encode())
    shapes = (RAGGED,) if capability == 100 else (ALIGNED, RAGGED, SMALL)  # 120 has its routes
    for i, shape in enumerate(shapes):  # each dtype somewhere
        run_layer(operators, name, shape, DTYPES[(number + i) % 3])


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_dtypes(operators: Operators, capability: int) -> None:
    operators.device(capability)
    for name, dtype in itertools.product(("fp8", "fp8_row", "mxfp8", "nvfp4", "x columns"), DTYPES):
        for shape in ALIGNED, RAGGED:
            run_layer(operators, name, shape, dtype)


def test_operands_of_several_dtypes(operators: Operators) -> None:
    for name, shape in itertools.product(("fp8", "fp8_row", "nvfp4", "w"), (ALIGNED, RAGGED)):
        for own, others in itertools.permutations(DTYPES, 2):
            what = f"{name} {shape} {own} {others}"
            x, _, _, dy = tensors(*shape, own, name)
            _, w, bias, _ = tensors(*shape, others, name)
            saved = check_forward(operators, ALL[name], what, x, w, bias)
            check_backward(operators, ALL[name], what, dy, x, w, saved, db_dtype=others)


@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize("name", list(CURRENT))
def test_empty(operators: Operators, name: str, capability: int) -> None:
    operators.device(capability)
    if refused(name, capability):
        return
    for shape in EMPTY:
        run_layer(operators, name, shape, BF16)


@pytest.mark.parametrize("name", ["fp8_row", "fp8_block_pow2", "mxfp8", "nvfp4", "fp8"])
def test_an_older_cublaslt(operators: Operators, name: str) -> None:
    for capability, version in ((90, 120805), (100, 120700), (120, 120800)):
        operators.device(capability, version)
        run_layer(operators, name, RAGGED, BF16)
    operators.device(90, 120805)
    with pytest.raises(ValueError, match="cuBLASLt 12.9 or newer, got sm_90 with 120805"):
        run_layer(operators, "fp8_block", ALIGNED, BF16)


@pytest.mark.parametrize("multiprocessors, cooperative", [(7, True), (3, False)])
def test_larger_layers(operators: Operators, multiprocessors: int, cooperative: bool) -> None:
    """More tiles, blocks and strips than one; memory that begins as other garbage."""
    for number, name in enumerate(("fp8", "fp8_block", "fp8_row", "mxfp8", "nvfp4", "mxfp4")):
        capability = 90 if name == "fp8_block" else 120
        operators.device(capability, RECENT, multiprocessors, cooperative, garbage=0x3B)
        run_layer(operators, name, LARGER, DTYPES[number % 3])


def inside(t: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """t [R, C] as a view of a wider tensor, whose other elements are NaN."""
    wide = t.new_full((t.shape[0] + 2, before + t.shape[1] + after), float("nan"))
    wide[1:-1, before : before + t.shape[1]] = t
    return wide[1:-1, before : before + t.shape[1]]


VIEWS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "in a wider one": lambda t: inside(t, 8, 8),
    "off 16 bytes": lambda t: inside(t, 3, 2),
    "transposed in a wider one": lambda t: inside(t.t(), 3, 2).t(),
    "every second": lambda t: inside(t, 8, 8).repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("name", ["fp8", "fp8_row", "mxfp8", "nvfp4", "bf16", "x", "w columns"])
def test_views(operators: Operators, name: str) -> None:
    operators.device(90)
    for (view, seen), dtype in zip(VIEWS.items(), (F32, BF16, BF16, F16, BF16), strict=True):
        for shape in ALIGNED, RAGGED, RAGGED_N:
            x, w, bias, dy = tensors(*shape, dtype, name)
            x, w, dy = seen(x), seen(w), seen(dy)
            bias = bias.repeat_interleave(2)[::2]
            what = f"{name} {shape} {view}"
            saved = check_forward(operators, ALL[name], what, x, w, bias)
            check_backward(operators, ALL[name], what, dy, x, w, saved)


def test_more_dimensions(operators: Operators) -> None:
    x, w, bias, dy = tensors(24, 40, 48, BF16)
    for name in "fp8", "fp8_row", "nvfp4", "bf16":
        for leading in ((2, 12), (2, 3, 4), (1, 24), ()):
            x3, dy3 = (
                (x[0], dy[0]) if leading == () else (x.view(*leading, 48), dy.view(*leading, 40))
            )
            saved = check_forward(operators, ALL[name], name, x3, w, bias)
            check_backward(operators, ALL[name], name, dy3, x3, w, saved)
        swapped = x.view(4, 6, 48).transpose(0, 1), dy.view(4, 6, 40).transpose(0, 1)
        saved = check_forward(operators, ALL[name], name, swapped[0], w, bias)
        check_backward(operators, ALL[name], name, swapped[1], swapped[0], w, saved)
        of_a_sum = dy[:1, :1].expand(24, 40)
        check_backward(operators, ALL[name], name, of_a_sum, swapped[0], w, saved)


@pytest.mark.parametrize("name", list(CURRENT))
def test_what_is_wanted(operators: Operators, name: str) -> None:
    """Each choice of gradients; without what a forward may leave out."""
    operators.device(90)
    r = CURRENT[name]
    x, w, bias, dy = tensors(*RAGGED, BF16, name)
    check_forward(operators, r, name, x, w, None, r.forward_spec)
    check_forward(operators, r, name, x, w, bias, r.forward_spec | r.keep_w)
    saved = check_forward(operators, r, name, x, w, bias.float())
    for needs in itertools.product((False, True), repeat=3):
        if all(needs):
            continue
        check_backward(operators, r, f"{name} {needs}", dy, x, w, saved, needs, F16)
    # w is measured anew; scales are only x's
    without = check_forward(operators, r, name, x, w, None, r.forward_spec | r.save_x)
    check_backward(operators, r, name, dy, x, w, without, measured=False)


def quantized(t: torch.Tensor, cast: Cast, side: int) -> tuple[torch.Tensor, ...]:
    """Codes, scales and the tensor's scale, as the operators take them."""
    how = spec.both(None, cast) if side else spec.both(cast, None)
    made = reference("quantize", t, how.pack(), None, SEED)
    scale = made[4][4 * side :][:4].clone() if has_tensor_scale(cast) else None
    return made[2 * side], made[2 * side + 1], scale


@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize("name", list(CURRENT))
def test_what_was_quantized_before(operators: Operators, name: str, capability: int) -> None:
    operators.device(capability)
    r = CURRENT[name]
    if refused(name, capability):
        return
    shape, dtype = RAGGED if capability == 90 else SMALL, DTYPES[capability % 3]
    x, w, bias, dy = tensors(*shape, dtype, name)
    (m, n, k), none = shape, (None, None, None)
    x_cast, w_cast = r.fprop.casts
    of_x = none if x_cast is None else quantized(x, x_cast, 0)
    of_w = none if w_cast is None else quantized(w, w_cast, 0)
    sizes, y = (m, n, k), spec.Y_DTYPE[BF16]
    both = r.forward_spec | r.save_x | r.keep_w
    check_forward(operators, r, name, x, w, bias, both, (*none, *of_w))
    check_forward(operators, r, name, x, w, bias, both, (*of_x, *none))
    saved = check_forward(operators, r, name, x, w, bias, both, (*of_x, *of_w))
    if w_cast is not None:
        given = (*none, *of_w, *sizes)
        check_forward(operators, r, name, x, w, bias, both, given, (False, True))
    if x_cast is not None:
        bits, given = r.forward_spec | r.keep_w | y, (*of_x, *none, *sizes)
        check_forward(operators, r, name, x, w, bias, bits, given, (True, False))
    if x_cast is not None and w_cast is not None:
        given = (*of_x, *of_w, *sizes)
        check_forward(operators, r, name, x, w, bias, r.forward_spec | y, given, (True, True))
    # x's scale apart; w's columns
    w_columns, x_columns = r.dgrad.casts[1], r.wgrad.casts[1]
    x_scale = quantized(x, x_columns, 1)[2] if has_tensor_scale(x_columns) else None
    check_backward(operators, r, name, dy, x, w, (*saved[:3], None), measured=False,
                   given=(x_scale, None, None, None))  # fmt: skip
    if w_columns is not None:
        given = (x_scale, *quantized(w, w_columns, 1))
        check_backward(
            operators, r, name, dy, x, w, (*saved[:3], None), measured=False, given=given
        )


def test_given_operands_anywhere_on_16_bytes(operators: Operators) -> None:
    """What is asked of cuBLASLt before is what is launched: given addresses are those of both."""

    def moved(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None or not t.numel():
            return t
        room = torch.empty(t.numel() * t.element_size() + 512, dtype=torch.uint8)
        first = -room.data_ptr() % 256 + 16
        to = room[first : first + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
        return to.copy_(t)

    for name, capability in (("fp8", 90), ("fp8_row", 90), ("mxfp8", 120), ("nvfp4", 120)):
        operators.device(capability)
        r = ALL[name]
        x, w, bias, dy = tensors(*RAGGED, BF16, name)
        of_x, of_w = (quantized(t, c, 0) for t, c in zip((x, w), r.fprop.casts, strict=True))
        given = *map(moved, of_x), *map(moved, of_w)
        saved = check_forward(operators, r, name, x, w, bias, given=given)
        there = tuple(map(moved, saved))
        check_backward(operators, r, name, dy, x, w, there, measured=False)


# ---- delayed scaling ----


def history_of(state: str, t: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Memory that nobody wrote; or scales of a step whose tensors were smaller, or larger."""
    history = torch.zeros(3, FIRST + 4, dtype=torch.int32)
    if state == "fresh":
        return history.fill_(-1)
    for row, one in zip(history, t, strict=True):
        delayed.join(row, float(one.abs().amax()) * (0.25 if state == "outgrown" else 8) + 1)
    delayed.roll(history, False, 0)
    return history


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("state", ["fresh", "outgrown", "held"])
def test_delayed(operators: Operators, state: str, guarded: bool) -> None:
    r = ALL["fp8_delayed"]
    bits = r.forward_spec & ~spec.FORWARD_GUARDED, r.backward_spec & ~spec.BACKWARD_GUARDED
    if guarded:
        bits = bits[0] | spec.FORWARD_GUARDED, bits[1] | spec.BACKWARD_GUARDED
    shapes = ALIGNED, RAGGED, SMALL, LARGER
    for shape, dtype, joins in zip(shapes, (*DTYPES, BF16), (True, True, False, True), strict=True):
        operators.device(90, RECENT, 2 if shape == LARGER else 4, cooperative=shape != ALIGNED)
        what = f"{state} {shape} {guarded}"
        x, w, bias, dy = tensors(*shape, dtype, state)
        before = history_of(state, (x, w, dy))
        forward = bits[0] | r.save_x | r.keep_w | (spec.FORWARD_JOINS if joins else 0)
        ours, theirs = before.clone(), before.clone()
        got = operators("delayed_linear_forward", x, w, bias, ours, forward)
        saved = reference("delayed_linear_forward", x, w, bias, theirs, forward)
        compare_forward(got, saved, what, x, w, bias)
        same_bits(ours, theirs, f"{what} history")
        backward = bits[1] | spec.W_MEASURED | (spec.BACKWARD_JOINS if joins else 0)
        for needs in (True, True, True), (True, False, False), (False, True, True):
            asked = backward | wanted_bits(needs, dtype, dtype)
            ours, theirs = before.clone(), before.clone()
            passed = dy, saved[1], saved[3], w
            got = operators("delayed_linear_backward", *passed, ours, w.shape[1], asked)
            want = reference("delayed_linear_backward", *passed, theirs, w.shape[1], asked)
            compare_backward(got, want, f"{what} {needs}", r, dy, x, w)
            same_bits(ours, theirs, f"{what} {needs} history")


# ---- the operator quantize ----

CASTS = [
    T4, T5, ROW, ROW5, BLOCK, BLOCK_2D, POW2, POW2_2D, MX, NV, NV_2D, NV_SR, NV_H, NV_ALL, MXFP4,
    MXFP4_H, MXFP4_ALL, Cast("e2m1", "nvfp4", four_over_six=True),
    Cast("e2m1", "nvfp4", square=True, stochastic=True, scale_up=True),
]  # fmt: skip


def has_operand_form(cast: Cast) -> bool:
    return cast.of.power_of_two or cast.of.family == "fp4"


def check_quantize(
    operators: Operators, x: torch.Tensor, how: spec.Quantize, scale: torch.Tensor | None = None
) -> None:
    passed = x, how.pack(), scale, SEED
    got, want = operators("quantize", *passed), reference("quantize", *passed)
    names = "rows", "row scales", "columns", "column scales", "scales"
    for g, w, name in zip(got, want, names, strict=True):
        same_bits(g, w, f"{tuple(x.shape)} {x.dtype} {how} {name}")


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_quantize(operators: Operators, cast: Cast) -> None:
    shapes = (32, 64), (33, 72), (5, 9), (0, 16), (3, 0)
    for (m, k), dtype in zip(shapes, (*DTYPES, F32, F32), strict=True):
        x = tensors(m, 1, k, dtype)[0]
        for rows, columns in ((True, True), (True, False), (False, True)):
            forms = (False, True) if has_operand_form(cast) else (False,)
            for form in forms:
                how = spec.Quantize(cast, cast, rows, columns, form and rows, form and columns)
                check_quantize(operators, x, how)
    check_quantize(operators, inside(tensors(33, 1, 40, BF16)[0], 3, 2).t(), spec.both(cast, cast))


def test_quantize_to_two_formats(operators: Operators) -> None:
    x = tensors(33, 1, 72, BF16)[0]
    for rows, columns in itertools.combinations(CASTS[::2], 2):
        check_quantize(operators, x, spec.both(rows, columns))
    check_quantize(operators, x, spec.both(T4, T5))
    check_quantize(operators, x, spec.both(NV, NV_2D))
    check_quantize(operators, x, spec.Quantize(MX, NV_SR, True, True, False, True))
    scale = torch.tensor([0.5, 2.0, 0.0, 0.0])
    for rows, columns in ((T4, T4), (T4, T5), (T5, ROW), (T4, None)):
        check_quantize(operators, x, spec.both(rows, columns), scale)


def test_quantize_what_is_not_finite(operators: Operators) -> None:
    operators.device(90, finite=False)
    for value, cast in itertools.product((float("nan"), float("inf"), -float("inf")), CASTS):
        x = tensors(33, 1, 72, BF16)[0]
        x[5, 7] = x[20, 40] = value
        check_quantize(operators, x, spec.both(cast, cast))


@pytest.mark.parametrize("name", [n for n in nf.RECIPES if n in CURRENT])
def test_what_is_not_finite(operators: Operators, name: str) -> None:
    for capability in 90, 120:
        if refused(name, capability):
            continue
        operators.device(capability, finite=False)
        x, w, bias, dy = tensors(*RAGGED, BF16, name)
        x[3, 5], w[7, 1], dy[2, 9] = float("nan"), 0, float("inf")
        saved = check_forward(operators, ALL[name], name, x, w, bias)
        check_backward(operators, ALL[name], name, dy, x.nan_to_num(), w, saved)


# ---- what is refused ----


def test_refusals(operators: Operators) -> None:
    """In the words of the reference, as far as a word of both is asked for here."""
    x, w, bias, dy = tensors(*ALIGNED, BF16)
    fp8, fp8_row = ALL["fp8"], ALL["fp8_row"]
    f, b = fp8.forward_spec, fp8.backward_spec
    rows = quantized(w, T4, 0)
    none = None, None, None
    for error, text, name, arguments in (
        (ValueError, "with one K", "linear_forward", (x, w[:, :8], None, f)),
        (ValueError, r"w \[N,K\]", "linear_forward", (x, w[0], None, f)),
        (ValueError, r"bias \[48\]", "linear_forward", (x, w, bias[:5], f)),
        (ValueError, "x, or x_codes", "linear_forward", (None, w, None, f)),
        (ValueError, "w, or w_codes", "linear_forward", (x, None, None, f)),
        (TypeError, "float32, bfloat16", "linear_forward", (x.double(), w, None, f)),
        (TypeError, "float32, bfloat16", "linear_forward", (x, w.int(), None, f)),
        (ValueError, "y's dtype", "linear_forward",
         (None, w, None, f, *quantized(x, T4, 0), *none, 32, 48, 64)),
        (ValueError, "x itself for its columns", "linear_forward",
         (None, w, None, f | fp8.save_x | spec.Y_DTYPE[BF16], *quantized(x, T4, 0), *none, 32)),
        (ValueError, "expected w_codes", "linear_forward",
         (x, w, None, f, *none, rows[0][:16], None, rows[2])),
        (ValueError, "w_scale", "linear_forward", (x, w, None, f, *none, rows[0])),
        (ValueError, "w_scales", "linear_forward",
         (x, w, None, fp8_row.forward_spec, *none, quantized(w, ROW, 0)[0])),
        (ValueError, "no quantized w", "linear_forward",
         (x, w, None, ALL["w"].forward_spec, *none, *rows)),
        (ValueError, "w for dx", "linear_backward",
         (dy, None, None, None, None, None, 64, b | spec.NEED_DX)),
        (ValueError, "x_columns for dw", "linear_backward",
         (dy, None, None, None, w, None, 64, b | spec.DW[F32])),
        (ValueError, "seed", "linear_backward",
         (dy, None, None, None, w, None, 64, ALL["nvfp4"].backward_spec | spec.NEED_DX)),
        (ValueError, "expected w", "linear_backward",
         (dy, None, None, None, w.t(), None, 64, b | spec.NEED_DX)),
        (ValueError, "one scale a tensor", "delayed_linear_forward",
         (x, w, None, torch.zeros(3, 8, dtype=torch.int32), fp8_row.forward_spec)),
        (ValueError, "seed", "quantize", (x, spec.both(NV_SR, None).pack())),
        (ValueError, "powers of two", "quantize",
         (x, spec.Quantize(T4, None, True, False, True).pack())),
    ):  # fmt: skip
        for call in operators, reference:
            with pytest.raises(error, match=text):
                call(name, *arguments)


@pytest.mark.parametrize(
    "name", ["fp8", "fp8_row", "fp8_block", "fp8_block_pow2", "mxfp8", "nvfp4"]
)
def test_r26_scales_of_another_shape(operators: Operators, name: str) -> None:
    """R-26: scales of as many bytes in another shape or type, or of too many, are refused, in the
    words of the reference; none is read."""
    recipe = ALL[name]
    operators.device(120 if name in ("mxfp8", "nvfp4") else 90)
    x, w, _, _ = tensors(40, 144, 256, BF16)
    codes, scales, scale = quantized(w, recipe.fprop.casts[1], 0)
    wrong: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
    if scales is not None and scales.numel():
        others = [scales[None], torch.cat([scales, scales]), scales.view(torch.int8), scales[:-1]]
        others += [scales.double(), scales.reshape(2, -1)]
        others += [scales.flatten(), scales.t().contiguous()] if scales.dim() == 2 else []
        wrong += [(t, scale) for t in others if t.shape != scales.shape or t.dtype != scales.dtype]
    if scale is not None:
        wrong += [(scales, t) for t in (scale.repeat(3), scale[:3], scale.double())]
    for pair in wrong:
        for call in operators, reference:
            with pytest.raises(ValueError, match="^linear: expected w_scales? as .*, got "):
                call("linear_forward", x, w, None, recipe.forward_spec, *[None] * 3, codes, *pair)


def test_bad_arguments_are_refused_by_name(operators: Operators) -> None:
    """Each argument of each operator made into something else, as test_fuzz_arguments.py does it:
    the host code works, or refuses it in words that name it; it never faults."""
    operators.device(120, finite=False)
    tried = 0
    for name, call in test_fuzz_arguments.operators_of("cpu").items():
        operator = re.split("[, ]", name)[0]
        if operator not in ops.SCHEMAS or "fp8_block" in name:
            continue  # what torch.ops alone has, and what this chip has not
        with_names = call._replace(function=lambda op=operator, **a: operators(op, *a.values()))
        for argument, value in call.arguments.items():
            for into, number in itertools.product(range(16), (3,)):
                e = test_fuzz_arguments.Example(0, 0, into, number)
                became, given = test_fuzz_arguments.mutated(value, e, True)
                what = f"{name}: {argument} became {became}"
                if became == "on another device" or (became, argument) == ("none", "out"):
                    continue
                tried += 1
                try:
                    test_fuzz_arguments.results(with_names, call.arguments | {argument: given})
                except (ValueError, TypeError, NotImplementedError) as error:
                    test_fuzz_arguments.assert_names(str(error), argument, became, call, what)
                except RuntimeError as error:  # ops.Operator makes it a TypeError
                    assert given is None and "does not have a device" in str(error), what
    assert tried > 1000


def test_a_fault_shows(operators: Operators) -> None:
    """The emulation itself: memory that nobody wrote is no operand of a GEMM."""
    x, w, _, _ = tensors(*ALIGNED, BF16)
    x[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="unwritten memory"):
        check_forward(operators, ALL["bf16"], "", x, w)
