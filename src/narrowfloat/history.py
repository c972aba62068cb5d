"""Decides where the scales from the steps before are kept, and when they roll: step()."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import _binary
from .recipe import AnyRecipe, Delayed, Recipe
from .reference_delayed import FIRST, TRACKED, roll

if TYPE_CHECKING:
    from .modules import Linear

# Layers with a history, for the hook and for step() without a model.
_followed: weakref.WeakSet[Linear] = weakref.WeakSet()
_hooked = False


def of(recipe: AnyRecipe) -> Delayed | None:
    """How a recipe takes scales from the steps before; None where it does not."""
    return recipe.delayed if type(recipe) is Recipe else None


def fresh(how: Delayed, device: torch.device) -> Tensor:
    """A layer's history that says nothing yet: the first step measures. reference_delayed.py says
    what is in it."""
    return torch.zeros(len(TRACKED), FIRST + how.length, dtype=torch.int32, device=device)


def fits(history: Tensor | None, how: Delayed, device: torch.device) -> bool:
    return (
        history is not None
        and history.device == device
        and history.dtype == torch.int32
        and history.shape[1] == FIRST + how.length
    )


def follow(layer: Linear) -> None:
    """Roll this layer's history at each optimizer step from now on."""
    global _hooked
    _followed.add(layer)
    if not _hooked:
        register_optimizer_step_post_hook(lambda *_: step())
        _hooked = True


def step(model: nn.Module | None = None) -> None:
    """End a training step for the recipes with scales from the steps before ("fp8_delayed").

    What the calls since the last one measured becomes the newest step of each layer's history, and
    the next calls have scales from it; one launch for all layers. Every optimizer of torch.optim
    does this at the end of its step, so only another kind of optimizer, or none, needs the call;
    a second call before the next forward changes nothing. model: its layers alone; else all layers
    with such a recipe.
    """
    from .modules import Linear

    layers: Iterable[nn.Module] = _followed if model is None else model.modules()
    groups: dict[tuple[Delayed, torch.device], list[Tensor]] = {}
    for layer in list(layers):
        how = of(layer.recipe) if isinstance(layer, Linear) else None
        if how is None:
            continue
        history = layer._buffers.get("scale_history")
        if history is not None and fits(history, how, history.device) and not history.is_meta:
            groups.setdefault((how, history.device), []).append(history)
    for (how, device), histories in groups.items():
        if device.type != "cuda" or _binary.module is None:
            for history in histories:
                roll(history, how.use == "latest", how.margin)
            continue
        with torch.cuda.device(device):
            _binary.module.roll_histories(
                [history.data_ptr() for history in histories],
                len(TRACKED),
                FIRST + how.length,
                how.use == "latest",
                how.margin,
                torch.cuda.current_stream(device).cuda_stream,
            )
