"""Bad arguments: whatever one argument of an operator or of a public function is made into, the
call either works or raises ValueError, TypeError or NotImplementedError in words that name the
argument; and after it the device computes what it did before.

The same examples each time in the ordinary run, many with `-m fuzz` (fuzzed.py).
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from conftest import assert_same_bits
from every import quantized, tensors
from fuzzed import PARTS, long_run_examples, run
from torch import Tensor

import narrowfloat as nf
from narrowfloat import ops, w4a16
from narrowfloat.amax_history import fresh
from narrowfloat.spec import DB, DW, NEED_DX, W_MEASURED, Y_DTYPE, both

M, K, N = 20, 40, 24
FP32, BF16 = torch.float32, torch.bfloat16


class Call(NamedTuple):
    """A call that is right; each of its arguments by name. raw: an operator, which the dispatcher
    gives tensors or None."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    raw: bool = False


def _operator(op: Any, *arguments: Any) -> Call:
    overload = op.overload if isinstance(op, ops.Operator) else op
    names = [a.name for a in overload._schema.arguments]
    # the same wrapper gives errors their types, for those that have none of their own
    wrapped = op if isinstance(op, ops.Operator) else ops.Operator(op)
    return Call(lambda **a: wrapped(*a.values()), dict(zip(names, arguments, strict=False)), True)


def operators_of(device: str) -> dict[str, Call]:
    found = {}
    x, w, bias, dy = tensors(M, K, N, device)
    seed = torch.tensor([11, -5], device=device)
    for name in ("fp8", "fp8_row", "fp8_block", "mxfp8", "nvfp4", "mxfp4", "fp8_bf16_wgrad"):
        r = nf.RECIPES[name]
        if not nf.supported(r, device):
            continue
        forward = r.forward_spec | r.save_x | r.keep_w
        made = ops.linear_forward(x, w, bias, forward)
        saved = made[1:] if r.save_x else (x, None, made[3])
        if r.save_x and not r.saves_x_scales:
            saved = (saved[0], None, saved[2])
        back = r.backward_spec | NEED_DX | DW[FP32] | DB[FP32]
        of_x, of_w = (quantized(t, c) for t, c in zip((x, w), r.fprop.casts, strict=True))
        w_columns = quantized(w, r.dgrad.casts[1], True)
        typed = r.forward_spec | Y_DTYPE[BF16]
        cast = r.fprop.casts[0]
        found |= {
            f"quantize, {name}": _operator(
                ops.quantize_op, x, both(cast, cast).pack(), None, seed
            ),
            f"linear_forward, {name}": _operator(ops.linear_forward, x, w, bias, forward),
            f"linear_forward given, {name}": _operator(
                ops.linear_forward, None, None, bias, typed, *of_x, *of_w, M, N, K
            ),
            f"linear_backward, {name}": _operator(
                ops.linear_backward, dy, *saved, w, seed, K,
                back | (W_MEASURED if r.keep_w else 0),
            ),
            f"linear_backward given, {name}": _operator(
                ops.linear_backward, dy, *saved, None, seed, K, back, None, *w_columns
            ),
            f"linear, {name}": _operator(
                torch.ops.narrowfloat.linear.default, x, w, bias, forward,
                r.backward_spec | (W_MEASURED if r.keep_w else 0), r.draws_dx or r.draws_dw,
            ),
            f"linear_gradients, {name}": _operator(
                torch.ops.narrowfloat.linear_gradients.default, dy, *saved, w, seed, K,
                back | (W_MEASURED if r.keep_w else 0),
            ),
        }  # fmt: skip
    r = nf.RECIPES["fp8"]
    x8, w8 = (quantized(t, nf.Cast()) for t in (x, w))
    how = nf.Delayed()
    forward = r.forward_spec | r.save_x | r.keep_w
    _, columns, _, scales = ops.linear_forward(x, w, None, forward)
    scale = torch.tensor([0.5, 2.0, 0, 0], device=device)
    found |= {
        "quantize, a scale": _operator(
            ops.quantize_op, x, both(nf.Cast(), nf.Cast("e5m2")).pack(), scale
        ),
        "scaled_mm": _operator(
            ops.scaled_mm_op, x8[0], w8[0], x8[2], w8[2], bias.new_ones(32), BF16, False
        ),
        "scaled_mm_accumulate_": _operator(
            ops.scaled_mm_accumulate_op, x.new_zeros(32, 32), x8[0], w8[0], x8[2], w8[2], False
        ),
        "delayed_linear_forward": _operator(
            ops.delayed_linear_forward, x, w, bias, fresh(how, x.device), forward
        ),
        "delayed_linear_backward": _operator(
            ops.delayed_linear_backward, dy, columns, scales, w, fresh(how, x.device), K,
            r.backward_spec | NEED_DX | DW[FP32] | W_MEASURED,
        ),
        "fp4_weight_matmul": _operator(
            w4a16.fp4_weight_matmul_op, x.bfloat16(), _packed(w).packed, _packed(w).scale, bias, N,
            BF16, False,
        ),
    }  # fmt: skip
    return found


