"""Decides that the public failures of the kind "values" (open.md, O-19 to O-31) do not happen."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_close_as, assert_same_bits, relative_error
from torch import Tensor, nn
from torch.nn import functional as F

import narrowfloat as nf
from narrowfloat import formats, ops

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, F16, F32]
LIMIT = {"e4m3": 448.0, "e5m2": 57344.0}
INF, NAN = float("inf"), float("nan")


def run(x: Tensor, w: Tensor, bias: Tensor | None, g: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, bias) if t is not None]
    y = nf.linear(*leaves)
    y.backward(g)
    return (y.detach(), *(leaf.grad for leaf in leaves))


def operands(device: str, dtype: torch.dtype, m: int = 24, k: int = 64, n: int = 40):
    return tuple(
        torch.randn(*shape, device=device).to(dtype) for shape in ((m, k), (n, k), (n,), (m, n))
    )


def at_scale_one(values: list[float], format: str, device: str, dtype: torch.dtype = F32) -> Tensor:
    """The codes that `values` become when the scale is 1 instead of measured, as fp32."""
    x = torch.tensor([values], device=device).to(dtype)
    one = torch.ones(4, device=device)
    rows, columns, _ = ops.quantize_op(x, formats.FORMATS[format].code, True, True, one)
    n = len(values)
    assert_same_bits(rows[:1, :n], columns[:n, :1].t(), "rows and columns")
    return rows[0, :n].float().cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", ["x", "w", "g", "xw", "xwg"])
def test_o19_all_zero_tensors(device, zeros, dtype):
    """O-19: a zero tensor has a finite, positive scale and gives exact zeros."""
    x, w, _, g = operands(device, dtype)
    x = torch.zeros_like(x) if "x" in zeros else x
    w = torch.zeros_like(w) if "w" in zeros else w
    g = torch.zeros_like(g) if "g" in zeros else g
    y, dx, dw = run(x, w, None, g)
    for name, t, is_zero in (
        ("y", y, "x" in zeros or "w" in zeros),
        ("dx", dx, "w" in zeros or "g" in zeros),
        ("dw", dw, "x" in zeros or "g" in zeros),
    ):
        assert t.isfinite().all(), name
        assert t.any() != is_zero, name
    assert not torch.signbit(run(x.abs(), w.abs(), None, g)[0]).any()  # +0, not -0


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_o19_scale_of_zero(device, dtype, format):
    """O-19: the stored scale is finite and positive, and so it is for -0."""
    for fill in (0.0, -0.0):
        q = nf.quantize(torch.full((5, 33), fill, device=device, dtype=dtype), format)
        assert math.isfinite(q.scale.item()) and q.scale.item() > 0
        assert not q.data.float().any() and not q.dequantize().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_o20_zero_rows(device, dtype):
    """O-20: rows 3 and 7 of x are zero: those rows of y are the bias exactly."""
    x, w, bias, g = operands(device, dtype)
    x[3] = x[7] = 0
    y, dx, dw, _ = run(x, w, bias, g)
    assert_same_bits(y[3], bias, "row 3")
    assert_same_bits(y[7], bias, "row 7")
    assert_close_as(y, x.double() @ w.double().t() + bias.double())
    assert_close_as(dx, g.double() @ w.double(), "e5m2")
    assert_close_as(dw, g.double().t() @ x.double(), "e5m2")


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_o20_lora_with_a_zero_matrix(device, dtype):
    """O-20: a LoRA pair that starts at B = 0, beside a frozen layer, for five steps."""
    base = nf.FP8Linear(64, 48, device=device, dtype=dtype).requires_grad_(False)
    down = nf.FP8Linear(64, 8, bias=False, device=device, dtype=dtype)
    up = nf.FP8Linear(8, 48, bias=False, device=device, dtype=dtype)
    nn.init.zeros_(up.weight)
    x = torch.randn(32, 64, device=device).to(dtype)
    x[3] = x[7] = 0
    target = torch.randn(32, 48, device=device).to(dtype)
    assert_same_bits(base(x) + up(down(x)), base(x), "B = 0 adds nothing")
    optimizer = torch.optim.SGD([down.weight, up.weight], lr=0.5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.mse_loss((base(x) + up(down(x))).float(), target.float())
        loss.backward()
        assert up.weight.grad.any() and up.weight.grad.isfinite().all()
        assert bool(down.weight.grad.any()) == bool(losses)  # B = 0 lets nothing through, once
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert up.weight.any()


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1e-40, F32),
        (1e-45, F32),
        (1.4e-38, F32),
        (1e-36, F32),
        (1e-39, BF16),
        (1e-40, BF16),
        (6e-8, F16),
    ],
)
def test_o21_amax_so_small_that_the_multiplier_overflows(device, value, dtype, format):
    """O-21: no NaN or Inf; flushing to zero is allowed, making the value larger is not."""
    x = torch.full((16, 64), value, dtype=dtype, device=device)
    x[0, 0] *= -1
    assert x.any()
    q = nf.quantize(x, format)
    assert math.isfinite(q.scale.item()) and q.scale.item() >= 0
    assert q.data.float().isfinite().all()
    back = q.dequantize(F32).double()
    assert ((back - x.double()).abs() <= x.double().abs()).all()
    w = torch.randn(32, 64, device=device).to(dtype)
    y, dx, dw = run(x, w, None, torch.ones(16, 32, device=device, dtype=dtype))
    ref = x.double() @ w.double().t()
    assert y.isfinite().all() and dw.isfinite().all()
    # a subnormal result has steps of its own: fp32's and bf16's smallest, fp16's
    step = {F32: 1.5e-45, BF16: 1e-40, F16: 6e-8}[dtype] * 64
    assert ((y.double() - ref).norm() <= 1.05 * ref.norm() + step * y.numel() ** 0.5).item()
    assert_close_as(dx, torch.ones(16, 32).double().to(device) @ w.double(), "e5m2")
    # and as the weight and the gradient
    for t in run(w, x, None, torch.full((32, 16), value, dtype=dtype, device=device)):
        assert t.isfinite().all()


CASES_O25 = {
    "e4m3": ([449, 1000, -1e5, 448, -448, 3e38], [448, 448, -448, 448, -448, 448]),
    "e5m2": (
        [61440, 65504, -1e6, 57344, -57345, 3e38],
        [57344, 57344, -57344, 57344, -57344, 57344],
    ),
}


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("format", list(CASES_O25))
def test_o25_casts_saturate(device, format, mode):
    """O-25: +-448 and +-57344 whatever torch's own cast does, eager and compiled."""
    values, right = CASES_O25[format]
    x = torch.tensor([values], device=device)
    one = torch.ones(4, device=device)
    code = formats.FORMATS[format].code

    def cast(x: Tensor) -> Tensor:
        return ops.quantize_op(x, code, True, False, one)[0].float()

    if mode == "compiled":
        torch._dynamo.reset()
        cast = torch.compile(cast, backend="aot_eager" if device == "cpu" else "inductor")
    assert cast(x)[0, : len(values)].tolist() == right
    if mode == "eager":
        for dtype in (BF16, F16):
            narrow = [v for v in values if abs(v) < 65505]
            got = at_scale_one(narrow, format, device, dtype)
            assert ((got.abs() <= LIMIT[format]) & got.isfinite()).all()


