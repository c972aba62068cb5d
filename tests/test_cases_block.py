"""Decides that the public failure cases (shared/cases) do not happen with scales finer than a
tensor's: by row, by blocks, in mxfp8, with products in bf16."""

from __future__ import annotations

import copy
import gc
import io
import logging
import math
import warnings

import pytest
import torch
from conftest import assert_close_as, assert_layer_is_close, assert_same_bits, relative_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowfloat as nf
from narrowfloat import formats, ops, support
from narrowfloat.settings import BlockLayer, BlockOrientation, BlockQuantize

RECIPES = sorted(name for name, r in nf.RECIPES.items() if isinstance(r, nf.BlockRecipe))
MIXED = nf.BlockRecipe("mixed", "mx", "row", "block_pow2")
SCALED = sorted(formats.SCALED_FORMATS)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(params=[*(nf.RECIPES[name] for name in RECIPES), MIXED], ids=str)
def recipe(request: pytest.FixtureRequest, device: str) -> nf.BlockRecipe:
    """Each recipe that the device runs."""
    if not (answer := nf.supported(request.param, device)):
        pytest.skip(answer.reason)
    return request.param


def kind_of(recipe: nf.BlockRecipe, product: str) -> str:
    of_dy = product != "fprop" and recipe.dy == "e5m2" and getattr(recipe, product) == "row"
    return "e5m2" if of_dy else "e4m3"


def layer(k: int, n: int, recipe: nf.BlockRecipe, device: str, dtype=F32) -> nf.Linear:
    made = nf.Linear(k, n, device=device, dtype=dtype, recipe=recipe)
    with torch.no_grad():
        made.weight.normal_()
        made.bias.normal_()
    return made


def check_all(made: nf.Linear, x: Tensor, g: Tensor | None = None, spread: float = 1) -> Tensor:
    kinds = tuple(kind_of(made.recipe, product) for product in ("fprop", "dgrad", "wgrad"))
    return assert_layer_is_close(made, x, g, kinds, spread)


# ---- shapes ----


@pytest.mark.parametrize("m", [1, 7, 15, 50])
def test_o01_any_token_count(device: str, recipe: nf.BlockRecipe, m: int) -> None:
    check_all(layer(64, 128, recipe, device), torch.randn(m, 64, device=device), spread=1.3)


@pytest.mark.parametrize("m, k, n", [(1, 256, 5120), (32, 768, 2), (32, 16, 15), (8, 767, 24)])
def test_o02_to_o05_ragged_sizes(
    device: str, recipe: nf.BlockRecipe, m: int, k: int, n: int
) -> None:
    made = layer(k, n, recipe, device)
    g = torch.randn(m, n, device=device)
    check_all(made, torch.randn(m, k, device=device), g, spread=1.4)


def test_o06_rows_beyond_a_tile(device: str) -> None:
    """O-06: the last of 8352 rows is that row alone."""
    m, k = (8352, 4096) if device == "cuda" else (352, 256)
    x, w = torch.randn(m, k, device=device), torch.randn(96, k, device=device)
    y = nf.linear(x, w, None, "fp8_row")
    alone = nf.linear(x[-1:], w, None, "fp8_row")
    assert relative_error(y[-1:], alone) < 1e-3
    rows, scales, _, _ = ops.block_quantize_op(x, BlockQuantize(BlockOrientation(1)).pack())
    assert scales.shape == (formats.padded(m),) and rows.shape[0] == formats.padded(m)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_o07_no_tokens(device: str, recipe: nf.BlockRecipe, shape: tuple[int, ...]) -> None:
    made = layer(64, 128, recipe, device)
    x = torch.randn(shape, device=device, requires_grad=True)
    y = made(x)
    assert y.shape == (*shape[:-1], 128)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert made.weight.grad.shape == (128, 64) and not made.weight.grad.any()
    check_all(made, torch.randn(40, 64, device=device), spread=1.2)


@pytest.mark.parametrize("m, k", [(262141, 128), (70000, 64), (4194309, 64)])
@pytest.mark.parametrize("format", SCALED)
@pytest.mark.gpu
def test_o08_more_rows_than_a_grid_dimension(cuda: str, m: int, k: int, format: str) -> None:
    x = torch.randn(m, k, device=cuda, dtype=BF16)
    q = nf.quantize(x, format)
    for row in (0, 65535, 65536, m - 1):
        alone = nf.quantize(x[row], format)
        assert_same_bits(q.data[row], alone.data)
        assert_same_bits(q.scales[row], alone.scales)