def _packed(w: Tensor) -> nf.PackedFP4Linear:
    linear = torch.nn.Linear(K, N, bias=False, device=w.device)
    linear.weight = torch.nn.Parameter(w)
    return nf.PackedFP4Linear.from_linear(linear)


def functions_of(device: str) -> dict[str, Call]:
    x, w, bias, dy = tensors(M, K, N, device)
    a, b = (nf.quantize(t).data for t in (x, w))
    mm = w.t()
    found = {
        "fp8_mm": Call(nf.fp8_mm, {"a": a, "b": b}),
        "fp8_mm_view": Call(nf.fp8_mm_view, {"a": a, "b": b}),
        "fp8_linear_forward": Call(nf.fp8_linear_forward, {"x": x, "w": w, "bias": bias}),
        "fp8_linear_backward": Call(
            nf.fp8_linear_backward, {"g": dy, "x": x, "w": w, "masks": (True, True, True)}
        ),
        "fp4_matmul": Call(nf.fp4_matmul, {"A": x, "B": mm}),
        "fp4_matmul_backward_A": Call(nf.fp4_matmul_backward_A, {"grad": dy, "B": mm}),
        "fp4_matmul_backward_B": Call(nf.fp4_matmul_backward_B, {"A": x, "grad": dy}),
        "fp4_quantize": Call(nf.fp4_quantize, {"x": x}),
        "fp4_dequantize": Call(nf.fp4_dequantize, {"q": nf.quantize(x, "nvfp4")}),
        "FP4MatMulFunction": Call(
            lambda A, B: nf.FP4MatMulFunction.apply(A, B), {"A": x, "B": mm}
        ),
        "FP4QuantizeFunction": Call(lambda x: nf.FP4QuantizeFunction.apply(x), {"x": x}),
        "FP4DequantizeFunction": Call(
            lambda values, scales: nf.FP4DequantizeFunction.apply(values, scales),
            dict(zip(("values", "scales"), nf.FP4QuantizeFunction.apply(x), strict=True)),
        ),
        "scaled_mm": Call(
            ops.scaled_mm,
            {"a": a, "b": b, "a_scale": x.new_ones(()), "b_scale": x.new_ones(()), "bias": bias,
             "out_dtype": BF16},
        ),
    }  # fmt: skip
    for format in ("e4m3", "nvfp4", "mxfp4", "fp8_row", "fp8_block", "mxfp8"):
        call = Call(nf.quantize, {"x": x, "format": format, "two_d": False})
        found[f"quantize(), {format}"] = call
    for name in ("fp8", "fp8_row", "fp8_block", "mxfp8", "nvfp4", "fp8_bf16_wgrad", "fp8_delayed"):
        if not nf.supported(name, device):
            continue
        arguments = {"x": x, "w": w, "bias": bias, "recipe": name}
        found[f"linear(), {name}"] = Call(nf.linear, arguments)
        found[f"matmul(), {name}"] = Call(nf.matmul, {"a": x, "b": mm, "recipe": name})
        layer = nf.Linear(K, N, device=device, recipe=name)
        found[f"a layer, {name}"] = Call(lambda layer=layer, **a: layer(a["input"]), {"input": x})
    layer = _packed(w)
    found["a packed layer"] = Call(lambda input: layer(input), {"input": x})
    return found


