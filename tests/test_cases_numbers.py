"""Faults of scales and roundings stay mended, R-25 to R-31; CASES.md tells of each. What kernels
do about them is in the files of their emulation."""

from __future__ import annotations

import copy
import io
import itertools
import math

import pytest
import torch
from conftest import assert_same_bits, skip_where_it_does_not_run
from torch import Tensor
from torch.utils import _pytree as pytree

import narrowfloat as nf
from narrowfloat import formats, ops, w4a16
from narrowfloat.cast import Cast
from narrowfloat.reference import block, fp4, fp4_numerics
from narrowfloat.reference.tensor import FLT_MAX, scale_from_amax
from narrowfloat.spec import Y_DTYPE, both

BLOCK_WAYS = [("fp8_row", {}), ("fp8_block", {}), ("fp8_block", {"two_d": True})]
BLOCK_WAYS += [("fp8_block_pow2", {}), ("fp8_block_pow2", {"two_d": True}), ("mxfp8", {})]
FP4_WAYS = [("nvfp4", {}), ("nvfp4", {"two_d": True}), ("nvfp4", {"four_over_six": True})]
FP4_WAYS += [("nvfp4", {"two_d": True, "four_over_six": True}), ("nvfp4", {"stochastic": True})]
FP4_WAYS += [("mxfp4", {}), ("mxfp4", {"stochastic": True})]
WAYS = [("e4m3", {}), ("e5m2", {}), *BLOCK_WAYS, *FP4_WAYS]
NAMES = [" ".join((name, *options)) for name, options in WAYS]
BF16_MAX = torch.finfo(torch.bfloat16).max

BYTES = torch.arange(256).to(torch.uint8)
E8M0 = torch.tensor([2.0 ** (b - 127) for b in range(255)] + [math.nan], dtype=torch.float64)


# ---- R-25 ----


def test_r25_every_e8m0_byte(device: str) -> None:
    """R-25: the byte b is 2^(b - 127), 0 among them, and 255 NaN, whatever reads it."""
    scales, want = BYTES.to(device)[:, None], E8M0.to(device)[:, None].expand(256, 32)
    one = torch.ones(256, 32, device=device)
    mx8 = nf.BlockTensor(one.to(torch.float8_e4m3fn), scales, "mxfp8", torch.float32)
    both_ones = torch.full((256, 16), 0x22, dtype=torch.uint8, device=device)
    mx4 = nf.FP4Tensor(both_ones, scales, one.new_ones(()), "mxfp4", torch.float32, 32)
    operand = block.Operand(mx8.data, scales)
    for found in (mx8.dequantize(), mx4.dequantize(), block.values(operand, formats.MX)):
        assert torch.equal(found.double().nan_to_num(7.0), want.nan_to_num(7.0))
    # from 2^-133 on, bf16's smallest, an operand of a bf16 GEMM has them too
    form = block.operand_form(operand, formats.MX)[:256, :32]
    assert torch.equal(form.double().nan_to_num(7.0), want.nan_to_num(7.0))


def test_r25_a_product_of_every_scale() -> None:
    """R-25: a GEMM of operands that come with OCP's smallest scales, in the reference. On a GPU its
    own units read them, or the kernel that test_block_kernels_emulated.py runs."""
    recipe = nf.RECIPES["mxfp8"]
    codes = torch.ones(256, 32).to(torch.float8_e4m3fn)
    scales = fp4.tile(BYTES[:, None], 256, 16)
    spec = recipe.forward_spec | Y_DTYPE[torch.float32]
    eye = torch.eye(32)
    y = ops.linear_forward(None, eye, None, spec, codes, scales, None, *[None] * 3, 256, 32, 32)[0]
    assert torch.equal(y[:255].double(), E8M0[:255, None].expand(255, 32))
    assert y[255].isnan().all()


# ---- R-26 ----


