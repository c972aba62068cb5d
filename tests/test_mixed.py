"""GEMMs with one operand left in bf16, and models whose recipe is mixed.

The other operand of such a GEMM is quantized as it is without that, and the GEMM is as exact as one
in bf16. What is true of mixed recipes as of all others is in test_linear.py and test_operators.py.
"""

from __future__ import annotations

import pytest
import torch
from conftest import (
    assert_same_bits,
    ends_of_training,
    relative_error,
    skip_where_it_does_not_run,
)
from every import BF16, OPERANDS, run, tensors, transposed, without
from torch import Tensor, nn

import narrowfloat as nf
from narrowfloat.formats import FORMATS
from narrowfloat.recipe import GEMMS

# a and b of a GEMM d = a b^T among x, w and dy
OF = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
# of a sum in fp32 that is rounded once
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
every_operand = pytest.mark.parametrize("operand", OPERANDS)
every_format = pytest.mark.parametrize("fmt", list(FORMATS))
# what the recipes with a name were made of
PARTS = {
    "fp8_block_backward": ("fp8", "fp8_block", "fp8_block"),
    "nvfp4_mxfp8_backward": (nf.fp4_recipe(weights_2d=False), "mxfp8", "mxfp8"),
    "fp8_bf16_wgrad": ("fp8", "fp8", nf.recipe.BF16),
    "fp8_block_row_wgrad": ("fp8_block", "fp8_block", nf.block_recipe("r", "row", "row", "row")),
    "fp8_block_bf16_wgrad": ("fp8_block", "fp8_block", nf.recipe.BF16),
}


def with_one(operand: str, fmt: str) -> nf.Recipe:
    """This operand in bf16, the other one of its GEMM in a format, other GEMMs in bf16."""
    gemm, side = operand.split(".")
    made = nf.Gemm(None, fmt) if side == "a" else nf.Gemm(fmt, None)
    return nf.Recipe("one", **dict.fromkeys(GEMMS, BF16) | {gemm: made})


