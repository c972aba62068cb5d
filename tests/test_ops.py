"""The operators' schemas: of the references, of the fakes and of the compiled kernels alike."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import assert_same_bits
from every import ALL_CASTS, EVERY, every, tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import narrowfloat as nf
from narrowfloat import ops, spec
from narrowfloat.amax_history import fresh
from narrowfloat.reference import linear, tensor
from narrowfloat.spec import DB, DW, NEED_DX, W_MEASURED, Quantize, both

SEED = torch.tensor([11, -5])
REFERENCE: dict[str, Callable[..., Any]] = {
    name: getattr(tensor if name.startswith("scaled_mm") else linear, name) for name in ops.SCHEMAS
}


def check(op: Any, arguments: tuple) -> None:
    """torch.library's checks of what an operator says of itself. That of the schema multiplies its
    arguments by something, which FP8 tensors do not know."""
    checks = ["test_faketensor", "test_autograd_registration"]
    if not any(isinstance(a, Tensor) and a.dtype.itemsize == 1 for a in arguments):
        checks.append("test_schema")
    opcheck(op, arguments, test_utils=tuple(checks))


def backward_spec(recipe: nf.Recipe, dtype: torch.dtype) -> int:
    asked = NEED_DX | DW[dtype] | DB[dtype] | (W_MEASURED if recipe.keep_w else 0)
    return recipe.backward_spec | asked


def arguments_of(recipe: nf.Recipe, dtype: torch.dtype = torch.float32) -> dict[str, tuple]:
    """For the operators of one recipe: name -> arguments, in several ways where there are."""
    x, w, bias, dy = tensors(20, 40, 24, "cpu", dtype)
    forward = recipe.forward_spec | recipe.save_x | recipe.keep_w
    _, columns, columns_scales, scales = ops.linear_forward(x, w, bias, forward)
    if not recipe.save_x:
        columns, columns_scales = x, None
    elif not recipe.saves_x_scales:
        columns_scales = None
    back = backward_spec(recipe, dtype)
    return {
        "linear_forward": (x, w, bias, forward),
        "linear_forward, nothing wanted": (x.view(4, 5, 40), w, None, recipe.forward_spec),
        "linear_backward": (dy, columns, columns_scales, scales, w, SEED, 40, back),
        "linear_backward, dx alone": (
            (dy.view(4, 5, 24), None, None, None, w, SEED, 40, recipe.backward_spec | NEED_DX)
        ),
        "linear_backward, nothing": (dy, None, None, None, None, None, 40, recipe.backward_spec),
    }


def calls() -> dict[str, tuple[ops.Operator, tuple]]:
    """Every operator, as it may be called."""
    x, w, bias, dy = tensors(16, 32, 48, "cpu")
    e4, fp4 = nf.Cast(), nf.Cast("e2m1", "nvfp4", stochastic=True)
    rows, _, columns, _, scales = ops.quantize_op(x, both(e4, e4).pack())
    w_rows, _, w_columns, _, w_scales = ops.quantize_op(w, both(e4, e4).pack())
    scale, w_scale = scales[:4], w_scales[:4]
    fp8 = nf.RECIPES["fp8"]
    history = fresh(nf.Delayed(), x.device)
    back = fp8.backward_spec | NEED_DX | DW[x.dtype]
    beforehand = (rows, None, scale, w_rows, None, w_scale, 16, 48, 32)
    y_dtype = spec.Y_DTYPE[torch.bfloat16]
    return {
        "quantize": (ops.quantize_op, (x, both(e4, e4).pack(), scale)),
        "quantize, FP4": (ops.quantize_op, (x, both(fp4, fp4).pack(), None, SEED)),
        "scaled_mm": (
            ops.scaled_mm_op,
            (rows, w_rows, scale, w_scale, None, torch.float32, False),
        ),
        "scaled_mm_accumulate_": (
            ops.scaled_mm_accumulate_op,
            (torch.zeros(16, 48), rows, w_rows, scale, w_scale, False),
        ),
        "linear_forward": (ops.linear_forward, (x, w, bias, fp8.forward_spec | fp8.save_x)),
        "linear_forward, given": (
            ops.linear_forward,
            (None, None, bias, fp8.forward_spec | y_dtype, *beforehand),
        ),
        "linear_backward": (ops.linear_backward, (dy, columns, None, scale, w, None, 32, back)),
        "linear_backward, given": (
            ops.linear_backward,
            (dy, columns, None, None, None, None, 32, back, scale, w_columns, None, w_scale),
        ),
        "delayed_linear_forward": (
            ops.delayed_linear_forward,
            (x, w, bias, history, fp8.forward_spec | fp8.save_x),
        ),
        "delayed_linear_backward": (
            ops.delayed_linear_backward,
            (dy, columns, scale, w, history.clone(), 32, back),
        ),
    }


def operator_of(name: str) -> Any:
    return getattr(torch.ops.narrowfloat, name.split(",")[0]).default


# ---- schemas ----


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_the_schema_is_the_references_signature(name: str) -> None:
    assert set(ops.SCHEMAS) == {n.split(",")[0] for n in calls()}
    schema = operator_of(name)._schema
    signature = inspect.signature(REFERENCE[name])
    assert [a.name for a in schema.arguments] == list(signature.parameters)
    known = {"Tensor": "Tensor", "int": "int", "bool": "bool", "torch.dtype": "int"}
    for argument, parameter in zip(schema.arguments, signature.parameters.values(), strict=True):
        annotation = str(parameter.annotation)
        assert ("None" in annotation) == (str(argument.type).startswith("Optional")), argument.name
        kind = known[annotation.removesuffix(" | None")]
        assert kind in str(argument.type), (argument.name, argument.type)
        has_default = parameter.default is not inspect.Parameter.empty
        assert argument.has_default_value() == has_default
        assert not has_default or argument.default_value == parameter.default
        changes = argument.alias_info is not None and argument.alias_info.is_write
        assert changes == (argument.name in ("out", "history")), argument.name
    returned = str(signature.return_annotation)
    assert len(schema.returns) == returned.count("Tensor")
    assert schema.name == f"narrowfloat::{name}"


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_the_fake_has_the_references_signature(name: str) -> None:
    fake = inspect.signature(getattr(ops, f"_{name}"))
    reference = inspect.signature(REFERENCE[name])
    assert fake.parameters == reference.parameters
    assert fake.return_annotation == reference.return_annotation


@pytest.mark.parametrize("name", calls())
def test_the_compiled_kernel_takes_the_schema(name: str) -> None:
    """The CUDA kernel, called past the dispatcher with tensors of the CPU, unpacks its arguments,
    their number and types included, and refuses the device by name: no GPU is needed to see a
    schema in ops.py and a signature in csrc that have parted."""
    if nf._binary.module is None:
        pytest.skip(f"no binary: {nf._binary.problem}")
    op, arguments = calls()[name]
    op(*arguments)  # the CPU's own kernel takes them
    for given in (arguments, (torch.ones(3), *arguments[1:])):
        with pytest.raises(ValueError, match=r"expected .* on (the CUDA|cpu)"):
            on_cuda(op)(*given)


def on_cuda(op: ops.Operator) -> ops.Operator:
    """op, calling its CUDA kernel whatever the tensors' device."""
    key = torch._C.DispatchKey.CUDA
    return ops.Operator(lambda *arguments: op.overload._op_dk(key, *arguments))


