"""A layer in the place of nn.Linear: its outputs, its recipe, what traces, counts and nests around
it. One test for each sample of R-05 and R-07 to R-10 (CASES.md) and their kind."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_same_bits
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import narrowfloat as nf

NAMES = sorted(nf.RECIPES)
CURRENT = [name for name in NAMES if nf.RECIPES[name].delayed is None]
named = pytest.mark.parametrize("recipe", NAMES)


def skip_unless(recipe: Any, device: str) -> None:
    if not (answer := nf.supported(recipe, device)):
        pytest.skip(answer.reason)


def layer_of(recipe: Any = "fp8", device: str = "cpu") -> nf.Linear:
    return nf.Linear(64, 48, device=device, recipe=recipe)


def trained(call: nn.Module, x: Tensor) -> list[Tensor]:
    """y and all gradients, with one draw."""
    leaf = x.detach().clone().requires_grad_()
    call.zero_grad()
    torch.manual_seed(5)
    y = call(leaf)
    y.square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in call.parameters())]


def assert_all_same(got: list[Tensor], want: list[Tensor]) -> None:
    for at, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(a, b, f"result {at}")


# ---- results are tensors of their own ----

SHAPES = [(64,), (1, 64), (24, 64), (2, 12, 64), (0, 64)]


def added(y: Tensor) -> Tensor:
    y += 1
    return y


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda y: nn.functional.relu(y, inplace=True),
    "add": added,
    "mul": lambda y: y.mul_(3),
    "masked": lambda y: y.masked_fill_(y > 0, 0.5),
    "index": lambda y: y.__setitem__((..., 0), 0.25) or y,
}


class InPlace(nn.Module):
    def __init__(self, layer: nn.Module, change: Callable[[Tensor], Tensor], copy: bool) -> None:
        super().__init__()
        self.layer, self.change, self.copy = layer, change, copy

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.change(y.clone() if self.copy else y)


@named
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_r05_y_may_be_changed_in_place(device: str, recipe: str, shape: tuple[int, ...]) -> None:
    """As after a copy, bit for bit; with a gradient of x and without; and bf16, autocast."""
    skip_unless(recipe, device)
    x = torch.randn(shape, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        layer = layer_of(recipe, device).to(dtype)
        for change in IN_PLACE.values():
            want = trained(InPlace(copy.deepcopy(layer), change, True), x.to(dtype))
            got = trained(InPlace(copy.deepcopy(layer), change, False), x.to(dtype))
            assert_all_same(got, want)
            change(layer(x.to(dtype))).sum().backward()
            with torch.autocast(device, torch.bfloat16):
                change(layer(x)).sum().backward()
            with torch.no_grad():
                change(layer(x.to(dtype)))


@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "nvfp4"])
def test_r05_of_functions_too(device: str, recipe: str) -> None:
    a, b = torch.randn(2, 8, 64, device=device), torch.randn(64, 48, device=device)
    for requires in ((True, True), (False, True), (True, False), (False, False)):
        a, b = a.detach().requires_grad_(requires[0]), b.detach().requires_grad_(requires[1])
        made = [
            nf.matmul(a, b, recipe),
            nf.linear(a, b.t(), None, recipe),
            nf.fp4_matmul(a, b),
            nf.FP4MatMulFunction.apply(a, b),
            *nf.FP4QuantizeFunction.apply(a),
            nf.FP4DequantizeFunction.apply(*nf.FP4QuantizeFunction.apply(a)),
            nf.quantize(a, "fp8_block").dequantize(),
            nf.fp8_linear_forward(a, b.t()),
        ]
        for result in made:
            result += 1
            if result.requires_grad:
                result.sum().backward()
        if recipe == "fp8":
            assert not any(t._is_view() for t in made[:5])


@named
def test_r05_gradients_may_be_changed_in_place(device: str, recipe: str) -> None:
    """Hooks that write to what they are given; gradients that are accumulated and zeroed."""
    skip_unless(recipe, device)
    first, layer = nn.Linear(64, 64, device=device), layer_of(recipe, device)
    x = torch.randn(2, 12, 64, device=device)
    results = []
    for in_place in (True, False):
        torch.manual_seed(5)
        leaf = x.clone().requires_grad_()
        hidden = first(leaf)
        hidden.register_hook(lambda g, at=in_place: g.mul_(2) if at else g * 2)
        y = copy.deepcopy(layer)(hidden)
        y.register_hook(lambda g, at=in_place: g.clamp_(-1, 1) if at else g.clamp(-1, 1))
        y.square().sum().backward()
        results.append([leaf.grad, first.weight.grad.clone()])
        first.zero_grad()
    assert_all_same(*results)
    leaf = x.clone().requires_grad_()
    layer(leaf).sum().backward()
    assert not leaf.grad._is_view()
    leaf.grad.zero_()
    leaf.grad.detach_()
    for parameter in layer.parameters():
        parameter.grad.detach_()
    layer.zero_grad(set_to_none=False)
    layer(leaf).sum().backward()


def test_r05_transformed_exported_and_compiled() -> None:
    layer, x = layer_of(), torch.randn(24, 64)
    model = nn.Sequential(layer, nn.ReLU(inplace=True))
    want = trained(nn.Sequential(layer, nn.ReLU()), x)
    dx = torch.func.grad(lambda x: model(x).square().sum())(x)
    assert_same_bits(dx, want[1])
    for strict in (True, False):
        assert_all_same(trained(torch.export.export(model, (x,), strict=strict).module(), x), want)
    assert_all_same(trained(torch.compile(model, backend="aot_eager", fullgraph=True), x), want)


# ---- torch.fx ----


class Block(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make(), nn.GELU(), nn.Sequential(make())])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + 1
        return x


def targets(traced: fx.GraphModule, op: str) -> list[Any]:
    return [node.target for node in traced.graph.nodes if node.op == op]


class Plain(nf.Linear):
    """A subclass that changes nothing."""


class Doubled(nf.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@named
@pytest.mark.parametrize("of", [nf.Linear, nf.FP8Linear, nf.FP4Linear, Plain])
def test_r07_a_layer_is_a_leaf(device: str, recipe: str, of: type[nf.Linear]) -> None:
    """As nn.Linear is: one node for its module, and what is traced trains as the model does."""
    skip_unless(recipe, device)
    model = Block(lambda: of(64, 64, device=device, recipe=recipe))
    like = fx.symbolic_trace(Block(lambda: nn.Linear(64, 64)))
    with nf.reuse_weights(model):
        traced = fx.symbolic_trace(copy.deepcopy(model))
    assert str(traced.graph) == str(like.graph)
    assert targets(traced, "call_module") == ["layers.0", "layers.1", "layers.2.0"]
    x = torch.randn(24, 64, device=device)
    want = trained(copy.deepcopy(model), x)
    again = copy.deepcopy(fx.symbolic_trace(traced))
    traced.layers.get_submodule("0").recipe = recipe  # the module itself is called
    assert_all_same(trained(traced, x), want)
    assert_all_same(trained(again, x), want)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
def test_r07_packed_weights_are_leaves_too(recipe: str) -> None:
    model = Block(lambda: nf.PackedFP4Linear.from_linear(nn.Linear(64, 64), recipe))
    traced, x = fx.symbolic_trace(model), torch.randn(24, 64)
    assert targets(traced, "call_module") == ["layers.0", "layers.1", "layers.2.0"]
    assert_same_bits(traced(x), model(x))
    model.layers[0].register_forward_hook(lambda m, x, y: y + 1)
    for refused in (model, model.layers[0]):
        with pytest.raises(NotImplementedError, match="PackedFP4Linear: .* torch.fx traces"):
            fx.symbolic_trace(refused)


def test_r07_what_surrounds_a_forward_counts_once(device: str) -> None:
    """A subclass's own forward and hooks are traced around the function, not also run in a leaf."""
    hooked, x = Plain(64, 64, device=device), torch.randn(24, 64, device=device)
    hooked.register_forward_hook(lambda m, x, y: y * 3)
    before = Plain(64, 64, device=device)
    before.register_forward_pre_hook(lambda m, x: x[0] * 3)
    for layer in (Doubled(64, 64, device=device), hooked, before):
        for model in (nn.Sequential(nn.GELU(), layer), layer):
            traced = fx.symbolic_trace(copy.deepcopy(model))
            assert nf.linear in targets(traced, "call_function")
            if model is not layer or layer.__class__ is Doubled:  # fx leaves the root's hooks out
                assert_all_same(trained(traced, x), trained(model, x))
    delayed = Doubled(64, 64, recipe="fp8_delayed")
    with pytest.raises(NotImplementedError, match="current scaling .* got fp8_delayed"):
        fx.symbolic_trace(nn.Sequential(delayed))