@pytest.mark.parametrize("format", SCALED)
@pytest.mark.gpu
def test_o09_more_than_2_to_31_elements(cuda: str, format: str) -> None:
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GB of free GPU memory")
    m, k = 1048577, 2048
    x = torch.randn(m, k, device=cuda, dtype=BF16)
    x[-1, -1] = 24.0
    q, alone = nf.quantize(x, format), nf.quantize(x[-8:], format)
    assert_same_bits(q.data[-8:], alone.data)
    assert_same_bits(q.scales[-8:], alone.scales)


@pytest.mark.parametrize("shape", [(5, 13), (1, 1), (3, 200)])
@pytest.mark.parametrize("format", SCALED)
def test_o10_scales_of_odd_widths(device: str, shape: tuple[int, int], format: str) -> None:
    """O-10: wherever the largest value stands, its block's scale is its own."""
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


def test_o11_any_dimensions(device: str, recipe: nf.BlockRecipe) -> None:
    made = layer(64, 320, recipe, device)
    for shape in ((2, 3, 5, 64), (7, 64), (64,)):
        x = torch.randn(shape, device=device)
        g = torch.randn(*shape[:-1], 320, device=device)
        y = check_all(made, x, g, spread=1.3)
        assert_same_bits(y.reshape(-1, 320), made(x.reshape(-1, 64)).detach())


@pytest.mark.parametrize("k", [32, 96, 160, 288, 1600])
def test_o12_padded_scale_rows(device: str, recipe: nf.BlockRecipe, k: int) -> None:
    """O-12: each group of 32 rows is right."""
    x, w = torch.randn(200, k, device=device), torch.randn(64, k, device=device)
    y, want = nf.linear(x, w, None, recipe), x @ w.t()
    for first in range(0, 200, 32):
        rows = slice(first, first + 32)
        assert relative_error(y[rows], want[rows]) < 0.055


# ---- layout ----


def test_o13_to_o17_views(device: str, recipe: nf.BlockRecipe) -> None:
    """O-13 to O-17: unaligned, transposed, strided, expanded views equal their contiguous copies,
    forward and both gradients; x and the weight nearly square and square."""
    flat = torch.randn(4 * 48 * 64 + 1, device=device).bfloat16()
    inputs = [
        flat[1 : 1 + 48 * 64].view(48, 64),
        flat[: 64 * 48].view(64, 48).t(),
        flat[: 48 * 128].view(48, 128)[:, ::2],
        flat[: 3 * 16 * 64].view(3, 16, 64).permute(1, 0, 2),
        flat[:64].expand(32, 64),
        torch.randn(256, 250, device=device).bfloat16().t(),
        torch.randn(256, 256, device=device).bfloat16().t(),
    ]
    for view in inputs:
        k = view.shape[-1]
        for n in (40, k, k + 6):
            w = torch.randn(k, n, device=device).bfloat16().t()
            results = []
            for x, weight in ((view, w), (view.contiguous(), w.contiguous())):
                x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
                y = nf.linear(x, weight, None, recipe)
                g = torch.ones((), device=device, dtype=y.dtype).expand(y.shape)
                results.append((y, *torch.autograd.grad(y, (x, weight), g)))
            for a, b in zip(*results, strict=True):
                assert_same_bits(a, b)
    assert torch.equal(inputs[4][0], flat[:64])  # nothing was written to


