"""Decides that layers whose products are of different kinds equal their parts, and save and call no
more than these need."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import (
    assert_all_ways_are_eager,
    assert_same_bits,
    capture,
    ends_of_training,
    relative_error,
    skip_where_it_does_not_run,
    tensors_saved,
)
from torch import Tensor, nn

import narrowfloat as nf
from narrowfloat import ops
from narrowfloat import recipe as recipes
from narrowfloat.mixed import MixedLayer

BF16 = nf.BlockRecipe("in bf16", "bf16", "bf16", "bf16")
ROWS = nf.BlockRecipe("rows of e4m3", "row", "row", "row")
WIDE_X = nf.Recipe(
    "x in e5m2", nf.Gemm("e5m2", "e4m3"), nf.Gemm("e4m3", "e4m3"), nf.Gemm("e4m3", "e5m2")
)
WIDE_W = nf.Recipe("w in e5m2", nf.Gemm("e4m3", "e5m2"), nf.Gemm("e4m3", "e5m2"), nf.Gemm())
NEAREST = nf.FP4Recipe("nearest", stochastic_dy=False, rotate_wgrad=False)


def without(*operands: str) -> nf.Recipe:
    """fp8 with these operands in bf16, "fprop.a" to "wgrad.b"."""
    gemms = {product: getattr(nf.Recipe(), product) for product in recipes.PRODUCTS}
    for operand in operands:
        product, side = operand.split(".")
        gemms[product] = dataclasses.replace(gemms[product], **{side: None})
    return nf.Recipe(f"without {' and '.join(operands)}", **gemms)


OPERANDS = [f"{product}.{side}" for product in recipes.PRODUCTS for side in "ab"]

NAMED = [n for n, r in nf.RECIPES.items() if isinstance(r, nf.MixedRecipe)] + ["fp8_bf16_wgrad"]
EVERY = [nf.RECIPES[name] for name in NAMED] + [
    nf.MixedRecipe("bf16 dw", "mxfp4", "nvfp4", "bf16"),
    nf.MixedRecipe("bf16 forward", "bf16", "fp8", "nvfp4"),
    nf.MixedRecipe("fp4 both ways", "nvfp4", "nvfp4", "mxfp4"),
    nf.MixedRecipe("fp4 backward", "mxfp8", "nvfp4", "nvfp4"),
    nf.MixedRecipe("columns of the forward", "nvfp4", "fp8", NEAREST),
    nf.MixedRecipe("columns anew", "nvfp4", "nvfp4_four_over_six", "nvfp4_four_over_six"),
    nf.MixedRecipe("nearest dx", "fp8", NEAREST, "nvfp4"),
    nf.MixedRecipe("rows", "fp8_row", ROWS, "fp8_row"),
    nf.MixedRecipe("formats", "fp8", WIDE_X, WIDE_X),
    nf.MixedRecipe("formats of w", WIDE_W, "fp8", "fp8"),
    nf.MixedRecipe("dx", "fp8_block_pow2", "fp8", "mxfp8"),
    nf.MixedRecipe("one kind", "nvfp4", "nvfp4", "nvfp4"),
    nf.Recipe("bf16 dx", dgrad=nf.Gemm(None, None)),
    nf.Recipe("bf16 y", fprop=nf.Gemm(None, None)),
    nf.Recipe("bf16 alone", *[nf.Gemm(None, None)] * 3),
    nf.Recipe("fast", nf.Gemm("e4m3", "e4m3", "fast"), wgrad=nf.Gemm(None, None)),
    *(without(operand) for operand in OPERANDS),
    without("fprop.a", "wgrad.b"),  # x
    without("fprop.b", "dgrad.b"),  # w
    without("dgrad.a", "wgrad.a"),  # dy
    nf.MixedRecipe("x of fp4", without("fprop.a"), "nvfp4", without("wgrad.b")),
    nf.MixedRecipe("w among blocks", "mxfp8", without("dgrad.b"), "fp8_row"),
    nf.MixedRecipe("dy after bf16", "bf16", without("dgrad.a"), without("wgrad.a")),
]
every = pytest.mark.parametrize("recipe", EVERY, ids=str)
named = pytest.mark.parametrize("recipe", NAMED)
Mixed = nf.MixedRecipe | nf.Recipe


def parts(recipe: Mixed) -> list[nf.FP4Recipe | nf.BlockRecipe | nf.Recipe]:
    """The recipe of each product alone."""
    if isinstance(recipe, nf.MixedRecipe):
        found = [getattr(recipe, product) for product in recipes.PRODUCTS]
        return [
            parts(r)[at] if isinstance(r, nf.Recipe) and r.mix else r for at, r in enumerate(found)
        ]
    return [part(recipe, product) for product in recipes.PRODUCTS]


def part(recipe: nf.Recipe, product: str) -> nf.BlockRecipe | nf.Recipe:
    gemm, none = getattr(recipe, product), nf.Gemm(None, None)
    if gemm == none:
        return BF16
    if None in (gemm.a, gemm.b):
        return nf.Recipe("alone", **dict.fromkeys(recipes.PRODUCTS, none) | {product: gemm})
    return nf.Recipe("fast", nf.Gemm("e4m3", "e4m3", recipe.fprop.accumulate))


def run(
    x: Tensor, w: Tensor, bias: Tensor | None, dy: Tensor, recipe: Any, needs: str = "xwb"
) -> list[Tensor | None]:
    """y, dx, dw, db, with the same draw each time."""
    leaves = [
        None if t is None else t.detach().clone(memory_format=torch.preserve_format)
        for t in (x, w, bias)
    ]
    for leaf, name in zip(leaves, "xwb", strict=True):
        if leaf is not None:
            leaf.requires_grad_(name in needs)
    y = nf.linear(*leaves, recipe=recipe)
    if y.requires_grad:
        torch.manual_seed(7)
        y.backward(dy)
    return [y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)]


def tensors(
    m: int, k: int, n: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    x = torch.randn(m, k, device=device).to(dtype)
    w = (torch.randn(n, k, device=device) * 0.05).to(dtype)
    bias = torch.randn(n, device=device).to(dtype)
    dy = (torch.randn(m, n, device=device) * 1e-3).to(dtype)
    return x, w, bias, dy


def assert_is_its_parts(
    got: list[Tensor | None], of: tuple[Tensor, ...], recipe: Mixed, device: str, needs: str = "xwb"
) -> None:
    fprop, dgrad, wgrad = parts(recipe)
    wants = [run(*of, r) for r in (fprop, dgrad, wgrad, wgrad)]
    names = ("y", "dx", "dw", "db")
    for at, (a, want, name) in enumerate(zip(got, wants, names, strict=True)):
        if name != "y" and name[1] not in needs:
            assert a is None, name
        elif want[at] is None:
            assert a is None, name
        elif name == "db" and device == "cuda":  # each kind's own order of the sum
            assert relative_error(a, want[at]) < 2e-3
        else:
            assert_same_bits(a, want[at], name)


# ---- what is computed ----


@every
@pytest.mark.parametrize("m, k, n", [(33, 100, 72), (1, 16, 16), (64, 767, 2), (200, 520, 136)])
def test_a_layer_is_its_parts(device: str, m: int, k: int, n: int, recipe: Mixed) -> None:
    skip_where_it_does_not_run(recipe, device)
    of = tensors(m, k, n, device)
    assert_is_its_parts(run(*of, recipe), of, recipe, device)
    with torch.no_grad():
        assert_same_bits(nf.linear(*of[:3], recipe), run(*of, recipe)[0])


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_and_layouts(device: str, dtype: torch.dtype, recipe: Mixed) -> None:
    skip_where_it_does_not_run(recipe, device)
    x, w, bias, dy = tensors(48, 96, 80, device, dtype)
    across = tuple(t.t().contiguous().t() for t in (x, w, dy))
    for of in ((x, w, bias, dy), (across[0], across[1].float(), bias.float(), across[2])):
        got = run(*of, recipe)
        assert_is_its_parts(got, of, recipe, device)
        assert got[0].is_contiguous()
        for t, like in zip(got, (x, *of[:3]), strict=True):
            assert t.dtype == like.dtype


@every
@pytest.mark.parametrize("needs", ["x", "w", "b", "xw", "xb", "wb", ""])
def test_frozen_operands(device: str, needs: str, recipe: Mixed) -> None:
    skip_where_it_does_not_run(recipe, device)
    of = tensors(40, 64, 48, device)
    assert_is_its_parts(run(*of, recipe, needs), of, recipe, device, needs)


@every
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (2, 3, 64), (64,)])
def test_batches(device: str, shape: tuple[int, ...], recipe: Mixed) -> None:
    skip_where_it_does_not_run(recipe, device)
    _, w, bias, _ = tensors(1, 64, 48, device)
    x, dy = torch.randn(shape, device=device), torch.randn(*shape[:-1], 48, device=device)
    of = x, w, None, dy
    got = run(*of, recipe)
    assert got[0].shape == dy.shape and got[1].shape == shape
    assert_is_its_parts(got, of, recipe, device)
    if x.numel() == 0:
        assert (got[2] == 0).all() and (run(x, w, bias, dy, recipe)[3] == 0).all()


@named
def test_matmul_and_nonfinite(device: str, recipe: str) -> None:
    skip_where_it_does_not_run(recipe, device)
    a, b, _, _ = tensors(40, 64, 48, device)
    assert_same_bits(nf.matmul(a, b.t(), recipe), nf.linear(a, b, None, recipe))
    dy = torch.randn(40, 48, device=device)
    dy[3, 5] = float("inf")
    _, dx, dw, _ = run(a, b, None, dy, recipe)
    assert not dx.isfinite().all() and not dw.isfinite().all()


@every
def test_checkpoint_compile_and_modes_give_the_same_bits(device: str, recipe: Mixed) -> None:
    skip_where_it_does_not_run(recipe, device)
    layer = nf.Linear(72, 48, device=device, recipe=recipe)
    x, g = torch.randn(33, 72, device=device), torch.randn(33, 48, device=device)
    assert_all_ways_are_eager(layer, x, g)


@named
def test_any_token_count_compiled(device: str, recipe: str) -> None:
    skip_where_it_does_not_run(recipe, device)
    made = nf.Linear(64, 32, device=device, recipe=recipe)
    compiled = torch.compile(made, backend="aot_eager", dynamic=True, fullgraph=True)
    for m in (5, 16, 0, 1, 100):
        x = torch.randn(m, 64, device=device)
        results = []
        for call in (compiled, made):
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            results.append((y, *torch.autograd.grad(y, (leaf, made.weight), torch.ones_like(y))))
        for got, want in zip(*results, strict=True):
            assert_same_bits(got, want, f"{m} tokens")


@pytest.mark.gpu
@every
def test_a_graphs_replay_is_the_call(cuda: str, recipe: Mixed) -> None:
    """Forward and backward in one capture; stochastic rounding by the generator's seed."""
    skip_where_it_does_not_run(recipe, cuda)
    layer = nf.Linear(128, 96, device=cuda, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(80, 128, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(80, 96, device=cuda, dtype=torch.bfloat16)

    def call() -> tuple[Tensor, ...]:
        y = layer(x)
        return (y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), g))

    graph, results = capture(call)
    for seed in (1, 2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        torch.manual_seed(seed)
        want = call()
        torch.manual_seed(seed)
        graph.replay()
        for got, right in zip(results, want, strict=True):
            assert_same_bits(got, right, f"seed {seed}")


@named
def test_training_follows_bf16(device: str, recipe: str) -> None:
    """A small regression ends where nn.Linear's does, within what the forward's format allows."""
    skip_where_it_does_not_run(recipe, device)
    plain, ours = ends_of_training(recipe, device)
    assert ours < plain * 1.1 + 0.02


# ---- what it costs ----


def count_calls(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[str]:
    """Names of our operators, and draw_seed, in order."""
    seen: list[str] = []

    def noted(name: str, inner: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object) -> object:
            seen.append(name)
            return inner(*arguments)

        return wrapper

    with monkeypatch.context() as patch:
        for name, value in vars(ops).copy().items():
            if isinstance(value, ops.Operator) or name == "draw_seed":
                patch.setattr(ops, name, noted(name.removesuffix("_op"), value))
        call()
    return seen


CALLS = {
    "fp8_block_backward": "linear_forward block_quantize block_linear_backward",
    "nvfp4_mxfp8_backward": "fp4_linear_forward block_quantize block_linear_backward",
    "fp8_bf16_wgrad": "linear_forward linear_backward block_linear_backward",
    "bf16 dw": "fp4_linear_forward draw_seed fp4_linear_backward block_linear_backward",
    "bf16 forward": "block_linear_forward fp4_quantize draw_seed linear_backward "
    "fp4_linear_backward",
    "fp4 both ways": "fp4_linear_forward fp4_quantize draw_seed fp4_linear_backward "
    "fp4_linear_backward",
    "fp4 backward": "block_linear_forward fp4_quantize draw_seed fp4_linear_backward",
    "columns of the forward": "fp4_linear_forward linear_backward fp4_linear_backward",
    "columns anew": "fp4_linear_forward fp4_quantize draw_seed fp4_linear_backward",
    "nearest dx": "linear_forward fp4_quantize draw_seed fp4_linear_backward fp4_linear_backward",
    "rows": "block_linear_forward block_linear_backward block_linear_backward",
    "formats": "linear_forward quantize linear_backward",
    "formats of w": "linear_forward linear_backward",
    "dx": "block_linear_forward linear_backward block_linear_backward",
    "one kind": "fp4_linear_forward draw_seed fp4_linear_backward",
    "bf16 dx": "linear_forward block_linear_backward linear_backward",
    "bf16 y": "block_linear_forward quantize linear_backward",
    "bf16 alone": "block_linear_forward block_linear_backward",
    "fast": "linear_forward linear_backward block_linear_backward",
    "without fprop.a": "linear_forward quantize linear_backward",
    "without fprop.b": "linear_forward linear_backward",
    "without dgrad.a": "linear_forward linear_backward linear_backward",
    "without dgrad.b": "linear_forward linear_backward",
    "without wgrad.a": "linear_forward linear_backward linear_backward",
    "without wgrad.b": "linear_forward linear_backward",
    "without fprop.a and wgrad.b": "linear_forward linear_backward",
    "without fprop.b and dgrad.b": "linear_forward linear_backward",
    "without dgrad.a and wgrad.a": "linear_forward linear_backward",
    "x of fp4": "linear_forward draw_seed fp4_linear_backward linear_backward",
    "w among blocks": "block_linear_forward linear_backward block_linear_backward",
    "dy after bf16": "block_linear_forward quantize linear_backward",
}


@every
def test_calls(device: str, monkeypatch: pytest.MonkeyPatch, recipe: Mixed) -> None:
    """One operator forward, one for x's columns where the forward has none of that kind, one or two
    backward, one draw."""
    skip_where_it_does_not_run(recipe, device)
    of = tensors(32, 64, 48, device)
    calls = count_calls(monkeypatch, lambda: run(*of, recipe))
    assert calls == CALLS[recipe.name].split()
    forward, *rest = calls
    mix = recipe.mix
    alone = count_calls(monkeypatch, lambda: run(*of, recipe, "xb"))  # neither dw nor x's columns
    assert alone.count("draw_seed") == mix.draws_dx and len(alone) == 2 + mix.draws_dx
    assert count_calls(monkeypatch, lambda: run(*of, recipe, "b")) == [forward, rest[-1]]
    with torch.no_grad():
        assert count_calls(monkeypatch, lambda: nf.linear(*of[:3], recipe)) == [forward]


def storage(t: Tensor) -> int:
    return t.numel() * t.element_size()


SAVED = {"x": 0.0, "fp8": 1.0, "block": 1.04, "fp4": 0.57}  # bytes an element of x


@every
def test_what_is_saved(device: str, recipe: Mixed) -> None:
    """x's columns as wgrad has them, or x itself for bf16; w itself; nothing for what nobody
    needs."""
    skip_where_it_does_not_run(recipe, device)
    layer = nf.Linear(256, 128, device=device, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(512, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    mix = recipe.mix
    saved = functools.partial(tensors_saved, layer, x)
    everything = saved()
    weight, data = layer.weight.data_ptr(), x.data_ptr()
    assert any(t.data_ptr() == weight for t in everything)
    assert any(t.data_ptr() == data for t in everything) == (mix.columns == "x")
    own = [t for t in everything if t.data_ptr() not in (weight, data)]
    per_element = SAVED["x" if mix.columns == "x" else mix.wgrad]
    assert sum(map(storage, own)) <= per_element * x.numel() + 4 * 256 + 64
    assert all(t.numel() for t in everything)
    only_w = [t for t in saved(layer.weight) if t.data_ptr() != weight]
    assert len(only_w) == mix.keeps_w and sum(map(storage, only_w)) <= 4 * 256
    assert all(t.data_ptr() != weight for t in saved(x))
    assert saved(x, layer.weight) == []


# ---- layers and models ----


def eight(device: str) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32, device=device) for _ in range(8)))


@named
def test_convert(device: str, recipe: str) -> None:
    """The last blocks stay as they are where a product is in FP4."""
    model = eight(device)
    report = nf.convert(model, recipe, head=True)
    kept = 2 if "fp4" in recipe else 0
    assert report.converted == [str(i) for i in range(8 - kept)]
    assert all(type(layer) is nf.Linear for layer in model[: 8 - kept])
    assert model[0].recipe is nf.RECIPES[recipe] and recipe in str(report)
    backward = nf.MixedRecipe("fp4 backward alone", "fp8", "mxfp4", "bf16")
    assert len(nf.plan(eight(device), backward, head=True).converted) == 6


def test_convert_for_inference(device: str) -> None:
    """A layer whose forward is in FP4 is packed as that forward; another is refused."""
    model = eight(device)
    nf.convert(model, "nvfp4_mxfp8_backward", head=True, keep_last=0)
    x = torch.randn(8, 32, device=device)
    want = model[0](x).detach()
    report = nf.convert(model, "nvfp4", inference=True, head=True, keep_last=0)
    assert len(report.converted) == 8
    assert model[0].recipe == nf.FP4Recipe(weights_2d=False)
    assert relative_error(model[0](x), want) < 0.15  # x is not quantized there
    fresh = eight(device)
    nf.convert(fresh, "nvfp4_mxfp8_backward", inference=True)
    assert isinstance(fresh[0], nf.PackedFP4Linear)
    with pytest.raises(ValueError, match="an FP4 recipe with inference=True, got fp8_block_back"):
        nf.convert(eight(device), "fp8_block_backward", inference=True)


@named
def test_double_backward_is_refused(device: str, recipe: str) -> None:
    skip_where_it_does_not_run(recipe, device)
    x = torch.randn(4, 16, device=device, requires_grad=True)
    w = torch.randn(16, 16, device=device, requires_grad=True)
    y = nf.MixedLinearFunction.apply(x, w, None, nf.RECIPES[recipe])
    assert_same_bits(y, nf.linear(x, w, None, recipe))
    with pytest.raises(RuntimeError, match="differentiated once.*double backward"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


# ---- recipes ----


def test_names() -> None:
    assert NAMED == ["fp8_block_backward", "nvfp4_mxfp8_backward", "fp8_bf16_wgrad"]
    for name in NAMED:
        recipe = nf.RECIPES[name]
        assert recipes.get(name) is recipe and str(recipe) == recipe.name == name
        assert nf.Linear(16, 16, recipe=name).recipe is recipe
    mixed = nf.MixedRecipe("m", "nvfp4", nf.RECIPES["mxfp8"], "bf16")
    assert mixed.fprop is nf.RECIPES["nvfp4"] and mixed.dgrad is nf.RECIPES["mxfp8"]
    assert mixed.wgrad == nf.BlockRecipe("bf16", "bf16", "bf16", "bf16")
    of_mixed = nf.MixedRecipe("of mixed", "nvfp4_mxfp8_backward", mixed, mixed)
    assert of_mixed.fprop == nf.FP4Recipe(weights_2d=False)  # its product, as any recipe's
    assert of_mixed.dgrad is nf.RECIPES["mxfp8"]
    assert nf.RECIPES["fp8"].mix is None
    assert nf.RECIPES["fp8_bf16_wgrad"] == nf.Recipe("fp8_bf16_wgrad", wgrad=nf.Gemm(None, None))


def test_mixed_recipes_are_values() -> None:
    mine = nf.MixedRecipe("mine", "nvfp4", "mxfp8", "bf16")
    assert mine == nf.MixedRecipe("mine", nf.FP4Recipe(), nf.RECIPES["mxfp8"], "bf16")
    assert mine != nf.MixedRecipe("mine", "nvfp4", "mxfp8", "fp8")
    for recipe in (mine, nf.RECIPES["fp8_bf16_wgrad"]):
        twin = pickle.loads(pickle.dumps(recipe))
        assert copy.deepcopy(recipe) == twin == recipe and twin.mix == recipe.mix
        assert type(twin.mix) is MixedLayer and hash(twin) == hash(recipe)
    changed = dataclasses.replace(mine, wgrad="mxfp8")
    assert changed.mix == nf.MixedRecipe("m", "nvfp4", "mxfp8", "mxfp8").mix
    with pytest.raises(dataclasses.FrozenInstanceError):
        mine.fprop = "fp8"  # type: ignore[misc]
    assert "mix" not in repr(mine).replace("mine", "").replace("MixedRecipe", "")


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: nf.MixedRecipe("m", "fp4", "fp8", "fp8"), "^MixedRecipe: .*fprop.*'bf16'.*'fp4'"),
        (lambda: nf.MixedRecipe("m", "fp8", None, "fp8"), "^MixedRecipe: .*dgrad.*None"),
        (lambda: nf.MixedRecipe("m", "fp8", "fp8", []), r"^MixedRecipe: .*wgrad.*\[\]"),
        (lambda: nf.MixedRecipe("m", "fp8_delayed", "fp8", "fp8"), "fprop with scales from the te"),
        (lambda: nf.Gemm("e4m3", None, "fast"), "^Gemm: expected accumulate='exact'.*'e4m3' and"),
        (lambda: nf.Gemm(None, "e5m2", "fast"), "^Gemm: expected accumulate='exact'.*None and 'e5"),
        (lambda: nf.Gemm(None, None, "fast"), "^Gemm: expected accumulate='exact'.*None and None"),
        (lambda: nf.Gemm(None, "e3m4"), "^Gemm: expected a format out of.*'e3m4'"),
        (lambda: nf.Gemm(None, None, "some"), "^Gemm: expected accumulate out of"),
        (
            lambda: nf.Recipe(wgrad=nf.Gemm(None, None), delayed=nf.Delayed()),
            "^Recipe: expected formats for all operands .*got None in wgrad",
        ),
        (
            lambda: nf.Recipe(dgrad=nf.Gemm(None, "e4m3"), delayed=nf.Delayed()),
            "^Recipe: expected formats for all operands .*got None in dgrad",
        ),
        (lambda: nf.Recipe(fprop=nf.Gemm("e5m2", "e4m3")), "one format for x"),
    ],
)
def test_refusals(made: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        made()


def test_errors(device: str) -> None:
    x, w = torch.ones(4, 8, device=device), torch.ones(6, 8, device=device)
    for args, error, text in (
        ((x, torch.ones(6, 7, device=device)), ValueError, "with one K, got"),
        ((x, w, torch.ones(5, device=device)), ValueError, r"expected bias \[6\]"),
        ((x.double(), w), TypeError, "float64"),
        ((x, w.to("meta")), ValueError, "expected w on"),
    ):
        with pytest.raises(error, match=text):
            nf.linear(*args, recipe="nvfp4_mxfp8_backward")
    with pytest.raises(ValueError, match=r"MixedLinearFunction: expected .* got fp8 \(LinearFu"):
        nf.MixedLinearFunction.apply(x, w, None, nf.RECIPES["fp8"])
