"""The operators of a layer: on a GPU they return what the reference does, for every recipe.

Codes and scales bit for bit, y and the gradients within the rounding of their dtype. And on any
device: what was quantized beforehand, or measured by the forward, gives the bits of what is
quantized now, and each GEMM multiplies what the quantize operator makes of its operands.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import assert_same_bits, relative_error, skip_where_it_does_not_run
from every import EVERY, NAMED, SOME, every, quantized, run, some, tensors, transposed, values
from torch import Tensor

import narrowfloat as nf
from narrowfloat import ops
from narrowfloat.reference import linear as reference
from narrowfloat.reference.tensor import SCALE
from narrowfloat.spec import DB, DW, FORWARD_JOINS, NEED_DX, W_MEASURED, Y_DTYPE, bit, bits_of, both

SEED = torch.tensor([11, -5])
# m, k, n, dtype, whether x, w and dy lie by columns
CASES = [
    (1, 16, 16, torch.float32, False),
    (33, 100, 72, torch.float32, True),
    (33, 100, 72, torch.bfloat16, True),
    (64, 767, 2, torch.float32, False),
    (0, 48, 32, torch.float32, False),
]
MORE = [
    (50, 64, 128, torch.float16, False),
    (200, 520, 136, torch.bfloat16, False),
    (24, 0, 40, torch.float32, False),
    (24, 40, 0, torch.bfloat16, False),
]
LARGER = [
    (200, 520, 136, torch.bfloat16, False),
    (200, 520, 136, torch.float32, True),
    (128, 256, 24, torch.float16, True),
]
ALL_THREE = (True, True, True)


def ids(case: object) -> str:
    if isinstance(case, tuple):
        return f"{case[0]}x{case[1]}x{case[2]}-{str(case[3])[6:]}"
    return str(case)


def cpu(*of: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.cpu() for t in of]


def rounding(gemm: nf.Gemm, dtype: torch.dtype, device: str) -> float:
    """What y may differ by: the rounding of its dtype, and in fp32 how the tensor cores sum."""
    if dtype != torch.float32:
        return {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
    if device == "cpu" or gemm.kind == "fp8_bf16":
        return 1e-5
    return 2e-3 if gemm.fast else 2e-4  # see test_scaled_mm.test_product


def given(t: Tensor, cast: nf.Cast | None, columns: bool = False) -> tuple[Tensor | None, ...]:
    """(codes, scales, scale), as an operator takes them; () for bf16."""
    return () if cast is None else quantized(t, cast, columns)


def assert_operators(case: tuple, recipe: nf.Recipe, device: str) -> None:
    skip_where_it_does_not_run(recipe, device)
    m, k, n, dtype, by_columns = case
    x, w, bias, dy = tensors(m, k, n, device, dtype)
    if by_columns:
        x, w, dy = transposed(x, w, dy)
    assert_forward(x, w, bias, recipe)
    assert_backward(x, w, dy, recipe)


def assert_forward(x: Tensor, w: Tensor, bias: Tensor, recipe: nf.Recipe) -> None:
    (m, k), n, device = x.shape, w.shape[0], x.device.type
    plain = recipe.forward_spec
    spec = plain | recipe.save_x | recipe.keep_w
    allowed = rounding(recipe.fprop, x.dtype, device)
    y, columns, columns_scales, scales = got = ops.linear_forward(x, w, bias, spec)
    # on a CPU the operators are the reference (test_ops.py)
    want = got if device == "cpu" else reference.linear_forward(*cpu(x, w, bias), spec)
    assert y.shape == (m, n) and y.dtype == x.dtype and y.is_contiguous()
    assert relative_or_zero(y, want[0]) <= allowed
    for a, b, what in zip(
        got[1:], want[1:], ("x's columns", "their scales", "scales"), strict=True
    ):
        assert_same_bits(a, b, what)

    unsaved = ops.linear_forward(x, w, bias, plain)
    assert_same_bits(unsaved[0], y, "y, nothing saved")
    assert all(t.numel() == 0 for t in unsaved[1:])
    without_bias = ops.linear_forward(x, w, None, spec)
    assert relative_or_zero(without_bias[0].float() + bias.float(), y) <= max(allowed, 2.0**-7)
    for a, b in zip(without_bias[1:], got[1:], strict=True):
        assert_same_bits(a, b, "without a bias")

    # quantized beforehand: w, x, both; and then neither of them need be there
    of_x, of_w = given(x, recipe.fprop.casts[0]), given(w, recipe.fprop.casts[1])
    nothing = (None, None, None)
    of_columns = SCALE if recipe.save_x and recipe.wgrad.casts[1].of.tensor_scale else 0
    if of_w:
        beforehand = ops.linear_forward(x, w, bias, spec, *nothing, *of_w)
        assert_same_bits(beforehand[3], scales[:of_columns], "scales, w given")
        absent = ops.linear_forward(x, None, bias, spec, *nothing, *of_w, 0, n, k)
        for other in (beforehand, absent):
            for a, b in zip(other[:3], (y, columns, columns_scales), strict=True):
                assert_same_bits(a, b, "w given")
    if of_x:
        for a, b in zip(ops.linear_forward(x, w, bias, spec, *of_x), got, strict=True):
            assert_same_bits(a, b, "x given")
        typed = plain | Y_DTYPE[x.dtype]
        absent = ops.linear_forward(None, w, bias, typed, *of_x, None, None, None, m)
        assert_same_bits(absent[0], y, "x absent")
        if of_w:
            absent = ops.linear_forward(None, None, bias, typed, *of_x, *of_w, m, n, k)
            assert_same_bits(absent[0], y, "both absent")
            assert all(t.numel() == 0 for t in absent[1:])


def assert_backward(x: Tensor, w: Tensor, dy: Tensor, recipe: nf.Recipe) -> None:
    (m, k), n, dtype, device = x.shape, w.shape[0], x.dtype, x.device.type
    made = ops.linear_forward(x, w, None, recipe.forward_spec | recipe.save_x | recipe.keep_w)
    columns, columns_scales, scales = made[1:]
    if not recipe.save_x:
        columns, columns_scales = x, None
    seed = SEED.to(device) if recipe.draws_dx or recipe.draws_dw else None
    measured = W_MEASURED if recipe.keep_w else 0
    saved = (columns, columns_scales)
    of_w = given(w, recipe.dgrad.casts[1], columns=True)
    x_scale = scales[:SCALE] if recipe.save_x and recipe.wgrad.casts[1].of.tensor_scale else None
    allowed = rounding(recipe.dgrad, dtype, device), rounding(recipe.wgrad, dtype, device), 2.0**-8
    shapes = (m, k), (n, k), (n,)

    def asked(needs: tuple[bool, ...]) -> int:
        need_dx, need_dw, need_db = needs
        spec = recipe.backward_spec | (NEED_DX if need_dx else 0)
        return spec | (DW[dtype] if need_dw else 0) | (DB[dtype] if need_db else 0)

    arguments, spec = (dy, *saved, scales, w, seed, k), asked(ALL_THREE)
    every_gradient = ops.linear_backward(*arguments, spec | measured)
    refs = every_gradient
    if device != "cpu":
        refs = reference.linear_backward(*cpu(*arguments[:-1]), k, spec | measured)
    for g, r, shape, bound, what in zip(
        every_gradient, refs, shapes, allowed, ("dx", "dw", "db"), strict=True
    ):
        assert g.shape == r.shape == shape and g.dtype == dtype and g.is_contiguous(), what
        assert relative_or_zero(g, r) <= bound, what

    # some of them; w measured anew; w, or its tensor scale and x's, given by themselves
    others = [(ALL_THREE, ops.linear_backward(*arguments, spec))]
    if x_scale is not None:
        made = ops.linear_backward(dy, *saved, None, w, seed, k, spec, x_scale)
        others.append((ALL_THREE, made))
    if of_w:
        made = ops.linear_backward(dy, *saved, scales, None, seed, k, spec, None, *of_w)
        others.append((ALL_THREE, made))
    for needs in itertools.product((True, False), repeat=3):
        of = (dy, *(saved if needs[1] else (None, None)), scales, w if needs[0] else None)
        others.append((needs, ops.linear_backward(*of, seed, k, asked(needs) | measured)))
    for needs, made in others:
        for a, b, needed, what in zip(made, every_gradient, needs, ("dx", "dw", "db"), strict=True):
            if not needed:
                assert a.shape == (0,) and a.dtype == dtype, what
            elif what == "db":  # summed in another order, where another family of kernels does it
                assert relative_or_zero(a, b) <= 2.0**-8, what
            else:
                assert_same_bits(a, b, f"{what} of {needs}")


def relative_or_zero(a: Tensor, b: Tensor) -> float:
    a, b = a.cpu(), b.cpu()
    if b.numel() == 0 or not b.any():
        return float(a.double().abs().sum())
    return relative_error(a, b)


@every
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_operators_equal_reference(device: str, case: tuple, recipe: nf.Recipe) -> None:
    assert_operators(case, recipe, device)


@some
@pytest.mark.parametrize("case", MORE, ids=ids)
def test_more_sizes_and_dtypes(device: str, case: tuple, recipe: nf.Recipe) -> None:
    assert_operators(case, recipe, device)


@some
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("m, k, n", [(33, 100, 72), (200, 520, 136), (600, 400, 1000)])
def test_what_no_gemm_makes(
    device: str, m: int, k: int, n: int, dtype: torch.dtype, recipe: nf.Recipe
) -> None:
    """The saved copy, the scales and the bias gradient: x and w, then dy and w, in a launch. Sizes
    on both sides of where a tensor is measured in a launch of its own. racecheck runs this with
    no GEMM computed at all (tools/gpu_tests.py)."""
    skip_where_it_does_not_run(recipe, device)
    x, w, _, dy = tensors(m, k, n, device, dtype)
    spec = recipe.forward_spec | recipe.save_x | recipe.keep_w
    _, columns, columns_scales, scales = ops.linear_forward(x, w, None, spec)
    cast, parts = recipe.wgrad.casts[1], []
    if cast is not None:
        codes, of_blocks, scale = quantized(x.cpu(), cast, columns=True)
        assert_same_bits(columns, codes, "x_columns")
        if of_blocks is not None:
            assert_same_bits(columns_scales, of_blocks, "x_columns_scales")
        parts += [] if scale is None else [scale]
    if recipe.keep_w:
        parts += reference._measured(w.cpu(), recipe.fprop.casts[1], None)
    assert_same_bits(scales, torch.cat(parts) if parts else torch.empty(0), "scales")
    back = recipe.backward_spec | NEED_DX | DW[dtype] | DB[torch.float32]
    saved = (columns, columns_scales, scales) if recipe.save_x else (x, None, scales)
    db = ops.linear_backward(dy, *saved, w, SEED.to(device), k, back)[2]
    assert relative_error(db.cpu(), dy.cpu().double().sum(0)) < 1e-5


@pytest.mark.gpu
@every
@pytest.mark.parametrize("case", LARGER, ids=ids)
def test_larger_sizes(cuda: str, case: tuple, recipe: nf.Recipe) -> None:
    assert_operators(case, recipe, cuda)


@every
def test_the_layer_is_what_its_operands_say(device: str, recipe: nf.Recipe) -> None:
    """y, dx and dw are GEMMs of what quantize's operator makes: the right operand, orientation,
    block and rounding in each place."""
    skip_where_it_does_not_run(recipe, device)
    m, k, n = 36, 264, 136
    x, w, bias, dy = tensors(m, k, n, device)
    y, dx, dw, db = run(x, w, bias, dy, recipe)
    torch.manual_seed(7)
    seed = ops.draw_seed(dy.device)
    (of_x, of_w), (of_dy, w_columns), (dy_columns, x_columns) = (
        gemm.casts for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad)
    )
    wants = (
        values(x, of_x) @ values(w, of_w).t() + bias,
        values(dy, of_dy, seed=seed) @ values(w, w_columns, columns=True).t(),
        values(dy, dy_columns, True, seed) @ values(x, x_columns, columns=True).t(),
    )
    for got, want, gemm in zip(
        (y, dx, dw), wants, (recipe.fprop, recipe.dgrad, recipe.wgrad), strict=True
    ):
        assert relative_error(got, want) < (2e-3 if gemm.fast and device == "cuda" else 2e-4)
    assert relative_error(db, dy.sum(0)) < 1e-5


@pytest.mark.parametrize("recipe", [r for r in EVERY if r.draws_dx or r.draws_dw], ids=str)
def test_the_seed_decides(device: str, recipe: nf.Recipe) -> None:
    skip_where_it_does_not_run(recipe, device)
    x, w, _, dy = tensors(40, 64, 48, device)
    made = ops.linear_forward(x, w, None, recipe.forward_spec | recipe.save_x)[1:]
    saved = made if recipe.save_x else (x, None, made[2])
    spec = recipe.backward_spec | NEED_DX | DW[x.dtype]
    first, again, other = (
        ops.linear_backward(dy, *saved, w, seed.to(device), 64, spec)
        for seed in (SEED, SEED, SEED + 1)
    )
    for a, b, c, draws in zip(
        first, again, other, (recipe.draws_dx, recipe.draws_dw), strict=False
    ):
        assert_same_bits(a, b)
        assert torch.equal(a, c) != draws


# ---- what is refused ----


def test_errors_of_the_backward(device: str) -> None:
    for recipe in SOME:
        if not nf.supported(recipe, device):
            continue
        x, w, _, dy = tensors(4, 8, 6, device)
        spec = recipe.backward_spec | NEED_DX | DW[x.dtype]
        made = ops.linear_forward(x, w, None, recipe.forward_spec | recipe.save_x)[1:]
        saved = made if recipe.save_x else (x, None, made[2])
        seed = SEED.to(device)
        cases = [
            ((dy, *saved, None, seed), "expected w for dx"),
            ((dy, None, None, saved[2], w, seed), "expected x_columns for dw"),
            ((dy, *saved, w.t(), seed), r"expected w \(6, 8\) for dy \[..., 6\], got \(8, 6\)"),
        ]
        cast = recipe.wgrad.casts[1]
        if recipe.draws_dx or recipe.draws_dw:
            cases.append(((dy, *saved, w, None), "expected a seed, int64 .2., for stochastic"))
            wrong = seed.int()
            cases.append(((dy, *saved, w, wrong), "expected a seed, int64 .2., for stochastic"))
        if cast is None:
            cases.append(((dy, x[1:], None, None, w, seed), r"expected x \[..., 8\] of 4 rows"))
        else:
            cases.append(((dy, saved[0][1:], *saved[1:], w, seed), "expected x_columns"))
            cases.append(((dy, x, *saved[1:], w, seed), "expected x_columns"))
        if cast is not None and cast.scaling != "tensor":
            cases.append(
                ((dy, saved[0], None, saved[2], w, seed), "x_columns_scales for x_columns")
            )
            wrong = saved[1][:-1]
            cases.append(((dy, saved[0], wrong, saved[2], w, seed), "expected x_columns"))
        if cast is not None and cast.of.tensor_scale:
            cases.append(((dy, *saved[:2], None, w, seed), "for x_columns"))
        for arguments, text in cases:
            with pytest.raises(ValueError, match=f"linear_backward: .*{text}"):
                ops.linear_backward(*arguments, 8, spec)


def test_errors_of_the_forward(device: str) -> None:
    x, w, _, _ = tensors(4, 8, 6, device)
    fp8, none = nf.RECIPES["fp8"], (None, None, None)
    of_x, of_w = quantized(x, fp8.fprop.a), quantized(w, fp8.fprop.b)
    spec, typed = fp8.forward_spec, fp8.forward_spec | Y_DTYPE[torch.float32]
    for arguments, text in (
        ((None, w, None, typed), "expected x, or x_codes, got"),
        ((x, None, None, spec), "expected w, or w_codes, got"),
        ((None, w, None, spec, *of_x, *none, 4), "expected y's dtype in the spec"),
        ((None, w, None, typed | fp8.save_x, *of_x, *none, 4), "expected x itself for its columns"),
        ((x, w, w[:5, 0], spec), r"expected bias \[6\], got \(5,?\)"),
        ((x, w.to("cpu" if device == "cuda" else "meta"), None, spec), "expected w on"),
        ((x, w, None, spec, of_x[0], None, None), "expected x_scale for x_codes"),
        ((x, w, None, spec, *none, of_w[0], None, None), "expected w_scale for w_codes"),
        ((x, w, None, spec, of_x[0][:, :8], None, of_x[2]), "expected x_codes"),
    ):
        with pytest.raises(ValueError, match=f"linear: {text}"):
            ops.linear_forward(*arguments)


@pytest.mark.parametrize("recipe", [r for r in NAMED if r.cached_spec], ids=str)
def test_errors_of_operands_quantized_beforehand(device: str, recipe: nf.Recipe) -> None:
    """Another tensor's, in another format, without its scales: refused, not read."""
    skip_where_it_does_not_run(recipe, device)
    x, w, _, dy = tensors(40, 160, 300, device)
    spec, back = recipe.forward_spec, recipe.backward_spec | NEED_DX

    def wrong(t: Tensor, cast: nf.Cast, columns: bool = False) -> list[tuple[Tensor | None, ...]]:
        codes, scales, scale = quantized(t, cast, columns)
        others = [quantized(o, cast, columns) for o in (t[:10], t[:, :100], t.t())]
        if cast.scaling != "tensor":
            others += [(codes, None, scale), (codes, scales[:-1], scale)]
        if cast.of.tensor_scale:
            others += [(codes, scales, None), (codes, scales, scale[:3])]
        if cast.element != "e2m1":
            others.append((codes.view(torch.uint8), scales, scale))
        return [*others, (codes[1:], scales, scale)]

    seed = SEED.to(device)
    for name, of, cast in (("x", x, recipe.fprop.casts[0]), ("w", w, recipe.fprop.casts[1])):
        for bad in () if cast is None else wrong(of, cast):
            both_of = bad if name == "x" else (None, None, None, *bad)
            with pytest.raises(ValueError, match=f"linear: expected {name}_(codes|scales?)"):
                ops.linear_forward(x, w, None, spec, *both_of)
    for bad in wrong(w, recipe.dgrad.casts[1], columns=True) if recipe.dgrad.casts[1] else ():
        with pytest.raises(ValueError, match="linear_backward: expected w_(codes|scales?)"):
            ops.linear_backward(dy, None, None, None, None, seed, 160, back, None, *bad)