@functools.cache
def calls(device: str) -> dict[str, tuple[Call, list[Tensor]]]:
    """And what each returns, which it still does after every error."""
    torch.manual_seed(0)
    made = operators_of(device) | functions_of(device)
    return {name: (call, results(call, call.arguments)) for name, call in made.items()}


def results(call: Call, arguments: dict[str, Any]) -> list[Tensor]:
    # each call with its own: some change them
    own = {n: a.clone() if isinstance(a, Tensor) else a for n, a in arguments.items()}
    torch.manual_seed(1)
    with torch.no_grad():
        made = call.function(**own)
    if isinstance(made, Tensor):
        return [made]
    changed = [a for n, a in own.items() if n in ("out", "history")]
    return [t for t in (*(made or ()), *changed) if isinstance(t, Tensor)]


# ---- what an argument is made into ----

OTHER_DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.uint8, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def _other_device(t: Tensor, _: int) -> Tensor:
    return t.cpu() if t.is_cuda else t.to("meta")


TENSORS: dict[str, Callable[[Tensor, int], Any]] = {
    "none": lambda t, _: None,
    "another dtype": lambda t, i: t.float().to(OTHER_DTYPES[i % len(OTHER_DTYPES)]),
    "a scalar": lambda t, _: t.flatten()[:1].reshape(()) if t.numel() else t,
    "a dimension more": lambda t, _: t[None],
    "a dimension more behind": lambda t, _: t[..., None],
    "flat": lambda t, _: t.flatten(),
    "shorter": lambda t, _: t[:-1],
    "narrower": lambda t, _: t[..., :-1],
    "twice as long": lambda t, _: t.repeat(2, *[1] * (t.dim() - 1)) if t.dim() else t,
    "twice as wide": lambda t, _: t.repeat(*[1] * (t.dim() - 1), 2) if t.dim() else t,
    "empty": lambda t, _: t.new_empty((0,) * max(t.dim(), 1)),
    "transposed": lambda t, _: t.t() if t.dim() == 2 else t,
    "on another device": _other_device,
}
NO_TENSORS: dict[str, Callable[[Tensor, int], Any]] = {
    "a str": lambda t, _: "tensor",
    "a list": lambda t, _: [1.0, 2.0],
    "an int": lambda t, i: i,
}
INTEGERS = [-1, 0, 1, 3, 15, 2**31, 2**31 - 1, 2**32, 2**62, -(2**62), 2**63 - 1, -(2**63)]


class Example(NamedTuple):
    call: int  # modulo how many there are
    argument: int
    into: int
    number: int


examples = st.builds(
    Example, st.integers(0, 999), st.integers(0, 99), st.integers(0, 99), st.integers(0, 2**20)
)


def mutated(value: Any, e: Example, raw: bool) -> tuple[str, Any]:
    """(what it became, that)"""
    if isinstance(value, Tensor):
        kinds = TENSORS if raw else TENSORS | NO_TENSORS
        name = [*kinds][e.into % len(kinds)]
        if value.dim() == 0 and name in ("shorter", "narrower"):
            name = "flat"
        return name, kinds[name](value, e.number)
    if isinstance(value, bool):
        return "not", not value
    if isinstance(value, int):
        flipped = [value ^ 1 << e.number % 63, value + 1, value - 1]
        numbers = [*INTEGERS, *flipped]
        return "a number", numbers[e.into % len(numbers)]
    if isinstance(value, torch.dtype):
        return "another dtype", OTHER_DTYPES[e.number % len(OTHER_DTYPES)]
    if isinstance(value, str):
        others = ["", "fp9", "FP8", 3, None, ("fp8",)]
        return "another name", others[e.into % len(others)]
    if value is None:
        return "a tensor", torch.ones(3, device="cpu")
    return "something else", [(), 3, None, "abc", (True,)][e.into % 5]