def by_hand(device: str) -> list[nf.QuantizedTensor | nf.FP4Tensor | nf.BlockTensor]:
    x = torch.randn(6, 200, 96, device=device)
    return [nf.quantize(x, name, **options) for name, options in WAYS]


def replaced(q, **fields):
    """Called anew, since _replace() is a way of its own."""
    return type(q)(**(q._asdict() | fields))


def longer(t: torch.Tensor) -> torch.Tensor:
    """By bytes, since cat does not know every type on a GPU."""
    as_bytes = t.view(torch.uint8) if t.element_size() == 1 else t
    return torch.cat([as_bytes, as_bytes[..., :1]], -1).view(t.dtype)


SCALES = {
    "flat": lambda t: t.flatten() if t.dim() > 1 else t[None],
    "transposed": lambda t: t.transpose(-1, -2) if t.dim() > 1 else t[None],
    "one too many": lambda t: longer(t) if t.dim() else t.expand(2),
    "one too few": lambda t: t[..., :-1] if t.dim() else t[None][:0],
    "of one row": lambda t: t[:1] if t.dim() else t[None],
    "a dimension more": lambda t: t[None],
    "fp64": lambda t: t.double(),
    "bf16": lambda t: t.bfloat16(),
    "int8": lambda t: t.to(torch.float32).to(torch.int8),
    "E5M2": lambda t: t.float().to(torch.float8_e5m2),
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("how", SCALES)
def test_r26_wrong_scales_are_refused(device: str, how: str) -> None:
    """R-26: dtype, shape and device, of every kind, made by a call, _replace() or _make()."""
    for q in by_hand(device):
        for name in {"scale", "scales"} & set(q._fields):
            t = getattr(q, name)
            wrong = SCALES[how](t)
            if wrong.shape == t.shape and wrong.dtype == t.dtype and how != "meta":
                continue  # of one row
            fields = q._asdict() | {name: wrong}
            text = f"^{type(q).__name__}: expected {name} (as|on) .*, got "
            for make in (
                lambda q=q, fields=fields: type(q)(**fields),
                lambda q=q, name=name, wrong=wrong: q._replace(**{name: wrong}),
                lambda q=q, fields=fields: type(q)._make(fields.values()),
            ):
                with pytest.raises(ValueError, match=text) as raised:
                    make()
                said = str(raised.value)
                if how == "meta":
                    assert "meta" in said and device in said
                else:  # both shapes and dtypes
                    assert str(t.dtype) in said and str(tuple(t.shape)) in said
                    assert str(wrong.dtype) in said and str(tuple(wrong.shape)) in said


def test_r26_fp32_scales_of_formats_with_8_bits(device: str) -> None:
    """R-26: the number a byte stands for is not the byte."""
    for q in by_hand(device):
        if "scales" in q._fields and q.scales.element_size() == 1:
            with pytest.raises(ValueError, match="expected scales as .*, got torch.float32"):
                replaced(q, scales=q.scales.float())


def test_r26_bytes_are_taken(device: str) -> None:
    """R-26: uint8 is seen as the type that has 8 bits, scales and codes, and torch's pairs of E2M1
    codes as bytes; fp32 scales have no bytes."""
    for q in by_hand(device):
        for name in {"data", "scales"} & set(q._fields):
            t = getattr(q, name)
            if t.element_size() == 4:
                with pytest.raises(ValueError, match="expected scales as torch.float32"):
                    replaced(q, **{name: t.to(torch.uint8)})
                continue
            if t.dtype == torch.float8_e5m2 and isinstance(q, nf.BlockTensor):
                continue
            made = replaced(q, **{name: t.view(torch.uint8)})
            assert getattr(made, name).dtype == t.dtype
            assert_same_bits(made.dequantize(), q.dequantize())
        if isinstance(q, nf.FP4Tensor):
            made = replaced(q, data=q.data.view(torch.float4_e2m1fn_x2))
            assert made.data.dtype == torch.uint8
            assert_same_bits(made.dequantize(), q.dequantize())


def test_r26_other_fields(device: str) -> None:
    """R-26: codes, format, dtype, width, two_d."""
    for q in by_hand(device):
        wrong = {
            "data": [q.data[..., :-1], q.data[0], q.data.float(), q.data.view(torch.int8)],
            "format": ["fp7", None, "e4m3" if "scales" in q._fields else "nvfp4"],
            "dtype": [torch.int32, "float32"],
        }
        if isinstance(q, nf.QuantizedTensor):
            wrong["data"] = wrong["data"][2:]
            wrong["scale"] = [1.0, None]
        if isinstance(q, nf.FP4Tensor):
            wrong["width"] = [q.width + 2, q.width - 2, 0]
            wrong["scales"] = [1.0, None]
        if isinstance(q, nf.BlockTensor):
            wrong["two_d"] = [not q.two_d]
            wrong["data"] = wrong["data"][1:]  # a narrower tensor with as many blocks may be
        for name, values in wrong.items():
            for value in values:
                with pytest.raises(ValueError, match=f"^{type(q).__name__}: expected "):
                    replaced(q, **{name: value})


def test_r26_what_is_right_passes(device: str) -> None:
    """R-26: copies, files, pytrees with other leaves, sizes of 0, scalars, E5M2 by row."""
    for q in by_hand(device):
        file = io.BytesIO()
        torch.save(q, file)
        file.seek(0)
        moved = pytree.tree_map_only(Tensor, lambda t: t.clone(), q)
        for made in (torch.load(file, weights_only=False), copy.deepcopy(q), moved, type(q)(*q)):
            assert type(made) is type(q) and made[2:] != () and made.dtype == q.dtype
            assert_same_bits(made.dequantize(), q.dequantize())
        shapes = pytree.tree_map_only(Tensor, lambda t: t.shape, q)
        assert type(shapes) is type(q) and shapes.data == q.data.shape
    for (name, options), shape in itertools.product(WAYS, [(0, 32), (4, 0), (1,), (2, 0, 3)]):
        q = nf.quantize(torch.zeros(shape, device=device), name, **options)
        assert type(q)(*q).dequantize().shape == shape
    assert nf.QuantizedTensor(
        torch.ones((), device=device).to(torch.float8_e4m3fn),
        torch.full((), 3.0, device=device), "e4m3", torch.float32,
    ).dequantize() == 3  # fmt: skip
    e5m2 = torch.full((3, 8), 2.0, device=device).to(torch.float8_e5m2)
    rows = torch.arange(3.0, device=device)[:, None]
    assert nf.BlockTensor(e5m2, rows, "fp8_row", torch.float32).dequantize()[2, 0] == 4


def test_r26_made_in_compiled_code() -> None:
    """R-26: Dynamo does not run the constructor on every torch; dequantize() looks again."""
    q = nf.quantize(torch.randn(4, 64), "nvfp4")

    def made(scales: Tensor) -> Tensor:
        return nf.FP4Tensor(q.data, scales, q.scale, "nvfp4", torch.float32, 64).dequantize()

    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(q.scales.view(torch.uint8)), q.dequantize())
    with pytest.raises(Exception, match="expected scales as"):
        compiled(q.scales.float())


