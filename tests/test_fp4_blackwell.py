"""Tests that FP4 GEMMs reach cuBLASLt as FP4 tensor cores take them, up to the launch: csrc's own
host code on a pretended library (emulation/cublaslt_entry.cpp), which none of it ran on."""

from __future__ import annotations

import ctypes

import emulated
import pytest
import torch
from conftest import relative_error
from torch import Tensor

import narrowfloat as nf
from narrowfloat import spec
from narrowfloat.cast import Cast
from narrowfloat.formats import padded, padded32
from narrowfloat.reference import fp4, linear

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TYPES = {F32: 0, BF16: 1, F16: 2}
SEED = torch.tensor([3, -8])
E2M1, REAL = 33, {F32: 0, BF16: 14, F16: 2}  # CUDA's numbers of the types
B200, GEFORCE, OLD, H200 = 0, 1, 2, 3  # device numbers: a device's table is read once


class Operand(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("ld", ctypes.c_int64),
    ]


class Gemm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "d_type")),
        ("a", Operand),
        ("b", Operand),
        ("alpha", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("bias_type", ctypes.c_int64),
        ("device", ctypes.c_int64),
        ("d", ctypes.c_void_p),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("a", "b", "a_scale", "b_scale", "c", "d")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "a_type", "b_type", "d_type")),
        *((name, ctypes.c_int64) for name in ("pointer_mode", "epilogue")),
        ("alpha", ctypes.c_double),
        ("beta", ctypes.c_double),
    ]


