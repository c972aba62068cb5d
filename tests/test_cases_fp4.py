"""Decides that the public failure cases (shared/cases) that name nvfp4, mxfp4, fp4 packing or every
recipe do not happen in FP4."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from conftest import assert_close_as, assert_same_bits, relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowfloat as nf
from narrowfloat import formats, numerics_fp4, ops, reference_fp4
from narrowfloat.settings import FP4Layer, FP4Quantize, Orientation

FORMATS = ["nvfp4", "mxfp4"]
RECIPES = sorted(n for n, r in nf.RECIPES.items() if isinstance(r, nf.FP4Recipe))
ON = Orientation(True)


def layer_and_twin(k: int, n: int, recipe: str, device: str, dtype=torch.float32):
    made = nf.Linear(k, n, device=device, dtype=dtype, recipe=recipe)
    twin = nn.Linear(k, n, device=device, dtype=dtype)
    twin.load_state_dict(made.state_dict())
    return made, twin


# ---- shapes ----


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("m", [1, 7, 15, 50])
def test_o01_any_token_count(device: str, m: int, recipe: str) -> None:
    """O-01: M is the weight gradient's contraction and no multiple of 16."""
    made, twin = layer_and_twin(64, 128, recipe, device)
    kind = recipe.split("_")[0]
    x = torch.randn(m, 64, device=device)
    results = []
    for layer in (made, twin):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.sum().backward()
        results.append((y, leaf.grad, layer.weight.grad))
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        # one row or a gradient of ones is no Gaussian sample: room for the spread
        assert relative_error(a, b) < {"nvfp4": 0.24, "mxfp4": 0.27}[kind]


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("m, k, n", [(1, 256, 5120), (32, 768, 2), (32, 16, 15)])
def test_o02_o03_o04_ragged_sizes(device: str, recipe: str, m: int, k: int, n: int) -> None:
    """O-02, O-03, O-04: one row, two classes, an odd N."""
    made, twin = layer_and_twin(k, n, recipe, device)
    x = torch.randn(m, k, device=device)
    y = made(x)
    assert y.shape == (m, n) and y.is_contiguous()
    assert relative_error(y, twin(x)) < 0.22
    nn.functional.cross_entropy(y, torch.zeros(m, dtype=torch.long, device=device)).backward()
    assert made.weight.grad.shape == (n, k) and made.weight.grad.isfinite().all()


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("k", [1, 2, 767, 769, 1000])
def test_o05_any_k_works(device: str, recipe: str, k: int) -> None:
    """O-05: no K is refused, so no message has to explain it; one that does not match is named."""
    made, twin = layer_and_twin(k, 48, recipe, device)
    x = torch.randn(32, k, device=device)
    if k < 3:  # too few products for the error of a sum: values that FP4 has
        with torch.no_grad():
            made.weight.fill_(2.0)
            twin.weight.fill_(2.0)
        x = torch.full((32, k), 4.0, device=device)
    results = []
    for layer in (made, twin):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(torch.ones_like(y))
        results.append((y, leaf.grad, layer.weight.grad))
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape and relative_error(a, b) < 0.27
    with pytest.raises(ValueError, match=f"one K.*{k}.*{k + 1}"):
        nf.linear(x, torch.randn(48, k + 1, device=device), None, recipe)


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_o07_no_tokens(device: str, recipe: str, shape: tuple[int, ...]) -> None:
    """O-07: zero tokens, and an ordinary call after it."""
    made, twin = layer_and_twin(64, 128, recipe, device)
    x = torch.randn(shape, device=device, requires_grad=True)
    y = made(x)
    assert y.shape == (*shape[:-1], 128)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert made.weight.grad.shape == (128, 64) and not made.weight.grad.any()
    x = torch.randn(40, 64, device=device)
    assert_close_as(made(x), twin(x), recipe)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("m, k", [(5, 13), (1, 1), (3, 200)])
