"""The layers: nn.Linear with a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import amax_history, tensor_kinds
from . import recipe as recipes
from .autograd import linear
from .recipe import Recipe
from .weight_cache import WeightCache


class Linear(nn.Linear):
    """nn.Linear whose three GEMMs run as `recipe` says.

    Same constructor otherwise, same parameters, same state_dict both ways. The weight stays in
    its own dtype and is quantized at each forward (once, inside reuse_weights(), to FP8 with scales
    of its own).

    layer.recipe may be set later, to a Recipe or the name of one: ValueError lists the names. A
    recipe with other delayed scaling begins a new amax history.
    """

    recipe: Recipe = recipes.RECIPES["fp8"]
    weight_cache: WeightCache | None = None  # set by reuse_weights() while it is open
    scale_history: Tensor | None = None  # of a recipe with delayed scaling
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
        self.recipe = recipe  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "recipe":  # looked at here, so that a call need not
            before, value = vars(self).get(name), recipes.get(value)
            super().__setattr__(name, value)
            self._recipe_changed(before)
        else:
            super().__setattr__(name, value)

    def _recipe_changed(self, before: Recipe | None) -> None:
        if before is None or before.delayed != self.recipe.delayed:
            self.start_history()
        if self.weight_cache is not None and before != self.recipe:
            self.weight_cache.forget(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        recipe = self.recipe
        if type(input) is not Tensor and tensor_kinds.is_proxy(input):
            return self._traced(input)
        if recipe.delayed is not None:
            scales = self.history()
            return linear(input, self.weight, self.bias, recipe, history=scales)
        cache = self.weight_cache
        if cache is None:
            return linear(input, self.weight, self.bias, recipe, layer=self)
        cached = cache.get(self.weight, recipe)
        return linear(input, self.weight, self.bias, recipe, cached=cached, layer=self)

    def _traced(self, input: Any) -> Tensor:
        """Under torch.fx: a call of the layer as a whole, else of the function, by its recipe."""
        call = tensor_kinds.leaf_of(input)
        if call is not None:
            return call
        history = self.scale_history
        return linear(input, self.weight, self.bias, self.recipe, history=history)

    def start_history(self) -> None:
        """Forget the amax history of a recipe with delayed scaling ("fp8_delayed"): the
        next call measures. It is the attribute scale_history, no buffer and in no state_dict:
        delayed_state() gives those of a model."""
        how = self.recipe.delayed
        self.scale_history = None
        if how is None:
            return
        amax_history.follow(self)
        self.history()

    def history(self) -> Tensor:
        """The amax history, begun anew where there is none yet that fits the recipe and the
        weight's device."""
        how, device = self.recipe.delayed, self.weight.device
        found = self.scale_history
        if how is None:
            raise ValueError(
                f"Linear: expected a recipe with delayed scaling, got {self.recipe} "
                "(which has no amax history)"
            )
        if found is None or not amax_history.fits(found, how, device):
            found = amax_history.fresh(how, device)
            if amax_history.outlives_its_call(found):
                self.scale_history = found
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        super()._apply(fn, recurse)
        if self.scale_history is not None:
            self.scale_history = fn(self.scale_history)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("weight_cache", None)
        state.pop("shares_input", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.recipe.delayed is not None:  # a copy rolls too
            amax_history.follow(self)


tensor_kinds.LEAVES.add(Linear.forward)


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