def test_r26_pack(device: str) -> None:
    """R-26: packed weights are made of tiled scales of the right size and type."""
    w = torch.randn(48, 80, device=device)
    codes, tiled, *_ = ops.quantize_op(w, both(Cast("e2m1", "nvfp4"), None).pack())
    want = w4a16.pack(codes, tiled, 48, 80)
    assert_same_bits(w4a16.pack(codes, tiled.view(torch.float8_e4m3fn), 48, 80), want)
    for wrong in (tiled[:-1], tiled.view(2, -1), tiled.repeat(2), tiled.float()):
        with pytest.raises(ValueError, match="^pack: expected tiled scales in uint8"):
            w4a16.pack(codes, wrong, 48, 80)
    with pytest.raises(ValueError, match="^pack: expected tiled scales on"):
        w4a16.pack(codes, tiled.to("meta"), 48, 80)


def test_r26_fp4_dequantize_function(device: str) -> None:
    """R-26: scales beside grid values are fp32, not the bytes of a block's scale."""
    values, scales = nf.FP4QuantizeFunction.apply(torch.randn(4, 32, device=device))
    for wrong in (torch.uint8, torch.int32, torch.float64):
        with pytest.raises(ValueError, match="expected scales in torch.float32, got"):
            nf.FP4DequantizeFunction.apply(values, scales.to(wrong))


