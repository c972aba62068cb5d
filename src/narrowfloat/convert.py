"""Which layers of a model are converted, and the report that says so."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from . import recipe as recipes
from .modules import Linear
from .recipe import Recipe
from .w4a16 import PackedFP4Linear, fp4_weight

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


def _blocks(linears: list[tuple[str, nn.Linear]]) -> tuple[str, list[int]]:
    """(prefix, indices in order) of the model's blocks: the longest run of names prefix.<i>.… that
    hold linears. A run that comes again under another index of an outer one, as the experts of
    each block do, lies inside blocks and is none."""
    runs: dict[tuple[str, ...], set[int]] = {}
    for name, _ in linears:
        parts = name.split(".") if name else []
        for at, part in enumerate(parts):
            if part.isdecimal():
                runs.setdefault(tuple(parts[:at]), set()).add(int(part))
    shapes = [tuple("*" if part.isdecimal() else part for part in prefix) for prefix in runs]
    single = [run for run, shape in zip(runs, shapes, strict=True) if shapes.count(shape) == 1]
    if not single:
        return "", []
    longest = max(single, key=lambda run: len(runs[run]))
    return ".".join(longest), sorted(runs[longest])


def _last_blocks(linears: list[tuple[str, nn.Linear]], keep: float) -> dict[int, str]:
    """id -> reason, for the linears of the last `keep` of the blocks."""
    prefix, blocks = _blocks(linears)
    count = math.ceil(round(keep * len(blocks), 6))  # .15 of 20 is 3, whatever its last bit says
    if len(blocks) < 2 or count == 0:
        return {}
    of = f"of the {len(blocks)} blocks in {prefix or 'the model'}"
    why = f"in the last {count} {of} (keep_last=0 converts them)"
    start = prefix + "." if prefix else ""
    kept = tuple(f"{start}{block}" for block in blocks[-count:])
    return {
        id(module): why
        for name, module in linears
        if any(name == block or name.startswith(block + ".") for block in kept)
    }


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
    keep_last: float = 0.15,
    inference: bool = False,
) -> Report:
    """What convert() with the same arguments would do; changes nothing."""
    report = Report(recipes.get(recipe))
    linears = list(_named_linears(model))
    if not linears:
        raise ValueError(
            f"convert: expected a model with nn.Linear layers, got {type(model).__name__} "
            "without any"
        )
    if not 0 <= keep_last <= 1:
        raise ValueError(f"convert: expected keep_last from 0 to 1, got {keep_last}")
    heads = {} if head else _heads(model, linears)
    fp4 = "fp4" in report.recipe.kinds
    if inference and fp4_weight(report.recipe) is None:
        raise ValueError(
            f"convert: expected an FP4 recipe with inference=True, got {report.recipe} "
            "(weights are packed in FP4 alone; convert(model, 'fp8') serves inference as it is)"
        )
    last = _last_blocks(linears, keep_last) if fp4 else {}
    matched = 0
    for name, module in linears:
        if not _matches(filter, name, module):
            report.left.append((name, "the filter does not match it"))
            continue
        matched += 1
        trained = isinstance(module, Linear) and fp4_weight(module.recipe) is not None
        if inference and name == "":
            report.left.append(
                (name, "it is the model itself (PackedFP4Linear.from_linear makes one)")
            )
        elif inference and trained:
            report.converted.append(name)
        elif isinstance(module, Linear):
            report.left.append((name, f"already a narrowfloat layer ({module.recipe})"))
        elif type(module) is not nn.Linear:
            report.left.append((name, f"its type is {type(module).__name__}, not nn.Linear"))
        elif "forward" in vars(module):
            report.left.append((name, "its forward was replaced on the instance"))
        elif id(module) in heads:
            report.left.append((name, f"{heads[id(module)]} (head=True converts it)"))
        elif id(module) in last:
            report.left.append((name, last[id(module)]))
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
    keep_last: float = 0.15,
    inference: bool = False,
) -> Report:
    """Turn model's nn.Linear layers into narrowfloat Linear layers with `recipe`, in place.

    Only modules whose type is exactly nn.Linear; the module objects stay what they are, and so
    do parameters, hooks, ties and the state_dict. The LM head (a linear tied to an embedding,
    else the last linear) is left unless head=True. `filter` narrows the choice: a function
    (name, module) -> bool, or one or more shell patterns for whole names ("blocks.*.mlp.*").

    With a recipe that has a GEMM in FP4 the linears of the last `keep_last` of the blocks are
    left too, as others train in FP4 (arXiv 2509.25149: the last layers bear it least); rounded up,
    0 converts all. The blocks are the longest numbered run that holds linears ("blocks.0.qkv",
    "blocks.1.qkv").

    inference=True, with a recipe whose forward is in FP4, replaces the layers by PackedFP4Linear
    instead: weights are quantized and packed once, 4.5 bits each, and no longer train. Layers that
    trained in FP4 here keep the recipe they trained with.

    Returns a Report of what was converted and what was left and why (print it). ValueError if
    the filter matches nothing or there is no linear layer.
    """
    report = plan(model, recipe, filter, head=head, keep_last=keep_last, inference=inference)
    for name in report.converted:
        module = model.get_submodule(name)
        if inference and isinstance(module, nn.Linear):
            own = module.recipe if isinstance(module, Linear) else report.recipe
            parent, _, last = name.rpartition(".")
            packed = PackedFP4Linear.from_linear(module, own)
            setattr(model.get_submodule(parent), last, packed)
            continue
        module.__class__ = Linear
        module.recipe = report.recipe  # type: ignore[assignment]
        module.start_history()  # type: ignore[operator]
    _log.info("%s", report)
    return report