def test_o15_transposed_gradient(device: str, recipe: nf.BlockRecipe) -> None:
    made = layer(64, 40, recipe, device)
    x, c = torch.randn(48, 64, device=device), torch.randn(40, 48, device=device)
    results = []
    for g in (c.t(), c.t().contiguous()):
        leaf = x.clone().requires_grad_()
        made.zero_grad()
        made(leaf).backward(g)
        results.append((leaf.grad, made.weight.grad.clone()))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_o18_batches_by_row(device: str, recipe: nf.BlockRecipe) -> None:
    """O-18: a batch [B, S, K] is the flat call, eager, checkpointed and compiled."""
    made = layer(256, 48, recipe, device)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 64, 256, device=device)
    want = made(x.view(-1, 256)).detach()
    for call in (made, compiled, lambda t: checkpoint(made, t, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.sum().backward()
        assert_same_bits(y.detach().view(-1, 48), want)
        assert leaf.grad.shape == x.shape


# ---- values ----


@pytest.mark.parametrize("zero", ["x", "w", "g", "x w g"])
def test_o19_zeros(device: str, recipe: nf.BlockRecipe, zero: str) -> None:
    x, w, g = (torch.randn(s, device=device) for s in ((32, 64), (48, 64), (32, 48)))
    x, w, g = (
        t.zero_() if name in zero.split() else t for t, name in zip((x, w, g), "xwg", strict=True)
    )
    x, w = x.requires_grad_(), w.requires_grad_()
    y = nf.linear(x, w, None, recipe)
    dx, dw = torch.autograd.grad(y, (x, w), g)
    for t, operands in ((y, "xw"), (dx, "gw"), (dw, "xg")):
        assert t.isfinite().all()
        assert (t == 0).all() == any(name in zero for name in operands)


def test_o20_zero_rows(device: str, recipe: nf.BlockRecipe) -> None:
    """O-20: zero rows give the bias exactly; a LoRA pair with B = 0 trains."""
    made = layer(64, 48, recipe, device)
    x = torch.randn(16, 64, device=device)
    x[3] = x[7] = 0
    y = made(x)
    assert torch.equal(y[3], made.bias) and torch.equal(y[7], made.bias)
    a = nf.Linear(64, 8, bias=False, device=device, recipe=recipe)
    b = nf.Linear(8, 48, bias=False, device=device, recipe=recipe)
    nn.init.zeros_(b.weight)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.01)
    losses = []
    for _ in range(5):
        loss = ((y.detach() - made(x).detach() - b(a(x)) + 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]


@pytest.mark.parametrize("format", SCALED)
def test_o21_o23_tiny(device: str, format: str) -> None:
    """O-21, O-23: no NaN where amax is subnormal; near 1e-36 the error is the usual one."""
    w = torch.randn(48, 64, device=device)
    for value in (1e-40, 1e-45, 1e-39):
        x = torch.full((16, 64), value, device=device)
        if nf.supported(format, device):
            assert nf.linear(x, w, None, format).isfinite().all()
        q = nf.quantize(x, format)
        assert q.scales.float().isfinite().all()
        back = q.dequantize()
        assert back.isfinite().all() and (back - x).abs().max() <= x.max()
    x = (torch.randn(64, 1024, device=device) * 1e-36).bfloat16()
    x[:, ::7] *= 1e-3
    back = nf.quantize(x, format).dequantize(F32)
    large = x.abs() > 1e-36
    scaled, restored = x.double() / 1e-36, back.double() / 1e-36  # squares underflow
    assert relative_error(restored[large], scaled[large]) < 0.05
    assert back.abs().max() <= x.abs().max().float() * 1.07


def test_o26_scales_before_the_store(device: str, recipe: nf.BlockRecipe) -> None:
    """O-26: sums over 65,504 in codes do not overflow a 16-bit result that fits."""
    ones = torch.ones(16, 4096, device=device, dtype=F16)
    assert (nf.linear(ones, ones, None, recipe) == 4096).all()
    x = torch.rand(32, 4096, device=device).half() * 0.06
    w = torch.rand(32, 4096, device=device).half() * 0.1
    y = nf.linear(x, w, None, recipe)
    assert y.isfinite().all()
    assert relative_error(y, x.float() @ w.float().t()) < 0.05


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_o27_o29_nonfinite_surfaces(device: str, recipe: nf.BlockRecipe, value: float) -> None:
    """O-27, O-29: what is not finite comes out in its rows, and nowhere else but with w's blocks of
    128 rows."""
    x, w = torch.randn(64, 64, device=device), torch.randn(300, 64, device=device)
    bad = x.clone()
    bad[5, 9] = value
    y = nf.linear(bad, w, None, recipe)
    assert not y[5].isfinite().any()
    assert y[:5].isfinite().all() and y[6:].isfinite().all()
    bad = w.clone()
    bad[20, 9] = value
    y = nf.linear(x, bad, None, recipe)
    assert not y[:, 20].isfinite().any() and y[:, 128:].isfinite().all()
    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    g = torch.randn(64, 300, device=device)
    g[7, 3] = value
    nf.linear(leaf, weight, None, recipe).backward(g)
    assert not leaf.grad[7].isfinite().any()
    assert leaf.grad[:7].isfinite().all() and leaf.grad[8:].isfinite().all()
    assert not weight.grad[3].isfinite().any() and weight.grad[4:].isfinite().all()


@pytest.mark.parametrize("where", ["x", "w", "g"])
def test_o27_grad_scaler_skips_the_step(device: str, recipe: nf.BlockRecipe, where: str) -> None:
    made = layer(32, 16, recipe, device)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device)
    x, g = torch.randn(8, 32, device=device), torch.ones(8, 16, device=device)
    with torch.no_grad():
        {"x": x, "w": made.weight, "g": g}[where][1, 2] = math.inf
    before = made.bias.detach().clone(), made.weight.detach().clone()
    scaler.scale(((made(x) * g) ** 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before[0], made.bias) and torch.equal(before[1], made.weight)


@pytest.mark.parametrize("format", ["fp8_block_pow2", "mxfp8"])
def test_o28_powers_of_two_are_rounded_up(device: str, format: str) -> None:
    """O-28: 500 takes the scale 2 and is 512, not 448."""
    x = torch.full((1, 32), 0.1, device=device)
    x[0, 5] = 500
    q = nf.quantize(x, format)
    assert q.scales.float().item() == 2 and q.dequantize()[0, 5] == 512


@pytest.mark.parametrize("format", SCALED)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_o29_neighbouring_blocks_are_untouched(device: str, format: str, value: float) -> None:
    x = torch.randn(4, 384, device=device)
    bad = x.clone()
    bad[1, 130] = value
    q, clean = nf.quantize(bad, format), nf.quantize(x, format)
    width = formats.SCALED_FORMATS[format].block or 384
    start = 130 // width * width
    back, want = q.dequantize(), clean.dequantize()
    assert not back[1, start : start + width].isfinite().any()
    back[1, start : start + width] = want[1, start : start + width] = 0
    assert_same_bits(back, want)


@pytest.mark.parametrize("format", SCALED)
def test_o30_small_scales_widen_exactly(device: str, format: str) -> None:
    x = torch.randn(40, 64, device=device) * torch.logspace(-38, 0, 40, device=device)[:, None]
    q = nf.quantize(x, format)
    full, half = q.dequantize(F32), q.dequantize(BF16)
    assert torch.equal(half, full.bfloat16())
    if format in ("mxfp8", "fp8_block_pow2"):
        assert torch.equal(half.float(), full)  # powers of two: exact


def test_o31_edges(device: str) -> None:
    """O-25, O-31: nearest, ties to even, at most 448, with the scale 1."""
    given = torch.tensor([448, 447.9, 432.0, 4.25, 250, 2**-10, 1.01 * 2**-10, -0.0])
    want = [448, 448, 416, 4, 256, 0, 2**-9, 0]
    for format in SCALED:
        q = nf.quantize(given.to(device), format)
        assert q.scales.float().item() == 1
        got = q.dequantize().tolist()
        assert [got[0], got[1], *got[3:]] == [want[0], want[1], *want[3:]]
        assert got[2] in (416, 448)
    assert nf.quantize(torch.tensor([432.0, 448]), "mxfp8").data.float()[0] == 448  # 27 x 16: even


@pytest.mark.parametrize("product", ["row", "mx", "block", "block_pow2"])
def test_o39_operands_keep_their_scales(device: str, product: str) -> None:
    """O-39: rows of x by 2^i, rows of w by 3^-j: y follows both, element by element, with either
    as x. (Blocks of w are 128 rows: of one size here.)"""
    made = nf.BlockRecipe("r", product, product, product)
    if not nf.supported(made, device):
        pytest.skip(nf.supported(made, device).reason)
    m, n = 12, 1 if product.startswith("block") else 9
    x = torch.ones(m, 64, device=device) * 2.0 ** torch.arange(m, device=device)[:, None]
    w = torch.ones(n, 64, device=device) * 3.0 ** -torch.arange(n, device=device)[:, None]
    want = x.double() @ w.double().t()
    # 2^-4 is the most that one value is rounded by
    assert ((nf.linear(x, w, None, made).double() / want - 1).abs() < 2**-4).all()
    if n > 1:
        assert ((nf.linear(w, x, None, made).double() / want.t() - 1).abs() < 2**-4).all()


# ---- dtypes ----


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_o42_o46_dtypes(device: str, recipe: nf.BlockRecipe, dtype: torch.dtype) -> None:
    """O-42, O-46: y in x's dtype, each gradient in its tensor's, in any mix."""
    x = torch.randn(8, 32, device=device).to(dtype).requires_grad_()
    for w_dtype, b_dtype in ((F32, BF16), (BF16, F32), (F16, F16)):
        w = torch.randn(16, 32, device=device).to(w_dtype).requires_grad_()
        bias = torch.randn(16, device=device).to(b_dtype).requires_grad_()
        y = nf.linear(x, w, bias, recipe)
        x.grad = None
        y.sum().backward()
        assert y.dtype == x.grad.dtype == dtype
        assert w.grad.dtype == w_dtype and bias.grad.dtype == b_dtype
        want = x.detach().double() @ w.detach().double().t() + bias.detach().double()
        assert relative_error(y, want) < 0.06


@pytest.mark.parametrize("low", [BF16, F16])
def test_o41_autocast(device: str, recipe: nf.BlockRecipe, low: torch.dtype) -> None:
    """O-41: forward inside, backward outside; a bf16 weight gradient mixes no dtypes."""
    made = layer(64, 32, recipe, device)
    x = torch.randn(16, 64, device=device, requires_grad=True)
    with torch.autocast(device, dtype=low):
        y = made(x)
    y.float().sum().backward()
    assert y.dtype == low and x.grad.dtype == made.weight.grad.dtype == F32
    g2, x2 = torch.ones(16, 32, device=device), x.detach()
    assert relative_error(made.weight.grad, g2.t() @ x2) < 0.09


def test_o43_o45_casts_and_defaults(device: str, recipe: nf.BlockRecipe) -> None:
    made = layer(32, 16, recipe, device)
    x = torch.randn(4, 32, device=device)
    want = made(x).detach()
    made.to(BF16)
    assert made(x.bfloat16()).dtype == BF16
    assert relative_error(made(x.bfloat16()), want) < 0.05
    torch.set_default_dtype(BF16)
    try:
        assert nf.Linear(8, 8, recipe=recipe).weight.dtype == BF16
    finally:
        torch.set_default_dtype(F32)


# ---- autograd ----


def test_o48_o49_frozen_weight(device: str, recipe: nf.BlockRecipe) -> None:
    first, frozen = nn.Linear(64, 64, device=device), layer(64, 48, recipe, device)
    twin = nn.Linear(64, 48, device=device)
    twin.load_state_dict(frozen.state_dict())
    frozen.requires_grad_(False)
    x, g = torch.randn(64, 64, device=device), torch.randn(64, 48, device=device)
    grads = []
    for made in (frozen, twin):
        first.zero_grad()
        made(first(x)).backward(g)
        grads.append(first.weight.grad.clone())
    assert_close_as(grads[0], grads[1], "e5m2")
    assert frozen.weight.grad is None and frozen.bias.grad is None


def test_o50_o51_o53_modes(device: str, recipe: nf.BlockRecipe) -> None:
    """O-50 no_grad and inference_mode agree, and training works after; O-51 a second backward
    doubles exactly; O-53 checkpoints give the bits of none, over three steps."""
    made = layer(64, 48, recipe, device)
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
    assert torch.equal(made.weight.grad, 2 * once)
    results = []
    for how in (None, True, False):
        other = copy.deepcopy(made)
        optimizer = torch.optim.SGD(other.parameters(), lr=1e-3)
        for _ in range(3):
            leaf = x.clone().requires_grad_()
            y = other(leaf) if how is None else checkpoint(other, leaf, use_reentrant=how)
            optimizer.zero_grad()
            y.backward(torch.ones_like(y))
            optimizer.step()
        results.append((y, leaf.grad, other.weight.detach()))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same_bits(a, b)


def test_o54_to_o58_weights_and_keywords(device: str, recipe: nf.BlockRecipe) -> None:
    """O-54 to O-56: reuse_weights changes nothing, each forward sees the weight that is; O-57: a
    tied weight sums both gradients; O-58: keywords."""
    made = layer(32, 32, recipe, device)
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
    nf.linear(x=x, w=w, bias=b, recipe=recipe).sum().backward()
    assert w.grad is not None and torch.equal(b.grad, torch.full_like(b, 8))
    leaf = x.clone().requires_grad_()
    checkpoint(made, input=leaf, use_reentrant=False).sum().backward()
    assert leaf.grad is not None


def test_a_changed_weight_is_an_error_in_the_backward(device: str, recipe: nf.BlockRecipe) -> None:
    made = layer(32, 16, recipe, device)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    y = made(x)
    with torch.no_grad():
        made.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- systems ----


@pytest.mark.parametrize("name", ["fp8_row", "fp8_block_bf16_wgrad"])
def test_o70_nothing_is_left_in_python(device: str, name: str) -> None:
    if not (answer := nf.supported(name, device)):
        pytest.skip(answer.reason)
    recipe = nf.RECIPES[name]
    model = nn.Sequential(layer(32, 64, recipe, device), nn.ReLU(), layer(64, 32, recipe, device))
    x = torch.randn(16, 32, device=device)
    counts = []
    for _ in range(4):
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
        gc.collect()
        counts.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))
    assert counts[-1] <= counts[1], counts


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_o61_o62_o68_streams_graphs_and_no_sync(cuda: str, name: str) -> None:
    """O-61: another stream's input; O-62: a captured graph replays right after its memory was
    given to others; O-68: the host waits for nothing."""
    if not (answer := nf.supported(name, cuda)):
        pytest.skip(answer.reason)
    made = layer(256, 192, nf.RECIPES[name], cuda, BF16)
    x = torch.randn(128, 256, device=cuda, dtype=BF16, requires_grad=True)
    g = torch.randn(128, 192, device=cuda, dtype=BF16)

    def step() -> tuple[Tensor, ...]:
        y = made(x)
        return (y, *torch.autograd.grad(y, (x, made.weight, made.bias), g))

    # detached: a graph of autograd that is kept has its leaves' streams, and a capture cannot wait
    # for them
    want = [t.detach().clone() for t in step()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    value = x.detach().clone()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(20):
            x.zero_()
            torch.cuda._sleep(1_000_000)
            x.copy_(value)
            assert_same_bits(made(x), want[0])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # as torch asks for, before a capture
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), 7, device=cuda) for _ in range(8)]
    for _ in range(20):
        graph.replay()
    for a, b in zip(held, want, strict=True):
        assert_same_bits(a, b)
    assert all((t == 7).all() for t in others)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_o67_memory_does_not_grow(cuda: str, name: str) -> None:
    if not (answer := nf.supported(name, cuda)):
        pytest.skip(answer.reason)
    model = nn.Sequential(*(layer(256, 256, nf.RECIPES[name], cuda, BF16) for _ in range(8)))
    x = torch.randn(512, 256, device=cuda, dtype=BF16)
    held = []
    for _ in range(100):
        model.zero_grad()
        model(x).sum().backward()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] - held[9] < 1 << 20
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        y = model(x)
    assert torch.cuda.memory_allocated() - before <= y.numel() * 2 + 512