def test_r26_scales_of_scaled_mm(device: str) -> None:
    """R-26: the operators too, called past the functions that check: a vector of row scales is no
    tensor's scale. One element, and what quantize returns, are."""
    a = torch.randn(32, 48, device=device)
    codes, *_, scale = ops.quantize_op(a, both(Cast("e4m3"), None).pack())
    out = torch.zeros(32, 32, device=device)
    for right in (scale, scale[:4], scale[:1], scale[0]):
        ops.scaled_mm_op(codes, codes, right, scale, None, torch.bfloat16, False)
    for wrong in (scale[:0], scale[:3], scale.repeat(4), scale.double(), scale.to(torch.uint8)):
        for pair in ((wrong, scale), (scale, wrong)):
            with pytest.raises(ValueError, match="^scaled_mm: expected [ab]_scale .*float32"):
                ops.scaled_mm_op(codes, codes, *pair, None, torch.bfloat16, False)
            with pytest.raises(ValueError, match="^scaled_mm_accumulate_: expected [ab]_scale "):
                ops.scaled_mm_accumulate_op(out, codes, codes, *pair, False)


@pytest.mark.parametrize("recipe", [r for r in nf.RECIPES.values() if r.cached_spec], ids=str)
def test_r26_operands_that_come_quantized(device: str, recipe: nf.Recipe) -> None:
    """R-26: w's codes with scales of as many bytes in another shape or type, or of too many. See
    test_operators.py for those of other sizes."""
    skip_where_it_does_not_run(recipe, device)
    x, w = torch.randn(40, 256, device=device), torch.randn(144, 256, device=device)
    cast = recipe.fprop.casts[1]
    codes, scales, *_, tensor_scales = ops.quantize_op(w, both(cast, None).pack())
    block_scales = None if cast.of.name == "tensor" else scales
    scale = tensor_scales[:4] if cast.of.tensor_scale else None
    call = lambda *given: ops.linear_forward(x, w, None, recipe.forward_spec, *[None] * 3, *given)  # noqa: E731
    call(codes, block_scales, scale)
    wrong: list[tuple[Tensor | None, Tensor | None]] = []
    if block_scales is not None:
        s = block_scales
        others = [s.reshape(2, -1), s[None], torch.cat([s, s]), s.view(torch.int8), s.double()]
        if s.dim() == 2:
            others += [s.flatten(), s.t().contiguous(), s.t()]
        wrong += [(t, scale) for t in others if t.shape != s.shape or t.dtype != s.dtype]
    if scale is not None:
        wrong += [(block_scales, t) for t in (scale.repeat(3), scale[:3], scale.double())]
    for pair in wrong:
        with pytest.raises(ValueError, match="^linear: expected w_scales? as .*, got "):
            call(codes, *pair)


# ---- R-27 ----


def test_r27_scale_and_multiplier_fit() -> None:
    """R-27: of every amax that is a positive bf16, and both neighbours of where max / amax
    overflows: their product is one."""
    all_bf16 = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for fmt in (formats.E4M3, formats.E5M2):
        edge = torch.tensor([fmt.max / FLT_MAX])
        near = torch.cat([edge.view(torch.int32) + i for i in range(-4, 5)]).view(torch.float32)
        amax = torch.cat([all_bf16.float(), near])
        scale, multiplier = scale_from_amax(amax, fmt)
        assert multiplier.isfinite().all() and (scale > 0).all()
        assert (scale.double() * multiplier.double() - 1).abs().max() < 1e-6
        # as ever, where nothing overflows
        usual = fmt.max / amax.double() < FLT_MAX
        assert_same_bits(scale[usual], torch.div(amax, torch.full_like(amax, fmt.max))[usual])
        assert (scale[~usual] == 2.0**-128).all() and (multiplier[~usual] == FLT_MAX).all()


