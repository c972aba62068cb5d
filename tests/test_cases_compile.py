"""Decides that the public failures of the kind "compile" (open.md, O-71 to O-76) do not happen."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
import torch._inductor.config
from conftest import assert_close_as, assert_same_bits
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import narrowfloat as nf
from narrowfloat import ops, support
from narrowfloat.formats import IN_BF16
from narrowfloat.settings import Backward, Forward

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = 0, 1


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def backend(device: str) -> str:
    """Inductor on the GPU; on the CPU the same capture and autograd without its C++ compiler."""
    return "inductor" if device == "cuda" else "aot_eager"


def eager_random():
    """Inductor draws random numbers its own way; in here it draws torch's, which FP4 rounds by."""
    return torch._inductor.config.patch(fallback_random=True)


def forward_backward(model, x: Tensor) -> tuple[Tensor, ...]:
    """y, dx and the parameters' gradients of sum(y * c) for one fixed c."""
    leaf = x.detach().clone().requires_grad_()
    parameters = list(model.parameters())
    torch.manual_seed(1)  # of stochastic rounding; a compiled forward may draw for its backward
    y = model(leaf)
    torch.manual_seed(1)
    c = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    gradients = torch.autograd.grad(y, [leaf, *parameters], c)
    return (y.detach(), *gradients)


def assert_as_eager(compiled, eager, x: Tensor) -> None:
    for i, (a, b) in enumerate(
        zip(forward_backward(compiled, x), forward_backward(eager, x), strict=True)
    ):
        assert_same_bits(a, b, f"result {i} at {tuple(x.shape)}")


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_o71_data_dependent_token_counts(device, recipe, dtype):
    """O-71: dynamic shapes, tokens chosen by a mask, none among them: at most 3 graphs."""
    eager = nf.Linear(64, 48, device=device, dtype=dtype, recipe=recipe)
    counter = CompileCounterWithBackend(backend(device))
    compiled = torch.compile(eager, backend=counter, dynamic=True, fullgraph=True)
    tokens = torch.randn(1000, 64, device=device).to(dtype)
    with eager_random():
        for m in (16, 0, 1, 5, 1000, 17, 333):
            mask = torch.arange(1000, device=device) < m
            x = tokens[mask]
            assert x.shape[0] == m
            for _ in range(2):
                y = compiled(x)
                assert_same_bits(y.detach(), eager(x).detach(), f"{m} tokens")
        assert counter.frame_count <= 3
        for m in (7, 0, 1, 640):
            assert_as_eager(compiled, eager, tokens[:m])


@pytest.fixture
def nothing_found_yet(monkeypatch):
    for found in ("ready", "ready_fp4"):
        monkeypatch.setattr(support, found, set())
    monkeypatch.setattr(support, "_NONE_YET", set())
    monkeypatch.setattr(support, "ready_block", {})


@pytest.mark.parametrize("recipe", nf.RECIPES)
def test_o71_what_was_found_of_a_device_is_no_guard(nothing_found_yet, device, recipe):
    """O-71: a graph made before the device was asked about serves after an eager call too."""
    eager = nf.Linear(64, 48, device=device, recipe=recipe)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(eager, backend=counter, fullgraph=True)
    x = torch.randn(32, 64, device=device)
    for call in (compiled, eager, compiled):
        call(x)
    assert counter.frame_count == 1


