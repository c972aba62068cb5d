"""What convert() and revert() leave whole: other recipes, the way back, parents that read weights,
dtypes, and packing all layers or none."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import assert_same_bits, relative_error, skip_where_it_does_not_run
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode

import narrowfloat as nf
from narrowfloat.convert import packing

RECIPES = list(nf.RECIPES)
FP4 = [name for name in RECIPES if name.startswith(("nvfp4", "mxfp4"))]


def mlp(device: str = "cpu", n: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32, device=device) for _ in range(n)))


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        name: (type(m), id(m), {k: id(v) for k, v in vars(m).items()}, list(m._buffers))
        for name, m in model.named_modules()
    }


# ---- another recipe, and the way back ----


@pytest.mark.parametrize("second", RECIPES)
@pytest.mark.parametrize("first", ["fp8", "fp8_delayed", "nvfp4"])
def test_r11_layers_of_ours_take_another_recipe(device: str, first: str, second: str) -> None:
    """R-11: as if they had been converted to it at once, with histories begun or forgotten."""
    skip_where_it_does_not_run(first, device)
    skip_where_it_does_not_run(second, device)
    model, x = mlp(device), torch.randn(64, 32, device=device)
    nf.convert(model, first, head=True, keep_last=0)
    report = nf.convert(model, second, head=True, keep_last=0)
    assert report.converted == ([] if first == second else ["0", "1", "2"])
    assert report.share == 1
    for layer in model:
        assert type(layer) is nf.Linear and layer.recipe is nf.RECIPES[second]
        assert (layer.scale_history is not None) == (second == "fp8_delayed")
        assert_same_bits(layer(x), nf.linear(x, layer.weight, layer.bias, second))
        layer(x).sum().backward()


def test_r11_the_rules_hold_for_layers_of_ours_too() -> None:
    """R-11: what would be left in the new recipe stays in the one it has, and the report says so;
    layers that were made by their names of a recipe are plain Linear in another."""
    model = nn.Sequential(nf.FP8Linear(32, 32), nf.FP4Linear(32, 32), *mlp(n=4))
    nf.convert(model, "fp8", head=True)
    assert [type(m) for m in model] == [nf.FP8Linear] + [nf.Linear] * 5
    report = nf.convert(model, "nvfp4")
    assert report.converted == ["0", "1", "2", "3", "4"]
    assert dict(report.left)["5"].endswith("(head=True converts it); it stays in fp8")
    assert {type(m) for m in model} == {nf.Linear}
    assert [str(m.recipe) for m in model] == ["nvfp4"] * 5 + ["fp8"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_r11_revert_is_as_before(device: str, recipe: str) -> None:
    """R-11: the same modules, parameters, hooks, state and bits as before convert()."""
    skip_where_it_does_not_run(recipe, device)
    model, x = mlp(device), torch.randn(64, 32, device=device)
    model[1].eval()
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].weight.register_hook(lambda g: seen.append("gradient"))
    before, want = state_of(model), model(x)
    seen.clear()
    nf.convert(model, recipe, head=True, keep_last=0)
    with nf.reuse_weights(model):
        model(x).sum().backward()
    nf.step(model)
    assert nf.revert(model) == ["0", "1", "2"]
    assert state_of(model) == before
    assert_same_bits(model(x), want)
    assert seen == ["forward", "gradient", "forward"]
    assert {type(m) for m in copy.deepcopy(model)} == {nn.Linear}
    assert nf.convert(model, recipe, head=True, keep_last=0).converted == ["0", "1", "2"]


def test_r11_revert_some() -> None:
    model = mlp()
    nf.convert(model, head=True)
    assert nf.revert(model, "0") == ["0"]
    assert nf.revert(model, lambda name, module: name == "2") == ["2"]
    assert [type(m) for m in model] == [nn.Linear, nf.Linear, nn.Linear]
    assert nf.revert(model[1]) == [""] and type(model[1]) is nn.Linear


class Own(nf.Linear):
    pass


@pytest.mark.parametrize(
    "stuck",
    [
        lambda: nf.PackedFP4Linear(32, 32),
        lambda: Own(32, 32),
        lambda: parametrizations.weight_norm(nf.Linear(32, 32)),
    ],
    ids=["packed", "own class", "parametrized"],
)
def test_r11_revert_names_what_has_no_way_back(stuck: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nf.Linear(32, 32), stuck())
    before = state_of(model)
    with pytest.raises(ValueError, match="expected layers that convert.. made .*got 1 "):
        nf.revert(model)
    assert state_of(model) == before
    assert nf.revert(model, "0") == ["0"]


def test_r11_revert_of_nothing() -> None:
    with pytest.raises(ValueError, match="revert: expected a model with narrowfloat layers, got L"):
        nf.revert(nn.Linear(8, 8))
    model = mlp()
    nf.convert(model)
    with pytest.raises(ValueError, match="without any that the filter matches"):
        nf.revert(model, "nothing")


# ---- dtypes ----

OTHERS = [torch.double, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("options", [{}, {"inference": True, "keep_last": 0}], ids=str)
def test_r12_other_dtypes_are_left(dtype: torch.dtype, part: str, options: Any) -> None:
    """R-12: a layer with a weight or bias that no recipe quantizes, with the reason."""
    model = mlp()
    old = getattr(model[0], part)
    setattr(model[0], part, nn.Parameter(old.detach().to(dtype), requires_grad=False))
    report = nf.convert(model, "nvfp4", filter="[01]", **({"keep_last": 0} | options))
    assert report.converted == ["1"] and type(model[0]) is nn.Linear
    assert f"its {part} is in {dtype}" in dict(report.left)["0"]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["x", "w", "bias"])
@pytest.mark.parametrize("dtype", OTHERS[:3], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_r12_used_directly_it_is_a_type_error(
    device: str, recipe: str, dtype: torch.dtype, name: str, grad: bool
) -> None:
    """R-12: with gradients (which raised KeyError) and without, in nf.linear and nf.Linear."""
    skip_where_it_does_not_run(recipe, device)
    shapes = {"x": (16, 32), "w": (48, 32), "bias": (48,)}
    t = {n: torch.randn(*shape, device=device) for n, shape in shapes.items()}
    t[name] = t[name].to(dtype)
    layer = nf.Linear(32, 48, device=device, recipe=recipe)
    quantized = dtype == torch.float8_e4m3fn
    layer.weight = nn.Parameter(t["w"], requires_grad=name != "w" or not quantized)
    layer.bias = nn.Parameter(t["bias"], requires_grad=name != "bias" or not quantized)
    for call in (
        lambda: nf.linear(t["x"], t["w"], t["bias"], recipe),
        lambda: layer(t["x"]),
        lambda: nf.linear(t["x"], layer.weight, layer.bias, recipe),
    ):
        with torch.set_grad_enabled(grad), pytest.raises(TypeError) as e:
            call()
        assert f"expected {name} in float32, bfloat16 or float16" in str(e.value)
        assert str(dtype).removeprefix("torch.") in str(e.value)


def test_r12_a_foreign_tensor_class_is_left() -> None:
    """A sibling of R-12: weights that another library has quantized say bf16 and are none."""

    class Quantized(Tensor):
        @staticmethod
        def __new__(cls: Any) -> Any:
            return Tensor._make_wrapper_subclass(cls, (32, 32), dtype=torch.bfloat16)

        @classmethod
        def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return Quantized()

    model = mlp()
    model[0].weight = nn.Parameter(Quantized(), requires_grad=False)
    model[1].weight = nn.Parameter(torch.zeros(32, 32).to_sparse(), requires_grad=False)
    left = dict(nf.plan(model, head=True).left)
    assert "its weight is a Quantized" in left["0"] and "torch.sparse_coo" in left["1"]


# ---- parents that read a child's weight ----


def encoder(device: str, layers: int = 2, **options: Any) -> nn.TransformerEncoder:
    options = {"batch_first": True, "dropout": 0.0, "device": device} | options
    layer = nn.TransformerEncoderLayer(32, 2, 64, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.TransformerEncoder(layer, layers)


class Calls(TorchDispatchMode):
    """Counts the calls of this package's operators; a hook would switch the fast path off."""

    of_ours = 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of_ours += f.namespace == "narrowfloat"
        return f(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [{}, {"activation": "gelu", "norm_first": True}], ids=str)
