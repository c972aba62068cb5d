"""The layers: nn.Linear with a recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import amax_history
from . import recipe as recipes
from .autograd import linear
from .recipe import Delayed, Recipe
from .weight_cache import WeightCache


class Linear(nn.Linear):
    """nn.Linear whose three GEMMs run as `recipe` says.

    Same constructor otherwise, same parameters, same state_dict both ways. The weight stays in
    its own dtype and is quantized at each forward (once, inside reuse_weights(), to FP8 with scales
    of its own).
    """

    recipe: Recipe = recipes.RECIPES["fp8"]
    weight_cache: WeightCache | None = None  # set by reuse_weights() while it is open
    shares_input: bool = False  # does a layer called after it read the same tensor (shared_input)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "fp8",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = recipes.get(recipe)
        self.start_history()

    def forward(self, input: Tensor) -> Tensor:
        recipe = self.recipe
        if recipe.delayed is not None:
            scales = self._history(recipe.delayed)
            return linear(input, self.weight, self.bias, recipe, history=scales)
        cache = self.weight_cache
        if cache is None:
            return linear(input, self.weight, self.bias, recipe, layer=self)
        cached = cache.get(self.weight, recipe)
        return linear(input, self.weight, self.bias, recipe, cached=cached, layer=self)

    def start_history(self) -> None:
        """Forget the amax history of a recipe with delayed scaling ("fp8_delayed"): the
        next call measures. It is in the buffer scale_history, which no state_dict holds."""
        how = self.recipe.delayed
        if how is None:
            self._buffers.pop("scale_history", None)
            return
        self.register_buffer(
            "scale_history", amax_history.fresh(how, self.weight.device), persistent=False
        )
        amax_history.follow(self)

    def _history(self, how: Delayed) -> Tensor:
        held = self._buffers.get("scale_history")
        if not amax_history.fits(held, how, self.weight.device):  # another recipe, or moved by hand
            self.start_history()
        return self._buffers["scale_history"]  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("weight_cache", None)
        state.pop("shares_input", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "scale_history" in self._buffers:  # a copy rolls too
            amax_history.follow(self)


class FP8Linear(Linear):
    """Linear with the recipe "fp8": per-tensor scales, x and w in E4M3, dy in E5M2."""


class FP4Linear(Linear):
    """Linear with the recipe "nvfp4": all three GEMMs in FP4, as fp4_recipe() describes."""

    recipe: Recipe = recipes.NVFP4

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "nvfp4",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, recipe=recipe)
