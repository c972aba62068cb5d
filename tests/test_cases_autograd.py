"""Public failures of the kind "autograd" do not happen, O-48 to O-58; CASES.md tells of each."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import assert_close_as, assert_same_bits, kinds, relative_error
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import narrowfloat as nf

BF16, F32 = torch.bfloat16, torch.float32


class Backwards(TorchDispatchMode):
    """Records, for each linear_backward inside, which GEMMs its outputs show to have run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[set[str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if str(func).startswith("narrowfloat.linear_backward"):
            names = ("dx", "dw", "db")
            self.seen.append({n for n, t in zip(names, out, strict=True) if t.numel()})
        return out


def saved_bytes(call) -> tuple[Tensor, int]:
    """call()'s result and the bytes that autograd keeps for its backward, each storage once."""
    storages: dict[int, int] = {}
    kept = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)  # alive, so that no address comes twice
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call()
    return y, sum(storages.values())


def small_model(
    device: str, dtype: torch.dtype = F32, recipe: str | nf.Recipe = "fp8"
) -> nn.Sequential:
    return nn.Sequential(
        nf.Linear(32, 64, device=device, dtype=dtype, recipe=recipe),
        nn.GELU(),
        nf.Linear(64, 48, bias=False, device=device, dtype=dtype, recipe=recipe),
    )


def backward(t: Tensor, g: Tensor | None = None, **how: bool) -> None:
    """With the same random bits each time: those of FP4's stochastic rounding."""
    with torch.random.fork_rng([t.device] if t.is_cuda else []):
        torch.manual_seed(11)
        t.backward(g, **how)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def assert_all_same(a: list[Tensor], b: list[Tensor], what: str = "") -> None:
    for left, right in zip(a, b, strict=True):
        assert_same_bits(left, right, what)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("reuse", [False, True])
def test_o48_gradient_through_a_frozen_layer(device, recipe, reuse, dtype):
    """O-48: embedding -> LoRA -> frozen layer -> LoRA: the first LoRA gets its gradient."""
    embedding = nn.Embedding(16, 64, device=device, dtype=dtype)
    lora = [
        nn.Sequential(nn.Linear(64, 8, False), nn.Linear(8, 64, False)).to(device, dtype)
        for _ in range(2)
    ]
    frozen = nf.Linear(64, 64, device=device, dtype=dtype, recipe=recipe).requires_grad_(False)
    embedding.requires_grad_(False)
    ids = torch.randint(0, 16, (4, 12), device=device)
    g = torch.randn(4, 12, 64, device=device).to(dtype)

    def step(layer) -> list[Tensor]:
        for pair in lora:
            pair.zero_grad(set_to_none=True)
        h = embedding(ids)
        h = layer(h + lora[0](h))
        (h + lora[1](h)).backward(g)
        return [p.grad for pair in lora for p in pair.parameters()]

    if reuse:
        with nf.reuse_weights(frozen):
            step(frozen)
            ours = step(frozen)
    else:
        ours = step(frozen)
    ref = step(lambda h: F.linear(h, frozen.weight, frozen.bias))
    assert frozen.weight.grad is None and frozen.bias.grad is None
    for a, b in zip(ours, ref, strict=True):
        assert a.any()
        if recipe == "fp8":
            assert_close_as(a, b, "e5m2")
        else:  # eight numbers a token: no large sample
            assert relative_error(a, b) < 0.32


MASKS = [(x, w, b) for x in (False, True) for w in (False, True) for b in (False, True)]


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_o49_only_the_products_that_are_needed(device, recipe, mask, reuse):
    """O-49: each gradient is computed, and its operand saved, only where it is asked for."""
    m, k, n = 256, 128, 64
    made = nf.Linear(k, n, device=device, dtype=BF16, recipe=recipe)
    made.weight.requires_grad_(mask[1])
    made.bias.requires_grad_(mask[2])
    x = torch.randn(m, k, device=device, dtype=BF16, requires_grad=mask[0])
    if reuse:
        with nf.reuse_weights(made):
            y, saved = saved_bytes(lambda: made(x))
    else:
        y, saved = saved_bytes(lambda: made(x))
    small = 2048  # scales
    limit = small
    of_x = m * k if recipe == "fp8" else m * k * 9 // 16
    limit += of_x if mask[1] else 0  # x's copy, for dw
    cached = reuse and recipe == "fp8"
    limit += (n * k if cached else n * k * 2) if mask[0] else 0  # w or its cached copy, for dx
    assert saved <= limit, (saved, limit)
    if not any(mask):
        assert not y.requires_grad
        return
    with Backwards() as backwards:
        y.backward(torch.randn_like(y))
    assert backwards.seen == [
        {name for name, on in zip(("dx", "dw", "db"), mask, strict=True) if on}
    ]
    for t, on in zip((x, made.weight, made.bias), mask, strict=True):
        assert (t.grad is not None) == on


@pytest.mark.gpu
def test_o49_kernels_of_a_frozen_weight(cuda, recipe):
    """O-49: seen from the profiler too, one GEMM of the backward does not run."""

    def kernels(mask: tuple[bool, bool]) -> int:
        x = torch.randn(256, 512, device=cuda, dtype=BF16, requires_grad=mask[0])
        w = torch.randn(256, 512, device=cuda, dtype=BF16, requires_grad=mask[1])
        g = torch.randn(256, 256, device=cuda, dtype=BF16)
        y = nf.linear(x, w, None, recipe)
        torch.autograd.grad(y, [t for t in (x, w) if t.requires_grad], g)
        y = nf.linear(x, w, None, recipe)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            torch.autograd.grad(y, [t for t in (x, w) if t.requires_grad], g)
            torch.cuda.synchronize()
        return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in found.events())

    both = kernels((True, True))
    if both == 0:
        pytest.skip("the profiler sees no kernels on this machine")
    assert kernels((True, False)) < both
    assert kernels((False, True)) < both


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_o50_no_grad_and_inference_mode(device, recipe, dtype, reuse):
    """O-50: both give the bits of training mode, and leave nothing that training trips over."""
    model = small_model(device, dtype, recipe)
    x = torch.randn(24, 32, device=device).to(dtype)

    def calls() -> None:
        with torch.inference_mode():
            y2 = model(x)
        with torch.no_grad():
            y1 = model(x)
        assert_same_bits(y1, y2)
        y3 = model(x)
        assert_same_bits(y3.detach(), y1)
        y3.square().sum().backward()
        with torch.inference_mode():
            assert_same_bits(model(x), y1)

    if reuse:
        with nf.reuse_weights(model):
            calls()
            calls()
    else:
        calls()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_o50_a_model_made_in_inference_mode(device, recipe):
    """O-50: a weight that is an inference tensor works, in and out of reuse_weights."""
    with torch.inference_mode():
        made = nf.Linear(32, 48, device=device, recipe=recipe)
        x = torch.randn(8, 32, device=device)
        y = made(x)
        with nf.reuse_weights(made):
            assert_same_bits(made(x), y)
            assert_same_bits(made(x), y)
    with torch.no_grad():
        assert_same_bits(made(x), y)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_o51_backward_twice(device, recipe, dtype, reuse):
    """O-51: retain_graph: the second backward doubles the gradients exactly, given its draws."""
    model = small_model(device, dtype, recipe)
    x = torch.randn(24, 32, device=device).to(dtype).requires_grad_()
    if reuse:
        with nf.reuse_weights(model):
            loss = model(x).square().sum()
    else:
        loss = model(x).square().sum()
    backward(loss, retain_graph=True)
    once = [x.grad.clone(), *gradients(model)]
    backward(loss)
    for a, b in zip([x.grad, *gradients(model)], once, strict=True):
        assert b.any()
        assert_same_bits(a, 2 * b)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("wrt", ["x", "w"])
