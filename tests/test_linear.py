"""Layers of all recipes: as near to nn.Linear as their formats are, and used as it is.

What they save and call, dtypes, layouts, frozen operands, autocast, compiling, copies, training.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from conftest import (
    assert_all_ways_are_eager,
    assert_autocast_is_a_cast,
    assert_close_as,
    assert_same_bits,
    capture,
    ends_of_training,
    relative_error,
    skip_where_it_does_not_run,
    tensors_saved,
)
from every import (
    EVERY,
    NAMED,
    SOME,
    alone,
    every,
    named,
    run,
    some,
    tensors,
    tolerance_of,
    transposed,
)
from torch import Tensor, nn

import narrowfloat as nf
from narrowfloat import ops
from narrowfloat.recipe import GEMMS

FP8 = nf.RECIPES["fp8"]
# rows of a table of tests: those with a name, and what has ways of its own
SHARED = [*nf.RECIPES.values(), *(r for r in SOME if r not in NAMED)]
WAYS = [r for r in EVERY if r.name in ("bf16 dw", "nothing", "dy after bf16", "square and not")]
shared = pytest.mark.parametrize("recipe", SHARED, ids=str)

# ---- what is computed ----


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_layer_against_nn_linear(device: str, dtype: torch.dtype, recipe: nf.Recipe) -> None:
    """In fp64, of the same weights: y, dx and dw, each within its GEMM's formats; db exact."""
    skip_where_it_does_not_run(recipe, device)
    ours = nf.Linear(160, 96, device=device, dtype=dtype, recipe=recipe)
    theirs = nn.Linear(160, 96, device=device, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 40, 160, device=device).to(dtype)
    g = torch.randn(4, 40, 96, device=device).to(dtype)
    results = []
    for layer, of in ((ours, dtype), (theirs, torch.float64)):
        leaf = x.detach().to(of).requires_grad_()
        y = layer(leaf)
        y.backward(g.to(of))
        results.append((y, leaf.grad, layer.weight.grad))
    for a, b, name in zip(*results, GEMMS, strict=True):
        assert a.dtype == dtype and a.is_contiguous()
        kind = tolerance_of(getattr(recipe, name), name != "fprop")
        if kind is None:
            assert relative_error(a, b) < 6e-3, name
        else:
            assert_close_as(a, b, kind, what=name)
            assert relative_error(a, b) > 6e-3, f"{name} is not quantized"
    assert ours.bias.grad.dtype == dtype
    assert relative_error(ours.bias.grad, theirs.bias.grad) < 5e-3


def assert_is_its_gemms(
    got: list[Tensor | None], of: tuple, recipe: nf.Recipe, device: str, needs: str = "xwb"
) -> None:
    """y, dx and dw of a layer are those of the layer that has this GEMM alone."""
    wants = [run(*of, alone(recipe, gemm)) for gemm in (*GEMMS, "wgrad")]
    for at, (a, name) in enumerate(zip(got, ("y", "dx", "dw", "db"), strict=True)):
        want = wants[at][at]
        if want is None or name != "y" and name[1] not in needs:
            assert a is None, name
        elif name == "db":  # on a GPU each family has its own order of the sum
            assert relative_error(a, want) < (2e-3 if device == "cuda" else 1e-6)
        else:
            assert_same_bits(a, want, name)


@every
@pytest.mark.parametrize("m, k, n", [(33, 100, 72), (1, 16, 16), (64, 767, 2)])
def test_a_layer_is_its_gemms(device: str, m: int, k: int, n: int, recipe: nf.Recipe) -> None:
    """Whatever stands beside a GEMM; without gradients too."""
    skip_where_it_does_not_run(recipe, device)
    of = tensors(m, k, n, device)
    got = run(*of, recipe)
    assert_is_its_gemms(got, of, recipe, device)
    with torch.no_grad():
        assert_same_bits(nf.linear(*of[:3], recipe), got[0])


@pytest.mark.gpu
@every
@pytest.mark.parametrize("m, k, n", [(200, 520, 136), (64, 767, 2)])
def test_a_larger_layer_is_its_gemms(cuda: str, m: int, k: int, n: int, recipe: nf.Recipe) -> None:
    skip_where_it_does_not_run(recipe, cuda)
    of = tensors(m, k, n, cuda)
    assert_is_its_gemms(run(*of, recipe), of, recipe, cuda)