def oriented(gemm: str, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """a [M,K] and b [N,K] of a GEMM."""
    both = {"fprop": (x, w), "dgrad": (dy, w.t()), "wgrad": (dy.t(), x.t())}
    return both[gemm]


def taken(t: Tensor, fmt: str | None) -> Tensor:
    """The values that a GEMM sees, in fp64."""
    if fmt is None:
        return t.bfloat16().double()
    quantized = nf.quantize(t, fmt)
    return quantized.data.double() * quantized.scale.double()


def exact(operand: str, fmt: str, x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    gemm, side = operand.split(".")
    a, b = oriented(gemm, x, w, dy)
    formats = (None, fmt) if side == "a" else (fmt, None)
    return taken(a, formats[0]) @ taken(b, formats[1]).t()


def result_of(operand: str, results: list[Tensor | None]) -> Tensor:
    """y, dx or dw out of what run() returns."""
    found = results[GEMMS.index(operand.split(".")[0])]
    assert found is not None
    return found


@every_operand
@every_format
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_a_gemm_is_exact(device: str, operand: str, fmt: str, dtype: torch.dtype) -> None:
    recipe = with_one(operand, fmt)
    for m, k, n in [(33, 100, 72), (1, 16, 16), (64, 767, 2), (200, 520, 136), (96, 64, 48)]:
        x, w, _, dy = tensors(m, k, n, device, dtype)
        dy = dy * 1e3
        for of in ((x, w, dy), transposed(x, w, dy)):
            got = result_of(operand, run(*of[:2], None, of[2], recipe))
            error = relative_error(got, exact(operand, fmt, *of))
            assert got.dtype == dtype and error < ROUNDING[dtype], f"{m} {k} {n}: {error:.1e}"


@every_operand
@every_format
def test_operands_to_the_bit(device: str, operand: str, fmt: str) -> None:
    """Where fp32 sums exactly, in whatever order, an operand that differs in one bit shows."""
    gemm, side = operand.split(".")
    for m, k, n in [(33, 100, 72), (64, 48, 80), (7, 16, 5)]:
        sizes = {"x": (m, k), "w": (n, k), "dy": (m, n)}
        of: dict[str, Tensor] = {}
        for name, size in sizes.items():
            of[name] = torch.randint(-8, 9, size, device=device).float()
        name = OF[gemm][side == "a"]  # the one that is quantized
        codes = torch.randint(-28, 29, sizes[name], device=device).float() * 16
        codes = codes.to(FORMATS[fmt].dtype).float()
        codes[0, 0] = 448.0
        of[name] = codes * 0.37
        got = result_of(operand, run(of["x"], of["w"], None, of["dy"], with_one(operand, fmt)))
        whole = [t.double() for t in oriented(gemm, *(of | {name: codes}).values())]
        scale = nf.quantize(of[name], fmt).scale
        found = nf.quantize(of[name], fmt).data.float() / codes
        step = found[codes != 0].unique()
        assert step.numel() == 1 and step.log2().frac() == 0  # codes, but for a power of two
        want = (whole[0] @ whole[1].t()).float() * (scale * step)
        assert_same_bits(got, want, f"{m} {k} {n}")


@every_operand
@pytest.mark.parametrize("others", ["fp8", "fp8_row", "mxfp8", "nvfp4", "bf16"])
def test_beside_gemms_of_other_kinds(device: str, operand: str, others: str) -> None:
    """Each GEMM as its own recipe has it, bit for bit."""
    at = GEMMS.index(operand.split(".")[0])
    mine = without(operand)
    recipe = nf.mixed_recipe("m", **dict.fromkeys(GEMMS, others) | {GEMMS[at]: mine})
    skip_where_it_does_not_run(recipe, device)
    of = tensors(72, 80, 48, device)
    got = run(*of, recipe)
    own = run(*of, nf.recipe.BF16 if others == "bf16" else others)
    for i, gemm in enumerate(GEMMS):
        assert_same_bits(got[i], run(*of, mine)[i] if i == at else own[i], gemm)


@every_operand
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite(device: str, operand: str, value: float) -> None:
    """In the quantized operand it makes the result of all, in the other of its row."""
    gemm, side = operand.split(".")
    x, w, _, dy = tensors(24, 32, 40, device)
    for at, name in enumerate(OF[gemm]):
        of = {"x": x, "w": w, "dy": dy}
        of[name] = of[name].clone()
        of[name][3, 5] = value
        got = result_of(operand, run(of["x"], of["w"], None, of["dy"], with_one(operand, "e4m3")))
        assert not got.isfinite().all()
        if at != "ab".index(side):
            assert not got.isfinite().any()
        else:
            row = {"fprop": 3, "dgrad": 3 if at == 0 else 5, "wgrad": 5}[gemm]
            assert not (got[row] if at == 0 else got[:, row]).isfinite().any()
            rest = torch.ones_like(got, dtype=torch.bool)
            (rest[row] if at == 0 else rest[:, row]).fill_(False)
            assert got[rest].isfinite().all()


@every_operand
def test_extremes(device: str, operand: str) -> None:
    """Zeros, small values and large ones."""
    x, w, _, dy = tensors(24, 32, 40, device)
    name = OF[operand.split(".")[0]][operand.endswith("a")]
    for factor in (0.0, 1e-30, 1e30):
        of = {"x": x, "w": w, "dy": dy}
        of[name] = of[name] * factor
        got = result_of(operand, run(of["x"], of["w"], None, of["dy"], with_one(operand, "e4m3")))
        want = exact(operand, "e4m3", *of.values())
        if factor == 0:
            assert (got == 0).all() and (want == 0).all()
        else:
            assert relative_error(got, want) < ROUNDING[torch.float32]


@pytest.mark.parametrize(
    "recipe",
    [
        without("fprop.a", "wgrad.b"),
        without("fprop.b", "dgrad.b"),
        without("dgrad.a", "wgrad.a"),
    ],
    ids=["x", "w", "dy"],
)
def test_layers(device: str, recipe: nf.Recipe) -> None:
    """Without one of x, w and dy: models train, and matmul and autocast do what they do."""
    plain, ours = ends_of_training(recipe, device)
    assert ours < plain * 1.1 + 0.02
    x, w, bias, _ = tensors(40, 64, 48, device)
    assert_same_bits(nf.matmul(x, w.t(), recipe), nf.linear(x, w, None, recipe))
    with torch.autocast(device, dtype=torch.bfloat16):
        y = nf.linear(x, w, bias, recipe)
    assert_same_bits(y, nf.linear(x.bfloat16(), w, bias, recipe))


@pytest.mark.gpu
@every_operand
@pytest.mark.parametrize("m, k, n", [(500, 144, 520), (1000, 4096, 516), (77, 500, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_exact_as_bf16(
    cuda: str, operand: str, m: int, k: int, n: int, dtype: torch.dtype
) -> None:
    """At most twice as far from exact arithmetic as a bf16 GEMM of such sizes."""
    x, w, _, dy = tensors(m, k, n, cuda, dtype)
    got = result_of(operand, run(x, w, None, dy, with_one(operand, "e4m3")))
    error = relative_error(got, exact(operand, "e4m3", x, w, dy))
    a, b = (t.bfloat16() for t in oriented(operand.split(".")[0], x, w, dy))
    bound = 2 * relative_error(a @ b.t(), a.double() @ b.double().t())
    assert error <= bound + 1e-6, f"{error:.2e} > {bound:.2e}"


# ---- models ----


def eight(device: str) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32, device=device) for _ in range(8)))


@pytest.mark.parametrize("recipe", [*PARTS, "mxfp8"])
def test_convert(device: str, recipe: str) -> None:
    """The last blocks stay as they are where a GEMM is in FP4; the head is left by default."""
    model = eight(device)
    report = nf.convert(model, recipe, head=True)
    kept = 2 if "fp4" in recipe else 0
    assert report.converted == [str(i) for i in range(8 - kept)]
    assert all(type(layer) is nf.Linear for layer in model[: 8 - kept])
    assert model[0].recipe is nf.RECIPES[recipe] and recipe in str(report)
    backward = nf.mixed_recipe("fp4 backward alone", "fp8", "mxfp4", "bf16")
    assert len(nf.plan(eight(device), backward, head=True).converted) == 6
    assert nf.convert(eight(device), "mxfp8").converted == [str(i) for i in range(7)]


def test_convert_for_inference(device: str) -> None:
    """A layer whose forward is in FP4 is packed as that forward; another is refused."""
    model = eight(device)
    nf.convert(model, "nvfp4_mxfp8_backward", head=True, keep_last=0)
    x = torch.randn(8, 32, device=device)
    want = model[0](x).detach()
    report = nf.convert(model, "nvfp4", inference=True, head=True, keep_last=0)
    assert len(report.converted) == 8
    assert model[0].recipe.fprop == nf.fp4_recipe(weights_2d=False).fprop
    assert relative_error(model[0](x), want) < 0.15  # x is not quantized there
    fresh = eight(device)
    nf.convert(fresh, "nvfp4_mxfp8_backward", inference=True)
    assert isinstance(fresh[0], nf.PackedFP4Linear)
    for recipe in ("fp8_block_backward", "fp8_block", "fp8"):
        with pytest.raises(ValueError, match=f"an FP4 recipe with inference=True, got {recipe}"):
            nf.convert(eight(device), recipe, inference=True)


@pytest.mark.parametrize("recipe", list(PARTS))
def test_mixed_recipes_have_the_gemms_that_they_name(device: str, recipe: str) -> None:
    """y, dx and dw of the recipes that they were made of."""
    skip_where_it_does_not_run(recipe, device)
    of = tensors(40, 64, 48, device)
    got = run(*of, recipe)
    assert set(PARTS) == {name for name, found in nf.RECIPES.items() if found.mixed}
    for at, part in enumerate(PARTS[recipe]):
        assert_same_bits(got[at], run(*of, part)[at], GEMMS[at])