@pytest.mark.parametrize("loss", ["sum", "square"])
def test_o52_double_backward_is_an_error(device, loss, wrt):
    """O-52: a second derivative raises, or is right; it is never silently left out."""
    x = torch.randn(8, 16, device=device, requires_grad=True)
    w = torch.randn(24, 16, device=device, requires_grad=True)
    leaf = x if wrt == "x" else w
    reduce = torch.sum if loss == "sum" else lambda y: y.square().sum()

    def penalty(multiply, x: Tensor, w: Tensor) -> Tensor:
        value = reduce(multiply(x, w))
        (first,) = torch.autograd.grad(value, x if wrt == "x" else w, create_graph=True)
        return value + first.square().sum()  # a gradient penalty

    try:
        total = penalty(nf.linear, x, w)
        got = torch.autograd.grad(total, (x, w))
    except RuntimeError as error:
        assert any(s in str(error) for s in ("twice", "double", "once")), error
    else:
        ref = torch.autograd.grad(penalty(F.linear, x, w), (x, w))
        for a, b in zip(got, ref, strict=True):
            assert_close_as(a, b, "e5m2")
    with pytest.raises(RuntimeError):
        (first,) = torch.autograd.grad(reduce(nf.linear(x, w)), leaf, create_graph=True)
        torch.autograd.grad(first.square().sum(), (x, w))


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_o53_checkpoint(device, recipe, reentrant, autocast, reuse):
    """O-53: three steps with and without recomputation are equal bit for bit."""
    plain = small_model(device, recipe=recipe)
    recomputed = copy.deepcopy(plain)

    def three_steps(model: nn.Module, call) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        record = []
        for i in range(3):
            torch.manual_seed(i)
            x = torch.randn(24, 32, device=device, requires_grad=True)
            optimizer.zero_grad()
            with torch.autocast(device, dtype=BF16, enabled=autocast):
                if reuse:
                    with nf.reuse_weights(model):
                        y = call(model, x)
                        backward(y.float().square().mean())
                else:
                    y = call(model, x)
                    backward(y.float().square().mean())
            record += [y.detach(), x.grad, *gradients(model)]
            optimizer.step()
        return record

    a = three_steps(plain, lambda model, x: model(x))
    b = three_steps(recomputed, lambda model, x: checkpoint(model, x, use_reentrant=reentrant))
    assert_all_same(a, b)
    assert a[0].dtype == (BF16 if autocast else F32)


