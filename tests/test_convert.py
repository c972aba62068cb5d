"""convert() changes exactly the layers it should, in place, and says what it did."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections import OrderedDict

import pytest
import torch
from conftest import assert_close_as, assert_same_bits
from torch import Tensor, nn
from torch.nn.utils import prune

import narrowfloat as nf

BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks between an embedding and a head; tied: the head has the embedding's weight."""

    def __init__(self, tied: bool = False, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, 48, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


INNER = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def types(model: nn.Module) -> dict[str, type]:
    return {n: type(m) for n, m in model.named_modules() if isinstance(m, nn.Linear)}


def reasons(report: nf.Report) -> dict[str, str]:
    return dict(report.left)


# ---- what stays ----


def test_in_place(device: str) -> None:
    """The same modules, parameters, memory, dtypes, modes and flags; only the class is new."""
    model = Model().to(device, BF16)
    model.blocks[0].eval()
    model.blocks[1].up.weight.requires_grad_(False)
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    before = {
        n: (id(p), p.data_ptr(), p.dtype, p.requires_grad, p._version)
        for n, p in parameters.items()
    }
    training = {n: m.training for n, m in modules.items()}
    report = nf.convert(model)
    assert report.converted == INNER
    assert {n: id(m) for n, m in model.named_modules()} == {n: id(m) for n, m in modules.items()}
    after = {
        n: (id(p), p.data_ptr(), p.dtype, p.requires_grad, p._version)
        for n, p in model.named_parameters()
    }
    assert after == before
    assert {n: m.training for n, m in model.named_modules()} == training
    for name in INNER:
        made = model.get_submodule(name)
        assert type(made) is nf.Linear and isinstance(made, nn.Linear)
        assert made.recipe is nf.RECIPES["fp8"]
        assert made.extra_repr().endswith("recipe=fp8")
    assert type(model.head) is nn.Linear


def test_the_layers_do_run_in_fp8(device: str) -> None:
    model = Model().to(device)
    plain = copy.deepcopy(model)
    nf.convert(model)
    x = torch.randn(8, 32, device=device)
    up = model.blocks[0].up
    assert_same_bits(up(x), nf.linear(x, up.weight, up.bias))
    assert not torch.equal(up(x), plain.blocks[0].up(x))
    ids = torch.arange(24, device=device).view(2, 12)
    assert_close_as(model(ids), plain(ids))
    model(ids).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_hooks_are_kept_and_fire() -> None:
    model = Model()
    seen: list[str] = []
    up = model.blocks[0].up
    up.register_forward_pre_hook(lambda *_: seen.append("before"))
    up.register_forward_hook(lambda *_: seen.append("after"))
    up.register_full_backward_hook(lambda *_: seen.append("backward"))
    up.weight.register_hook(lambda g: seen.append("gradient"))
    nf.convert(model)
    model(torch.arange(4)).sum().backward()
    assert sorted(seen) == ["after", "backward", "before", "gradient"]


def test_an_optimizer_made_before_still_steps() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    nf.convert(model)
    before = model.blocks[0].up.weight.detach().clone()
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.blocks[0].up.weight, before)


def test_ties_are_kept() -> None:
    """A weight in two layers, and one layer under two names."""
    first, second, shared = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    model = nn.Sequential(
        OrderedDict(a=first, b=second, c=shared, d=nn.ReLU(), e=shared, f=nn.Linear(32, 8))
    )
    report = nf.convert(model)
    assert report.converted == ["a", "b", "c"]  # e is c
    assert first.weight is second.weight and model.e is model.c is shared
    assert type(shared) is nf.Linear
    model(torch.randn(4, 32)).sum().backward()
    assert first.weight.grad is second.weight.grad is not None


def test_state_dict_both_ways() -> None:
    plain, made = Model(), Model()
    nf.convert(made)
    assert list(made.state_dict()) == list(plain.state_dict())
    made.load_state_dict(plain.state_dict(), strict=True)
    for name, t in made.state_dict().items():
        assert_same_bits(t, plain.state_dict()[name], name)
    with torch.no_grad():
        made.blocks[0].up.weight.add_(1)
    plain.load_state_dict(made.state_dict(), strict=True)
    assert_same_bits(plain.blocks[0].up.weight, made.blocks[0].up.weight)