def test_o25_public_quantize_compiles_alike(device):
    """O-25: quantize() gives the same bytes eager and compiled."""
    x = torch.randn(33, 70, device=device) * 1e4

    def both(x: Tensor) -> tuple[Tensor, ...]:
        a, b = nf.quantize(x), nf.quantize(x, "e5m2")
        return a.data.clone(), a.scale.clone(), b.data.clone(), b.scale.clone()

    torch._dynamo.reset()
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(both, backend=backend, fullgraph=True)
    for a, b in zip(both(x), compiled(x), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("m", [16, 5])
@pytest.mark.parametrize("k", [4096, 8192])
def test_o26_intermediate_sums_beyond_fp16(device, k, m):
    """O-26: (1) the unscaled sum passes 65,504 by far, y = K exactly; gradients exactly too."""
    x = torch.ones(m, k, device=device, dtype=F16)
    w = torch.ones(16, k, device=device, dtype=F16)
    y, dx, dw, db = run(
        x, w, torch.ones(16, device=device, dtype=F16), torch.ones(m, 16, dtype=F16, device=device)
    )
    assert (run(x, w, None, torch.ones_like(y))[0] == k).all()
    assert (y == torch.tensor(k + 1.0).to(F16).to(device)).all()
    assert (dx == 16).all() and (dw == m).all() and (db == m).all()


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(("m", "k", "n"), [(64, 4096, 48), (33, 2000, 17)])
def test_o26_scales_before_the_store(device, m, k, n, dtype):
    """O-26: (2) x up to .06 and w so large that max |y| is 11.5."""
    x = torch.randn(m, k, device=device)
    x = (x * (0.06 / x.abs().max())).to(dtype)
    w = torch.randn(n, k, device=device)
    w = (w * (11.5 / (x.float() @ w.t()).abs().max())).to(dtype)
    g = torch.randn(m, n, device=device).to(dtype)
    y, dx, dw = run(x, w, None, g)
    assert y.isfinite().all()
    assert_close_as(y, x.double() @ w.double().t())
    assert_close_as(dx, g.double() @ w.double(), "e5m2")
    assert_close_as(dw, g.double().t() @ x.double(), "e5m2")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF, -NAN])