@pytest.mark.parametrize("name, options", WAYS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r27_small_values_come_back(device: str, name: str, options: dict, dtype) -> None:
    """R-27: with the format's error, down to the smallest normal number: tensors of one value, and
    of values that differ from block to block."""
    limit = {"e4m3": 1 / 16, "e5m2": 1 / 8, "nvfp4": 0.26, "mxfp4": 0.26}.get(name, 1 / 16)
    if options.get("stochastic"):
        limit = 0.6  # a gap of the grid
    values = [1e-37, 1e-35, *(m * 2.0**e for e in range(-126, -100) for m in (1, 1.23, 1.55, 1.9))]
    for value in values:
        x = torch.full((1, 256), value, device=device).to(dtype)
        back = nf.quantize(x, name, **options).dequantize(torch.float32)
        assert ((back.double() / x.double() - 1).abs() < limit).all(), value
    if name in ("e4m3", "e5m2", "fp8_row"):
        return
    exponents = torch.arange(-126, -110, device=device)
    x = 1.37 * torch.ldexp(torch.ones(16, device=device), exponents)
    x = x[:, None].expand(16, 128).reshape(1, -1).expand(128 * 16, -1).to(dtype)
    if options.get("two_d"):
        x = x[:256]
    back = nf.quantize(x, name, **options).dequantize(torch.float32)
    assert ((back.double() / x.double() - 1).abs() < limit).all()


@pytest.mark.parametrize("recipe", ["fp8", "fp8_row", "fp8_block", "nvfp4", "mxfp8", "mxfp4"])
def test_r27_products_of_small_values(recipe: str) -> None:
    """R-27: y of an x that small is that of a larger one, scaled, up to the format's error. In the
    reference: a GPU's GEMM may flush scales that are subnormal."""
    x, w = torch.randn(64, 128).clamp(-3, 3), torch.randn(48, 128)
    small = nf.linear(x * 2.0**-122, w, None, recipe).double() * 2.0**122
    exact = x.double() @ w.double().t()
    assert (small - exact).norm() / exact.norm() < (0.25 if recipe.endswith("fp4") else 0.08)


def test_r27_a_delayed_scale() -> None:
    """R-27: of an amax that a history covers, the same pair."""
    layer = nf.Linear(32, 16, bias=False, recipe="fp8_delayed")
    x = torch.full((8, 32), 1e-37)
    for _ in range(2):  # measured, then by history
        layer(x.requires_grad_()).sum().backward()
        nf.step(layer)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.start_history()
        for _ in range(2):
            y = layer(x)
    assert ((y.double() / 32e-37 - 1).abs() < 1 / 16).all()


# ---- R-28 ----


@pytest.mark.parametrize("name, options", WAYS, ids=NAMES)
def test_r28_finite_values_stay_finite(device: str, name: str, options: dict) -> None:
    """R-28: the largest fp32 values saturate, where bf16 has none or a code x scale would be 2^128;
    a NaN or an Inf still shows."""
    x = torch.full((32, 256), 3e38, device=device)
    x[0, :5] = torch.tensor([FLT_MAX, -FLT_MAX, 3.4e38, BF16_MAX, -1e38], device=device)
    for t in (x, x.t().contiguous(), x.bfloat16().clamp(-BF16_MAX, BF16_MAX)):
        q = nf.quantize(t, name, **options)
        if "scales" in q._fields:
            assert q.scales.float().isfinite().all()
        back = q.dequantize(torch.float32)
        assert back.isfinite().all()
        limit = 0.5 if options.get("stochastic") else 0.35 if "fp4" in name else 0.13
        assert ((back.double() / t.double() - 1).abs() < limit).all()
        assert q.dequantize(torch.bfloat16).isfinite().all()
        assert q.dequantize(torch.float16).isfinite().all()
        assert q.dequantize(torch.float64).isfinite().all()
    x[0, 0] = math.inf
    assert not nf.quantize(x, name, **options).dequantize()[0, 0].isfinite()
    x[0, 0] = math.nan
    assert not nf.quantize(x, name, **options).dequantize()[0, 0].isfinite()


@pytest.mark.parametrize("name, options", WAYS, ids=NAMES)
def test_r28_the_largest_fp16(device: str, name: str, options: dict) -> None:
    """R-28: what is rounded up beyond fp16's largest value saturates there."""
    x = torch.full((16, 128), 65504.0, device=device, dtype=torch.float16)
    back = nf.quantize(x, name, **options).dequantize()
    assert back.dtype == torch.float16 and back.isfinite().all()


# by row a sum is multiplied by one scale and then by the other, and overflows in between
LARGE = [r for r in nf.RECIPES.values() if r.fprop.kind not in ("bf16", "row")]


@pytest.mark.parametrize("recipe", LARGE, ids=str)
def test_r28_products_of_large_values(device: str, recipe: nf.Recipe) -> None:
    """R-28: y is finite where its exact value is."""
    skip_where_it_does_not_run(recipe, device)
    x = torch.full((32, 64), 1e37, device=device)
    x[0], x[1, ::2] = FLT_MAX, -FLT_MAX
    w = torch.full((16, 64), 2.0**-20, device=device)
    y = nf.linear(x, w, None, recipe)
    exact = x.double() @ w.double().t()
    assert ((y.double() / exact - 1).abs() < 0.3)[0].all() and y.isfinite().all()


# ---- R-29 ----


def test_r29_the_smallest_powers_of_two(device: str) -> None:
    """R-29: 2^-124 in mxfp8 and fp8_block_pow2, of zeros too, and smaller ones are read; in mxfp4
    2^-126, and of zeros 2^-127. A tensor of zeros has the scale 1 otherwise."""
    for value in (0.0, 2.0**-126):
        x = torch.full((32, 128), value, device=device)
        for name, smallest in (("mxfp8", -124), ("fp8_block_pow2", -124), ("mxfp4", -126)):
            q = nf.quantize(x, name)
            want = 2.0 ** (smallest - (name == "mxfp4" and value == 0))
            assert (q.scales.float() == want).all()
            assert torch.equal(q.dequantize(), x)
    zeros = torch.zeros(32, 128, device=device)
    for name in ("e4m3", "nvfp4"):
        assert nf.quantize(zeros, name).scale == 1
    for name in ("fp8_row", "fp8_block"):
        assert (nf.quantize(zeros, name).scales == 1).all()


# ---- R-30 ----


def test_r30_a_tie_is_six(device: str) -> None:
    """R-30: [10, 9, 0, ...], which 6 and 4 both make [10, 10, 0, ...]."""
    x = torch.zeros(16, 16, device=device)
    x[:, :2] = torch.tensor([10.0, 9.0])
    for two_d in (False, True):
        q = nf.quantize(x, "nvfp4", four_over_six=True, two_d=two_d)
        assert (q.scales.float() == 256).all()  # 384 is that of 4
        assert torch.equal(q.dequantize()[0, :2].cpu(), torch.tensor([10.0, 10.0]))


@pytest.mark.parametrize("two_d", [False, True])
def test_r30_blocks_that_both_make_the_same(device: str, two_d: bool) -> None:
    """R-30: each largest value, and values that 6 and 4 both round to it, its half, its quarter or
    0: always 6, for the errors are one number. In both orientations."""
    generator = torch.Generator().manual_seed(5)
    # of a block's largest: where both grids round to 1, 1/2, 1/4 and 0 of it
    spans = torch.tensor([[0.89, 1.0], [0.45, 0.62], [0.225, 0.28], [0.0, 0.08]])
    how = Cast("e2m1", "nvfp4", square=two_d, four_over_six=True)
    for _ in range(200):
        largest = (torch.rand((), generator=generator) * 7 + 1).bfloat16()
        which = torch.randint(4, (16, 16), generator=generator)
        low, high = spans[which].unbind(-1)
        x = (low + (high - low) * torch.rand(16, 16, generator=generator)) * largest.float()
        x[slice(0, 1) if two_d else slice(None), 0] = largest.float()
        x = x.bfloat16().minimum(largest).to(device)
        rows = ops.quantize_op(x, both(how, None).pack())[1]
        columns = ops.quantize_op(x.t(), both(None, how).pack())[3]
        for scales in (rows, columns):
            assert (fp4.untile(scales, 16, 16) == 0x78).all(), largest  # 256; 384 is that of 4


@pytest.mark.parametrize("two_d", [False, True])
def test_r30_the_rule_is_the_squared_error(two_d: bool) -> None:
    """R-30: of the two the one with the smaller squared error, up to what fp32 sums lose."""
    low = torch.linspace(0, 0.95, 32).repeat_interleave(16)[:, None]
    x = (low + (1 - low) * torch.rand(512, 64)) * torch.randn(512, 64).sign()
    x = (x * torch.logspace(-2, 2, 32).repeat_interleave(16)[:, None]).bfloat16()
    errors = {}
    how = Cast("e2m1", "nvfp4", square=two_d, four_over_six=True)
    chosen = fp4_numerics.quantize_operand(x, how)
    up = 1 / chosen.scale.double()
    real = x.double().unflatten(1, (-1, 16))
    amax = real.abs().amax(2)
    if two_d:
        amax = amax.view(-1, 16, amax.shape[1]).amax(1).repeat_interleave(16, 0)
    for to in (6, 4):
        scales = (amax * up / to).clamp(max=448).float().to(torch.float8_e4m3fn).double()
        codes = fp4_numerics.grid(
            fp4_numerics.round_nearest((real.abs() * up / scales[..., None]).float())
        )
        squared = (codes.double() * scales[..., None] - real.abs() * up).square().sum(2)
        if two_d:
            squared = squared.view(-1, 16, squared.shape[1]).sum(1).repeat_interleave(16, 0)
        errors[to] = squared, scales
    is_six = chosen.scales.view(torch.float8_e4m3fn).double() == errors[6][1]
    is_four = chosen.scales.view(torch.float8_e4m3fn).double() == errors[4][1]
    assert (is_six | is_four).double().mean() > 0.999  # else a scale's own tie
    six, four = errors[6][0], errors[4][0]
    assert (four <= six * (1 + 1e-5))[is_four & ~is_six].all()
    assert (six <= four * (1 + 1e-5))[is_six & ~is_four].all()
    assert 0.05 < is_four.double().mean() < 0.95


# ---- R-31 ----


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_r31_the_mean_is_that_of_bf16(device: str, format: str) -> None:
    """R-31: stochastic rounding keeps the mean of what bf16 has of an fp32, as quantize() says."""
    x = torch.full((1 << 15, 32), -0.6, device=device)
    x[:, ::16] = 6.0
    x[0, 0] = 448 * 6 if format == "nvfp4" else 6.0
    back = nf.quantize(x, format, stochastic=True).dequantize()[1:, 1:16].double()
    assert set(back.unique().tolist()) == {-0.5, -1.0}
    mean, rounded = back.mean().item(), torch.tensor(-0.6).bfloat16().item()
    assert rounded == -0.6015625 and abs(mean - rounded) < 1e-3 < abs(mean + 0.6)
    assert "-0.6015625" in (nf.quantize.__doc__ or "")
