"""Public failures of the kind "layout" do not happen, O-13 to O-18; CASES.md tells of each."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_close_as, assert_same_bits, relative_error
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import narrowfloat as nf
from narrowfloat import ops

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, F16, F32]


def run(
    x: Tensor, w: Tensor, bias: Tensor | None, g: Tensor, recipe: str | nf.Recipe = "fp8"
) -> tuple[Tensor, ...]:
    """(y, dx, dw[, db]) of the tensors as they lie: detach() keeps strides and offsets. The same
    random bits each time."""
    leaves = [t.detach().requires_grad_() for t in (x, w, bias) if t is not None]
    y = nf.linear(*leaves, recipe=recipe)
    torch.manual_seed(5)
    y.backward(g)
    return (y.detach(), *(leaf.grad for leaf in leaves))


def assert_same_sum(db: Tensor, ref: Tensor) -> None:
    """The bias gradient's fp32 sum may take its addends in another order, no more than that."""
    assert db.shape == ref.shape and db.dtype == ref.dtype
    assert relative_error(db, ref) < (1e-6 if db.dtype == F32 else 2**-8)


def assert_same_as_contiguous(x: Tensor, w: Tensor, bias: Tensor | None, g: Tensor) -> None:
    """Bit for bit what contiguous copies give, and right: not the transposed tensor's numbers."""
    before = [t.detach().clone() for t in (x, w, g)]
    got = run(x, w, bias, g)
    plain = run(
        x.contiguous(), w.contiguous(), bias if bias is None else bias.contiguous(), g.contiguous()
    )
    for name, a, b in zip(("y", "dx", "dw"), got, plain, strict=False):
        assert_same_bits(a, b, name)
    if bias is not None:
        assert_same_sum(got[3], plain[3])
    assert got[0].is_contiguous()
    for t, copy in zip((x, w, g), before, strict=True):
        assert_same_bits(t, copy, "an input was written to")
    k, n = x.shape[-1], w.shape[0]
    x2, g2 = x.double().reshape(-1, k), g.double().reshape(-1, n)
    ref = x2 @ w.double().t()
    ref = ref if bias is None else ref + bias.double()
    few = 1.3  # values: some shapes have 35
    assert_close_as(got[0].reshape(-1, n), ref, "e4m3", few)
    assert_close_as(got[1].reshape(-1, k), g2 @ w.double(), "e5m2", few)
    assert_close_as(got[2], g2.t() @ x2, "e5m2", few)


def shifted(by: int, *shape: int, device: str, dtype: torch.dtype) -> Tensor:
    """A contiguous view that starts `by` elements into its storage."""
    size = torch.Size(shape).numel()
    return torch.randn(by + size, device=device).to(dtype)[by : by + size].view(shape)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("by", [1, 4])
@pytest.mark.parametrize(("m", "k", "n"), [(32, 64, 48), (7, 33, 5)])
def test_o13_a_view_that_starts_at_an_odd_byte(device, m, k, n, by, dtype):
    """O-13: x, w, bias and g each at an unaligned address, alone and together."""

    def at(offset: int, *shape: int) -> Tensor:
        return shifted(offset, *shape, device=device, dtype=dtype)

    assert_same_as_contiguous(at(by, m, k), at(0, n, k), at(0, n), at(0, m, n))
    assert_same_as_contiguous(at(0, m, k), at(by, n, k), at(0, n), at(0, m, n))
    assert_same_as_contiguous(at(0, m, k), at(0, n, k), at(by, n), at(0, m, n))
    assert_same_as_contiguous(at(0, m, k), at(0, n, k), None, at(by, m, n))
    assert_same_as_contiguous(at(by, m, k), at(1, n, k), at(by, n), at(3, m, n))


@pytest.mark.parametrize("by", [1, 4, 15, 16])
@pytest.mark.parametrize(("m", "k", "n"), [(32, 64, 48), (17, 80, 30)])
def test_o13_quantized_operands_at_an_odd_byte(device, m, k, n, by):
    """O-13: an FP8 weight (or x) at storage offset 1 is copied, not handed to the library."""
    qa = nf.quantize(torch.randn(m, k, device=device))
    qb = nf.quantize(torch.randn(n, k, device=device))
    plain = ops.scaled_mm(qa.data.contiguous(), qb.data.contiguous(), qa.scale, qb.scale)

    def move(q: Tensor) -> Tensor:
        flat = torch.zeros(by + q.numel(), dtype=torch.uint8, device=device)
        flat[by:] = q.contiguous().view(torch.uint8).flatten()
        return flat[by:].view(q.dtype).view(q.shape)

    a, b = move(qa.data), move(qb.data)
    for left, right in ((a, qb.data), (qa.data, b), (a, b)):
        assert_same_bits(ops.scaled_mm(left, right, qa.scale, qb.scale), plain, "scaled_mm")
    assert_close_as(plain.float(), qa.dequantize(F32) @ qb.dequantize(F32).t())


