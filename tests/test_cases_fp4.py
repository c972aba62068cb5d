"""Public failures of FP4's packing and rounding do not happen, O-32 to O-38 and O-40; CASES.md
tells of each. What FP4 shares with other formats is in the files beside this one."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_close_as, assert_same_bits, relative_error
from torch import nn

import narrowfloat as nf
from narrowfloat import formats, ops
from narrowfloat.cast import Cast
from narrowfloat.reference import fp4, fp4_numerics, linear
from narrowfloat.spec import both

FORMATS = ["nvfp4", "mxfp4"]
RECIPES = sorted(n for n, r in nf.RECIPES.items() if r.kinds == ("fp4",))


def layer_and_twin(k: int, n: int, recipe: str, device: str, dtype=torch.float32):
    made = nf.Linear(k, n, device=device, dtype=dtype, recipe=recipe)
    twin = nn.Linear(k, n, device=device, dtype=dtype)
    twin.load_state_dict(made.state_dict())
    return made, twin


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
        fp4_numerics.round_nearest(torch.tensor([6.5, 1e9, math.inf])), torch.full((3,), 7).int()
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
    x = torch.randn(m, 80, device=device)
    dirty = torch.full((1 << 22,), 0x7F, dtype=torch.uint8, device=device)
    del dirty
    how = Cast("e2m1", format)
    rows, scales, columns, column_scales, _ = ops.quantize_op(x, both(how, how).pack())
    assert scales.numel() == size == formats.scales_size(m, 80)
    for codes, tiled, (r, c) in ((rows, scales, (m, 80)), (columns, column_scales, (80, m))):
        groups = formats.padded32(c) // 16 if format == "mxfp4" else -(-c // 16)
        inside = fp4.untile(tiled, r, 16 * groups)
        assert (inside != 0).sum() == (tiled != 0).sum()
        plain = fp4.unpack(codes)
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
        made = nf.fp4_recipe("r", recipe, rotate_wgrad=rotated)
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
    x = torch.randn(1000, 32).bfloat16()
    for square in (False, True):
        six = Cast("e2m1", "nvfp4", square=square, four_over_six=True)
        spec = both(six, six).pack()
        want = linear.quantize(x, spec)

        def quantized(t: torch.Tensor, spec: int = spec):
            return ops.quantize_op(t, spec)

        for call in (quantized, torch.compile(quantized, backend="aot_eager", fullgraph=True)):
            for a, b in zip(call(x.to(device)), want, strict=True):
                assert_same_bits(a, b)
