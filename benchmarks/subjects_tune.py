"""What narrowfloat.tune() is measured on: a layer's GEMMs, one by one."""

from __future__ import annotations

import functools
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import record
import torch
from run import Run

LAYERS = {  # recipe: tokens, in, out
    "fp8_fast": ((8192, 768, 50304), (128, 4096, 4096), (4096, 4096, 4096), (16384, 8192, 8192)),
    "fp8": ((8192, 768, 50304), (128, 4096, 4096), (4096, 4096, 4096), (16384, 8192, 8192)),
    "fp8_block": ((4096, 4096, 4096), (8192, 4096, 14336), (16384, 8192, 8192)),
}


def tune(run: Run) -> None:
    """Of each GEMM the time of cuBLASLt's first candidate and of the one that stays, as tune()
    itself measures them, in turns, and how many candidates there were."""
    for name, shapes in LAYERS.items():
        for shape in shapes:
            with run.attempt(f"tune {name} {shape}"):
                for gemm, call in _gemms(run, name, *shape).items():
                    for plan in _tuned(call):
                        run.out.add(_row(name, shape, gemm, plan))


def _gemms(
    run: Run, name: str, tokens: int, inputs: int, outputs: int
) -> dict[str, Callable[[], Any]]:
    import narrowfloat
    from narrowfloat import Gemm

    if name == "fp8_fast":
        of_dy = Gemm("e5m2", "e4m3", "fast")
        recipe = narrowfloat.Recipe(name, Gemm("e4m3", "e4m3", "fast"), of_dy, of_dy)
    else:
        recipe = narrowfloat.RECIPES[name]
    x, w = run.randn(tokens, inputs, grad=True), run.randn(outputs, inputs, grad=True)
    dy = run.randn(tokens, outputs)

    def gradient(of: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
        return functools.partial(torch.autograd.grad, y, of, dy, retain_graph=True)

    return {  # one backward makes both gradients where both are wanted
        "fprop": functools.partial(narrowfloat.linear, x, w, None, recipe),
        "dgrad": gradient(x, narrowfloat.linear(x, w.detach(), None, recipe)),
        "wgrad": gradient(w, narrowfloat.linear(x.detach(), w, None, recipe)),
    }


def _plans() -> dict[str, dict[str, Any]]:
    import narrowfloat

    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "plans.json"
        narrowfloat.save_plans(file)
        return {plan["key"]: plan for plan in json.loads(file.read_text())["plans"]}


def _tuned(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The plans that a call finds; none where its GEMM was measured already, of another
    layer."""
    import narrowfloat

    known = _plans()
    with narrowfloat.tune():
        call()
    return [plan for key, plan in _plans().items() if key not in known]


def _row(name: str, shape: tuple[int, int, int], gemm: str, plan: dict[str, Any]) -> dict[str, Any]:
    tokens, inputs, outputs = shape
    return record.row(
        "tune",
        recipe=name,
        product=gemm,  # the field as the committed results have it
        tokens=tokens,
        **{"in": inputs, "out": outputs},
        ratio=plan["first_us"] / plan["us"],
        **{field: plan[field] for field in ("first_us", "us", "offered", "tried", "right")},
    )