class Functions(nn.Module):
    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.weight, self.recipe = nn.Parameter(torch.randn(64, 64)), recipe

    def forward(self, x: Tensor) -> Tensor:
        y = nf.linear(x, self.weight, recipe=self.recipe)
        return nf.matmul(nf.matmul(y, self.weight, self.recipe), x.t(), self.recipe)


@pytest.mark.parametrize("recipe", CURRENT)
def test_r07_functions_are_nodes(recipe: str) -> None:
    for given in (recipe, nf.RECIPES[recipe]):
        model, x = Functions(given), torch.randn(32, 64)
        traced = fx.symbolic_trace(model)
        assert targets(traced, "call_function") == [nf.linear, nf.matmul, nf.matmul]
        assert repr(recipe) in traced.code
        assert_all_same(trained(traced, x), trained(model, x))


def test_r07_a_recipe_without_a_name_is_refused() -> None:
    mine = nf.mixed_recipe("mine", "fp8", "bf16", "fp8")
    for model in (Functions(mine), Doubled(64, 64, recipe=mine)):
        with pytest.raises(ValueError, match="expected a recipe out of RECIPES under torch.fx"):
            fx.symbolic_trace(model)
    traced = fx.symbolic_trace(nn.Sequential(nf.Linear(64, 64, recipe=mine)))  # a leaf
    assert targets(traced, "call_module") == ["0"]