def test_o13_to_o17_views(device, each_recipe):
    """O-13 to O-17: unaligned, transposed, strided, expanded views equal their contiguous copies,
    forward and both gradients; x and the weight nearly square and square."""
    flat = torch.randn(4 * 48 * 64 + 1, device=device).bfloat16()
    before = flat.clone()
    inputs = [
        flat[1 : 1 + 48 * 64].view(48, 64),
        flat[: 64 * 48].view(64, 48).t(),
        flat[: 48 * 128].view(48, 128)[:, ::2],
        flat[: 3 * 16 * 64].view(3, 16, 64).permute(1, 0, 2),
        flat[:64].expand(32, 64),
        torch.randn(256, 250, device=device).bfloat16().t(),
        torch.randn(256, 256, device=device).bfloat16().t(),
    ]
    one = torch.ones((), device=device, dtype=BF16)
    for x in inputs:
        k = x.shape[-1]
        for n in (40, k, k + 6):
            w = torch.randn(k, n, device=device).bfloat16().t()
            g = one.expand(*x.shape[:-1], n)
            plain = run(x.contiguous(), w.contiguous(), None, g.contiguous(), each_recipe)
            for a, b in zip(run(x, w, None, g, each_recipe), plain, strict=True):
                assert_same_bits(a, b)
    assert_same_bits(flat, before, "an input was written to")


VIEWS = {
    "transposed": (lambda d, t: torch.randn(64, 24, device=d).to(t).t(), 2),
    "every second column": (lambda d, t: torch.randn(24, 128, device=d).to(t)[:, ::2], 2),
    "every third row": (lambda d, t: torch.randn(72, 64, device=d).to(t)[::3], 2),
    "columns of a wider": (lambda d, t: torch.randn(24, 200, device=d).to(t)[:, 100:164], 2),
    "odd columns of a wider": (lambda d, t: torch.randn(24, 97, device=d).to(t)[:, 3:67], 2),
    "transposed slice": (lambda d, t: torch.randn(90, 31, device=d).to(t)[5:69, 2:26].t(), 2),
    "permuted": (lambda d, t: torch.randn(5, 7, 64, device=d).to(t).permute(1, 0, 2), 3),
    "features first": (lambda d, t: torch.randn(64, 5, 7, device=d).to(t).permute(1, 2, 0), 3),
    "heads": (lambda d, t: torch.randn(2, 4, 6, 64, device=d).to(t).transpose(1, 2), 4),
    "middle sliced": (lambda d, t: torch.randn(4, 9, 64, device=d).to(t)[:, 1:8], 3),
    "last of three": (lambda d, t: torch.randn(4, 9, 3, 64, device=d).to(t)[:, :, 1], 3),
    "one row": (lambda d, t: torch.randn(64, 3, device=d).to(t)[:, 1], 1),
    "one row of many": (lambda d, t: torch.randn(64, 3, device=d).to(t).t()[1:2], 2),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", list(VIEWS))
def test_o14_strided_x(device, view, dtype):
    """O-14: a strided x gives, bit for bit, what its contiguous copy gives."""
    x = VIEWS[view][0](device, dtype)
    assert x.shape[-1] == 64 and x.dim() == VIEWS[view][1]
    w = torch.randn(40, 64, device=device).to(dtype)
    g = torch.randn(*x.shape[:-1], 40, device=device).to(dtype)
    assert_same_as_contiguous(x, w, torch.randn(40, device=device).to(dtype), g)
    q, plain = nf.quantize(x), nf.quantize(x.contiguous())
    assert_same_bits(q.data, plain.data, "codes")
    assert_same_bits(q.scale, plain.scale, "scale")
    assert_same_bits(q.dequantize(), plain.dequantize(), "values")


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_o14_strided_weight_and_bias(device, dtype):
    """O-14: so does a strided weight or bias."""
    x = torch.randn(24, 64, device=device).to(dtype)
    g = torch.randn(24, 40, device=device).to(dtype)
    for w in (
        torch.randn(64, 40, device=device).to(dtype).t(),
        torch.randn(40, 128, device=device).to(dtype)[:, ::2],
        torch.randn(80, 64, device=device).to(dtype)[::2],
        torch.randn(40, 70, device=device).to(dtype)[:, 3:67],
    ):
        assert_same_as_contiguous(x, w, torch.randn(120, device=device).to(dtype)[::3], g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(32, 64, 48), (17, 33, 65), (1, 64, 8)])
def test_o15_transposed_gradient(device, m, k, n, dtype):
    """O-15: backward takes the gradient of y.t(), and other strided ones."""
    x = torch.randn(m, k, device=device).to(dtype).requires_grad_()
    made = nf.FP8Linear(k, n, device=device, dtype=dtype)
    c = torch.randn(n, m, device=device).to(dtype)
    (made(x).t() * c).sum().backward()
    got = [x.grad, made.weight.grad, made.bias.grad]
    x.grad = None
    made.zero_grad(set_to_none=True)
    made(x).backward(c.t().contiguous())
    for a, b in zip(got, (x.grad, made.weight.grad), strict=False):
        assert_same_bits(a, b)
    assert_same_sum(got[2], made.bias.grad)
    wide = torch.randn(m, 2 * n, device=device).to(dtype)
    bias = made.bias.detach()
    for g in (wide[:, ::2], wide[:, n:], wide.flip(0)[:, :n]):
        assert_same_as_contiguous(x.detach(), made.weight.detach(), bias, g)