# ---- compile ----


def test_o71_dynamic_token_counts(device: str, recipe: nf.BlockRecipe) -> None:
    made = layer(64, 32, recipe, device)
    compiled = torch.compile(made, backend="aot_eager", dynamic=True)
    for m in (5, 16, 0, 1, 100):
        x = torch.randn(m, 64, device=device, requires_grad=True)
        y = compiled(x)
        assert y.shape == (m, 32)
        y.sum().backward()
        assert_same_bits(y, made(x))


@pytest.mark.parametrize("m, k, n", [(33, 72, 100), (50, 128, 24)])
def test_o72_o75_o76_compiled_is_eager(
    device: str, recipe: nf.BlockRecipe, m: int, k: int, n: int
) -> None:
    """O-72: one graph both ways; O-75, O-76: ragged sizes, then a view."""
    model = nn.Sequential(layer(k, n, recipe, device), nn.Sigmoid(), layer(n, 40, recipe, device))
    compiled = torch.compile(lambda t: model(t).view(-1), backend="aot_eager", fullgraph=True)
    x = torch.randn(m, k, device=device)
    results = []
    for call in (lambda t: model(t).view(-1), compiled):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        y = call(leaf)
        y.backward(torch.ones_like(y))
        results.append((y, leaf.grad, model[0].weight.grad.clone()))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    assert torch._dynamo.explain(model)(x).graph_break_count == 0


