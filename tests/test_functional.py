"""The functions of FP4 without a module: matmuls, each gradient alone, quantizing by Functions."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_close_as, assert_same_bits, relative_error

import narrowfloat as nf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_seed_matmul(device: str, dtype: torch.dtype) -> None:
    a = torch.randn(3, 40, 96, device=device).to(dtype).requires_grad_()
    b = torch.randn(96, 56, device=device).to(dtype).requires_grad_()
    g = torch.randn(3, 40, 56, device=device).to(dtype)
    for multiply in (nf.fp4_matmul, nf.FP4MatMulFunction.apply):
        d = multiply(a, b)
        assert d.dtype == dtype
        assert_close_as(d, (a @ b).detach(), "nvfp4")
        da, db = torch.autograd.grad(d, (a, b), g)
        assert da.dtype == db.dtype == dtype
        assert_close_as(da, g @ b.detach().t(), "nvfp4 gradient")
        want = a.detach().flatten(0, 1).t() @ g.flatten(0, 1)
        assert_close_as(db, want, "nvfp4 gradient")
        torch.manual_seed(2)
        da, db = torch.autograd.grad(multiply(a, b), (a, b), g)
        torch.manual_seed(2)
        assert_same_bits(nf.fp4_matmul_backward_A(g, b), da)
        torch.manual_seed(2)
        assert_same_bits(nf.fp4_matmul_backward_B(a, g), db)
    only = nf.FP4MatMulFunction.apply(a.detach(), b)
    (db,) = torch.autograd.grad(only, b, g)
    assert_close_as(db, want, "nvfp4 gradient")


def test_double_backward_is_refused(device: str) -> None:
    a, b = (torch.randn(16, 16, device=device, requires_grad=True) for _ in range(2))
    for multiply in (nf.fp4_matmul, nf.FP4MatMulFunction.apply):
        with pytest.raises(RuntimeError, match="differentiated once.*double backward"):
            torch.autograd.grad(multiply(a, b).sum(), a, create_graph=True)


def test_seed_quantize(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 37, device=device).to(dtype).requires_grad_()
        q = nf.fp4_quantize(x)
        assert isinstance(q, nf.FP4Tensor) and q.format == "nvfp4"
        back = nf.fp4_dequantize(q)
        assert back.shape == x.shape and back.dtype == dtype
        assert relative_error(back, x.detach()) < 0.12
        values, scales = nf.FP4QuantizeFunction.apply(x)
        assert values.shape == scales.shape == x.shape and values.dtype == dtype
        assert scales.dtype == torch.float32 and not scales.requires_grad
        assert set(values.detach().abs().unique().tolist()) <= {0, 0.5, 1, 1.5, 2, 3, 4, 6}
        made = nf.FP4DequantizeFunction.apply(values, scales)
        assert made.dtype == dtype
        assert relative_error(made, back) < 2e-7 or dtype == torch.bfloat16
        assert relative_error(made, back) < 2**-8
        g = torch.randn_like(x)
        assert_same_bits(torch.autograd.grad(made, x, g)[0], g)
    with pytest.raises(TypeError, match="fp4_dequantize: expected q to be an FP4Tensor"):
        nf.fp4_dequantize(nf.quantize(x, "e4m3"))
    with pytest.raises(ValueError, match="of one shape"):
        nf.FP4DequantizeFunction.apply(values, scales[:, :3])


def test_seed_errors(device: str) -> None:
    x = torch.ones(4, 8, device=device)
    with pytest.raises(ValueError, match=r"fp4_matmul_backward_A: expected grad .* one N"):
        nf.fp4_matmul_backward_A(x, torch.ones(8, 4, device=device))
    with pytest.raises(ValueError, match=r"fp4_matmul_backward_B: expected A .* one \[..., M\]"):
        nf.fp4_matmul_backward_B(x, torch.ones(8, 4, device=device))
    with pytest.raises(TypeError, match="fp4_matmul_backward_A: expected grad"):
        nf.fp4_matmul_backward_A(x.double(), x)
    with pytest.raises(ValueError, match="expected A on"):
        nf.fp4_matmul_backward_B(x.to("meta"), x)
    with pytest.raises(ValueError, match=r"expected B \[K,N\]"):
        nf.FP4MatMulFunction.apply(x, torch.ones(2, 8, 4, device=device))
