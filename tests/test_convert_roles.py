"""What convert() leaves by what a layer is: heads, towers, routers, adapters, subclasses."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict
from itertools import permutations
from typing import Any

import pytest
import torch
from conftest import assert_same_bits
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import narrowfloat as nf
from narrowfloat.convert import TAKE

VOCABULARY, WIDTH = 100, 64


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)


def tower(n: int, width: int = WIDTH) -> nn.ModuleList:
    return nn.ModuleList(Block(width) for _ in range(n))


def module(**children: nn.Module) -> nn.Module:
    """A module with these children, registered in this order."""
    made = nn.Module()
    for name, child in children.items():
        made.add_module(name, child)
    return made


def left(model: nn.Module, recipe: str = "fp8", **options: Any) -> dict[str, str]:
    return dict(nf.plan(model, recipe, **options).left)


# ---- heads ----

HEADS = {
    "vocabulary": lambda: {"out": nn.Linear(WIDTH, VOCABULARY)},
    "several": lambda: {"out": nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(4))},
    "another size": lambda: {"lm_head": nn.Linear(WIDTH, VOCABULARY + 28)},
    "inside heads": lambda: {"heads": nn.ModuleDict({"a": nn.Linear(WIDTH, VOCABULARY)})},
    "value": lambda: {"value": nn.Linear(WIDTH, 1)},
    "value of hidden size": lambda: {"v_head": nn.Linear(WIDTH, WIDTH)},
    "regression": lambda: {"out": nn.Linear(WIDTH, 50)},
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_r13_a_head_is_left_wherever_it_is_registered(kind: str, order: tuple[int, ...]) -> None:
    """R-13: among embedding, blocks and head in any order, the blocks are converted alone."""
    parts = [
        ("embedding", nn.Embedding(VOCABULARY, WIDTH)),
        ("blocks", tower(2)),
        *HEADS[kind]().items(),
    ]
    model = module(**dict(parts[i] for i in order))
    report = nf.convert(model)
    assert report.converted == [f"blocks.{i}.{n}" for i in (0, 1) for n in ("up", "down")]
    assert report.left and all("(head=True converts it)" in why for _, why in report.left)
    again = nf.convert(model, head=True)
    assert again.converted == [name for name, _ in report.left]


def test_r13_two_heads_of_two_kinds() -> None:
    """R-13: an lm_head does not make a value head after it, or before it, a layer like others."""
    for names in permutations(("lm_head", "value")):
        heads = {"lm_head": nn.Linear(WIDTH, VOCABULARY), "value": nn.Linear(WIDTH, 1)}
        embedding = nn.Embedding(VOCABULARY, WIDTH)
        model = module(**{name: heads[name] for name in names}, e=embedding, blocks=tower(2))
        assert set(left(model)) == {"lm_head", "value"}


def test_r13_a_table_of_positions_is_no_vocabulary() -> None:
    """R-13: layers as wide as a table of positions, or as what others take, are no heads."""
    model = module(
        wpe=nn.Embedding(2 * WIDTH, WIDTH),
        token_types=nn.Embedding(WIDTH, WIDTH),
        tokens=nn.Embedding(256, WIDTH),
        blocks=tower(2),
        lm_head=nn.Linear(WIDTH, 256),
    )
    assert list(left(model)) == ["lm_head"]


def test_r13_heads_inside_blocks() -> None:
    """R-13: a head of the vocabulary in each block (several tokens ahead) is one; a layer of a
    block that is only called head is none."""
    model = module(e=nn.Embedding(VOCABULARY, WIDTH), blocks=tower(2))
    for block in model.blocks:
        block.add_module("out", nn.Linear(WIDTH, VOCABULARY))
        block.add_module("head", nn.Linear(WIDTH, WIDTH))
    assert list(left(model)) == ["blocks.0.out", "blocks.1.out"]


def test_r13_a_sequential_ends_with_its_last() -> None:
    """R-13: the order of an nn.Sequential is known, also where it is nested or named a head."""
    nested = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    assert left(nested) == {"1.1": "the last linear of a Sequential model (head=True converts it)"}
    head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    assert list(left(module(value_head=head, blocks=tower(1)))) == ["value_head.2"]


def test_r13_fused_projections_are_no_heads() -> None:
    """R-13: outputs that are split are two to four times what others take."""
    attention = module(qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH))
    mlp = module(up=nn.Linear(WIDTH, 4 * WIDTH), down=nn.Linear(2 * WIDTH, WIDTH))
    model = module(attention=attention, mlp=mlp, lm_head=nn.Linear(WIDTH, 1000))
    assert list(left(model)) == ["lm_head"]


def test_r13_without_a_sign_it_is_the_last_one_outside_of_blocks() -> None:
    two = module(a=nn.Linear(32, 32), b=nn.Linear(32, 32))
    assert left(two) == {
        "b": "the last linear of the model, taken for its LM head (head=True converts it)"
    }
    assert left(module(first=nn.Linear(32, 32), blocks=tower(2, 32))) == {}


def test_r13_get_output_embeddings() -> None:
    """R-13: what it returns is a head, of a part of the model too; models without are passed by."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.z, self.blocks = nn.Linear(WIDTH, WIDTH), tower(2)

        def get_output_embeddings(self) -> nn.Module:
            return self.z

    class Refuses(nn.Module):
        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

    found = left(module(refuses=Refuses(), part=Part(), other=nn.Linear(WIDTH, WIDTH)))
    assert list(found) == ["part.z"] and "get_output_embeddings() of Part" in found["part.z"]


