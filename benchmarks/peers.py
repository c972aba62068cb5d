"""How other FP8 implementations are set beside ours: their layers, where installed."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

TORCHAO = ("tensorwise", "rowwise")


def torchao_recipes() -> tuple[str, ...]:
    return TORCHAO if importlib.util.find_spec("torchao") is not None else ()


def torchao(model: nn.Module, recipe: str) -> nn.Module:
    """`model` with its nn.Linear layers as torchao's Float8Linear, which keep the parameters."""
    from torchao.float8 import (  # type: ignore[import-not-found,unused-ignore]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config = Float8LinearConfig.from_recipe_name(recipe)
    converted: nn.Module = convert_to_float8_training(nn.Sequential(model), config=config)
    return converted


def compiled(model: nn.Module, backend: str = "inductor") -> nn.Module:
    """torch.compile for one shape: nothing kept from the last, no dynamic sizes."""
    module: nn.Module
    module = torch.compile(model, dynamic=False, backend=backend)  # type: ignore[assignment]
    return module