def test_no_quantized_operand_for_a_gemm_in_bf16(device: str) -> None:
    x, w, _, dy = tensors(16, 32, 48, device)
    e4 = nf.Cast()
    x_half = nf.Recipe("x", *[nf.Gemm(None, "e4m3")] * 3)
    w_half = nf.Recipe("w", *[nf.Gemm("e4m3", None)] * 3)
    for recipe in (nf.recipe.BF16, w_half):
        with pytest.raises(ValueError, match="linear: expected no quantized w for a GEMM in bf16"):
            ops.linear_forward(x, w, None, recipe.forward_spec, None, None, None, *quantized(w, e4))
        back = recipe.backward_spec | NEED_DX
        with pytest.raises(ValueError, match="linear_backward: expected no quantized w for a GEMM"):
            ops.linear_backward(
                dy, None, None, None, None, None, 32, back, None, *quantized(w, e4, True)
            )
    for recipe in (nf.recipe.BF16, x_half):
        with pytest.raises(ValueError, match="linear: expected no quantized x for a GEMM in bf16"):
            ops.linear_forward(x, w, None, recipe.forward_spec, *quantized(x, e4))


def test_pairs_that_no_gemm_takes_are_refused_by_the_operators_too(device: str) -> None:
    """A spec that no recipe makes."""
    x, w, _, dy = tensors(16, 32, 48, device)
    mx, e5 = nf.Cast("e4m3", "mx"), nf.Cast("e5m2")
    row, square = nf.Cast("e5m2", "row"), nf.Cast("e4m3", "block", square=True)
    for a, b in (
        (mx, nf.Cast()),
        (e5, e5),
        (row, row),
        (nf.Cast("e4m3", "row"), row),
        (square,) * 2,
    ):
        spec = bit("forward.fprop_a", bits_of(a)) | bit("forward.fprop_b", bits_of(b))
        with pytest.raises(ValueError, match="^linear: expected (two operands of|.*e5m2|square)"):
            ops.linear_forward(x, w, None, spec)
        spec = bit("backward.dgrad_a", bits_of(a)) | bit("backward.dgrad_b", bits_of(b))
        with pytest.raises(ValueError, match="^linear_backward: expected"):
            ops.linear_backward(dy, None, None, None, w, None, 32, spec | NEED_DX)
    no_cast = bits_of(mx) | bit("cast.square")
    with pytest.raises(ValueError, match="^linear: .*expected square"):
        ops.linear_forward(x, w, None, no_cast)


