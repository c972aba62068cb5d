"""Public failures of the kind "values" do not happen: O-19 to O-31, O-39; see CASES.md."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import (
    assert_close_as,
    assert_same_bits,
    dtypes_for,
    kinds,
    relative_error,
    skip_where_it_does_not_run,
)
from torch import Tensor, nn
from torch.nn import functional as F

import narrowfloat as nf
from narrowfloat import formats, ops
from narrowfloat.cast import Cast
from narrowfloat.spec import both

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, F16, F32]
LIMIT = {"e4m3": 448.0, "e5m2": 57344.0}
INF, NAN = float("inf"), float("nan")
BLOCKED = sorted(formats.SCALED_FORMATS)  # a scale each row or block
FP4 = sorted(formats.BLOCK_FORMATS)
# elements that share a scale
WIDTH = {f: s.block for f, s in formats.SCALED_FORMATS.items()} | {"nvfp4": 16, "mxfp4": 32}


def run(
    x: Tensor, w: Tensor, bias: Tensor | None, g: Tensor, recipe: str | nf.Recipe = "fp8"
) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, bias) if t is not None]
    y = nf.linear(*leaves, recipe=recipe)
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
    how = Cast(format)
    rows, _, columns, *_ = ops.quantize_op(x, both(how, how).pack(), one)
    n = len(values)
    assert_same_bits(rows[:1, :n], columns[:n, :1].t(), "rows and columns")
    return rows[0, :n].float().cpu()


@pytest.mark.parametrize("zeros", ["x", "w", "g", "xw", "xwg"])
def test_o19_all_zero_tensors(device, each_recipe, zeros):
    """O-19: a zero tensor has a finite, positive scale and gives exact zeros."""
    for dtype in dtypes_for(each_recipe, BF16, F16):
        x, w, _, g = operands(device, dtype)
        x = torch.zeros_like(x) if "x" in zeros else x
        w = torch.zeros_like(w) if "w" in zeros else w
        g = torch.zeros_like(g) if "g" in zeros else g
        y, dx, dw = run(x, w, None, g, each_recipe)
        for name, t, is_zero in (
            ("y", y, "x" in zeros or "w" in zeros),
            ("dx", dx, "w" in zeros or "g" in zeros),
            ("dw", dw, "x" in zeros or "g" in zeros),
        ):
            assert t.isfinite().all(), name
            assert (not t.any()) if is_zero else t.any(), name
        with torch.no_grad():
            y = nf.linear(x.abs(), w.abs(), None, each_recipe)
        assert not torch.signbit(y).any()  # +0, not -0


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_o19_scale_of_zero(device, dtype, format):
    """O-19: the stored scale is finite and positive, and so it is for -0."""
    for fill in (0.0, -0.0):
        q = nf.quantize(torch.full((5, 33), fill, device=device, dtype=dtype), format)
        assert math.isfinite(q.scale.item()) and q.scale.item() > 0
        assert not q.data.float().any() and not q.dequantize().any()


def test_o20_zero_rows(device, each_recipe):
    """O-20: rows 3 and 7 of x are zero: those rows of y are the bias exactly."""
    of_y, of_dx, of_dw = kinds(each_recipe)
    for dtype in dtypes_for(each_recipe, BF16, F16):
        x, w, bias, g = operands(device, dtype)
        x[3] = x[7] = 0
        y, dx, dw, _ = run(x, w, bias, g, each_recipe)
        assert_same_bits(y[3], bias, "row 3")
        assert_same_bits(y[7], bias, "row 7")
        spread = 1.0 if each_recipe.kinds == ("fp8",) else 1.2
        assert_close_as(y, x.double() @ w.double().t() + bias.double(), of_y, spread)
        assert_close_as(dx, g.double() @ w.double(), of_dx, spread)
        assert_close_as(dw, g.double().t() @ x.double(), of_dw, spread)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_o20_lora_with_a_zero_matrix(device, each_recipe, dtype):
    """O-20: a LoRA pair that starts at B = 0, beside a frozen layer, for five steps."""
    how = {"device": device, "dtype": dtype, "recipe": each_recipe}
    base = nf.Linear(64, 48, **how).requires_grad_(False)
    down, up = nf.Linear(64, 8, bias=False, **how), nf.Linear(8, 48, bias=False, **how)
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


@pytest.mark.parametrize("format", FP4)
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


@pytest.mark.parametrize("format", [*BLOCKED, *FP4])
def test_o21_o23_tiny(device: str, format: str) -> None:
    """O-21, O-23: no NaN where amax is subnormal; near 1e-36 the error is the usual one (in nvfp4
    from 8e-36 on, where 2688 / amax no longer overflows)."""
    w = torch.randn(48, 64, device=device)
    for value in (1e-40, 1e-45, 1e-39):
        x = torch.full((16, 64), value, device=device)
        if nf.supported(format, device):
            assert nf.linear(x, w, None, format).isfinite().all()
        q = nf.quantize(x, format)
        assert q.scales.float().isfinite().all()
        back = q.dequantize()
        assert back.isfinite().all() and (back - x).norm() <= x.norm()
        assert format in FP4 or (back - x).abs().max() <= x.max()
    size = 1e-35 if format == "nvfp4" else 1e-36
    error, above = (0.14, 1.2) if format in FP4 else (0.05, 1.07)
    x = (torch.randn(64, 1024, device=device) * size).bfloat16()
    x[:, ::7] *= 1e-3
    back = nf.quantize(x, format).dequantize(F32)
    large = x.abs() > size
    scaled, restored = x.double() / size, back.double() / size  # squares underflow
    assert relative_error(restored[large], scaled[large]) < error
    assert back.abs().max() <= x.abs().max().float() * above


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
    spec = both(Cast(format), None).pack()

    def cast(x: Tensor) -> Tensor:
        return ops.quantize_op(x, spec, one)[0].float()

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
def test_o26_intermediate_sums_beyond_fp16(device, each_recipe, k, m):
    """O-26: (1) the unscaled sum passes 65,504 by far, y = K exactly; gradients exactly too, but
    for an FP4 dw, whose operands are rotated."""
    x = torch.ones(m, k, device=device, dtype=F16)
    w = torch.ones(16, k, device=device, dtype=F16)
    g = torch.ones(m, 16, dtype=F16, device=device)
    y, dx, dw, db = run(x, w, torch.ones(16, device=device, dtype=F16), g, each_recipe)
    assert (nf.linear(x, w, None, each_recipe) == k).all()
    assert (y == torch.tensor(k + 1.0).to(F16).to(device)).all()
    assert (dx == 16).all() and (db == m).all()
    assert dw.isfinite().all() if each_recipe.wgrad.kind == "fp4" else (dw == m).all()


@pytest.mark.parametrize(("m", "k", "n"), [(64, 4096, 48), (33, 2000, 17)])
def test_o26_scales_before_the_store(device, each_recipe, m, k, n):
    """O-26: (2) x up to .06 and w so large that max |y| is 11.5; sums of one sign too."""
    of_y, of_dx, of_dw = kinds(each_recipe)
    spread = 1.0 if each_recipe.kinds == ("fp8",) else 1.2
    for dtype in (F16, BF16) if each_recipe.name == "fp8" else (F16,):
        x = torch.randn(m, k, device=device)
        x = (x * (0.06 / x.abs().max())).to(dtype)
        w = torch.randn(n, k, device=device)
        w = (w * (11.5 / (x.float() @ w.t()).abs().max())).to(dtype)
        g = torch.randn(m, n, device=device).to(dtype)
        y, dx, dw = run(x, w, None, g, each_recipe)
        assert y.isfinite().all()
        assert_close_as(y, x.double() @ w.double().t(), of_y, spread)
        assert_close_as(dx, g.double() @ w.double(), of_dx, spread)
        assert_close_as(dw, g.double().t() @ x.double(), of_dw, spread)
        x, w = (torch.rand(r, k, device=device).to(dtype) * s for r, s in ((m, 0.06), (n, 0.1)))
        y = nf.linear(x, w, None, each_recipe)
        assert y.isfinite().all()
        assert_close_as(y, x.double() @ w.double().t(), of_y)


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


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_o27_o29_nonfinite_surfaces(device, each_recipe, value):
    """O-27, O-29: what is not finite comes out in its rows, and, unless an operand of the GEMM has
    one scale a tensor, nowhere else but with w's blocks of 128 (FP4: 16) rows."""
    far = {g: "fp8" not in getattr(each_recipe, g).kind for g in ("fprop", "dgrad", "wgrad")}
    x, w = torch.randn(64, 64, device=device), torch.randn(300, 64, device=device)
    bad = x.clone()
    bad[5, 9] = value
    assert nf.linear(x, w, None, each_recipe).isfinite().all()
    y = nf.linear(bad, w, None, each_recipe)
    assert not y[5].isfinite().any()
    if far["fprop"]:
        assert y[:5].isfinite().all() and y[6:].isfinite().all()
    bad = w.clone()
    bad[20, 9] = value
    y = nf.linear(x, bad, None, each_recipe)
    assert not y[:, 20].isfinite().any()
    if far["fprop"]:
        assert y[:, 128:].isfinite().all()
    if each_recipe.fprop.kind == "fp4":
        assert y[:, :16].isfinite().all() and y[:, 32:].isfinite().all()
    g = torch.randn(64, 300, device=device)
    g[7, 3] = value
    _, dx, dw = run(x, w, None, g, each_recipe)
    assert not dx[7].isfinite().any() and not dw[3].isfinite().any()
    if far["dgrad"]:
        assert dx[:7].isfinite().all() and dx[8:].isfinite().all()
    if far["wgrad"]:
        assert dw[:3].isfinite().all() and dw[4:].isfinite().all()