# ---- the last blocks of each tower ----


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "nvfp4_mxfp8_backward"])
@pytest.mark.parametrize("order", [("text", "vision"), ("vision", "text")])
def test_r14_each_tower_has_its_last_blocks(recipe: str, order: tuple[str, ...]) -> None:
    """R-14: the last 15 % of 4 and of 12 blocks, in either order, as in two models."""
    sizes = {"text": 4, "vision": 12}
    model = module(**{name: module(layers=tower(sizes[name])) for name in order})
    found = left(model, recipe)
    assert {name.rpartition(".")[0] for name in found} == {
        "text.layers.3", "vision.layers.10", "vision.layers.11"
    }  # fmt: skip
    assert "in the last 2 of the 12 blocks in vision.layers" in found["vision.layers.11.up"]


def test_r14_what_is_no_tower() -> None:
    """R-14: experts, lists inside of blocks, a stem and a head in an nn.Sequential, lists of heads,
    and bare linears beside blocks."""
    experts = nn.ModuleList(Block() for _ in range(8))
    assert left(module(experts=experts, blocks=tower(2)), "nvfp4").keys() == {
        "blocks.1.up", "blocks.1.down"
    }  # fmt: skip
    inner = nn.ModuleList(module(inner=tower(3), out=nn.Linear(32, 32)) for _ in range(2))
    assert {name.split(".")[1] for name in left(module(blocks=inner), "nvfp4")} == {"1"}
    stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), *tower(4), nn.Linear(WIDTH, WIDTH))
    assert list(left(stem, "nvfp4")) == ["4.up", "4.down", "5"]
    projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    beside = left(module(projector=projector, blocks=tower(2)), "nvfp4")
    assert list(beside) == ["blocks.1.up", "blocks.1.down"]
    heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    every = nf.plan(module(lm_heads=heads, x=nn.Linear(WIDTH, WIDTH)), "nvfp4", head=True)
    assert every.left == []


# ---- routers and adapters ----


