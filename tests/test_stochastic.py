"""Tests of stochastic rounding: it keeps the mean, draws anew at each call and at each replay of a
captured graph, and is torch's generator's and the reference's, bit for bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import assert_same_bits, capture, relative_error
from torch import Tensor

import narrowfloat as nf
from narrowfloat import ops
from narrowfloat.cast import Cast
from narrowfloat.reference import fp4, fp4_numerics, linear
from narrowfloat.spec import Quantize

# of which a backward draws
STOCHASTIC = sorted(n for n, r in nf.RECIPES.items() if r.draws_dx or r.draws_dw)

FORMATS = ["nvfp4", "mxfp4"]
UNBIASED = {
    "nvfp4": nf.RECIPES["nvfp4_unbiased"],
    "nvfp4, not rotated": nf.fp4_recipe("plain", scale_up_dy=True, rotate_wgrad=False),
    "mxfp4": nf.RECIPES["mxfp4"],
    "mxfp4, not rotated": nf.fp4_recipe("plain", "mxfp4", rotate_wgrad=False),
}


LEAST = 0.85  # bits for four times the passes, where all of the error averages out


def quantized(x: Tensor, how: Cast) -> Tensor:
    """What a GEMM multiplies: fp64 [R, padded C]."""
    operand = fp4_numerics.quantize_operand(x, how)
    return (fp4.values(operand.codes, operand.scales) * operand.scale).double()


def effective_gain(recipe: nf.Recipe, device: str, which: str, draws: int = 256) -> list[float]:
    """Error of the mean of 1, 4, 16, .. backward passes to the mean of all gradients that dy's
    rounding could give: the unrounded dy times the quantized other operand."""
    m, k, n = 64, 128, 96
    layer = nf.Linear(k, n, bias=False, device=device, recipe=recipe)
    layer.weight.requires_grad_(which == "dw")
    x = torch.randn(m, k, device=device, requires_grad=which == "dx")
    g = torch.randn(m, n, device=device).bfloat16().float()
    y = layer(x)
    w = layer.weight.detach().cpu()
    if which == "dx":
        along_n = quantized(w.t(), recipe.dgrad.b)[:k, :n]  # 16 x 16, or along N
        want = g.double().cpu() @ along_n.t()
    else:
        across = quantized(x.detach().t().cpu(), recipe.wgrad.b)[:k, :m]
        of_dy = g.t().cpu()
        if recipe.wgrad.a.hadamard:
            of_dy = fp4_numerics.rotate(of_dy.unflatten(1, (-1, 16))).flatten(1) / 4
        want = of_dy.double() @ across.t()
    total, errors = torch.zeros_like(want), []
    for i in range(1, draws + 1):
        (got,) = torch.autograd.grad(y, x if which == "dx" else layer.weight, g, retain_graph=True)
        total += got.double().cpu()
        if math.log(i, 4).is_integer():
            errors.append(relative_error(total / i, want))
    return errors


def gains(errors: list[float]) -> list[float]:
    """Bits, from each to the next, which has four times the passes."""
    return [math.log2(a / b) for a, b in itertools.pairwise(errors)]


@pytest.mark.parametrize("which", ["dx", "dw"])
@pytest.mark.parametrize("name", UNBIASED)
def test_averaging_gains_half_a_bit_a_doubling(device: str, name: str, which: str) -> None:
    """Stochastic rounding is unbiased: four times the passes halve the error, over and over."""
    errors = effective_gain(UNBIASED[name], device, which)
    assert all(LEAST < gained < 2 - LEAST for gained in gains(errors)), (errors, gains(errors))


@pytest.mark.parametrize("which", ["dx", "dw"])
def test_saturation_is_what_the_default_scales_cost(device: str, which: str) -> None:
    """With block scales to nearest the largest values are cut, and the mean keeps that error: the
    test above would see it."""
    default, unbiased = (
        effective_gain(nf.RECIPES[name], device, which) for name in ("nvfp4", "nvfp4_unbiased")
    )
    assert default[0] < unbiased[0]  # a single pass is better
    assert default[-1] > unbiased[-1]
    assert gains(default)[-1] < LEAST


@pytest.mark.parametrize("which", ["dx", "dw"])
@pytest.mark.parametrize("format", FORMATS)
def test_rounding_to_nearest_gains_nothing(device: str, format: str, which: str) -> None:
    """Nor does averaging help where nothing is drawn."""
    errors = effective_gain(nf.fp4_recipe("n", format, stochastic_dy=False), device, which, 4)
    assert abs(gains(errors)[0]) < 1e-6


def test_the_seed_is_torchs(device: str) -> None:
    layer = nf.FP4Linear(64, 48, device=device)
    x = torch.randn(32, 64, device=device, requires_grad=True)
    g = torch.randn(32, 48, device=device)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x), (x, layer.weight), g)

    torch.manual_seed(3)
    first, second = gradients(), gradients()
    torch.manual_seed(3)
    again = gradients()
    for a, b, c in zip(first, again, second, strict=True):
        assert_same_bits(a, b)
        assert not torch.equal(a, c)
    nearest = nf.Linear(64, 48, device=device, recipe=nf.fp4_recipe("nearest", stochastic_dy=False))
    state = torch.cuda.get_rng_state if device == "cuda" else torch.get_rng_state
    before = state()
    with torch.no_grad():
        layer(x)
    layer(x)
    pairs = [torch.autograd.grad(nearest(x), (x, nearest.weight), g) for _ in range(2)]
    for a, b in zip(*pairs, strict=True):
        assert_same_bits(a, b)
    assert torch.equal(state(), before)  # nothing else draws


@pytest.mark.parametrize("recipe", FORMATS)
def test_compiled_backwards_draw_anew(device: str, recipe: str) -> None:
    """A draw is not made a constant of the graph."""
    layer = nf.FP4Linear(64, 48, device=device, recipe=recipe)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(32, 64, device=device, requires_grad=True)
    g = torch.randn(32, 48, device=device)
    results = [torch.autograd.grad(compiled(x), (x, layer.weight), g) for _ in range(3)]
    for a, b in itertools.combinations(results, 2):
        for left, right in zip(a, b, strict=True):
            assert not torch.equal(left, right)
            assert relative_error(left, right) < 0.4


# ---- captured graphs ----


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", STOCHASTIC)
def test_a_graphs_replays_draw_anew(cuda: str, recipe: str) -> None:
    """Replays differ as calls do, and are the calls with torch's seed set to the same."""
    layer = nf.Linear(128, 96, bias=False, device=cuda, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(80, 128, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(80, 96, device=cuda, dtype=torch.bfloat16)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x), (x, layer.weight), g)

    graph, results = capture(gradients)
    seen = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        want = gradients()
        torch.manual_seed(seed)
        graph.replay()
        for got, right, name in zip(results, want, ("dx", "dw"), strict=True):
            assert_same_bits(got, right, f"{name} of seed {seed}")
        seen.append([t.clone() for t in results])
        graph.replay()  # and on from there
        seen.append([t.clone() for t in results])
    first, then, other, later, again, after = seen
    for a, b in ((first, again), (then, after)):
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    for a, b in itertools.combinations((first, then, other, later), 2):
        assert not any(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("operand", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_graphs_bits_follow_its_seed(
    cuda: str, format: str, rotated: bool, operand: bool
) -> None:
    """Whatever lies in seed and x at a replay: all bytes are the reference's."""
    how = Cast("e2m1", format, stochastic=True, hadamard=rotated)
    choices = Quantize(how, how, True, True, operand, operand).pack()
    seed = torch.zeros(2, dtype=torch.int64, device=cuda)
    x = torch.zeros(100, 72, device=cuda, dtype=torch.bfloat16)
    graph, results = capture(lambda: ops.quantize_op(x, choices, None, seed))
    for i in range(3):
        numbers = torch.randint(-(2**63), 2**63 - 1, (2,))
        values = torch.randn(100, 72).bfloat16() * 10.0**i
        seed.copy_(numbers)
        x.copy_(values)
        graph.replay()
        want = linear.quantize(values, choices, None, numbers)
        for got, right in zip(results, want, strict=True):
            assert_same_bits(got, right, f"replay {i}")


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_a_graph_that_quantizes_draws_anew(cuda: str, format: str) -> None:
    x = torch.randn(64, 96, device=cuda)
    graph, q = capture(lambda: nf.quantize(x, format, stochastic=True))
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(q._replace(data=q.data.clone(), scales=q.scales.clone()))
    for a, b in itertools.combinations(seen, 2):
        assert not torch.equal(a.data, b.data)
        assert torch.equal(a.scales.view(torch.uint8), b.scales.view(torch.uint8))
