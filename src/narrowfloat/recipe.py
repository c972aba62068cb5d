"""Decides which format and accumulation each of the six operands of a linear layer gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import formats
from .settings import Backward, Forward

ACCUMULATE = ("fast", "exact")


@dataclass(frozen=True)
class Gemm:
    """One product d [M,N] = a [M,K] b [N,K]^T.

    a, b: formats of the operands. accumulate: "fast" lets the tensor cores keep fewer bits of
    the running sum (cuBLASLt's FAST_ACCUM); "exact" carries it in fp32.
    """

    a: str = "e4m3"
    b: str = "e4m3"
    accumulate: str = "exact"

    def __post_init__(self) -> None:
        for operand in (self.a, self.b):
            formats.get(operand, "Gemm")
        if self.accumulate not in ACCUMULATE:
            raise ValueError(
                f"Gemm: expected accumulate out of {ACCUMULATE}, got {self.accumulate!r}"
            )
        if self.a == self.b == "e5m2":
            raise ValueError(
                "Gemm: expected at most one e5m2 operand, got two "
                "(no tensor core path multiplies e5m2 by e5m2; make one of them e4m3)"
            )

    @property
    def fast(self) -> bool:
        return self.accumulate == "fast"


@dataclass(frozen=True)
class Recipe:
    """How a linear layer y = x w^T is computed in training.

    fprop: y = x w^T (a is x, b is w); dgrad: dx = dy w (a is dy, b is w);
    wgrad: dw = dy^T x (a is dy, b is x). Scales are per tensor, from the tensor at hand
    ("current scaling"), and with one scale a tensor dy needs the range of e5m2.

    Accumulation is exact everywhere. Fast keeps so few bits of the running sum that terms of one
    sign are lost on Hopper: 4096 ones sum to 4020, 16384 to 16093. In fprop it saves 0 to 2 % of a
    layer there (benchmarks/results/h200, "accumulation").

    An operand that takes part in two products has one format in both: it is quantized once.
    """

    name: str = "fp8"
    fprop: Gemm = Gemm("e4m3", "e4m3", "exact")
    dgrad: Gemm = Gemm("e5m2", "e4m3", "exact")
    wgrad: Gemm = Gemm("e5m2", "e4m3", "exact")

    # what the operators are told, found once: packed Forward and Backward, without what is wanted
    forward_settings: int = field(init=False, repr=False, compare=False)
    backward_settings: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for what, first, second in (
            ("x (fprop.a and wgrad.b)", self.fprop.a, self.wgrad.b),
            ("w (fprop.b and dgrad.b)", self.fprop.b, self.dgrad.b),
            ("dy (dgrad.a and wgrad.a)", self.dgrad.a, self.wgrad.a),
        ):
            if first != second:
                raise ValueError(
                    f"Recipe: expected one format for {what}, got {first!r} and {second!r} "
                    "(each operand is quantized once and used in both products)"
                )
        x, w, dy = (formats.get(f).code for f in (self.fprop.a, self.fprop.b, self.dgrad.a))
        forward = Forward(x, w, self.fprop.fast)
        backward = Backward(dy, w, self.dgrad.fast, self.wgrad.fast)
        object.__setattr__(self, "forward_settings", forward.pack())
        object.__setattr__(self, "backward_settings", backward.pack())

    def __str__(self) -> str:
        return self.name


RECIPES: dict[str, Recipe] = {"fp8": Recipe()}


def get(recipe: str | Recipe) -> Recipe:
    """The Recipe that `recipe` is or names; ValueError lists the names there are."""
    if isinstance(recipe, Recipe):
        return recipe
    found = RECIPES.get(recipe) if isinstance(recipe, str) else None
    if found is None:
        raise ValueError(
            f"recipe: expected a Recipe or a name out of {sorted(RECIPES)}, got {recipe!r}"
        )
    return found
