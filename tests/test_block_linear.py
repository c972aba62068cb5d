"""Decides that layers with scales finer than a tensor's, their two operators and what they save are
right."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import (
    assert_close_as,
    assert_same_bits,
    ends_of_training,
    relative_error,
    skip_where_it_does_not_run,
    tensors_saved,
)
from torch import Tensor, nn

import narrowfloat as nf
from narrowfloat import formats, ops, reference_block, reuse
from narrowfloat.settings import BlockLayer, BlockOrientation, BlockQuantize

RECIPES = sorted(name for name, r in nf.RECIPES.items() if isinstance(r, nf.BlockRecipe))
MIXED = [
    nf.BlockRecipe("forward alone", "block", "bf16", "bf16"),
    nf.BlockRecipe("row and blocks", "row", "block", "row"),
    nf.BlockRecipe("bf16 forward", "bf16", "row", "mx"),
    nf.BlockRecipe("e5m2 and bf16", "mx", "row", "bf16", "e5m2"),
    nf.BlockRecipe("powers", "block_pow2", "mx", "block_pow2"),
    nf.BlockRecipe("rows of e4m3", "row", "row", "block"),
    nf.BlockRecipe("nothing", "bf16", "bf16", "bf16"),
    nf.BlockRecipe("fast", "row", "row", "row", "e5m2", ("fprop",)),
]
EVERY = [nf.RECIPES[name] for name in RECIPES] + MIXED
SHAPES = [(1, 16, 16), (33, 100, 72), (64, 767, 2), (200, 520, 136)]
NEEDS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
every = pytest.mark.parametrize("recipe", EVERY, ids=str)
named = pytest.mark.parametrize("recipe", RECIPES)


def tensors(m: int, k: int, n: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    x = torch.randn(m, k, device=device).to(dtype)
    w = (torch.randn(n, k, device=device) * 0.05).to(dtype)
    bias = torch.randn(n, device=device).to(dtype)
    dy = (torch.randn(m, n, device=device) * 1e-3).to(dtype)
    return x, w, bias, dy


def kind_of(recipe: nf.BlockRecipe, product: str) -> str:
    by_row_of_dy = recipe.dy == "e5m2" and getattr(recipe, product) == "row"
    return "e5m2" if by_row_of_dy and product != "fprop" else "e4m3"


def held(w: Tensor, recipe: nf.BlockRecipe) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(codes and scales of w's rows, of its columns), quantized beforehand; () for bf16."""
    made = reuse.NOT_HELD if recipe.weight is None else reuse.quantized(w, recipe.weight)
    rows, columns = (() if side.codes is None else side[:2] for side in made)
    return rows, columns


# ---- the operators ----