@pytest.mark.parametrize("where", ["x", "w", "g", None])
def test_o27_grad_scaler_skips_the_step(device, each_recipe, where):
    """O-27: torch's GradScaler sees the overflow, does not step, and lowers its scale."""
    made = nf.Linear(64, 40, device=device, recipe=each_recipe)
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
    before = [p.detach().clone() for p in made.parameters()]
    with torch.autocast(device, dtype=F16):
        y = made(x)
    # the layer's own y enters the loss's gradient, as in any real loss
    loss = (y.float() * g).sum() if where != "w" else y.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if where is None:
        assert not torch.equal(made.bias, before[1]) and scaler.get_scale() == 1024
        return
    for now, then in zip(made.parameters(), before, strict=True):
        assert_same_bits(now, then, "a step was taken")
    assert scaler.get_scale() < 1024


@pytest.mark.parametrize("format", ["fp8_block_pow2", "mxfp8"])
def test_o28_powers_of_two_are_rounded_up(device: str, format: str) -> None:
    """O-28: 500 takes the scale 2 and is 512, not 448."""
    x = torch.full((1, 32), 0.1, device=device)
    x[0, 5] = 500
    q = nf.quantize(x, format)
    assert q.scales.float().item() == 2 and q.dequantize()[0, 5] == 512


