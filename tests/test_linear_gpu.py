"""Tests of all recipes on a GPU: a layer's GEMMs are as exact as bf16's, the layer is as close to
nn.Linear as its formats are, and it is deterministic."""

from __future__ import annotations

import pytest
import torch
from conftest import (
    assert_close_as,
    assert_same_bits,
    relative_error,
    skip_where_it_does_not_run,
)
from torch import Tensor, nn
from torch.nn.functional import linear

import narrowfloat as nf
from narrowfloat import ops, spec
from narrowfloat.cast import Cast
from narrowfloat.recipe import BF16
from narrowfloat.reference.linear import _factor

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEED = torch.tensor([0x123456789ABCDEF, -0x0FEDCBA987654321])
RECIPES = {r.name: r for r in (*nf.RECIPES.values(), BF16) if r.delayed is None}


def operand(t: Tensor, cast: Cast | None, side: int = 0) -> Tensor:
    """fp64 values of an operand [R, C] as the reference quantizes it; in FP4 C is padded."""
    found = _factor(t, cast, None, SEED.to(t.device), side)
    made = found.matrix.double()
    if found.row is not None:
        made = made * found.row.double()[:, None]
    return made if found.scale is None else made * found.scale.double()


SIZES = [
    (500, 520, 144), (501, 520, 144), (1000, 516, 4096), (16, 16, 16), (1, 8, 32),
    (128, 128, 128), (1000, 520, 4096), (4096, 1024, 1040), (77, 3, 500),
]  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_gemms(cuda: str, sizes: tuple[int, int, int], name: str) -> None:
    """All three, at most twice as far from exact arithmetic as a bf16 GEMM of such sizes."""
    m, n, k = sizes
    recipe = RECIPES[name]
    skip_where_it_does_not_run(recipe, cuda)
    x, dy = (torch.randn(m, s, device=cuda, dtype=torch.bfloat16) for s in (k, n))
    w = torch.randn(n, k, device=cuda, dtype=torch.bfloat16)
    bias = torch.randn(n, device=cuda, dtype=torch.bfloat16)
    forward = recipe.forward_spec | recipe.save_x | recipe.keep_w
    y, x_columns, x_scales, scales = ops.linear_forward(x, w, bias, forward)
    backward = recipe.backward_spec | spec.NEED_DX | spec.DW[torch.bfloat16]
    backward |= spec.W_MEASURED if recipe.keep_w else 0
    saved = (x_columns, x_scales, scales) if recipe.save_x else (x, None, scales)
    dx, dw, _ = ops.linear_backward(dy, *saved, w, SEED.to(cuda), k, backward)

    fprop, dgrad, wgrad = recipe.fprop.casts, recipe.dgrad.casts, recipe.wgrad.casts
    exact_y = operand(x, fprop[0]) @ operand(w, fprop[1]).t() + bias.double()
    exact_dx = operand(dy, dgrad[0]) @ operand(w.t(), dgrad[1], 1).t()
    exact_dw = operand(dy.t(), wgrad[0], 1) @ operand(x.t(), wgrad[1], 1).t()
    plain = {
        "y": (y, exact_y, linear(x, w, bias), x.double() @ w.double().t() + bias.double()),
        "dx": (dx, exact_dx, dy @ w, dy.double() @ w.double()),
        "dw": (dw, exact_dw, dy.t() @ x, dy.double().t() @ x.double()),
    }
    for what, (got, exact, bf16, bf16_exact) in plain.items():
        error, bound = relative_error(got, exact), 2 * relative_error(bf16, bf16_exact)
        if got.numel() < 100:  # one rounding of each, where bf16 has little by chance
            bound = max(bound, 2.0**-8)
        assert error <= bound + 1e-6, f"{what}: {error:.2e} > {bound:.2e}"


def kind_of(cast: Cast | None) -> str:
    """Whose tolerance a GEMM has by its first operand."""
    if cast is None:
        return "e4m3"
    return cast.scaling if cast.element == "e2m1" else cast.element


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer(cuda: str, name: str, dtype: torch.dtype) -> None:
    """Against nn.Linear, as close as the format is."""
    recipe = RECIPES[name]
    skip_where_it_does_not_run(recipe, cuda)
    kinds = [kind_of(getattr(recipe, gemm).a) for gemm in ("fprop", "dgrad", "wgrad")]
    kinds[1:] = [f"{kind} gradient" if "fp4" in kind else kind for kind in kinds[1:]]
    for m, k, n in ((384, 512, 256), (500, 264, 392), (33, 72, 100)):
        plain = nn.Linear(k, n, device=cuda, dtype=dtype)
        x, dy = (torch.randn(m, s, device=cuda, dtype=dtype) for s in (k, n))
        leaves = [t.detach().clone().requires_grad_() for t in (x, plain.weight, plain.bias)]
        y = nf.linear(*leaves, recipe)
        y.backward(dy)
        x.requires_grad_()
        want = plain(x)
        want.backward(dy)
        for a, ref, kind, what in (
            (y, want, kinds[0], "y"),
            (leaves[0].grad, x.grad, kinds[1], "dx"),
            (leaves[1].grad, plain.weight.grad, kinds[2], "dw"),
        ):
            assert_close_as(a, ref, kind, what=f"{what} {m} {k} {n}")
        assert relative_error(leaves[2].grad, plain.bias.grad) < 1e-2


@pytest.mark.parametrize("name", RECIPES)
def test_deterministic(cuda: str, name: str) -> None:
    """Given the seed: the same bits of db, dx and dw at each call."""
    recipe = RECIPES[name]
    skip_where_it_does_not_run(recipe, cuda)
    x = torch.randn(2000, 1000, device=cuda, dtype=torch.bfloat16)
    w = torch.randn(1000, 1000, device=cuda, dtype=torch.bfloat16)
    _, x_columns, x_scales, scales = ops.linear_forward(
        x, w, None, recipe.forward_spec | recipe.save_x
    )
    saved = (x_columns, x_scales, scales) if recipe.save_x else (x, None, scales)
    for wanted in (spec.NEED_DX, spec.NEED_DX | spec.DW[torch.bfloat16]):
        asked = recipe.backward_spec | wanted | spec.DB[torch.float32]
        runs = [ops.linear_backward(x, *saved, w, SEED.to(cuda), 1000, asked) for _ in range(2)]
        for first, second, what in zip(*runs, ("dx", "dw", "db"), strict=True):
            assert_same_bits(first, second, f"{name} {what}")
        assert relative_error(runs[0][2], x.double().sum(0)) < 1e-5
