"""Tests that packed FP4 weights keep every number, and that GEMMs with them are right."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import assert_same_bits, relative_error
from torch import Tensor, nn

from narrowfloat import w4a16
from narrowfloat.formats import GROUP, padded, padded32, scale_groups
from narrowfloat.reference import fp4
from narrowfloat.w4a16 import PackedFP4Linear, fp4_weight_matmul_op, packed_shape

BF16 = torch.bfloat16
SHAPES = [(1, 1), (16, 32), (33, 100), (32, 128), (200, 1000), (130, 2064)]  # N, K
# each wraps the rings and splits of csrc/w4a16 in another way
WRAPPING = [
    (32, 128), (33, 256), (200, 1024), (4096, 128), (4096, 1024), (4096, 4096), (200, 14336),
    (33, 4096), (4096, 14336), (28672, 256),
]  # fmt: skip


def weights(n: int, k: int, device: str, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Random codes and tiled scales [n, k] as the quantize operator returns them: codes of a scale
    that is 0, and all beyond n and k, are 0."""
    codes = torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8)
    codes = nn.functional.pad(codes, (0, padded32(k) - k))
    groups = padded32(k) // GROUP
    if scales is None:
        scales = torch.randint(40, 72, (n, groups), device=device, dtype=torch.uint8)
    codes = codes * (scales != 0).repeat_interleave(GROUP, 1)
    codes = nn.functional.pad(codes, (0, 0, 0, padded(n) - n))
    return fp4.pack(codes), fp4.tile(scales, n, k)


