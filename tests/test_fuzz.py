"""Fuzzing: every operator and public function against the reference, over shapes, strides, storage
offsets, dtypes, flags and values that are no ordinary numbers.

What is quantized must be the reference's bit for bit, and the same however the tensor lies; what a
GEMM makes must be the fp64 product of what was quantized. The ordinary run tries a few examples;
`-m fuzz` tries many (fuzzed.py says how many, and what it writes).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from conftest import assert_same_bits
from every import ALL_CASTS, EVERY, quantized, values
from fuzzed import (
    DTYPES,
    FINITE,
    LAYOUTS,
    ORDINARY,
    PARTS,
    Made,
    Scales,
    assert_sum,
    leading,
    leading_sizes,
    long_run_examples,
    made,
    make,
    run,
    seeds,
    sizes,
    small_sizes,
)
from torch import Tensor

import narrowfloat as nf
from narrowfloat import ops, w4a16
from narrowfloat.amax_history import fresh
from narrowfloat.formats import FORMATS as FORMATS_BY_NAME
from narrowfloat.formats import padded
from narrowfloat.reference import delayed
from narrowfloat.reference import linear as reference
from narrowfloat.reference.tensor import as_rows
from narrowfloat.spec import (
    BACKWARD_JOINS,
    DB,
    DW,
    FORWARD_JOINS,
    NEED_DX,
    W_MEASURED,
    Y_DTYPE,
    Quantize,
    both,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RECIPES = {r.name: r for r in EVERY}  # an example has the name: it is printed
RECIPES |= {"fp8_delayed": nf.RECIPES["fp8_delayed"]}
SINGLE = [r.name for r in EVERY]
booleans = st.booleans()
dtypes = st.sampled_from(DTYPES)


def cpu(*of: Tensor | None) -> list[Tensor | None]:
    """Copies that lie in one piece: what lies otherwise must give the same bits."""
    return [None if t is None else t.detach().cpu().contiguous() for t in of]


def seed_of(number: int, device: str) -> Tensor:
    return torch.tensor([number * 0x9E3779B97F4A7C15 % 2**63, ~number], device=device)


def same(got: Any, want: Any, what: str) -> None:
    for at, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g is None) == (w is None), (what, at)
        if g is not None:
            assert_same_bits(g, w, f"{what}, result {at}")


def number_of(leading_: tuple[int, ...]) -> int:
    return math.prod(leading_)


# ---- quantize ----


class QuantizeExample(NamedTuple):
    leading: tuple[int, ...]
    k: int
    swapped: bool
    x: Made
    rows: nf.Cast | None
    columns: nf.Cast | None
    as_operand: tuple[bool, bool]
    scale: float | None
    seed: int


quantize_examples = st.builds(
    QuantizeExample,
    leading_sizes(sizes),
    sizes,
    booleans,
    made(),
    st.one_of(st.none(), st.sampled_from(ALL_CASTS)),
    st.one_of(st.none(), st.sampled_from(ALL_CASTS)),
    st.tuples(booleans, booleans),
    st.one_of(st.none(), st.none(), st.floats(-10, 10)),
    seeds,
)


def check_quantize(e: QuantizeExample, device: str) -> None:
    x = leading(make(e.x, number_of(e.leading), e.k, device), e.leading, e.swapped)
    forms = [
        form and cast is not None and (cast.of.power_of_two or cast.of.family == "fp4")
        for form, cast in zip(e.as_operand, (e.rows, e.columns), strict=True)
    ]
    choices = Quantize(e.rows, e.columns, e.rows is not None, e.columns is not None, *forms)
    scale = None
    if e.scale is not None:
        scale = torch.tensor([2.0**e.scale, 2.0**-e.scale, 0, 0], device=device)
    seed = seed_of(e.seed, device)
    got = ops.quantize_op(x, choices.pack(), scale, seed)
    same(got, reference.quantize(cpu(x)[0], choices.pack(), *cpu(scale, seed)), "quantize")
    rows_and_cols = as_rows(x).shape
    for at, cast in enumerate((e.rows, e.columns)):
        if cast is not None and not forms[at]:
            check_padding(got[2 * at], cast, *(rows_and_cols[::-1] if at else rows_and_cols))
    for cast, columns in ((e.rows, False), (e.columns, True)):
        if device == "cpu" and cast is not None and scale is None:
            check_error(x, cast, columns)


def check_padding(codes: Tensor, cast: nf.Cast, rows: int, cols: int) -> None:
    """What lies beyond an operand is zeros, or NaN where a whole tensor is: a GEMM reads it."""
    codes = codes.cpu().view(torch.uint8)
    width = -(-cols // 2) if cast.of.family == "fp4" else cols
    if cast.hadamard:  # a rotated group is full
        width = padded(cols) // 2
    beyond = torch.cat([codes[rows:].flatten(), codes[:rows, width:].flatten()])
    nan = cast.scaling == "tensor" and bool((beyond == FORMATS_BY_NAME[cast.element].nan).all())
    assert nan or not beyond.any(), f"{cast}: {int(beyond.count_nonzero())} codes beyond"


def check_error(x: Tensor, cast: nf.Cast, columns: bool) -> None:
    """The values are x's within the format's error, which the reference is not asked about."""
    x = as_rows(x).double()
    if cast.stochastic or cast.hadamard or not x.isfinite().all() or not x.any():
        return
    largest = x.abs().amax()
    if not 1e-25 < largest < 1e37:
        return  # scales there are at their ends
    t = x.t() if columns else x
    got = values(as_rows(x).to(FP32), cast, columns)[:, : t.shape[1]]
    block = {"tensor": 0, "row": 0}.get(cast.scaling, cast.of.block)
    of_block = (t.abs().amax(1, keepdim=True) if block == 0 else largest).expand_as(t)
    if block and not cast.square:
        full = torch.nn.functional.pad(t.abs(), (0, -t.shape[1] % block))
        of_block = full.view(t.shape[0], -1, block).amax(2).repeat_interleave(block, 1)
        of_block = of_block[:, : t.shape[1]]
    if cast.scaling == "tensor":
        of_block = largest.expand_as(t)
    # half a step of the element; below its smallest number, of the block; in nvfp4 a block's scale
    # is one of E4M3 in its turn
    relative = {"e4m3": 2**-4, "e5m2": 2**-3, "e2m1": 0.25}[cast.element]
    least = {"e4m3": 2**-17, "e5m2": 2**-30, "e2m1": 0.25}[cast.element]
    bound = 1.01 * (relative * t.abs() + least * of_block)
    if cast.scaling == "nvfp4":
        bound = bound + 2.0**-17 * largest
    wrong = (got - t).abs() > bound
    assert not wrong.any(), f"{cast}: {got[wrong][0]:g} for {t[wrong][0]:g}"


@pytest.mark.parametrize("cast", ALL_CASTS, ids=str)
def test_padding(device: str, cast: nf.Cast) -> None:
    for rows, cols in ((5, 13), (16, 33), (33, 16), (1, 100)):
        x = torch.randn(rows, cols, device=device) + 1
        made = ops.quantize_op(x, both(cast, cast).pack(), None, seed_of(rows, device))
        check_padding(made[0], cast, rows, cols)
        check_padding(made[2], cast, cols, rows)


# ---- a layer ----


class LayerExample(NamedTuple):
    leading: tuple[int, ...]
    k: int
    n: int
    swapped: bool
    x: Made
    w: Made
    dy: Made
    recipe: str
    bias: torch.dtype | None
    needs: tuple[bool, bool, bool]
    dw: torch.dtype
    db: torch.dtype
    given: tuple[bool, bool, bool, bool]  # x, w, w's columns; nothing measured of w
    seed: int


layer_examples = st.builds(
    LayerExample,
    leading_sizes(sizes),
    sizes,
    sizes,
    booleans,
    made(),
    made(),
    made(),
    st.sampled_from(SINGLE),
    st.one_of(st.none(), dtypes),
    st.tuples(booleans, booleans, booleans),
    dtypes,
    dtypes,
    st.tuples(booleans, booleans, booleans, booleans),
    seeds,
)


def error_of(gemm: nf.Gemm, k: int, device: str) -> float:
    """Of the magnitudes summed: fp32 on a CPU; tensor cores of FP8 keep fewer bits."""
    if device == "cpu":
        return (k + 16) * 2.0**-24
    if gemm.fast:
        return 1e-2
    # a sum of 128 squares in FP8 was 1.04e-3 off on an H200
    return 1e-4 if gemm.kind in ("bf16", "fp4", "fp8_bf16") else 2e-3


class Side(NamedTuple):
    """An operand [R, C] of a GEMM as the tests know it."""

    values: Tensor
    quantized: tuple[Tensor | None, ...]
    scales: Scales
    broken: Tensor  # rows with a NaN or an Inf of t itself


def side(
    t: Tensor, cast: nf.Cast | None, columns: bool = False, seed: Tensor | None = None
) -> Side:
    t, seed = cpu(as_rows(t), seed)
    of = () if cast is None else quantized(t, cast, columns, seed)
    found = values(t, cast, columns, seed)
    broken = ~found.isfinite().all(1) & ~t.isfinite().all()
    return Side(found, of, Scales.of(of), broken)


def assert_gemm(
    got: Tensor, a: Side, b: Side, gemm: nf.Gemm, device: str, what: str, bias: Tensor | None = None
) -> None:
    got = as_rows(got)
    if got.numel() == 0:
        return
    want = a.values @ b.values.t()
    terms = a.values.abs() @ b.values.abs().t()
    relative = error_of(gemm, a.values.shape[1], device)
    if bias is not None:
        want, terms = want + bias.cpu().double(), terms + bias.cpu().double().abs()
        relative += torch.finfo(got.dtype).eps  # the epilogue takes a bias in 16 bits
    broken = a.broken[:, None] | b.broken
    assert_sum(got, want, terms, relative, what, a.scales.times(b.scales), broken)


def tensors(e: LayerExample, device: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    m = number_of(e.leading)
    x = leading(make(e.x, m, e.k, device), e.leading, e.swapped)
    w = make(e.w, e.n, e.k, device)
    # dy in any layout of its own, rows in x's order
    dy = make(e.dy._replace(dtype=e.x.dtype), m, e.n, device).view(*x.shape[:-1], e.n)
    bias = None
    if e.bias is not None:
        bias = make(Made("every second column", e.bias, "normal", e.seed), 1, e.n, device)[0]
    return x, w, bias, dy


def on_device(operand: Side, device: str) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.to(device) for t in operand.quantized)


def check_layer(e: LayerExample, device: str) -> None:
    r = RECIPES[e.recipe]
    if not nf.supported(r, device):
        return
    x, w, bias, dy = tensors(e, device)
    a, b = (side(t, c) for t, c in zip((x, w), r.fprop.casts, strict=True))
    give_x, give_w, give_columns, anew = e.given
    nothing = (None, None, None)
    of_x = on_device(a, device) if give_x and a.quantized else nothing
    of_w = on_device(b, device) if give_w and b.quantized else nothing
    spec = r.forward_spec | r.save_x | r.keep_w
    got = ops.linear_forward(x, w, bias, spec, *of_x, *of_w)
    assert got[0].shape == (*x.shape[:-1], e.n) and got[0].dtype == x.dtype
    assert_gemm(got[0], a, b, r.fprop, device, "y", bias)
    want = reference.linear_forward(*cpu(x, w, bias), spec, *cpu(*of_x), *cpu(*of_w))
    same(got[1:], want[1:], "what the forward saves")
    if give_x and a.quantized:
        typed = r.forward_spec | Y_DTYPE[x.dtype]
        m, k = as_rows(x).shape
        absent = ops.linear_forward(
            None, None if give_w and b.quantized else w, bias, typed, *of_x, *of_w, m, e.n, k
        )
        same_numbers(absent[0], as_rows(got[0]), "y, x absent")
    check_backward(e, device, x, w, dy, got)


def same_numbers(a: Tensor, b: Tensor, what: str) -> None:
    """The same bits, but for which NaN it is."""
    assert_same_bits(a.float().nan_to_num(nan=7e30), b.float().nan_to_num(nan=7e30), what)


def check_backward(
    e: LayerExample, device: str, x: Tensor, w: Tensor, dy: Tensor, saved: tuple[Tensor, ...]
) -> None:
    r, (need_dx, need_dw, need_db) = RECIPES[e.recipe], e.needs
    _, columns, columns_scales, scales = saved
    if not r.save_x:
        columns, columns_scales = x, None
    seed = seed_of(e.seed, device)
    (of_dy, w_cast), (dy_cast, x_cast) = r.dgrad.casts, r.wgrad.casts
    w_columns = side(w, w_cast, True)
    give = e.given[2] and bool(w_columns.quantized)
    measured = W_MEASURED if r.keep_w and not e.given[1] and not e.given[3] and not give else 0
    spec = r.backward_spec | measured | (NEED_DX if need_dx else 0)
    spec |= (DW[e.dw] if need_dw else 0) | (DB[e.db] if need_db else 0)
    dx, dw, db = ops.linear_backward(
        dy, columns, columns_scales, scales, None if give else w, seed, e.k, spec, None,
        *(on_device(w_columns, device) if give else ()),
    )  # fmt: skip
    if need_dx:
        assert dx.shape == x.shape and dx.dtype == dy.dtype
        assert_gemm(dx, side(dy, of_dy, False, seed), w_columns, r.dgrad, device, "dx")
    if need_dw:
        assert dw.shape == w.shape and dw.dtype == e.dw
        of_x = side(x, x_cast, True)
        assert_gemm(dw, side(dy, dy_cast, True, seed), of_x, r.wgrad, device, "dw")
    if need_db:
        rows = as_rows(cpu(dy)[0]).double()
        assert db.shape == (e.n,) and db.dtype == e.db
        assert_sum(db, rows.sum(0), rows.abs().sum(0), (len(rows) + 16) * 2.0**-24, "db")
    for (
        wanted,
        made_,
    ) in zip(e.needs, (dx, dw, db), strict=True):
        assert wanted or made_.shape == (0,)


# ---- delayed scaling ----


class DelayedExample(NamedTuple):
    m: int
    k: int
    n: int
    tensors: tuple[Made, Made, Made]
    growth: tuple[float, ...]  # a step each
    length: int
    use: str
    margin: int
    guarded: bool
    joins: tuple[bool, ...]
    garbage: bool


delayed_examples = st.builds(
    DelayedExample,
    sizes,
    sizes,
    sizes,
    st.tuples(made(), made(), made()),
    st.tuples(*[st.floats(-6, 6)] * 3),
    st.integers(1, 5),
    st.sampled_from(["max", "latest"]),
    st.integers(0, 3),
    booleans,
    st.tuples(booleans, booleans, booleans),
    booleans,
)


def check_delayed(e: DelayedExample, device: str) -> None:
    """Three steps: results and histories are the reference's, whatever the history began as."""
    how = nf.Delayed(e.length, e.use, e.margin, e.guarded)
    r = dataclasses.replace(nf.RECIPES["fp8_delayed"], delayed=how)
    history = fresh(how, torch.device(device))
    if e.garbage:
        history.fill_(-1)
    theirs = history.cpu().clone()
    for growth, joins in zip(e.growth, e.joins, strict=True):
        x, w, dy = (
            make(t, rows, cols, device) * 2.0**growth
            for t, rows, cols in zip(e.tensors, (e.m, e.n, e.m), (e.k, e.k, e.n), strict=True)
        )
        dy = dy.to(x.dtype)
        spec = r.forward_spec | r.save_x | r.keep_w | (FORWARD_JOINS if joins else 0)
        got = ops.delayed_linear_forward(x, w, None, history, spec)
        want = reference.delayed_linear_forward(*cpu(x, w), None, theirs, spec)
        same(got[1:], want[1:], "what the delayed forward saves")
        assert_same_bits(history, theirs, "history after the forward")
        back = r.backward_spec | NEED_DX | DW[w.dtype] | (W_MEASURED if r.keep_w else 0)
        back |= BACKWARD_JOINS if joins else 0
        grads = ops.delayed_linear_backward(dy, got[1], got[3], w, history, e.k, back)
        theirs_too = reference.delayed_linear_backward(
            *cpu(dy, want[1], want[3], w), theirs, e.k, back
        )
        assert_same_bits(history, theirs, "history after the backward")
        for g, t, what in zip(
            (got[0], *grads[:2]), (want[0], *theirs_too[:2]), "y dx dw".split(), strict=True
        ):
            assert g.shape == t.shape and g.dtype == t.dtype
            if device == "cpu":
                same_numbers(g, t, what)
        if joins:
            delayed.roll(theirs, e.use == "latest", e.margin)
            roll(history, r)
            assert_same_bits(history, theirs, "history after a roll")


