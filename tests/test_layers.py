"""Decides what layers of all recipes do that are neither fp8's nor FP4's own (tests of their own
have those): modes, copies, states, what is held."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from conftest import (
    assert_all_ways_are_eager,
    assert_autocast_is_a_cast,
    assert_same_bits,
    skip_where_it_does_not_run,
)
from torch import Tensor, nn

import narrowfloat as nf

RECIPES = [
    name
    for name, r in nf.RECIPES.items()
    if isinstance(r, nf.BlockRecipe | nf.MixedRecipe) or (isinstance(r, nf.Recipe) and r.mix)
]
named = pytest.mark.parametrize("recipe", RECIPES)


@named
def test_autocast(device: str, recipe: str) -> None:
    skip_where_it_does_not_run(recipe, device)
    layer = nf.Linear(64, 32, device=device, recipe=recipe)
    assert_autocast_is_a_cast(layer, torch.randn(16, 64, device=device))


@named
def test_checkpoint_compile_and_modes_give_the_same_bits(device: str, recipe: str) -> None:
    skip_where_it_does_not_run(recipe, device)
    layer = nf.Linear(72, 48, device=device, recipe=recipe)
    x, g = torch.randn(33, 72, device=device), torch.randn(33, 48, device=device)
    assert_all_ways_are_eager(layer, x, g)


@named
def test_copies_and_states(device: str, recipe: str) -> None:
    skip_where_it_does_not_run(recipe, device)
    layer = nf.Linear(32, 48, device=device, recipe=recipe)
    plain = nn.Linear(32, 48, device=device)
    plain.load_state_dict(layer.state_dict(), strict=True)
    layer.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(5, 32, device=device)
    assert layer.extra_repr().endswith(f"recipe={recipe}")
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is nf.Linear and twin.recipe == layer.recipe
        assert_same_bits(twin(x), layer(x))


@named
def test_nothing_lives_on(device: str, recipe: str) -> None:
    """After the backward nothing of a call is held, without the garbage collector."""
    skip_where_it_does_not_run(recipe, device)
    layer = nf.Linear(64, 48, device=device, recipe=recipe)
    refs: list[weakref.ref[Tensor]] = []

    def note(t: Tensor) -> Tensor:
        if t is not layer.weight and t.data_ptr() != layer.weight.data_ptr():
            refs.append(weakref.ref(t))
        return t

    gc.collect()
    gc.disable()
    try:
        x = torch.randn(32, 64, device=device, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y = layer(x)
        y.sum().backward()
        del x, y
        assert refs and all(ref() is None for ref in refs)
    finally:
        gc.enable()