# ---- tensors of other kinds ----


def jagged(*lengths: int, device: str = "cpu", width: int = 64) -> Tensor:
    rows = [torch.randn(n, width, device=device) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, device=device)


@named
def test_r09_jagged_tensors(device: str, recipe: str) -> None:
    """y is as ragged as x, with the bits and gradients of the rows taken together."""
    skip_unless(recipe, device)
    layer = layer_of(recipe, device)
    plain = nn.Linear(64, 48, device=device)
    x = jagged(3, 17, 1, device=device)
    want = trained(copy.deepcopy(layer), x.values())
    leaf = x.detach().requires_grad_()
    torch.manual_seed(5)
    y = layer(leaf)
    assert y.shape == plain(leaf).shape  # the ragged size is x's
    y.values().square().sum().backward()
    got = [y.values().detach(), leaf.grad.values(), *(p.grad for p in layer.parameters())]
    assert_all_same(got, want)
    both = nn.Sequential(copy.deepcopy(layer), nn.GELU(), nn.Linear(48, 64, device=device))(x) + x
    assert both.shape == x.shape
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    if nf.RECIPES[recipe].delayed is None:
        made = nf.matmul(x, layer.weight.t(), recipe)
        assert_same_bits(made.values(), nf.matmul(x.values(), layer.weight.t(), recipe))


def test_r09_jagged_tensors_elsewhere(device: str) -> None:
    x = jagged(3, 17, 1, device=device)
    packed = nf.PackedFP4Linear.from_linear(nn.Linear(64, 48, device=device))
    assert_same_bits(packed(x).values(), packed(x.values()))
    layer = layer_of(device=device)
    heads = torch.nested.nested_tensor_from_jagged(
        torch.randn(21, 5, 64, device=device), x.offsets()
    )
    assert_same_bits(layer(heads).values(), layer(heads.values()))
    if device == "cpu":
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert_same_bits(compiled(x).values(), layer(x).values())
    starts, ends = torch.tensor([0, 1, 2], device=device), torch.tensor([3, 2, 5], device=device)
    holes = torch.nested.narrow(
        torch.randn(3, 8, 64, device=device), 1, starts, ends - starts, layout=torch.jagged
    )
    for each in (layer, packed):
        with pytest.raises(ValueError, match=r"without holes, .* x.contiguous\(\)"):
            each(holes)
        with pytest.raises(ValueError, match="whose last dimension is ragged"):
            each(x.transpose(1, 2))
    assert layer(holes.contiguous()).values().shape == (7, 48)


class Wrapper(Tensor):
    """A tensor that knows nothing of our operators."""

    @staticmethod
    def __new__(cls, t: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype, device=t.device)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if "narrowfloat" in str(func) else args[0]


OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "coo": (lambda t: t.to_sparse(), r"layout torch.sparse_coo \(give it x.to_dense\(\)\)"),
    "csr": (lambda t: t.to_sparse_csr(), r"layout torch.sparse_csr \(give it x.to_dense\(\)\)"),
    "mkldnn": (lambda t: t.to_mkldnn(), r"layout torch._mkldnn \(give it x.to_dense\(\)\)"),
    "strided": (
        lambda t: torch.nested.as_nested_tensor([t, t]),
        "make it with layout=torch.jagged",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "mxfp8", "nvfp4"])
def test_r09_others_are_refused_by_name(recipe: str, kind: str) -> None:
    """As x and as w, with gradients and without, in layers and functions."""
    make, text = OTHERS[kind]
    x, layer = torch.randn(24, 64), layer_of(recipe)
    packed = nf.PackedFP4Linear.from_linear(nn.Linear(64, 48))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for call in (
                lambda: layer(make(x)),
                lambda: nf.linear(make(x), layer.weight, None, recipe),
                lambda: nf.matmul(make(x), layer.weight.t(), recipe),
            ):
                with pytest.raises(
                    NotImplementedError, match=f"^(linear|matmul): expected [xa] as .*{text}"
                ):
                    call()
            if kind != "strided":
                with pytest.raises(NotImplementedError, match=f"^linear: expected w as .*{text}"):
                    nf.linear(x, make(layer.weight.detach()), None, recipe)
            with pytest.raises(NotImplementedError, match=f"^quantize: expected x as .*{text}"):
                nf.quantize(make(x), "fp8_row")
    if kind == "coo":
        with torch.no_grad(), pytest.raises(NotImplementedError, match="^fp4_weight_matmul: expe"):
            packed(make(x))


def test_r09_a_subclass_of_somebody_is_refused_by_name() -> None:
    layer = layer_of()
    with (
        torch.no_grad(),
        pytest.raises(
            NotImplementedError, match="^linear: expected x as a plain tensor, got a Wrapper "
        ),
    ):
        layer(Wrapper(torch.randn(24, 64)))
    x = torch.randn(24, 64)
    assert_same_bits(layer(nn.Parameter(x)), layer(x))