SHAPES = {
    "a scalar", "a dimension more", "a dimension more behind", "flat", "shorter", "narrower",
    "twice as long", "twice as wide", "empty", "transposed", "on another device",
}  # fmt: skip


def names(argument: str, became: str, call: Call) -> str:
    """What stands for an argument in a message: the argument itself, or, where two operands no
    longer fit each other, another one."""
    if "spec" in argument:
        return r"^\w+: .*expected"
    known = {
        # sizes are said in the names of the operands that they are of
        "in_features": r"in_features|sizes|\b[xw](_codes|_columns)?\b",
        "out_features": r"out_features|sizes|\bw(_codes)?\b|bias",
        "rows": r"rows|x_codes|sizes",
        "n": r"\bN\b|packed|bias",
        # what lies beside others is judged with them
        "scales": r"scales?\b|measured",
        "x_columns": r"x_columns|expected x\b",
        "w_codes": r"\bw(_codes)?\b",
        "x_scales": r"x_scales|x_codes",
        "w_scales": r"w_scales|w_codes",
        "x_columns_scales": r"x_columns",
        "a_scale": r"a_scale|scale of a\b",
        "b_scale": r"b_scale|scale of b\b",
        "input": r"input|\bx\b",
    }
    if became in SHAPES or became == "a tensor":
        every = (known.get(name, rf"\b{name}\b") for name in call.arguments)
        return rf"expected .*({'|'.join(every)})"
    return known.get(argument, rf"\b{argument}\b")


def assert_names(text: str, argument: str, became: str, call: Call, what: str) -> None:
    assert re.search(names(argument, became, call), text, re.M), f"{what}: {text}"


def check(e: Example, device: str) -> None:
    all_calls = calls(device)
    name = [*all_calls][e.call % len(all_calls)]
    call, before = all_calls[name]
    argument = [*call.arguments][e.argument % len(call.arguments)]
    became, value = mutated(call.arguments[argument], e, call.raw)
    what = f"{name}: {argument} became {became}, {describe(value)}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = results(call, call.arguments | {argument: value})
            for t in made:
                assert t.numel() < 1 << 28, what
                t.cpu() if t.device.type == "cuda" else None
    except (ValueError, TypeError, NotImplementedError) as error:
        text = str(error)
        assert_names(text, argument, became, call, what)
    except RuntimeError as error:  # the one that is documented: cuBLASLt's refusal, all of it
        assert "no algorithm for d [" in str(error), f"{what}: {error!r}"
    if device == "cuda":
        torch.cuda.synchronize()
    for now, then in zip(results(call, call.arguments), before, strict=True):
        assert_same_bits(now, then, f"after {what}")


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    return repr(value)


def test_a_few(device: str, request: pytest.FixtureRequest) -> None:
    run(check, examples, device, request, number=150)


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
def test_many(device: str, part: int, request: pytest.FixtureRequest) -> None:
    run(check, examples, device, request, part, long_run_examples(1))


def test_every_operator_and_function_is_called() -> None:
    """An operator, or a public function of tensors, that is added has its call here."""
    called = {re.split(r"[,( ]", name)[0] for name in calls("cpu")}
    operators = {
        name.split("::")[1]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("narrowfloat::")
    }
    assert operators <= called, operators - called
    not_of_tensors = {
        "BlockRecipe", "FP4Recipe", "MixedRecipe", "RECIPES", "__version__", "block_recipe",
        "GEMM_OPS", "convert", "delayed_state", "fp4_recipe", "load_delayed_state", "load_plans",
        "mixed_recipe", "plan", "reuse_weights", "revert", "save_plans", "step", "supported",
        "tune",
    }  # fmt: skip
    functions = {
        name
        for name in nf.__all__
        if not isinstance(getattr(nf, name), type) and name not in not_of_tensors
    }
    assert functions <= called, functions - called
