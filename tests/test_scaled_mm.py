"""Tests of scaled_mm, the FP8 GEMM alone: against fp64, accumulated, padded, refused with the
problem."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same_bits, relative_error

import narrowfloat as nf
from narrowfloat import ops

SHAPES = [
    (1, 16, 16),
    (32, 15, 16),
    (7, 2, 100),
    (50, 64, 72),
    (128, 128, 128),
    (65, 200, 520),
    (64, 64, 16384),
    (100, 264, 1000),
]


def operands(m: int, n: int, k: int, device: str, a: str = "e4m3", b: str = "e4m3"):
    return (
        nf.quantize(torch.randn(m, k, device=device), a),
        nf.quantize(torch.randn(n, k, device=device) * 0.02, b),
    )


def exact(qa: nf.QuantizedTensor, qb: nf.QuantizedTensor) -> torch.Tensor:
    d = qa.data.double() @ qb.data.double().t()
    return d * qa.scale.double() * qb.scale.double()


def own_scale(q: nf.QuantizedTensor) -> torch.Tensor:
    return q.scale.clone()


@pytest.mark.parametrize("m, n, k", SHAPES)
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fast", [False, True])
def test_gemm(
    device: str,
    m: int,
    n: int,
    k: int,
    formats: tuple[str, str],
    out_dtype: torch.dtype,
    fast: bool,
) -> None:
    """At most twice the error of a bf16 GEMM of the same values, plus what fast accumulation
    loses (its running sum keeps about 13 bits)."""
    qa, qb = operands(m, n, k, device, *formats)
    bias = torch.randn(n, device=device)
    for b in (None, bias, bias.bfloat16(), bias.half()):
        d = ops.scaled_mm(qa.data, qb.data, own_scale(qa), own_scale(qb), b, out_dtype, fast=fast)
        assert d.shape == (m, n) and d.is_contiguous() and d.dtype == out_dtype
        ref = exact(qa, qb)
        if b is not None:
            ref = ref + b.double()
        rounded = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-24}
        # Hopper's FP8 tensor cores sum the 32 products of one instruction in fewer than 24 bits,
        # in exact accumulation too: 1e-4 seen on an H200.
        bound = 2 * max(rounded[out_dtype], 1e-4 if device == "cuda" else 2e-6)
        if b is not None and out_dtype != torch.float32:
            bound += 2.0**-9  # the epilogue takes the bias in 16 bits
        if fast:
            bound += 2e-3 * max(1.0, (k / 4096) ** 0.5)
        assert relative_error(d, ref) <= bound


def test_scales_multiply_exactly(device: str) -> None:
    qa, qb = operands(48, 64, 96, device)
    one = torch.ones((), device=device)
    base = ops.scaled_mm(qa.data, qb.data, one, one, out_dtype=torch.float32)
    for factor in (0.5, 2.0, 4.0):
        s = torch.full((), factor, device=device)
        for sa, sb in ((s, one), (one, s)):
            d = ops.scaled_mm(qa.data, qb.data, sa, sb, out_dtype=torch.float32)
            assert_same_bits(d, base * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m, n, k", [(64, 128, 256), (1, 16, 32), (40, 200, 4096)])
def test_accumulate(device: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    qa, qb = operands(m, n, k, device, "e5m2", "e4m3")
    out = torch.randn(m, n, device=device).to(dtype)
    ref = out.double() + exact(qa, qb)
    ops.scaled_mm_accumulate_op(out, qa.data, qb.data, own_scale(qa), own_scale(qb), False)
    assert relative_error(out, ref) <= (
        2.0**-8 if dtype == torch.bfloat16 else 2e-4 if device == "cuda" else 2e-6
    )


def test_unaligned_views(device: str) -> None:
    """A weight that was quantized before and cut at an odd place gives what its copy gives."""
    qa, qb = operands(40, 80, 128, device)
    one = torch.ones((), device=device)
    a, b = qa.data[3:, 1:113], qb.data[5:70, 1:113]
    got = ops.scaled_mm(a, b, one, one)
    want = ops.scaled_mm(a.contiguous(), b.contiguous(), one, one)
    assert_same_bits(got, want)
    assert relative_error(got, a.double() @ b.double().t()) < 0.01
    flat = torch.zeros(1 + 16 * 32, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    assert ops.scaled_mm(flat[1:].view(16, 32), flat[1:].view(16, 32), one, one).shape == (16, 16)


def test_fp8_mm(device: str) -> None:
    qa, qb = operands(40, 100, 72, device)
    ref = qa.data.double() @ qb.data.double().t()
    d = nf.fp8_mm(qa.data, qb.data)
    assert d.dtype == torch.bfloat16 and d.is_contiguous() and d.shape == (40, 100)
    assert relative_error(d, ref) < 6e-3
    view = nf.fp8_mm_view(qa.data, qb.data)
    assert view.shape == (40, 100) and view.stride() == (1, 40)
    assert relative_error(view, ref) < 6e-3
    with pytest.raises(TypeError, match="fp8_mm: expected a in float8_e4m3fn"):
        nf.fp8_mm(torch.ones(4, 4, device=device), qb.data)


def test_errors(device: str) -> None:
    qa, qb = operands(32, 48, 64, device)
    one = torch.ones((), device=device)
    e5 = qa.data.float().to(torch.float8_e5m2)
    with pytest.raises(ValueError, match="with one K, got"):
        ops.scaled_mm(qa.data, qb.data[:, :32], one, one)
    with pytest.raises(TypeError, match="at most one float8_e5m2"):
        ops.scaled_mm(e5, e5, one, one)
    with pytest.raises(TypeError, match="expected a in a dtype out of"):
        ops.scaled_mm(qa.data.float(), qb.data, one, one)
    with pytest.raises(TypeError, match="out_dtype"):
        ops.scaled_mm(qa.data, qb.data, one, one, out_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="one element"):
        ops.scaled_mm(qa.data, qb.data, torch.ones(2, device=device), one)
    with pytest.raises(ValueError, match=r"expected bias \[48\]"):
        ops.scaled_mm(qa.data, qb.data, one, one, torch.ones(47, device=device))
    for shape in ((), (1,), (1, 1)):
        s = torch.full(shape, 2.0, device=device)
        assert_same_bits(
            ops.scaled_mm(qa.data, qb.data, s, one), ops.scaled_mm(qa.data, qb.data, one, s)
        )


@pytest.mark.gpu
def test_a_refused_problem_is_printed(cuda: str) -> None:
    """What cuBLASLt cannot do comes back as the whole problem, never as a bare status."""
    qa, qb = operands(32, 48, 64, cuda, "e5m2", "e5m2")
    one = torch.ones((), device=cuda)
    with pytest.raises(RuntimeError, match=r"no algorithm for d \[32, 48\] = a \[32, 64\] e5m2"):
        torch.ops.narrowfloat.scaled_mm(qa.data, qb.data, one, one, None, torch.bfloat16, True)


@pytest.mark.gpu
def test_a_scale_anywhere(cuda: str) -> None:
    """cuBLASLt launches fail on scales that are not on 16 bytes; ours may lie anywhere."""
    qa, qb = operands(32, 48, 64, cuda)
    scales = torch.tensor([1.0, 0.5, 2.0], device=cuda)
    one = scales[:1].clone()
    half = ops.scaled_mm(qa.data, qb.data, scales[1], scales[2:])
    assert_same_bits(half, ops.scaled_mm(qa.data, qb.data, one, one))


@pytest.mark.gpu
def test_plans_are_cached(cuda: str) -> None:
    qa, qb = operands(272, 48, 64, cuda)
    counters = nf._binary.require().plan_cache
    sa, sb = own_scale(qa), own_scale(qb)
    first = nf.ops.scaled_mm(qa.data, qb.data, sa, sb)
    misses, hits = counters()["misses"], counters()["hits"]
    second = nf.ops.scaled_mm(qa.data, qb.data, sa, sb)
    assert counters()["misses"] == misses and counters()["hits"] > hits
    assert_same_bits(first, second)
    nf.ops.scaled_mm(qa.data, qb.data, sa, sb, fast=True)
    assert counters()["misses"] == misses + 1
