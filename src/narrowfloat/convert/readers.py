"""Which modules read the weight of a child themselves, past the child's forward.

nn.MultiheadAttention does, and nn.TransformerEncoderLayer in eval mode: a recipe of the child has
no part in what they compute. Such reads are found in the code of the parent's class: what it names
as `self.<child>.weight` in forward and in the methods that forward calls on self.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from ..modules import Linear
from ..w4a16 import PackedFP4Linear

# Attributes of a weight that say nothing of its values.
_ABOUT = {
    *("dtype", "device", "shape", "size", "ndim", "dim", "numel", "is_cuda", "is_meta"),
    *("requires_grad", "layout", "type"),
}
# Their own code is looked at by hand: set_fast_paths() below sees to it.
_KNOWN = (nn.Module, nn.TransformerEncoderLayer, nn.TransformerEncoder, object)
_NOTHING = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME", "NOT_TAKEN"}


def _chains(code: CodeType, this: str) -> Iterator[tuple[list[str], bool]]:
    """Each `self.a.b...` in a function's code as (["a", "b", ...], whether it is what isinstance
    is asked of)."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _NOTHING]
    for at, step in enumerate(steps):
        named = step.argval[-1:] if isinstance(step.argval, tuple) else (step.argval,)
        called = at > 1 and steps[at - 2].argval == "super" and "CALL" in steps[at - 1].opname
        if called or "SUPER" in step.opname:  # the first before Python 3.12
            yield list(named), False
        # also STORE_FAST_LOAD_FAST and the like, whose last name is the one that is loaded
        if named != (this,) or not any(n in step.opname for n in ("LOAD_FAST", "LOAD_DEREF")):
            continue
        chain = []
        for after in steps[at + 1 :]:
            if after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                break
            chain.append(after.argval)
        yield chain, at > 0 and steps[at - 1].argval == "isinstance"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _chains(constant, this)


_found: dict[Any, dict[tuple[str, ...], bool]] = {}


def _reads(cls: type[nn.Module]) -> dict[tuple[str, ...], bool]:
    """Path of a child -> whether its weight's values are read, for each child whose weight a
    forward of this class reads."""
    if cls in _found:
        return _found[cls]
    found: dict[tuple[str, ...], bool] = {}
    seen: set[Any] = set()
    ahead = ["forward"]
    while ahead:
        name = ahead.pop()
        for base in cls.__mro__:
            function = vars(base).get(name)
            function = function.fget if isinstance(function, property) else function
            function = inspect.unwrap(function) if callable(function) else None
            code = getattr(function, "__code__", None)
            if base in _KNOWN or code is None or code in seen or not code.co_varnames:
                continue
            seen.add(code)
            for chain, asked in _chains(code, code.co_varnames[0]):
                ahead += chain[:1]
                if "weight" in chain[1:]:
                    at = chain.index("weight", 1)
                    values = not asked and (chain[at + 1 : at + 2] or [""])[0] not in _ABOUT
                    path = tuple(chain[:at])
                    found[path] = found.get(path, False) or values
    _found[cls] = found
    return found


def readers(model: nn.Module) -> dict[int, tuple[str, bool]]:
    """id of a linear -> (who reads its weight, whether it reads the values)."""
    found: dict[int, tuple[str, bool]] = {}
    for name, parent in model.named_modules():
        for path, values in _reads(type(parent)).items():
            child: Any = parent
            for part in path:
                child = child._modules.get(part) if isinstance(child, nn.Module) else None
            if isinstance(child, nn.Linear):
                earlier = found.get(id(child), ("", False))
                if values or not earlier[0]:
                    who = f"{name or 'the model itself'} ({type(parent).__name__})"
                    found[id(child)] = (who, values or earlier[1])
    return found


# ---- nn.TransformerEncoderLayer and nn.TransformerEncoder ----

# What each says of whether it may take its fast path, which computes with the weights of linear1
# and linear2, or hands nested tensors to its layers.
_FAST = {"activation_relu_or_gelu": 0, "use_nested_tensor": False}
_BEFORE = "_before_narrowfloat"


def _has_ours(layer: nn.Module) -> bool:
    made = (Linear, PackedFP4Linear)
    return any(isinstance(layer._modules.get(n), made) for n in ("linear1", "linear2"))


def set_fast_paths(model: nn.Module) -> None:
    """No fast path in the encoder layers whose linears are ours, nor nested tensors for them: eval
    mode then computes as train mode does. Where none is ours any more they are as they were."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            ours = _has_ours(module)
        elif isinstance(module, nn.TransformerEncoder):
            ours = any(_has_ours(layer) for layer in module.layers)
        else:
            continue
        state = vars(module)
        if ours and _BEFORE not in state:
            state[_BEFORE] = {name: state[name] for name in _FAST if name in state}
            state.update({name: value for name, value in _FAST.items() if name in state})
        elif not ours and _BEFORE in state:
            state.update(state.pop(_BEFORE))