def test_o28_mx_scales_are_rounded_up(device: str) -> None:
    """O-28: amax 7 needs the scale 2, and becomes 8 or 6, not clipped to 6 by a scale of 1."""
    x = torch.full((1, 32), 0.1, device=device)
    x[0, 5] = 7
    q = nf.quantize(x, "mxfp4")
    assert q.scales.float().item() == 2
    assert q.dequantize()[0, 5] == 8  # 3.5 is between 3 and 4: to even
    x[0, 5] = 6
    assert nf.quantize(x, "mxfp4").scales.float().item() == 1


@pytest.mark.parametrize("format", [*BLOCKED, *FP4])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_o29_neighbouring_blocks_are_untouched(device: str, format: str, value: float) -> None:
    x = torch.randn(4, 384, device=device)
    x[0, 0] = 8.0  # the largest, with or without the other
    bad = x.clone()
    bad[1, 130] = value
    q, clean = nf.quantize(bad, format), nf.quantize(x, format)
    width = WIDTH[format] or 384
    start = 130 // width * width
    back, want = q.dequantize(), clean.dequantize()
    assert not back[1, start : start + width].isfinite().any()
    back[1, start : start + width] = want[1, start : start + width] = 0
    assert_same_bits(back, want)


@pytest.mark.parametrize("format", [*BLOCKED, *FP4])
def test_o30_small_scales_widen_exactly(device: str, format: str) -> None:
    """O-30: subnormal scales: dequantized in bf16 is fp32's, rounded once; FP4 has no new zeros,
    powers of two no rounding."""
    lowest = -5 if format in FP4 else -38
    x = torch.randn(40, 64, device=device) * torch.logspace(lowest, 0, 40, device=device)[:, None]
    q = nf.quantize(x, format)
    full, half = q.dequantize(F32), q.dequantize(BF16)
    assert torch.equal(half, full.bfloat16())
    if format in FP4:
        assert torch.equal(half == 0, full == 0)
    if format in ("mxfp8", "fp8_block_pow2"):
        assert torch.equal(half.float(), full)