# ---- fakes ----


def assert_fake_is_real(op: Any, arguments: tuple) -> None:
    """Shapes, dtypes and strides of what a fake says, and what the operator returns."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        said = op(*fakes)
    real = op(*arguments)
    if isinstance(real, Tensor):
        said, real = [said], [real]
    for at, (a, b) in enumerate(zip(said or (), real or (), strict=True)):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), at
        assert b.is_contiguous() and (b.numel() == 0 or a.stride() == b.stride()), at


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fake_is_what_the_operator_returns(recipe: nf.Recipe, dtype: torch.dtype) -> None:
    for name, arguments in arguments_of(recipe, dtype).items():
        assert_fake_is_real(operator_of(name), arguments)


@pytest.mark.parametrize("cast", ALL_CASTS, ids=str)
@pytest.mark.parametrize("shape", [(20, 40), (2, 3, 130), (0, 16), (7, 1)])
def test_a_fake_of_quantize_is_what_it_returns(cast: nf.Cast, shape: tuple[int, ...]) -> None:
    for wanted in ((True, True), (True, False), (False, True), (False, False)):
        choices = Quantize(cast, cast, *wanted)
        arguments = (torch.randn(shape), choices.pack(), None, SEED)
        assert_fake_is_real(operator_of("quantize"), arguments)
        if cast.of.power_of_two or cast.of.family == "fp4":
            as_operand = choices._replace(rows_as_operand=True, columns_as_operand=True)
            arguments = (torch.randn(shape), as_operand.pack(), None, SEED)
            assert_fake_is_real(operator_of("quantize"), arguments)


@pytest.mark.parametrize("name", calls())
def test_a_fake_of_every_operator_is_what_it_returns(name: str) -> None:
    op, arguments = calls()[name]
    assert_fake_is_real(op.overload, arguments)


@pytest.mark.parametrize("name", calls())
def test_torchs_own_checks(name: str) -> None:
    op, arguments = calls()[name]
    check(op.overload, arguments)


@pytest.mark.parametrize("recipe", nf.RECIPES)
def test_torchs_own_checks_of_every_recipe(recipe: str) -> None:
    for name, arguments in arguments_of(nf.RECIPES[recipe]).items():
        check(operator_of(name), arguments)


def test_the_cpu_is_served_by_the_reference() -> None:
    """Not by a copy of it."""
    for recipe in EVERY[:3]:
        for name, arguments in arguments_of(recipe).items():
            want = REFERENCE[name.split(",")[0]](*arguments)
            for a, b in zip(operator_of(name)(*arguments), want, strict=True):
                assert_same_bits(a, b, name)


# ---- errors ----


def test_errors_have_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch makes of an exception, and never an older one's."""
    thrown: list[tuple[int, str]] = []

    def operator(error: Exception) -> ops.Operator:
        def fails() -> None:
            raise error

        return ops.Operator(fails)

    module = types.SimpleNamespace(take_error=lambda: thrown.pop() if thrown else (0, ""))
    monkeypatch.setattr(nf._binary, "module", module)
    for kind, expected in enumerate((RuntimeError, ValueError, TypeError, torch.OutOfMemoryError)):
        thrown[:] = [(kind, "what came")]
        with pytest.raises(expected, match="what came") as caught:
            operator(RuntimeError("torch says: what came"))()
        assert caught.type is expected
    thrown[:] = [(1, "what came before")]
    with pytest.raises(RuntimeError, match="something else") as other:
        operator(RuntimeError("something else"))()
    assert other.type is RuntimeError
    with pytest.raises(KeyError):
        operator(KeyError("as it is"))()