@pytest.mark.parametrize("n, k", SHAPES)
def test_packing_is_reversible(device: str, n: int, k: int) -> None:
    """Over all scale bytes, NaN included, zeros included."""
    groups = padded32(k) // GROUP
    every = torch.arange(n * groups, device=device).view(n, groups) * 37 % 128
    codes, scales = weights(n, k, device, every.to(torch.uint8))
    packed = w4a16.pack(codes, scales, n, k)
    assert packed.shape == packed_shape(n, k) and packed.dtype == torch.uint8
    back = w4a16.unpack(packed, n, k)
    assert_same_bits(back[0], codes, "codes")
    assert_same_bits(back[1], scales, "scales")
    assert scales.numel() == -(-n // 128) * 128 * scale_groups(k)


def test_every_code_with_every_scale(device: str) -> None:
    """Each pair of a code and a scale byte, at each place of a unit."""
    n, k = 128 * 32, 128
    scales = torch.arange(128, device=device, dtype=torch.uint8).repeat_interleave(32)
    scales = scales[:, None].expand(n, k // GROUP)
    rows, columns = torch.arange(n, device=device)[:, None], torch.arange(k, device=device)
    for turn in range(0, 16, 5):
        codes = ((rows + columns + columns // 16 + turn) % 16).to(torch.uint8)
        codes = codes * (scales != 0).repeat_interleave(GROUP, 1)
        c, s = fp4.pack(codes), fp4.tile(scales, n, k)
        packed = w4a16.pack(c, s, n, k)
        back = w4a16.unpack(packed, n, k)
        assert_same_bits(back[0], c, "codes")
        assert_same_bits(back[1], s, "scales")
        one = torch.ones(1, device=device)
        assert_same_bits(w4a16.dequantize(packed, one, n, k), fp4.values(codes, scales))


def test_zero_scale_makes_zero_codes() -> None:
    codes, scales = weights(32, 128, "cpu")
    packed = w4a16.pack(codes, torch.zeros_like(scales), 32, 128)
    assert not packed.any()


def test_words_as_the_kernel_reads_them() -> None:
    """csrc/w4a16/packed.cuh in integers: shifts and masks bring a pair's codes to where bf16 has
    its sign, its exponent's low bits and its mantissa's first; a stored scale is one addition
    away."""
    n, k = 64, 256
    byte = torch.arange(n * k // GROUP).view(n, k // GROUP) % 128
    codes, scales = weights(n, k, "cpu", byte.to(torch.uint8))
    packed = w4a16.pack(codes, scales, n, k)
    want = fp4.unpacked(codes, scales, n, k)
    got = torch.full((n, k), -1.0)
    mask = 0x81C081C0
    for tile in range(n // 32):
        for unit in range(k // 128):
            block = packed[tile, unit]
            words = block[:2048].contiguous().view(torch.int32).long() & 0xFFFFFFFF
            stored = block[2048:].view(32, 2, 4).long()
            w = words.view(2, 2, 8, 4, 4)  # half of K, half of rows, g, t, j
            pairs = torch.stack(
                [
                    w & mask,
                    (w << 4) & mask,
                    ((w << 10) | (w >> 22)) & mask,
                    ((w << 6) & 0x80C080C0) | ((w >> 2) & 0x01000100),
                ],
                -1,
            )
            halves = torch.stack([pairs & 0xFFFF, pairs >> 16], -1)  # [..., j, pair, first/second]
            values = (halves << 16).to(torch.int32).view(torch.float32).double() * 2.0**126
            s = (
                stored.view(8, 4, 2, 2, 2) * 16 + 0x7500
            ) << 16  # g, t, half of K, half of rows, +8
            s = s.to(torch.int32).view(torch.float32).double() * 2.0**-119
            for half in range(2):
                for rows in range(2):
                    for pair in range(4):
                        v = (
                            values[half, rows, :, :, :, pair]
                            * s[:, :, half, rows, pair % 2, None, None]
                        )
                        at = tile * 32 + rows * 16 + pair % 2 * 8
                        to = got[at : at + 8, unit * 128 + half * 64 :][:, :64].view(8, 4, 4, 2, 2)
                        to[:, :, :, pair // 2] = v.float()
    assert torch.equal(got.nan_to_num(-7.0), want.nan_to_num(-7.0))


def exact(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ w.double().t() * scale.double()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("n, k", [*SHAPES, *WRAPPING])
def test_gemm(device: str, n: int, k: int) -> None:
    """Error against fp64 at most twice that of a bf16 GEMM of the same operands."""
    if device == "cpu" and n * k > 1 << 20:
        pytest.skip("too slow for the reference")
    codes, scales = weights(n, k, device)
    w = fp4.unpacked(codes, scales, n, k)
    packed = w4a16.pack(codes, scales, n, k)
    scale = torch.full((1,), 0.0123, device=device)
    all_x = torch.randn(70, k, device=device).to(BF16)
    for m in range(1, 71) if device == "cuda" else (1, 3, 8, 17, 64, 70):
        x, bias = all_x[:m], None
        if m % 2:
            bias = torch.randn(n, device=device).to([torch.float32, BF16, torch.float16][m % 3])
        y = fp4_weight_matmul_op(x, packed, scale, bias, n, torch.float32, m % 4 < 2)
        assert y.shape == (m, n) and y.dtype == torch.float32
        assert relative_error(y, exact(x, w, scale, bias)) < 5e-5, m
        y = fp4_weight_matmul_op(x, packed, scale, None, n, BF16, False)
        bf16 = torch.matmul(x, w.to(BF16).t())
        allowed = 2 * relative_error(bf16, exact(x, w, torch.ones_like(scale), None))
        # 2^-9: one rounding, where the bf16 GEMM has none by chance
        assert relative_error(y, exact(x, w, scale, None)) <= max(allowed, 2.0**-9 + 1e-5), m


@pytest.mark.gpu
@pytest.mark.parametrize("m", [17, 32, 64, 100, 130, 257, 520])
@pytest.mark.parametrize("n, k", [(32, 128), (33, 100), (515, 2056), (4096, 4096), (28672, 384)])
def test_tiles(cuda: str, n: int, k: int, m: int) -> None:
    """csrc/w4a16/tiles.cu where there is such a kernel: ragged sizes, tiles of one block and
    of several, each type, the same bits each time, in a graph too."""
    codes, scales = weights(n, k, cuda)
    w = fp4.unpacked(codes, scales, n, k)
    packed = w4a16.pack(codes, scales, n, k)
    scale = torch.full((1,), 0.0123, device=cuda)
    wide = torch.full((m, k + 3), float("nan"), device=cuda, dtype=BF16)
    x = torch.randn(m, k, device=cuda).to(BF16)
    want = exact(x, w, scale, None)
    bf16 = torch.matmul(x, w.to(BF16).t())
    allowed = 2 * relative_error(bf16, exact(x, w, torch.ones_like(scale), None))
    first = fp4_weight_matmul_op(x, packed, scale, None, n, BF16, False)
    assert relative_error(first, want) <= max(allowed, 2.0**-9 + 1e-5)
    torch.cuda.synchronize()
    for _ in range(5):
        assert_same_bits(fp4_weight_matmul_op(x, packed, scale, None, n, BF16, True), first)
    wide[:, 1 : k + 1] = x
    bias_types = (torch.float32, BF16, torch.float16)
    for out_dtype, bias_dtype in zip(bias_types, bias_types, strict=True):
        bias = torch.randn(n, device=cuda).to(bias_dtype)
        rounding = {torch.float32: 5e-5, BF16: 2.0**-8, torch.float16: 2.0**-10}[out_dtype]
        y = fp4_weight_matmul_op(wide[:, 1 : k + 1], packed, scale, bias, n, out_dtype, True)
        assert relative_error(y, exact(x, w, scale, bias)) < rounding
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [fp4_weight_matmul_op(x, packed, scale, None, n, BF16, True) for _ in range(3)]
    for _ in range(3):
        for y in made:
            y.zero_()
        graph.replay()
        for y in made:
            assert_same_bits(y, first)


@pytest.mark.parametrize("m", [1, 8, 9, 17, 33, 64])
@pytest.mark.parametrize("n, k", [(32, 128), (200, 1000), (1056, 4096)])
def test_few_tokens(device: str, m: int, n: int, k: int) -> None:
    """The kernel alone, without cuBLASLt: what racecheck runs (tools/gpu_tests.py)."""
    codes, scales = weights(n, k, device)
    w = fp4.unpacked(codes, scales, n, k)
    packed = w4a16.pack(codes, scales, n, k)
    scale = torch.full((1,), 0.0123, device=device)
    x = torch.randn(m, k, device=device).to(BF16)
    for constant in (False, True):
        y = fp4_weight_matmul_op(x, packed, scale, None, n, torch.float32, constant)
        assert relative_error(y.cpu(), exact(x.cpu(), w.cpu(), scale.cpu(), None)) < 5e-5


@pytest.mark.parametrize("out_dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("m", [1, 9, 30, 64, 65, 200])
def test_layouts_of_x(device: str, m: int, out_dtype: torch.dtype) -> None:
    """Rows apart, rows off 16 bytes, columns first, one row for all, more dimensions, no rows."""
    n, k = 100, 344
    codes, scales = weights(n, k, device)
    packed = w4a16.pack(codes, scales, n, k)
    w = fp4.unpacked(codes, scales, n, k)
    scale = torch.full((1,), 1e-3, device=device)
    wide = torch.full((m, k + 24), float("nan"), device=device, dtype=BF16)
    x = torch.randn(m, k, device=device).to(BF16)
    rounding = {torch.float32: 5e-5, BF16: 2.0**-8, torch.float16: 2.0**-10}[out_dtype]
    for first in (0, 8, 3):
        view = wide[:, first : first + k]
        view.copy_(x)
        y = fp4_weight_matmul_op(view, packed, scale, None, n, out_dtype, False)
        assert relative_error(y, exact(x, w, scale, None)) < rounding
        wide.fill_(float("nan"))
    across = x.t().contiguous().t()
    y = fp4_weight_matmul_op(across, packed, scale, None, n, out_dtype, False)
    assert relative_error(y, exact(x, w, scale, None)) < rounding
    one = x[:1].expand(m, k)
    y = fp4_weight_matmul_op(one, packed, scale, None, n, out_dtype, False)
    assert relative_error(y, exact(one, w, scale, None)) < rounding
    y = fp4_weight_matmul_op(x.view(m, 1, k), packed, scale, None, n, out_dtype, False)
    assert y.shape == (m, 1, n) and relative_error(y[:, 0], exact(x, w, scale, None)) < rounding
    assert fp4_weight_matmul_op(x[:0], packed, scale, None, n, out_dtype, False).shape == (0, n)


def test_sizes_zero(device: str) -> None:
    scale = torch.ones(1, device=device)
    for m, n, k in ((0, 4, 8), (3, 0, 8), (3, 4, 0), (70, 4, 0), (70, 0, 8)):
        packed = torch.zeros(packed_shape(n, k), dtype=torch.uint8, device=device)
        x = torch.ones(m, k, device=device, dtype=BF16)
        bias = torch.arange(n, device=device, dtype=torch.float32)
        y = fp4_weight_matmul_op(x, packed, scale, bias, n, BF16, False)
        assert torch.equal(y, bias.to(BF16).expand(m, n))


@pytest.mark.parametrize("m", [1, 20, 80])
def test_non_finite(device: str, m: int) -> None:
    """A NaN scale reaches its row, a NaN or Inf in x its token, and nothing else."""
    n, k = 100, 300
    bytes_ = torch.full((n, padded32(k) // GROUP), 56, dtype=torch.uint8, device=device)
    bytes_[5, 3] = 0x7F
    codes, scales = weights(n, k, device, bytes_)
    packed = w4a16.pack(codes, scales, n, k)
    x = torch.randn(m, k, device=device).to(BF16)
    scale = torch.ones(1, device=device)
    y = fp4_weight_matmul_op(x, packed, scale, None, n, BF16, False)
    assert y[:, 5].isnan().all() and y.isnan().sum() == m
    x[m // 2, 7] = float("inf")
    y = fp4_weight_matmul_op(x, packed, scale, None, n, BF16, False)
    assert (~y[m // 2].isfinite()).all()
    y[m // 2] = 0
    assert y.isnan().sum() == m - 1 and not y.isinf().any()


@pytest.mark.gpu
def test_deterministic_and_graph(cuda: str) -> None:
    """The same bits each time, with the weights fetched early or not, and in a captured graph."""
    for n, k, m in ((4096, 4096, 1), (4096, 4096, 16), (1000, 2000, 40), (4096, 14336, 8)):
        codes, scales = weights(n, k, cuda)
        packed = w4a16.pack(codes, scales, n, k)
        scale = torch.full((1,), 0.5, device=cuda)
        x = torch.randn(m, k, device=cuda).to(BF16)
        first = fp4_weight_matmul_op(x, packed, scale, None, n, BF16, False)
        torch.cuda.synchronize()
        for _ in range(20):
            again = fp4_weight_matmul_op(x, packed, scale, None, n, BF16, True)
            assert_same_bits(again, first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = [fp4_weight_matmul_op(x, packed, scale, None, n, BF16, True) for _ in range(3)]
        for _ in range(3):
            for y in made:
                y.zero_()
            graph.replay()
            for y in made:
                assert_same_bits(y, first)


@pytest.mark.parametrize("m", [4, 100])
def test_operator(device: str, m: int) -> None:
    n, k = 40, 96
    packed = w4a16.pack(*weights(n, k, device), n, k)
    x, scale = torch.randn(m, k, device=device).to(BF16), torch.ones(1, device=device)
    bias = torch.randn(n, device=device)
    for out_dtype in (BF16, torch.float32):
        torch.library.opcheck(
            fp4_weight_matmul_op.overload, (x, packed, scale, bias, n, out_dtype, False)
        )


def test_wrong_arguments(device: str) -> None:
    n, k = 40, 96
    packed = w4a16.pack(*weights(n, k, device), n, k)
    x, scale = torch.randn(4, k, device=device).to(BF16), torch.ones(1, device=device)
    call = fp4_weight_matmul_op
    with pytest.raises(TypeError, match="expected x in"):
        call(x.float(), packed, scale, None, n, BF16, False)
    with pytest.raises(ValueError, match="expected packed weights"):
        call(x, packed, scale, None, n + 32, BF16, False)
    with pytest.raises(ValueError, match="expected packed weights"):
        call(torch.ones(4, 200, dtype=BF16, device=device), packed, scale, None, n, BF16, False)
    with pytest.raises(ValueError, match="expected the scale"):
        call(x, packed, scale.double(), None, n, BF16, False)
    with pytest.raises(ValueError, match="expected bias"):
        call(x, packed, scale, torch.ones(n + 1, device=device), n, BF16, False)
    with pytest.raises(ValueError, match="expected codes"):
        w4a16.pack(torch.zeros(3, 3, dtype=torch.uint8), scale, 40, 96)


# ---- the layer ----


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "nvfp4_four_over_six"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16])
@pytest.mark.parametrize("n, k, bias", [(48, 64, True), (33, 100, False), (200, 272, True)])
def test_layer(device: str, recipe: str, dtype: torch.dtype, n: int, k: int, bias: bool) -> None:
    """Close to the layer it came from, as close as FP4 weights can be, and exactly its own
    dequantized weights."""
    linear = nn.Linear(k, n, bias, device=device, dtype=dtype)
    layer = PackedFP4Linear.from_linear(linear, recipe)
    assert (layer.in_features, layer.out_features) == (k, n) and not list(layer.parameters())
    with torch.no_grad():
        for shape in ((k,), (1, k), (5, 7, k), (130, k)):
            x = torch.randn(shape, device=device, dtype=dtype)
            y = layer(x)
            assert y.shape == (*shape[:-1], n) and y.dtype == dtype
            rounding = {torch.float32: 5e-5, BF16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
            want = x.to(BF16).double() @ layer.dequantize().double().t()
            want = want if linear.bias is None else want + linear.bias.double()
            assert relative_error(y, want) < rounding
            assert relative_error(y, linear(x)) < 0.25
    assert str(recipe) in repr(layer)


def test_layer_state(device: str, tmp_path) -> None:
    linear = nn.Linear(100, 70, device=device, dtype=BF16)
    layer = PackedFP4Linear.from_linear(linear, "nvfp4")
    x = torch.randn(3, 100, device=device, dtype=BF16)
    y = layer(x)
    state = layer.state_dict()
    assert set(state) == {"packed", "scale", "bias"}
    fresh = PackedFP4Linear(100, 70, device=device, dtype=BF16)
    fresh.load_state_dict(state)
    assert_same_bits(fresh(x), y)
    assert_same_bits(copy.deepcopy(layer)(x), y)
    torch.save(layer, tmp_path / "layer.pt")
    assert_same_bits(torch.load(tmp_path / "layer.pt", weights_only=False)(x), y)
    meta = PackedFP4Linear(100, 70, device="meta", dtype=BF16)
    meta.load_state_dict(state, assign=True)
    assert_same_bits(meta(x), y)
    empty = PackedFP4Linear(100, 70, device="meta").to_empty(device=device)
    assert empty.packed.device.type == device
    with pytest.raises(RuntimeError, match="size mismatch"):
        PackedFP4Linear(101 * 2, 70).load_state_dict(state)


def test_layer_through_safetensors(device: str, tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Linear(64, 70), nn.ReLU(), nn.Linear(70, 33, bias=False)).to(device)
    packed = copy.deepcopy(model)
    for i in (0, 2):
        packed[i] = PackedFP4Linear.from_linear(model[i], "mxfp4")
    x = torch.randn(4, 64, device=device)
    y = packed(x)
    safetensors.save_file(packed.state_dict(), tmp_path / "model.safetensors")
    fresh = nn.Sequential(
        PackedFP4Linear(64, 70, recipe="mxfp4"),
        nn.ReLU(),
        PackedFP4Linear(70, 33, bias=False, recipe="mxfp4"),
    ).to(device)
    fresh.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors", device=device))
    assert_same_bits(fresh(x), y)
    in_memory = safetensors.load(safetensors.save(packed.state_dict()))
    for name, value in packed.state_dict().items():
        assert_same_bits(in_memory[name], value, name)


def test_layer_in_another_dtype(device: str) -> None:
    """The bias follows the model, the tensor scale stays fp32."""
    layer = PackedFP4Linear.from_linear(nn.Linear(64, 32, device=device))
    scale = layer.scale.clone()
    layer = layer.to(BF16).half()
    assert layer.bias is not None and layer.bias.dtype == torch.float16
    assert_same_bits(layer.scale, scale)
    with torch.autocast(device, dtype=BF16):
        assert layer(torch.randn(2, 64, device=device)).dtype == BF16


def test_layer_refuses(device: str) -> None:
    layer = PackedFP4Linear.from_linear(nn.Linear(64, 32, device=device))
    x = torch.randn(2, 64, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="without gradient"):
        layer(x)
    with torch.no_grad():
        layer(x)
    with pytest.raises(ValueError, match=r"expected an input \[..., 64\]"):
        layer(torch.randn(2, 63, device=device))
    with pytest.raises(ValueError, match="expected an FP4 recipe"):
        PackedFP4Linear(64, 32, recipe="fp8")


def test_layer_compiled(device: str) -> None:
    layer = PackedFP4Linear.from_linear(nn.Linear(64, 32, device=device))
    x = torch.randn(2, 64, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same_bits(compiled(x), layer(x))