@some
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_and_layouts(device: str, dtype: torch.dtype, recipe: nf.Recipe) -> None:
    """Operands of several dtypes in one call; gradients have their tensors'."""
    skip_where_it_does_not_run(recipe, device)
    x, w, bias, dy = tensors(48, 96, 80, device, dtype)
    across = transposed(x, w, dy)
    for of in ((x, w, bias, dy), (across[0], across[1].float(), bias.float(), across[2])):
        got = run(*of, recipe)
        assert_is_its_gemms(got, of, recipe, device)
        assert got[0].is_contiguous()
        for t, like in zip(got, (x, *of[:3]), strict=True):
            assert t.dtype == like.dtype


@every
def test_layouts_do_not_matter(device: str, recipe: nf.Recipe) -> None:
    skip_where_it_does_not_run(recipe, device)
    x, w, bias, dy = tensors(24, 48, 40, device, torch.bfloat16)
    across = transposed(x, w, dy)
    got, want = run(x, w, bias, dy, recipe), run(across[0], across[1], bias, across[2], recipe)
    for a, b, name in zip(got, want, ("y", "dx", "dw"), strict=False):
        assert_same_bits(a, b, name)


@every
def test_frozen_operands(device: str, recipe: nf.Recipe) -> None:
    """What needs no gradient gets none, and changes nothing of the others."""
    skip_where_it_does_not_run(recipe, device)
    of = tensors(20, 32, 24, device)
    want = run(*of, recipe)
    for needs in ("x", "w", "b", "xw", "xb", "wb", ""):
        got = run(*of, recipe, needs)
        assert_same_bits(got[0], want[0], "y")
        for a, b, name in zip(got[1:], want[1:], "xwb", strict=True):
            if name not in needs:
                assert a is None
            elif name == "b" and device == "cuda":
                assert relative_error(a, b) < 2e-3
            else:
                assert_same_bits(a, b, f"{name} of {needs}")


@every
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (2, 3, 64), (64,)])
def test_batches(device: str, shape: tuple[int, ...], recipe: nf.Recipe) -> None:
    """Any number of leading dimensions: the rows of the flattened one."""
    skip_where_it_does_not_run(recipe, device)
    _, w, bias, _ = tensors(1, 64, 48, device)
    x, dy = torch.randn(shape, device=device), torch.randn(*shape[:-1], 48, device=device)
    got = run(x, w, bias, dy, recipe)
    flat = run(x.reshape(-1, 64), w, bias, dy.reshape(-1, 48), recipe)
    assert got[0].shape == dy.shape and got[1].shape == shape
    for a, b, like in zip(got, flat, (dy, x, w, bias), strict=True):
        assert_same_bits(a, b.view(like.shape))
    if x.numel() == 0:
        assert (got[2] == 0).all() and (got[3] == 0).all()


@named
def test_matmul(device: str, recipe: nf.Recipe) -> None:
    skip_where_it_does_not_run(recipe, device)
    kinds = [tolerance_of(getattr(recipe, g), g != "fprop") or "e4m3" for g in GEMMS]
    for a_shape, (k, n) in (((5, 48), (48, 33)), ((2, 30, 48), (48, 64)), ((480,), (480, 160))):
        a = torch.randn(a_shape, device=device, requires_grad=True)
        b = torch.randn(k, n, device=device, requires_grad=True)
        d = nf.matmul(a, b, recipe)
        assert_close_as(d, torch.matmul(a.detach(), b.detach()), kinds[0], spread=1.4)
        g = torch.randn_like(d)
        torch.manual_seed(3)
        da, db = torch.autograd.grad(d, (a, b), g)
        assert da.shape == a.shape and db.shape == b.shape
        ra, rb = torch.autograd.grad(torch.matmul(a, b), (a, b), g)
        assert_close_as(da, ra, kinds[1], spread=1.5)
        assert_close_as(db, rb, kinds[2], spread=1.5)
        if a.dim() == 2:
            assert_same_bits(d, nf.linear(a, b.t(), None, recipe))
    with pytest.raises(ValueError, match=r"matmul: expected b \[K,N\]"):
        nf.matmul(torch.ones(2, 3, 4, device=device), torch.ones(2, 4, 5, device=device), recipe)
    with pytest.raises(ValueError, match="with one K"):
        nf.matmul(torch.ones(3, 4, device=device), torch.ones(5, 4, device=device), recipe)


@named
def test_nonfinite_gradients_surface(device: str, recipe: nf.Recipe) -> None:
    skip_where_it_does_not_run(recipe, device)
    x, w, _, dy = tensors(40, 64, 48, device)
    dy[3, 5] = float("inf")
    _, dx, dw, _ = run(x, w, None, dy, recipe)
    assert not dx.isfinite().all() and not dw.isfinite().all()