def test_delayed_names_take_casts_by_tensor_alone(device: str) -> None:
    x, w, _, dy = tensors(16, 32, 48, device)
    history = torch.zeros(3, 20, dtype=torch.int32, device=device)
    recipe = nf.RECIPES["fp8_row"]
    text = "expected formats with one scale a tensor with a history"
    with pytest.raises(ValueError, match=f"linear: {text}"):
        ops.delayed_linear_forward(x, w, None, history, recipe.forward_spec | FORWARD_JOINS)
    with pytest.raises(ValueError, match=f"linear(_backward)?: {text}"):
        spec = recipe.backward_spec | NEED_DX
        ops.delayed_linear_backward(dy, None, None, w, history, 32, spec)


# ---- GPUs alone ----


@pytest.mark.gpu
@pytest.mark.parametrize(
    "m, k, n", [(1024, 1024, 1024), (4096, 1024, 1024), (2000, 1500, 1700), (4096, 4096, 4096)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_tensors_in_one_launch(cuda: str, m: int, k: int, n: int, dtype: torch.dtype) -> None:
    """x and w, then dy and w, quantized by one launch each: the bytes of one tensor a launch."""
    x, w, _, dy = tensors(m, k, n, cuda, dtype)
    recipe, e4 = nf.RECIPES["fp8"], nf.Cast()
    spec = recipe.forward_spec | recipe.save_x | recipe.keep_w
    y, x_columns, _, scales = ops.linear_forward(x, w, None, spec)
    x_alone, w_alone = (reference.quantize(t, both(e4, e4).pack()) for t in (x, w))
    assert torch.equal(x_columns.view(torch.uint8), x_alone[2].view(torch.uint8))
    assert torch.equal(scales, torch.cat([x_alone[4][SCALE:], w_alone[4][:SCALE]]))
    of_w = (w_alone[0], None, w_alone[4][:SCALE])
    beforehand = ops.linear_forward(x, w, None, spec, None, None, None, *of_w)
    assert torch.equal(beforehand[0], y)
    back = recipe.backward_spec | NEED_DX | DW[dtype] | DB[torch.float32]
    fresh = ops.linear_backward(dy, x_columns, None, scales, w, None, k, back | W_MEASURED)
    w_columns = (w_alone[2], None, w_alone[4][SCALE:])
    apart = ops.linear_backward(dy, x_columns, None, scales, None, None, k, back, None, *w_columns)
    for a, b in zip(fresh[:2], apart[:2], strict=True):
        assert torch.equal(a, b)
    for db in (fresh[2], apart[2]):  # summed in another order
        assert relative_error(db, dy.double().sum(0)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8", "fp8_row", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("op", ["quantize", "linear_forward", "linear_backward", "scaled_mm"])
def test_out_of_memory_is_torchs(cuda: str, op: str, recipe: str) -> None:
    x = torch.empty(1, 1, device=cuda, dtype=torch.bfloat16).expand(1 << 20, 1 << 20)
    made, one = nf.RECIPES[recipe], torch.ones((), device=cuda)
    if op == "scaled_mm" and recipe != "fp8":
        pytest.skip("fp8's alone")
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        if op == "quantize":
            ops.quantize_op(x, both(made.fprop.a, None).pack())
        elif op == "linear_forward":
            ops.linear_forward(x, x, None, made.forward_spec)
        elif op == "linear_backward":
            seed, spec = SEED.to(cuda), made.backward_spec | NEED_DX
            ops.linear_backward(x, None, None, None, x, seed, 1 << 20, spec)
        else:
            thin = torch.zeros(1 << 20, 16, device=cuda).to(torch.float8_e4m3fn)
            ops.scaled_mm(thin, thin, one, one)
    assert torch.cuda.memory_allocated() < 1 << 30
