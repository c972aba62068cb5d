"""Public failures of the kind "compile" do not happen, O-71 to O-76; CASES.md tells of each."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from conftest import EVERY_RECIPE, assert_close_as, assert_same_bits, skip_where_it_does_not_run
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import narrowfloat as nf
from narrowfloat import ops, support
from narrowfloat.cast import Cast
from narrowfloat.spec import (
    BACKWARD_JOINS,
    DB,
    DW,
    FORWARD_JOINS,
    NEED_DX,
    W_MEASURED,
    Y_DTYPE,
    Quantize,
    both,
)
from narrowfloat.weight_cache import quantized

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = Cast("e4m3"), Cast("e5m2")


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
    monkeypatch.setattr(support, "_ALWAYS", frozenset())
    monkeypatch.setattr(support, "_ready", {})


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


@pytest.mark.parametrize("recipe", EVERY_RECIPE, ids=str)
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


def test_o71_dynamic_token_counts(device, each_recipe):
    """O-71: dynamic shapes, none and one among them, for every recipe."""
    made = nf.Linear(64, 32, device=device, recipe=each_recipe)
    compiled = torch.compile(made, backend="aot_eager", dynamic=True)
    for m in (5, 16, 0, 1, 100):
        x = torch.randn(m, 64, device=device, requires_grad=True)
        y = compiled(x)
        assert y.shape == (m, 32)
        y.sum().backward()
        assert x.grad.shape == x.shape
        assert_same_bits(y, made(x))


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
    [*EVERY_RECIPE, nf.Recipe("other", dgrad=nf.Gemm("e5m2", "e4m3", "fast"))],
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


@pytest.mark.parametrize(("m", "k", "n"), [(33, 72, 100), (50, 128, 24)])
def test_o72_o75_o76_compiled_is_eager(device, each_recipe, m, k, n):
    """O-72: one graph both ways; O-75, O-76: ragged sizes, then a view."""
    how = {"device": device, "recipe": each_recipe}
    model = nn.Sequential(nf.Linear(k, n, **how), nn.Sigmoid(), nf.Linear(n, 40, **how))
    compiled = torch.compile(lambda t: model(t).view(-1), backend="aot_eager", fullgraph=True)
    x = torch.randn(m, k, device=device)
    results = []
    for call in (lambda t: model(t).view(-1), compiled):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        torch.manual_seed(4)  # of stochastic rounding; a compiled forward may draw for its backward
        y = call(leaf)
        torch.manual_seed(4)
        y.backward(torch.ones_like(y))
        results.append((y, leaf.grad, model[0].weight.grad.clone()))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    assert torch._dynamo.explain(model)(x).graph_break_count == 0


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

    def multiply(a_scale: Tensor, b_scale: Tensor) -> Tensor:
        return ops.scaled_mm(a.data, b.data, a_scale, b_scale)

    right = multiply(a.scale, b.scale)
    assert_close_as(right.float(), a.dequantize() @ b.dequantize().t())
    for first, second in itertools.product([(), (1,), (1, 1)], repeat=2):
        scales = a.scale.reshape(first), b.scale.reshape(second)
        assert_same_bits(multiply(*scales), right, f"eager {first} {second}")
        torch._dynamo.reset()  # nine pairs are more graphs than one function may have
        compiled = torch.compile(multiply, backend=backend(device), fullgraph=fullgraph)
        assert_same_bits(compiled(*scales), right, f"compiled {first} {second}")


def test_o73_wrong_shapes_of_scales(device):
    """O-73: a scale of two elements is the same error eager and compiled."""
    a = nf.quantize(torch.randn(16, 32, device=device))

    def multiply(scale: Tensor) -> Tensor:
        return ops.scaled_mm(a.data, a.data, scale, a.scale)

    scale = torch.ones(2, device=device)
    with pytest.raises(ValueError, match="a_scale"):
        multiply(scale)
    compiled = torch.compile(multiply, backend="aot_eager")
    with pytest.raises(Exception, match="a_scale"):
        compiled(scale)


Case = tuple[str, Callable[..., Any], tuple[Any, ...]]  # name, operator, arguments

# What quantize makes of an operand: every scaling with each of its options.
CASTS = [
    E4M3,
    E5M2,
    *(Cast("e4m3", scaling) for scaling in ("row", "block", "block_pow2", "mx")),
    Cast("e5m2", "row"),
    *(Cast("e4m3", scaling, square=True) for scaling in ("block", "block_pow2")),
    *(Cast("e2m1", scaling) for scaling in ("nvfp4", "mxfp4")),
    Cast("e2m1", "nvfp4", square=True, four_over_six=True),
    *(Cast("e2m1", s, stochastic=True, hadamard=True, scale_up=True) for s in ("nvfp4", "mxfp4")),
]


def real(device: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def inputs(device: str) -> dict[str, Tensor]:
    return {
        "plain": real(device, 32, 48),
        "transposed": real(device, 48, 32).t(),
        "sliced": real(device, 32, 96)[:, ::2],
        "offset": real(device, 32, 51)[:, 3:],
        "expanded": real(device, 1, 48).expand(32, 48),
        "permuted": real(device, 4, 48, 8, dtype=F32).permute(0, 2, 1),
        "ragged": real(device, 7, 33, dtype=F16),
        "one": real(device, 1, 1, dtype=F32),
        "empty": real(device, 0, 48),
        "empty in three": real(device, 2, 0, 48),
        "no features": real(device, 5, 0),
        "vector": real(device, 48),
    }


def quantize_cases(device: str, name: str, x: Tensor) -> Iterator[Case]:
    seed = torch.tensor([1, 2], device=device)
    for cast in CASTS:
        for choices in (both(cast, cast), both(cast, None), both(None, cast)):
            yield f"quantize {name}", ops.quantize_op, (x, choices.pack(), None, seed)
        if cast.of.power_of_two or cast.of.family == "fp4":
            for choices in (
                Quantize(cast, cast, True, True, rows_as_operand=True),
                Quantize(cast, cast, True, True, columns_as_operand=True),
            ):
                yield f"quantize operand {name}", ops.quantize_op, (x, choices.pack(), None, seed)
    unlike = (None, E5M2, Cast("e4m3", "row"), Cast("e4m3", "mx"), Cast("e2m1", "nvfp4"))
    for rows, columns in itertools.product(unlike, repeat=2):
        yield f"quantize unlike {name}", ops.quantize_op, (x, both(rows, columns).pack())


def layer_cases(device: str, name: str, x: Tensor, recipe: nf.Recipe) -> Iterator[Case]:
    """Every way that a layer, or reuse_weights(), calls the operators of a recipe."""
    k, n = x.shape[-1], 24
    w, bias, dy = real(device, n, k), real(device, n), real(device, *x.shape[:-1], n)
    seed = torch.tensor([1, 2], device=device)
    forward, backward = recipe.forward_spec, recipe.backward_spec
    saving = forward | recipe.save_x | recipe.keep_w
    if recipe.delayed is not None:
        history = torch.zeros(3, 20, dtype=torch.int32, device=device)
        for spec in (forward, saving, saving | FORWARD_JOINS):
            arguments = (x, w, bias, history.clone(), spec)
            yield f"delayed forward {name}", ops.delayed_linear_forward, arguments
        _, columns, _, scales = ops.delayed_linear_forward(x, w, None, history, saving)
        for spec in (NEED_DX | DW[F32] | BACKWARD_JOINS, DW[BF16], NEED_DX | DB[F32]):
            arguments = (dy, columns, scales, w, history.clone(), k, backward | W_MEASURED | spec)
            yield f"delayed backward {name}", ops.delayed_linear_backward, arguments
        return
    for spec in (forward, forward | recipe.save_x, saving):
        yield f"forward {name}", ops.linear_forward, (x, w, bias, spec)
    cached = quantized(w, recipe.cached_spec)
    if cached.rows is not None:
        rows = cached.rows_arguments
        strided = w.t().contiguous().t()
        yield f"forward cached {name}", ops.linear_forward, (x, strided, None, saving, *rows)
        arguments = (x, None, bias, saving, *rows, 0, n, k)
        yield f"forward cached alone {name}", ops.linear_forward, arguments
    if recipe.fprop.a is not None:
        how = both(recipe.fprop.a, None)
        codes, scales, _, _, tensor_scales = ops.quantize_op(x, how.pack())
        of_x = (codes, scales, tensor_scales[:4] if tensor_scales.numel() else None)
        arguments = (x, w, bias, forward, *of_x)
        yield f"forward quantized {name}", ops.linear_forward, arguments
        m = x.numel() // k if k else x.shape[0]
        arguments = (None, w, bias, forward | Y_DTYPE[F16], *of_x, None, None, None, m)
        yield f"forward quantized alone {name}", ops.linear_forward, arguments
    _, columns, columns_scales, scales = ops.linear_forward(x, w, None, saving)
    of_x = (columns, columns_scales) if recipe.save_x else (x, None)
    measured = backward | (W_MEASURED if recipe.keep_w else 0)
    for tensors, spec in (
        ((dy, *of_x, scales, w, seed), measured | NEED_DX | DW[F32] | DB[BF16]),
        ((dy, *of_x, scales, w, seed), backward | NEED_DX | DW[BF16]),
        ((dy, *of_x, scales, None, seed), backward | DW[F32]),
        ((dy, None, None, None, w, seed), backward | NEED_DX | DB[F32]),
        ((dy, None, None, None, None, None), backward | DB[F32]),
    ):
        yield f"backward {name}", ops.linear_backward, (*tensors, k, spec)
    if cached.columns is not None:
        spec = backward | NEED_DX | DW[BF16]
        arguments = (dy, *of_x, scales, None, seed, k, spec, None, *cached.columns)
        yield f"backward cached {name}", ops.linear_backward, arguments
    if x.dim() == 2:
        strided = real(device, n, x.shape[0]).t()
        arguments = (strided, *of_x, scales, w, seed, k, measured | NEED_DX | DW[F32] | DB[F32])
        yield f"backward transposed dy {name}", ops.linear_backward, arguments


def gemm_cases(device: str) -> Iterator[Case]:
    one = torch.ones((), device=device)
    spec = both(E4M3, None).pack()
    a, b = (ops.quantize_op(real(device, n, 64), spec)[0] for n in (16, 32))
    for dtype in (BF16, F16, F32):
        for bias in (None, real(device, 32, dtype=dtype)):
            yield "scaled_mm", ops.scaled_mm_op, (a, b, one, one, bias, dtype, True)
    yield "scaled_mm empty", ops.scaled_mm_op, (a[:0], b, one, one, None, BF16, False)
    out = real(device, 16, 32, dtype=F32)
    yield "accumulate", ops.scaled_mm_accumulate_op, (out, a, b, one, one, False)


def assert_fake_is_real(name: str, op: Callable[..., Any], args: tuple[Any, ...]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    changed = {ops.scaled_mm_accumulate_op: 0, ops.delayed_linear_forward: 3}
    changed[ops.delayed_linear_backward] = 4
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    found = op(*args)
    for i, (a, b) in enumerate(zip(args, before, strict=True)):
        if isinstance(a, Tensor) and changed.get(op) != i:
            assert_same_bits(a, b, f"{name}: an input was written to")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        fake = op(*fakes)
    if found is None:
        assert fake is None
        return
    reals, fakes = ([t] if isinstance(t, Tensor) else t for t in (found, fake))
    mine = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)} - {0}
    for r, f in zip(reals, fakes, strict=True):
        assert r.untyped_storage().data_ptr() not in mine, f"{name}: an output is an input"
        assert r.shape == f.shape and r.dtype == f.dtype and r.device == f.device, name
        assert r.stride() == f.stride() or r.numel() == 0, (name, r.stride(), f.stride())


def test_o74_fakes_equal_the_operators(device, each_recipe):
    """O-74: size, stride and dtype of each output are the fake's, for every input of a layer."""
    few = ("sliced", "ragged", "one", "empty in three", "no features", "vector")
    for name, x in inputs(device).items():
        if each_recipe.name == "fp8" or name in few:
            for case in layer_cases(device, name, x, each_recipe):
                assert_fake_is_real(*case)


