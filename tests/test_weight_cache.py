"""reuse_weights() quantizes each weight once, gives the bits of a run without it, and never reuses
what no longer holds."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from conftest import EVERY_RECIPE, assert_same_bits, skip_where_it_does_not_run
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

import narrowfloat as nf
from narrowfloat import spec, weight_cache

OTHER_FORMAT = nf.Recipe(  # of w
    "mine", nf.Gemm("e4m3", "e5m2"), nf.Gemm("e4m3", "e5m2"), nf.Gemm("e4m3", "e4m3")
)
CACHED = [  # each scaling in each GEMM, several kinds, and GEMMs that read the weight itself
    *EVERY_RECIPE,
    nf.block_recipe("dx in bf16", "row", "bf16", "mx"),
    nf.block_recipe("y in bf16", "bf16", "block_pow2", "bf16"),
    nf.mixed_recipe("two formats of w", "fp8", OTHER_FORMAT, "fp8"),
    nf.mixed_recipe("y by row", "fp8_row", "fp8", "mxfp8"),
    nf.mixed_recipe("dx in FP4", "fp8", nf.fp4_recipe(weights_2d=False), "fp8"),
    nf.Recipe("dx in bf16 of fp8", dgrad=nf.Gemm(None, None)),
    nf.Recipe("x in bf16", fprop=nf.Gemm(None, "e4m3"), wgrad=nf.Gemm("e5m2", None)),
    nf.Recipe("dy in bf16", dgrad=nf.Gemm(None, "e4m3"), wgrad=nf.Gemm(None, "e4m3")),
    nf.Recipe("w in bf16 for dx", dgrad=nf.Gemm("e5m2", None)),
]
CACHED = [recipe for recipe in CACHED if recipe.cached_spec]
# What GEMMs in FP4, with delayed scaling or with w in bf16 read.
NOT_CACHED = [
    *(recipe for recipe in EVERY_RECIPE if not recipe.cached_spec),
    nf.Recipe("bf16", *[nf.Gemm(None, None)] * 3),
]
each = pytest.mark.parametrize("recipe", CACHED, ids=str)


def test_which_recipes_are_cached() -> None:
    assert {str(recipe) for recipe in NOT_CACHED} == {
        *("nvfp4", "mxfp4", "nvfp4_four_over_six", "nvfp4_unbiased", "fp8_delayed"),
        *("w in bf16", "bf16"),
    }
    for recipe, rows, columns in (
        ("fp8", True, True),
        ("nvfp4_mxfp8_backward", False, True),
        ("dx in FP4", True, False),
        ("dx in bf16", True, False),
        ("y in bf16", False, True),
        ("w in bf16 for dx", True, False),
    ):
        (how,) = (spec.Quantize.unpack(r.cached_spec) for r in CACHED if r.name == recipe)
        assert (how.want_rows, how.want_columns) == (rows, columns), recipe
        assert (how.rows is not None, how.columns is not None) == (rows, columns), recipe


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that were quantized ahead of their GEMMs: what reuse_weights()
    does, since outside it they are quantized inside the layer's operators."""
    shapes: list[tuple[int, ...]] = []
    quantize = weight_cache.quantized

    def counting(w: Tensor, how: int) -> weight_cache.CachedWeight:
        shapes.append(tuple(w.shape))
        return quantize(w, how)

    monkeypatch.setattr(weight_cache, "quantized", counting)
    return shapes


def model_on(
    device: str, dtype: torch.dtype = torch.float32, recipe: str | nf.Recipe = "fp8"
) -> nn.Sequential:
    skip_where_it_does_not_run(recipe, device)
    torch.manual_seed(1)
    return nn.Sequential(
        nf.Linear(32, 48, recipe=recipe),
        nn.ReLU(),
        nf.Linear(48, 32, bias=False, recipe=recipe),
        nn.ReLU(),
    ).to(device, dtype)