def test_r06_an_encoder_layer_in_eval_mode_is_as_in_train_mode(
    device: str, recipe: str, options: Any
) -> None:
    """R-06: linear1 and linear2 run in the recipe in both modes, and come back to the fast path."""
    skip_where_it_does_not_run(recipe, device)
    model = encoder(device, **options)
    plain = copy.deepcopy(model).eval()
    x = torch.randn(4, 16, 32, device=device)
    before = state_of(model)
    report = nf.convert(model, recipe, head=True, keep_last=0)
    names = [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    assert report.converted == names
    out = dict(report.left)
    assert "layers.0.self_attn (MultiheadAttention) computes" in out["layers.0.self_attn.out_proj"]
    with torch.no_grad():
        twin = pickle.loads(pickle.dumps(model))
        for one in (model, copy.deepcopy(model), twin):
            for mode in (True, False):
                with Calls() as calls:
                    one.train(mode)(x)
                assert calls.of_ours == 4
        nf.revert(model.train())
        assert state_of(model) == before
        with Calls() as calls:
            assert_same_bits(model.eval()(x), plain(x))
        assert calls.of_ours == 0


def test_r06_padding_makes_no_nested_tensors(device: str) -> None:
    """R-06: an encoder hands them to its layers in eval mode, the first of which may be ours or
    not."""
    x = torch.randn(3, 16, 32, device=device)
    padding = torch.arange(16, device=device).expand(3, 16) >= torch.tensor(
        [[16], [9], [4]], device=device
    )
    for pattern in ("layers.0.*", "layers.1.*", "*"):
        model = encoder(device)
        nf.convert(model, filter=pattern)
        with torch.no_grad():
            trained = model.train()(x, src_key_padding_mask=padding)
            y = model.eval()(x, src_key_padding_mask=padding)
        seen = ~padding
        assert relative_error(y[seen], trained[seen]) < 0.01


@pytest.mark.parametrize("recipe", FP4)
def test_r06_packed_layers_in_an_encoder(device: str, recipe: str) -> None:
    """R-06: which ended with AttributeError: weight."""
    model = encoder(device).eval()
    x = torch.randn(4, 16, 32, device=device)
    padding = torch.zeros(4, 16, dtype=torch.bool, device=device)
    with torch.no_grad():
        want = model(x)
        report = nf.convert(model, recipe, head=True, keep_last=0, inference=True)
        assert len(report.converted) == 4
        assert isinstance(model.layers[0].linear1, nf.PackedFP4Linear)
        for mask in (None, padding):
            with Calls() as calls:
                assert relative_error(model(x, src_key_padding_mask=mask), want) < 0.2
            assert calls.of_ours == 4


class Reads(nn.Module):
    """Parents that read the weight of `a`, and not of `b`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.inner = nn.Linear(32, 32), nn.Linear(32, 32), nn.ModuleDict()
        self.c = nn.Linear(32, 32)


class InForward(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.a.weight, self.a.bias) + self.b(x)


class InAMethod(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return x @ self.scaled.t() + self.b(x)

    @property
    def scaled(self) -> Tensor:
        return self.a.weight * 2


class InAClosure(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda t: t @ self.a.weight.t())(x) + self.b(x)


class Inherits(InForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class OfAGrandchild(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"d": nn.Linear(32, 32)})
        self.inner.d, self.a = self.a, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.inner.d.weight + self.b(x)


class AboutIt(Reads):
    """What says nothing of the values: a dtype is asked for before a cast, as in transformers."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.a.weight, Tensor) and self.a.weight.device == x.device:
            x = x.to(self.a.weight.dtype)
        return self.a(x) + self.b(x)

    def reset(self) -> None:
        nn.init.zeros_(self.a.weight)


READERS = [InForward, InAMethod, InAClosure, Inherits, OfAGrandchild]


@pytest.mark.parametrize("cls", READERS)
def test_r06_parents_that_compute_with_a_childs_weight(cls: type[Reads]) -> None:
    """R-06: the layer is left, with the name of who reads it; an option converts it."""
    model = nn.ModuleDict({"m": cls()})
    report = nf.convert(model, head=True)
    name = "m.inner.d" if cls is OfAGrandchild else "m.a"
    assert dict(report.left) == {
        name: f"m ({cls.__name__}) computes with its weight itself (take='reader' converts it)"
    }
    assert nf.convert(model, head=True, take="reader").converted == [name]


def test_r06_what_asks_for_a_dtype_reads_no_values() -> None:
    """R-06: such a layer is converted; packed it would have no weight to ask, and it is left."""
    model = AboutIt()
    assert nf.plan(model, head=True).left == []
    report = nf.convert(model, "nvfp4", head=True, inference=True, take="reader")
    assert report.converted == ["b", "c"]
    assert "the model itself (AboutIt) reads its weight" in dict(report.left)["a"]


def test_r06_torchs_own_readers() -> None:
    """R-06: of torch.nn, besides the encoder: attention, and the loss that has a linear."""
    for cls, name, arguments in (
        (nn.MultiheadAttention, "out_proj", (32, 2)),
        (getattr(nn, "LinearCrossEntropyLoss", None), "linear", (32, 48)),
        (nn.TransformerDecoderLayer, "self_attn.out_proj", (32, 2, 64)),
    ):
        if cls is not None:
            left = dict(nf.plan(cls(*arguments), head=True).left)
            assert "computes with its weight itself" in left[name]


def test_r06_packed_layers_say_that_they_have_no_weight() -> None:
    layer = nf.PackedFP4Linear.from_linear(nn.Linear(32, 32))
    assert not hasattr(layer, "weight") and layer.bias is not None
    with pytest.raises(AttributeError, match=r"'weight': the weight is packed .*dequantize\(\)"):
        _ = layer.weight
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = layer.other


# ---- packing, all or none ----


def packs(model: nn.Module, **options: Any) -> nf.Report:
    return nf.convert(
        model, "nvfp4", **({"inference": True, "keep_last": 0, "head": True} | options)
    )


@pytest.mark.parametrize("at", [0, 1, 2])
def test_r19_a_layer_that_fails_leaves_the_model(monkeypatch: Any, at: int) -> None:
    """R-19: whichever it is; nothing is converted."""
    model, calls = mlp(), iter(range(9))
    before = state_of(model)
    made = nf.PackedFP4Linear.from_linear

    def fails(*arguments: Any) -> nf.PackedFP4Linear:
        if next(calls) == at:
            raise torch.OutOfMemoryError("no room")
        return made(*arguments)

    monkeypatch.setattr(packing.PackedFP4Linear, "from_linear", fails)
    with pytest.raises(torch.OutOfMemoryError):
        packs(model)
    assert state_of(model) == before
    assert next(calls) == at + 1


def test_r19_every_reference_is_replaced() -> None:
    """R-19: a layer that is registered in several places, under names of its own too."""
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(32, 32)), "c": shared})
    model["d"] = nn.ModuleList([model["b"], shared])
    report = packs(model)
    assert report.converted == ["a", "b.1"]
    assert type(model["a"]) is nf.PackedFP4Linear
    assert model["a"] is model["b"][0] is model["c"] is model["d"][1]
    gone = weakref.ref(shared)
    del shared
    assert gone() is None


