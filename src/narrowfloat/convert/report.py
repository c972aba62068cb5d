"""What convert() reports: layers by name, and the share of a model's matrices in the recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..recipe import Recipe
from ..w4a16 import PackedFP4Linear


@dataclass
class Report:
    """What convert() did, or plan() would do. print() shows all of it.

    recipe: what was asked for. converted: names of the layers that are now in it. left: (name,
    reason) of every other linear layer. others: (name, what it is) of every other parameter with
    two or more dimensions of more than one element, such as those of transformers' Conv1D or
    experts in one 3-D tensor; none of them is in the recipe. Lookup tables (nn.Embedding,
    nn.EmbeddingBag) multiply nothing and are in none of these.

    parameters: elements of the matrices (the weights of the linear layers and `others`), as (in the
    recipe, all). flops: the same of what they cost a token, 2 an element; of experts those that a
    token has, where the model says top_k (num_experts_per_tok, ...), else all. Both are of the
    model after the call, whenever a layer was converted, and attention's own GEMMs are in neither.
    """

    recipe: Recipe
    converted: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    others: list[tuple[str, str]] = field(default_factory=list)
    parameters: tuple[int, int] = (0, 0)
    flops: tuple[int, int] = (0, 0)

    @property
    def share(self) -> float:
        """Of the matrices' parameters, what is in the recipe: from 0 to 1."""
        return self.parameters[0] / max(self.parameters[1], 1)

    @property
    def flops_share(self) -> float:
        """Of the matrices' FLOPs per token, what is in the recipe: from 0 to 1."""
        return self.flops[0] / max(self.flops[1], 1)

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} linear layers in {self.recipe}, {len(self.left)} left"]
        lines.append(
            f"  in it run {self.share:.1%} of the matrices' parameters and {self.flops_share:.1%} "
            "of their FLOPs per token"
        )
        lines += [f"  converted  {name or '(the model itself)'}" for name in self.converted]
        lines += [f"  left       {name or '(the model itself)'}: {why}" for name, why in self.left]
        lines += [f"  no layer   {name}: {what}" for name, what in self.others]
        return "\n".join(lines)

    def nothing(self) -> str:
        """Why nothing of the model runs in the recipe, in a few lines."""
        found = [f"{name or 'the model itself'}: {why}" for name, why in self.left[:3]]
        found += [f"{name}: {what}" for name, what in self.others[:3]]
        more = len(self.left) + len(self.others) - len(found)
        return "; ".join(found) + (f"; and {more} more" if more > 0 else "")


# ---- counting ----

_EXPERTS = re.compile(r"(local_|routed_)?experts")
_TOP_K = (
    *("top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
    *("experts_per_tok", "num_selected_experts", "moe_top_k", "moe_topk"),
)
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def _top_k(modules: Iterable[nn.Module]) -> int | None:
    """How many experts a token has, as the nearest of these modules, a child or a config says."""
    for module in modules:
        for place in (module, *module.children(), getattr(module, "config", None)):
            for name in _TOP_K:
                found: Any = getattr(place, name, None)
                if isinstance(found, int) and found > 0:
                    return found
    return None


class _Experts:
    """The part of a matrix that one token meets: top_k of its experts, else all."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self.found: dict[str, int | None] = {}  # name of what holds experts -> top_k

    def used(self, name: str, leading: int) -> float:
        """leading: the first size of a parameter with more than two dimensions."""
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if _EXPERTS.fullmatch(part)), None)
        if at is None:
            return 1.0
        holder = ".".join(parts[: at + 1])
        inside = self.modules.get(holder)
        listed = at + 1 < len(parts) and parts[at + 1].isdecimal() and inside is not None
        count = len(inside._modules) if listed and inside is not None else leading
        if holder not in self.found:
            above = [self.modules.get(".".join(parts[:i])) for i in range(at + 1, -1, -1)]
            self.found[holder] = _top_k(module for module in above if module is not None)
        top_k = self.found[holder]
        return 1.0 if top_k is None else min(top_k / max(count, 1), 1.0)


def _inside_a_linear(name: str, modules: dict[str, nn.Module]) -> bool:
    parts = name.split(".") if name else []
    above = (modules.get(".".join(parts[:i])) for i in range(len(parts)))
    return any(isinstance(module, nn.Linear) for module in above)


def matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any, int, int]]:
    """(name, module that has it, its key, elements, FLOPs per token) for each matrix: a linear
    layer, whose key is its weight, or a parameter of something else."""
    modules = dict(model.named_modules())
    experts = _Experts(modules)
    for name, module in modules.items():
        if isinstance(module, nn.Linear | PackedFP4Linear):
            size = module.in_features * module.out_features
            weight = module._parameters.get("weight")
            key = id(module) if weight is None else id(weight)
            yield name, module, key, size, round(2 * size * experts.used(name, 1))
            continue
        if isinstance(module, _TABLES) or _inside_a_linear(name, modules):
            continue
        for own, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, UninitializedParameter):
                continue
            shape = [size for size in parameter.shape if size != 1]
            if len(shape) > 1:
                path = f"{name}.{own}" if name else own
                size = parameter.numel()
                leading = shape[0] if len(shape) > 2 else 1
                yield path, module, parameter, size, round(2 * size * experts.used(path, leading))


def count(model: nn.Module, report: Report, in_recipe: set[int]) -> None:
    """Fill in `others`, `parameters` and `flops`. in_recipe: ids of the layers that are in it, or
    would be."""
    elements: dict[int, tuple[int, bool]] = {}
    done, total = 0, 0
    tables = {
        id(p) for module in model.modules() if isinstance(module, _TABLES)
        for p in module.parameters()
    }  # fmt: skip
    for name, module, key, size, flops in matrices(model):
        inside = id(module) in in_recipe
        if not isinstance(key, int):
            if id(key) in tables:
                continue
            report.others.append((name, _what(name, module, key)))
            key = id(key)
        total += flops
        done += flops if inside else 0
        elements[key] = (size, inside or elements.get(key, (0, False))[1])
    report.parameters = (
        sum(size for size, inside in elements.values() if inside),
        sum(size for size, _ in elements.values()),
    )
    report.flops = (done, total)


def _what(path: str, module: nn.Module, parameter: nn.Parameter) -> str:
    shape, cls = list(parameter.shape), type(module).__name__
    if cls == "Conv1D" and len(shape) == 2:
        return f"{shape} in transformers' Conv1D, whose weight is [K,N] and which is no nn.Linear"
    if len(shape) == 3 and "expert" in path.lower() + cls.lower():
        return f"{shape}, experts in one 3-D parameter of {cls}, no nn.Linear"
    return f"{shape}, a parameter of {cls}, no nn.Linear"
