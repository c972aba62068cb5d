"""Derivatives that are taken without autograd.Function: forward mode, torch.export, torch.func.

One test for each sample of R-01 to R-04 (CASES.md) and their kind.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import assert_same_bits
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.autograd import forward_ad
from torch.library import opcheck

import narrowfloat as nf
from narrowfloat.spec import W_MEASURED

SOME = ["fp8", "fp8_row", "fp8_block_bf16_wgrad", "mxfp8", "nvfp4", "nvfp4_mxfp8_backward"]
CURRENT = [name for name, r in nf.RECIPES.items() if r.delayed is None]
FORWARD_MODE = "^narrowfloat.linear: expected operands without tangents, got a dual tensor"
VMAP = "^narrowfloat.linear: expected no vmap over a quantized layer"
TWICE = "linear: expected to be differentiated once"
HISTORY = "^narrowfloat.linear: expected a recipe with current scaling .* got fp8_delayed "

some = pytest.mark.parametrize("recipe", SOME)
graded = pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
strictly = pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])


def layer_of(recipe: str, device: str = "cpu", bias: bool = True) -> nf.Linear:
    return nf.Linear(64, 48, bias, device=device, recipe=recipe)


def loss_of(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x).square().sum()


def trained(call: nn.Module, x: Tensor) -> list[Tensor]:
    """y and the gradients of x and of each parameter, with one draw."""
    leaf = x.detach().clone().requires_grad_()
    call.zero_grad()
    y = call(leaf)
    torch.manual_seed(5)
    y.square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for _, p in sorted(call.named_parameters()))]


def assert_all_same(got: list[Tensor], want: list[Tensor]) -> None:
    for at, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(a, b, f"result {at}")


# ---- forward mode ----


@some
@graded
def test_r01_jvp_is_refused(device: str, recipe: str, grad: bool) -> None:
    layer, x = layer_of(recipe, device), torch.randn(8, 64, device=device)
    parameters = dict(layer.named_parameters())
    nested = lambda x: torch.func.jvp(lambda z: layer(x) * z, (x[:, :48],), (x[:, :48],))[1]  # noqa: E731
    with torch.set_grad_enabled(grad):
        for call in (
            lambda: torch.func.jvp(layer, (x,), (x,)),
            lambda: torch.func.jvp(
                lambda p: torch.func.functional_call(layer, p, (x,)), (parameters,), (parameters,)
            ),
            lambda: torch.func.jacfwd(loss_of(layer))(x),
            lambda: torch.func.linearize(layer, x),
            lambda: torch.func.jvp(nested, (x,), (x,)),  # the tangent is an outer level's
            lambda: torch.func.jvp(torch.func.grad(loss_of(layer)), (x,), (x,)),
            lambda: torch.func.grad(lambda x: torch.func.jvp(loss_of(layer), (x,), (x,))[1])(x),
            lambda: torch.func.hessian(loss_of(layer))(x),
        ):
            with pytest.raises(NotImplementedError, match=FORWARD_MODE):
                call()


@graded
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "nvfp4"])
def test_r01_dual_tensors_are_refused(device: str, recipe: str, grad: bool) -> None:
    """Of x, of w, of the bias; in linear and in what is made of it."""
    x, w = torch.randn(8, 64, device=device), torch.randn(48, 64, device=device)
    b = torch.randn(48, device=device)
    layer = layer_of(recipe, device)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        x_dual, w_dual, b_dual = (forward_ad.make_dual(t, t) for t in (x, w, b))
        for call in (
            lambda: layer(x_dual),
            lambda: nf.linear(x_dual, w, None, recipe),
            lambda: nf.linear(x, w_dual, b, recipe),
            lambda: nf.linear(x, w, b_dual, recipe),
            lambda: nf.matmul(x_dual, w.t(), recipe),
            lambda: nf.matmul(x, w_dual.t(), recipe),
            lambda: nf.fp4_matmul(x_dual, w.t()),
            lambda: nf.fp8_linear_forward(x_dual, w),
        ):
            with pytest.raises(NotImplementedError, match=FORWARD_MODE):
                call()
        with pytest.raises(NotImplementedError, match="jvp"):  # PyTorch's
            nf.LinearFunction.apply(x_dual, w, None, nf.RECIPES[recipe])
        # nothing with a tangent takes part: as outside
        assert_same_bits(nf.linear(x, w, b, recipe), nf.linear(x, w, b, recipe))
        assert forward_ad.unpack_dual(nf.linear(x, w, b, recipe)).tangent is None


def test_r01_packed_weights_refuse_tangents_too() -> None:
    packed = nf.PackedFP4Linear.from_linear(nn.Linear(64, 48))
    x = torch.randn(8, 64)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            with pytest.raises(NotImplementedError, match="^PackedFP4Linear: .* a dual tensor"):
                torch.func.jvp(packed, (x,), (x,))


@graded
def test_r01_compiled(grad: bool) -> None:
    """jvp around a compiled layer and inside what is compiled."""
    layer, x = layer_of("fp8"), torch.randn(8, 64)
    compiled = torch.compile(layer, backend="aot_eager")
    inside = torch.compile(lambda x: torch.func.jvp(layer, (x,), (x,)), backend="aot_eager")
    with torch.set_grad_enabled(grad):
        for call in (lambda: inside(x), lambda: torch.func.jvp(compiled, (x,), (x,))):
            with pytest.raises(NotImplementedError, match=FORWARD_MODE):
                call()


@graded
def test_r01_exported(grad: bool) -> None:
    x = torch.randn(8, 64)
    module = torch.export.export(nn.Sequential(layer_of("fp8")), (x,), strict=False).module()
    with torch.set_grad_enabled(grad):
        with pytest.raises(NotImplementedError, match=FORWARD_MODE):
            torch.func.jvp(module, (x,), (x,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=FORWARD_MODE):
            module(forward_ad.make_dual(x, x))


# ---- torch.export ----


@strictly
@pytest.mark.parametrize("recipe", CURRENT)
def test_r02_an_exported_layer_trains_as_eager(recipe: str, strict: bool) -> None:
    model, x = nn.Sequential(layer_of(recipe)), torch.randn(24, 64)
    want = trained(copy.deepcopy(model), x)
    module = torch.export.export(model, (x,), strict=strict).module()
    assert_all_same(trained(module, x), want)
    with torch.no_grad():
        assert_same_bits(module(x), want[0])


@pytest.mark.gpu
@strictly
@some
def test_r02_an_exported_layer_trains_as_eager_on_a_gpu(
    cuda: str, recipe: str, strict: bool
) -> None:
    if not nf.supported(recipe, cuda):
        pytest.skip("not here")
    model, x = nn.Sequential(layer_of(recipe, cuda)), torch.randn(24, 64, device=cuda)
    want = trained(copy.deepcopy(model), x)
    module = torch.export.export(model, (x,), strict=strict).module()
    assert_all_same(trained(module, x), want)


@some
def test_r02_saved_compiled_and_without_a_bias(recipe: str) -> None:
    """What torch.export.load reads, and torch.compile makes of it, has the gradients too."""
    model, x = nn.Sequential(layer_of(recipe, bias=False), nn.GELU()), torch.randn(2, 12, 64)
    program = torch.export.export(model, (x,), strict=False)
    want = trained(model, x)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_all_same(trained(torch.export.load(file).module(), x), want)
    module = program.run_decompositions().module()
    assert_all_same(trained(module, x), want)
    compiled = torch.compile(program.module(), backend="aot_eager", fullgraph=True)
    assert_all_same(trained(compiled, x), want)


@strictly
def test_r02_frozen_parameters_and_dtypes(strict: bool) -> None:
    """Gradients that nobody needs are None; the others have their tensors' dtypes."""
    for frozen in ("weight", "bias"):
        model = nn.Sequential(layer_of("fp8").bfloat16())
        getattr(model[0], frozen).requires_grad_(False)
        x = torch.randn(24, 64, dtype=torch.bfloat16)
        want = trained(copy.deepcopy(model), x)
        got = trained(torch.export.export(model, (x,), strict=strict).module(), x)
        assert [None if t is None else t.dtype for t in got].count(None) == 1
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_same_bits(a, b)