@pytest.mark.parametrize("shape", [(40, 64), (1, 1), (33, 72), (0, 16)], ids=str)
@pytest.mark.parametrize("code", range(5))
def test_o74_to_o76_opcheck(device: str, shape: tuple[int, int], code: int) -> None:
    """O-74, O-75, O-76: fakes give the sizes, strides and dtypes of the real operators."""
    scaling = formats.BY_SCALING[code]
    if not nf.supported(nf.BlockRecipe("r", *[scaling.name] * 3), device):
        pytest.skip("not run here")
    (m, k), n = shape, 24
    w = torch.randn(n, k, device=device)
    whole = BlockLayer(code, code, code, wanted=True, keep_w=True, dw_dtype=BF16)
    # torch's own check of a schema compares inputs, which it cannot do with FP8
    beyond = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    hows = [BlockOrientation(code)]
    hows += [BlockOrientation(code, operand=True)] if scaling.power_of_two else []
    hows += [BlockOrientation(code, square=True)] if scaling.square else []
    hows += [BlockOrientation(code, e5m2=True)] if code == 1 else []
    for x in (torch.randn(m, k, device=device), torch.randn(k, m, device=device).t()):
        for how in hows:
            settings = BlockQuantize(how, how).pack()
            torch.library.opcheck(ops.block_quantize_op.overload, (x, settings))
        for wanted in (True, False):
            settings = whole._replace(wanted=wanted).pack()
            arguments = (x, w, torch.randn(n, device=device), settings)
            torch.library.opcheck(ops.block_linear_forward.overload, arguments)
        held: list[tuple] = [()]
        if code:
            how = BlockOrientation(code, square=scaling.square)
            made = ops.block_quantize_op(w, BlockQuantize(how, how).pack())
            held.append(made[2:])
            arguments = (x, w, torch.randn(n, device=device), whole.pack(), *made[:2])
            torch.library.opcheck(ops.block_linear_forward.overload, arguments, test_utils=beyond)
        _, columns, scales, w_scales = ops.block_linear_forward(x, w, None, whole.pack())
        of_x = (columns, scales) if code else (x, None)
        dy = torch.randn(n, m, device=device).t()
        for of_w in held:
            arguments = (dy, *of_x, w, w_scales if code == 1 else None, k, whole.pack(), *of_w)
            torch.library.opcheck(ops.block_linear_backward.overload, arguments, test_utils=beyond)


