"""Public failures of the kind "dtypes" do not happen, O-41 to O-47; CASES.md tells of each."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from conftest import TOLERANCE, assert_close_as, assert_same_bits, kinds, relative_error
from torch import nn

import narrowfloat as nf
from narrowfloat import ops
from narrowfloat.w4a16 import PackedFP4Linear, fp4_weight_matmul_op

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [F32, BF16, F16]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_o41_autocast_over_fp32_weights(device, recipe, dtype, x_dtype, bias):
    """O-41: y in autocast's dtype, backward outside the context, each gradient in its own."""
    made = nf.Linear(64, 48, bias, device, recipe=recipe)
    x = torch.randn(24, 64, device=device).to(x_dtype).requires_grad_()
    with torch.autocast(device, dtype=dtype):
        y = made(x)
        functional = nf.linear(x, made.weight, made.bias, recipe)
    assert y.dtype == functional.dtype == dtype
    assert_same_bits(y.detach(), functional.detach())
    # the context chooses the dtype of x and nothing inside: no sum in 16 bits
    plain = nf.linear(x.detach().to(dtype), made.weight.detach(), made.bias, recipe)
    assert_same_bits(y.detach(), plain.detach())
    g = torch.randn(24, 48, device=device).to(dtype)
    y.backward(g)
    assert x.grad.dtype == x_dtype and made.weight.grad.dtype == F32
    ref = x.detach().double() @ made.weight.detach().double().t()
    if bias:
        assert made.bias.grad.dtype == F32
        ref = ref + made.bias.detach().double()
        assert relative_error(made.bias.grad, g.double().sum(0)) < 1e-5
    forward, gradient, _ = kinds(recipe)
    assert_close_as(y.detach(), ref, forward)
    assert_close_as(x.grad, g.double() @ made.weight.detach().double(), gradient)
    assert_close_as(made.weight.grad, g.double().t() @ x.detach().double(), gradient)


@pytest.mark.parametrize("low", [BF16, F16])
def test_o41_autocast(device, each_recipe, low):
    """O-41: forward inside, backward outside; a bf16 weight gradient mixes no dtypes."""
    made = nf.Linear(64, 32, device=device, recipe=each_recipe)
    x = torch.randn(16, 64, device=device, requires_grad=True)
    with torch.autocast(device, dtype=low):
        y = made(x)
    y.float().sum().backward()
    assert y.dtype == low and x.grad.dtype == made.weight.grad.dtype == F32
    want = torch.ones(16, 32, device=device).t() @ x.detach()
    kind = kinds(each_recipe)[2]
    assert relative_error(made.weight.grad, want) < max(1.2 * TOLERANCE[kind], 0.02)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_o41_autocast_between_other_layers(device, recipe, dtype):
    """O-41: a model of ours and torch's layers under autocast; autocast off inside it."""
    model = nn.Sequential(
        nn.Linear(32, 64),
        nf.Linear(64, 64, recipe=recipe),
        nn.LayerNorm(64),
        nf.Linear(64, 32, recipe=recipe),
    ).to(device)
    x = torch.randn(16, 32, device=device)
    with torch.autocast(device, dtype=dtype):
        y = model(x)
        assert y.dtype == dtype
        loss = y.float().square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == F32 and parameter.grad.any(), name
        assert parameter.grad.isfinite().all(), name
    with torch.autocast(device, dtype=dtype):
        hidden = model[1](torch.randn(4, 64, device=device))
        with torch.autocast(device, enabled=False):
            assert model[1](torch.randn(4, 64, device=device)).dtype == F32
    assert hidden.dtype == dtype


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "b_dtype"), list(itertools.product(DTYPES, DTYPES, [*DTYPES, None]))
)
def test_o42_every_mix_of_dtypes(device, recipe, x_dtype, w_dtype, b_dtype):
    """O-42: x, w and bias in any mix; y has x's dtype, each gradient its tensor's."""
    forward, gradient, _ = kinds(recipe)
    # FP4's error is spread wider where sums are short
    few, fewer = ((24, 64, 48), (5, 33, 7)) if recipe == "fp8" else ((48, 192, 80), (37, 100, 71))
    for m, k, n in (few, fewer):
        x = torch.randn(m, k, device=device).to(x_dtype).requires_grad_()
        w = torch.randn(n, k, device=device).to(w_dtype).requires_grad_()
        bias = None
        if b_dtype is not None:
            bias = (10 * torch.randn(n, device=device)).to(b_dtype).requires_grad_()
        y = nf.linear(x, w, bias, recipe)
        assert y.dtype == x_dtype
        g = torch.randn(m, n, device=device).to(x_dtype)
        y.backward(g)
        ref = x.detach().double() @ w.detach().double().t()
        if bias is not None:
            assert bias.grad.dtype == b_dtype
            assert relative_error(bias.grad, g.double().sum(0)) < 2**-8
            # the bias is large and not quantized: the error may only be that of the GEMM
            error = (y.detach().double() - ref - bias.detach().double()).norm() / ref.norm()
            assert error < TOLERANCE[forward] + 10 * 2**-8
            ref = ref + bias.detach().double()
        assert_close_as(y.detach(), ref, forward)
        assert x.grad.dtype == x_dtype and w.grad.dtype == w_dtype
        assert_close_as(x.grad, g.double() @ w.detach().double(), gradient)
        assert_close_as(w.grad, g.double().t() @ x.detach().double(), gradient)


