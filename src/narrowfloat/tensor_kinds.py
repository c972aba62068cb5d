"""What linear() does with an x that is no plain tensor: a torch.fx proxy, a jagged tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .recipe import RECIPES, Recipe

# The forwards whose whole module torch.fx may call: Tracer.is_leaf_module asks for modules of
# torch.nn alone and has no list to add to.
LEAVES: set[Callable[..., Any]] = set()

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_proxy(x: Any) -> bool:
    """Whether torch.fx traces."""
    return isinstance(x, Proxy)


def leaf_of(x: Proxy) -> Any:
    """A call of the module that is being traced as a node of its own, as of nn.Linear; None where
    its forward is not all that there is to it (a subclass, hooks, the traced model itself)."""
    tracer: Any = x.tracer
    path = getattr(getattr(tracer, "scope", None), "module_path", "")
    root = getattr(tracer, "root", None)
    if not path or not isinstance(root, nn.Module):
        return None
    try:
        module = root.get_submodule(path)
    except AttributeError:
        return None
    if type(module).forward not in LEAVES or any(getattr(module, name) for name in _HOOKS):
        return None
    return tracer.create_proxy("call_module", path, (x,), {})


def call_of(function: Callable[..., Tensor], x: Any, *arguments: Any, recipe: Recipe) -> Any:
    """A call of `function` as a node. ValueError for a recipe without a name: a graph's code holds
    names."""
    if RECIPES.get(recipe.name) != recipe:
        raise ValueError(
            f"narrowfloat.{function.__name__}: expected a recipe out of RECIPES under torch.fx, "
            f"got {recipe!r} (add it to RECIPES by its name first)"
        )
    proxy = next(t for t in (x, *arguments) if isinstance(t, Proxy))
    return proxy.tracer.create_proxy("call_function", function, (x, *arguments, recipe.name), {})


def is_jagged(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.jagged


def of_values(x: Any, function: Callable[[Tensor], Tensor], who: str) -> Tensor:
    """function of the rows of a jagged x [B, j, ..., K], as a tensor of the same raggedness."""
    if x.lengths() is not None:  # what lies between its rows would count for a scale
        raise ValueError(
            f"{who}: expected a nested tensor without holes, got one with lengths "
            "(give it x.contiguous())"
        )
    if x._ragged_idx == x.dim() - 1:
        raise ValueError(
            f"{who}: expected x [..., K] with one K, got a nested tensor whose last dimension is "
            f"ragged, {tuple(x.shape)} (transpose it back)"
        )
    y = function(x.values())
    return torch.nested.nested_tensor_from_jagged(y, x.offsets(), jagged_dim=x._ragged_idx)