@pytest.mark.parametrize("recipe", [*nf.RECIPES.values(), nf.BlockRecipe("mine", "mx")], ids=str)
def test_compiled_first_a_device_is_asked_too(monkeypatch, nothing_found_yet, recipe):
    """A refusal comes before anything is launched, and emulation says so, once."""
    answer = nf.Support(False, "no", "it has none of that")
    monkeypatch.setattr(support, "_supported", lambda *_: answer)
    compiled = torch.compile(nf.Linear(32, 48, recipe=recipe), backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 32)
    with pytest.raises(Exception, match=f"runs recipe {recipe}, got cpu: it has none of that"):
        compiled(x)
    answer = nf.Support(True, "emulation", "as good as it gets")
    with pytest.warns(support.EmulationWarning, match=f"recipe {recipe} on cpu: as good"):
        y = compiled(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", support.EmulationWarning)
        torch._dynamo.reset()
        assert_same_bits(compiled(x).detach(), y.detach())


def test_o71_mask_inside_the_graph(device, recipe):
    """O-71: the boolean indexing itself compiled: the count is unknown to the compiler."""
    eager = nf.Linear(64, 48, device=device, recipe=recipe)

    def expert(tokens: Tensor, mask: Tensor) -> Tensor:
        return eager(tokens[mask])

    counter = CompileCounterWithBackend(backend(device))
    tokens = torch.randn(100, 64, device=device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(expert, backend=counter, fullgraph=True)
        for m in (50, 0, 1, 5, 100):
            mask = torch.arange(100, device=device) < m
            y = compiled(tokens, mask)
            assert y.shape == (m, 48)
            assert_same_bits(y.detach(), expert(tokens, mask).detach(), f"{m} tokens")
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "recipe",
    [*nf.RECIPES, nf.Recipe("other", dgrad=nf.Gemm("e5m2", "e4m3", "fast"))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_o72_no_graph_break(device, dtype, recipe):
    """O-72: a stack of layers is one graph, forward and backward, in eager's values."""
    kwargs = {"device": device, "dtype": dtype, "recipe": recipe}
    eager = nn.Sequential(nf.Linear(32, 64, **kwargs), nn.ReLU(), nf.Linear(64, 48, **kwargs))
    x = torch.randn(24, 32, device=device).to(dtype)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(eager, backend=counter, fullgraph=True)
    assert_as_eager(compiled, eager, x)
    assert counter.frame_count == 1
    explained = torch._dynamo.explain(eager)(x)
    assert explained.graph_count == 1 and explained.graph_break_count == 0


def test_o72_sigmoid_between_layers(device):
    """O-72: the stack of the report; the compiler may compute sigmoid its own way."""
    eager = nn.Sequential(nf.FP8Linear(32, 64), nn.Sigmoid(), nf.FP8Linear(64, 48)).to(device)
    x = torch.randn(24, 32, device=device)
    compiled = torch.compile(eager, backend=backend(device), fullgraph=True)
    for a, b in zip(forward_backward(compiled, x), forward_backward(eager, x), strict=True):
        assert_close_as(a, b, "e4m3")


def test_o72_autocast_and_functions(device):
    """O-72: autocast, linear(), matmul() and quantize() inside one graph."""
    w = torch.randn(48, 32, device=device, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=BF16):
            y = nf.linear(x, w)
        z = nf.matmul(x, w.t())
        return y.float() + z + nf.quantize(z.detach()).dequantize()

    x = torch.randn(24, 32, device=device)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(x).detach(), f(x).detach())
    a = torch.autograd.grad(compiled(x).sum(), w)
    b = torch.autograd.grad(f(x).sum(), w)
    assert_same_bits(a[0], b[0])


@pytest.mark.parametrize("n", [48, 33])
@pytest.mark.parametrize(
    "name", ["fp8_mm", "fp8_mm_view", "fp8_linear_forward", "fp8_linear_backward"]
)
def test_o72_functions_of_the_seeds(device, name, n):
    """O-72: the seeds' functions are one graph too."""
    x = torch.randn(24, 64, device=device)
    w = torch.randn(n, 64, device=device)
    args = {
        "fp8_linear_forward": (x, w),
        "fp8_linear_backward": (torch.randn(24, n, device=device), x, w),
    }.get(name, (nf.quantize(x).data, nf.quantize(w).data))
    function = getattr(nf, name)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    got, right = compiled(*args), function(*args)
    if isinstance(right, Tensor):
        got, right = (got,), (right,)
    for c, r in zip(got, right, strict=True):
        assert_same_bits(c, r, name)
        assert c.stride() == r.stride()


def test_o72_training_a_compiled_model(device, recipe):
    """O-72: several steps: the compiled model sees each update of its weights."""
    first, second = nf.Linear(32, 64, recipe=recipe), nf.Linear(64, 32, recipe=recipe)
    eager = nn.Sequential(first, nn.ReLU(), second).to(device)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, other)]
    for i in range(3):
        torch.manual_seed(10 + i)
        x = torch.randn(16, 32, device=device)
        for model, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            torch.manual_seed(i)  # of stochastic rounding
            loss.backward()
            optimizer.step()
        for a, b in zip(eager.parameters(), other.parameters(), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_o73_shapes_of_scales(device, fullgraph):
    """O-73: scales of shapes (), (1,) and (1,1) in all pairs, eager and compiled, are one."""
    a, b = (nf.quantize(torch.randn(n, 32, device=device)) for n in (16, 24))

    def product(a_scale: Tensor, b_scale: Tensor) -> Tensor:
        return ops.scaled_mm(a.data, b.data, a_scale, b_scale)

    right = product(a.scale, b.scale)
    assert_close_as(right.float(), a.dequantize() @ b.dequantize().t())
    for first, second in itertools.product([(), (1,), (1, 1)], repeat=2):
        scales = a.scale.reshape(first), b.scale.reshape(second)
        assert_same_bits(product(*scales), right, f"eager {first} {second}")
        torch._dynamo.reset()  # nine pairs are more graphs than one function may have
        compiled = torch.compile(product, backend=backend(device), fullgraph=fullgraph)
        assert_same_bits(compiled(*scales), right, f"compiled {first} {second}")


def test_o73_wrong_shapes_of_scales(device):
    """O-73: a scale of two elements is the same error eager and compiled."""
    a = nf.quantize(torch.randn(16, 32, device=device))

    def product(scale: Tensor) -> Tensor:
        return ops.scaled_mm(a.data, a.data, scale, a.scale)

    scale = torch.ones(2, device=device)
    with pytest.raises(ValueError, match="a_scale"):
        product(scale)
    compiled = torch.compile(product, backend="aot_eager")
    with pytest.raises(Exception, match="a_scale"):
        compiled(scale)


def cases_o74(device: str):
    """(name, operator, arguments): transposed, sliced, offset, empty and ragged inputs."""

    def real(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    xs = {
        "plain": real(32, 48),
        "transposed": real(48, 32).t(),
        "sliced": real(32, 96)[:, ::2],
        "offset": real(32, 51)[:, 3:],
        "expanded": real(1, 48).expand(32, 48),
        "permuted": real(4, 48, 8, dtype=F32).permute(0, 2, 1),
        "ragged": real(7, 33, dtype=F16),
        "empty": real(0, 48),
        "empty in three": real(2, 0, 48),
        "no features": real(5, 0),
        "vector": real(48),
    }
    for name, x in xs.items():
        for rows, columns in ((True, True), (True, False), (False, True)):
            yield f"quantize {name}", ops.quantize_op, (x, E4M3, rows, columns)
        k = x.shape[-1]
        w, bias = real(24, k), real(24)
        for save in (True, False):
            args = (x, w, bias, None, None, Forward(E4M3, E4M3, True, save).pack())
            yield f"forward {name}", ops.linear_forward, args
        for formats in ((IN_BF16, E4M3), (E5M2, IN_BF16)):
            args = (x, w, bias, None, None, Forward(*formats, save_x=True).pack())
            yield f"forward {formats} {name}", ops.linear_forward, args
        rows, w_columns, scale = ops.quantize_op(w, E4M3, True, True)
        settings = Forward(E4M3, E4M3, False, True).pack()
        held = (x, w.t().contiguous().t(), None, rows, scale, settings)
        yield f"forward held {name}", ops.linear_forward, held
        dy = real(*x.shape[:-1], 24)
        _, x_columns, x_scale = ops.quantize_op(x, E4M3, False, True)
        saved = (x_columns, x_scale)
        for tensors, wanted in (
            ((dy, *saved, w, None, scale), (True, F32, BF16)),
            ((dy, *saved, None, w_columns, scale), (True, BF16, None)),
            ((dy, *saved, None, None, None), (False, F32, None)),
            ((dy, None, None, w, None, None), (True, None, F32)),
            ((dy, None, None, None, None, None), (False, None, F32)),
        ):
            settings = Backward(E5M2, E4M3, False, False, *wanted).pack()
            yield f"backward {name}", ops.linear_backward, (*tensors, k, settings)
        for formats, of_x in (
            ((IN_BF16, E4M3), saved),
            ((E5M2, IN_BF16), saved),
            ((E5M2, E4M3), (x, None)),
        ):
            settings = Backward(*formats, False, False, True, F32, BF16).pack()
            args = (dy, *of_x, w, None, None, k, settings)
            yield f"backward {formats} {name}", ops.linear_backward, args
    yield "quantize given", ops.quantize_op, (xs["ragged"], E5M2, True, True, real(4, dtype=F32))
    dy = real(24, 32).t()
    _, x_columns, x_scale = ops.quantize_op(xs["plain"], E4M3, False, True)
    settings = Backward(E5M2, E4M3, False, False, True, F32, F32).pack()
    args = (dy, x_columns, x_scale, real(24, 48), None, None, 48, settings)
    yield "backward transposed dy", ops.linear_backward, args
    one = torch.ones((), device=device)
    a, b = (ops.quantize_op(real(n, 64), E4M3, True, False)[0] for n in (16, 32))
    for dtype in (BF16, F16, F32):
        for bias in (None, real(32, dtype=dtype)):
            yield "scaled_mm", ops.scaled_mm_op, (a, b, one, one, bias, dtype, True)
    yield "scaled_mm empty", ops.scaled_mm_op, (a[:0], b, one, one, None, BF16, False)
    out = real(16, 32, dtype=F32)
    yield "accumulate", ops.scaled_mm_accumulate_op, (out, a, b, one, one, False)


def test_o74_fakes_equal_the_operators(device):
    """O-74: size, stride and dtype of each output are the fake's, for every operator and input."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name, op, args in cases_o74(device):
        before = [a.clone() if isinstance(a, Tensor) else a for a in args]
        real = op(*args)
        for a, b in zip(args, before, strict=True):
            if isinstance(a, Tensor) and not (op is ops.scaled_mm_accumulate_op and a is args[0]):
                assert_same_bits(a, b, f"{name}: an input was written to")
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
            fake = op(*fakes)
        if real is None:
            assert fake is None
            continue
        reals, fakes = ([t] if isinstance(t, Tensor) else t for t in (real, fake))
        mine = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)} - {0}
        for r, f in zip(reals, fakes, strict=True):
            assert r.untyped_storage().data_ptr() not in mine, f"{name}: an output is an input"
            assert r.shape == f.shape and r.dtype == f.dtype and r.device == f.device, name
            assert r.stride() == f.stride() or r.numel() == 0, (name, r.stride(), f.stride())


OPCHECKED = {
    "quantize": {"quantize sliced", "quantize transposed", "quantize empty", "quantize given"},
    "linear_forward": {"forward sliced", "forward held transposed", "forward empty"},
    "linear_backward": {"backward transposed dy", "backward sliced", "backward empty"},
    "scaled_mm": {"scaled_mm", "scaled_mm empty"},
    "scaled_mm_accumulate_": {"accumulate"},
}


@pytest.mark.parametrize("op", list(OPCHECKED))
def test_o74_opcheck(device, op):
    """O-74: torch.library.opcheck: schema, aliasing, fakes, tracing with dynamic shapes."""
    seen = set()
    for name, overload, args in cases_o74(device):
        if name in OPCHECKED[op] and name not in seen:
            seen.add(name)  # the first of each name: tracing takes its time
            checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
            if not any(isinstance(a, Tensor) and a.element_size() == 1 for a in args):
                checks.append("test_schema")  # torch cannot compare FP8 inputs: the test above does
            torch.library.opcheck(overload.overload, args, test_utils=checks)
    assert seen == OPCHECKED[op]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("m", "k", "n"), [(17, 33, 65), (130, 72, 100), (1, 16, 7)])
def test_o75_ragged_sizes(device, recipe, m, k, n, dtype):
    """O-75: compiled equals eager at sizes that are padded inside."""
    eager = nf.Linear(k, n, device=device, dtype=dtype, recipe=recipe)
    compiled = torch.compile(eager, backend=backend(device), fullgraph=True)
    x = torch.randn(m, k, device=device).to(dtype)
    with eager_random():
        assert_as_eager(compiled, eager, x)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k", "n"), [(16640, 8192, 1024), (16641, 8190, 1021)])
def test_o75_large_sizes(cuda, recipe, m, k, n):
    """O-75: the sizes of the report, and ragged ones beside them."""
    eager = nf.Linear(k, n, device=cuda, dtype=BF16, recipe=recipe)
    compiled = torch.compile(eager, backend="inductor", fullgraph=True)
    with eager_random():
        assert_as_eager(compiled, eager, torch.randn(m, k, device=cuda, dtype=BF16))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_o76_padding_is_invisible(device, recipe, dtype):
    """O-76: N = 100 and K = 72: strides are those of unpadded sizes, views and reshapes work."""
    eager = nf.Linear(72, 100, device=device, dtype=dtype, recipe=recipe)

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = eager(x)
        return y, y.view(-1, 4, 25), y.view(2, -1).reshape(-1, 10)

    x = torch.randn(6, 72, device=device).to(dtype).requires_grad_()
    compiled = torch.compile(f, backend=backend(device), fullgraph=True)
    for function in (f, compiled):
        y, view, reshaped = function(x)
        assert y.stride() == (100, 1) and y.shape == (6, 100)
        assert view.shape == (6, 4, 25) and reshaped.shape == (60, 10)
        x.grad = None
        (view.sum() + reshaped.sum()).backward()
        assert x.grad.stride() == (72, 1) and eager.weight.grad.stride() == (72, 1)
    for a, b in zip(f(x), compiled(x), strict=True):
        assert_same_bits(a.detach(), b.detach())
