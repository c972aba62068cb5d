"""Decides that the layer's two operators and the layer on top of them are right."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import assert_close_as, assert_same_bits, relative_error
from torch import nn

import narrowfloat as nf
from narrowfloat import ops, reference
from narrowfloat.settings import Backward, Forward

E4M3, E5M2 = 0, 1
SHAPES = [(1, 16, 16), (50, 64, 128), (33, 100, 72), (64, 767, 2), (128, 256, 24), (200, 520, 136)]


def tensors(m: int, k: int, n: int, dtype: torch.dtype, device: str):
    x = torch.randn(m, k, device=device).to(dtype)
    w = (torch.randn(n, k, device=device) * 0.05).to(dtype)
    bias = torch.randn(n, device=device).to(dtype)
    dy = (torch.randn(m, n, device=device) * 1e-3).to(dtype)
    return x, w, bias, dy


@pytest.mark.parametrize("m, k, n", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_operators_equal_reference(
    device: str, m: int, k: int, n: int, dtype: torch.dtype, layout: str
) -> None:
    """Saved bytes and scales bit for bit, products within the rounding of their output."""
    x, w, bias, dy = tensors(m, k, n, dtype, device)
    if layout == "columns":
        x, w, dy = (t.t().contiguous().t() for t in (x, w, dy))
    settings = Forward(E4M3, E4M3, False, True).pack()
    got = ops.linear_forward(x, w, bias, None, None, settings)
    want = reference.linear_forward(*(t.cpu() for t in (x, w, bias)), None, None, settings)
    exact = 2e-4 if device == "cuda" else 4e-6  # see test_scaled_mm.test_product
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: exact}[dtype]
    assert relative_error(got[0].cpu(), want[0]) <= rounding
    assert_same_bits(got[1], want[1], "x_columns")
    assert_same_bits(got[2], want[2], "scales")
    x_columns, scales = got[1:]
    for need_dx, need_dw, need_db in itertools.product((True, False), repeat=3):
        dtypes = (dtype if need_dw else None, dtype if need_db else None)
        settings = Backward(E5M2, E4M3, False, False, need_dx, *dtypes).pack()
        grads = ops.linear_backward(dy, x_columns, scales, w, None, None, k, settings)
        refs = reference.linear_backward(
            dy.cpu(), x_columns.cpu(), scales.cpu(), w.cpu(), None, None, k, settings
        )
        for g, r, needed, what in zip(
            grads, refs, (need_dx, need_dw, need_db), ("dx", "dw", "db"), strict=True
        ):
            if not needed:
                assert g.numel() == 0, what
                continue
            assert g.shape == r.shape and g.is_contiguous(), what
            assert relative_error(g.cpu(), r) <= rounding, what


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m, k, n", [*SHAPES, (600, 400, 3000)])
def test_what_no_product_makes(device: str, m: int, k: int, n: int, dtype: torch.dtype) -> None:
    """The saved copy, the scales and the bias gradient: x and w, then dy and w, in a launch. Sizes
    on both sides of where a tensor is measured in a launch of its own. racecheck runs this with
    no product computed at all (tools/gpu_tests.py)."""
    x, w, _, dy = tensors(m, k, n, dtype, device)
    forward = Forward(E4M3, E4M3, False, True).pack()
    _, x_columns, scales = ops.linear_forward(x, w, None, None, None, forward)
    alone = [reference.quantize(t.cpu(), E4M3, True, True) for t in (x, w)]
    assert_same_bits(x_columns, alone[0][1], "x_columns")
    assert_same_bits(scales, torch.cat([alone[0][2], alone[1][2]]), "scales")
    backward = Backward(E5M2, E4M3, False, False, True, dtype, torch.float32).pack()
    db = ops.linear_backward(dy, x_columns, scales, w, None, None, k, backward)[2]
    assert relative_error(db.cpu(), dy.cpu().double().sum(0)) < 1e-5


def test_held_weight_gives_the_same_bits(device: str) -> None:
    x, w, bias, dy = tensors(40, 136, 72, torch.bfloat16, device)
    rows, columns, scale = ops.quantize_op(w, E4M3, True, True)
    settings = Forward(E4M3, E4M3, True, True).pack()
    y, xc, scales = ops.linear_forward(x, w, bias, None, None, settings)
    y2, _, scales2 = ops.linear_forward(x, w, bias, rows, scale, settings)
    assert_same_bits(y, y2)
    assert_same_bits(scales, torch.cat([scales2, scale]))
    settings = Backward(E5M2, E4M3, False, False, True, torch.bfloat16, torch.bfloat16)
    args = (136, settings.pack())
    fresh = ops.linear_backward(dy, xc, scales, w, None, None, *args)
    held = ops.linear_backward(dy, xc, scales2, None, columns, scale, *args)
    measured = ops.linear_backward(dy, xc, scales[:4], w, None, None, *args)
    for a, b, c in zip(fresh, held, measured, strict=True):
        assert_same_bits(a, b)
        assert_same_bits(a, c)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "m, k, n", [(1024, 1024, 1024), (4096, 1024, 1024), (2000, 1500, 1700), (4096, 4096, 4096)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_tensors_in_one_launch(cuda: str, m: int, k: int, n: int, dtype: torch.dtype) -> None:
    """x and w, then dy and w, quantized by one launch each: the bytes of one tensor a launch."""
    x, w, _, dy = tensors(m, k, n, dtype, cuda)
    settings = Forward(E4M3, E4M3, False, True).pack()
    y, x_columns, scales = ops.linear_forward(x, w, None, None, None, settings)
    x_alone, w_alone = (reference.quantize(t, E4M3, True, True) for t in (x, w))
    assert torch.equal(x_columns.view(torch.uint8), x_alone[1].view(torch.uint8))
    assert torch.equal(scales, torch.cat([x_alone[2], w_alone[2]]))
    held = ops.linear_forward(x, w, None, w_alone[0], w_alone[2], settings)
    assert torch.equal(held[0], y)
    args = (k, Backward(E5M2, E4M3, False, False, True, dtype, torch.float32).pack())
    fresh = ops.linear_backward(dy, x_columns, scales, w, None, None, *args)
    apart = ops.linear_backward(dy, x_columns, scales, None, w_alone[1], w_alone[2], *args)
    for a, b in zip(fresh[:2], apart[:2], strict=True):
        assert torch.equal(a, b)
    for db in (fresh[2], apart[2]):  # summed in another order
        assert relative_error(db, dy.double().sum(0)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("m, k, n", [(4096, 4096, 4096), (8192, 2048, 6144), (5000, 3000, 7000)])
def test_large_layers(cuda: str, m: int, k: int, n: int) -> None:
    """Past the size where quantizing takes two launches; mixed sizes and types in one call."""
    for w_dtype in (torch.bfloat16, torch.float32):
        x, w, bias, dy = tensors(m, k, n, torch.bfloat16, cuda)
        layer = nf.FP8Linear(k, n, device=cuda, dtype=w_dtype)
        with torch.no_grad():
            layer.weight.copy_(w)
            layer.bias.copy_(bias)
        x.requires_grad_()
        y = layer(x)
        y.backward(dy)
        xf, wf, dyf = x.detach().float(), w.float(), dy.float()
        assert_close_as(y, xf @ wf.t() + bias.float())
        assert_close_as(x.grad, dyf @ wf, "e5m2")
        assert_close_as(layer.weight.grad, dyf.t() @ xf, "e5m2")
        assert relative_error(layer.bias.grad, dyf.double().sum(0)) < 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_against_nn_linear(device: str, dtype: torch.dtype) -> None:
    ours = nf.FP8Linear(96, 80, device=device, dtype=dtype)
    theirs = nn.Linear(96, 80, device=device, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 30, 96, device=device).to(dtype)
    g = torch.randn(4, 30, 80, device=device).to(dtype)
    results = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(g)
        results.append((y, leaf.grad, layer.weight.grad, layer.bias.grad))
    for a, b, kind in zip(*results, ("e4m3", "e5m2", "e5m2", "e5m2"), strict=True):
        assert a.dtype == b.dtype == dtype
        assert_close_as(a, b, kind)


def test_recipe_fields_reach_the_operators(device: str) -> None:
    """Each operand's format and each accumulation change what they should and nothing else."""
    x, w, _, dy = tensors(64, 128, 96, torch.float32, device)

    def run(recipe: nf.Recipe):
        leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = nf.linear(leaf_x, leaf_w, None, recipe)
        y.backward(dy)
        return (
            relative_error(y, x @ w.t()),
            relative_error(leaf_x.grad, dy @ w),
            relative_error(leaf_w.grad, dy.t() @ x),
        )

    gemm = nf.Gemm
    e4, e5, mixed = 0.05, 0.08, 0.1
    base = run(nf.Recipe())
    assert base[0] < e4 < base[1] < e5
    all_e4 = run(nf.Recipe("e4", gemm(), gemm("e4m3", "e4m3"), gemm("e4m3", "e4m3")))
    assert all(error < e4 for error in all_e4)
    x_e5 = run(nf.Recipe("x5", gemm("e5m2", "e4m3"), gemm("e4m3", "e4m3"), gemm("e4m3", "e5m2")))
    assert e4 < x_e5[0] < mixed and x_e5[1] < e4 and e4 < x_e5[2] < mixed