def test_o10_every_block_has_its_own_scale(device: str, m: int, k: int, format: str) -> None:
    """O-10: widths that are no power of two, the largest value in row 0, last column: each block's
    scale is that of its own largest value, row 0 included."""
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


@pytest.mark.parametrize("recipe", FORMATS)
def test_o18_leading_dimensions_do_not_matter(device: str, recipe: str) -> None:
    """O-18: x (5,64,256) eager, in a checkpoint and compiled is the 2-D call, reshaped."""
    made, _ = layer_and_twin(256, 48, recipe, device)
    x, g = torch.randn(5, 64, 256, device=device), torch.randn(5, 64, 48, device=device)

    def run(call, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        torch.manual_seed(6)
        return [y.detach(), *torch.autograd.grad(y, (leaf, made.weight), g)]

    y, dx, dw = run(made, x.flatten(0, 1), g.flatten(0, 1))
    want = [y.view(5, 64, 48), dx.view(5, 64, 256), dw]
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    for call in (made, lambda t: checkpoint(made, t, use_reentrant=False), compiled):
        for a, b in zip(run(call, x, g), want, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("recipe", FORMATS)
def test_o11_any_dimensions(device: str, recipe: str) -> None:
    made, twin = layer_and_twin(64, 32, recipe, device)
    for shape in ((2, 3, 5, 64), (7, 64), (64,)):
        x = torch.randn(shape, device=device, requires_grad=True)
        y = made(x)
        assert y.shape == (*shape[:-1], 32)
        y.sum().backward()
        assert x.grad.shape == shape


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", [32, 96, 160, 288, 1600])
def test_o12_padded_scale_rows(device: str, k: int, format: str) -> None:
    """O-12: the stride of the scales follows the padded K; each group of 32 rows is right."""
    x, w = torch.randn(200, k, device=device), torch.randn(64, k, device=device)
    y, want = nf.linear(x, w, None, format), x @ w.t()
    back = nf.quantize(x, format).dequantize()
    for first in range(0, 200, 32):
        rows = slice(first, first + 32)
        assert relative_error(y[rows], want[rows]) < {"nvfp4": 0.17, "mxfp4": 0.20}[format]
        assert relative_error(back[rows], x[rows]) < {"nvfp4": 0.11, "mxfp4": 0.13}[format]


# ---- layout ----


@pytest.mark.parametrize("recipe", FORMATS)
def test_o13_to_o17_views(device: str, recipe: str) -> None:
    """O-13 to O-17: unaligned, transposed, strided, expanded views equal their contiguous copies,
    forward and, given the seed, both gradients."""
    flat = torch.randn(4 * 48 * 64 + 1, device=device).bfloat16()
    square = torch.randn(256, 250, device=device).bfloat16()
    inputs = [
        flat[1 : 1 + 48 * 64].view(48, 64),
        flat[: 64 * 48].view(64, 48).t(),
        flat[: 48 * 128].view(48, 128)[:, ::2],
        flat[: 3 * 16 * 64].view(3, 16, 64).permute(1, 0, 2),
        flat[:64].expand(32, 64),
        square.t(),
    ]
    for view in inputs:
        k = view.shape[-1]
        w = torch.randn(k, 40, device=device).bfloat16().t()
        results = []
        for x, weight in ((view, w), (view.contiguous(), w.contiguous())):
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            torch.manual_seed(5)
            y = nf.linear(x, weight, None, recipe)
            g = torch.ones((), device=device, dtype=y.dtype).expand(y.shape)
            results.append((y, *torch.autograd.grad(y, (x, weight), g)))
        for a, b in zip(*results, strict=True):
            assert_same_bits(a, b)


# ---- values ----


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("zero", ["x", "w", "g", "x w g"])
def test_o19_zeros(device: str, recipe: str, zero: str) -> None:
    """O-19: exact zeros come out, and no NaN."""
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


@pytest.mark.parametrize("format", FORMATS)
def test_o20_o22_zero_rows_and_tensors(device: str, format: str) -> None:
    """O-20, O-22: zero rows give the bias exactly; a zero tensor has finite scales."""
    x, w = torch.randn(16, 64, device=device), torch.randn(48, 64, device=device)
    bias = torch.randn(48, device=device)
    x[3] = x[7] = 0
    y = nf.linear(x, w, bias, format)
    assert torch.equal(y[3], bias) and torch.equal(y[7], bias)
    q = nf.quantize(torch.zeros(128, 64, device=device), format)
    assert q.scale == 1 and q.scales.float().isfinite().all() and not q.data.any()
    assert not q.dequantize().any()
    zeros = torch.zeros_like(w)
    assert torch.equal(nf.linear(x, zeros, bias, format), bias.expand(16, 48))


@pytest.mark.parametrize("format", FORMATS)
def test_o21_o23_tiny(device: str, format: str) -> None:
    """O-21, O-23: no NaN where amax is subnormal; near 1e-36 the error is the usual one (in nvfp4
    from 8e-36 on, where 2688 / amax no longer overflows)."""
    w = torch.randn(48, 64, device=device)
    for value in (1e-40, 1e-45, 1e-39):
        x = torch.full((16, 64), value, device=device)
        assert nf.linear(x, w, None, format).isfinite().all()
        back = nf.quantize(x, format).dequantize()
        assert back.isfinite().all() and ((back - x).norm() <= x.norm())
    size = {"nvfp4": 1e-35, "mxfp4": 1e-36}[format]
    x = (torch.randn(64, 1024, device=device) * size).bfloat16()
    x[:, ::7] *= 1e-3
    q = nf.quantize(x, format)
    back = q.dequantize(torch.float32)
    large = x.abs() > size
    scaled, restored = x.double() / size, back.double() / size  # squares underflow
    assert relative_error(restored[large], scaled[large]) < 0.14
    assert back.abs().max() <= x.abs().max().float() * 1.2


def test_o24_a_small_block_beside_large_ones(device: str) -> None:
    """O-24: a zero block, one of 1e-6 of the largest, a normal one: no NaN scale; each alone."""
    x = torch.randn(4, 48, device=device).clamp(-1, 1)
    x[:, :16] = 0
    x[:, 16:32] *= 1e-6
    x[0, 47] = 1.0
    q = nf.quantize(x, "nvfp4")
    assert not (q.scales.view(torch.uint8) >= 0x7F).any()
    back = q.dequantize()
    assert not back[:, :16].any() and back.isfinite().all()
    assert (back[:, 16:32] - x[:, 16:32]).abs().max() <= 1e-6
    alone = x.clone()
    alone[:, :32] = 0
    assert torch.equal(nf.quantize(alone, "nvfp4").dequantize()[:, 32:], back[:, 32:])


@pytest.mark.parametrize("format", FORMATS)
def test_o26_scales_before_the_store(device: str, format: str) -> None:
    """O-26: sums over 65,504 in codes do not overflow a 16-bit result that fits."""
    ones = torch.ones(16, 4096, device=device, dtype=torch.float16)
    y = nf.linear(ones, ones, None, format)
    # an mxfp4 one is .5 x 2: exact; in nvfp4 the tensor scale is 1/2688 in fp32
    assert (y == 4096).all()
    x = torch.rand(32, 4096, device=device).half() * 0.06
    w = torch.rand(32, 4096, device=device).half() * 0.1
    y = nf.linear(x, w, None, format)
    assert y.isfinite().all()
    assert relative_error(y, x.float() @ w.float().t()) < 0.2


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_o27_o29_nonfinite_surfaces(device: str, recipe: str, value: float) -> None:
    """O-27, O-29: what is not finite comes out in its rows, and nowhere else."""
    x, w = torch.randn(64, 64, device=device), torch.randn(48, 64, device=device)
    bad = x.clone()
    bad[5, 9] = value
    y, clean = nf.linear(bad, w, None, recipe), nf.linear(x, w, None, recipe)
    assert not y[5].isfinite().any()
    assert y[:5].isfinite().all() and y[6:].isfinite().all() and clean.isfinite().all()
    bad = w.clone()
    bad[20, 9] = value
    y = nf.linear(x, bad, None, recipe)
    assert not y[:, 20].isfinite().any() and y[:, :16].isfinite().all()
    leaf = x.clone().requires_grad_()
    g = torch.randn(64, 48, device=device)
    g[7, 3] = value
    nf.linear(leaf, w, None, recipe).backward(g)
    assert not leaf.grad[7].isfinite().any() and leaf.grad[:7].isfinite().all()


def test_o28_mx_scales_are_rounded_up(device: str) -> None:
    """O-28: amax 7 needs the scale 2, and becomes 8 or 6, not clipped to 6 by a scale of 1."""
    x = torch.full((1, 32), 0.1, device=device)
    x[0, 5] = 7
    q = nf.quantize(x, "mxfp4")
    assert q.scales.float().item() == 2
    assert q.dequantize()[0, 5] == 8  # 3.5 is between 3 and 4: to even
    x[0, 5] = 6
    assert nf.quantize(x, "mxfp4").scales.float().item() == 1


@pytest.mark.parametrize("format", FORMATS)
def test_o30_small_scales_widen_exactly(device: str, format: str) -> None:
    """O-30: subnormal block scales: dequantized in bf16 is fp32's, rounded once; no new zeros."""
    x = torch.randn(40, 64, device=device) * torch.logspace(-5, 0, 40, device=device)[:, None]
    q = nf.quantize(x, format)
    full, half = q.dequantize(torch.float32), q.dequantize(torch.bfloat16)
    assert torch.equal(half, full.bfloat16())
    assert torch.equal(half == 0, full == 0)


# ---- fp4-packing ----

TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
ROUNDED = torch.tensor([0.0, 1, 1, 2, 2, 4, 4])


def test_o32_ties_to_even(device: str) -> None:
    """O-32: with scale 1. In mxfp4 a 6 in the block makes it so."""
    for sign in (1, -1):
        x = torch.zeros(1, 32, device=device)
        x[0, :7] = sign * TIES
        x[0, 31] = 6
        q = nf.quantize(x, "mxfp4")
        assert (q.scales.float() == 1).all()
        assert torch.equal(q.dequantize()[0, :7].cpu(), sign * ROUNDED)
    assert torch.equal(
        numerics_fp4.round_nearest(torch.tensor([6.5, 1e9, math.inf])), torch.full((3,), 7).int()
    )


def test_o32_ties_to_even_in_nvfp4(device: str) -> None:
    """O-32: a tensor whose amax is 448 x 6 and a block of amax 6: all three scales are 1."""
    x = torch.zeros(2, 16, device=device)
    x[0, 0] = 448 * 6
    x[1, :7], x[1, 7:14], x[1, 15] = TIES, -TIES, 6
    q = nf.quantize(x, "nvfp4")
    assert q.scale == 1 and q.scales.float()[1] == 1
    assert torch.equal(q.dequantize()[1, :7].cpu(), ROUNDED)
    assert torch.equal(q.dequantize()[1, 7:14].cpu(), -ROUNDED)


def test_o33_nibble_order(device: str) -> None:
    """O-33: element 0 in the low nibble; [.5, 1] is 0x21."""
    x = torch.zeros(1, 32, device=device)
    x[0, :8] = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, -0.5])
    q = nf.quantize(x, "mxfp4")
    assert [f"{byte:02x}" for byte in q.data[0, :4].tolist()] == ["21", "43", "65", "97"]
    assert torch.equal(q.dequantize(), x)


