"""Public failures of the kind "shapes" do not happen, O-01 to O-12; CASES.md tells of each."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import (
    assert_close_as,
    assert_layer_is_close,
    assert_same_bits,
    dtypes_for,
    kinds,
    relative_error,
    skip_where_it_does_not_run,
)
from torch import Tensor, nn
from torch.nn import functional as F

import narrowfloat as nf
from narrowfloat import formats, ops
from narrowfloat.cast import Cast
from narrowfloat.spec import both

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BLOCKED = sorted(formats.SCALED_FORMATS)  # a scale each row or block
FP4 = sorted(formats.BLOCK_FORMATS)


def layer(
    k: int, n: int, device: str, dtype: torch.dtype, bias: bool = True,
    recipe: str | nf.Recipe = "fp8",
) -> nf.Linear:  # fmt: skip
    made = nf.Linear(k, n, bias, device, dtype, recipe=recipe)
    with torch.no_grad():
        made.weight.normal_()
        if bias:
            made.bias.normal_()
    return made


def room(recipe: nf.Recipe, few: float = 1.4) -> float:
    """The error of few values spreads, that of recipes with few values a scale or a code most."""
    return 1 if recipe.kinds == ("fp8",) else few


@pytest.mark.parametrize("m", [1, 7, 15, 50, 129])
def test_o01_tokens_not_a_multiple_of_16(device, each_recipe, m):
    """O-01: M is the contracted size of the weight gradient and need not divide by 16."""
    for dtype in dtypes_for(each_recipe, BF16, F16):
        made = layer(64, 128, device, dtype, recipe=each_recipe)
        x = torch.randn(m, 64, device=device, dtype=dtype)
        assert_layer_is_close(made, x, spread=room(each_recipe, 1.3))
        g = torch.randn(m, 128, device=device, dtype=dtype)
        assert_layer_is_close(made, x, g, room(each_recipe, 1.3))


@pytest.mark.parametrize(("m", "k", "n"), [(1, 256, 5120), (50, 256, 320), (3, 320, 1024)])
def test_o02_few_rows_into_a_wide_layer(device, each_recipe, m, k, n):
    """O-02: a (1,256) timestep embedding; no padded row is visible."""
    made = layer(k, n, device, BF16, recipe=each_recipe)
    x = torch.randn(m, k, device=device, dtype=BF16)
    y = assert_layer_is_close(made, x, spread=room(each_recipe))
    assert y.stride() == (n, 1)
    assert y.untyped_storage().nbytes() == m * n * 2 + y.storage_offset() * 2


@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_o03_narrow_heads(device, each_recipe, n):
    """O-03: a two-class head with cross entropy."""
    for dtype in dtypes_for(each_recipe, BF16):
        made = layer(768, n, device, dtype, recipe=each_recipe)
        x = torch.randn(32, 768, device=device, dtype=dtype, requires_grad=True)
        target = torch.randint(0, n, (32,), device=device)
        y = made(x)
        y.retain_grad()
        loss = F.cross_entropy(y.float() / 16, target)  # not saturated: w is N(0, 1)
        loss.backward()
        assert y.shape == (32, n) and math.isfinite(loss.item())
        assert y.is_contiguous() and made.weight.grad.shape == (n, 768)
        if n == 1:  # one class has no gradient at all
            assert not made.weight.grad.any() and not x.grad.any()
            continue
        g, spread = y.grad.double(), room(each_recipe)
        _, of_dx, of_dw = kinds(each_recipe)
        assert_close_as(made.weight.grad, g.t() @ x.detach().double(), of_dw, spread)
        assert_close_as(x.grad, g @ made.weight.detach().double(), of_dx, spread)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(32, 15, 16), (32, 17, 16), (33, 15, 17), (5, 31, 8), (64, 100, 24)]
)
def test_o04_odd_n_and_small_k(device, each_recipe, m, n, k):
    """O-04: (m, n, k) = (32, 15, 16) works, gradients too."""
    for dtype in dtypes_for(each_recipe, BF16, F16):
        made = layer(k, n, device, dtype, recipe=each_recipe)
        g = torch.randn(m, n, device=device, dtype=dtype)
        x = torch.randn(m, k, device=device, dtype=dtype)
        assert_layer_is_close(made, x, g, room(each_recipe))
        y = nf.linear(x, made.weight.detach(), None, each_recipe)
        assert y.shape == (m, n)
        ref = x.double() @ made.weight.detach().double().t()
        assert_close_as(y, ref, kinds(each_recipe)[0], room(each_recipe))


@pytest.mark.parametrize("k", [1, 2, 767, 769, 1000])
def test_o05_any_k_works(device, each_recipe, k):
    """O-05: no K is refused, so no message has to explain it; one that does not match is named."""
    made = layer(k, 48, device, BF16, recipe=each_recipe)
    x = torch.randn(32, k, device=device, dtype=BF16)
    if k < 3:  # too few terms for the tolerance of a sum: values that every format has
        with torch.no_grad():
            made.weight.fill_(2.0)
        x = torch.full((32, k), 4.0, device=device, dtype=BF16)
    assert_layer_is_close(made, x, spread=room(each_recipe))
    with pytest.raises(ValueError, match=f"one K.*{k}.*{k + 1}"):
        nf.linear(x, torch.randn(48, k + 1, device=device), None, each_recipe)


def test_o05_a_refusal_names_what_was_wrong(device):
    """O-05: K that does not match is named with both values, legal sizes are not blamed."""
    x, w = torch.randn(32, 767, device=device), torch.randn(48, 768, device=device)
    with pytest.raises(ValueError, match="one K.*767.*768"):
        nf.linear(x, w)
    with pytest.raises(ValueError, match="one K.*767.*768"):
        nf.matmul(x, w.t())
    with pytest.raises(ValueError, match=r"bias \[48\].*\(47,\)"):
        nf.linear(x[:, :1], w[:, :1], torch.zeros(47, device=device))
    with pytest.raises(ValueError, match=r"w \[N,K\].*3 dimensions"):
        nf.linear(x, torch.randn(2, 48, 767, device=device))


@pytest.mark.parametrize("m, k", [(1, 256), (352, 256), (8352, 4096)])
def test_o06_rows_beyond_a_tile(device: str, m: int, k: int) -> None:
    """O-06: the last of 8352 rows is that row alone."""
    if device == "cpu" and m > 352:
        pytest.skip("on the GPU: too slow for the CPU's reference")
    x, w = torch.randn(m, k, device=device), torch.randn(96, k, device=device)
    y = nf.linear(x, w, None, "fp8_row")
    alone = nf.linear(x[-1:], w, None, "fp8_row")
    assert relative_error(y[-1:], alone) < 1e-3
    rows, scales, *_ = ops.quantize_op(x, both(Cast("e4m3", "row"), None).pack())
    assert scales.shape == (formats.padded(m),) and rows.shape[0] == formats.padded(m)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64), (2, 0, 0, 64)])
def test_o07_no_tokens(device, each_recipe, shape):
    """O-07: zero tokens give an empty y and zero gradients, and leave no error behind."""
    for dtype in dtypes_for(each_recipe, BF16):
        made = layer(64, 128, device, dtype, recipe=each_recipe)
        x = torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)
        y = made(x)
        assert y.shape == (*shape[:-1], 128) and y.dtype == dtype
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == shape
        for parameter in (made.weight, made.bias):
            assert parameter.grad is not None and parameter.grad.shape == parameter.shape
            assert not parameter.grad.any()
        if device == "cuda":
            torch.cuda.synchronize()
        x = torch.randn(40, 64, device=device, dtype=dtype)
        assert_layer_is_close(made, x, spread=room(each_recipe, 1.2))


def test_o07_no_tokens_under_a_transform(device, each_recipe):
    """O-07: where functorch differentiates, too."""
    if each_recipe.delayed is not None:
        pytest.skip("delayed scaling is refused there")
    x, w = torch.randn(0, 64, device=device), torch.randn(32, 64, device=device)
    dw = torch.func.grad(lambda w: nf.linear(x, w, None, each_recipe).sum())(w)
    assert dw.shape == w.shape and not dw.any()


@pytest.mark.parametrize(("k", "n"), [(0, 8), (8, 0), (0, 0)])
def test_o07_no_features(device, each_recipe, k, n):
    """O-07: K = 0 gives the bias, N = 0 an empty y; the gradients have their shapes."""
    x = torch.randn(3, k, device=device, requires_grad=True)
    w = torch.randn(n, k, device=device, requires_grad=True)
    bias = torch.randn(n, device=device, requires_grad=True)
    y = nf.linear(x, w, bias, each_recipe)
    assert_same_bits(y.detach(), bias.detach().expand(3, n), "y")
    y.backward(torch.ones_like(y))
    assert x.grad.shape == x.shape and not x.grad.any()
    assert w.grad.shape == w.shape and not w.grad.any()
    assert torch.equal(bias.grad, torch.full_like(bias, 3))


@pytest.mark.parametrize("format", [*formats.FORMATS, *BLOCKED, *FP4])
@pytest.mark.parametrize("shape", [(0,), (0, 64), (2, 0, 64), (3, 0)])
def test_o07_quantize_nothing(device, shape, format):
    """O-07: an empty tensor has the scale 1 and comes back empty."""
    q = nf.quantize(torch.randn(*shape, device=device), format)
    assert q.dequantize().shape == shape
    if format in formats.FORMATS:
        assert q.data.shape == shape and q.scale.item() == 1


def exact_scale(amax: float, limit: float) -> float:
    """amax / limit rounded once to fp32: a double holds enough bits for that, whereas torch may
    multiply by a rounded reciprocal."""
    return torch.tensor(amax / limit, dtype=torch.float32).item()


def few_values(*shape: int, device: str, dtype: torch.dtype = BF16) -> Tensor:
    """+-1 and +-2, a 2 in each row: each row has the tensor's amax, and every sum is exact."""
    x = torch.randint(0, 4, shape, device=device, dtype=torch.int8)
    x = (x * 2 - 3).clamp(-2, 2).to(dtype)  # -3 -1 1 3 -> -2 -1 1 2
    x[..., 0] = 2
    return x


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (70000, 64, 16),
        (262141, 128, 16),
        pytest.param(4194309, 64, 16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("recipe", ["fp8", *BLOCKED, *FP4])
def test_o08_more_rows_than_a_grid_dimension(device, recipe, m, k, n):
    """O-08: rows beyond 65,535 blocks of the grid's y, forward, quantize and weight gradient."""
    if device == "cpu" and m > 70000:
        pytest.skip("on the GPU: too slow for the CPU's reference")
    skip_where_it_does_not_run(recipe, device)
    x = few_values(m, k, device=device)
    w = few_values(n, k, device=device).requires_grad_()
    rows = [0, 65535, 65536, m - 1]
    format = "e4m3" if recipe == "fp8" else recipe
    y = nf.linear(x, w, None, recipe)
    q = nf.quantize(x, format)
    for row in rows:
        alone = nf.linear(x[row : row + 1], w.detach(), None, recipe)
        ref = x[row : row + 1].float() @ w.detach().float().t()
        torch.testing.assert_close(y[row : row + 1].detach(), alone, rtol=2**-7, atol=0.01)
        torch.testing.assert_close(alone.float(), ref, rtol=2**-7, atol=0.01)
        of_row = nf.quantize(x[row : row + 1], format)
        assert_same_bits(q.data[row : row + 1], of_row.data, f"row {row}")
        if recipe != "fp8":
            assert_same_bits(q.scales[row : row + 1], of_row.scales, f"row {row}")
    # the weight gradient sees the last rows too
    g = torch.zeros_like(y)
    for row in rows:
        g[row] = 1
    y.backward(g)
    ref = x[rows].float().sum(0).expand(n, k)
    if recipe in FP4:  # rotated: nothing is exact
        assert relative_error(w.grad, ref) < 0.3
    else:
        torch.testing.assert_close(w.grad.float(), ref, rtol=2**-7, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8", *BLOCKED])
def test_o09_more_than_2_to_31_elements(large_memory, recipe):
    """O-09: 32-bit offsets would wrap; the last rows, the planted amax and dw are right. FP4's are
    in test_fp4_large.py."""
    cuda = large_memory
    m, k, n = 1048577, 2048, 16
    x = torch.randn(m, k, device=cuda, dtype=BF16)
    x[-1, -1] = 24.0
    tail = x[-8:].clone()  # holds the tensor's amax: alone it has the same scale
    w = torch.randn(n, k, device=cuda, dtype=BF16, requires_grad=True)
    q, alone = (nf.quantize(t, "e4m3" if recipe == "fp8" else recipe) for t in (x, tail))
    assert_same_bits(q.data[-8:], alone.data, "the last rows' codes")
    if recipe == "fp8":
        assert q.scale.item() == exact_scale(24.0, 448.0)
    else:
        assert_same_bits(q.scales[-8:], alone.scales, "the last rows' scales")
    del q
    skip_where_it_does_not_run(recipe, cuda)
    forward, _, gradient = kinds(recipe)
    y = nf.linear(x, w, None, recipe)
    y_alone = nf.linear(tail, w.detach(), None, recipe)
    torch.testing.assert_close(y[-8:].detach(), y_alone, rtol=2**-6, atol=1.0)
    assert_close_as(y[-8:].detach(), tail.double() @ w.detach().double().t(), forward)
    del x
    g = torch.zeros_like(y)
    g[-8:] = torch.randn(8, n, device=cuda, dtype=BF16)
    g[-1, -1] = 8.0  # the maximum in the last element
    y.backward(g)
    assert_close_as(w.grad, g[-8:].double().t() @ tail.double(), gradient)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", [(5, 13), (1, 1), (3, 200), (1, 7), (33,), (2, 3, 17), (129, 65)])
def test_o10_amax_of_odd_widths(device, shape, dtype, format):
    """O-10: the scale is max |x| / max exactly, wherever the largest value stands."""
    limit = {"e4m3": 448.0, "e5m2": 57344.0}[format]
    x = torch.rand(*shape, device=device).to(dtype)
    size = x.numel()
    row = x.shape[-1]
    spots = {row - 1, 0, size - 1, size // 2, size - row, max(size - row - 1, 0)}
    for spot in sorted(spots) if size > 40 else range(size):  # row 0's last column first
        for sign in (1, -1):
            planted = x.clone()
            planted.view(-1)[spot] = sign * 1.7
            amax = planted.abs().max().item()
            q = nf.quantize(planted, format)
            assert q.scale.item() == exact_scale(amax, limit), (spot, sign)
            code = q.data.float().reshape(-1)[spot].item()
            assert code == sign * limit, (spot, sign)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_o10_amax_of_strided_tensors(device, format):
    """O-10: nor is an element of a transposed, sliced or expanded tensor passed over."""
    limit = {"e4m3": 448.0, "e5m2": 57344.0}[format]
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:, 3:], lambda t: t[::3]):
        base = torch.rand(13, 37, device=device)
        for row in (0, -1):
            for column in (0, -1):
                x = view(base.clone())
                x[row, column] = -3.25
                scale = nf.quantize(x, format).scale.item()
                assert scale == exact_scale(3.25, limit), (row, column)


@pytest.mark.parametrize("shape", [(5, 13), (1, 1), (3, 200)])
@pytest.mark.parametrize("format", BLOCKED)
def test_o10_scales_of_odd_widths(device: str, shape: tuple[int, int], format: str) -> None:
    """O-10: wherever the amax of a row or block stands, its scale is its own."""
    width = formats.SCALED_FORMATS[format].block or shape[1]
    for row in range(shape[0]):
        for column in {0, shape[1] - 1, shape[1] // 2}:
            x = torch.rand(shape, device=device)
            x[row, column] = 448.0
            q = nf.quantize(x, format)
            scales = q.scales.float()
            assert scales[row, column // width] == 1
            assert (scales == 1).sum() == 1
            assert q.data[row, column].float() == 448


@pytest.mark.parametrize("format", FP4)
@pytest.mark.parametrize("m, k", [(5, 13), (1, 1), (3, 200)])
def test_o10_every_block_has_its_own_scale(device: str, m: int, k: int, format: str) -> None:
    """O-10: widths that are no power of two, the amax in row 0, last column: each block's scale is
    that of its own amax, row 0 included."""
    x = torch.randn(m, k, device=device)
    x[0, -1] = 56.0
    q = nf.quantize(x, format)
    size = {"nvfp4": 16, "mxfp4": 32}[format]
    blocks = nn.functional.pad(x.bfloat16().float(), (0, -k % size)).unflatten(1, (-1, size))
    amax = blocks.abs().amax(2).double().cpu()
    assert q.scales.shape == amax.shape
    if format == "mxfp4":
        assert torch.equal(q.scales.float().double().cpu(), 2.0 ** torch.ceil(torch.log2(amax / 6)))
        return
    assert q.scale.item() == torch.tensor(56 / (448 * 6)).item()
    want = (amax * 8).float().to(torch.float8_e4m3fn)  # 448 / 56: exact, so that ties are ties
    assert torch.equal(q.scales.float().cpu(), want.float())
    assert q.scales.float()[0, -1] == 448


@pytest.mark.parametrize("shape", [(2, 3, 5, 64), (7, 64), (64,), (1, 1, 64), (2, 1, 3, 1, 64)])
def test_o11_any_number_of_dimensions(device, each_recipe, shape):
    """O-11: x of one to five dimensions; y and grad_x have its leading ones."""
    n = 640  # enough outputs of one row for the error to be near its mean
    for dtype, bias in itertools.product(dtypes_for(each_recipe, BF16), (True, False)):
        made = layer(64, n, device, dtype, bias, each_recipe)
        x = torch.randn(*shape, device=device, dtype=dtype)
        g = torch.randn(*shape[:-1], n, device=device, dtype=dtype)
        y = assert_layer_is_close(made, x, g, room(each_recipe, 1.3))
        assert y.shape == (*shape[:-1], n)
        assert_same_bits(y.reshape(-1, n), made(x.reshape(-1, 64)).detach(), "as the flat call")


@pytest.mark.parametrize("format", [*formats.FORMATS, *BLOCKED])
def test_o11_quantize_keeps_the_dimensions(device, format):
    for shape in ((2, 3, 5, 64), (7, 64), (64,), (1, 1, 64), (2, 1, 3, 1, 64)):
        assert nf.quantize(torch.randn(shape, device=device), format).data.shape == shape


def test_o11_a_scalar_is_refused(device):
    """O-11: a tensor of no dimensions has no features."""
    with pytest.raises(ValueError, match="dimension"):
        nf.linear(torch.tensor(1.0, device=device), torch.randn(4, 4, device=device))


@pytest.mark.parametrize("k", [32, 96, 160, 288, 1600])
def test_o12_padded_scale_rows(device, each_recipe, k):
    """O-12: the stride of the scales follows the padded K; each group of 32 rows is right."""
    x, w = torch.randn(200, k, device=device), torch.randn(64, k, device=device)
    y, want = nf.linear(x, w, None, each_recipe), x @ w.t()
    limits = {"bf16": 0.01, "e4m3": 0.055, "e5m2": 0.075, "nvfp4": 0.17, "mxfp4": 0.20}
    for first in range(0, 200, 32):
        rows = slice(first, first + 32)
        assert relative_error(y[rows], want[rows]) < limits[kinds(each_recipe)[0]]


@pytest.mark.parametrize("k", [32, 96, 160, 288, 1600])
@pytest.mark.parametrize("format", [*BLOCKED, *FP4])
def test_o12_padded_scales_of_quantized_tensors(device, format, k):
    """O-12: the same of what quantize() gives."""
    x = torch.randn(200, k, device=device)
    back = nf.quantize(x, format).dequantize()
    limit = {"nvfp4": 0.11, "mxfp4": 0.13}.get(format, 0.04)
    for first in range(0, 200, 32):
        rows = slice(first, first + 32)
        assert relative_error(back[rows], x[rows]) < limit