def test_o75_large_sizes(device: str, recipe: nf.BlockRecipe) -> None:
    m, k, n = (16640, 8192, 256) if device == "cuda" else (260, 128, 64)
    made = layer(k, n, recipe, device, BF16)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    x = torch.randn(m, k, device=device, dtype=BF16)
    assert_same_bits(compiled(x), made(x))


# ---- state ----


def test_o77_to_o81_state(device: str, recipe: nf.BlockRecipe) -> None:
    """O-77, O-79, O-80, O-81: states, copies, pickles and meta."""
    made, plain = layer(32, 48, recipe, device), nn.Linear(32, 48, device=device)
    plain.load_state_dict(made.state_dict(), strict=True)
    x = torch.randn(5, 32, device=device)
    made(x).sum().backward()
    assert set(made.state_dict()) == {"weight", "bias"}
    twin = copy.deepcopy(made)
    torch.save(made, buffer := io.BytesIO())
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (twin, loaded):
        assert other.recipe == made.recipe
        assert_same_bits(other(x), made(x))
    with torch.no_grad():
        twin.weight.zero_()
    assert made.weight.any()
    with torch.device("meta"):
        empty = nf.Linear(32, 48, recipe=recipe)
        shapes = torch.empty(2, 4, 32, requires_grad=True)
        y = empty(shapes)
        y.sum().backward()
    assert y.is_meta and y.shape == (2, 4, 48) and shapes.grad.shape == shapes.shape
    empty.to_empty(device=device)
    empty.reset_parameters()
    assert empty(x).isfinite().all()