def test_o53_checkpoint_backward_outside_autocast(device, recipe):
    """O-53: the recomputation happens in the forward's autocast, wherever backward is called."""
    model = small_model(device, recipe=recipe)
    x = torch.randn(24, 32, device=device)
    results = []
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=BF16):
            y = call(x)
        backward(y.float().square().mean())
        results.append([y.detach(), *gradients(model)])
    assert_all_same(*results)


def accumulate(model: nn.Module, batches: list[Tensor], first_without_grad: bool) -> list[Tensor]:
    if first_without_grad:
        with torch.no_grad():
            model(batches[0])
    for batch in batches:
        backward(model(batch).square().mean())
    return gradients(model)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("first", ["train", "no_grad"])
def test_o54_accumulation_with_held_weights(device, recipe, first, dtype):
    """O-54: gradient accumulation of 4, a no_grad forward before it or not, cached or not."""
    model = small_model(device, dtype, recipe)
    batches = [torch.randn(24, 32, device=device).to(dtype) for _ in range(4)]
    without = accumulate(model, batches, first == "no_grad")
    model.zero_grad(set_to_none=True)
    with nf.reuse_weights(model):
        inside = accumulate(model, batches, first == "no_grad")
    assert all(t.isfinite().all() and t.any() for t in inside)
    assert_all_same(inside, without)


def test_o54_held_weights_are_held(device):
    """O-54: inside the context a weight is quantized once (or the test above shows nothing)."""
    model = small_model(device)
    x = torch.randn(8, 32, device=device)
    counts = []

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts.append(str(func))
            return func(*args, **(kwargs or {}))

    with nf.reuse_weights(model), Counts():
        for _ in range(3):
            model(x).sum().backward()
    assert sum("narrowfloat.quantize" in name for name in counts) == 2  # one a layer
    assert sum("narrowfloat.linear_forward" in name for name in counts) == 6