@pytest.mark.parametrize("recipe", list(nf.RECIPES))
def test_r15_a_router_and_adapters_of_rank_8_are_left(recipe: str) -> None:
    """R-15: with the reason in the report, and converted where take names their kind."""
    attention = module(
        base_layer=nn.Linear(256, 256),
        lora_A=nn.ModuleDict({"default": nn.Linear(256, 8, bias=False)}),
        lora_B=nn.ModuleDict({"default": nn.Linear(8, 256, bias=False)}),
    )
    experts = nn.ModuleList(Block(256) for _ in range(8))
    block = module(q=attention, mlp=module(gate=nn.Linear(256, 8), experts=experts))
    extra, e, o = nn.Linear(256, 8), nn.Linear(8, 256), nn.Linear(256, 256)
    model = module(blocks=nn.ModuleList([block]), extra=extra, e=e, o=o)
    found = left(model, recipe, head=True, keep_last=0)
    assert found == {
        "blocks.0.q.lora_A.default": "an adapter (lora_A) (take='adapter' converts it)",
        "blocks.0.q.lora_B.default": "an adapter (lora_B) (take='adapter' converts it)",
        "blocks.0.mlp.gate": "a router (gate beside experts in Module) (take='router' converts it)",
        "extra": "narrow, 256 to 8 (take='narrow' converts it)",
        "e": "narrow, 8 to 256 (take='narrow' converts it)",
    }
    some = left(model, recipe, head=True, keep_last=0, take="adapter")
    assert some.keys() == {"blocks.0.mlp.gate", "extra", "e"}
    take = ("adapter", "router", "narrow")
    report = nf.convert(model, recipe, head=True, keep_last=0, take=take)
    assert report.left == [] and report.share == 1
    assert type(model.blocks[0].mlp.gate) is nf.Linear


def test_r15_what_is_no_router() -> None:
    """R-15: a gate without experts beside it is a layer like others, and so is a wide adapter that
    does not say it is one; a large router is one by its name."""
    mlp = module(gate=nn.Linear(WIDTH, 128), up=nn.Linear(WIDTH, 128), down=nn.Linear(128, WIDTH))
    assert left(mlp) == left(mlp, take="router") and list(left(mlp)) == ["down"]
    shared = module(gate_proj=nn.Linear(256, 256), experts=tower(2), router=nn.Linear(256, 256))
    assert "a router (router beside experts in Module)" in left(shared, head=True)["router"]
    assert list(left(shared, head=True)) == ["router"]
    by_name = module(mlp=module(router=module(classifier=nn.Linear(256, 256))), o=Block(256))
    assert list(left(by_name, head=True)) == ["mlp.router.classifier"]


@pytest.mark.parametrize(
    ("k", "n", "narrow"),
    [(512, 64, True), (64, 512, True), (520, 65, False), (511, 64, False), (32, 32, False)],
)
def test_r15_what_is_narrow(k: int, n: int, narrow: bool) -> None:
    assert bool(left(nn.Linear(k, n))) == narrow
    assert left(nn.Linear(k, n), take=["narrow"]) == {}


def test_r15_take_is_checked() -> None:
    for take in ("heads", ("router", "gate")):
        with pytest.raises(ValueError, match="expected take as one or more of .*'adapter'"):
            nf.plan(nn.Linear(8, 8), take=take)
    model = module(a=nn.Linear(32, 32), b=nn.Linear(32, 32))
    assert left(model, take="head") == left(model, head=True) == {}


# ---- subclasses ----