def test_matmul(device: str) -> None:
    for a_shape, (k, n) in (((5, 48), (48, 33)), ((2, 3, 48), (48, 64)), ((480,), (480, 160))):
        a = torch.randn(a_shape, device=device, requires_grad=True)
        b = torch.randn(k, n, device=device, requires_grad=True)
        d = nf.matmul(a, b)
        ref = torch.matmul(a.detach(), b.detach())
        assert_close_as(d, ref)
        g = torch.randn_like(d)
        da, db = torch.autograd.grad(d, (a, b), g)
        a2, b2 = a.detach().requires_grad_(), b.detach().requires_grad_()
        ra, rb = torch.autograd.grad(torch.matmul(a2, b2), (a2, b2), g)
        assert_close_as(da, ra, "e5m2")
        assert_close_as(db, rb, "e5m2")
    with pytest.raises(ValueError, match=r"matmul: expected b \[K,N\]"):
        nf.matmul(torch.ones(2, 3, 4, device=device), torch.ones(2, 4, 5, device=device))
    with pytest.raises(ValueError, match="with one K"):
        nf.matmul(torch.ones(3, 4, device=device), torch.ones(5, 4, device=device))


@pytest.mark.parametrize("masks", list(itertools.product((True, False), repeat=3)))
def test_seed_linear(device: str, masks: tuple[bool, bool, bool]) -> None:
    x, w, bias, dy = tensors(4 * 10, 96, 56, torch.bfloat16, device)
    x, dy = x.view(4, 10, 96), dy.view(4, 10, 56)
    y = nf.fp8_linear_forward(x, w, bias)
    assert y.shape == (4, 10, 56) and y.dtype == torch.bfloat16 and not y.requires_grad
    assert_close_as(y, nn.functional.linear(x, w, bias))
    grads = nf.fp8_linear_backward(dy, x, w, masks)
    refs = (
        dy @ w,
        dy.flatten(0, 1).t() @ x.flatten(0, 1),
        dy.flatten(0, 1).float().sum(0).bfloat16(),
    )
    for grad, ref, wanted in zip(grads, refs, masks, strict=True):
        assert (grad is not None) == wanted
        if grad is not None:
            assert grad.dtype == torch.bfloat16
            assert_close_as(grad, ref, "e5m2")