@pytest.mark.parametrize("name", inputs("cpu"))
def test_o74_fakes_equal_quantize(device, name):
    for case in quantize_cases(device, name, inputs(device)[name]):
        assert_fake_is_real(*case)


def test_o74_fakes_equal_scaled_mm(device):
    for case in gemm_cases(device):
        assert_fake_is_real(*case)


def opcheck(cases: Iterator[Case]) -> None:
    """torch.library.opcheck: schema, aliasing, fakes, tracing with dynamic shapes."""
    for _, op, args in cases:
        checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if not any(isinstance(a, Tensor) and a.element_size() == 1 for a in args):
            checks.append("test_schema")  # torch cannot compare FP8 inputs: what is above does
        torch.library.opcheck(op.overload, args, test_utils=checks)


OPCHECKED = ("fp8", "fp8_block_bf16_wgrad", "unlike", "fp8_delayed", "nvfp4", "mxfp4")


@pytest.mark.parametrize("recipe", [r for r in EVERY_RECIPE if r.name in OPCHECKED], ids=str)
@pytest.mark.parametrize("shape", [(40, 64), (1, 1), (33, 72), (0, 16)], ids=str)
def test_o74_to_o76_opcheck(device: str, recipe: nf.Recipe, shape: tuple[int, int]) -> None:
    """O-74, O-75, O-76: of a layer's operators with each scaling, x as it lies or transposed."""
    skip_where_it_does_not_run(recipe, device)
    m, k = shape
    x = torch.randn(k, m, device=device).t() if k == 72 else torch.randn(m, k, device=device)
    opcheck(layer_cases(device, "x", x, recipe))


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_o74_opcheck_of_quantize(device, cast):
    seed = torch.tensor([1, 2], device=device)
    other = real(device, 33, 40, dtype=F16)
    how = [both(cast, cast), both(cast, None), both(None, cast)]
    if cast.of.power_of_two or cast.of.family == "fp4":
        how.append(Quantize(cast, cast, True, True, rows_as_operand=True))
    xs = (real(device, 32, 96)[:, ::2], real(device, 48, 32).t(), real(device, 0, 48), other)
    for x, h in zip(xs, itertools.cycle(how), strict=False):
        opcheck(iter([("", ops.quantize_op, (x, h.pack(), None, seed))]))
    if cast.of.name == "tensor":
        given = (other, both(cast, cast).pack(), real(device, 4, dtype=F32))
        opcheck(iter([("given", ops.quantize_op, given)]))


def test_o74_opcheck(device):
    """O-74: of the GEMM of quantized operands."""
    opcheck(gemm_cases(device))


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


def test_o75_large_sizes_of_every_recipe(device, each_recipe):
    m, k, n = (16640, 8192, 256) if device == "cuda" else (260, 128, 64)
    made = nf.Linear(k, n, device=device, dtype=BF16, recipe=each_recipe)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    x = torch.randn(m, k, device=device, dtype=BF16)
    assert_same_bits(compiled(x), made(x))


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
