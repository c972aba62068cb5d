"""Decides that a product with one operand left in bf16 has the other one quantized as it is without
that, and is as exact as a bf16 product."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same_bits, ends_of_training, relative_error
from test_mixed import OPERANDS, parts, run, skip_where_it_does_not_run, tensors, without
from torch import Tensor

import narrowfloat as nf
from narrowfloat import ops, reference
from narrowfloat import recipe as recipes
from narrowfloat.formats import FORMATS, IN_BF16, padded
from narrowfloat.settings import Backward, Forward

NEITHER = nf.Gemm(None, None)
# a and b of a product d = a b^T, and d, among x, w and dy
OF = {"fprop": ("x", "w", 0), "dgrad": ("dy", "w", 1), "wgrad": ("dy", "x", 2)}
# of a sum in fp32 that is rounded once
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
every_operand = pytest.mark.parametrize("operand", OPERANDS)
every_format = pytest.mark.parametrize("fmt", list(FORMATS))


def alone(operand: str, fmt: str) -> nf.Recipe:
    """This operand in bf16, the other one of its product in a format, other products in bf16."""
    product, side = operand.split(".")
    gemm = nf.Gemm(None, fmt) if side == "a" else nf.Gemm(fmt, None)
    return nf.Recipe("alone", **dict.fromkeys(recipes.PRODUCTS, NEITHER) | {product: gemm})


def oriented(product: str, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """a [M,K] and b [N,K] of a product."""
    both = {"fprop": (x, w), "dgrad": (dy, w.t()), "wgrad": (dy.t(), x.t())}
    return both[product]


def taken(t: Tensor, fmt: str | None) -> Tensor:
    """The values that a product sees, in fp64."""
    if fmt is None:
        return t.bfloat16().double()
    quantized = nf.quantize(t, fmt)
    return quantized.data.double() * quantized.scale.double()


def exact(operand: str, fmt: str, x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    product, side = operand.split(".")
    a, b = oriented(product, x, w, dy)
    formats = (None, fmt) if side == "a" else (fmt, None)
    return taken(a, formats[0]) @ taken(b, formats[1]).t()


def product_of(operand: str, results: list[Tensor | None]) -> Tensor:
    """y, dx or dw out of what run() returns."""
    found = results[list(OF).index(operand.split(".")[0])]
    assert found is not None
    return found


@every_operand
@every_format
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_a_product_is_exact(device: str, operand: str, fmt: str, dtype: torch.dtype) -> None:
    recipe = alone(operand, fmt)
    for m, k, n in [(33, 100, 72), (1, 16, 16), (64, 767, 2), (200, 520, 136), (96, 64, 48)]:
        x, w, _, dy = tensors(m, k, n, device, dtype)
        dy = dy * 1e3
        for of in ((x, w, dy), tuple(t.t().contiguous().t() for t in (x, w, dy))):
            got = product_of(operand, run(*of[:2], None, of[2], recipe))
            error = relative_error(got, exact(operand, fmt, *of))
            assert got.dtype == dtype and error < ROUNDING[dtype], f"{m} {k} {n}: {error:.1e}"


@every_operand
@every_format
def test_operands_to_the_bit(device: str, operand: str, fmt: str) -> None:
    """Where fp32 sums exactly, in whatever order, an operand that differs in one bit shows."""
    product, side = operand.split(".")
    for m, k, n in [(33, 100, 72), (64, 48, 80), (7, 16, 5)]:
        sizes = {"x": (m, k), "w": (n, k), "dy": (m, n)}
        of: dict[str, Tensor] = {}
        for name, size in sizes.items():
            of[name] = torch.randint(-8, 9, size, device=device).float()
        name = OF[product][side == "a"]  # the one that is quantized
        codes = torch.randint(-28, 29, sizes[name], device=device).float() * 16
        codes = codes.to(FORMATS[fmt].dtype).float()
        codes[0, 0] = 448.0
        of[name] = codes * 0.37
        got = product_of(operand, run(of["x"], of["w"], None, of["dy"], alone(operand, fmt)))
        whole = [t.double() for t in oriented(product, *(of | {name: codes}).values())]
        scale = nf.quantize(of[name], fmt).scale
        restored = nf.quantize(of[name], fmt).data.float() / codes
        step = restored[codes != 0].unique()
        assert step.numel() == 1 and step.log2().frac() == 0  # codes, but for a power of two
        want = (whole[0] @ whole[1].t()).float() * (scale * step)
        assert_same_bits(got, want, f"{m} {k} {n}")


@every_operand
@pytest.mark.parametrize("others", ["fp8", "fp8_row", "mxfp8", "nvfp4", "bf16"])
def test_beside_products_of_other_kinds(device: str, operand: str, others: str) -> None:
    product = operand.split(".")[0]
    recipe = nf.MixedRecipe("m", **dict.fromkeys(OF, others) | {product: without(operand)})
    skip_where_it_does_not_run(recipe, device)
    x, w, bias, dy = tensors(72, 80, 48, device)
    got = run(x, w, bias, dy, recipe)
    for at, own in enumerate(parts(recipe)):
        assert_same_bits(got[at], run(x, w, bias, dy, own)[at], list(OF)[at])


@every_operand
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite(device: str, operand: str, value: float) -> None:
    """In the quantized operand it makes the product of all, in the other of its row."""
    product, side = operand.split(".")
    x, w, _, dy = tensors(24, 32, 40, device)
    for at, name in enumerate(OF[product][:2]):
        of = {"x": x, "w": w, "dy": dy}
        of[name] = of[name].clone()
        of[name][3, 5] = value
        got = product_of(operand, run(of["x"], of["w"], None, of["dy"], alone(operand, "e4m3")))
        assert not got.isfinite().all()
        if at != "ab".index(side):
            assert not got.isfinite().any()
        else:
            row = {"fprop": 3, "dgrad": 3 if at == 0 else 5, "wgrad": 5}[product]
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
        got = product_of(operand, run(of["x"], of["w"], None, of["dy"], alone(operand, "e4m3")))
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


def settings(x: int, w: int, dy: int) -> tuple[int, int]:
    forward = Forward(x, w, save_x=True).pack()
    backward = Backward(dy, w, False, False, True, torch.float32, torch.bfloat16).pack()
    return forward, backward


@pytest.mark.parametrize("x, w, dy", [(3, 0, 1), (0, 3, 1), (1, 3, 0), (0, 0, 3), (3, 0, 0)])
def test_the_operators_are_the_reference(device: str, x: int, w: int, dy: int) -> None:
    """What they return: codes and scales to the bit; zeros and nothing of an operand in bf16."""
    of_x, of_w, bias, of_dy = tensors(40, 72, 56, device)
    forward, backward = settings(x, w, dy)
    got = ops.linear_forward(of_x, of_w, bias, None, None, forward)
    want = reference.linear_forward(*(t.cpu() for t in (of_x, of_w, bias)), None, None, forward)
    in_fp8 = 2e-4 if device == "cuda" else 1e-5  # see test_scaled_mm.test_product

    def bound(*operands: int) -> float:
        return 1e-5 if IN_BF16 in operands else in_fp8

    assert relative_error(got[0], want[0].to(device)) < bound(x, w)
    assert_same_bits(got[1], want[1], "x's columns")
    assert_same_bits(got[2], want[2], "scales")
    assert got[1].shape == ((0,) if x == IN_BF16 else (padded(72), padded(40)))
    assert (got[2][:4] == 0).all() == (x == IN_BF16) and (got[2][4:] == 0).all() == (w == IN_BF16)
    saved = (of_x, None) if x == IN_BF16 else (got[1], got[2][:4])
    grads = ops.linear_backward(of_dy, *saved, of_w, None, None, 72, backward)
    cpu = [None if t is None else t.cpu() for t in (of_dy, *saved, of_w)]
    wants = reference.linear_backward(*cpu, None, None, 72, backward)
    for grad, right, allowed in zip(grads, wants, (bound(dy, w), bound(dy, x), 4e-3), strict=True):
        assert grad.dtype == right.dtype and relative_error(grad, right.to(device)) < allowed
    if IN_BF16 not in (x, w):  # a scale that the forward measured
        again = ops.linear_backward(of_dy, got[1], got[2], of_w, None, None, 72, backward)
        assert_same_bits(again[0], grads[0], "dx")


def test_refusals(device: str) -> None:
    x, w, _, dy = tensors(16, 32, 48, device)
    forward, backward = settings(IN_BF16, 0, 1)
    rows, columns, scale = ops.quantize_op(w, 0, True, True)
    with pytest.raises(ValueError, match="linear: expected no quantized w beside an operand in bf"):
        ops.linear_forward(x, w, None, rows, scale, forward)
    with pytest.raises(ValueError, match="linear_backward: expected no quantized w beside an op"):
        ops.linear_backward(dy, x, None, None, columns, scale, 32, backward)
    with pytest.raises(ValueError, match=r"linear_backward: expected x \[..., 32\] of 16 rows"):
        ops.linear_backward(dy, x[1:], None, w, None, None, 32, backward)
    with pytest.raises(ValueError, match="linear_backward: expected w for"):
        ops.linear_backward(dy, x, None, None, None, None, 32, backward)


def test_a_format_may_be_left_out_of_either_product() -> None:
    """An operand still has one format in all products that have it in one."""
    for changed, name in (
        ({"fprop": nf.Gemm("e5m2", None)}, "x "),
        ({"wgrad": nf.Gemm("e4m3", None)}, "dy "),
        ({"fprop": nf.Gemm(None, "e5m2")}, "w "),
    ):
        with pytest.raises(ValueError, match=f"^Recipe: expected one format for {name}"):
            nf.Recipe(**changed)
    for gemms in (
        {"fprop": nf.Gemm("e5m2", None), "wgrad": nf.Gemm("e5m2", None)},
        {"fprop": nf.Gemm(None, "e5m2"), "dgrad": nf.Gemm(None, "e5m2"), "wgrad": nf.Gemm()},
        dict.fromkeys(OF, nf.Gemm(None, "e5m2")),
    ):
        assert nf.Recipe(**gemms).mix is not None


@pytest.mark.gpu
@every_operand
@pytest.mark.parametrize("m, k, n", [(500, 144, 520), (1000, 4096, 516), (77, 500, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_exact_as_bf16(
    cuda: str, operand: str, m: int, k: int, n: int, dtype: torch.dtype
) -> None:
    """At most twice as far from exact arithmetic as a bf16 product of such sizes."""
    x, w, _, dy = tensors(m, k, n, cuda, dtype)
    got = product_of(operand, run(x, w, None, dy, alone(operand, "e4m3")))
    error = relative_error(got, exact(operand, "e4m3", x, w, dy))
    a, b = (t.bfloat16() for t in oriented(operand.split(".")[0], x, w, dy))
    bound = 2 * relative_error(a @ b.t(), a.double() @ b.double().t())
    assert error <= bound + 1e-6, f"{error:.2e} > {bound:.2e}"
