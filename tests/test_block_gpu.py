"""Decides, on a GPU, that the kernels of FP8 with finer scales equal the reference bit for bit and
that the products that they feed are as exact as bf16's."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import assert_close_as, assert_same_bits, relative_error
from torch import Tensor, nn
from torch.nn.functional import linear

import narrowfloat as nf
from narrowfloat import ops, reference_block
from narrowfloat.formats import BLOCK, BLOCK_POW2, MX, ROW, SCALINGS, Scaling
from narrowfloat.settings import BlockLayer, BlockOrientation, BlockQuantize

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL = [
    BlockOrientation(ROW.code),
    BlockOrientation(ROW.code, e5m2=True),
    BlockOrientation(BLOCK.code),
    BlockOrientation(BLOCK.code, square=True),
    BlockOrientation(BLOCK_POW2.code),
    BlockOrientation(BLOCK_POW2.code, square=True),
    BlockOrientation(BLOCK_POW2.code, operand=True),
    BlockOrientation(MX.code),
    BlockOrientation(MX.code, operand=True),
]
NOTHING = BlockOrientation()


def check(x: Tensor, rows: BlockOrientation, columns: BlockOrientation, what: str = "") -> None:
    settings = BlockQuantize(rows, columns).pack()
    got = ops.block_quantize_op(x, settings)
    want = reference_block.block_quantize(x.cpu(), settings)
    names = ("rows", "row scales", "columns", "column scales")
    for g, w, name in zip(got, want, names, strict=True):
        assert_same_bits(g, w, f"{what} {tuple(x.shape)} {x.dtype} {rows} {columns} {name}")


@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(cuda: str, dtype: torch.dtype, how: BlockOrientation) -> None:
    for shape in [(1, 1), (5, 13), (129, 257), (300, 136), (500, 144), (1024, 2056), (3000, 24)]:
        x = torch.randn(shape, device=cuda) * 10.0 ** torch.randint(-3, 3, shape, device=cuda)
        x = x.to(dtype)
        for rows, columns in ((how, NOTHING), (NOTHING, how), (how, how)):
            check(x, rows, columns)
        other = ALL[(ALL.index(how) + 1) % len(ALL)]
        if not (how.square or other.square):
            check(x, how, other)


@pytest.mark.parametrize("kind", ["zeros", "tiny", "subnormal", "huge", "outlier", "nan", "inf"])
def test_values(cuda: str, kind: str) -> None:
    x = torch.randn(270, 300, device=cuda)
    x *= {"zeros": 0.0, "tiny": 1e-30, "subnormal": 1e-39, "huge": 1e36}.get(kind, 1.0)
    if kind == "outlier":
        x[3, 5] = 1e6
        x[40:] *= 1e-5
    if kind in ("nan", "inf"):
        x[269, 299], x[3, 4] = float(kind), -float(kind)
    for dtype, how in itertools.product(DTYPES, ALL):
        check(x.to(dtype), how, how, kind)


def test_every_bf16_value(cuda: str) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = x.reshape(256, 256).to(cuda)
    for case in (torch.where(x.isfinite(), x, torch.zeros_like(x)), x, x.t()):
        for how in ALL:
            check(case, how, how, "all")


def test_layouts(cuda: str) -> None:
    base = torch.randn(4, 196, 224, device=cuda)
    for dtype in DTYPES:
        for name, x in {
            "transposed": base[0].to(dtype).t(),
            "columns apart": base[0].to(dtype)[:, ::2],
            "rows apart": base[0].to(dtype)[::2],
            "unaligned": base.to(dtype).flatten()[1 : 1 + 164 * 148].view(164, 148),
            "ragged rows on 16 bytes": base[0].to(dtype)[:, :197],
            "expanded": base[0, 0, 0].to(dtype).expand(17, 19),
            "no rows": base[0, :0].to(dtype),
            "no columns": base[0, :, :0].to(dtype),
        }.items():
            for how in ALL:
                check(x, how, how, name)


def test_more_than_2_31_elements(cuda: str) -> None:
    m, k = (1 << 20) + 140, 2048 + 8
    x = torch.randn(1024, k, device=cuda, dtype=torch.bfloat16).repeat(m // 1024 + 1, 1)[:m]
    x[-1, -1] = 100.0
    tail = m // 128 * 128 - 128  # the last whole rows of blocks and what is beyond
    for how in (BlockOrientation(BLOCK.code), BlockOrientation(MX.code)):
        got = ops.block_quantize_op(x, BlockQuantize(how, how).pack())
        want = reference_block.block_quantize(x[tail:].cpu(), BlockQuantize(how, how).pack())
        assert_same_bits(got[0][tail:], want[0], "rows")
        assert_same_bits(got[2][:, tail:], want[2], "columns")
        del got
    got = ops.block_quantize_op(x, BlockQuantize(BlockOrientation(ROW.code)).pack())
    want = reference_block.block_quantize(x[tail:].cpu(), ROW.code)
    assert_same_bits(got[0][tail:], want[0], "rows")


def operand(t: Tensor, scaling: Scaling, square: bool = False) -> Tensor:
    """fp64 values of an operand as the reference quantizes it."""
    square = square and scaling.square
    quantized = reference_block.quantize_operand(t, scaling, square=square)
    return reference_block.values(quantized, scaling, square).double()


PRODUCTS = [
    (500, 520, 144), (501, 520, 144), (1000, 516, 4096), (16, 16, 16), (1, 8, 32),
    (128, 128, 128), (1000, 520, 4096), (4096, 1024, 1040), (77, 3, 500),
]  # fmt: skip


@pytest.mark.parametrize("name", ["row", "block", "block_pow2", "mx", "bf16"])
@pytest.mark.parametrize("shape", PRODUCTS)
def test_products(cuda: str, name: str, shape: tuple[int, int, int]) -> None:
    """All three, at most twice as far from exact arithmetic as a bf16 product of such sizes."""
    m, n, k = shape
    scaling = SCALINGS[name]
    layer = BlockLayer(*[scaling.code] * 3, wanted=True, dw_dtype=torch.bfloat16)
    x, dy = (torch.randn(m, s, device=cuda, dtype=torch.bfloat16) for s in (k, n))
    w = torch.randn(n, k, device=cuda, dtype=torch.bfloat16)
    bias = torch.randn(n, device=cuda, dtype=torch.bfloat16)
    y, *saved, w_amax = ops.block_linear_forward(x, w, bias, layer.pack())
    if name == "bf16":
        saved = [x, None]
    dx, dw, _ = ops.block_linear_backward(dy, *saved, w, w_amax, k, layer.pack())

    def of(t: Tensor, square: bool = False) -> Tensor:
        return t.double() if name == "bf16" else operand(t, scaling, square)

    exact_y = of(x) @ of(w, True).t() + bias.double()
    exact_dx = of(dy) @ of(w.t(), True).t()
    exact_dw = of(dy.t()) @ of(x.t()).t()
    plain = {
        "y": (y, exact_y, linear(x, w, bias), x.double() @ w.double().t() + bias.double()),
        "dx": (dx, exact_dx, dy @ w, dy.double() @ w.double()),
        "dw": (dw, exact_dw, dy.t() @ x, dy.double().t() @ x.double()),
    }
    for what, (got, exact, bf16, bf16_exact) in plain.items():
        error, bound = relative_error(got, exact), 2 * relative_error(bf16, bf16_exact)
        assert error <= bound + 1e-6, f"{what}: {error:.2e} > {bound:.2e}"


@pytest.mark.parametrize(
    "name", [n for n, r in nf.RECIPES.items() if isinstance(r, nf.BlockRecipe)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer(cuda: str, name: str, dtype: torch.dtype) -> None:
    """Against nn.Linear, as close as the format is."""
    for m, k, n in ((384, 512, 256), (500, 264, 392), (33, 72, 100)):
        plain = nn.Linear(k, n, device=cuda, dtype=dtype)
        x, dy = (torch.randn(m, s, device=cuda, dtype=dtype) for s in (k, n))
        leaves = [t.detach().clone().requires_grad_() for t in (x, plain.weight, plain.bias)]
        y = nf.linear(*leaves, name)
        y.backward(dy)
        x.requires_grad_()
        want = plain(x)
        want.backward(dy)
        kind = "e5m2" if nf.RECIPES[name].dy == "e5m2" else "e4m3"
        assert_close_as(y, want, "e4m3")
        assert_close_as(leaves[0].grad, x.grad, kind)
        assert_close_as(leaves[1].grad, plain.weight.grad, kind)
        assert relative_error(leaves[2].grad, plain.bias.grad) < 1e-2


def test_deterministic(cuda: str) -> None:
    x = torch.randn(2000, 1000, device=cuda, dtype=torch.bfloat16)
    for name in ("row", "block", "mx"):
        code = SCALINGS[name].code
        layer = BlockLayer(code, code, code, wanted=True, db_dtype=torch.float32)
        w = torch.randn(1000, 1000, device=cuda, dtype=torch.bfloat16)
        runs = [ops.block_linear_backward(x, None, None, w, None, 1000, layer.pack()) for _ in "ab"]
        assert_same_bits(runs[0][2], runs[1][2], f"{name} db")
        assert_same_bits(runs[0][0], runs[1][0], f"{name} dx")
        assert relative_error(runs[0][2], x.double().sum(0)) < 1e-5