@strictly
def test_r02_delayed_scaling_is_refused_by_name(strict: bool) -> None:
    """With gradients; without, it is exported, and leaves no trace."""
    model, x = nn.Sequential(layer_of("fp8_delayed")), torch.randn(24, 64)
    with pytest.raises(NotImplementedError, match=HISTORY):
        torch.export.export(model, (x,), strict=strict)
    with torch.no_grad():
        module = torch.export.export(model, (x,), strict=strict).module()
        assert_same_bits(module(x), model(x))
    assert not model[0].scale_history.any()


def test_r02_double_backward_of_an_exported_layer_is_refused() -> None:
    model, x = nn.Sequential(layer_of("fp8")), torch.randn(24, 64, requires_grad=True)
    y = torch.export.export(model, (x,), strict=False).module()(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=TWICE):
        dx.sum().backward()


@some
def test_r02_the_operator_passes_torchs_checks(recipe: str) -> None:
    made = nf.RECIPES[recipe]
    layer, x = layer_of(recipe), torch.randn(24, 64, requires_grad=True)
    forward = made.forward_spec | made.save_x | made.keep_w
    backward = made.backward_spec | (W_MEASURED if made.keep_w else 0)
    arguments = (x, layer.weight, layer.bias, forward, backward, made.draws_dx)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    opcheck(torch.ops.narrowfloat.linear.default, arguments, test_utils=checks)