class Library:
    """The pretended one, and what csrc made of it."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self.loaded = loaded
        loaded.run_gemm.restype = loaded.last_refusal.restype = ctypes.c_char_p
        loaded.last_call.restype = ctypes.POINTER(Call)
        for name in ("plans", "takes_fp4", "would_take_fp4"):
            getattr(loaded, name).restype = ctypes.c_int64

    def pretend(self, capability=100, version=130100, offers=1, launches=1, capturing=0) -> None:
        numbers = (capability, version, offers, launches, capturing)
        self.loaded.pretend(*map(ctypes.c_int64, numbers))

    def gemm(
        self,
        a: tuple[Tensor, Tensor | None],
        b: tuple[Tensor, Tensor | None],
        sizes: tuple[int, int, int],
        alpha: float,
        dtype: torch.dtype = F32,
        bias: Tensor | None = None,
        device: int = B200,
    ) -> Tensor:
        """d [m,n] = alpha a [m,k] b [n,k]^T + bias; RuntimeError with what csrc throws."""
        m, n, k = sizes
        self.d = aligned(torch.full((m, n), -7.0).to(dtype))
        self.alpha = torch.tensor([alpha, 0.0, 0.0, 0.0])
        operands = []
        for (codes, scales), rows in ((a, m), (b, n)):
            ld = codes.shape[1] * (1 if scales is None else 2)
            at = None if scales is None else scales.data_ptr()
            operands.append(Operand(codes.data_ptr(), at, rows, ld))
        job = Gemm(
            m, n, k, TYPES[dtype], *operands, self.alpha.data_ptr(),
            None if bias is None else bias.data_ptr(), 0 if bias is None else TYPES[bias.dtype],
            device, self.d.data_ptr(),
        )  # fmt: skip
        error = self.loaded.run_gemm(ctypes.byref(job))
        if error is not None:
            raise RuntimeError(error.decode())
        return self.d

    @property
    def call(self) -> Call:
        return self.loaded.last_call().contents

    def plans(self) -> tuple[int, int]:
        """(found, made) so far."""
        return tuple(self.loaded.plans(ctypes.c_int64(i)) for i in (0, 1))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder, flags = tmp_path_factory.mktemp("cublaslt_emulation"), emulated.with_host_code()
    return emulated.build(folder, "cublaslt_entry.cpp", ["gemm/difference", "gemm/epilogue"], flags)


@pytest.fixture
def library(loaded: ctypes.CDLL) -> Library:
    found = Library(loaded)
    found.pretend()
    return found


def aligned(t: Tensor) -> Tensor:
    """On 256 bytes, as torch's CUDA allocations are."""
    memory = torch.empty(t.numel() * t.element_size() + 256, dtype=torch.uint8)
    first = -memory.data_ptr() % 256
    view = memory[first : first + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
    return view.copy_(t)


def packed(x: Tensor, format: str = "nvfp4", **options: bool) -> tuple[Tensor, Tensor, float]:
    """Rows of x as quantize packs them: (codes, scales, tensor scale)."""
    return of_cast(x, Cast("e2m1", format, **options))


def of_cast(x: Tensor, cast: Cast, side: int = 0) -> tuple[Tensor, Tensor, float]:
    """x [R, C] along C; side 1 where it is a tensor's transposed view."""
    q = linear.quantize_operand(x, cast, None, SEED, side)
    return aligned(q.codes), aligned(q.scales), q.scale[0].item()


SIZES = [(1, 16, 16), (50, 128, 64), (33, 72, 100), (7, 15, 200), (130, 136, 136)]


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gemm(
    library: Library, sizes: tuple[int, int, int], format: str, dtype: torch.dtype
) -> None:
    """Codes and scale tiles lie as the library reads them: the GEMM is the reference's, ragged
    or not, with any bias."""
    m, n, k = sizes
    x, w = torch.randn(m, k), torch.randn(n, k)
    x[0] *= 30  # scales apart
    w[:, : k // 2] *= 0.01
    a, a_scales, a_scale = packed(x, format)
    b, b_scales, b_scale = packed(w, format, square=format == "nvfp4")
    one = torch.ones(())
    exact = fp4.dequantize(a, a_scales, one, m, k).double()
    exact = exact @ fp4.dequantize(b, b_scales, one, n, k).double().t()
    exact = exact * float(torch.tensor(a_scale) * torch.tensor(b_scale))
    rounding = {F32: 1e-6, BF16: 2.0**-8, F16: 2.0**-11}[dtype]
    for bias in (None, torch.randn(n), torch.randn(n).to(BF16), torch.randn(n).half()):
        d = library.gemm((a, a_scales), (b, b_scales), sizes, a_scale * b_scale, dtype, bias)
        want = exact if bias is None else exact + bias.double()
        assert relative_error(d, want) < rounding + (0 if bias is None or dtype == F32 else 2**-9)


@pytest.mark.parametrize(
    "recipe",
    [r for r in nf.RECIPES.values() if r.kinds == ("fp4",)],
    ids=lambda recipe: recipe.name,
)
@pytest.mark.parametrize("m, k, n", [(48, 64, 32), (50, 100, 72), (17, 33, 15)])
def test_all_three_gemms_of_a_layer(
    library: Library, m: int, k: int, n: int, recipe: nf.Recipe
) -> None:
    """y, dx and dw from packed operands, each quantized along its own contraction (the library has
    TN alone), the tensor scales in alpha: what the reference's layer gives."""
    x, w, dy = torch.randn(m, k), torch.randn(n, k) * 0.05, torch.randn(m, n) * 1e-3
    y, *saved = linear.linear_forward(x, w, None, recipe.forward_spec | recipe.save_x)
    asked = recipe.backward_spec | spec.NEED_DX | spec.DW[F32]
    dx, dw, _ = linear.linear_backward(dy, *saved, w, SEED, k, asked)
    for gemm, (a, a_side), (b, b_side), sizes, want, what in (
        (recipe.fprop, (x, 0), (w, 0), (m, n, k), y, "y"),
        (recipe.dgrad, (dy, 0), (w.t(), 1), (m, k, n), dx, "dx"),
        (recipe.wgrad, (dy.t(), 1), (x.t(), 1), (n, k, m), dw, "dw"),
    ):
        of_a, of_b = of_cast(a, gemm.a, a_side), of_cast(b, gemm.b, b_side)
        got = library.gemm(of_a[:2], of_b[:2], sizes, of_a[2] * of_b[2])
        assert relative_error(got, want) < 1e-5, what


@pytest.mark.parametrize("rotated", [False, True])
def test_mx_scales_are_pairs_of_powers_of_two(rotated: bool) -> None:
    """How 1 x 32 blocks go through a mode that has 1 x 16: both of a pair have the same E4M3 byte,
    a power of two, and the smallest and largest of 18 of them are exact."""
    x = torch.randn(70, 100) * torch.logspace(-8, 2, 70)[:, None]
    _, tiled, _ = packed(x, "mxfp4", hadamard=rotated)
    scales = fp4.untile(tiled, 70, padded32(100))
    assert torch.equal(scales[:, 0::2], scales[:, 1::2])
    values = scales.view(torch.float8_e4m3fn).double()
    values = values[values > 0]
    assert torch.equal(values.log2(), values.log2().round())
    assert values.max() == 2.0**8 and values.min() == 2.0**-9


def test_what_the_library_is_asked(library: Library) -> None:
    """Row-major d = a b^T is its column-major d^T: its a is our b, with b's scales; alpha and a
    beta of 0 come from the device, and its c is not its d."""
    m, n, k = 48, 32, 64
    a, a_scales, _ = packed(torch.randn(m, k))
    b, b_scales, _ = packed(torch.randn(n, k))
    bias = aligned(torch.randn(n).to(BF16))
    for dtype, given in ((BF16, None), (BF16, bias), (F32, None), (F32, bias)):
        library.gemm((a, a_scales), (b, b_scales), (m, n, k), 0.125, dtype, given)
        call = library.call
        assert (call.a, call.b) == (b.data_ptr(), a.data_ptr())
        assert (call.a_scale, call.b_scale) == (b_scales.data_ptr(), a_scales.data_ptr())
        assert (call.m, call.n, call.k) == (n, m, k)
        assert call.a_type == call.b_type == E2M1 and call.d_type == REAL[dtype]
        assert call.pointer_mode == 1 and (call.alpha, call.beta) == (0.125, 0)
        assert call.c not in (0, call.d) and call.d == library.d.data_ptr()
        assert call.epilogue == (4 if given is not None and dtype == BF16 else 1)
    a, a_scales, _ = packed(torch.randn(m, 40))
    b, b_scales, _ = packed(torch.randn(15, 40))
    library.gemm((a, a_scales), (b, b_scales), (m, 15, 40), 1.0, BF16)
    assert (library.call.m, library.call.n, library.call.k) == (padded(15), m, 64)  # padded
    assert library.call.d != library.d.data_ptr()  # and then unpadded


def test_plan_keys(library: Library) -> None:
    """A plan is found again by the same problem, wherever its operands lie, and by no other: sizes,
    types, bias, alignment and the kind of operands each make one."""
    m, n, k = 64, 96, 160

    def fp4(rows: int, depth: int) -> tuple[Tensor, Tensor]:
        return packed(torch.randn(rows, depth))[:2]

    def asked(*arguments, **how) -> tuple[int, int]:
        found, made = library.plans()
        library.gemm(*arguments, **how)
        now = library.plans()
        return now[0] - found, now[1] - made

    # planned (for its workspace), then launched
    again, new = (2, 0), (1, 1)
    a, b = fp4(m, k), fp4(n, k)
    assert asked(a, b, (m, n, k), 1.0) == new
    assert asked(a, b, (m, n, k), 2.0) == again  # alpha is read by the device
    assert asked(fp4(m, k), fp4(n, k), (m, n, k), 1.0) == again
    assert asked(fp4(m + 16, k), b, (m + 16, n, k), 1.0) == new
    assert asked(a, fp4(n + 8, k), (m, n + 8, k), 1.0) == new
    assert asked(fp4(m, k + 32), fp4(n, k + 32), (m, n, k + 32), 1.0) == new
    assert asked(fp4(m, k - 5), fp4(n, k - 5), (m, n, k - 5), 1.0) == again  # padded: the same
    assert asked(a, b, (m, n, k), 1.0, dtype=BF16) == new
    bias = aligned(torch.randn(n).to(BF16))
    assert asked(a, b, (m, n, k), 1.0, dtype=BF16, bias=bias) == new
    assert asked(a, b, (m, n, k), 1.0, dtype=BF16, bias=aligned(bias * 2)) == again
    off = aligned(torch.cat([torch.zeros(16, dtype=torch.uint8), a[0].flatten()]))[16:]
    assert asked((off.view(a[0].shape), a[1]), b, (m, n, k), 1.0) == new
    # the operands in bf16, as other chips take the same numbers: another plan
    plain = [(aligned(torch.randn(rows, k).to(BF16)), None) for rows in (m, n)]
    assert asked(*plain, (m, n, k), 1.0) == new
    assert library.call.a_type == library.call.b_type == REAL[BF16]
    assert asked(a, b, (m, n, k), 1.0) == again
    # each device has plans of its own
    assert asked(a, b, (m, n, k), 1.0, device=GEFORCE) == new


def test_refusals(library: Library) -> None:
    """Where the library has no algorithm, or does not launch, the whole problem is in the error."""
    m, n, k = 24, 40, 224
    a, b = (packed(torch.randn(rows, k))[:2] for rows in (m, n))
    library.pretend(offers=0, version=120900)
    with pytest.raises(RuntimeError) as caught:
        library.gemm(a, b, (m, n, k), 1.0, BF16)
    for part in (
        "cuBLASLt offers no algorithm for",
        f"d [{m}, {n}] = a [{m}, {k}] e2m1",
        f"b [{n}, {k}]^T e2m1",
        "bfloat16",
        "scales vec16_ue4m3",
        "alpha on the device",
        "cuBLASLt 120900",
    ):
        assert part in str(caught.value), part
    library.pretend(launches=0)
    with pytest.raises(RuntimeError, match="cublasLtMatmul failed: CUBLAS_STATUS_NOT_SUPPORTED"):
        library.gemm(a, b, (m, n, k), 1.0, BF16)
    library.pretend()
    library.gemm(a, b, (m, n, k), 1.0, BF16)  # nothing of it stays
    # a version that breaks a capture in which it chooses: what was planned before it runs
    library.pretend(version=130600, capturing=1)
    library.gemm(a, b, (m, n, k), 1.0, BF16)
    with pytest.raises(RuntimeError, match="ran before the capture.*e2m1"):
        library.gemm(a, b, (m, n, k), 1.0, F32)


@pytest.mark.parametrize("broken", ["k", "mixed"])
def test_the_pretended_library_refuses(library: Library, broken: str) -> None:
    """Or the tests above show nothing."""
    m, n, k = 24, 40, 288
    a, b = (packed(torch.randn(rows, k))[:2] for rows in (m, n))
    if broken == "mixed":
        b = (aligned(torch.randn(n, k).to(BF16)), None)
    else:  # rows that are no whole words of 16 bytes
        a = (aligned(a[0][:, : (k - 16) // 2].contiguous()), a[1])
    with pytest.raises(RuntimeError, match="offers no algorithm"):
        library.gemm(a, b, (m, n, k), 1.0)
    why = {"k": b"K in words of 16 bytes", "mixed": b"both operands in e2m1"}[broken]
    assert library.loaded.last_refusal() == why


def test_which_chips_and_versions_take_fp4(library: Library) -> None:
    """What decides between packed operands and bf16 ones."""
    for capability, version, takes in (
        (100, 120803, True), (103, 130100, True), (120, 120804, True), (121, 130600, True),
        (100, 120802, False), (120, 120803, False), (100, 120600, False),
        (90, 130100, False), (89, 130600, False),
    ):  # fmt: skip
        numbers = map(ctypes.c_int64, (capability, version))
        assert bool(library.loaded.would_take_fp4(*numbers)) == takes, (capability, version)
    for device, capability, version, takes in (
        (B200, 100, 130100, True), (GEFORCE, 120, 130100, True), (OLD, 100, 120802, False),
        (H200, 90, 130100, False),
    ):  # fmt: skip
        library.pretend(capability, version)
        assert bool(library.loaded.takes_fp4(ctypes.c_int64(device + 8))) == takes
