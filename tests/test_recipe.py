"""Decides that a recipe says what it says: defaults, validation, names, value semantics."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

import narrowfloat as nf
from narrowfloat import recipe as recipes
from narrowfloat.settings import Backward, BlockLayer, Forward, FP4Layer


def test_defaults() -> None:
    recipe = nf.Recipe()
    assert recipe.name == str(recipe) == "fp8"
    assert recipe.fprop == nf.Gemm("e4m3", "e4m3", "exact") == nf.Gemm()
    assert recipe.dgrad == recipe.wgrad == nf.Gemm("e5m2", "e4m3", "exact")
    for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad):
        assert not gemm.fast
    assert nf.Gemm(accumulate="fast").fast


def test_settings_are_what_the_operators_are_told() -> None:
    assert Forward.unpack(nf.Recipe().forward_settings) == Forward(0, 0, False, False)
    assert Backward.unpack(nf.Recipe().backward_settings) == Backward(1, 0)
    other = nf.Recipe(
        "other",
        nf.Gemm("e5m2", "e4m3", "fast"),
        nf.Gemm("e4m3", "e4m3", "exact"),
        nf.Gemm("e4m3", "e5m2", "fast"),
    )
    assert Forward.unpack(other.forward_settings) == Forward(1, 0, True)
    assert Backward.unpack(other.backward_settings) == Backward(0, 0, False, True)


def test_names() -> None:
    assert nf.RECIPES["fp8"] == nf.Recipe()
    assert all(name == recipe.name for name, recipe in nf.RECIPES.items())
    assert recipes.get("fp8") is nf.RECIPES["fp8"]
    mine = nf.Recipe("mine")
    assert recipes.get(mine) is mine


@pytest.mark.parametrize("wrong", ["fp4", "FP8", "", None, 8, [], {"fp8": 1}, nf.Gemm()])
def test_what_is_no_recipe_is_refused_with_the_names(wrong: object) -> None:
    with pytest.raises(ValueError, match="expected a Recipe or a name out of .*'fp8'") as e:
        recipes.get(wrong)  # type: ignore[arg-type]
    assert repr(wrong) in str(e.value)


def test_frozen() -> None:
    recipe = nf.Recipe()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "mine"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.fprop.a = "e5m2"  # type: ignore[misc]


def test_value_semantics() -> None:
    fast = nf.Recipe(fprop=nf.Gemm(accumulate="fast"))
    assert nf.Recipe() == nf.Recipe() and hash(nf.Recipe()) == hash(nf.Recipe())
    assert len({nf.Recipe(), nf.Recipe(), nf.Recipe("mine"), fast}) == 3
    replaced = dataclasses.replace(nf.Recipe(), fprop=nf.Gemm(accumulate="fast"))
    assert replaced == fast and replaced.forward_settings == fast.forward_settings
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert twin == fast and hash(twin) == hash(fast)
        assert twin.forward_settings == fast.forward_settings
        assert twin.backward_settings == fast.backward_settings
    assert eval(repr(fast), vars(nf)) == fast


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("e4m4",), "e4m4"),
        (("e4m3", "bf16"), "bf16"),
        ((None, "bf16"), "bf16"),
        ((None, "e4m3", "fast"), "None and 'e4m3'"),
        (("e4m3", "e4m3", "slow"), "slow"),
        (("e4m3", "e4m3", True), "True"),
        (("e5m2", "e5m2"), "at most one e5m2"),
    ],
)
def test_gemm_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match="^Gemm: expected") as e:
        nf.Gemm(*arguments)  # type: ignore[arg-type]
    assert words in str(e.value)


@pytest.mark.parametrize(
    ("changed", "operand"),
    [
        ({"fprop": nf.Gemm("e5m2", "e4m3")}, "x "),
        ({"wgrad": nf.Gemm("e4m3", "e5m2"), "dgrad": nf.Gemm("e4m3", "e4m3")}, "x "),
        ({"fprop": nf.Gemm("e4m3", "e5m2")}, "w "),
        ({"dgrad": nf.Gemm("e4m3", "e5m2"), "wgrad": nf.Gemm("e4m3", "e4m3")}, "w "),
        ({"dgrad": nf.Gemm("e4m3", "e4m3")}, "dy "),
        ({"wgrad": nf.Gemm("e4m3", "e4m3")}, "dy "),
    ],
)
def test_one_format_an_operand(changed: dict[str, nf.Gemm], operand: str) -> None:
    with pytest.raises(ValueError, match=f"^Recipe: expected one format for {operand}"):
        nf.Recipe(**changed)


def test_recipe_is_taken_everywhere() -> None:
    mine = nf.Recipe("mine")
    assert nf.Linear(16, 16, recipe=mine).recipe is mine
    assert nf.FP8Linear(16, 16, recipe=mine).recipe is mine
    assert nf.supported(mine, "cpu")
    with pytest.raises(ValueError, match="expected a Recipe or a name"):
        nf.Linear(16, 16, recipe="fp4")
    with pytest.raises(ValueError, match="expected a Recipe or a name"):
        nf.supported("fp4")


# ---- FP4 ----


def test_fp4_defaults_and_names() -> None:
    recipe = nf.FP4Recipe()
    assert recipe.name == str(recipe) == recipe.format == "nvfp4"
    assert recipe.weights_2d and recipe.rotate_wgrad and recipe.stochastic_dy
    assert recipe.four_over_six == "none" and not recipe.scale_up_dy
    assert FP4Layer.unpack(recipe.settings) == FP4Layer(False, True, True, True)
    assert nf.RECIPES["nvfp4"] == recipe and nf.RECIPES["mxfp4"].format == "mxfp4"
    assert nf.RECIPES["nvfp4_four_over_six"].four_over_six == "both"
    assert nf.RECIPES["nvfp4_unbiased"].scale_up_dy
    fp4 = {name for name, r in nf.RECIPES.items() if isinstance(r, nf.FP4Recipe)}
    assert fp4 == {"nvfp4", "mxfp4", "nvfp4_four_over_six", "nvfp4_unbiased"}
    for name in nf.RECIPES:
        assert recipes.get(name) is nf.RECIPES[name]
        assert nf.Linear(16, 16, recipe=name).recipe is nf.RECIPES[name]


def test_fp4_settings() -> None:
    mx = nf.FP4Recipe("mx", "mxfp4", rotate_wgrad=False)
    assert FP4Layer.unpack(mx.settings) == FP4Layer(True, False, False, True)
    for six, x, w in (("x", True, False), ("w", False, True), ("both", True, True)):
        layer = FP4Layer.unpack(nf.FP4Recipe("six", four_over_six=six).settings)
        assert (layer.four_over_six_x, layer.four_over_six_w) == (x, w)
    assert FP4Layer.unpack(nf.FP4Recipe("up", scale_up_dy=True).settings).scale_up_dy


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"format": "fp8"}, "fp8"),
        ({"format": "e4m3"}, "e4m3"),
        ({"four_over_six": True}, "True"),
        ({"four_over_six": "y"}, "y"),
        ({"format": "mxfp4", "four_over_six": "x"}, "powers of two"),
    ],
)
def test_fp4_refused(changed: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match="^FP4Recipe: expected") as e:
        nf.FP4Recipe(**changed)  # type: ignore[arg-type]
    assert words in str(e.value)


def test_fp4_value_semantics() -> None:
    mine = nf.FP4Recipe("mine", four_over_six="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        mine.format = "mxfp4"  # type: ignore[misc]
    assert len({nf.FP4Recipe(), nf.FP4Recipe(), mine, nf.FP4Recipe("mine")}) == 3
    for twin in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert twin == mine and hash(twin) == hash(mine) and twin.settings == mine.settings
    assert eval(repr(mine), vars(nf)) == mine
    assert dataclasses.replace(mine, four_over_six="none") == nf.FP4Recipe("mine")
    assert nf.linear(torch.ones(2, 16), torch.ones(4, 16), None, mine).shape == (2, 4)


# ---- finer scales than a tensor's ----


def test_block_defaults() -> None:
    named = {n: r for n, r in nf.RECIPES.items() if isinstance(r, nf.BlockRecipe)}
    products = {n: (r.fprop, r.dgrad, r.wgrad, r.dy, r.fast) for n, r in named.items()}
    assert products == {
        "fp8_row": ("row", "row", "row", "e5m2", ()),
        "fp8_block": ("block", "block", "block", "e4m3", ()),
        "fp8_block_row_wgrad": ("block", "block", "row", "e4m3", ()),
        "fp8_block_bf16_wgrad": ("block", "block", "bf16", "e4m3", ()),
        "fp8_block_pow2": ("block_pow2", "block_pow2", "block_pow2", "e4m3", ()),
        "mxfp8": ("mx", "mx", "mx", "e4m3", ()),
    }
    assert nf.BlockRecipe() == nf.RECIPES["fp8_block"]
    for name, recipe in named.items():
        assert recipes.get(name) is recipe and str(recipe) == name
        assert nf.Linear(16, 16, recipe=name).recipe is recipe
    of_others = {n for n, r in nf.RECIPES.items() if isinstance(r, nf.FP4Recipe | nf.MixedRecipe)}
    assert set(nf.RECIPES) == {"fp8", "fp8_delayed", "fp8_bf16_wgrad", *named, *of_others}


def test_block_settings_are_what_the_operators_are_told() -> None:
    mixed = nf.BlockRecipe("mixed", "mx", "row", "bf16", "e5m2", ("dgrad",))
    assert BlockLayer.unpack(mixed.settings) == BlockLayer(4, 1, 0, True, fast_dgrad=True)
    assert mixed.scalings == ("row", "mx")
    row = nf.BlockRecipe("r", "row", "row", "row", fast=("fprop", "wgrad"))
    assert BlockLayer.unpack(row.settings) == BlockLayer(1, 1, 1, fast_fprop=True, fast_wgrad=True)
    plain = nf.BlockRecipe("plain", "bf16", "bf16", "bf16")
    assert plain.scalings == ("bf16",) and plain.settings == 0
    assert nf.BlockRecipe("b", wgrad="bf16").scalings == ("block",)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"fprop": "tensor"}, "expected fprop out of .*'block_pow2', 'mx', 'row'.*got 'tensor'"),
        ({"wgrad": "fp8_row"}, "expected wgrad out of"),
        ({"dy": "e3m4"}, "expected dy out of"),
        ({"dy": "e5m2"}, "expected dy='e4m3', got 'e5m2' with dgrad 'block'"),
        ({"dgrad": "row", "dy": "e5m2"}, "expected dy='e4m3', got 'e5m2'"),
        ({"dgrad": "bf16", "wgrad": "bf16", "dy": "e5m2"}, "expected dy='e4m3', got 'e5m2'"),
        ({"fast": ("fprop",)}, "fast accumulation of products scaled by row, got fprop in 'block'"),
        ({"wgrad": "bf16", "fast": ("wgrad",)}, "got wgrad in 'bf16'"),
        ({"fast": ("all",)}, "expected fast as a tuple"),
        ({"fast": "fprop"}, "expected fast as a tuple"),
    ],
)
def test_block_refusals(changed: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^BlockRecipe: .*{text}"):
        nf.BlockRecipe("refused", **changed)  # type: ignore[arg-type]


def test_block_recipes_are_values() -> None:
    mine = nf.BlockRecipe("mine", wgrad="bf16")
    assert mine == nf.BlockRecipe("mine", wgrad="bf16") != nf.BlockRecipe("mine")
    assert copy.deepcopy(mine) == pickle.loads(pickle.dumps(mine)) == mine
    assert len({nf.BlockRecipe(), nf.BlockRecipe(), mine}) == 2
    assert dataclasses.replace(mine, wgrad="block").settings == nf.BlockRecipe("mine").settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        mine.dy = "e5m2"  # type: ignore[misc]