def test_o31_edges(device: str) -> None:
    """O-25, O-31: nearest, ties to even, at most 448, with the scale 1."""
    given = torch.tensor([448, 447.9, 432.0, 4.25, 250, 2**-10, 1.01 * 2**-10, -0.0])
    want = [448, 448, 416, 4, 256, 0, 2**-9, 0]
    for format in BLOCKED:
        q = nf.quantize(given.to(device), format)
        assert q.scales.float().item() == 1
        got = q.dequantize().tolist()
        assert [got[0], got[1], *got[3:]] == [want[0], want[1], *want[3:]]
        assert got[2] in (416, 448)
    assert nf.quantize(torch.tensor([432.0, 448]), "mxfp8").data.float()[0] == 448  # 27 x 16: even


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


SCALES_OF_OPERANDS = [
    *(nf.block_recipe(f, f, f, f) for f in ("row", "mx", "block", "block_pow2")),
    *(nf.fp4_recipe(f, f, weights_2d=False) for f in FP4),
]


@pytest.mark.parametrize("recipe", SCALES_OF_OPERANDS, ids=str)
def test_o39_operands_keep_their_scales(device: str, recipe: nf.Recipe) -> None:
    """O-39: rows of x by 2^i, rows of w by 3^-j: y follows both, element by element, with either
    as x. (Blocks of w are 128 rows: of one size here.)"""
    skip_where_it_does_not_run(recipe, device)
    m, n = 12, 1 if recipe.fprop.b.square else 9
    x = torch.ones(m, 64, device=device) * 2.0 ** torch.arange(m, device=device)[:, None]
    w = torch.ones(n, 64, device=device) * 3.0 ** -torch.arange(n, device=device)[:, None]
    want = x.double() @ w.double().t()
    limit = 0.2 if recipe.kinds == ("fp4",) else 2**-4  # the most that one value is rounded by
    assert ((nf.linear(x, w, None, recipe).double() / want - 1).abs() < limit).all()
    if n > 1:
        assert ((nf.linear(w, x, None, recipe).double() / want.t() - 1).abs() < limit).all()


def test_values_error_is_that_of_fp8(device):
    """The tolerances of this kind can fail: the error is FP8's, not zero and not twice it."""
    x, w, _, g = operands(device, F32, 256, 512, 256)
    y, dx, dw = run(x, w, None, g)
    assert 0.03 < relative_error(y, x.double() @ w.double().t()) < 0.045
    assert 0.05 < relative_error(dx, g.double() @ w.double()) < 0.07
    assert 0.05 < relative_error(dw, g.double().t() @ x.double()) < 0.07