def test_r19_hooks_are_carried_over() -> None:
    """R-19: forward hooks and pre-hooks, those with keywords and those always called; a handle
    that was given before removes its hook after."""
    model, seen = mlp(n=2), []
    layer = model[0]
    layer.layer_index = 7
    handles = [
        layer.register_forward_pre_hook(lambda m, x: seen.append(("pre", type(m), m.layer_index))),
        layer.register_forward_hook(lambda m, x, y: y * 0 + 3),
        layer.register_forward_hook(lambda m, x, k, y: seen.append("keywords"), with_kwargs=True),
        layer.register_forward_hook(lambda m, x, y: seen.append("always"), always_call=True),
    ]
    assert packs(model).converted == ["0", "1"]
    with torch.no_grad():
        y = model[0](torch.randn(2, 32))
        assert (y == 3).all()
        assert seen == [("pre", nf.PackedFP4Linear, 7), "keywords", "always"]
        for handle in handles:
            handle.remove()
        assert not (model[0](torch.randn(2, 32)) == 3).any() and len(seen) == 3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.register_full_backward_hook(lambda *_: None), "backward hooks"),
        (lambda m: m.register_full_backward_pre_hook(lambda *_: None), "backward hooks"),
        (lambda m: m.register_state_dict_post_hook(lambda *_: None), "hooks of its state_dict"),
        (lambda m: m.register_state_dict_pre_hook(lambda *_: None), "hooks of its state_dict"),
        (lambda m: m.register_load_state_dict_pre_hook(lambda *_: None), "hooks of its state_dict"),
        (lambda m: m.register_load_state_dict_post_hook(lambda *_: None), "hooks of its state_di"),
        (lambda m: prune.l1_unstructured(m, "weight", 0.5), "its weight is computed at each"),
        (lambda m: m.register_buffer("more", torch.zeros(1)), "it holds more besides"),
        (lambda m: m.add_module("child", nn.ReLU()), "it holds child besides"),
        (lambda m: setattr(m, "forward", m.forward), "its forward was replaced"),
        (parametrizations.spectral_norm, "it is parametrized"),
    ],
)
@pytest.mark.parametrize("trained", [False, True])
def test_r19_what_would_lose_something_is_left(
    change: Callable[[nn.Linear], Any], why: str, trained: bool
) -> None:
    """R-19: layers that trained in FP4 here too."""
    model = mlp()
    if trained:
        nf.convert(model, "nvfp4", head=True, keep_last=0)
    change(model[1])
    before = type(model[1])
    report = packs(model)
    assert report.converted == ["0", "2"] and why in dict(report.left)["1"]
    assert type(model[1]) is before


