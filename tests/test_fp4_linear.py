"""Decides that the FP4 layer, its two operators and the functions around them are right."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from conftest import assert_close_as, assert_same_bits, relative_error, tensors_saved
from torch import Tensor, nn

import narrowfloat as nf
from narrowfloat import ops, reference_fp4
from narrowfloat.settings import FP4Layer, FP4Quantize, Orientation

FP4 = sorted(n for n, r in nf.RECIPES.items() if isinstance(r, nf.FP4Recipe))

SHAPES = [(1, 16, 16), (50, 64, 128), (33, 100, 72), (64, 767, 2), (128, 256, 24), (200, 520, 136)]
FORMATS = ["nvfp4", "mxfp4"]
SEED = torch.tensor([11, -5])
LAYERS = {
    "nvfp4": FP4Layer(two_d_w=True, rotate=True, stochastic_dy=True),
    "mxfp4": FP4Layer(mx=True, rotate=True, stochastic_dy=True),
    "four over six": FP4Layer(False, True, True, True, True, True),
    "scaled up": FP4Layer(two_d_w=True, rotate=True, stochastic_dy=True, scale_up_dy=True),
    "plain": FP4Layer(),
    "w 1 x 16": FP4Layer(rotate=True, stochastic_dy=True, four_over_six_w=True),
    "mx plain": FP4Layer(mx=True),
}


def tensors(m: int, k: int, n: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    x = torch.randn(m, k, device=device).to(dtype)
    w = (torch.randn(n, k, device=device) * 0.05).to(dtype)
    bias = torch.randn(n, device=device).to(dtype)
    dy = (torch.randn(m, n, device=device) * 1e-3).to(dtype)
    return x, w, bias, dy


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("m, k, n", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operators_equal_reference(
    device: str, m: int, k: int, n: int, dtype: torch.dtype, name: str
) -> None:
    """Saved bytes and scales bit for bit, products within the rounding of their output."""
    x, w, bias, dy = tensors(m, k, n, dtype, device)
    if name != "plain":  # both layouts somewhere
        x, w, dy = (t.t().contiguous().t() for t in (x, w, dy))
    layer = LAYERS[name]
    settings = layer._replace(wanted=True).pack()
    got = ops.fp4_linear_forward(x, w, bias, settings)
    want = reference_fp4.fp4_linear_forward(*(t.cpu() for t in (x, w, bias)), settings)
    exact = 2e-4 if device == "cuda" else 4e-6  # see test_scaled_mm.test_product
    rounding = {torch.bfloat16: 2.0**-8, torch.float32: exact}[dtype]
    assert relative_error(got[0].cpu(), want[0]) <= rounding
    for a, b, what in zip(got[1:], want[1:], ("columns", "their scales", "scales"), strict=True):
        assert_same_bits(a, b, what)
    unsaved = ops.fp4_linear_forward(x, w, bias, layer.pack())
    assert_same_bits(unsaved[0], got[0])
    assert unsaved[1].numel() == unsaved[2].numel() == 0 and not unsaved[3].any()
    seed = SEED if layer.stochastic_dy else None
    for need_dx, need_dw, need_db in itertools.product((True, False), repeat=3):
        settings = layer._replace(
            wanted=need_dx,
            dw_dtype=dtype if need_dw else None,
            db_dtype=dtype if need_db else None,
        ).pack()
        grads = ops.fp4_linear_backward(
            dy, *got[1:], w, None if seed is None else seed.to(device), k, settings
        )
        refs = reference_fp4.fp4_linear_backward(dy.cpu(), *want[1:], w.cpu(), seed, k, settings)
        for g, r, needed, what in zip(
            grads, refs, (need_dx, need_dw, need_db), ("dx", "dw", "db"), strict=True
        ):
            if not needed:
                assert g.numel() == 0, what
                continue
            assert g.shape == r.shape and g.dtype == dtype and g.is_contiguous(), what
            assert relative_error(g.cpu(), r) <= rounding, what


def test_the_layer_is_what_its_operands_say(device: str) -> None:
    """y, dx and dw are products of what fp4_quantize makes: the right operand in each place."""
    x, w, _, dy = tensors(48, 64, 32, torch.float32, device)
    layer = LAYERS["nvfp4"]
    settings = layer._replace(wanted=True, dw_dtype=torch.float32).pack()
    y, *saved = ops.fp4_linear_forward(x, w, None, settings)
    seed = SEED.to(device)
    dx, dw, _ = ops.fp4_linear_backward(dy, *saved, w, seed, 64, settings)

    plain, across = Orientation(True), Orientation(True, rotated=True)
    random = plain._replace(stochastic=True)

    def parts(t: Tensor, choices: FP4Quantize) -> tuple[Tensor, Tensor]:
        rows, rs, columns, cs, scales = ops.fp4_quantize_op(t, seed, choices.pack())
        r, c = t.shape
        return (
            reference_fp4.dequantize(rows, rs, scales[0], r, c).double(),
            reference_fp4.dequantize(columns, cs, scales[1], c, r).double(),
        )

    x_rows, x_columns = parts(x, FP4Quantize(plain, across))
    w_rows, w_columns = parts(w, FP4Quantize(plain, plain, two_d=True))
    dy_rows, dy_columns = parts(dy, FP4Quantize(random, random._replace(rotated=True)))
    assert torch.equal(w_rows, w_columns.t())
    assert relative_error(y, x_rows @ w_rows.t()) < 1e-5
    assert relative_error(dx, dy_rows @ w_rows) < 1e-5
    assert relative_error(dw, dy_columns @ x_columns.t()) < 1e-5


@pytest.mark.parametrize("recipe", FP4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_against_nn_linear(device: str, dtype: torch.dtype, recipe: str) -> None:
    kind = recipe.split("_")[0]
    ours = nf.Linear(192, 160, device=device, dtype=dtype, recipe=recipe)
    theirs = nn.Linear(192, 160, device=device, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 60, 192, device=device).to(dtype)
    g = torch.randn(4, 60, 160, device=device).to(dtype)
    results = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(g)
        results.append((y, leaf.grad, layer.weight.grad, layer.bias.grad))
    for a, b, what in zip(*results, ("", " gradient", " gradient"), strict=False):
        assert a.dtype == b.dtype == dtype
        assert_close_as(a, b, kind + what)
    assert relative_error(results[0][3], results[1][3]) < 5e-3


def test_what_is_saved(device: str) -> None:
    """x's packed columns, 9/16 byte an element, and w itself; nothing for what nobody needs."""
    layer = nf.FP4Linear(256, 128, device=device, dtype=torch.bfloat16)
    x = torch.randn(512, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    saved = functools.partial(tensors_saved, layer, x)
    everything = saved()
    own = sum(t.numel() * t.element_size() for t in everything if t is not layer.weight)
    own -= sum(
        t.numel() * t.element_size() for t in everything if t.data_ptr() == layer.weight.data_ptr()
    )
    assert own <= 0.31 * x.numel() * x.element_size()
    assert any(t.data_ptr() == layer.weight.data_ptr() for t in everything)
    assert [t.data_ptr() for t in saved(layer.weight)] == [layer.weight.data_ptr()]
    assert all(t.data_ptr() != layer.weight.data_ptr() for t in saved(x))
    assert saved(x, layer.weight) == []


def test_recipe_fields_reach_the_operators(device: str) -> None:
    x, w, _, dy = tensors(64, 128, 96, torch.float32, device)

    def run(recipe: nf.FP4Recipe) -> list[Tensor]:
        torch.manual_seed(1)
        leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = nf.linear(leaf_x, leaf_w, None, recipe)
        y.backward(dy)
        return [y.detach(), leaf_x.grad, leaf_w.grad]

    base = run(nf.FP4Recipe())
    for changed, differs in (
        ({"weights_2d": False}, (True, True, False)),
        ({"rotate_wgrad": False}, (False, False, True)),
        ({"stochastic_dy": False}, (False, True, True)),
        ({"four_over_six": "x"}, (True, False, True)),
        ({"four_over_six": "w"}, (True, True, False)),
        ({"four_over_six": "both"}, (True, True, True)),
        ({"scale_up_dy": True}, (False, True, True)),
        ({"format": "mxfp4"}, (True, True, True)),
    ):
        got = run(nf.FP4Recipe("other", **changed))  # type: ignore[arg-type]
        assert tuple(not torch.equal(a, b) for a, b in zip(base, got, strict=True)) == differs


@pytest.mark.parametrize("recipe", FORMATS)
def test_matmul(device: str, recipe: str) -> None:
    for a_shape, (k, n) in (((5, 48), (48, 33)), ((2, 30, 48), (48, 64)), ((480,), (480, 160))):
        a = torch.randn(a_shape, device=device, requires_grad=True)
        b = torch.randn(k, n, device=device, requires_grad=True)
        d = nf.matmul(a, b, recipe)
        assert_close_as(d, torch.matmul(a.detach(), b.detach()), f"{recipe} gradient")
        g = torch.randn_like(d)
        da, db = torch.autograd.grad(d, (a, b), g)
        assert da.shape == a.shape and db.shape == b.shape
        assert relative_error(da, torch.autograd.grad(torch.matmul(a, b), a, g)[0]) < 0.3
        assert relative_error(db, torch.autograd.grad(torch.matmul(a, b), b, g)[0]) < 0.3


def test_fp4_linear_is_a_linear() -> None:
    layer = nf.FP4Linear(32, 48, bias=False, dtype=torch.bfloat16)
    assert isinstance(layer, nf.Linear) and layer.recipe is nf.RECIPES["nvfp4"]
    assert layer.bias is None and layer.weight.dtype == torch.bfloat16
    assert layer.extra_repr().endswith("recipe=nvfp4")
    assert str(nf.FP4Linear(8, 8, recipe="mxfp4").recipe) == "mxfp4"
    twin = copy.deepcopy(layer)
    assert twin.recipe == layer.recipe
    plain = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict(), strict=True)
    layer.load_state_dict(plain.state_dict(), strict=True)