def batch(device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(24, 32, device=device).to(dtype)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """[y, dx, every dw and db]; leaves no gradients behind."""
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    torch.manual_seed(2)  # of stochastic rounding
    (y.float() ** 2).mean().backward()
    found = [y.detach(), leaf.grad, *[p.grad for p in model.parameters() if p.requires_grad]]
    model.zero_grad(set_to_none=True)
    assert all(t is not None for t in found)
    return found


def assert_all_same(a: list[Tensor], b: list[Tensor]) -> None:
    for one, other in zip(a, b, strict=True):
        assert_same_bits(one, other)


def caches(model: nn.Module) -> set[object]:
    return {m.weight_cache for m in model.modules() if isinstance(m, nf.Linear)}


# ---- once, and the same bits ----


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_once_a_weight_and_the_same_bits(device, dtype, recipe, quantized):
    model, batches = model_on(device, dtype, recipe), [batch(device, dtype) for _ in range(3)]
    outside = [step(model, x) for x in batches]
    assert quantized == []
    with nf.reuse_weights(model) as same:
        assert same is model
        inside = [step(model, x) for x in batches]
    assert quantized == [(48, 32), (32, 48)]
    for a, b in zip(inside, outside, strict=True):
        assert_all_same(a, b)
    assert caches(model) == {None}
    assert_all_same(step(model, batches[0]), outside[0])
    assert len(quantized) == 2


def test_accumulated_gradients_are_the_same(device, quantized):
    model, batches = model_on(device), [batch(device) for _ in range(4)]

    def accumulate() -> list[Tensor]:
        for x in batches:
            model(x).square().mean().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found

    outside = accumulate()
    with nf.reuse_weights(model):
        assert_all_same(accumulate(), outside)
    assert len(quantized) == 2


@each
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_without_gradients_first(device, mode, recipe, quantized):
    """What is cached by it serves the training that follows."""
    model, x = model_on(device, recipe=recipe), batch(device)
    outside = step(model, x)
    with nf.reuse_weights(model):
        with mode():
            y = model(x)
        assert_all_same(step(model, x), outside)
    assert_same_bits(y, outside[0])
    assert len(quantized) == 2


@each
def test_frozen_weights(device, recipe, quantized):
    model, x = model_on(device, recipe=recipe), batch(device)
    model[0].weight.requires_grad_(False)
    outside = step(model, x)
    with nf.reuse_weights(model):
        for _ in range(2):
            assert_all_same(step(model, x), outside)
    assert len(quantized) == 2


def test_autocast(device, quantized):
    model, x = model_on(device), batch(device)
    with torch.autocast(device, torch.bfloat16):
        outside = step(model, x)
        with nf.reuse_weights(model):
            for _ in range(2):
                assert_all_same(step(model, x), outside)
    assert outside[0].dtype == torch.bfloat16 and len(quantized) == 2


def test_a_recipe_with_other_formats(device, quantized):
    model, x = nf.Linear(32, 32, recipe=OTHER_FORMAT, device=device), batch(device)
    outside = step(model, x)
    with nf.reuse_weights(model):
        for _ in range(2):
            assert_all_same(step(model, x), outside)
        others = [nf.RECIPES[name] for name in ("fp8", "fp8_row", "fp8_block_pow2", "fp8")]
        inside = []
        for model.recipe in others:  # w otherwise: what is cached does not fit
            inside.append(step(model, x))
    assert len(quantized) == 5
    for model.recipe, got in zip(others, inside, strict=True):
        assert_all_same(got, step(model, x))


def test_tied_weights_are_quantized_once(device, quantized):
    model = nn.Sequential(nf.FP8Linear(32, 32), nf.FP8Linear(32, 32)).to(device)
    model[1].weight = model[0].weight
    x = batch(device)
    outside = step(model, x)
    with nf.reuse_weights(model):
        for _ in range(2):
            assert_all_same(step(model, x), outside)
    assert quantized == [(32, 32)]


@pytest.mark.parametrize("recipe", NOT_CACHED, ids=str)
def test_what_is_not_cached_is_quantized_anew(device, recipe, quantized):
    """And changes nothing, beside a layer whose weight is cached too."""
    skip_where_it_does_not_run(recipe, device)
    layers = (nf.Linear(32, 32, device=device, recipe=r) for r in (recipe, "fp8"))
    model, x = nn.Sequential(*layers), batch(device)
    with torch.no_grad():
        want = model(x)
        with nf.reuse_weights(model):
            for _ in range(2):
                assert_same_bits(model(x), want)
            assert list(model[0].weight_cache._cached) == [id(model[1].weight)]
            model[0].weight.mul_(2)
            changed = model(x)
        assert_same_bits(changed, model(x))
        assert not torch.equal(changed, want)
    assert quantized == [(32, 32)]


# ---- what drops ----


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def adamw_fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


class ThroughData(torch.optim.Optimizer):
    """Writes so that PyTorch counts no version: only the step itself can be noticed."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(0.5 * p.grad.data)


def through_data(model: nn.Module) -> torch.optim.Optimizer:
    return ThroughData(model.parameters())


@pytest.mark.parametrize("make", [sgd, adamw, adamw_fused, through_data])
def test_an_optimizer_step_drops(device, make, quantized):
    model, x = model_on(device), batch(device)
    optimizer = make(model)
    with nf.reuse_weights(model):
        for round in range(1, 4):
            for _ in range(2):
                inside = step(model, x)
            assert len(quantized) == 2 * round
            assert_all_same(inside, step(copy.deepcopy(model), x))
            model(x).square().mean().backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            assert model[0].weight_cache._cached == {}  # freed at once, not at the next forward
    assert_all_same(step(model, x), step(copy.deepcopy(model), x))


def by_add(model: nn.Module) -> None:
    model[0].weight.add_(0.25)


def by_a_view(model: nn.Module) -> None:
    model[0].weight.view(-1)[3:5].mul_(9)


def by_foreach(model: nn.Module) -> None:
    torch._foreach_mul_([model[0].weight], 1.5)


def by_state(model: nn.Module) -> None:
    model[0].load_state_dict({n: t * 2 for n, t in model[0].state_dict().items()})


def by_assigned_state(model: nn.Module) -> None:
    state = {n: nn.Parameter(t * 2) for n, t in model[0].state_dict().items()}
    model[0].load_state_dict(state, assign=True)


def by_a_new_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight * 2)


def by_new_data(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight * 2


CHANGES = [by_add, by_a_view, by_foreach, by_state, by_assigned_state, by_a_new_parameter]
CHANGES += [by_new_data]


@each
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_changed_weight_is_quantized_anew(device, change, recipe, quantized):
    model, x = model_on(device, recipe=recipe), batch(device)
    with nf.reuse_weights(model):
        before = step(model, x)
        with torch.no_grad():
            change(model)
        inside = [step(model, x), step(model, x)]
        assert quantized == [(48, 32), (32, 48), (48, 32)]  # the other layer's is still cached
    outside = step(model, x)
    assert not torch.equal(outside[0], before[0])
    for each in inside:
        assert_all_same(each, outside)


def reads_the_weight(recipe: nf.Recipe) -> bool:
    """Whether dx has the weight itself, as nn.Linear's has: a change before the backward is then
    PyTorch's error."""
    return not spec.Quantize.unpack(recipe.cached_spec).want_columns


@pytest.mark.parametrize("recipe", [r for r in CACHED if not reads_the_weight(r)], ids=str)
def test_a_graph_goes_on_with_the_weight_it_saw(device, recipe):
    """Backward after the weight changed and was quantized anew: the old weight's gradients."""
    skip_where_it_does_not_run(recipe, device)
    made = nf.Linear(32, 48, device=device, recipe=recipe)
    x = batch(device).requires_grad_()
    g = torch.randn(24, 48, device=device)

    def gradients(y: Tensor, **how: bool) -> list[Tensor]:
        torch.manual_seed(3)  # of stochastic rounding
        return list(torch.autograd.grad(y, [x, made.weight, made.bias], g, **how))

    old = gradients(made(x))
    with nf.reuse_weights(made):
        y = made(x)
        with torch.no_grad():
            made.weight.mul_(-3)
        new = gradients(made(x))
        got = gradients(y, retain_graph=True)
        again = gradients(y)
    assert_all_same(got, old)
    assert_all_same(again, old)
    assert not torch.equal(new[0], old[0])


@each
@pytest.mark.parametrize("changed", [False, True])
def test_backward_after_the_context_was_left(device, changed, recipe):
    skip_where_it_does_not_run(recipe, device)
    made = nf.Linear(32, 48, device=device, recipe=recipe)
    x = batch(device).requires_grad_()
    g = torch.randn(24, 48, device=device)

    def gradients(y: Tensor) -> list[Tensor]:
        torch.manual_seed(3)  # of stochastic rounding
        return list(torch.autograd.grad(y, [x, made.weight, made.bias], g))

    right = gradients(made(x))
    with nf.reuse_weights(made):
        y = made(x)
    if changed:
        with torch.no_grad():
            made.weight.zero_()
    for _ in range(4):  # what is handed out now must not be what the graph reads
        torch.full((64, 64), 0xFF, dtype=torch.uint8, device=device)
    if changed and reads_the_weight(recipe):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(g)
        return
    assert_all_same(gradients(y), right)


@each
@pytest.mark.parametrize(("m", "k", "n"), [(3, 0, 8), (3, 8, 0), (0, 8, 8)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_weights_and_batches_without_elements(device, recipe, m, k, n):
    skip_where_it_does_not_run(recipe, device)
    made = nf.Linear(k, n, device=device, recipe=recipe)
    x = torch.randn(m, k, device=device)
    outside = step(made, x)
    with nf.reuse_weights(made):
        assert_all_same(step(made, x), outside)


# ---- the context ----


def test_nested(device, quantized):
    """An inner context, of the model or a part, shares and does not end the outer one."""
    model, x = model_on(device), batch(device)
    with nf.reuse_weights(model):
        model(x)
        for inner in (model, model[0]):
            with nf.reuse_weights(inner):
                model(x)
            model(x)
        assert len(quantized) == 2
        assert len(caches(model)) == 1 and None not in caches(model)
    assert caches(model) == {None}
    with nf.reuse_weights(model[0]):
        model(x)
        with nf.reuse_weights(model):
            model(x)
            model(x)
        assert len(quantized) == 4
        assert model[0].weight_cache is not None and model[2].weight_cache is None
    assert caches(model) == {None}


def test_left_in_another_order(device):
    model, x = model_on(device), batch(device)
    outside = step(model, x)
    first, second = nf.reuse_weights(model), nf.reuse_weights(model)
    first.__enter__()
    second.__enter__()
    model(x)
    first.__exit__(None, None, None)
    assert_all_same(step(model, x), outside)
    second.__exit__(None, None, None)
    assert caches(model) == {None}
    assert_all_same(step(model, x), outside)


def test_an_exception_leaves_nothing(device, quantized):
    model, x = model_on(device), batch(device)
    before = len(hooks)
    with pytest.raises(KeyError), nf.reuse_weights(model):
        model(x)
        cache = model[0].weight_cache
        raise KeyError
    assert caches(model) == {None} and len(hooks) == before
    assert cache.open == 0 and cache._cached == {}
    with nf.reuse_weights(model):
        model(x)
    assert len(quantized) == 4 and len(hooks) == before


def test_two_models(device, quantized):
    one, two, x = model_on(device), model_on(device), batch(device)
    with torch.no_grad():
        two[0].weight.add_(1)
    outside = [step(one, x), step(two, x)]
    with nf.reuse_weights(one), nf.reuse_weights(two):
        for _ in range(2):
            assert_all_same(step(one, x), outside[0])
            assert_all_same(step(two, x), outside[1])
        assert len(quantized) == 4
        assert not caches(one) & caches(two)
    with nf.reuse_weights(one):  # only the one it was entered for
        step(two, x)
        assert len(quantized) == 4


def test_a_model_without_layers_of_ours():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    before = len(hooks)
    with pytest.raises(ValueError, match="got Sequential without any.*narrowfloat.convert"):
        with nf.reuse_weights(model):
            pass
    assert len(hooks) == before
    nf.convert(model)
    with nf.reuse_weights(model):
        pass


def test_copies_and_pickles_carry_nothing(device, quantized):
    model, x = model_on(device), batch(device)
    with nf.reuse_weights(model):
        inside = step(model, x)
        size = len(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twins = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False),
            copy.deepcopy(nn.ModuleDict({"inner": model}))["inner"],
        ]
        for twin in twins:
            assert caches(twin) == {None}
            with torch.no_grad():
                twin[0].weight.neg_()
                twin[0].weight.neg_()
            assert_all_same(step(twin, x), inside)
        assert len(quantized) == 2
    assert size == len(pickle.dumps(model))
    # a twin made inside may be given a context of its own
    with nf.reuse_weights(twins[0]):
        assert_all_same(step(twins[0], x), inside)


def test_state_dict_carries_nothing(device):
    model, x = model_on(device), batch(device)
    names = list(model.state_dict())
    with nf.reuse_weights(model):
        model(x)
        assert list(model.state_dict()) == names
        assert list(dict(model.named_buffers())) == []


def test_computed_weights_do_not_pile_up(device, quantized):
    """A weight made anew for each forward is not cached: each would be kept until the end."""
    model, x = model_on(device), batch(device)
    nn.utils.parametrizations.weight_norm(model[0])
    outside = step(model, x)
    with nf.reuse_weights(model):
        for _ in range(3):
            assert_all_same(step(model, x), outside)
        assert list(model[2].weight_cache._cached) == [id(model[2].weight)]
        weights = {n: p.detach() * 2 for n, p in model.named_parameters()}
        torch.func.functional_call(model, weights, (x,))
        assert list(model[2].weight_cache._cached) == [id(model[2].weight)]


def test_threads(device):
    """Several threads train copies, and one model is run by all of them, inside one context."""
    shared, x = model_on(device), batch(device)
    right = step(copy.deepcopy(shared), x)
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        try:
            mine = copy.deepcopy(shared)
            barrier.wait(30)
            for _ in range(5):
                with nf.reuse_weights(mine):
                    assert_all_same(step(mine, x), right)
                leaf = x.clone().requires_grad_()
                y = shared(leaf)
                (dx,) = torch.autograd.grad((y.float() ** 2).mean(), leaf)
                assert_all_same([y.detach(), dx], right[:2])
        except BaseException as e:
            failures.append(e)

    with nf.reuse_weights(shared):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert caches(shared) == {None}
