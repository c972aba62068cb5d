"""The way back: revert() makes nn.Linear of narrowfloat's layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..modules import Linear
from ..w4a16 import PackedFP4Linear
from .classes import OURS, class_before
from .planning import Filter, matches
from .readers import set_fast_paths


def revert(model: nn.Module, filter: Filter = None) -> list[str]:
    """Make nn.Linear layers of model's narrowfloat Linear layers again, in place.

    The modules stay what they are, and so do parameters (bit for bit), hooks, ties, modes and the
    state_dict; what was a subclass of nn.Linear is of its class again. Amax histories are
    forgotten. filter: as in convert().

    Returns the names of the layers that were reverted. ValueError, with nothing changed, where
    there is none, or for layers that have no way back: PackedFP4Linear (its weight is gone),
    classes that were derived from Linear, and parametrized layers.
    """
    ours = [
        (name, module) for name, module in model.named_modules()
        if isinstance(module, Linear | PackedFP4Linear) and matches(filter, name, module)
    ]  # fmt: skip
    if not ours:
        raise ValueError(
            f"revert: expected a model with narrowfloat layers, got {type(model).__name__} "
            f"without any{'' if filter is None else ' that the filter matches'}"
        )
    stuck = [
        f"{name or 'the model itself'} ({type(module).__name__})" for name, module in ours
        if isinstance(module, PackedFP4Linear) or class_before(module) is None
    ]  # fmt: skip
    if stuck:
        raise ValueError(
            f"revert: expected layers that convert() made of nn.Linear, got {', '.join(stuck[:4])}"
            f"{', ...' if len(stuck) > 4 else ''} (a packed weight is gone, dequantize() gives its "
            "values; a class of your own or a parametrization stays; leave them out with filter)"
        )
    for _, module in ours:
        made: Any = module
        made._buffers.pop("scale_history", None)
        made._non_persistent_buffers_set.discard("scale_history")
        for name in OURS:
            vars(made).pop(name, None)
        made.__class__ = class_before(made)
    set_fast_paths(model)
    return [name for name, _ in ours]