@pytest.mark.parametrize("reuse", [False, True])
def test_o55_eval_train_eval(device, recipe, reuse):
    """O-55: eval, a training step, eval again: gradients of a fresh module, nothing missing."""
    model = small_model(device, recipe=recipe)
    fresh = copy.deepcopy(model)
    x = torch.randn(24, 32, device=device)

    def evaluate() -> Tensor:
        model.eval()
        with torch.no_grad():
            return model(x)

    def calls() -> None:
        y = evaluate()
        model.train()
        backward(model(x).square().mean())
        assert_same_bits(evaluate(), y)

    if reuse:
        with nf.reuse_weights(model):
            calls()
    else:
        calls()
    backward(fresh(x).square().mean())
    assert_all_same(gradients(model), gradients(fresh))


UPDATES = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.5, foreach=False).step(),
    "sgd foreach": lambda m: torch.optim.SGD(m.parameters(), lr=0.5, foreach=True).step(),
    "sgd fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.5, fused=True).step(),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.5, fused=True).step(),
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.5, foreach=True).step(),
    "mul_": lambda m: [p.mul_(1.5) for p in m.parameters()],
    "copy_": lambda m: [p.copy_(torch.randn_like(p)) for p in m.parameters()],
    "element": lambda m: [p.view(-1)[:1].add_(3.0) for p in m.parameters()],
    "foreach": lambda m: torch._foreach_add_(list(m.parameters()), 0.5),
    "load_state_dict": lambda m: m.load_state_dict(
        {name: torch.randn_like(t) for name, t in m.state_dict().items()}
    ),
    "load and assign": lambda m: m.load_state_dict(
        {name: nn.Parameter(torch.randn_like(t)) for name, t in m.state_dict().items()},
        assign=True,
    ),
    "new parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.randn_like(m[0].weight))),
    "data replaced": lambda m: [setattr(p, "data", torch.randn_like(p)) for p in m.parameters()],
}
UNCOUNTED = {  # writes that PyTorch does not count, documented as unseen inside reuse_weights
    "data copy_": lambda m: [p.data.copy_(torch.randn_like(p)) for p in m.parameters()],
    "data mul_": lambda m: [p.data.mul_(1.5) for p in m.parameters()],
}


@pytest.mark.parametrize(
    ("update", "reuse"),
    [(u, r) for u in UPDATES for r in (False, True)] + [(u, False) for u in UNCOUNTED],
)
def test_o56_no_stale_weight_after_an_update(device, recipe, update, reuse):
    """O-56: after each way to change a weight, forward and backward are a fresh module's."""
    model = small_model(device, recipe=recipe)
    x = torch.randn(24, 32, device=device)

    def check() -> None:
        fresh = small_model(device, recipe=recipe)
        with torch.no_grad():
            for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
        results = []
        for each in (model, fresh):
            each.zero_grad(set_to_none=True)
            leaf = x.clone().requires_grad_()
            y = each(leaf)
            backward(y.square().mean())
            results.append([y.detach(), leaf.grad, *gradients(each)])
        assert_all_same(*results, what=update)

    def calls() -> None:
        check()
        for _ in range(2):
            before = model(x).detach()
            with torch.no_grad():
                {**UPDATES, **UNCOUNTED}[update](model)
            assert not torch.equal(model(x), before)
            check()

    if reuse:
        with nf.reuse_weights(model):
            calls()
    else:
        calls()


def test_o56_a_graph_that_was_recorded_before_the_update(device, recipe):
    """O-56: backward after an in-place update raises as nn.Linear's does, or uses what it saw."""
    made = nf.Linear(32, 48, device=device, recipe=recipe)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    g = torch.randn(8, 48, device=device)
    backward(made(x), g)
    right = x.grad.clone()
    x.grad = None
    y = made(x)
    with torch.no_grad():
        made.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(g)
    with torch.no_grad():
        made.weight.div_(2)
    x.grad = None
    with nf.reuse_weights(made):
        y = made(x)
        with torch.no_grad():
            made.weight.mul_(2)
        made(x)  # quantizes anew: what y's graph has must not be written over
        if recipe != "fp8":  # it has w itself
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward(g)
            return
        y.backward(g)
    assert_same_bits(x.grad, right)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("reuse", [False, True])