@pytest.mark.parametrize("m, size", [(1, 128 * 8), (33, 128 * 8), (129, 2048)])
@pytest.mark.parametrize("format", FORMATS)
def test_o34_scale_padding_is_zero(device: str, m: int, size: int, format: str) -> None:
    """O-34: whatever lay in the memory before, padding of scales and codes is 0 and y finite."""
    mx = format == "mxfp4"
    x = torch.randn(m, 80, device=device)
    dirty = torch.full((1 << 22,), 0x7F, dtype=torch.uint8, device=device)
    del dirty
    rows, scales, columns, column_scales, _ = ops.fp4_quantize_op(
        x, None, FP4Quantize(ON, ON, mx).pack()
    )
    assert scales.numel() == size == formats.scales_size(m, 80)
    for codes, tiled, (r, c) in ((rows, scales, (m, 80)), (columns, column_scales, (80, m))):
        groups = formats.padded32(c) // 16 if mx else -(-c // 16)
        inside = reference_fp4.untile(tiled, r, 16 * groups)
        assert (inside != 0).sum() == (tiled != 0).sum()
        plain = reference_fp4.unpack(codes)
        assert not plain[r:].any() and not plain[:, c:].any()
    w = torch.randn(24, 80, device=device)
    assert nf.linear(x, w, None, format).isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_o35_gradients_are_there(device: str, recipe: str) -> None:
    """O-35: stochastic rounding gives gradients of the right size, not zeros."""
    made, twin = layer_and_twin(96, 80, recipe, device)
    x, g = torch.randn(160, 96, device=device), torch.randn(160, 80, device=device) * 1e-4
    norms = []
    for layer in (made, twin):
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(g)
        norms.append(torch.stack([leaf.grad.norm(), layer.weight.grad.norm()]))
    assert ((norms[0] / norms[1] - 1).abs() < 0.1).all()