@pytest.mark.parametrize("dtype", DTYPES)
def test_o42_o46_dtypes(device, each_recipe, dtype):
    """O-42, O-46: y in x's dtype, each gradient in its tensor's, in any mix."""
    x = torch.randn(8, 32, device=device).to(dtype).requires_grad_()
    for w_dtype, b_dtype in ((F32, BF16), (BF16, F32), (F16, F16)):
        w = torch.randn(16, 32, device=device).to(w_dtype).requires_grad_()
        bias = torch.randn(16, device=device).to(b_dtype).requires_grad_()
        y = nf.linear(x, w, bias, each_recipe)
        x.grad = None
        y.sum().backward()
        assert y.dtype == x.grad.dtype == dtype
        assert w.grad.dtype == w_dtype and bias.grad.dtype == b_dtype
        want = x.detach().double() @ w.detach().double().t() + bias.detach().double()
        assert relative_error(y, want) < 1.2 * TOLERANCE[kinds(each_recipe)[0]]


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("b_dtype", DTYPES)
def test_o42_bias_of_the_product(device, b_dtype, out_dtype):
    """O-42: the GEMM of quantized operands takes each bias with each output."""
    for m, k, n in ((32, 64, 48), (5, 33, 7)):
        a, b = (nf.quantize(torch.randn(r, k, device=device)) for r in (m, n))
        bias = (10 * torch.randn(n, device=device)).to(b_dtype)
        d = ops.scaled_mm(a.data, b.data, a.scale, b.scale, bias, out_dtype)
        assert d.dtype == out_dtype
        ref = a.dequantize(F32).double() @ b.dequantize(F32).double().t() + bias.double()
        assert relative_error(d, ref) < 2**-8


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_o42_other_dtypes_are_refused(device, recipe, dtype):
    """O-42: TypeError that lists what is taken, for each operand."""
    good = [torch.randn(s, device=device) for s in ((8, 16), (8, 16), (8,))]
    for which in range(3):
        bad = list(good)
        bad[which] = bad[which].to(dtype)
        with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
            nf.linear(*bad, recipe=recipe)
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        nf.quantize(good[0].to(dtype), "e4m3" if recipe == "fp8" else recipe)


