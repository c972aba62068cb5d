"""Replacing layers by PackedFP4Linear: all of them or none, wherever they are registered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..recipe import Recipe
from ..w4a16 import PackedFP4Linear
from .classes import OURS, has_own_forward

# The hooks that a packed layer takes over. Their dictionaries are taken, not copied: a handle's
# remove() finds its hook through them.
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_STATE = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_COPIED = (int, float, str, bytes, bool, type(None))


def held_elsewhere(model: nn.Module) -> dict[int, str]:
    """id of a linear -> where it is held beside what modules register: in an attribute that is a
    list, tuple, dict or set, or was set past nn.Module."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute == "_modules":
                continue
            for item in _items(value):
                if isinstance(item, nn.Linear):
                    found[id(item)] = f"{name}.{attribute}" if name else attribute
    return found


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    else:
        yield value


def packing_reason(module: nn.Linear, held: dict[int, str]) -> str | None:
    """Why this layer cannot be replaced without losing something of it."""
    if has_own_forward(module):
        return "its forward is its own, and a packed layer has another"
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weight is computed at each forward, and packed weights stay as they are"
    held_by_it = (*module._parameters, *module._buffers, *module._modules)
    more = [name for name in held_by_it if name not in ("weight", "bias", "scale_history")]
    if more:
        return f"it holds {more[0]} besides its weight and bias"
    if any(vars(module).get(hooks) for hooks in _BACKWARD):
        return "it has backward hooks, and a packed layer has no backward"
    if any(vars(module).get(hooks) for hooks in _STATE):
        return "it has hooks of its state_dict, and a packed layer has another state"
    if id(module) in held:
        return f"{held[id(module)]} holds it too, where it cannot be replaced"
    return None


def pack(model: nn.Module, recipes: dict[str, Recipe]) -> None:
    """Replace the layers of these names by packed ones of these recipes, at each place where a
    module registers them. All are made before the first is replaced: what fails changes nothing."""
    made: dict[int, PackedFP4Linear] = {}
    for name, recipe in recipes.items():
        module: Any = model.get_submodule(name)
        packed = PackedFP4Linear.from_linear(module, recipe)
        state = vars(packed)
        for hooks in _HOOKS:
            state[hooks] = vars(module)[hooks]
        for attribute, value in vars(module).items():  # what a hook or a framework marked it with
            if attribute not in state and attribute not in OURS and isinstance(value, _COPIED):
                state[attribute] = value
        made[id(module)] = packed
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if id(child) in made:
                parent._modules[key] = made[id(child)]
