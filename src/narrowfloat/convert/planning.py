"""Which layers of a model are converted: plan() decides, convert() does it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .. import recipe as recipes
from ..modules import FP4Linear, FP8Linear, Linear
from ..recipe import Recipe
from ..w4a16 import PackedFP4Linear, fp4_weight
from .classes import class_for, class_reason, module_reason
from .packing import held_elsewhere, pack, packing_reason
from .readers import readers, set_fast_paths
from .report import Report, count
from .roles import Roles, is_narrow

_log = logging.getLogger("narrowfloat.convert")

Filter = Callable[[str, nn.Linear], bool] | str | Sequence[str] | None

# What is left by default and converted where convert(take=...) names it.
TAKE = ("head", "router", "adapter", "narrow", "subclass", "reader")


def matches(filter: Filter, name: str, module: Any) -> bool:
    if filter is None:
        return True
    if callable(filter):
        return bool(filter(name, module))
    patterns = [filter] if isinstance(filter, str) else filter
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _taken(take: str | Sequence[str], head: bool) -> set[str]:
    asked = {take} if isinstance(take, str) else set(take)
    if not asked <= set(TAKE):
        raise ValueError(
            f"convert: expected take as one or more of {TAKE}, got {take!r} (filter is for names)"
        )
    return asked | ({"head"} if head else set())


class _Rules:
    """Why a layer of one model is left; see convert()."""

    def __init__(
        self,
        model: nn.Module,
        linears: list[tuple[str, nn.Linear]],
        recipe: Recipe,
        take: set[str],
        keep_last: float,
        inference: bool,
    ) -> None:
        self.recipe, self.take, self.inference = recipe, take, inference
        self.roles = Roles(model, linears)
        self.last = self.roles.last_blocks(keep_last) if "fp4" in recipe.kinds else {}
        self.readers = readers(model)
        self.held = held_elsewhere(model) if inference else {}

    def why_left(self, name: str, module: nn.Linear) -> str | None:
        """None: the layer is converted."""
        ours = isinstance(module, Linear)
        trained = isinstance(module, Linear) and fp4_weight(module.recipe) is not None
        if isinstance(module, Linear) and not self.inference and module.recipe == self.recipe:
            return f"already a narrowfloat layer ({module.recipe})"
        why = None
        if not ours or self.inference:
            why = class_reason(module, "subclass" in self.take)
        why = why or module_reason(module)
        if self.inference:
            why = why or self._why_not_packed(name, module)
        if why is None and not (self.inference and trained):
            why = self._by_role(module)
        if why is not None and isinstance(module, Linear):
            why += f"; it stays in {module.recipe}"
        return why

    def _why_not_packed(self, name: str, module: nn.Linear) -> str | None:
        if name == "":
            return "it is the model itself (PackedFP4Linear.from_linear makes one)"
        who, _ = self.readers.get(id(module), ("", False))
        if who:
            return f"{who} reads its weight, which a packed layer has not"
        return packing_reason(module, self.held)

    def _by_role(self, module: nn.Linear) -> str | None:
        roles, key = self.roles, id(module)
        n, k = module.out_features, module.in_features
        who, values = self.readers.get(key, ("", False))
        narrow = f"narrow, {k} to {n}" if is_narrow(module) else None
        found = {
            "head": roles.heads.get(key),
            "adapter": roles.adapters.get(key),
            "router": roles.routers.get(key),
            "narrow": narrow,
            "reader": f"{who} computes with its weight itself" if values else None,
        }
        # what is a head, router or adapter may be narrow too; it is taken as what it is
        if any(found[kind] for kind in ("head", "adapter", "router")):
            del found["narrow"]
        for kind, why in found.items():
            if why is not None and kind not in self.take:
                option = "head=True" if kind == "head" else f"take={kind!r}"
                return f"{why} ({option} converts it)"
        return self.last.get(key)


def plan(
    model: nn.Module,
    recipe: str | Recipe = "fp8",
    filter: Filter = None,
    *,
    head: bool = False,
    keep_last: float = 0.15,
    inference: bool = False,
    take: str | Sequence[str] = (),
) -> Report:
    """What convert() with the same arguments would do; changes nothing."""
    report = Report(recipes.get(recipe))
    kinds = _taken(take, head)
    layers: list[tuple[str, Any]] = [
        # a module that is registered twice comes once, under its first name
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | PackedFP4Linear)
    ]
    linears = [(name, module) for name, module in layers if isinstance(module, nn.Linear)]
    if not layers:
        count(model, report, set())
        held = f" (it has {report.nothing()})" if report.others else ""
        raise ValueError(
            f"convert: expected a model with nn.Linear layers, got {type(model).__name__} "
            f"without any{held}"
        )
    if not 0 <= keep_last <= 1:
        raise ValueError(f"convert: expected keep_last from 0 to 1, got {keep_last}")
    if inference and fp4_weight(report.recipe) is None:
        raise ValueError(
            f"convert: expected an FP4 recipe with inference=True, got {report.recipe} "
            "(weights are packed in FP4 alone; convert(model, 'fp8') serves inference as it is)"
        )
    rules = _Rules(model, linears, report.recipe, kinds, keep_last, inference)
    matched = 0
    converted: set[int] = set()
    for name, module in layers:
        if not matches(filter, name, module):
            report.left.append((name, "the filter does not match it"))
            continue
        matched += 1
        if isinstance(module, PackedFP4Linear):
            why: str | None = f"packed already ({module.recipe})"
        else:
            why = rules.why_left(name, module)
        if why is None:
            converted.add(id(module))
            report.converted.append(name)
        else:
            report.left.append((name, why))
    if matched == 0:
        names = ", ".join(name for name, _ in layers[:4])
        raise ValueError(
            f"convert: expected a filter that matches a linear layer, got one that matches none "
            f"of {len(layers)} (patterns must match the whole name, as in 'blocks.*.mlp.*'; "
            f"there are {names}{', ...' if len(layers) > 4 else ''})"
        )
    already = {
        id(module)
        for _, module in layers
        if isinstance(module, Linear | PackedFP4Linear) and module.recipe == report.recipe
    }
    count(model, report, converted | already)
    return report


def convert(
    model: nn.Module,
    recipe: str | Recipe = "fp8",
    filter: Filter = None,
    *,
    head: bool = False,
    keep_last: float = 0.15,
    inference: bool = False,
    take: str | Sequence[str] = (),
) -> Report:
    """Turn model's nn.Linear layers into narrowfloat Linear layers with `recipe`, in place.

    The module objects stay what they are, and so do parameters, hooks, ties and the state_dict.
    Layers that are ours already take the new recipe; revert() makes nn.Linear of all again.
    `filter` narrows the choice: a function (name, module) -> bool, or one or more shell patterns
    for whole names ("blocks.*.mlp.*"). Of what it matches these are left, each with its reason in
    the Report, and converted where `take` names their kind:

    - "head" (head=True is the same): a linear tied to an nn.Embedding; what get_output_embeddings()
      of a part of the model returns; one with as many outputs as an nn.Embedding has rows (unless
      that is a table of positions or types, or some linear takes as many inputs); outside of the
      blocks one whose own name is head, heads, lm_head, score, classifier, logits and the like, or
      whose outputs are as many as no module takes; the last linear of an nn.Sequential model. Where
      none of these finds any: the linear that was registered last, unless it is in a block.
    - "router": named so beside experts, or with "router" in its name.
    - "adapter": LoRA's, by name (lora_A, ...) or beside a base_layer as in peft.
    - "narrow": in_features or out_features is at most 64, and the other at least 8 times that. Such
      a GEMM is limited by memory, and quantizing x costs more than FP8 can gain.
    - "subclass": a class derived from nn.Linear with a forward that calls super().forward. It keeps
      that forward, and what it calls runs in the recipe. Subclasses whose forward is nn.Linear's
      own are converted without asking, and stay instances of their class.
    - "reader": the code of a parent computes with `self.<child>.weight` itself, as that of
      nn.MultiheadAttention does, so that the recipe has no part in it.

    Whatever the options, layers stay that have a weight or bias in another dtype than fp32, bf16
    and fp16, a parametrization, no weight yet, a forward that was replaced, or a class that
    computes otherwise. nn.TransformerEncoderLayer and nn.TransformerEncoder lose their fast path in
    eval mode, which would compute with the weights past the layers.

    With a recipe that has a GEMM in FP4 the linears of the last `keep_last` of the blocks are
    left too, as others train in FP4 (arXiv 2509.25149: the last layers bear it least); rounded up,
    0 converts all. The blocks are the numbered children of a container that hold linears
    ("blocks.0.qkv", "blocks.1.qkv"; of an nn.Sequential those of one class), each tower's for
    itself: containers inside of blocks and lists of experts are none.

    inference=True, with a recipe whose forward is in FP4, replaces the layers by PackedFP4Linear
    instead, wherever they are registered: weights are quantized and packed once, 4.5 bits each, and
    no longer train. Layers that trained in FP4 here keep the recipe they trained with, and forward
    hooks are carried over. All are packed before the first is replaced, so that an error leaves the
    model as it was; both lie in memory until then. What cannot be replaced without a loss is left:
    with backward hooks or hooks of its state_dict, a weight that is computed, more parameters, or
    held in a list beside the module that registers it.

    Returns a Report of what was converted and what was left and why (print it), with the share of
    the model's matrices that runs in the recipe. UserWarning where that is nothing. ValueError if
    the filter matches nothing or there is no linear layer.
    """
    report = plan(
        model, recipe, filter, head=head, keep_last=keep_last, inference=inference, take=take
    )
    modules = {name: model.get_submodule(name) for name in report.converted}
    if inference:
        own = {
            name: module.recipe
            if isinstance(module, Linear) and fp4_weight(module.recipe) is not None
            else report.recipe
            for name, module in modules.items()
        }
        pack(model, own)
    else:
        for module in modules.values():
            _make_ours(module, report.recipe)
    set_fast_paths(model)
    if report.parameters[0] == 0:
        warnings.warn(
            f"convert: nothing of {type(model).__name__} runs in {report.recipe} "
            f"({report.nothing()})",
            stacklevel=2,
        )
    _log.info("%s", report)
    return report


def _make_ours(module: Any, recipe: Recipe) -> None:
    if type(module) in (FP8Linear, FP4Linear):  # of the recipe that it has no longer
        module.__class__ = Linear
    elif not isinstance(module, Linear):
        module.__class__ = class_for(type(module))
    module.recipe = recipe
    module.start_history()
