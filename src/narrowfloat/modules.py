"""Decides what the layers look like to a user: nn.Linear with a recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import recipe as recipes
from .autograd import linear
from .recipe import AnyRecipe
from .reuse import WeightCache


class Linear(nn.Linear):
    """nn.Linear whose three products run in the formats of `recipe`.

    Same constructor otherwise, same parameters, same state_dict both ways. The weight stays in
    its own dtype and is quantized at each forward (once, inside reuse_weights(), by a Recipe).
    """

    recipe: AnyRecipe = recipes.RECIPES["fp8"]
    weight_cache: WeightCache | None = None  # set by reuse_weights() while it is open

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | AnyRecipe = "fp8",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = recipes.get(recipe)

    def forward(self, input: Tensor) -> Tensor:
        cache = self.weight_cache
        held = None if cache is None else cache.get(self.weight, self.recipe)
        return linear(input, self.weight, self.bias, self.recipe, held=held)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("weight_cache", None)
        return state


class FP8Linear(Linear):
    """Linear with the recipe "fp8": per-tensor scales, x and w in E4M3, dy in E5M2."""


class FP4Linear(Linear):
    """Linear with the recipe "nvfp4": all three products in FP4, as FP4Recipe describes."""

    recipe: AnyRecipe = recipes.NVFP4

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | AnyRecipe = "nvfp4",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, recipe=recipe)