def test_double_backward_is_refused(device: str) -> None:
    x = torch.randn(4, 16, device=device, requires_grad=True)
    w = torch.randn(16, 16, device=device, requires_grad=True)
    for y in (nf.linear(x, w, None, "nvfp4"), nf.FP4MatMulFunction.apply(x, w)):
        with pytest.raises(RuntimeError, match="differentiated once.*double backward"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_errors(device: str) -> None:
    x = torch.ones(4, 8, device=device)
    w = torch.ones(6, 8, device=device)
    for args, error, text in (
        ((x, torch.ones(6, 7, device=device)), ValueError, "with one K, got"),
        ((x, torch.ones(8, device=device)), ValueError, "1 dimensions|expected w"),
        ((x, w, torch.ones(5, device=device)), ValueError, r"expected bias \[6\]"),
        ((x.double(), w), TypeError, "float64"),
        ((x, w.long()), TypeError, "int64"),
        ((x, w.to("meta")), ValueError, "expected w on"),
    ):
        with pytest.raises(error, match=text):
            nf.linear(*args, recipe="nvfp4")
    whole = LAYERS["nvfp4"]._replace(wanted=True, dw_dtype=torch.float32)
    saved = ops.fp4_linear_forward(x, w, None, whole.pack())[1:]
    dy, seed = torch.ones(4, 6, device=device), SEED.to(device)
    for args, text in (
        ((dy, *saved, None, seed), "expected w for"),
        ((dy, None, None, None, w, seed), "expected x_columns"),
        ((dy, *saved, w, None), "seed.*stochastic rounding"),
        ((dy, *saved, w.t(), seed), r"expected w \(6, 8\)"),
    ):
        with pytest.raises(ValueError, match=f"linear_backward: {text}|{text}"):
            ops.fp4_linear_backward(*args, 8, whole.pack())


# ---- the functions of seeds.py ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_seed_matmul(device: str, dtype: torch.dtype) -> None:
    a = torch.randn(3, 40, 96, device=device).to(dtype).requires_grad_()
    b = torch.randn(96, 56, device=device).to(dtype).requires_grad_()
    g = torch.randn(3, 40, 56, device=device).to(dtype)
    for multiply in (nf.fp4_matmul, nf.FP4MatMulFunction.apply):
        d = multiply(a, b)
        assert d.dtype == dtype
        assert_close_as(d, (a @ b).detach(), "nvfp4")
        da, db = torch.autograd.grad(d, (a, b), g)
        assert da.dtype == db.dtype == dtype
        assert_close_as(da, g @ b.detach().t(), "nvfp4 gradient")
        want = a.detach().flatten(0, 1).t() @ g.flatten(0, 1)
        assert_close_as(db, want, "nvfp4 gradient")
        torch.manual_seed(2)
        da, db = torch.autograd.grad(multiply(a, b), (a, b), g)
        torch.manual_seed(2)
        assert_same_bits(nf.fp4_matmul_backward_A(g, b), da)
        torch.manual_seed(2)
        assert_same_bits(nf.fp4_matmul_backward_B(a, g), db)
    only = nf.FP4MatMulFunction.apply(a.detach(), b)
    (db,) = torch.autograd.grad(only, b, g)
    assert_close_as(db, want, "nvfp4 gradient")


def test_seed_quantize(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 37, device=device).to(dtype).requires_grad_()
        q = nf.fp4_quantize(x)
        assert isinstance(q, nf.FP4Tensor) and q.format == "nvfp4"
        back = nf.fp4_dequantize(q)
        assert back.shape == x.shape and back.dtype == dtype
        assert relative_error(back, x.detach()) < 0.12
        values, scales = nf.FP4QuantizeFunction.apply(x)
        assert values.shape == scales.shape == x.shape and values.dtype == dtype
        assert scales.dtype == torch.float32 and not scales.requires_grad
        assert set(values.detach().abs().unique().tolist()) <= {0, 0.5, 1, 1.5, 2, 3, 4, 6}
        made = nf.FP4DequantizeFunction.apply(values, scales)
        assert made.dtype == dtype
        assert relative_error(made, back) < 2e-7 or dtype == torch.bfloat16
        assert relative_error(made, back) < 2**-8
        g = torch.randn_like(x)
        assert_same_bits(torch.autograd.grad(made, x, g)[0], g)
    with pytest.raises(TypeError, match="fp4_dequantize: expected an FP4Tensor"):
        nf.fp4_dequantize(nf.quantize(x, "e4m3"))
    with pytest.raises(ValueError, match="of one shape"):
        nf.FP4DequantizeFunction.apply(values, scales[:, :3])


def test_seed_errors(device: str) -> None:
    x = torch.ones(4, 8, device=device)
    with pytest.raises(ValueError, match=r"fp4_matmul_backward_A: expected grad .* one N"):
        nf.fp4_matmul_backward_A(x, torch.ones(8, 4, device=device))
    with pytest.raises(ValueError, match=r"fp4_matmul_backward_B: expected A .* one \[..., M\]"):
        nf.fp4_matmul_backward_B(x, torch.ones(8, 4, device=device))
    with pytest.raises(TypeError, match="fp4_matmul_backward_A: expected grad"):
        nf.fp4_matmul_backward_A(x.double(), x)
    with pytest.raises(ValueError, match="expected A on"):
        nf.fp4_matmul_backward_B(x.to("meta"), x)
    with pytest.raises(ValueError, match=r"expected B \[K,N\]"):
        nf.FP4MatMulFunction.apply(x, torch.ones(2, 8, 4, device=device))