def test_o57_tied_weight(device, recipe, reuse, dtype):
    """O-57: an embedding and a layer share a weight: the gradient is the sum of both, finite."""
    embedding = nn.Embedding(40, 64, device=device, dtype=dtype)
    head = nf.Linear(64, 40, False, device, dtype, recipe=recipe)
    ids = torch.randint(0, 40, (4, 8), device=device)
    g = torch.randn(4, 8, 40, device=device).to(dtype)

    def poison() -> None:  # memory that is handed out again holds NaN
        blocks = [torch.full((40, 64), float("nan"), device=device, dtype=dtype) for _ in range(32)]
        del blocks

    def run(module: nn.Module) -> Tensor:
        poison()
        h = embedding(ids)
        y = module(h)
        poison()
        backward(y, g)
        return y.detach()

    separate = nf.Linear(64, 40, False, device, dtype, recipe=recipe)
    with torch.no_grad():
        separate.weight.copy_(embedding.weight)
    run(separate)
    expected = embedding.weight.grad + separate.weight.grad
    embedding.weight.grad = None
    head.weight = embedding.weight
    if reuse:
        with nf.reuse_weights(head):
            run(head)
    else:
        run(head)
    got = embedding.weight.grad
    assert got is head.weight.grad and got.isfinite().all()
    assert_close_as(got, expected, "e4m3")
    assert (got.double() - expected.double()).norm() < 2**-7 * expected.double().norm()