def test_o15_transposed_gradient_of_every_recipe(device, each_recipe):
    x, w = torch.randn(48, 64, device=device), torch.randn(40, 64, device=device)
    bias, c = torch.randn(40, device=device), torch.randn(40, 48, device=device)
    got, plain = (run(x, w, bias, g, each_recipe) for g in (c.t(), c.t().contiguous()))
    for a, b in zip(got[:3], plain[:3], strict=True):
        assert_same_bits(a, b)
    assert_same_sum(got[3], plain[3])


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_o15_permuted_gradient(device, dtype):
    """O-15: the same through a reshape of more than two dimensions (attention's heads)."""
    x = torch.randn(2, 5, 64, device=device).to(dtype)
    w = torch.randn(48, 64, device=device).to(dtype)
    g = torch.randn(2, 48, 5, device=device).to(dtype).transpose(1, 2)
    assert_same_as_contiguous(x, w, torch.randn(48, device=device).to(dtype), g)
    g = torch.randn(48, 5, 2, device=device).to(dtype).permute(2, 1, 0)
    assert_same_as_contiguous(x, w, None, g)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("k", [64, 33])
def test_o16_expanded_x(device, k, dtype):
    """O-16: stride-0 inputs and the stride-0 gradient of sum(); nothing is written to them."""
    w = torch.randn(40, k, device=device).to(dtype)
    bias = torch.randn(40, device=device).to(dtype)
    row = torch.randn(1, k, device=device).to(dtype)
    t = torch.randn(6, k, device=device).to(dtype)
    column = torch.randn(24, 1, device=device).to(dtype)
    one = torch.ones((), device=device, dtype=dtype)
    for x in (
        row.expand(32, k),
        row.expand(2, 16, k),
        t.unsqueeze(0).expand(4, 6, k),
        t.unsqueeze(1).expand(6, 4, k),
        column.expand(24, k),
    ):
        g = one.expand(*x.shape[:-1], 40)
        if x.shape[-2] == 24:  # a constant row's terms add up without averaging: no tolerance
            got, plain = run(x, w, bias, g), run(x.contiguous(), w, bias, g.contiguous())
            for a, b in zip(got[:3], plain[:3], strict=True):
                assert_same_bits(a, b)
            assert_same_sum(got[3], plain[3])
        else:
            assert_same_as_contiguous(x, w, bias, g)
        assert_same_bits(nf.quantize(x).data, nf.quantize(x.contiguous()).data, "codes")


def test_o16_gradient_of_the_expanded_row(device):
    """O-16: the gradient of the row itself is the sum over its uses, and the row is unchanged."""
    row = torch.randn(1, 64, device=device, requires_grad=True)
    before = row.detach().clone()
    w = torch.randn(40, 64, device=device, requires_grad=True)
    nf.linear(row.expand(32, 64), w).sum().backward()
    assert_same_bits(row, before, "row")
    assert_close_as(row.grad, 32 * w.detach().sum(0, keepdim=True), "e5m2")
    assert_close_as(w.grad, 32 * before.expand(40, 64), "e5m2")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(256, 250), (256, 256), (250, 256), (64, 65)])
def test_o17_nearly_square_transposed_weight(device, k, n, dtype):
    """O-17: a weight stored (K,N), through linear and through matmul, is not its transpose."""
    x = torch.randn(48, k, device=device).to(dtype)
    wkn = torch.randn(k, n, device=device).to(dtype)
    g = torch.randn(48, n, device=device).to(dtype)
    assert_same_as_contiguous(x, wkn.t(), torch.randn(n, device=device).to(dtype), g)
    a, b = x.requires_grad_(), wkn.requires_grad_()
    y = nf.matmul(a, b)
    y.backward(g)
    plain = run(x, wkn.detach().t().contiguous(), None, g)
    for got, ref in zip((y.detach(), a.grad, b.grad.t()), plain, strict=True):
        assert_same_bits(got, ref)


def test_o18_leading_dimensions_do_not_matter(device, each_recipe):
    """O-18: x (5,64,256) eager, in a checkpoint and compiled is the 2-D call, reshaped."""
    made = nf.Linear(256, 48, device=device, recipe=each_recipe)
    x, g = torch.randn(5, 64, 256, device=device), torch.randn(5, 64, 48, device=device)

    def results(call, x: Tensor, g: Tensor) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        torch.manual_seed(6)
        return [y.detach(), *torch.autograd.grad(y, (leaf, made.weight), g)]

    y, dx, dw = results(made, x.flatten(0, 1), g.flatten(0, 1))
    want = [y.view(5, 64, 48), dx.view(5, 64, 256), dw]
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    for call in (made, lambda t: checkpoint(made, t, use_reentrant=False), compiled):
        for a, b in zip(results(call, x, g), want, strict=True):
            assert_same_bits(a, b)