@pytest.mark.parametrize("where", ["x", "w", "g", "bias"])
def test_o27_nan_and_inf_stay_visible(device, where, bad, dtype):
    """O-27: one NaN or Inf in an operand makes what depends on it non-finite, in any position."""
    for m, k, n in ((24, 64, 40), (5, 33, 7)):
        for last in (False, True):
            x, w, bias, g = operands(device, dtype, m, k, n)
            i, j = (-1, -1) if last else (2, 3)
            spoiled = {"x": x, "w": w, "g": g, "bias": bias[None]}[where]
            spoiled[0 if where == "bias" else i, j] = bad
            y, dx, dw, db = run(x, w, bias, g)
            if where == "x":
                assert not y[i].isfinite().any() and not dw[:, j].isfinite().any()
                assert dx.isfinite().all() and db.isfinite().all()
            elif where == "w":
                assert not y[:, i].isfinite().any() and not dx[:, j].isfinite().any()
                assert dw.isfinite().all() and db.isfinite().all()
            elif where == "g":
                assert not dx[i].isfinite().any() and not dw[j].isfinite().any()
                assert not db[j].isfinite() and y.isfinite().all()
            else:
                assert not y[:, j].isfinite().any()
                assert all(t.isfinite().all() for t in (dx, dw, db))


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_o27_quantize_keeps_nan_and_inf(device, dtype, bad, format):
    """O-27: the scale tells of it, and no dequantized element is finite garbage."""
    x = torch.randn(5, 33, device=device).to(dtype)
    x[4, 32] = bad
    q = nf.quantize(x, format)
    assert not math.isfinite(q.scale.item())
    assert not q.dequantize(F32)[4, 32].isfinite()


@pytest.mark.parametrize("where", ["x", "w", "g", None])
def test_o27_grad_scaler_skips_the_step(device, where):
    """O-27: torch's GradScaler sees the overflow, does not step, and lowers its scale."""
    made = nf.FP8Linear(64, 40, device=device)
    x, _, _, g = operands(device, F32)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    if where == "x":
        x[2, 3] = INF
    elif where == "w":
        with torch.no_grad():
            made.weight[2, 3] = NAN
        x.requires_grad_()
    elif where == "g":
        g[2, 3] = INF
    before = made.bias.detach().clone()
    with torch.autocast(device, dtype=F16):
        y = made(x)
    # the layer's own y enters the loss's gradient, as in any real loss
    loss = (y.float() * g).sum() if where != "w" else y.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if where is None:
        assert not torch.equal(made.bias, before) and scaler.get_scale() == 1024
    else:
        assert torch.equal(made.bias, before) and scaler.get_scale() < 1024


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_o31_the_edge_between_rounding_down_and_overflow(device, dtype):
    """O-31: 463.9 to 480 become 448; ties to even inside; the subnormal edge at 2^-10."""
    if dtype == F32:
        values = [463.9, 464, 464.1, 480, 4.25, 250, 2.0**-10, 1.01 * 2.0**-10]
        right = [448, 448, 448, 448, 4, 256, 0, 2.0**-9]
    else:  # values that these dtypes hold
        values = [464, 480, 496, 4.25, 250, 2.0**-10, 1.0625 * 2.0**-10, 4.75, 6.75]
        right = [448, 448, 448, 4, 256, 0, 2.0**-9, 5.0, 7.0]
    for sign in (1, -1):
        got = at_scale_one([sign * v for v in values], "e4m3", device, dtype)
        assert got.tolist() == [sign * v for v in right]


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_o31_every_tie_goes_to_even(device, format):
    """O-31: the middle of each pair of neighbours goes to the even code, a step beyond it up."""
    fmt = formats.FORMATS[format]
    top = int(torch.tensor(fmt.max).to(fmt.dtype).view(torch.uint8))
    codes = torch.arange(top + 1, dtype=torch.uint8)
    values = codes.view(fmt.dtype).float()
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    even = torch.where(codes[:-1] % 2 == 0, low, high)
    up, down = torch.full_like(middle, INF), torch.full_like(middle, -INF)
    for given, right in (
        (middle, even),
        (torch.nextafter(middle, up), high),
        (torch.nextafter(middle, down), low),
        (low, low),
    ):
        assert torch.equal(at_scale_one(given.tolist(), format, device), right)
        assert torch.equal(at_scale_one((-given).tolist(), format, device), -right)


def test_values_error_is_that_of_fp8(device):
    """The tolerances of this kind can fail: the error is FP8's, not zero and not twice it."""
    x, w, _, g = operands(device, F32, 256, 512, 256)
    y, dx, dw = run(x, w, None, g)
    assert 0.03 < relative_error(y, x.double() @ w.double().t()) < 0.045
    assert 0.05 < relative_error(dx, g.double() @ w.double()) < 0.07
    assert 0.05 < relative_error(dw, g.double().t() @ x.double()) < 0.07