@pytest.mark.parametrize("format", FORMATS)
def test_o36_draws_differ(device: str, format: str) -> None:
    """O-36: consecutive calls differ; the masks of two tensors are uncorrelated."""
    x = torch.full((256, 256), 2.25, device=device)
    x[:, ::16] = 6  # scales of about 1: 2.25 lies between codes
    calls = [nf.quantize(x, format, stochastic=True) for _ in range(10)]
    for i, a in enumerate(calls):
        for b in calls[:i]:
            assert not torch.equal(a.data, b.data)
    masks = [q.dequantize().double()[:, 1::16] for q in calls[:2]]
    mean = masks[0].mean().item()
    assert abs(mean - 2.25) < 0.05 and len(masks[0].unique()) == 2
    assert torch.corrcoef(torch.stack([m.flatten() for m in masks]))[0, 1].abs() < 0.06
    up = [q.dequantize().double() > 2.25 for q in calls]
    other = x.clone()[:, :-16]
    mask = nf.quantize(other, format, stochastic=True).dequantize().double() > 2.25
    keep = (other != 6).flatten()
    pair = torch.stack([up[0][:, :-16].flatten()[keep], mask.flatten()[keep]]).double()
    assert torch.corrcoef(pair)[0, 1].abs() < 0.02


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("k", [16, 48, 80, 4096])
def test_o37_rotation_leaves_the_product(device: str, k: int, recipe: str) -> None:
    """O-37: the rotated weight gradient is the plain one up to its error, for any tokens."""
    x, w = torch.randn(k, 48, device=device), torch.randn(32, 48, device=device)
    g = torch.randn(k, 32, device=device)
    for rotated in (True, False):
        leaf = w.clone().requires_grad_()
        made = nf.FP4Recipe("r", recipe, rotate_wgrad=rotated)
        nf.linear(x, leaf, None, made).backward(g)
        assert_close_as(leaf.grad, g.t() @ x, f"{recipe} gradient")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("width", [17, 31])