def test_copies_and_pickles() -> None:
    mine = nf.Recipe("mine", fprop=nf.Gemm(accumulate="fast"))
    model = Model()
    nf.convert(model, mine)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    ids = torch.arange(16)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert types(twin) == types(model)
        assert twin.blocks[0].up.recipe == mine
        assert twin.blocks[0].up.weight.data_ptr() != model.blocks[0].up.weight.data_ptr()
        assert_same_bits(twin(ids), model(ids))
        twin(ids).sum().backward()
    assert model.blocks[0].up.weight.grad is None


def test_a_model_converted_on_meta_gets_its_weights_later() -> None:
    with torch.device("meta"):
        model = Model()
    nf.convert(model)
    source = Model()
    model.load_state_dict(source.state_dict(), assign=True)
    nf.convert(source)
    assert_same_bits(model(torch.arange(8)), source(torch.arange(8)))


# ---- the head ----


def test_head_is_what_maps_to_the_vocabulary() -> None:
    model = Model()
    report = nf.convert(model)
    assert list(reasons(report)) == ["head"]
    assert "48 outputs are the vocabulary, the rows of embedding" in reasons(report)["head"]
    assert "(head=True converts it)" in reasons(report)["head"]
    assert type(model.head) is nn.Linear


def test_head_is_what_is_tied_to_an_embedding() -> None:
    """Then the last linear is no head, where another one is tied."""
    model = Model(tied=True)
    model.last = nn.Linear(8, 8)
    report = nf.convert(model)
    assert report.converted == [*INNER, "last"]
    assert "tied to the embedding embedding" in reasons(report)["head"]
    assert type(model.head) is nn.Linear and model.head.weight is model.embedding.weight


@pytest.mark.parametrize("tied", [False, True])
def test_head_where_it_is_asked_for(tied: bool) -> None:
    model = Model(tied)
    report = nf.convert(model, head=True)
    assert report.converted == [*INNER, "head"] and report.left == []
    assert type(model.head) is nf.Linear
    assert (model.head.weight is model.embedding.weight) == tied
    model(torch.arange(8)).sum().backward()
    assert model.embedding.weight.grad.isfinite().all()


def test_head_stays_left_the_second_time() -> None:
    model = Model()
    nf.convert(model)
    report = nf.convert(model)
    assert report.converted == []
    assert [n for n, _ in report.left] == [*INNER, "head"]
    assert all("already a narrowfloat layer (fp8)" in reasons(report)[n] for n in INNER)
    assert type(model.head) is nn.Linear


def test_a_single_linear_is_no_head() -> None:
    made = nn.Linear(32, 16)
    weight = made.weight
    report = nf.convert(made)
    assert report.converted == [""] and type(made) is nf.Linear and made.weight is weight
    assert "(the model itself)" in str(report)
    nested = nn.Sequential(nn.ReLU(), nn.Linear(32, 16))
    assert nf.convert(nested).converted == ["1"]


# ---- what is left ----


def test_already_converted_layers_are_left_in_their_recipe() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nf.FP8Linear(32, 32), nn.Linear(32, 32))
    report = nf.convert(model, head=True)
    assert [type(m) for m in model] == [nf.Linear, nf.FP8Linear, nf.Linear]
    assert reasons(report) == {"1": "already a narrowfloat layer (fp8)"} and report.share == 1


def test_subclasses_are_left() -> None:
    attention = nn.MultiheadAttention(32, 2)
    model = nn.Sequential(Scaled(32, 32), attention, nn.LazyLinear(32), nn.Linear(32, 32))
    report = nf.convert(model, head=True)
    assert report.converted == ["3"]
    left = reasons(report)
    assert "its type is Scaled, which has a forward of its own" in left["0"]
    assert "1 (MultiheadAttention) computes with its weight itself" in left["1.out_proj"]
    assert "LazyLinear" in left["2"]
    assert type(model[0]) is Scaled


@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm"])
def test_parametrized_layers_are_left(how: str) -> None:
    model = nn.Sequential(
        getattr(nn.utils.parametrizations, how)(nn.Linear(32, 32)), nn.Linear(32, 32)
    )
    before = type(model[0])
    report = nf.convert(model, head=True)
    assert report.converted == ["1"] and "Parametrized" in reasons(report)["0"]
    assert report.parameters == (1024, 2048)  # original0 and original1 are one layer
    assert type(model[0]) is before
    model(torch.randn(4, 32)).sum().backward()