# ---- dynamic shapes ----


def same_at(program: Any, model: nn.Module, *sizes: int) -> None:
    module = program.module()
    for tokens in sizes:
        x = torch.randn(tokens, 64)
        assert_all_same(trained(module, x), trained(model, x))


@strictly
@pytest.mark.parametrize("recipe", CURRENT)
def test_r04_any_number_of_tokens(recipe: str, strict: bool) -> None:
    """Traced with few tokens or many, run with one, with others, and beyond a block of 128."""
    model = nn.Sequential(layer_of(recipe))
    dynamic = ({0: torch.export.Dim("tokens")},)
    for traced in (32, 300):
        program = torch.export.export(
            model, (torch.randn(traced, 64),), dynamic_shapes=dynamic, strict=strict
        )
        same_at(program, model, 1, 2, 128, 129, 300)


@strictly
@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "nvfp4_mxfp8_backward"])
def test_r04_two_dynamic_dimensions(recipe: str, strict: bool) -> None:
    model, auto = nn.Sequential(layer_of(recipe), nn.GELU()), torch.export.Dim.DYNAMIC
    x = torch.randn(2, 12, 64)
    module = torch.export.export(
        model, (x,), dynamic_shapes=({0: auto, 1: auto},), strict=strict
    ).module()
    for sizes in ((1, 1), (3, 1), (1, 129), (5, 70)):
        x = torch.randn(*sizes, 64)
        assert_all_same(trained(module, x), trained(model, x))


@strictly
def test_r04_without_gradients(strict: bool) -> None:
    """The export of delayed scaling too."""
    dynamic = ({0: torch.export.Dim("tokens")},)
    for recipe in ("fp8_delayed", "fp8_block"):
        model = nn.Sequential(layer_of(recipe))
        with torch.no_grad():
            module = torch.export.export(
                model, (torch.randn(32, 64),), dynamic_shapes=dynamic, strict=strict
            ).module()
            for tokens in (1, 300):
                x = torch.randn(tokens, 64)
                assert_same_bits(module(x), model(x))


@pytest.mark.parametrize("recipe", ["fp8_row", "fp8_block", "fp8_block_pow2", "mxfp8", "nvfp4"])
def test_r04_compiled_once_for_all_tokens(recipe: str) -> None:
    """What was exported is compiled with its dynamic shapes: one graph, forward and backward."""
    model = nn.Sequential(layer_of(recipe))
    dynamic = ({0: torch.export.Dim("tokens")},)
    program = torch.export.export(model, (torch.randn(32, 64),), dynamic_shapes=dynamic)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(program.module(), backend=backend, dynamic=True, fullgraph=True)
    for tokens in (32, 300, 129):
        x = torch.randn(tokens, 64)
        assert_all_same(trained(compiled, x), trained(model, x))
    assert len(graphs) == 1


# ---- torch.func ----


@pytest.mark.parametrize("recipe", CURRENT)
def test_r03_grad_is_eager(device: str, recipe: str) -> None:
    """torch.func.grad and vjp, of x and of the parameters."""
    if not nf.supported(recipe, device):
        pytest.skip("not here")
    layer, x = layer_of(recipe, device), torch.randn(24, 64, device=device)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    y, dx, db, dw = trained(layer, x)
    torch.manual_seed(5)
    got_x, got = torch.func.grad(loss, (0, 1))(x, parameters)
    assert_all_same([got_x, got["bias"], got["weight"]], [dx, db, dw])
    torch.manual_seed(5)
    assert_same_bits(torch.func.grad(loss)(x, parameters), dx)
    torch.manual_seed(5)
    value, vjp = torch.func.vjp(lambda w: loss(x, parameters | {"weight": w}), layer.weight)
    assert_same_bits(value, y.square().sum())
    assert_same_bits(vjp(torch.ones_like(value))[0], dw)


