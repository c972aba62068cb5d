"""No public name is without a docstring; what takes tensors says shapes, dtypes and errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import narrowfloat as nf
from narrowfloat import functional_op, ops, w4a16
from narrowfloat.reference import linear, tensor

SHAPE = re.compile(r"\[[^\]]*\]|any shape|of the (same )?shape")
DTYPE = re.compile(r"fp32|bf16|fp16|E4M3|E5M2|E2M1|uint8|int32|int64|[Dd]type")
ERRORS = re.compile(r"\w+Error|[Ee]rrors|the same errors")
PUBLIC = {name: getattr(nf, name) for name in nf.__all__}
CALLED = {name: value for name, value in PUBLIC.items() if callable(value)}
# what torch's classes ask for and document
PROTOCOL = {"forward", "backward", "extra_repr", "setup_context", "jvp"}


def operators() -> dict[str, Callable[..., Any]]:
    """What each public operator means, in the Python that it was defined by."""
    places = linear, tensor, w4a16
    found = {
        name: next(getattr(place, name) for place in places if hasattr(place, name))
        for name in (*ops.SCHEMAS, "fp4_weight_matmul")
    }
    assert {name.split("::")[1] for name in registered()} >= set(found)
    return found


def registered() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return [name for name in names if name.startswith("narrowfloat::")]


def of_tensors(value: Any) -> bool:
    """Whether it is a function with a tensor among its parameters."""
    if not inspect.isfunction(value):
        return False
    parameters = inspect.signature(value).parameters.values()
    return any(re.search(r"\bTensor\b", str(p.annotation)) for p in parameters)


@pytest.mark.parametrize("name", CALLED)
def test_every_public_name_has_a_docstring(name: str) -> None:
    text = inspect.getdoc(CALLED[name]) or ""
    own = vars(CALLED[name]).get("__doc__") if isinstance(CALLED[name], type) else text
    assert own and len(own) > 20, f"{name} says nothing"
    assert not own.startswith(f"{name}("), f"{name} has the docstring of its class alone"


@pytest.mark.parametrize("name", [n for n, v in CALLED.items() if isinstance(v, type)])
def test_every_public_method_has_a_docstring(name: str) -> None:
    missing = []
    for method, value in vars(CALLED[name]).items():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if method.startswith("_") or method in PROTOCOL or not inspect.isfunction(function):
            continue
        if not function.__doc__:
            missing.append(method)
    assert not missing, f"{name}: {missing} say nothing"


SAY_ALL = [
    name
    for name, value in CALLED.items()
    if of_tensors(value) or (isinstance(value, type) and issubclass(value, torch.autograd.Function))
]


@pytest.mark.parametrize("name", SAY_ALL)
def test_what_takes_tensors_says_shapes_dtypes_and_errors(name: str) -> None:
    text = inspect.getdoc(CALLED[name]) or ""
    for what, pattern in (("shapes", SHAPE), ("dtypes", DTYPE), ("errors", ERRORS)):
        assert pattern.search(text), f"{name} says no {what}: {text}"


@pytest.mark.parametrize("name", [*ops.SCHEMAS, "fp4_weight_matmul"])
def test_every_operator_says_shapes_and_dtypes(name: str) -> None:
    text = inspect.getdoc(operators()[name]) or ""
    if name.startswith("delayed"):  # the same as another, with a history
        assert name.removeprefix("delayed_") in text
        return
    for what, pattern in (("shapes", SHAPE), ("dtypes", DTYPE)):
        assert pattern.search(text), f"{name} says no {what}: {text}"


def test_modules_say_what_they_are_for() -> None:
    for module in (nf, ops, w4a16, functional_op, linear, tensor):
        assert module.__doc__ and len(module.__doc__) > 20, module.__name__