def test_a_weight_that_a_hook_computes_still_is() -> None:
    """Pruning leaves the type nn.Linear; its hook goes on masking the weight."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    prune.l1_unstructured(model[0], "weight", 0.5)
    nf.convert(model)
    x = torch.randn(4, 32)
    weight = model[0].weight_orig * model[0].weight_mask
    assert_same_bits(model[0](x), nf.linear(x, weight, model[0].bias))
    model(x).sum().backward()
    assert (model[0].weight_orig.grad[model[0].weight_mask == 0] == 0).all()


def test_a_forward_that_was_replaced_is_left() -> None:
    """Another library's wrapper on the instance would go on calling nn.Linear's forward."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    original = model[0].forward
    model[0].forward = lambda x: original(x) + 1
    report = nf.convert(model)
    assert report.converted == ["1"]
    assert "forward was replaced" in reasons(report)["0"] and type(model[0]) is nn.Linear


# ---- the filter ----


@pytest.mark.parametrize(
    ("filter", "converted"),
    [
        (lambda name, module: name.endswith("up"), ["blocks.0.up", "blocks.1.up"]),
        (lambda name, module: module.bias is None, ["blocks.0.down", "blocks.1.down"]),
        ("blocks.0.*", ["blocks.0.up", "blocks.0.down"]),
        ("blocks.1.up", ["blocks.1.up"]),
        (["*.0.up", "*.1.down"], ["blocks.0.up", "blocks.1.down"]),
        (("*",), INNER),
        ("head", []),  # it matches, and is left as the head
        (None, INNER),
    ],
    ids=["name", "module", "pattern", "one", "patterns", "all", "head", "none"],
)
def test_filter(filter: object, converted: list[str]) -> None:
    model = Model()
    report = nf.convert(model, "fp8", filter)
    assert report.converted == converted
    assert {n for n, t in types(model).items() if t is nf.Linear} == set(converted)
    assert sorted([*report.converted, *reasons(report)]) == sorted([*INNER, "head"])
    for name in set(INNER) - set(converted):
        assert reasons(report)[name] == "the filter does not match it"


@pytest.mark.parametrize("filter", ["up", "Blocks.*", [], [""], lambda name, module: False])
def test_filter_that_matches_nothing(filter: object) -> None:
    model = Model()
    for call in (nf.plan, nf.convert):
        with pytest.raises(ValueError, match="matches none of 5") as e:
            call(model, "fp8", filter)
        assert "blocks.0.up" in str(e.value) and "..." in str(e.value)
    assert set(types(model).values()) == {nn.Linear}


def test_layers_by_layers() -> None:
    """Two calls give two recipes to one model."""
    mine = nf.Recipe("mine")
    model = Model()
    nf.convert(model, "fp8")
    report = nf.convert(model, mine, "blocks.0.*")
    assert report.converted == INNER[:2]
    assert [str(model.get_submodule(n).recipe) for n in INNER] == ["mine"] * 2 + ["fp8"] * 2


# ---- errors and reports ----


def test_refused() -> None:
    with pytest.raises(ValueError, match="expected a model with nn.Linear layers, got ReLU"):
        nf.convert(nn.ReLU())
    model = Model()
    with pytest.raises(ValueError, match="expected a Recipe or a name"):
        nf.convert(model, "fp4")
    assert set(types(model).values()) == {nn.Linear}


def test_a_filter_that_raises_changes_nothing() -> None:
    def filter(name: str, module: nn.Linear) -> bool:
        if name == "blocks.1.up":
            raise KeyError(name)
        return True

    model = Model()
    with pytest.raises(KeyError):
        nf.convert(model, "fp8", filter)
    assert set(types(model).values()) == {nn.Linear}


def test_plan_changes_nothing_and_tells_the_same() -> None:
    mine = nf.Recipe("mine")
    model = Model(tied=True)
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    planned = nf.plan(model, mine, "blocks.*.up")
    assert set(types(model).values()) == {nn.Linear}
    assert {n: dict(vars(m)) for n, m in model.named_modules()} == before
    assert nf.convert(model, mine, "blocks.*.up") == planned
    assert planned.recipe is mine and model.blocks[0].up.recipe is mine


def test_report_is_readable(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="narrowfloat"):
        report = nf.convert(Model(), "fp8", "blocks.*")
    lines = str(report).splitlines()
    assert lines[0] == "4 linear layers in fp8, 1 left"
    assert "84.2% of the matrices' parameters and 84.2% of their FLOPs per token" in lines[1]
    assert lines[2].split() == ["converted", "blocks.0.up"]
    assert lines[6].split(maxsplit=1) == ["left", "head: the filter does not match it"]
    assert len(lines) == 7
    assert str(report) in caplog.text