def test_errors(device: str) -> None:
    x = torch.ones(4, 8, device=device)
    w = torch.ones(6, 8, device=device)
    for args, error, text in (
        ((x, torch.ones(6, 7, device=device)), ValueError, "with one K, got"),
        ((x, torch.ones(8, device=device)), ValueError, "1 dimensions|expected w"),
        ((x, w, torch.ones(5, device=device)), ValueError, r"expected bias \[6\]"),
        ((x.double(), w), TypeError, "float64"),
        ((x, w.long()), TypeError, "int64"),
        ((x, w, None, "fp9"), ValueError, "out of"),
        ((x, w.to("meta")), ValueError, "expected w on"),
    ):
        with pytest.raises(error, match=text):
            nf.linear(*args)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["quantize", "linear_forward", "linear_backward", "scaled_mm"])
def test_out_of_memory_is_torchs(cuda: str, op: str) -> None:
    x = torch.empty(1, 1, device=cuda, dtype=torch.bfloat16).expand(1 << 20, 1 << 20)
    q = torch.empty(1 << 20, 1 << 20, device="meta", dtype=torch.uint8)
    del q
    one = torch.ones((), device=cuda)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        if op == "quantize":
            ops.quantize_op(x, 0, True, False)
        elif op == "linear_forward":
            ops.linear_forward(x, x, None, None, None, Forward(0, 0).pack())
        elif op == "linear_backward":
            settings = Backward(1, 0, need_dx=True).pack()
            ops.linear_backward(x, None, None, x, None, None, 1 << 20, settings)
        else:
            thin = torch.zeros(1 << 20, 16, device=cuda).to(torch.float8_e4m3fn)
            ops.scaled_mm(thin, thin, one, one)
    assert torch.cuda.memory_allocated() < 1 << 30
