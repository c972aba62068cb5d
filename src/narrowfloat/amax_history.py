"""Where the amax histories of delayed scaling are kept, and when they roll: step().

A history is an attribute of its layer and no buffer: DDP would put rank 0's in the place of the
others' at each forward, and averages of a model's buffers would mix steps.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from . import _binary
from .recipe import Delayed
from .reference.delayed import FIRST, TRACKED, roll

# Layers with a history, for the hook and for step() without a model.
_followed: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()  # a set that grows while another thread walks it raises
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


def outlives_its_call(history: Tensor) -> bool:
    """Whether it is memory, which a layer may keep, and not what a FakeTensorMode or a transform of
    functorch has instead."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(history)
    return type(history) is Tensor and not wrapped


def follow(layer: nn.Module) -> None:
    """Roll this layer's history from now on where an optimizer steps its parameters."""
    global _hooked
    with _lock:
        _followed.add(layer)
        if not _hooked:
            register_optimizer_step_post_hook(_after_a_step)
            _hooked = True


def _layers() -> list[Any]:
    with _lock:
        followed = list(_followed)
    return [layer for layer in followed if vars(layer).get("scale_history") is not None]


def step(model: nn.Module | None = None) -> None:
    """End a training step for the recipes with delayed scaling ("fp8_delayed").

    What the calls since the last one measured becomes the newest step of each layer's history, and
    the next calls have scales from it; one launch for all layers. Every optimizer of torch.optim,
    and whatever is derived from torch.optim.Optimizer, does this at the end of its step for the
    layers of whose parameters it has one, and for those without a parameter that trains. So only
    another kind of optimizer, one that holds copies of the parameters, or none, needs the call; a
    second call before the next forward changes nothing. model: its layers alone; else all layers
    with such a recipe.
    """
    layers = _layers()
    if model is not None:
        of_model = set(map(id, model.modules()))
        layers = [layer for layer in layers if id(layer) in of_model]
    _roll(layers)


@_disable_dynamo  # of a compiled optimizer.step this is not part
def _after_a_step(optimizer: Optimizer, *_: Any) -> None:
    layers = _layers()
    if not layers:
        return
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if any(isinstance(p, FakeTensor) for p in stepped):
        return  # nothing was computed
    ids = set(map(id, stepped))
    _roll(layer for layer in layers if _is_stepped(layer, ids))


def _is_stepped(layer: nn.Module, ids: set[int]) -> bool:
    """Whether an optimizer over these parameters ends a step of the layer: it has one of them, or
    none of its own trains (adapters beside it do)."""
    if id(layer._parameters.get("weight")) in ids:
        return True
    trains = False
    for parameter in layer.parameters():  # a parametrization's too
        if id(parameter) in ids:
            return True
        trains = trains or parameter.requires_grad
    return not trains


def _roll(layers: Iterable[Any]) -> None:
    groups: dict[tuple[Delayed, torch.device], list[Tensor]] = {}
    for layer in layers:
        how, history = layer.recipe.delayed, layer.scale_history
        if how is None or not fits(history, how, history.device):
            continue
        if outlives_its_call(history) and not history.is_meta:
            groups.setdefault((how, history.device), []).append(history)
    for (how, device), histories in groups.items():
        if device.type != "cuda" or _binary.module is None:
            with _disable_current_modes():  # values are read, which a FakeTensorMode refuses
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


# ---- saving and loading ----

# What wraps a module under these names; a model's state is the same with and without.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_SUFFIX = "scale_history"


def _named_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(key, layer) of those with a history; a layer that is registered twice comes once."""
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if getattr(getattr(module, "recipe", None), "delayed", None) is not None:
            yield prefix + _SUFFIX, module
        parallel = isinstance(module, (DistributedDataParallel, DataParallel))
        for name, child in module.named_children():
            wrapped = name in _WRAPPED or (parallel and name == "module")
            yield from walk(child, prefix if wrapped else f"{prefix}{name}.")

    yield from walk(model, "")


def delayed_state(model: nn.Module) -> dict[str, Tensor]:
    """The amax histories of a model's layers with delayed scaling ("fp8_delayed"), to go on from.

    "<name of the layer>.scale_history" -> int32 [3, 4 + length], copies on the layer's device;
    what was measured since the last step included. Wrappers (DDP, FSDP, checkpoint_wrapper,
    torch.compile) leave no trace in the names. A state_dict of the model does not have them, so
    that it stays nn.Linear's. Each rank has its own: save one for each. Empty without such layers.
    """
    return {
        key: layer.scale_history.detach().clone()
        for key, layer in _named_layers(model)
        if layer.scale_history is not None
    }


def load_delayed_state(model: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Put what delayed_state() gave into the layers of a model with the same recipes, in place.

    state: int32 [3, 4 + length] by name, as delayed_state() says. ValueError, before anything is
    changed, where a history has another shape or dtype than the layer's recipe asks for and, unless
    strict=False, where one is missing or has no layer.
    """
    layers = dict(_named_layers(model))
    missing, unexpected = sorted(layers.keys() - state), sorted(state.keys() - layers)
    if strict and (missing or unexpected):
        raise ValueError(
            f"load_delayed_state: expected a history for each of the {len(layers)} layers with "
            f"delayed scaling and no other, got none for {missing} and some without a layer for "
            f"{unexpected} (strict=False takes those that fit)"
        )
    found = [(layer, state[key], key) for key, layer in layers.items() if key in state]
    for layer, history, key in found:
        shape = (len(TRACKED), FIRST + layer.recipe.delayed.length)
        if history.dtype != torch.int32 or history.shape != shape:
            raise ValueError(
                f"load_delayed_state: expected {key} as torch.int32 {shape} for {layer.recipe}, "
                f"got {history.dtype} {tuple(history.shape)} (it was saved with another length)"
            )
    for layer, history, _ in found:
        layer.history().copy_(history)