def test_elements_and_accumulation_change_what_they_should(device: str) -> None:
    x, w, _, dy = tensors(64, 128, 96, device)

    def errors(recipe: nf.Recipe) -> list[float]:
        y, dx, dw, _ = run(x, w, None, dy, recipe)
        wants = (x @ w.t(), dy @ w, dy.t() @ x)
        return [relative_error(a, b) for a, b in zip((y, dx, dw), wants, strict=True)]

    gemm = nf.Gemm
    e4, e5, two = 0.05, 0.08, 0.1
    base = errors(nf.Recipe())
    assert base[0] < e4 < base[1] < e5
    all_e4 = errors(nf.Recipe("e4", gemm(), gemm("e4m3", "e4m3"), gemm("e4m3", "e4m3")))
    assert all(error < e4 for error in all_e4)
    x_e5 = errors(nf.Recipe("x5", gemm("e5m2", "e4m3"), gemm("e4m3", "e4m3"), gemm("e4m3", "e5m2")))
    assert e4 < x_e5[0] < two and x_e5[1] < e4 and e4 < x_e5[2] < two


def test_scalings_change_what_they_should(device: str) -> None:
    x, w, _, dy = tensors(64, 136, 96, device)
    x = x * torch.logspace(-3, 0, 136, device=device)  # scalings differ
    dy = dy * torch.logspace(-3, 0, 64, device=device)[:, None]

    def differs(recipe: nf.Recipe) -> list[bool]:
        got = run(x, w, None, dy, recipe)[:3]
        return [not torch.equal(a, b) for a, b in zip(base, got, strict=True)]

    base = run(x, w, None, dy, nf.block_recipe("base", "row", "row", "row"))[:3]
    for scaling in ("bf16", "block_pow2", "mx"):
        for at, gemm in enumerate(GEMMS):
            made = nf.block_recipe("other", **dict.fromkeys(GEMMS, "row") | {gemm: scaling})
            assert differs(made) == [i == at for i in range(3)], (scaling, gemm)
    e5m2 = nf.block_recipe("other", "row", "row", "row", "e5m2")
    assert differs(e5m2) == [False, True, True]


def test_fp4s_options_change_what_they_should(device: str) -> None:
    x, w, _, dy = tensors(64, 128, 96, device)
    base = run(x, w, None, dy, nf.fp4_recipe())[:3]
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
        got = run(x, w, None, dy, nf.fp4_recipe("other", **changed))[:3]  # type: ignore[arg-type]
        assert tuple(not torch.equal(a, b) for a, b in zip(base, got, strict=True)) == differs


@pytest.mark.gpu
@pytest.mark.parametrize("m, k, n", [(4096, 4096, 4096), (8192, 2048, 6144), (5000, 3000, 7000)])
def test_large_layers(cuda: str, m: int, k: int, n: int) -> None:
    """Past the size where quantizing takes two launches; mixed sizes and types in one call."""
    for w_dtype in (torch.bfloat16, torch.float32):
        x, w, bias, dy = tensors(m, k, n, cuda, torch.bfloat16)
        layer = nf.FP8Linear(k, n, device=cuda, dtype=w_dtype)
        with torch.no_grad():
            layer.weight.copy_(w)
            layer.bias.copy_(bias)
        x.requires_grad_()
        y = layer(x)
        y.backward(dy)
        xf, wf, dyf = x.detach().float(), w.float(), dy.float()
        assert_close_as(y, xf @ wf.t() + bias.float())
        assert_close_as(x.grad, dyf @ wf, "e5m2")
        assert_close_as(layer.weight.grad, dyf.t() @ xf, "e5m2")
        assert relative_error(layer.bias.grad, dyf.double().sum(0)) < 5e-3


# ---- what is saved and called ----


def storage(t: Tensor) -> int:
    return t.numel() * t.element_size()


# bytes an element of x, by how wgrad scales it
SAVED = {
    "tensor": 1.0,
    "row": 1.04,
    "block": 1.04,
    "block_pow2": 1.04,
    "mx": 1.04,
    "nvfp4": 0.57,
    "mxfp4": 0.57,
}


