"""Whether a module can be a narrowfloat layer, by its class, its weight and itself; which class."""

from __future__ import annotations

import copyreg
import inspect
import types
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from ..formats import HIGH_PRECISION
from ..modules import FP4Linear, FP8Linear, Linear

# What a subclass may not have of its own: a call would not be nn.Linear's, or its state would be
# more than a weight and a bias.
_CALLED = (
    *("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__"),
    *("__setattr__", "__delattr__", "get_extra_state", "set_extra_state"),
)

# What only a layer of ours has in its __dict__.
OURS = ("recipe", "scale_history", "shares_input", "weight_cache")


def _own_forwards(cls: type[nn.Linear]) -> list[Any]:
    """The forwards that stand before nn.Linear's in the order of bases, the first one first."""
    before = cls.__mro__[: cls.__mro__.index(nn.Linear)]
    return [vars(base)["forward"] for base in before if "forward" in vars(base)]


def _calls_super(forward: Any) -> bool:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and {"super", "forward"} <= set(code.co_names)


_made: dict[Any, type[Linear]] = {}


def class_for(cls: type[nn.Linear]) -> type[Linear]:
    """The class of a layer of ours that was a `cls`: Linear, or for a subclass S of nn.Linear one
    with the bases S and Linear. It has S's name and what S defines; where S's forward calls
    super().forward that is Linear's. Copies and pickles name S. TypeError where S cannot be
    derived from."""
    if cls is nn.Linear:
        return Linear
    if cls in _made:
        return _made[cls]

    def reduce(self: Any, protocol: Any) -> Any:
        how: Any = object.__reduce_ex__(self, protocol)
        made, arguments, *rest = how
        if made is copyreg.__newobj__ and arguments == (type(self),):  # type: ignore[attr-defined]
            return (new, (cls,), *rest)
        return (made, arguments, *rest)

    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce,
        "replaces": cls,
    }
    made = types.new_class(cls.__name__, (cls, Linear), exec_body=lambda own: own.update(body))
    _made[cls] = made
    return made


def new(cls: type[nn.Linear]) -> Linear:
    """What a copy or pickle of a layer begins with."""
    made = class_for(cls)
    return made.__new__(made)


def class_before(module: Linear) -> type[nn.Linear] | None:
    """What class_for() was given for this layer's class; None for a class that someone else
    derived from Linear."""
    cls = type(module)
    if cls in (Linear, FP8Linear, FP4Linear):
        return nn.Linear
    return vars(cls).get("replaces")


def class_reason(module: nn.Linear, take_subclass: bool) -> str | None:
    """Why a module of this class stays what it is; None: it can be a layer of ours."""
    cls = type(module)
    if parametrize.is_parametrized(module):
        return f"it is parametrized ({cls.__name__}; convert first, then parametrize)"
    if cls is nn.Linear or issubclass(cls, Linear):
        return None
    if issubclass(cls, nn.modules.lazy.LazyModuleMixin):
        return f"its type is {cls.__name__}, without a weight yet (run the model once before)"
    other = [n for n in _CALLED if getattr(cls, n, None) is not getattr(nn.Linear, n, None)]
    other += [n for n in ("weight", "bias") if inspect.getattr_static(cls, n, None) is not None]
    if other:
        return f"its type is {cls.__name__}, which has {other[0]} of its own"
    forwards = _own_forwards(cls)
    if not all(map(_calls_super, forwards)):
        return (
            f"its type is {cls.__name__}, whose forward does not call nn.Linear's: nothing of it "
            "would run in the recipe"
        )
    if forwards and not take_subclass:
        return (
            f"its type is {cls.__name__}, which has a forward of its own (take='subclass' "
            "converts what that calls as super().forward)"
        )
    try:
        class_for(cls)
    except TypeError as error:
        return f"its type is {cls.__name__}, which cannot be derived from ({error})"
    return None


def has_own_forward(module: nn.Linear) -> bool:
    """Whether a call does more than nn.Linear's or Linear's forward."""
    own = [f for f in _own_forwards(type(module)) if f is not Linear.forward]
    return bool(own) or "forward" in vars(module)


def module_reason(module: nn.Linear) -> str | None:
    """Why this module stays what it is, whatever its class says."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    for name in ("weight", "bias"):
        tensor = getattr(module, name, None)
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, torch.Tensor):
            return f"its {name} is no tensor ({type(tensor).__name__})"
        if isinstance(tensor, UninitializedParameter):
            return f"its {name} is not initialized yet (run the model once before)"
        if tensor.dtype not in HIGH_PRECISION:
            return (
                f"its {name} is in {tensor.dtype}, and float32, bfloat16 and float16 are quantized"
            )
        cls = type(tensor)
        foreign = cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if tensor.layout != torch.strided or (foreign and cls.__module__.split(".")[0] != "torch"):
            return f"its {name} is a {cls.__name__} ({tensor.layout}), not a plain tensor"
    return None