def moves(device: str):
    return {
        "bfloat16": lambda m: m.to(BF16),
        "half": lambda m: m.half(),
        "half and back": lambda m: m.half().float(),
        "away and back": lambda m: m.cpu().to(device),
        "dtype and device": lambda m: m.to(dtype=BF16, device=device),
        "double and back": lambda m: m.double().to(F16),
    }


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("move", list(moves("cpu")))
def test_o43_casts_and_moves_of_a_module(device, recipe, move, used_before):
    """O-43: there is no scale to lose: after any .to() it equals a fresh module of that weight."""
    made = nf.Linear(64, 48, device=device, recipe=recipe)
    x = torch.randn(24, 64, device=device)
    if used_before:
        made(x).sum().backward()
        made.zero_grad(set_to_none=True)
    assert not list(made.buffers())
    moved = moves(device)[move](made)
    dtype = moved.weight.dtype
    fresh = nf.Linear(64, 48, device=device, dtype=dtype, recipe=recipe)
    fresh.load_state_dict(moved.state_dict())
    y = moved(x.to(dtype))
    assert y.dtype == dtype
    assert_same_bits(y.detach(), fresh(x.to(dtype)).detach())
    y.sum().backward()
    assert moved.weight.grad.dtype == dtype
    saved = io.BytesIO()
    torch.save(moved.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    assert set(state) == {"weight", "bias"}
    assert all(t.dtype == dtype for t in state.values())


@pytest.mark.parametrize("move", list(moves("cpu")))
def test_o43_casts_inside_reuse_weights(device, recipe, move):
    """O-43: a cast replaces the weight, so what reuse_weights() caches must not outlive it."""
    made = nf.Linear(64, 48, device=device, recipe=recipe)
    x = torch.randn(24, 64, device=device)
    with nf.reuse_weights(made):
        made(x)
        moved = moves(device)[move](made)
        dtype = moved.weight.dtype
        y = moved(x.to(dtype)).detach()
    assert_same_bits(y, moved(x.to(dtype)).detach())


def test_o43_quantized_tensors_keep_their_scale(device, recipe):
    """O-43: the scale of a quantized tensor is fp32 whatever the input's dtype."""
    for dtype in DTYPES:
        x = torch.randn(8, 16, device=device).to(dtype)
        q = nf.quantize(x, "e4m3" if recipe == "fp8" else recipe)
        assert q.scale.dtype == F32 and q.dtype == dtype
        assert q.dequantize().dtype == dtype and q.dequantize(F32).dtype == F32


@pytest.mark.parametrize("dtype", DTYPES)
def test_o44_convert_keeps_the_parameters(device, recipe, dtype):
    """O-44: the same parameter objects, dtype and bytes; requires_grad and device kept."""
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
    model = model.to(device, dtype)
    model[0].weight.requires_grad_(False)
    before = dict(model.named_parameters())
    copies = copy.deepcopy(before)
    addresses = {name: p.data_ptr() for name, p in before.items()}
    nf.convert(model, recipe, head=True, **({} if recipe == "fp8" else {"keep_last": 0}))
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, parameter in after.items():
        assert parameter is before[name] and parameter.data_ptr() == addresses[name]
        assert parameter.dtype == dtype and parameter.device.type == device
        assert parameter.requires_grad == (name != "0.weight")
        assert_same_bits(parameter, copies[name], name)
    assert isinstance(model[0], nf.Linear) and isinstance(model[2], nf.Linear)


@pytest.mark.gpu
def test_o44_convert_takes_no_memory(cuda, recipe):
    """O-44: no second high-precision copy of a 4096 x 4096 layer, before or after a step."""
    model = nn.Linear(4096, 4096, device=cuda, dtype=BF16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    nf.convert(model, recipe, head=True, **({} if recipe == "fp8" else {"keep_last": 0}))
    assert isinstance(model, nf.Linear)
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    with torch.no_grad():
        model(torch.randn(64, 4096, device=cuda, dtype=BF16))
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


@pytest.mark.parametrize("dtype", DTYPES)
def test_o45_default_dtype(device, recipe, dtype):
    """O-45: torch.set_default_dtype holds for our layers as for nn.Linear."""
    old = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        made = nf.Linear(16, 32, device=device, recipe=recipe)
        plain = nn.Linear(16, 32, device=device)
        if recipe != "fp8":
            assert nf.FP4Linear(16, 32, device=device).weight.dtype == dtype
        other = nf.Linear(16, 32, device=device, dtype=F16)
    finally:
        torch.set_default_dtype(old)
    assert made.weight.dtype == made.bias.dtype == plain.weight.dtype == dtype
    assert other.weight.dtype == F16
    assert made(torch.randn(4, 16, device=device).to(dtype)).dtype == dtype


def test_o45_default_device(device, recipe):
    """O-45: so do the default device and the context of a device."""
    with torch.device(device):
        assert nf.Linear(16, 32, recipe=recipe).weight.device.type == device
        assert nf.Linear(16, 32, device="meta", recipe=recipe).weight.device.type == "meta"
    torch.set_default_device("meta" if device == "cpu" else device)
    try:
        made = nf.Linear(16, 32, recipe=recipe)
    finally:
        torch.set_default_device(None)
    assert made.weight.device.type == ("meta" if device == "cpu" else device)
    assert nf.Linear(16, 32, recipe=recipe).weight.device.type == "cpu"


def test_o43_o45_casts_and_defaults(device, each_recipe):
    """O-43, O-45: a layer that is cast goes on; the default dtype is taken."""
    made = nf.Linear(32, 16, device=device, recipe=each_recipe)
    x = torch.randn(4, 32, device=device)
    want = made(x).detach()
    made.to(BF16)
    assert made(x.bfloat16()).dtype == BF16
    # values that lie between two codes may come to lie on the other side
    assert relative_error(made(x.bfloat16()), want) < TOLERANCE[kinds(each_recipe)[0]]
    torch.set_default_dtype(BF16)
    try:
        assert nf.Linear(8, 8, recipe=each_recipe).weight.dtype == BF16
    finally:
        torch.set_default_dtype(F32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_o46_output_dtype_is_that_of_x(device, dtype):
    """O-46: no dtype is wired in: module, linear, matmul and the seeds' functions."""
    made = nf.FP8Linear(32, 48, device=device, dtype=dtype)
    x = torch.randn(8, 32, device=device).to(dtype).requires_grad_()
    w = torch.randn(48, 32, device=device).to(dtype).requires_grad_()
    for y in (made(x), nf.linear(x, w), nf.matmul(x, w.t()), nf.fp8_linear_forward(x, w)):
        assert y.dtype == dtype
    (made(x).sum() + nf.matmul(x, w.t()).sum()).backward()
    assert x.grad.dtype == w.grad.dtype == made.weight.grad.dtype == made.bias.grad.dtype == dtype
    g = torch.randn(8, 48, device=device).to(dtype)
    for gradient in nf.fp8_linear_backward(g, x.detach(), w.detach()):
        assert gradient.dtype == dtype
    assert nf.quantize(x).dequantize().dtype == dtype


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_o47_checkpoint_of_another_dtype(device, recipe, dtype, stored):
    """O-47: without scales in a checkpoint there is only the weight to convert, once, on load."""
    made = nf.Linear(64, 48, device=device, dtype=dtype, recipe=recipe)
    state = {name: torch.randn_like(t).to(stored) for name, t in made.state_dict().items()}
    made.load_state_dict(state)
    for name, parameter in made.named_parameters():
        assert parameter.dtype == dtype
        assert_same_bits(parameter, state[name].to(dtype), name)
    x = torch.randn(8, 64, device=device).to(dtype)
    ref = nf.linear(x, state["weight"].to(dtype), state["bias"].to(dtype), recipe)
    assert_same_bits(made(x).detach(), ref)


@pytest.mark.parametrize("name", ["a_scale", "b_scale"])
@pytest.mark.parametrize("dtype", [BF16, F16, torch.float64])
def test_o47_scales_of_another_dtype(device, dtype, name):
    """O-47: a scale handed over in 16 bits is refused by name, not read as fp32."""
    a, b = (nf.quantize(torch.randn(16, 32, device=device)) for _ in range(2))
    scales = {"a_scale": a.scale, "b_scale": b.scale}
    scales[name] = scales[name].to(dtype)
    kind = str(dtype).replace("torch.", "")
    with pytest.raises((TypeError, ValueError), match=f"{name} in float32.*{kind}"):
        ops.scaled_mm(a.data, b.data, scales["a_scale"], scales["b_scale"])


@pytest.mark.parametrize("stored", [BF16, F16])
def test_o47_a_packed_scale_of_another_dtype(device, stored):
    """O-47: a checkpoint whose tensor scale is 16 bits wide is widened once, on load; the operator
    itself refuses it by name."""
    made = PackedFP4Linear.from_linear(nn.Linear(64, 48, device=device), "nvfp4")
    state = made.state_dict()
    state["scale"] = (state["scale"] * 1024).to(stored)  # within fp16's range
    made.load_state_dict(state)
    assert made.scale.dtype == F32
    assert_same_bits(made.scale, state["scale"].float())
    x = torch.randn(3, 64, device=device).bfloat16()
    with pytest.raises(ValueError, match="expected the scale in.*float32"):
        fp4_weight_matmul_op(x, made.packed, state["scale"], None, 48, BF16, False)