@every
@pytest.mark.parametrize("m, k, n", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operators_equal_reference(
    device: str, m: int, k: int, n: int, dtype: torch.dtype, recipe: nf.BlockRecipe
) -> None:
    """Saved bytes and scales bit for bit, products within the rounding of their output."""
    skip_where_it_does_not_run(recipe, device)
    x, w, bias, dy = tensors(m, k, n, dtype, device)
    if recipe.wgrad != "bf16":  # both layouts somewhere
        x, w, dy = (t.t().contiguous().t() for t in (x, w, dy))
    layer = BlockLayer.unpack(recipe.settings)
    settings = layer._replace(wanted=True, keep_w=True).pack()
    got = ops.block_linear_forward(x, w, bias, settings)
    want = reference_block.block_linear_forward(*(t.cpu() for t in (x, w, bias)), settings)
    exact = 2e-4 if device == "cuda" else 4e-6  # see test_scaled_mm.test_product
    rounding = {torch.bfloat16: 2.0**-8, torch.float32: exact}[dtype]
    if recipe.fast and device == "cuda":
        rounding = max(rounding, 2e-3)
    assert relative_error(got[0].cpu(), want[0]) <= rounding
    for a, b, what in zip(got[1:], want[1:], ("columns", "their scales", "w's"), strict=True):
        assert_same_bits(a, b, what)
    unsaved = ops.block_linear_forward(x, w, bias, layer.pack())
    assert_same_bits(unsaved[0], got[0])
    assert all(t.numel() == 0 for t in unsaved[1:])
    w_rows, w_columns = held(w, recipe)
    beforehand = ops.block_linear_forward(x, w, bias, settings, *w_rows)
    for a, b, what in zip(beforehand[:3], got[:3], ("y", "columns", "their scales"), strict=True):
        assert_same_bits(a, b, f"{what}, w quantized beforehand")
    if w_rows:
        refs = reference_block.block_linear_forward(
            *(t.cpu() for t in (x, w, bias)), settings, *(t.cpu() for t in w_rows)
        )
        assert relative_error(beforehand[0].cpu(), refs[0]) <= rounding
        assert beforehand[3].numel() == 0
    saved = (x, None) if recipe.wgrad == "bf16" else got[1:3]
    saved_ref = (x.cpu(), None) if recipe.wgrad == "bf16" else want[1:3]
    kept = (got[3], want[3]) if want[3].numel() else (None, None)
    for need_dx, need_dw, need_db in NEEDS:
        settings = layer._replace(
            wanted=need_dx,
            dw_dtype=dtype if need_dw else None,
            db_dtype=dtype if need_db else None,
        ).pack()
        grads = ops.block_linear_backward(dy, *saved, w, kept[0], k, settings)
        refs = reference_block.block_linear_backward(
            dy.cpu(), *saved_ref, w.cpu(), kept[1], k, settings
        )
        again = ops.block_linear_backward(dy, *saved, w, None, k, settings)  # w measured anew
        of_w = (None if w_columns else w, None, k, settings, *w_columns)
        reused = ops.block_linear_backward(dy, *saved, *of_w)
        for g, a, u, r, needed, what in zip(
            grads, again, reused, refs, (need_dx, need_dw, need_db), ("dx", "dw", "db"), strict=True
        ):
            assert_same_bits(u, g, f"{what}, w quantized beforehand")
            if not needed:
                assert g.numel() == 0, what
                continue
            assert g.shape == r.shape and g.dtype == dtype and g.is_contiguous(), what
            assert relative_error(g.cpu(), r) <= rounding, what
            assert relative_error(a, g) <= rounding, what


@every
def test_the_layer_is_what_its_operands_say(device: str, recipe: nf.BlockRecipe) -> None:
    """y, dx and dw are products of what quantize's operator makes: the right operand, orientation
    and block in each place."""
    skip_where_it_does_not_run(recipe, device)
    x, w, bias, dy = tensors(48, 264, 144, torch.float32, device)
    leaf_x, leaf_w, leaf_b = (t.clone().requires_grad_() for t in (x, w, bias))
    y = nf.linear(leaf_x, leaf_w, leaf_b, recipe)
    y.backward(dy)

    def operand(t: Tensor, how: str, e5m2: bool = False, square: bool = False) -> Tensor:
        if how == "bf16":
            return t.bfloat16().double()
        scaling = formats.SCALINGS[how]
        square = square and scaling.square
        e5m2 = e5m2 and how == "row"
        choices = BlockQuantize(BlockOrientation(scaling.code, e5m2=e5m2, square=square))
        codes, scales, _, _ = ops.block_quantize_op(t, choices.pack())
        taken = reference_block.taken(codes, scales, *t.shape, scaling, square)
        return reference_block.values(taken, scaling, square).double()

    e5m2 = recipe.dy == "e5m2"
    fprop, dgrad, wgrad = recipe.fprop, recipe.dgrad, recipe.wgrad
    want_y = operand(x, fprop) @ operand(w, fprop, square=True).t() + bias
    want_dx = operand(dy, dgrad, e5m2) @ operand(w.t(), dgrad, square=True).t()
    want_dw = operand(dy.t(), wgrad, e5m2) @ operand(x.t(), wgrad).t()
    exact = 2e-4 if device == "cpu" or not recipe.fast else 2e-3
    for got, want in ((y, want_y), (leaf_x.grad, want_dx), (leaf_w.grad, want_dw)):
        assert relative_error(got, want) < exact
    assert relative_error(leaf_b.grad, dy.sum(0)) < 1e-5


def test_errors_of_the_operators(device: str) -> None:
    x, w = torch.ones(4, 8, device=device), torch.ones(6, 8, device=device)
    dy = torch.ones(4, 6, device=device)
    whole = BlockLayer(2, 2, 2, wanted=True, dw_dtype=torch.float32)
    saved = ops.block_linear_forward(x, w, None, whole.pack())[1:3]
    for args, text in (
        ((dy, *saved, None, None), "expected w for"),
        ((dy, None, None, w, None), "expected x for"),
        ((dy, saved[0], None, w, None), "expected x_columns_scales for"),
        ((dy, *saved, w.t(), None), r"expected w \(6, 8\)"),
    ):
        with pytest.raises(ValueError, match=f"linear_backward: {text}"):
            ops.block_linear_backward(*args, 8, whole.pack())


@named
def test_errors_of_a_weight_quantized_beforehand(device: str, recipe: str) -> None:
    """Another weight's, without its scales, for a product in bf16: refused, not read."""
    skip_where_it_does_not_run(recipe, device)
    made = nf.RECIPES[recipe]
    x, w, _, dy = tensors(16, 160, 300, torch.float32, device)
    rows, columns = held(w, made)
    layer = BlockLayer.unpack(made.settings)
    plain, dx = layer.pack(), layer._replace(wanted=True).pack()
    others = [held(t, made) for t in (w[:100], w[:, :100], w.t())]
    short = [(codes, scales[:-1]) for codes, scales in (rows, columns)]
    for w_rows in (
        *(o[0] for o in others),
        rows[:1],
        short[0],
        (rows[0].view(torch.uint8), rows[1]),
    ):
        with pytest.raises(ValueError, match="linear: expected w_rows"):
            ops.block_linear_forward(x, w, None, plain, *w_rows)
    for w_columns in (*(o[1] for o in others), columns[:1], short[1]):
        with pytest.raises(ValueError, match="linear_backward: expected w_columns"):
            ops.block_linear_backward(dy, None, None, None, None, 160, dx, *w_columns)
    in_bf16 = nf.BlockRecipe("bf16", "bf16", "bf16", "bf16").settings
    text = "expected no quantized w for a product in bf16"
    with pytest.raises(ValueError, match=text):
        ops.block_linear_forward(x, w, None, in_bf16, *rows)
    with pytest.raises(ValueError, match=text):
        wanted = BlockLayer.unpack(in_bf16)._replace(wanted=True).pack()
        ops.block_linear_backward(dy, None, None, w, None, 160, wanted, *columns)


# ---- the layer ----


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_layer_against_nn_linear(device: str, dtype: torch.dtype, recipe: nf.BlockRecipe) -> None:
    skip_where_it_does_not_run(recipe, device)
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
        results.append((y, leaf.grad, layer.weight.grad))
    for a, b, product in zip(*results, ("fprop", "dgrad", "wgrad"), strict=True):
        assert a.dtype == b.dtype == dtype and a.is_contiguous()
        assert_close_as(a, b, kind_of(recipe, product))
        if getattr(recipe, product) == "bf16":
            assert relative_error(a, b) < 6e-3
    assert relative_error(ours.bias.grad, theirs.bias.grad) < 5e-3


def storage(t: Tensor) -> int:
    return t.numel() * t.element_size()


@named
def test_what_is_saved(device: str, recipe: str) -> None:
    """x's columns, 1.03 byte an element, or x itself for bf16; w itself; nothing for what nobody
    needs."""
    skip_where_it_does_not_run(recipe, device)
    layer = nf.Linear(256, 128, device=device, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(512, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    in_bf16 = nf.RECIPES[recipe].wgrad == "bf16"
    saved = functools.partial(tensors_saved, layer, x)
    everything = saved()
    weight, data = layer.weight.data_ptr(), x.data_ptr()
    assert any(t.data_ptr() == weight for t in everything)
    own = [t for t in everything if t.data_ptr() not in (weight, data)]
    assert any(t.data_ptr() == data for t in everything) == in_bf16
    assert sum(map(storage, own)) <= (4 * 256 if in_bf16 else 1.04 * x.numel())
    only_w = saved(layer.weight)
    assert sum(storage(t) for t in only_w if t.data_ptr() != weight) <= 4 * 256
    assert all(t.data_ptr() != weight for t in saved(x))
    assert saved(x, layer.weight) == []
    with nf.reuse_weights(layer):
        reused = saved()
        held = layer.weight_cache._held[id(layer.weight)][3]
        assert any(t.data_ptr() == held.columns.codes.data_ptr() for t in reused)
        assert all(t.data_ptr() != weight for t in reused)


def test_recipe_fields_reach_the_operators(device: str) -> None:
    x, w, _, dy = tensors(64, 136, 96, torch.float32, device)
    x = x * torch.logspace(-3, 0, 136, device=device)  # scalings differ
    dy = dy * torch.logspace(-3, 0, 64, device=device)[:, None]

    def run(recipe: nf.BlockRecipe) -> list[Tensor]:
        leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = nf.linear(leaf_x, leaf_w, None, recipe)
        y.backward(dy)
        return [y.detach(), leaf_x.grad, leaf_w.grad]

    row = nf.BlockRecipe("base", "row", "row", "row")
    base = run(row)
    for scaling in ("bf16", "block_pow2", "mx"):
        for at, product in enumerate(("fprop", "dgrad", "wgrad")):
            made = {"fprop": "row", "dgrad": "row", "wgrad": "row", product: scaling}
            got = run(nf.BlockRecipe("other", **made))
            differs = [not torch.equal(a, b) for a, b in zip(base, got, strict=True)]
            assert differs == [i == at for i in range(3)], (scaling, product)
    got = run(nf.BlockRecipe("other", "row", "row", "row", "e5m2"))
    assert [not torch.equal(a, b) for a, b in zip(base, got, strict=True)] == [False, True, True]


@named
def test_matmul(device: str, recipe: str) -> None:
    skip_where_it_does_not_run(recipe, device)
    for a_shape, (k, n) in (((5, 48), (48, 33)), ((2, 30, 48), (48, 64)), ((480,), (480, 160))):
        a = torch.randn(a_shape, device=device, requires_grad=True)
        b = torch.randn(k, n, device=device, requires_grad=True)
        d = nf.matmul(a, b, recipe)
        assert_close_as(d, torch.matmul(a.detach(), b.detach()), "e5m2")
        g = torch.randn_like(d)
        da, db = torch.autograd.grad(d, (a, b), g)
        assert da.shape == a.shape and db.shape == b.shape
        assert relative_error(da, torch.autograd.grad(torch.matmul(a, b), a, g)[0]) < 0.09
        assert relative_error(db, torch.autograd.grad(torch.matmul(a, b), b, g)[0]) < 0.09


def test_convert(device: str) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32, device=device) for _ in range(8)))
    report = nf.convert(model, "mxfp8")
    assert report.converted == [str(i) for i in range(7)]  # the head alone is left
    assert all(type(layer) is nf.Linear for layer in model[:7])
    assert model[0].recipe is nf.RECIPES["mxfp8"] and "mxfp8" in str(report)
    with pytest.raises(ValueError, match="an FP4 recipe with inference=True, got fp8_block"):
        nf.convert(nn.Sequential(nn.Linear(8, 8)), "fp8_block", inference=True)


@named
def test_double_backward_is_refused(device: str, recipe: str) -> None:
    skip_where_it_does_not_run(recipe, device)
    x = torch.randn(4, 16, device=device, requires_grad=True)
    w = torch.randn(16, 16, device=device, requires_grad=True)
    y = nf.BlockLinearFunction.apply(x, w, None, nf.RECIPES[recipe])
    assert_same_bits(y, nf.linear(x, w, None, recipe))
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
            nf.linear(*args, recipe="fp8_row")


@named
def test_training_follows_bf16(device: str, recipe: str) -> None:
    """A small regression ends where nn.Linear's does."""
    skip_where_it_does_not_run(recipe, device)
    plain, ours = ends_of_training(recipe, device)
    assert ours < plain * 1.05 + 0.01