def test_o38_odd_widths(device: str, width: int, format: str) -> None:
    """O-38: the logical width is kept."""
    x = torch.randn(4, width, device=device)
    q = nf.quantize(x, format)
    assert q.width == width and q.data.shape == (4, (width + 1) // 2)
    back = q.dequantize()
    assert back.shape == (4, width) and relative_error(back, x) < 0.14
    assert not (q.data[:, -1] >> 4).any()


@pytest.mark.parametrize("format", FORMATS)
def test_o39_operands_keep_their_scales(device: str, format: str) -> None:
    """O-39: rows of x by 2^i, rows of w by 3^-j: y follows both, element by element."""
    m, n = 12, 9
    x = torch.ones(m, 64, device=device) * 2.0 ** torch.arange(m, device=device)[:, None]
    w = torch.ones(n, 64, device=device) * 3.0 ** -torch.arange(n, device=device)[:, None]
    recipe = nf.FP4Recipe("rows", format, weights_2d=False)
    y = nf.linear(x, w, None, recipe).double()
    want = x.double() @ w.double().t()
    assert ((y / want - 1).abs() < 0.2).all()
    back = nf.linear(w, x, None, recipe).double()
    assert ((back / want.t() - 1).abs() < 0.2).all()


def test_o40_four_over_six_tie_keeps_six(device: str) -> None:
    """O-40: where both errors are the same the block stays with 6. A block that both represent
    exactly, and one of one value whose error both share."""
    x = torch.zeros(3, 16, device=device)
    x[0, 0] = 256 * 6  # the tensor's scale is 1
    x[1, 0] = 48.0  # 6 x 8 and 4 x 12: both exact
    x[2, :3] = torch.tensor([48.0, 0.0, 24.0])  # 3 x 8 and 2 x 12
    q = nf.quantize(x, "nvfp4", four_over_six=True)
    assert q.scale == 1
    assert q.scales.float()[1:].tolist() == [[8.0], [8.0]]
    assert torch.equal(q.dequantize(), x)
    x[2, :2] = torch.tensor([48.0, 36.0])  # 4.5 rounds, 3 x 12 does not
    q = nf.quantize(x, "nvfp4", four_over_six=True)
    assert q.scales.float()[2].item() == 12 and torch.equal(q.dequantize(), x)


def test_o40_the_choice_is_the_same_everywhere(device: str) -> None:
    """O-40: 1000 random blocks and more, kernel and reference, eager and compiled."""
    six = ON._replace(four_over_six=True)
    x = torch.randn(1000, 32).bfloat16()
    for two_d in (False, True):
        settings = FP4Quantize(six, six, two_d=two_d).pack()
        want = reference_fp4.fp4_quantize(x, None, settings)

        def quantized(t: torch.Tensor, settings: int = settings):
            return ops.fp4_quantize_op(t, None, settings)

        for call in (quantized, torch.compile(quantized, backend="aot_eager", fullgraph=True)):
            for a, b in zip(call(x.to(device)), want, strict=True):
                assert_same_bits(a, b)


# ---- dtypes, autograd ----


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_o46_dtypes(device: str, recipe: str, dtype: torch.dtype) -> None:
    x = torch.randn(8, 32, device=device).to(dtype).requires_grad_()
    w = torch.randn(16, 32, device=device, requires_grad=True)
    bias = torch.randn(16, device=device).bfloat16().requires_grad_()
    y = nf.linear(x, w, bias, recipe)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert w.grad.dtype == torch.float32 and bias.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_o41_autocast(device: str, recipe: str, low: torch.dtype) -> None:
    made, _ = layer_and_twin(64, 32, recipe, device)
    x = torch.randn(16, 64, device=device, requires_grad=True)
    with torch.autocast(device, dtype=low):
        y = made(x)
    y.float().sum().backward()
    assert y.dtype == low and x.grad.dtype == made.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("recipe", FORMATS)
def test_o48_o49_frozen_weight(device: str, recipe: str) -> None:
    """O-48, O-49: a frozen layer passes its gradient on and makes none of its own."""
    first, (frozen, twin) = nn.Linear(64, 64, device=device), layer_and_twin(64, 48, recipe, device)
    frozen.requires_grad_(False)
    x, g = torch.randn(64, 64, device=device), torch.randn(64, 48, device=device)
    grads = []
    for layer in (frozen, twin):
        first.zero_grad()
        layer(first(x)).backward(g)
        grads.append(first.weight.grad.clone())
    assert_close_as(grads[0], grads[1], f"{recipe} gradient")
    assert frozen.weight.grad is None and frozen.bias.grad is None


@pytest.mark.parametrize("recipe", FORMATS)
def test_o50_to_o53_modes(device: str, recipe: str) -> None:
    """O-50 no_grad and inference_mode agree; O-51 a second backward draws anew and is no zero;
    O-53 checkpoints give the bits of none."""
    made, _ = layer_and_twin(64, 48, recipe, device)
    x = torch.randn(32, 64, device=device)
    with torch.no_grad():
        first = made(x)
    with torch.inference_mode():
        second = made(x)
    assert_same_bits(first, second)
    leaf = x.clone().requires_grad_()
    out = (made(leaf) ** 2).sum()
    (once,) = torch.autograd.grad(out, leaf, retain_graph=True)
    (again,) = torch.autograd.grad(out, leaf)
    assert once.any() and relative_error(again, once) < 0.3
    results = []
    for how in (None, True, False):
        leaf, layer = x.clone().requires_grad_(), copy.deepcopy(made)
        y = layer(leaf) if how is None else checkpoint(layer, leaf, use_reentrant=how)
        torch.manual_seed(9)
        y.backward(torch.ones_like(y))
        results.append((y, leaf.grad, layer.weight.grad))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same_bits(a, b)


# ---- compile ----


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(40, 64), (1, 1), (33, 72), (0, 16)], ids=str)
def test_o74_to_o76_opcheck(device: str, format: str, shape: tuple[int, int]) -> None:
    """O-74, O-75, O-76: fakes give the sizes, strides and dtypes of the real operators."""
    mx = format == "mxfp4"
    (m, k), n = shape, 24
    seed = torch.tensor([1, 2], device=device)
    w = torch.randn(n, k, device=device)
    layer = FP4Layer(mx, not mx, True, True, wanted=True, dw_dtype=torch.bfloat16)
    for x in (torch.randn(m, k, device=device), torch.randn(k, m, device=device).t()):
        for how in (ON, ON._replace(operand=True, stochastic=True), Orientation()):
            settings = FP4Quantize(how, ON, mx).pack()
            torch.library.opcheck(ops.fp4_quantize_op.overload, (x, seed, settings))
        for save in (True, False):
            settings = layer._replace(wanted=save).pack()
            torch.library.opcheck(
                ops.fp4_linear_forward.overload, (x, w, torch.randn(n, device=device), settings)
            )
        saved = ops.fp4_linear_forward(x, w, None, layer.pack())[1:]
        dy = torch.randn(n, m, device=device).t()
        arguments = (dy, *saved, w, seed, k, layer.pack())
        torch.library.opcheck(ops.fp4_linear_backward.overload, arguments)


@pytest.mark.parametrize("recipe", FORMATS)
def test_o72_o75_compiled_is_eager(device: str, recipe: str) -> None:
    """O-72: one graph, forward and backward; ragged sizes; values as eager, given the seed."""
    model = nn.Sequential(
        nf.Linear(72, 100, device=device, recipe=recipe),
        nn.Sigmoid(),
        nf.Linear(100, 40, device=device, recipe=recipe),
    )
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(33, 72, device=device)
    results = []
    for call in (model, compiled):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        y = call(leaf)
        torch.manual_seed(4)
        y.backward(torch.ones_like(y))
        results.append((y, leaf.grad, model[0].weight.grad.clone()))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    assert torch._dynamo.explain(model)(x).graph_break_count == 0


@pytest.mark.parametrize("recipe", FORMATS)
def test_o71_dynamic_token_counts(device: str, recipe: str) -> None:
    made, _ = layer_and_twin(64, 32, recipe, device)
    compiled = torch.compile(made, backend="aot_eager", dynamic=True)
    for m in (5, 16, 0, 1, 100):
        x = torch.randn(m, 64, device=device, requires_grad=True)
        y = compiled(x)
        assert y.shape == (m, 32)
        y.sum().backward()
        assert_same_bits(y, made(x))