def roll(history: Tensor, r: nf.Recipe) -> None:
    """By nf.step(), as a layer's."""
    layer = nf.Linear(2, 2, device=history.device, recipe=r)
    layer.scale_history = history
    nf.step(layer)


# ---- FP8 GEMMs ----


class MMExample(NamedTuple):
    m: int
    k: int
    n: int
    layouts: tuple[Made, Made]
    formats: tuple[str, str]
    scales: tuple[float, float]
    bias: torch.dtype | None
    out: torch.dtype
    fast: bool
    every_code: bool


mm_examples = st.builds(
    MMExample,
    sizes,
    sizes,
    sizes,
    st.tuples(made(ORDINARY, (FP32,)), made(ORDINARY, (FP32,))),
    st.sampled_from([("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")]),
    st.tuples(st.floats(-8, 8), st.floats(-8, 8)),
    st.one_of(st.none(), dtypes),
    dtypes,
    booleans,
    st.sampled_from([False, False, False, True]),
)


def check_scaled_mm(e: MMExample, device: str) -> None:
    dtypes_ = [{"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[f] for f in e.formats]
    codes = []
    for how, dtype, rows in zip(e.layouts, dtypes_, (e.m, e.n), strict=True):
        t = make(how._replace(layout="contiguous"), rows, e.k, "cpu")
        if e.every_code:  # NaN and Inf too
            g = torch.Generator().manual_seed(how.seed)
            t = torch.randint(256, (rows, e.k), generator=g, dtype=torch.uint8).view(dtype)
        bytes_ = t.to(dtype).view(torch.uint8).to(device)
        codes.append(LAYOUTS[how.layout](bytes_).view(dtype))
    a, b = codes
    sa, sb = (torch.tensor(2.0**s, device=device) for s in e.scales)
    bias = None
    if e.bias is not None:
        bias = make(Made("off 16 bytes", e.bias, "normal", e.m), 1, e.n, device)[0]
    d = ops.scaled_mm(a, b, sa, sb, bias, e.out, e.fast)
    assert d.shape == (e.m, e.n) and d.dtype == e.out
    x, y = a.cpu().double(), b.cpu().double()
    factor = float(sa) * float(sb)
    want, terms = (x @ y.t()) * factor, (x.abs() @ y.abs().t()) * factor
    relative = 1e-2 if e.fast else 1e-3
    if device == "cpu":
        relative = (e.k + 16) * 2.0**-24
    if bias is not None:
        want, terms = want + bias.cpu().double(), terms + bias.cpu().double().abs()
        relative += torch.finfo(e.out).eps
    assert_sum(d, want, terms, relative, "scaled_mm")
    if e.n % 8 == 0 and bias is None:
        out = torch.ones(e.m, e.n, device=device, dtype=e.out)
        ops.scaled_mm_accumulate_op(out, a, b, sa, sb, e.fast)
        assert_sum(out, want + 1, terms + 1, relative + torch.finfo(e.out).eps, "accumulated")
    if e.formats == ("e4m3", "e4m3"):
        one = torch.ones((), device=device)
        product = ops.scaled_mm(a, b, one, one)
        same_numbers(nf.fp8_mm(a, b), product, "fp8_mm")
        view = nf.fp8_mm_view(a, b)
        assert view.shape == (e.m, e.n)
        assert_sum(view, x @ y.t(), x.abs() @ y.abs().t(), 1e-3, "fp8_mm_view")


# ---- packed weights ----


class PackedExample(NamedTuple):
    leading: tuple[int, ...]
    k: int
    n: int
    x: Made
    w: Made
    recipe: str
    bias: torch.dtype | None
    out: torch.dtype
    constant: bool


packed_examples = st.builds(
    PackedExample,
    leading_sizes(sizes),
    sizes,
    sizes,
    made(FINITE),
    made(FINITE),
    st.sampled_from(["nvfp4", "mxfp4", "nvfp4_four_over_six"]),
    st.one_of(st.none(), dtypes),
    dtypes,
    booleans,
)


def check_packed(e: PackedExample, device: str) -> None:
    if not nf.supported(e.recipe, device):
        return
    linear = torch.nn.Linear(e.k, e.n, bias=False, device=device, dtype=e.w.dtype)
    linear.weight = torch.nn.Parameter(make(e.w, e.n, e.k, device), requires_grad=False)
    layer = nf.PackedFP4Linear.from_linear(linear, e.recipe, overlap=e.constant)
    cast = nf.RECIPES[e.recipe].fprop.casts[1]
    w = values(linear.weight.cpu(), cast)[:, : e.k]
    largest = torch.finfo(torch.float32).max  # which dequantize() stops at
    whole = torch.where(w.isinf() | w.isnan(), w, w.clamp(-largest, largest)).float()
    same_numbers(layer.dequantize(), whole, "the packed weight")
    x = leading(make(e.x, number_of(e.leading), e.k, device), e.leading, False)
    if e.bias is not None:
        layer.bias = make(Made("every second column", e.bias, "normal", e.n), 1, e.n, device)[0]
    got = w4a16.fp4_weight_matmul_op(
        x.bfloat16(), layer.packed, layer.scale, layer.bias, e.n, e.out, e.constant
    )
    assert got.shape == (*x.shape[:-1], e.n) and got.dtype == e.out
    a = as_rows(x.cpu().bfloat16()).double()
    want, terms = a @ w.t(), a.abs() @ w.abs().t()
    if layer.bias is not None:
        bias = layer.bias.cpu().double()
        want, terms = want + bias, terms + bias.abs()
    relative = (e.k + 16) * 2.0**-24 if device == "cpu" else 1e-4
    if device == "cuda" and layer.bias is not None:
        relative += torch.finfo(e.out).eps
    scale = float(layer.scale)
    assert_sum(
        as_rows(got), want, terms, relative, "packed", Scales(min(1, scale), max(1, scale), scale)
    )
    if not x.requires_grad:
        same_numbers(layer(x), fp4_of(layer, x), "PackedFP4Linear")


def fp4_of(layer: nf.PackedFP4Linear, x: Tensor) -> Tensor:
    of = layer.packed, layer.scale, layer.bias, layer.out_features
    return w4a16.fp4_weight_matmul_op(x.bfloat16(), *of, x.dtype, layer.overlap)


# ---- public functions ----


class PublicExample(NamedTuple):
    leading: tuple[int, ...]
    k: int
    n: int
    swapped: bool
    x: Made
    w: Made
    dy: Made
    recipe: str
    bias: bool
    format: str
    options: tuple[bool, bool, bool]
    seed: int


FORMATS = ["e4m3", "e5m2", "nvfp4", "mxfp4", "fp8_row", "fp8_block", "fp8_block_pow2", "mxfp8"]
public_examples = st.builds(
    PublicExample,
    leading_sizes(small_sizes),
    small_sizes,
    small_sizes,
    booleans,
    made(),
    made(),
    made(),
    st.sampled_from(list(RECIPES)),
    booleans,
    st.sampled_from(FORMATS),
    st.tuples(booleans, booleans, booleans),
    seeds,
)


def check_public_quantize(e: PublicExample, device: str) -> None:
    x = leading(make(e.x, number_of(e.leading), e.k, device), e.leading, e.swapped)
    two_d, four_over_six, stochastic = e.options
    square = e.format in ("nvfp4", "fp8_block", "fp8_block_pow2")
    options = {
        "two_d": two_d and square,
        "four_over_six": four_over_six and e.format == "nvfp4",
        "stochastic": stochastic and "fp4" in e.format,
    }
    if options["stochastic"]:
        options["four_over_six"] = False
    if not nf.supported(e.format if "fp4" in e.format else "fp8", device):
        return
    q = nf.quantize(x, e.format, **options)
    on_cpu = nf.quantize(cpu(x)[0], e.format, **options)
    real = q.dequantize()
    assert real.shape == x.shape and real.dtype == x.dtype
    if not options["stochastic"]:
        same(
            [t for t in q if isinstance(t, Tensor)],
            [t for t in on_cpu if isinstance(t, Tensor)],
            f"quantize(x, {e.format!r})",
        )
        same_numbers(real, on_cpu.dequantize(), "dequantize()")
        same_numbers(q.dequantize(FP32), on_cpu.dequantize(FP32), "dequantize(float32)")
    if e.format == "nvfp4" and not any(options.values()):
        same(
            [t for t in nf.fp4_quantize(x) if isinstance(t, Tensor)],
            [t for t in q if isinstance(t, Tensor)],
            "fp4_quantize",
        )
        same_numbers(nf.fp4_dequantize(q), real, "fp4_dequantize")


def gradients(
    call: Callable[..., Tensor], tensors_: list[Tensor | None], dy: Tensor
) -> list[Tensor | None]:
    """y and the gradients of the tensors that there are, with the same draws each time."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors_]
    torch.manual_seed(5)
    y = call(*leaves)
    y.backward(dy)
    return [y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)]


def check_public_linear(e: PublicExample, device: str) -> None:
    """linear(), matmul(), a layer, and what is written for one recipe: all the same bits, those of
    tensors that lie in one piece; linear()'s are what check_layer() looks at."""
    r = RECIPES[e.recipe]
    if not nf.supported(r, device):
        return
    m = number_of(e.leading)
    x = leading(make(e.x, m, e.k, device), e.leading, e.swapped)
    w = make(e.w, e.n, e.k, device)
    bias = make(Made("contiguous", e.w.dtype, "normal", e.seed), 1, e.n, device)[0]
    bias = bias if e.bias else None
    dy = make(e.dy._replace(dtype=e.x.dtype), m, e.n, device).view(*x.shape[:-1], e.n)

    def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return nf.linear(x, w, bias, r)

    want = gradients(linear, [x, w, bias], dy)
    # cuBLASLt may take another algorithm for a bf16 operand that it reads where it lies
    lies = any(None in gemm.casts for gemm in (r.fprop, r.dgrad, r.wgrad))
    exact = device == "cpu" or not lies
    pieces = [None if t is None else t.contiguous() for t in (x, w, bias)]
    alike(gradients(linear, pieces, dy.contiguous()), want, "in one piece", dy, exact)
    with torch.no_grad():
        same_numbers(linear(x, w, bias), want[0], "no_grad")

    layer = nf.Linear(e.k, e.n, e.bias, device, e.w.dtype, recipe=r)
    layer.weight = torch.nn.Parameter(w.detach().clone(memory_format=torch.preserve_format))
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias.clone())
    leaf = x.detach().requires_grad_()
    torch.manual_seed(5)
    y = layer(leaf)
    y.backward(dy)
    of_bias = None if layer.bias is None else layer.bias.grad
    alike([y.detach(), leaf.grad, layer.weight.grad, of_bias], want, "a layer", dy, exact)

    if bias is None and r.delayed is None:
        of_matmul = gradients(lambda a, b: nf.matmul(a, b, r), [x, w.t()], dy)
        alike([*of_matmul[:2], of_matmul[2].t(), None], want, "matmul", dy, exact)
    if r is nf.RECIPES["fp8"]:
        same_numbers(nf.fp8_linear_forward(x, w, bias), want[0], "fp8_linear_forward")
        if x.dtype == w.dtype:
            masks = nf.fp8_linear_backward(dy, x, w, (True, True, e.bias))
            alike([want[0], *masks], want, "fp8_linear_backward", dy, exact)
    if r is nf.RECIPES["nvfp4"] and bias is None:
        same_numbers(nf.fp4_matmul(x, w.t()), want[0], "fp4_matmul")
        made_ = gradients(nf.FP4MatMulFunction.apply, [x, w.t()], dy)
        alike([*made_[:2], made_[2].t(), None], want, "FP4MatMulFunction", dy, exact)


def alike(
    got: list[Tensor | None],
    want: list[Tensor | None],
    what: str,
    dy: Tensor,
    exact: bool,
) -> None:
    """exact: bit for bit, but for the bias gradient, whose sum goes as dy lies."""
    for g, w, name in zip(got, want, ("y", "dx", "dw", "db"), strict=True):
        assert (g is None) == (w is None), (what, name)
        if g is None or w is None:
            continue
        what_now = f"{what}: {name}"
        if name == "db":
            terms = as_rows(dy).cpu().double().abs().sum(0)
            relative = (as_rows(dy).shape[0] + 16) * 2.0**-24 + torch.finfo(w.dtype).eps
            assert_sum(g, w.cpu().double(), terms, relative, what_now)
        elif exact:
            same_numbers(g, w, what_now)
        elif w.isfinite().all():
            largest = w.abs().amax().cpu().double() if w.numel() else 0
            assert_sum(g, w.cpu().double(), torch.full(w.shape, largest), 1e-2, what_now)


CHECKS: dict[str, tuple[Callable[[Any, str], None], st.SearchStrategy[Any]]] = {
    "quantize": (check_quantize, quantize_examples),
    "layer": (check_layer, layer_examples),
    "delayed": (check_delayed, delayed_examples),
    "scaled_mm": (check_scaled_mm, mm_examples),
    "packed": (check_packed, packed_examples),
    "public quantize": (check_public_quantize, public_examples),
    "public linear": (check_public_linear, public_examples),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_few(device: str, name: str, request: pytest.FixtureRequest) -> None:
    run(*CHECKS[name], device, request)


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", CHECKS)
def test_many(device: str, name: str, part: int, request: pytest.FixtureRequest) -> None:
    run(*CHECKS[name], device, request, part, long_run_examples(len(CHECKS)))
