"""The recipes that the benchmarks have besides the package's own: `fp8` with one operand, or one
GEMM, left in bf16, to find what costs quality."""

from __future__ import annotations


def register() -> None:
    """Their names among those that bench.py and the demo take."""
    import narrowfloat
    from narrowfloat import Gemm, Recipe

    variants = (
        Recipe("x_in_bf16", fprop=Gemm(None, "e4m3"), wgrad=Gemm("e5m2", None)),
        Recipe("w_in_bf16", fprop=Gemm("e4m3", None), dgrad=Gemm("e5m2", None)),
        Recipe("dy_in_bf16", dgrad=Gemm(None, "e4m3"), wgrad=Gemm(None, "e4m3")),
        Recipe("fprop_in_bf16", fprop=Gemm(None, None)),
        Recipe("dgrad_in_bf16", dgrad=Gemm(None, None)),
    )
    narrowfloat.RECIPES.update({recipe.name: recipe for recipe in variants})