def test_r19_a_layer_that_a_list_holds_is_left() -> None:
    """R-19: no reference is left behind that still runs the layer as it was."""
    model = mlp()
    model.order = [model[0]]
    object.__setattr__(model, "other", model[1])
    report = packs(model)
    assert report.converted == ["2"]
    assert dict(report.left) == {
        "0": "order holds it too, where it cannot be replaced",
        "1": "other holds it too, where it cannot be replaced",
    }


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Plain(nn.Linear):
    pass


@pytest.mark.parametrize("trained", [False, True])
def test_r19_subclasses(trained: bool) -> None:
    """R-19: one that computes more than a linear does is left; one that does not is packed."""
    model = nn.Sequential(Scaled(32, 32), Plain(32, 32), nn.Linear(32, 32))
    if trained:
        nf.convert(model, "nvfp4", head=True, keep_last=0, take="subclass")
    report = packs(model, take="subclass")
    assert report.converted == ["1", "2"]
    assert "its forward is its own" in dict(report.left)["0"]


def test_r19_fp8_layers_and_packed_ones() -> None:
    """R-11, R-19: layers in FP8 are packed as asked; what is packed stays, with the reason."""
    model = mlp()
    nf.convert(model, "fp8", head=True)
    assert packs(model, filter="[01]").converted == ["0", "1"]
    report = packs(model)
    assert report.converted == ["2"] and report.share == 1
    assert dict(report.left) == dict.fromkeys("01", "packed already (nvfp4)")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    other = nf.convert(model, "mxfp4")
    assert other.converted == [] and len(other.left) == 3