class Plain(nn.Linear):
    """As torchtitan's: nothing of a call is its own."""

    def reset_more(self) -> str:
        return "mine"

    def extra_repr(self) -> str:
        return f"plain, {super().extra_repr()}"


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Twice(Doubled):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class ByItself(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return torch.nn.functional.linear(input, self.weight) * 3


class Called(nn.Linear):
    def __call__(self, *inputs: Any) -> Any:
        return super().__call__(*inputs)


class Kept(nn.Linear):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None: ...


class Final(nn.Linear):
    def __init_subclass__(cls) -> None:
        raise TypeError("final")


class Slots(nn.Linear):
    """Laid out otherwise in memory."""

    __slots__ = ("held",)


class Mixed(nn.Linear, nn.Flatten):
    """With a second base, as torchtitan's has."""

    def __init__(self, k: int, n: int, device: str) -> None:
        nn.Linear.__init__(self, k, n, device=device)


@pytest.mark.parametrize("cls", [Plain, Mixed, Slots])
@pytest.mark.parametrize("recipe", list(nf.RECIPES))
def test_r16_a_subclass_that_overrides_nothing_of_a_call(
    device: str, recipe: str, cls: type[nn.Linear]
) -> None:
    """R-16: it is converted without asking, and stays an instance of its class, in copies and
    pickles too."""
    if not nf.supported(recipe, device):
        pytest.skip("the device cannot run the recipe")
    layer = cls(32, 32, device=device)
    x = torch.randn(64, 32, device=device)
    model = module(a=layer)
    report = nf.convert(model, recipe)
    assert report.converted == ["a"] and isinstance(layer, cls) and isinstance(layer, nf.Linear)
    assert type(layer).__name__ == cls.__name__ and layer.recipe is nf.RECIPES[recipe]
    want = nf.linear(x, layer.weight, layer.bias, recipe)
    for twin in (layer, copy.deepcopy(model).a, pickle.loads(pickle.dumps(model)).a):
        assert type(twin) is type(layer)
        assert_same_bits(twin(x), want)
        twin(x).sum().backward()
    if cls is Plain:
        assert layer.reset_more() == "mine" and layer.extra_repr().startswith("plain, in_features")
    assert nf.revert(model) == ["a"] and type(layer) is cls


@pytest.mark.parametrize(("cls", "factor", "more"), [(Doubled, 2, 0), (Twice, 2, 1)])
def test_r16_an_option_takes_what_calls_super(
    device: str, cls: type[nn.Linear], factor: int, more: int
) -> None:
    """R-16: its forward stays, and what it calls runs in the recipe."""
    layer = cls(32, 32, device=device)
    assert "a forward of its own (take='subclass'" in left(layer)[""]
    nf.convert(layer, take="subclass")
    x = torch.randn(64, 32, device=device)
    assert_same_bits(layer(x), factor * nf.linear(x, layer.weight, layer.bias) + more)
    twin = copy.deepcopy(layer)
    assert_same_bits(twin(x), layer(x))
    assert isinstance(twin, cls)
    nf.revert(layer)
    assert type(layer) is cls


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (ByItself, "does not call nn.Linear's"),
        (Called, "has __call__ of its own"),
        (Kept, "has get_extra_state of its own"),
        (Final, "which cannot be derived from (final)"),
        (nn.LazyLinear, "without a weight yet"),
    ],
)
def test_r16_no_option_takes_what_computes_otherwise(cls: Any, why: str) -> None:
    layer = cls(32) if cls is nn.LazyLinear else cls(32, 32)
    model = module(a=layer, b=nn.Linear(32, 32))
    report = nf.convert(model, take=TAKE, head=True)
    assert report.converted == ["b"] and why in dict(report.left)["a"] and type(layer) is cls


# ---- shares, and what is no layer ----


