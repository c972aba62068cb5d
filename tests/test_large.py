"""Tests of tensors of more than 2^31 elements (open.md, O-09): what lies last is what it would be
alone, so no index wraps."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same_bits, relative_error
from torch import Tensor

import narrowfloat as nf
from narrowfloat import ops, w4a16
from narrowfloat.cast import Cast
from narrowfloat.reference import fp4, fp4_numerics, linear
from narrowfloat.spec import both
from narrowfloat.w4a16 import PackedFP4Linear

# Rows and columns; a row more than a multiple of every tile and block, and rows off 16 bytes.
SIZES = [(1048577, 2048), (1049601, 2047)]
TAIL = 33  # rows from a multiple of 32 on, so that blocks are the same alone
SEED = torch.tensor([0x123456789ABCDEF, -0x0FEDCBA987654321])


def x_and_its_columns(format: str) -> tuple[Cast, Cast]:
    return Cast("e2m1", format), Cast("e2m1", format, hadamard=True)


def dy_and_its_columns(format: str) -> tuple[Cast, Cast]:
    rows = Cast("e2m1", format, stochastic=True)
    return rows, Cast("e2m1", format, stochastic=True, hadamard=True)


AS_OPERANDS = {"rows_as_operand": True, "columns_as_operand": True}
CHOICES = {
    "x": both(*x_and_its_columns("nvfp4")),
    "operands": both(*[Cast("e2m1", "nvfp4")] * 2)._replace(**AS_OPERANDS),
    "w": both(Cast("e2m1", "nvfp4", square=True, four_over_six=True), None),
    "dy": both(*dy_and_its_columns("nvfp4"))._replace(**AS_OPERANDS),
    "mx x": both(*x_and_its_columns("mxfp4")),
    "mx dy": both(*dy_and_its_columns("mxfp4"))._replace(**AS_OPERANDS),
}


def noise(m: int, k: int, device: str, transposed: bool = False) -> Tensor:
    """Gaussian, its largest value in the last element, also after a rotation: what is last has the
    scales that it has alone."""
    if transposed:
        x = torch.randn(k, m, device=device, dtype=torch.bfloat16).t()
    else:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    assert x.numel() > 1 << 31
    x[-1, -1] = 1024.0
    return x


def random_bytes_from(first: int, all_rows: int):
    """fp4_numerics.random_bytes for the last rows of a tensor: their groups keep their numbers."""

    def of_tail(seed: Tensor, rows: int, groups: int, real_groups: int, orientation: int) -> Tensor:
        row, group = torch.arange(rows)[:, None], torch.arange(groups)
        if orientation == 0:
            index = (first + row) * real_groups + group
        else:
            index = row * -(-all_rows // 16) + first // 16 + group
        word = 0xFFFFFFFF
        low, high = seed & word, seed >> 32 & word
        counter = (index & word, index >> 32, low[1], (high[1] << 1 | orientation) & word)
        words = torch.stack(fp4_numerics.philox(counter, (low[0], high[0])), -1)
        return (words[..., None] >> torch.tensor([0, 8, 16, 24]) & 255).flatten(-2)

    return of_tail


def test_the_numbers_of_a_tail() -> None:
    """That helper against the reference itself, on a tensor that can be made whole."""
    rows = fp4_numerics.random_bytes(SEED, 96, 4, 4, 0)
    assert torch.equal(random_bytes_from(64, 96)(SEED, 32, 4, 4, 0), rows[64:])
    columns = fp4_numerics.random_bytes(SEED, 64, 6, 6, 1)
    assert torch.equal(random_bytes_from(64, 96)(SEED, 64, 2, 2, 1), columns[:, 4:])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(
    "m, k, transposed", [(*size, False) for size in SIZES] + [(*SIZES[0], True)]
)
def test_quantize(
    large_memory: str,
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    k: int,
    transposed: bool,
    name: str,
) -> None:
    """Codes, operands and scale bytes of the last rows, and of the last groups of every column."""
    x, choices, first = noise(m, k, large_memory, transposed), CHOICES[name], m - TAIL
    assert first % 32 == 0
    got = ops.quantize_op(x, choices.pack(), None, SEED.to(large_memory))
    tail = x[first:].cpu()
    monkeypatch.setattr(fp4_numerics, "random_bytes", random_bytes_from(first, m))
    want = linear.quantize(tail, choices.pack(), None, SEED)
    assert_same_bits(got[4], want[4], "tensor scales")
    if choices.want_rows:
        assert_same_bits(got[0][first:], want[0], "rows")
    if choices.want_columns:
        start = first if choices.columns_as_operand else first // 2
        assert_same_bits(got[2][:, start:], want[2], "columns")
    if got[1].numel():
        at = first // 128  # of the tiles of 128 rows
        last = got[1].view(-(-m // 128), -1)[at:].flatten()
        groups = k if choices.rows.scaling == "nvfp4" else -(-k // 32) * 32
        ours = fp4.untile(last, m - at * 128, groups)[first - at * 128 :]
        assert_same_bits(ours, fp4.untile(want[1], TAIL, groups), "scales of rows")
    if got[3].numel():
        ours = fp4.untile(got[3], k, -(-m // 32) * 32)[:, first // 16 :]
        assert_same_bits(ours, fp4.untile(want[3], k, 64), "scales of columns")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows, columns",
    [
        (Cast("e4m3"), Cast("e4m3")),
        (Cast("e4m3", "block"), Cast("e4m3", "block")),
        (Cast("e4m3", "mx"), Cast("e4m3", "mx")),
        (Cast("e4m3", "row"), None),
    ],
    ids=["tensor", "block", "mx", "row"],
)
def test_quantize_fp8(large_memory: str, rows: Cast, columns: Cast | None) -> None:
    m, k = (1 << 20) + 140, 2048 + 8
    x = torch.randn(1024, k, device=large_memory, dtype=torch.bfloat16)
    x = x.repeat(m // 1024 + 1, 1)[:m]
    x[-1, -1] = 100.0  # the largest of all, so that the tensor's scale is that of its end
    tail = m // 128 * 128 - 128  # the last whole rows of blocks and what is beyond
    got = ops.quantize_op(x, both(rows, columns).pack())
    want = linear.quantize(x[tail:].cpu(), both(rows, columns).pack())
    assert_same_bits(got[0][tail:], want[0], "rows")
    if columns is not None:
        assert_same_bits(got[2][:, tail:], want[2], "columns")
    assert_same_bits(got[4], want[4], "tensor scales")


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_what_a_user_quantizes(large_memory: str, format: str) -> None:
    """nf.quantize: the planted amax is found, the last rows come back as they do alone."""
    x = noise(*SIZES[0], large_memory)
    q, alone = nf.quantize(x, format), nf.quantize(x[-8:], format)
    assert_same_bits(q.scale, alone.scale, "scale")
    last = q._replace(data=q.data[-8:], scales=q.scales[-8:])
    assert_same_bits(last.data, alone.data, "codes")
    assert_same_bits(last.scales.view(torch.uint8), alone.scales.view(torch.uint8), "scales")
    assert_same_bits(last.dequantize(), alone.dequantize(), "values")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("m, k", SIZES)
def test_layer(large_memory: str, m: int, k: int, recipe: str) -> None:
    """x and dx beyond 2^31: the last rows of y and dx, and dw, which only they make."""
    x = noise(m, k, large_memory).requires_grad_()
    w = torch.randn(16, k, device=large_memory, dtype=torch.bfloat16, requires_grad=True)
    y = nf.linear(x, w, None, recipe)
    tail = x.detach()[-TAIL:]
    alone = nf.linear(tail, w.detach(), None, recipe)
    assert relative_error(y[-TAIL:].detach(), alone) < 2**-7
    assert relative_error(y[-TAIL:-1].detach(), tail[:-1].float() @ w.detach().float().t()) < 0.2
    g = torch.zeros_like(y)
    g[-TAIL:] = torch.randn(TAIL, 16, device=large_memory)
    y.backward(g)
    last = g[-TAIL:].float()
    assert x.grad is not None and w.grad is not None
    assert not x.grad[:-TAIL].any()
    assert relative_error(x.grad[-TAIL:], last @ w.detach().float()) < 0.3
    want = last.t() @ tail.float()
    assert relative_error(w.grad[:, :-1], want[:, :-1]) < 0.35  # the last has the planted value
    assert relative_error(w.grad[:, -1], want[:, -1]) < 0.35


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
def test_weight(large_memory: str, recipe: str) -> None:
    """A weight and its gradient beyond 2^31, and a y with rows that are no multiple of 16 bytes."""
    n, k = SIZES[0]
    w = noise(n, k, large_memory).requires_grad_()
    x = torch.randn(40, k, device=large_memory, dtype=torch.bfloat16, requires_grad=True)
    y = nf.linear(x, w, None, recipe)
    tail = w.detach()[-TAIL:]
    alone = nf.linear(x.detach(), tail, None, recipe)
    assert relative_error(y[:, -TAIL:].detach(), alone) < 2**-7
    assert relative_error(y[:, -TAIL:-1].detach(), x.detach().float() @ tail[:-1].float().t()) < 0.2
    g = torch.zeros_like(y)
    g[:, -TAIL:-1] = torch.randn(40, TAIL - 1, device=large_memory)  # not the planted value's row
    g[:, -1] = 1e-3
    y.backward(g)
    last = g[:, -TAIL:].float()
    assert x.grad is not None and w.grad is not None
    assert not w.grad[:-TAIL].any()
    assert relative_error(w.grad[-TAIL:], last.t() @ x.detach().float()) < 0.3
    want = last[:, :-1] @ tail[:-1].float()
    assert relative_error(x.grad[:, :-1], want[:, :-1]) < 0.35


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
def test_packed_weights(large_memory: str, recipe: str) -> None:
    """Weights that are packed for inference: there and back, and what their last rows give, for
    one token, for a few and for many."""
    n, k = SIZES[0]
    layer_of_bf16 = torch.nn.Linear(k, n, bias=False, device="meta", dtype=torch.bfloat16)
    layer_of_bf16.weight = torch.nn.Parameter(noise(n, k, large_memory))
    how = Cast("e2m1", recipe, square=recipe == "nvfp4")
    codes, scales, _, _, tensor_scales = ops.quantize_op(
        layer_of_bf16.weight.detach(), both(how, None).pack()
    )
    layer = PackedFP4Linear.from_linear(layer_of_bf16, recipe)
    del layer_of_bf16
    assert_same_bits(layer.scale.view(()), tensor_scales[0], "tensor scale")
    back = w4a16.unpack(layer.packed, n, k)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales)
    del back, codes, scales
    last = w4a16.unpack(layer.packed[-2:].clone(), TAIL, k)
    w = fp4.unpacked(*last, TAIL, k) * layer.scale
    for tokens in (1, 40, 100):
        x = torch.randn(tokens, k, device=large_memory, dtype=torch.bfloat16)
        y = layer(x)
        assert y.shape == (tokens, n)
        for rows in (slice(-1, None), slice(-TAIL, -1)):  # the planted value's, and the others
            want = x.double() @ w[rows].double().t()
            assert relative_error(y[:, -TAIL:][:, rows], want) < 2**-7, tokens