def test_r03_inside_reuse_weights_and_compiled() -> None:
    layer, x = layer_of("fp8"), torch.randn(24, 64)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    _, dx, db, dw = trained(layer, x)
    with nf.reuse_weights(layer):
        got = torch.func.grad(loss)(parameters, x)
        assert_all_same([got["bias"], got["weight"]], [db, dw])
        assert_same_bits(torch.func.grad(loss_of(layer))(x), dx)
    compiled = torch.compile(torch.func.grad(loss_of(layer)), backend="aot_eager", fullgraph=True)
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
        assert_same_bits(compiled(x), dx)
    else:  # Dynamo would give zeros
        with pytest.raises(Exception, match="expected torch 2.15 or newer for torch.func.grad"):
            compiled(x)


def test_r03_an_exported_module_too() -> None:
    model, x = nn.Sequential(layer_of("fp8")), torch.randn(24, 64)
    module = torch.export.export(model, (x,), strict=False).module()
    assert_same_bits(torch.func.grad(loss_of(module))(x), trained(model, x)[1])


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_r03_vmap_is_refused(device: str, recipe: str) -> None:
    """With gradients and without; over what has nothing to do with the layer it works."""
    layer, x = layer_of(recipe, device), torch.randn(3, 8, 64, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "vmap": lambda: torch.func.vmap(layer)(x),
        "of a gradient": lambda: torch.func.vmap(torch.func.grad(loss_of(layer)))(x),
        "gradient of": lambda: torch.func.grad(lambda x: torch.func.vmap(layer)(x).sum())(x),
        "jacrev": lambda: torch.func.jacrev(layer)(x[0]),
        "compiled": lambda: torch.compile(torch.func.vmap(layer), backend="aot_eager")(x),
    }
    for call in calls.values():
        with pytest.raises(NotImplementedError, match=VMAP):
            call()
    with torch.no_grad(), pytest.raises(NotImplementedError, match=VMAP):
        torch.func.vmap(layer)(x)
    scaled = torch.func.vmap(lambda factor: layer(x[0]) * factor)(torch.ones(2, device=device))
    assert_same_bits(scaled[1], layer(x[0]))


def test_r03_delayed_scaling_is_refused_by_name() -> None:
    layer, x = layer_of("fp8_delayed"), torch.randn(8, 64)
    for call in (
        lambda: torch.func.grad(loss_of(layer))(x),
        lambda: torch.func.vjp(layer, x),
        lambda: torch.func.jacrev(layer)(x),
        lambda: torch.func.vmap(layer)(x[None]),
    ):
        with pytest.raises(NotImplementedError, match=HISTORY):
            call()
    with torch.no_grad(), pytest.raises(NotImplementedError, match=VMAP):
        torch.func.vmap(layer)(x[None])


def test_r03_twice_is_refused() -> None:
    layer, x = layer_of("fp8"), torch.randn(8, 64)
    once = torch.func.grad(loss_of(layer))
    with pytest.raises(RuntimeError, match=TWICE):
        torch.func.grad(lambda x: once(x).sum())(x)
    for call in (torch.autograd.functional.hessian, torch.autograd.functional.hvp):
        arguments = (loss_of(layer), x) if call is torch.autograd.functional.hessian else None
        with pytest.raises(RuntimeError, match=TWICE):
            call(*(arguments or (loss_of(layer), x, x)))


def test_r03_batched_gradients_are_those_of_a_loop() -> None:
    """autograd's own is_grads_batched calls the backward once for each."""
    layer, x = layer_of("fp8"), torch.randn(8, 64)
    y, g = layer(x), torch.randn(3, 8, 48)
    (got,) = torch.autograd.grad(y, layer.weight, g, retain_graph=True, is_grads_batched=True)
    for each, one in zip(g, got, strict=True):
        (want,) = torch.autograd.grad(y, layer.weight, each, retain_graph=True)
        assert_same_bits(one, want)