@pytest.mark.parametrize("recipe", [*EVERY, nf.RECIPES["fp8_delayed"]], ids=str)
def test_what_is_saved(device: str, recipe: nf.Recipe) -> None:
    """x's columns as wgrad has them, or x itself for bf16; w itself; nothing for what nobody
    needs; inside reuse_weights() the cached columns in place of w."""
    skip_where_it_does_not_run(recipe, device)
    layer = nf.Linear(256, 128, device=device, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(512, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    cast = recipe.wgrad.casts[1]
    saved = functools.partial(tensors_saved, layer, x)
    everything = saved()
    weight, data = layer.weight.data_ptr(), x.data_ptr()
    assert any(t.data_ptr() == weight for t in everything)
    assert any(t.data_ptr() == data for t in everything) == (cast is None)
    own = [t for t in everything if t.data_ptr() not in (weight, data)]
    per_element = 0 if cast is None else SAVED[cast.scaling]
    assert sum(map(storage, own)) <= per_element * x.numel() + 4 * 256 + 64
    assert all(t.numel() for t in everything)
    only_w = [t for t in saved(layer.weight) if t.data_ptr() != weight]
    assert len(only_w) == bool(recipe.keep_w) and sum(map(storage, only_w)) <= 4 * 256
    assert all(t.data_ptr() != weight for t in saved(x))
    assert saved(x, layer.weight) == []
    if not recipe.cached_spec:
        return
    with nf.reuse_weights(layer):
        reused = saved()
        cached = layer.weight_cache.get(layer.weight, layer.recipe)
        addresses = [t.data_ptr() for t in reused]
        if cached.columns is not None:
            assert cached.columns.codes.data_ptr() in addresses and weight not in addresses
        else:
            assert weight in addresses


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


@every
def test_calls(device: str, monkeypatch: pytest.MonkeyPatch, recipe: nf.Recipe) -> None:
    """One operator forward, one backward, and a draw where a gradient that is wanted rounds
    stochastically."""
    skip_where_it_does_not_run(recipe, device)
    of = tensors(32, 64, 48, device)
    for needs, draws in (
        ("xwb", recipe.draws_dx or recipe.draws_dw),
        ("xb", recipe.draws_dx),
        ("wb", recipe.draws_dw),
        ("b", False),
    ):
        calls = count_calls(monkeypatch, functools.partial(run, *of, recipe, needs))
        assert calls == ["linear_forward", *["draw_seed"] * draws, "linear_backward"], needs
    with torch.no_grad():
        calls = count_calls(monkeypatch, lambda: nf.linear(*of[:3], recipe))
    assert calls == ["linear_forward"]
    assert count_calls(monkeypatch, lambda: run(*of, recipe, "")) == ["linear_forward"]


@shared
def test_nothing_lives_on(device: str, recipe: nf.Recipe) -> None:
    """After the backward nothing of a call is held, without the garbage collector."""
    skip_where_it_does_not_run(recipe, device)
    layer = nf.Linear(64, 48, device=device, recipe=recipe)
    refs: list[weakref.ref[Tensor]] = []

    def note(t: Tensor) -> Tensor:
        if t is not layer.weight and t.data_ptr() != layer.weight.data_ptr():
            refs.append(weakref.ref(t))
        return t

    gc.collect()
    gc.disable()
    try:
        x = torch.randn(32, 64, device=device, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y = layer(x)
        y.sum().backward()
        del x, y
        assert refs and all(ref() is None for ref in refs)
    finally:
        gc.enable()


# ---- as nn.Linear is used ----


@shared
def test_autocast(device: str, recipe: nf.Recipe) -> None:
    skip_where_it_does_not_run(recipe, device)
    layer = nf.Linear(64, 32, device=device, recipe=recipe)
    assert_autocast_is_a_cast(layer, torch.randn(16, 64, device=device))


@pytest.mark.parametrize("recipe", [r for r in SHARED if r.delayed is None] + WAYS, ids=str)
def test_checkpoint_compile_and_modes_give_the_same_bits(device: str, recipe: nf.Recipe) -> None:
    skip_where_it_does_not_run(recipe, device)
    layer = nf.Linear(72, 48, device=device, recipe=recipe)
    x, g = torch.randn(33, 72, device=device), torch.randn(33, 48, device=device)
    assert_all_ways_are_eager(layer, x, g)


@pytest.mark.parametrize("recipe", NAMED, ids=str)
def test_any_token_count_compiled(device: str, recipe: nf.Recipe) -> None:
    skip_where_it_does_not_run(recipe, device)
    made = nf.Linear(64, 32, device=device, recipe=recipe)
    compiled = torch.compile(made, backend="aot_eager", dynamic=True, fullgraph=True)
    for m in (5, 16, 0, 1, 100):
        x = torch.randn(m, 64, device=device)
        results = []
        for call in (compiled, made):
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            torch.manual_seed(4)
            results.append((y, *torch.autograd.grad(y, (leaf, made.weight), torch.ones_like(y))))
        for got, want in zip(*results, strict=True):
            assert_same_bits(got, want, f"{m} tokens")


@pytest.mark.gpu
@every
def test_a_graphs_replay_is_the_call(cuda: str, recipe: nf.Recipe) -> None:
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


@shared
def test_copies_and_states(device: str, recipe: nf.Recipe) -> None:
    skip_where_it_does_not_run(recipe, device)
    layer = nf.Linear(32, 48, device=device, recipe=recipe)
    plain = nn.Linear(32, 48, device=device)
    plain.load_state_dict(layer.state_dict(), strict=True)
    layer.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(5, 32, device=device)
    assert layer.extra_repr().endswith(f"recipe={recipe}")
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is nf.Linear and twin.recipe == layer.recipe
        assert_same_bits(twin(x), layer(x))


def test_layers_with_a_recipe_of_their_own() -> None:
    for kind, recipe, other in ((nf.FP8Linear, "fp8", "mxfp8"), (nf.FP4Linear, "nvfp4", "mxfp4")):
        layer = kind(32, 48, bias=False, dtype=torch.bfloat16)
        assert isinstance(layer, nf.Linear) and layer.recipe is nf.RECIPES[recipe]
        assert layer.bias is None and layer.weight.dtype == torch.bfloat16
        assert layer.extra_repr().endswith(f"recipe={recipe}")
        assert str(kind(8, 8, recipe=other).recipe) == other
        twin = copy.deepcopy(layer)
        assert type(twin) is kind and twin.recipe == layer.recipe
        plain = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
        plain.load_state_dict(layer.state_dict(), strict=True)
        layer.load_state_dict(plain.state_dict(), strict=True)


@pytest.mark.parametrize("recipe", NAMED, ids=str)
def test_training_follows_bf16(device: str, recipe: nf.Recipe) -> None:
    """A small regression ends where nn.Linear's does, within what the forward's format allows."""
    skip_where_it_does_not_run(recipe, device)
    plain, ours = ends_of_training(recipe, device)
    fp8_alone = "fp4" not in recipe.kinds and not recipe.mixed
    assert ours < (plain * 1.05 + 0.01 if fp8_alone else plain * 1.1 + 0.02)


# ---- what is refused ----


@named
def test_double_backward_is_refused(device: str, recipe: nf.Recipe) -> None:
    """By whatever name the Function was called before there was one."""
    skip_where_it_does_not_run(recipe, device)
    x = torch.randn(4, 16, device=device, requires_grad=True)
    w = torch.randn(16, 16, device=device, requires_grad=True)
    for function in (nf.LinearFunction, nf.BlockLinearFunction, nf.MixedLinearFunction):
        y = function.apply(x, w, None, recipe)
        assert_same_bits(y, nf.linear(x, w, None, recipe))
        with pytest.raises(RuntimeError, match="differentiated once.*double backward"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


@named
def test_errors(device: str, recipe: nf.Recipe) -> None:
    skip_where_it_does_not_run(recipe, device)
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
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(error, match=text):
                nf.linear(*args, recipe=recipe)
    with pytest.raises(ValueError, match="out of"):
        nf.linear(x, w, None, "fp9")


# ---- fp8's two functions, each gradient alone ----


@pytest.mark.parametrize("masks", list(itertools.product((True, False), repeat=3)))
def test_seed_linear(device: str, masks: tuple[bool, bool, bool]) -> None:
    x, w, bias, dy = tensors(4 * 10, 96, 56, device, torch.bfloat16)
    x, dy = x.view(4, 10, 96), dy.view(4, 10, 56)
    y = nf.fp8_linear_forward(x, w, bias)
    assert y.shape == (4, 10, 56) and y.dtype == torch.bfloat16 and not y.requires_grad
    assert_close_as(y, nn.functional.linear(x, w, bias))
    grads = nf.fp8_linear_backward(dy, x, w, masks)
    refs = (
        dy @ w,
        dy.flatten(0, 1).t() @ x.flatten(0, 1),
        dy.flatten(0, 1).float().sum(0).bfloat16(),
    )
    layers = run(x, w, bias, dy, FP8)[1:]
    for at, (grad, ref, wanted) in enumerate(zip(grads, refs, masks, strict=True)):
        assert (grad is not None) == wanted
        if grad is not None:
            assert grad.dtype == torch.bfloat16
            assert_close_as(grad, ref, "e5m2")
            if at < 2:
                assert_same_bits(grad, layers[at], f"gradient {at}")