def test_o57_one_layer_used_twice(device, recipe):
    """O-57: two uses of one layer add up."""
    made = nf.Linear(48, 48, device=device, recipe=recipe)
    x = torch.randn(16, 48, device=device)
    y = made(made(x))
    backward(y.sum())
    first, second = copy.deepcopy(made), copy.deepcopy(made)
    first.zero_grad(set_to_none=True)
    second.zero_grad(set_to_none=True)
    backward(second(first(x)).sum())
    torch.testing.assert_close(made.weight.grad, first.weight.grad + second.weight.grad)
    torch.testing.assert_close(made.bias.grad, first.bias.grad + second.bias.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_o58_keyword_arguments(device, recipe, reentrant):
    """O-58: tensors passed by keyword, to a checkpoint too, get the same gradients."""
    made = nf.Linear(32, 48, device=device, recipe=recipe)
    x = torch.randn(16, 32, device=device, requires_grad=True)
    g = torch.randn(16, 48, device=device)
    leaves = (x, made.weight, made.bias)

    def take() -> list[Tensor]:
        found = [t.grad for t in leaves]
        assert all(t is not None for t in found)
        for t in leaves:
            t.grad = None
        return found

    backward(made(x), g)
    right = take()
    assert_close_as(right[0], g.double() @ made.weight.detach().double(), kinds(recipe)[1])
    backward(made(input=x), g)
    assert_all_same(take(), right)
    backward(nf.linear(x=x, w=made.weight, bias=made.bias, recipe=recipe), g)
    assert_all_same(take(), right)
    backward(nf.linear(recipe=recipe, bias=made.bias, w=made.weight, x=x), g)
    assert_all_same(take(), right)
    backward(nf.matmul(b=made.weight.t(), a=x, recipe=recipe), g)
    assert_all_same([x.grad, made.weight.grad], right[:2])
    x.grad = made.weight.grad = None
    if reentrant:  # takes no keywords; the tensors reach it through the function's closure
        y = checkpoint(
            lambda t: nf.linear(x=t, w=made.weight, bias=made.bias, recipe=recipe),
            x,
            use_reentrant=True,
        )
        backward(y, g)
    else:
        backward(checkpoint(made, input=x, use_reentrant=False), g)
    assert_all_same(take(), right)
    if not reentrant:
        operands = {"x": x, "w": made.weight, "bias": made.bias, "recipe": recipe}
        backward(checkpoint(nf.linear, use_reentrant=False, **operands), g)
        assert_all_same(take(), right)


# ---- every recipe ----


def layer(k: int, n: int, recipe: nf.Recipe, device: str) -> nf.Linear:
    made = nf.Linear(k, n, device=device, recipe=recipe)
    with torch.no_grad():
        made.weight.normal_()
        made.bias.normal_()
    return made


def test_o48_o49_frozen_weight(device, each_recipe):
    """O-48, O-49: a frozen layer passes its gradient on and makes none of its own."""
    first, frozen = nn.Linear(64, 64, device=device), layer(64, 48, each_recipe, device)
    twin = nn.Linear(64, 48, device=device)
    twin.load_state_dict(frozen.state_dict())
    frozen.requires_grad_(False)
    x, g = torch.randn(64, 64, device=device), torch.randn(64, 48, device=device)
    grads = []
    for made in (frozen, twin):
        first.zero_grad()
        made(first(x)).backward(g)
        grads.append(first.weight.grad.clone())
    assert_close_as(grads[0], grads[1], kinds(each_recipe)[1])
    assert frozen.weight.grad is None and frozen.bias.grad is None


def test_o50_to_o53_modes(device, each_recipe):
    """O-50 no_grad and inference_mode agree, and training works after; O-51 a second backward
    doubles exactly, or draws anew; O-53 checkpoints give the bits of none, over three steps."""
    made = layer(64, 48, each_recipe, device)
    x = torch.randn(32, 64, device=device)
    with torch.no_grad():
        first = made(x)
    with torch.inference_mode():
        second = made(x)
    assert_same_bits(first, second)
    out = (made(x) ** 2).sum()
    out.backward(retain_graph=True)
    once = made.weight.grad.clone()
    out.backward()
    assert once.any()
    if each_recipe.draws_dw:
        again = made.weight.grad - once
        assert not torch.equal(again, once) and relative_error(again, once) < 0.3
    else:
        assert_same_bits(made.weight.grad, 2 * once)
    results = []
    for how in (None, True, False):
        other = copy.deepcopy(made)
        other.start_history()  # the other optimizers' steps rolled it too
        optimizer = torch.optim.SGD(other.parameters(), lr=1e-3)
        for _ in range(3):
            leaf = x.clone().requires_grad_()
            y = other(leaf) if how is None else checkpoint(other, leaf, use_reentrant=how)
            optimizer.zero_grad()
            backward(y, torch.ones_like(y))
            optimizer.step()
        results.append([y.detach(), leaf.grad, other.weight.detach()])
    for other in results[1:]:
        assert_all_same(other, results[0])


def test_o54_to_o58_weights_and_keywords(device, each_recipe):
    """O-54 to O-56: reuse_weights changes nothing, each forward sees the weight that is; O-57: a
    tied weight sums both gradients; O-58: keywords."""
    made = layer(32, 32, each_recipe, device)
    x = torch.randn(8, 32, device=device)
    with nf.reuse_weights(made), torch.no_grad():
        made(x)
        for change in (lambda w: w.mul_(2), lambda w: w.copy_(w + 1), lambda w: w.neg_()):
            change(made.weight)
            fresh = copy.deepcopy(made)
            assert_same_bits(made(x), fresh(x))
    with torch.no_grad():  # outside it also one that PyTorch does not count
        made.weight.data.copy_(made.weight.data + 1)
        assert_same_bits(made(x), copy.deepcopy(made)(x))
    embedding = nn.Embedding(32, 32, device=device)
    embedding.weight = made.weight
    tokens = torch.arange(8, device=device)
    made(embedding(tokens)).sum().backward()
    assert made.weight.grad.isfinite().all() and made.weight.grad.any()
    both = made.weight.grad.clone()
    made.zero_grad()
    made(embedding(tokens).detach()).sum().backward()
    assert not torch.equal(both, made.weight.grad)
    w, b = (t.detach().requires_grad_() for t in (made.weight, made.bias))
    nf.linear(x=x, w=w, bias=b, recipe=each_recipe).sum().backward()
    assert w.grad is not None and torch.equal(b.grad, torch.full_like(b, 8))
    leaf = x.clone().requires_grad_()
    checkpoint(made, input=leaf, use_reentrant=False).sum().backward()
    assert leaf.grad is not None


def test_a_changed_weight_is_an_error_in_the_backward(device, each_recipe):
    made = layer(32, 16, each_recipe, device)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    y = made(x)
    with torch.no_grad():
        made.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