def test_r08_sharded_tensors_are_refused_by_name() -> None:
    """DTensors, until the operators have a sharding strategy: x, w, or both; no raw text."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            x, layer = torch.randn(24, 64), layer_of()
            spread = distribute_tensor(x, mesh, [Shard(0)])
            w = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    for a, b, name in ((spread, w, "x"), (spread, layer.weight, "x"), (x, w, "w")):
                        with pytest.raises(
                            NotImplementedError,
                            match=f"^linear: expected {name} as .* got a DTensor, sharded as .*"
                            r"\(the operators have no sharding strategy: .* x.to_local\(\)",
                        ):
                            nf.linear(a, b)
            assert_same_bits(layer(spread.to_local()), layer(x))
        finally:
            dist.destroy_process_group()


# ---- who counts and who saves ----


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def train_call(layer: nn.Module, x: Tensor) -> Callable[[], Any]:
    return lambda: layer(x).square().sum().backward()


@named
@pytest.mark.parametrize("bias", [True, False])
def test_r08_flops_are_nn_linears(device: str, recipe: str, bias: bool) -> None:
    """Forward, backward, with each set of gradients that is asked for."""
    skip_unless(recipe, device)
    layer = nf.Linear(64, 48, bias, device=device, recipe=recipe)
    plain = nn.Linear(64, 48, bias, device=device)
    for shape in ((24, 64), (2, 12, 64)):
        for requires in (True, False):
            x = torch.randn(shape, device=device, requires_grad=requires)
            assert flops(lambda x=x: layer(x)) == flops(lambda x=x: plain(x)) == 2 * 24 * 64 * 48
            want = flops(train_call(plain, x))
            assert want == (3 if requires else 2) * 2 * 24 * 64 * 48
            assert flops(train_call(layer, x)) == want
            with nf.reuse_weights(layer):
                layer(x)
                assert flops(train_call(layer, x)) == want
    frozen = copy.deepcopy(layer).requires_grad_(False)
    x = torch.randn(24, 64, device=device, requires_grad=True)
    assert flops(train_call(frozen, x)) == 2 * 2 * 24 * 64 * 48


@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "nvfp4", "fp8_delayed"])
def test_r08_compiled_exported_transformed(recipe: str) -> None:
    layer, plain = layer_of(recipe), nn.Linear(64, 48)
    x = torch.randn(24, 64, requires_grad=True)

    def compiled(m: nn.Module) -> nn.Module:
        call = torch.compile(m, backend="aot_eager")
        train_call(call, x)()
        return call

    assert flops(train_call(compiled(layer), x)) == flops(train_call(compiled(plain), x)) > 0
    if recipe == "fp8_delayed":
        return
    want = flops(train_call(plain, x))
    assert flops(train_call(torch.export.export(layer, (x,)).module(), x)) == want
    w = layer.weight.detach()  # functions: the counter's hooks on modules refuse torch.func
    dw = torch.func.grad(lambda w: nf.linear(x.detach(), w, None, recipe).sum())
    assert flops(lambda: dw(w)) == 2 * 2 * 24 * 64 * 48


def test_r08_of_the_other_operators(device: str) -> None:
    x, w = torch.randn(24, 64, device=device), torch.randn(48, 64, device=device)
    one, want = torch.ones((), device=device), 2 * 24 * 64 * 48
    a, b = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    packed = nf.PackedFP4Linear.from_linear(nn.Linear(64, 48, device=device))
    out, accumulate = torch.zeros(24, 48, device=device), nf.ops.scaled_mm_accumulate_op
    calls: list[Callable[[], Any]] = [
        lambda: nf.fp8_mm(a, b),
        lambda: accumulate(out, a, b, one, one, False),
        lambda: packed(x),
        lambda: nf.matmul(x, w.t()),
        lambda: nf.fp4_matmul(x, w.t()),
        lambda: nf.fp4_matmul_backward_A(out, w.t()),
        lambda: nf.fp4_matmul_backward_B(x, out),
        lambda: nf.fp8_linear_backward(out, x, w, (True, False, True)),
    ]
    for call in calls:
        with torch.no_grad():
            assert flops(call) == want


def test_r08_every_operator_that_multiplies_is_there() -> None:
    names = {op._opname for op in nf.GEMM_OPS}
    defined = {op.split("::")[1] for op in torch._C._dispatch_get_all_op_names()
               if op.startswith("narrowfloat::")}  # fmt: skip
    assert defined - names == {"quantize"}
    assert all(isinstance(op, torch._ops.OpOverload) for op in nf.GEMM_OPS)


@named
@pytest.mark.parametrize("as_list", [True, False])
def test_r08_a_selective_checkpoint_saves_them(device: str, recipe: str, as_list: bool) -> None:
    """Nothing is multiplied twice, and the gradients are those without a checkpoint."""
    skip_unless(recipe, device)
    layer = layer_of(recipe, device)
    model = nn.Sequential(layer, nn.GELU(), nn.Linear(48, 48, device=device))
    x = torch.randn(24, 64, device=device)
    want = trained(copy.deepcopy(model), x)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in nf.GEMM_OPS
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    class Checkpointed(nn.Module):
        def __init__(self, saved: Any) -> None:
            super().__init__()
            self.model, self.saved = copy.deepcopy(model), saved

        def forward(self, x: Tensor) -> Tensor:
            context = partial(create_selective_checkpoint_contexts, self.saved)
            return checkpoint(self.model, x, use_reentrant=False, context_fn=context)

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            made.append(func)
            return func(*args, **(kwargs or {}))

    counts = []
    for saved in (list(nf.GEMM_OPS) if as_list else policy, [torch.ops.aten.mm.default]):
        made: list[Any] = []
        with Calls():
            got = trained(Checkpointed(saved), x)
        assert_all_same(got, want)
        counts.append(sum(op in nf.GEMM_OPS for op in made))
    assert counts == [2, 3]  # forward and backward; and once more


# ---- the recipe of a layer ----


@named
@pytest.mark.parametrize("of", [nf.Linear, nf.FP8Linear, nf.FP4Linear])
def test_r10_a_name_is_taken(device: str, recipe: str, of: type[nf.Linear]) -> None:
    """What is set later is as if it were given first, in copies too."""
    skip_unless(recipe, device)
    want = of(64, 48, device=device, recipe=recipe)
    x = torch.randn(24, 64, device=device)
    layer = of(64, 48, device=device)
    layer.load_state_dict(want.state_dict())
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        each.recipe = recipe
        assert each.recipe is nf.RECIPES[recipe]
        assert (each.scale_history is None) == (each.recipe.delayed is None)
        with nf.reuse_weights(each):
            got = trained(each, x)
        assert_all_same(got, trained(copy.deepcopy(want), x))


@pytest.mark.parametrize("wrong", ["fp9", "mxfp9", "", None, 8, nf.Gemm(), "bf16"])
def test_r10_others_are_refused_where_they_are_set(wrong: Any) -> None:
    """With the names there are; the layer stays as it was."""
    for layer in (
        layer_of(),
        nf.FP4Linear(64, 48),
        copy.deepcopy(layer_of("fp8_delayed")),
        pickle.loads(pickle.dumps(layer_of())),
    ):
        before, history = layer.recipe, layer.scale_history
        with pytest.raises(ValueError, match="expected a Recipe or a name out of .*'mxfp8'"):
            layer.recipe = wrong
        assert layer.recipe is before
        assert layer.scale_history is history
        assert f"recipe={before}" in repr(layer)


def test_r10_histories_begin_and_end(device: str) -> None:
    layer, x = layer_of(device=device), torch.randn(8, 64, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)

    def step() -> int:
        layer(x).sum().backward()
        optimizer.step()
        return int((layer.scale_history[0, 4:] != 0).sum())

    layer.recipe = "fp8_delayed"
    assert [step(), step()] == [1, 2]
    history = layer.scale_history
    layer.recipe = layer.recipe  # nothing new
    layer.recipe = copy.deepcopy(layer.recipe)
    assert layer.scale_history is history
    layer.recipe = nf.Recipe("latest", delayed=nf.Delayed(use="latest"))
    assert step() == 1
    layer.recipe = nf.Recipe("longer", delayed=nf.Delayed(length=40))
    assert (step(), layer.scale_history.shape) == (1, (3, 44))
    layer.recipe = "fp8"
    assert layer.scale_history is None
    with pytest.raises(ValueError, match="expected a recipe with delayed scaling, got fp8"):
        layer.history()
    layer(x).sum().backward()
    optimizer.step()
    layer.recipe = "fp8_delayed"
    assert not layer.scale_history.any()


def test_r10_a_cached_weight_is_let_go(device: str) -> None:
    """Inside reuse_weights, also where the new recipe caches nothing."""
    layer, x = layer_of(device=device), torch.randn(24, 64, device=device)
    for recipe in ("fp8_row", "nvfp4", "fp8_delayed", "fp8"):
        if not nf.supported(recipe, device):
            continue
        with nf.reuse_weights(layer):
            layer.recipe = "fp8"
            layer(x)
            assert len(layer.weight_cache._cached) == 1
            layer.recipe = "fp8"
            assert len(layer.weight_cache._cached) == 1
            layer.recipe = recipe
            assert len(layer.weight_cache._cached) == (recipe == "fp8")
            got = trained(layer, x)
        want = nf.Linear(64, 48, device=device, recipe=recipe)
        want.load_state_dict(layer.state_dict())
        assert_all_same(got, trained(want, x))


def test_r10_compiled_code_sees_the_change() -> None:
    layer, x = layer_of(), torch.randn(24, 64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for recipe in ("fp8", "mxfp8", "fp8_delayed", "fp8"):
        layer.recipe = recipe
        want = nf.linear(x, layer.weight, layer.bias, recipe)
        assert_same_bits(compiled(x).detach(), want.detach())


def test_r10_packed_weights_keep_theirs() -> None:
    packed = nf.PackedFP4Linear.from_linear(nn.Linear(64, 48), "mxfp4")
    packed.recipe = "mxfp4"
    for wrong, text in (("nvfp4", "that its weights are packed in, mxfp4"), ("fp8", "an FP4 rec")):
        with pytest.raises(ValueError, match=text):
            packed.recipe = wrong
    assert packed.recipe is nf.RECIPES["mxfp4"]
    assert copy.deepcopy(packed).recipe == packed.recipe


def test_r10_reading_is_an_attribute() -> None:
    """No property: the hot path reads the instance's dictionary."""
    layer = layer_of("mxfp8")
    assert vars(layer)["recipe"] is nf.RECIPES["mxfp8"]
    assert not isinstance(vars(nf.Linear)["recipe"], property)