class Conv1D(nn.Module):
    """As transformers' has it: the weight is [K,N]."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(k, n)), nn.Parameter(torch.zeros(n))


class GroupedExperts(nn.Module):
    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(experts, 2 * width, width))
        self.w2 = nn.Parameter(torch.zeros(experts, width, 2 * width))


def test_r17_nothing_converted_is_a_warning_that_says_why() -> None:
    """R-17: as GPT-2, whose layers are Conv1D, and whose head is tied."""
    block = module(c_attn=Conv1D(3 * WIDTH, WIDTH), c_proj=Conv1D(WIDTH, WIDTH))
    model = module(wte=nn.Embedding(VOCABULARY, WIDTH), h=nn.ModuleList([block]))
    with pytest.raises(ValueError, match=r"without any \(it has h.0.c_attn.weight: .*Conv1D"):
        nf.convert(model)
    model.add_module("lm_head", nn.Linear(WIDTH, VOCABULARY, bias=False))
    model.lm_head.weight = model.wte.weight
    with pytest.warns(
        UserWarning, match="nothing of Module runs in fp8 .*lm_head: .*c_attn.*C"
    ) as w:
        report = nf.convert(model)
    assert w[0].filename == __file__
    assert report.converted == [] and report.share == report.flops_share == 0
    assert [name for name, _ in report.others] == ["h.0.c_attn.weight", "h.0.c_proj.weight"]
    assert report.parameters == (0, 4 * WIDTH * WIDTH + VOCABULARY * WIDTH)
    assert "no layer   h.0.c_attn.weight: [64, 192] in transformers' Conv1D" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nf.plan(model)
        nf.convert(model, head=True)
        assert nf.convert(model, head=True).converted == []  # it is in the recipe already


def test_r17_experts_in_3d_parameters_are_named_and_counted() -> None:
    """R-17: their share of the parameters, and of the FLOPs that of the experts a token has."""
    mlp = module(router=nn.Linear(WIDTH, 8, bias=False), experts=GroupedExperts(8, WIDTH))
    block = module(qkv=nn.Linear(WIDTH, 3 * WIDTH), mlp=mlp)
    model = module(blocks=nn.ModuleList([block]))
    report = nf.convert(model)
    square = WIDTH * WIDTH
    assert dict(report.others).keys() == {"blocks.0.mlp.experts.w1", "blocks.0.mlp.experts.w2"}
    assert "[8, 128, 64], experts in one 3-D parameter of GroupedExperts" in report.others[0][1]
    assert report.parameters == (3 * square, 3 * square + 8 * WIDTH + 8 * 4 * square)
    assert report.flops == (6 * square, 6 * square + 16 * WIDTH + 2 * 8 * 4 * square)
    mlp.top_k = 2
    assert nf.plan(model).flops == (6 * square, 6 * square + 16 * WIDTH + 2 * 2 * 4 * square)
    assert "in it run 8.5% of the matrices' parameters and 27.0% of their" in str(nf.plan(model))


def test_r17_experts_in_a_list_count_as_a_token_meets_them() -> None:
    experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
    model = module(moe=module(gate=nn.Linear(WIDTH, 8), experts=experts))
    model.config = type("Config", (), {"num_experts_per_tok": 2})()
    report = nf.plan(model)
    square = WIDTH * WIDTH
    assert report.parameters == (8 * square, 8 * square + 8 * WIDTH)
    assert report.flops == (2 * 2 * square, 2 * 2 * square + 16 * WIDTH)


def test_r17_every_matrix_is_counted_once() -> None:
    """R-17: tied weights, layers of two names, other modules' matrices, lookup tables, vectors."""
    shared, tied = nn.Linear(32, 32), nn.Linear(32, 32)
    tied.weight = shared.weight
    model = module(
        a=shared, again=shared, tied=tied, e=nn.Embedding(7, 5), rnn=nn.LSTM(32, 8),
        conv=nn.Conv2d(3, 8, 2), norm=nn.LayerNorm(32),
    )  # fmt: skip
    model.table = nn.Parameter(torch.zeros(1, 9, 32))
    model.token = nn.Parameter(torch.zeros(1, 1, 32))
    report = nf.plan(model, head=True)
    others = {"table", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "conv.weight"}
    assert {name for name, _ in report.others} == others
    elsewhere = 9 * 32 + 32 * 32 + 32 * 8 + 8 * 3 * 4
    assert report.parameters == (1024, 1024 + elsewhere)
    assert report.flops == (2 * 2048, 2 * (2048 + elsewhere))


def test_r17_shares_are_of_the_model_after_the_call() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    assert nf.convert(model, filter="0").share == 0.25
    assert nf.convert(model, filter="1").share == 0.5
    assert nf.convert(model, "nvfp4", filter="2", keep_last=0).share == 0.25
    assert nf.convert(model, "nvfp4", "0", keep_last=0, inference=True).share == 0.5


# ---- parametrizations ----


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 1


def test_r18_parametrized_embeddings_and_heads_are_decided_alike_each_time() -> None:
    """R-18: 300 calls with memory that is freed and taken again; ids of temporary tensors gave
    another answer in 1 of 100 to 1000."""
    tied = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model = module(e=nn.Embedding(VOCABULARY, WIDTH), blocks=tower(2), out=tied)
    tied.weight = model.e.weight
    parametrize.register_parametrization(model.e, "weight", Symmetric())
    head = parametrizations.weight_norm(nn.Linear(WIDTH, VOCABULARY + 1))
    model.add_module("head", head)
    first = nf.plan(model)
    assert list(dict(first.left)) == ["out", "head"]
    assert "tied to the embedding e" in dict(first.left)["out"]
    for i in range(300):
        junk = [torch.empty(VOCABULARY, WIDTH) for _ in range(i % 7)]
        assert nf.plan(model) == first
        del junk


def test_r13_order_of_names_in_the_report() -> None:
    """Layers come in the order in which modules are registered."""
    made = nn.Sequential(OrderedDict(b=nn.Linear(32, 32), a=nn.Linear(32, 32), c=nn.Linear(32, 32)))
    report = nf.plan(made)
    assert report.converted == ["b", "a"] and [n for n, _ in report.left] == ["c"]
