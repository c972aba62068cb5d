"""Decides which layers of a model are converted, and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from . import recipe as recipes
from .modules import Linear
from .recipe import Recipe

_log = logging.getLogger(__name__)

Filter = Callable[[str, nn.Linear], bool] | str | Sequence[str] | None


@dataclass
class Report:
    """What convert() did, or plan() would do: names of the layers, and why some were left."""

    recipe: Recipe
    converted: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} linear layers in {self.recipe}, {len(self.left)} left"]
        lines += [f"  converted  {name or '(the model itself)'}" for name in self.converted]
        lines += [f"  left       {name or '(the model itself)'}: {why}" for name, why in self.left]
        return "\n".join(lines)


def _named_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    # a module that is registered twice comes once, under its first name
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def _heads(model: nn.Module, linears: list[tuple[str, nn.Linear]]) -> dict[int, str]:
    """id -> reason, for the layers that are the LM head: those tied to an embedding, else the
    last linear of a model that has more than one."""
    embeddings = {
        id(module.weight): name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    tied = {
        id(module): f"its weight is tied to the embedding {embeddings[id(module.weight)]}"
        for _, module in linears
        if id(module.weight) in embeddings
    }
    if tied or len(linears) < 2:
        return tied
    return {id(linears[-1][1]): "the last linear of the model, taken for its LM head"}


def _matches(filter: Filter, name: str, module: nn.Linear) -> bool:
    if filter is None:
        return True
    if callable(filter):
        return bool(filter(name, module))
    patterns = [filter] if isinstance(filter, str) else filter
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def plan(
    model: nn.Module,
    recipe: str | Recipe = "fp8",
    filter: Filter = None,
    *,
    head: bool = False,
) -> Report:
    """What convert() with the same arguments would do; changes nothing."""
    report = Report(recipes.get(recipe))
    linears = list(_named_linears(model))
    if not linears:
        raise ValueError(
            f"convert: expected a model with nn.Linear layers, got {type(model).__name__} "
            "without any"
        )
    heads = {} if head else _heads(model, linears)
    matched = 0
    for name, module in linears:
        if not _matches(filter, name, module):
            report.left.append((name, "the filter does not match it"))
            continue
        matched += 1
        if isinstance(module, Linear):
            report.left.append((name, f"already a narrowfloat layer ({module.recipe})"))
        elif type(module) is not nn.Linear:
            report.left.append((name, f"its type is {type(module).__name__}, not nn.Linear"))
        elif "forward" in vars(module):
            report.left.append((name, "its forward was replaced on the instance"))
        elif id(module) in heads:
            report.left.append((name, f"{heads[id(module)]} (head=True converts it)"))
        else:
            report.converted.append(name)
    if matched == 0:
        names = ", ".join(name for name, _ in linears[:4])
        raise ValueError(
            f"convert: expected a filter that matches a linear layer, got one that matches none "
            f"of {len(linears)} (patterns must match the whole name, as in 'blocks.*.mlp.*'; "
            f"there are {names}{', ...' if len(linears) > 4 else ''})"
        )
    return report


def convert(
    model: nn.Module,
    recipe: str | Recipe = "fp8",
    filter: Filter = None,
    *,
    head: bool = False,
) -> Report:
    """Turn model's nn.Linear layers into narrowfloat Linear layers with `recipe`, in place.

    Only modules whose type is exactly nn.Linear; the module objects stay what they are, and so
    do parameters, hooks, ties and the state_dict. The LM head (a linear tied to an embedding,
    else the last linear) is left unless head=True. `filter` narrows the choice: a function
    (name, module) -> bool, or one or more shell patterns for whole names ("blocks.*.mlp.*").

    Returns a Report of what was converted and what was left and why (print it). ValueError if
    the filter matches nothing or there is no linear layer.
    """
    report = plan(model, recipe, filter, head=head)
    for name in report.converted:
        module = model.get_submodule(name)
        module.__class__ = Linear
        module.recipe = report.recipe  # type: ignore[assignment]
    _log.info("%s", report)
    return report