@pytest.mark.parametrize("format", SCALED)
def test_o80_o82_o85_quantized_tensors(
    device: str, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    """O-80, O-82, O-85: parts save and load with their bytes; repr; numpy through uint8."""
    q = nf.quantize(torch.randn(5, 133, device=device), format)
    torch.save(tuple(q), buffer := io.BytesIO())
    buffer.seek(0)
    back = nf.BlockTensor(*torch.load(buffer, weights_only=True))
    assert back.data.dtype == q.data.dtype and back.scales.dtype == q.scales.dtype
    assert_same_bits(back.dequantize(), q.dequantize())
    assert_same_bits(copy.deepcopy(q).dequantize(), q.dequantize())
    with caplog.at_level(logging.INFO):
        logging.getLogger(__name__).info("%r", q)
    assert "BlockTensor" in caplog.text
    assert q.data.view(torch.uint8).cpu().numpy().shape == (5, 133)


# ---- determinism ----


@pytest.mark.parametrize("name", RECIPES)
def test_o86_a_row_alone_and_in_batches(device: str, name: str) -> None:
    """O-86: without an option for it a row's bits may depend on the batch, as README says: by no
    more than one bf16 step of the row's largest value. Its codes and scales never do."""
    if not (answer := nf.supported(name, device)):
        pytest.skip(answer.reason)
    x = torch.randn(1024, 512, device=device, dtype=BF16)
    w = torch.randn(256, 512, device=device, dtype=BF16)
    alone = nf.linear(x[:1], w, None, name)
    step = 2.0 ** (math.floor(math.log2(alone.abs().max().item())) - 7)
    scaling = formats.SCALINGS[nf.RECIPES[name].fprop].format
    one = nf.quantize(x[:1], scaling)
    for m in (2, 17, 33, 128, 257, 1024):
        y = nf.linear(x[:m], w, None, name)
        assert (y[:1].float() - alone.float()).abs().max() <= step
        many = nf.quantize(x[:m], scaling)
        assert_same_bits(many.data[:1], one.data)
        assert_same_bits(many.scales[:1], one.scales)


@pytest.mark.parametrize("product", ["fprop", "wgrad"])
@pytest.mark.parametrize("name", RECIPES)
def test_o87_long_sums_are_deterministic(device: str, name: str, product: str) -> None:
    """O-87: K = 65536 and a small output, where a library would split K: equal bits each run, and
    the error of one fp32 sum."""
    if not (answer := nf.supported(name, device)):
        pytest.skip(answer.reason)
    runs, long = (100, 65536) if device == "cuda" else (3, 8192)
    x, w = (torch.randn(64, long, device=device, dtype=BF16) for _ in range(2))
    torch.use_deterministic_algorithms(True)
    try:
        if product == "fprop":
            results = [nf.linear(x, w, None, name) for _ in range(runs)]
        else:
            leaf = torch.zeros(64, 64, device=device, dtype=BF16, requires_grad=True)
            y = nf.linear(x.t().contiguous(), leaf, None, name)
            g = w.t().contiguous()
            results = [torch.autograd.grad(y, leaf, g, retain_graph=True)[0] for _ in range(runs)]
    finally:
        torch.use_deterministic_algorithms(False)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    want = x.double() @ w.double().t()
    want = want if product == "fprop" else want.t()
    assert relative_error(results[0], want) < 0.08


# ---- backend ----


@pytest.mark.parametrize("version", [120900, 130100, 130501, 130600])
def test_o96_mxfp8_on_sm120_with_old_and_new_libraries(version: int) -> None:
    """O-96: all products are TN, from copies whose contraction is contiguous, so that one route
    serves every version."""
    route = support.route("mx", support.SM120, version)
    assert route.name == "native"
    x, w = torch.randn(40, 72), torch.randn(24, 72)
    made = BlockLayer(4, 4, 4, wanted=True)
    _, columns, _, _ = ops.block_linear_forward(x, w, None, made.pack())
    assert columns.shape == (formats.padded(72), formats.padded32(40)) and columns.is_contiguous()


def test_o97_results_are_never_narrow(device: str, recipe: nf.BlockRecipe) -> None:
    """O-97: no operator takes an output dtype: y has x's, and FP8 operands are a TypeError."""
    w = torch.randn(16, 32, device=device)
    q = nf.quantize(torch.randn(8, 32, device=device), "fp8_row")
    for bad in ((q.data, w), (w, q.data)):
        with pytest.raises(TypeError, match="expected [xw] in float32, bfloat16 or float16"):
            nf.linear(*bad, None, recipe)


def test_emulation_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kind and device; a second recipe of the kind is quiet."""
    monkeypatch.setattr(support._binary, "problem", None)
    monkeypatch.setattr(support._binary, "module", None)
    monkeypatch.setattr(support, "ready_block", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    device = torch.device("cuda", 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for recipe in ("mxfp8", "mxfp8", "fp8_block", "fp8_row", "fp8_block_pow2"):
            support.require(nf.RECIPES[recipe], device)
        support.require(nf.BlockRecipe("another", "mx", "bf16", "mx"), device)
    assert [w.category for w in caught] == [support.EmulationWarning]
    assert "recipe mxfp8 on cuda:0" in str(caught[0].message)
