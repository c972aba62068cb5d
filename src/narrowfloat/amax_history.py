"""Where the amax histories of delayed scaling are kept, and when they roll: step()."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import _binary
from .recipe import Delayed
from .reference.delayed import FIRST, TRACKED, roll

# Layers with a history, for the hook and for step() without a model.
_followed: weakref.WeakSet[Any] = weakref.WeakSet()
_hooked = False


def fresh(how: Delayed, device: torch.device) -> Tensor:
    """A layer's history that says nothing yet: the first step measures. reference/delayed.py says
    what is in it."""
    return torch.zeros(len(TRACKED), FIRST + how.length, dtype=torch.int32, device=device)


def fits(history: Tensor | None, how: Delayed, device: torch.device) -> bool:
    return (
        history is not None
        and history.device == device
        and history.dtype == torch.int32
        and history.shape[1] == FIRST + how.length
    )


def follow(layer: nn.Module) -> None:
    """Roll this layer's history at each optimizer step from now on."""
    global _hooked
    _followed.add(layer)
    if not _hooked:
        register_optimizer_step_post_hook(lambda *_: step())
        _hooked = True


def step(model: nn.Module | None = None) -> None:
    """End a training step for the recipes with delayed scaling ("fp8_delayed").

    What the calls since the last one measured becomes the newest step of each layer's history, and
    the next calls have scales from it; one launch for all layers. Every optimizer of torch.optim
    does this at the end of its step, so only another kind of optimizer, or none, needs the call;
    a second call before the next forward changes nothing. model: its layers alone; else all layers
    with such a recipe.
    """
    layers: Iterable[Any] = list(_followed)
    if model is not None:
        layers = [layer for layer in model.modules() if layer in _followed]
    groups: dict[tuple[Delayed, torch.device], list[Tensor]] = {}
    for layer in layers:
        how = layer.recipe.delayed
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