# ---- the last blocks, in FP4 ----


class Deep(nn.Module):
    """n blocks, then a head; experts inside each block where asked for."""

    def __init__(self, n: int, experts: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"up": nn.Linear(8, 8)}
                | ({"experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))})
            )
            for _ in range(n)
        )
        self.head = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("n", "keep_last", "left"),
    [
        (2, 0.15, 1),
        (6, 0.15, 1),
        (7, 0.15, 2),
        (12, 0.15, 2),
        (20, 0.15, 3),
        (21, 0.15, 4),
        (12, 0, 0),
        (12, 0.5, 6),
        (12, 1, 12),
        (1, 0.15, 0),
    ],
)
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
def test_the_last_blocks_are_left(n: int, keep_last: float, left: int, recipe: str) -> None:
    model = Deep(n)
    report = nf.convert(model, recipe, keep_last=keep_last)
    names = [f"blocks.{i}.up" for i in range(n)]
    assert report.converted == ["first", *names[: n - left]]
    assert list(reasons(report)) == [*names[n - left :], "head"]
    for name in names[n - left :]:
        assert type(model.get_submodule(name)) is nn.Linear
        why = f"in the last {left} of the {n} blocks in blocks (keep_last=0 converts them)"
        assert reasons(report)[name] == why
    assert "its name says so" in reasons(report)["head"]
    fp8 = nf.convert(Deep(n), "fp8", keep_last=keep_last)
    assert fp8.converted == ["first", *names]


def test_what_the_blocks_are() -> None:
    """Experts repeat inside blocks; a plain Sequential is its own run; no run, nothing left."""
    report = nf.plan(Deep(4, experts=9), "nvfp4")
    assert [n for n, _ in report.left if n != "head"] == [
        n for n in reasons(report) if n.startswith("blocks.3.")
    ]
    assert len(report.left) == 1 + 10 and "of the 4 blocks in blocks" in report.left[0][1]
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 8))
    report = nf.plan(plain, "nvfp4", head=True)
    assert report.converted == ["0", "2"]
    assert "in the last 1 of the 3 blocks in the model" in reasons(report)["3"]
    nested = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))))
    assert list(reasons(nf.plan(nested, "nvfp4", head=True))) == ["1.4"]
    flat = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    assert nf.plan(flat, "nvfp4", head=True).left == []
    assert nf.plan(nn.Linear(8, 8), "nvfp4").converted == [""]
    filtered = nf.plan(Deep(12), "nvfp4", "blocks.1*")
    assert filtered.converted == ["blocks.1.up"]  # 10 and 11 are the last two


@pytest.mark.parametrize("keep_last", [-0.1, 1.5, float("nan")])
def test_keep_last_refused(keep_last: float) -> None:
    with pytest.raises(ValueError, match="expected keep_last from 0 to 1"):
        nf.convert(Deep(3), "nvfp4", keep_last=keep_last)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
def test_a_model_in_fp4_runs(device: str, recipe: str) -> None:
    model = Model().to(device)
    plain = copy.deepcopy(model)
    report = nf.convert(model, recipe)
    assert report.converted == INNER[:2]
    ids = torch.arange(24, device=device).view(2, 12)
    assert_close_as(model(ids), plain(ids), recipe)
    model(ids).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ---- packed weights for inference ----


def test_inference_packs_what_training_converted() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
                            for _ in range(4)))  # fmt: skip
    trained = nf.convert(model, "nvfp4_four_over_six")
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        before = model(x)
        packed = nf.convert(model, "nvfp4", inference=True)
        after = model(x)
    assert packed.converted == trained.converted
    for name in packed.converted:
        module = model.get_submodule(name)
        assert type(module) is nf.PackedFP4Linear
        assert str(module.recipe) == "nvfp4_four_over_six"  # as it trained
    # training quantizes the activations too, inference does not
    assert (after - before).norm() / before.norm() < 0.3
    assert not any(name.endswith("weight") for name in model[0].state_dict())


def test_inference_wants_an_fp4_recipe() -> None:
    with pytest.raises(ValueError, match="expected an FP4 recipe with inference=True, got fp8"):
        nf.convert(nn.Sequential(nn.Linear(8, 8)), "fp8", inference=True)


def test_the_model_itself_cannot_be_replaced() -> None:
    report = nf.plan(nn.Linear(8, 8), "nvfp4", inference=True)
    assert report.converted == [] and "the model itself" in report.left[0][1]
