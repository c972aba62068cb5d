"""What a layer is in its model: a head, a router, an adapter, one of the last blocks."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Set
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

# A GEMM with N outputs or K inputs does at most 2 N or 2 K operations for each element of x or y
# that it reads or writes in bf16: at 64 of them memory is the limit (an H200 has 200 operations
# for a byte), and quantizing x reads and writes it once more. Such a layer is not left where the
# other side is small too: then the model is narrow as a whole, and nothing is a router in it.
NARROW, ASIDE = 64, 8

_HEAD = re.compile(
    r"(\w+_)?(heads?|logits|classifier|score|unembed(ding)?|embed_out|qa_outputs|output_layer)"
)
_POSITIONS = re.compile(r"pos|type|segment|wpe", re.I)  # tables of these are no vocabularies
_EXPERTS = re.compile(r"(\w+_)?experts?(_\w+)?")
_ROUTER = re.compile(r"(\w+_)?(gate|router|gating|wg)")
_SIZES = ("in_features", "in_channels", "num_features", "embed_dim", "input_size", "num_channels")


def is_narrow(linear: nn.Linear) -> bool:
    narrow, wide = sorted((linear.in_features, linear.out_features))
    return narrow <= NARROW and ASIDE * narrow <= wide


def _under(name: str, modules: Set[str]) -> bool:
    """Whether one of the modules of these names holds this one."""
    parts = name.split(".")
    return any(".".join(parts[:at]) in modules for at in range(1, len(parts)))


class Roles:
    """What the linears of a model are, each by its name and by id: the same whatever the order in
    which modules were registered, but for the last rule of heads()."""

    def __init__(self, model: nn.Module, linears: list[tuple[str, nn.Linear]]) -> None:
        self.modules = dict(model.named_modules())
        self.linears = linears
        self.runs = self._runs()
        # bare linears in a row are blocks where there are no others
        composite = {run: blocks for run, blocks in self.runs.items() if self._composite(blocks)}
        # what is below them is inside of something
        self.blocks = {block for blocks in composite.values() for block in blocks} | self._experts()
        self.adapters = dict(self._adapters())
        self.routers = dict(self._routers())
        self.heads = self._heads()
        self.towers = {
            run: blocks for run, blocks in (composite or self.runs).items()
            if not _under(run, self.blocks)
        }  # fmt: skip

    # ---- blocks ----

    def _composite(self, blocks: list[str]) -> bool:
        return not all(isinstance(self.modules[block], nn.Linear) for block in blocks)

    def _runs(self) -> dict[str, list[str]]:
        """Name of a container -> names of its numbered children that hold linears. Of an
        nn.Sequential, which may begin with a stem and end with a head, only the children of the
        class that comes most often, two at least. A container of experts is none."""
        found: dict[str, set[int]] = {}
        for name, _ in self.linears:
            parts = name.split(".") if name else []
            for at, part in enumerate(parts):
                if part.isdecimal() and not (at and _EXPERTS.fullmatch(parts[at - 1])):
                    found.setdefault(".".join(parts[:at]), set()).add(int(part))
        runs = {}
        for run, indices in found.items():
            blocks = [f"{run}.{i}" if run else str(i) for i in sorted(indices)]
            if isinstance(self.modules[run], nn.Sequential):
                classes = Counter(type(self.modules[block]) for block in blocks)
                cls, count = max(classes.items(), key=lambda c: (c[1], c[0] is not nn.Linear))
                blocks = [b for b in blocks if type(self.modules[b]) is cls] if count > 1 else []
            if blocks:
                runs[run] = blocks
        return runs

    def _experts(self) -> set[str]:
        """Names of the containers of experts."""
        found = set()
        for name, _ in self.linears:
            parts = name.split(".")
            at = next((i for i, part in enumerate(parts) if _EXPERTS.fullmatch(part)), None)
            if at is not None:
                found.add(".".join(parts[: at + 1]))
        return found

    def last_blocks(self, keep: float) -> dict[int, str]:
        """id -> reason, for the linears of the last `keep` of the blocks of each tower."""
        left: dict[int, str] = {}
        heads = {name for name, module in self.linears if id(module) in self.heads}
        for run, blocks in self.towers.items():
            count = math.ceil(round(keep * len(blocks), 6))  # .15 of 20 is 3, whatever its last bit
            if len(blocks) < 2 or count == 0 or heads.issuperset(blocks):
                continue
            why = (
                f"in the last {count} of the {len(blocks)} blocks in {run or 'the model'} "
                "(keep_last=0 converts them)"
            )
            last = set(blocks[-count:])
            for name, module in self.linears:
                if name in last or _under(name, last):
                    left.setdefault(id(module), why)
        return left

    # ---- adapters and routers ----

    def _above(self, name: str) -> Iterator[tuple[nn.Module, list[str]]]:
        """The modules above one of this name, and the rest of the name below each."""
        parts = name.split(".") if name else []
        for at in range(len(parts)):
            yield self.modules[".".join(parts[:at])], parts[at:]

    def _adapters(self) -> Iterator[tuple[int, str]]:
        for name, module in self.linears:
            part = next((p for p in name.split(".") if p.startswith("lora_")), None)
            if part is not None:
                yield id(module), f"an adapter ({part})"
                continue
            for above, rest in self._above(name):
                if "base_layer" in above._modules and rest[0] != "base_layer":
                    yield id(module), f"an adapter ({type(above).__name__} has a base_layer)"
                    break

    def _routers(self) -> Iterator[tuple[int, str]]:
        for name, module in self.linears:
            for above, rest in self._above(name):
                children = {*above._modules, *above._parameters}
                chosen = [child for child in children if _EXPERTS.fullmatch(child)]
                routes = "router" in rest[0] or (chosen and _ROUTER.fullmatch(rest[0]))
                if routes and not any(map(_EXPERTS.fullmatch, rest)):
                    beside = f" beside {min(chosen)}" if chosen else ""
                    yield id(module), f"a router ({rest[0]}{beside} in {type(above).__name__})"
                    break

    # ---- heads ----

    def _heads(self) -> dict[int, str]:
        found: dict[int, str] = {}
        beside = {*self.adapters, *self.routers}
        for rule in (self._tied, self._output_embeddings, self._vocabulary, self._named,
                     self._ends):  # fmt: skip
            for module, why in rule():
                if id(module) not in beside:
                    found.setdefault(id(module), why)
        others = [(name, module) for name, module in self.linears if id(module) not in beside]
        if not found and len(others) > 1 and not _under(others[-1][0], self.blocks):
            # without another sign: what was registered last
            found[id(others[-1][1])] = "the last linear of the model, taken for its LM head"
        return found

    def _embeddings(self) -> Iterator[tuple[str, nn.Embedding]]:
        for name, module in self.modules.items():
            if isinstance(module, nn.Embedding):
                yield name, module

    def _tied(self) -> Iterator[tuple[nn.Linear, str]]:
        # Parameters that modules hold, not what .weight gives: a parametrization makes that anew
        # at each call, and the ids of two tensors can be one where the first is freed.
        owner = {id(p): name for name, module in self._embeddings() for p in module.parameters()}
        for _, module in self.linears:
            name = next((owner[id(p)] for p in module.parameters() if id(p) in owner), None)
            if name is not None:
                yield module, f"its weight is tied to the embedding {name}"

    def _output_embeddings(self) -> Iterator[tuple[nn.Linear, str]]:
        for module in self.modules.values():
            get = getattr(module, "get_output_embeddings", None)
            if not callable(get):
                continue
            try:
                head = get()
            except (NotImplementedError, AttributeError):  # transformers' models without one
                continue
            for part in head.modules() if isinstance(head, nn.Module) else ():
                if isinstance(part, nn.Linear):
                    yield part, f"it is get_output_embeddings() of {type(module).__name__}"

    def _vocabulary(self) -> Iterator[tuple[nn.Linear, str]]:
        taken = {module.in_features for _, module in self.linears}
        rows = {
            module.num_embeddings: name
            for name, module in self._embeddings()
            if not _POSITIONS.search(name) and module.num_embeddings not in taken
        }
        for _, module in self.linears:
            name = rows.get(module.out_features)
            if name is not None:
                size = module.out_features
                yield module, f"its {size} outputs are the vocabulary, the rows of {name}"

    def _named(self) -> Iterator[tuple[nn.Linear, str]]:
        for name, module in self.linears:
            parts = [part for part in name.split(".") if not part.isdecimal()]
            if not parts or not _HEAD.fullmatch(parts[-1]) or _under(name, self.blocks):
                continue
            if name.rpartition(".")[0] and self._follows(name):
                continue  # inside a head that is an nn.Sequential
            yield module, f"its name says so ({parts[-1]})"

    def _follows(self, name: str) -> bool:
        """Whether another linear comes after it in an nn.Sequential."""
        above, _, own = name.rpartition(".")
        if not isinstance(self.modules[above], nn.Sequential) or not own.isdecimal():
            return False
        beside = [other.rpartition(".") for other, _ in self.linears]
        return any(a == above and n.isdecimal() and int(n) > int(own) for a, _, n in beside)

    def _ends(self) -> Iterator[tuple[nn.Linear, str]]:
        """The last of a model that is an nn.Sequential; else what stands outside of the blocks and
        has outputs that no other module has as inputs: not as many, nor two to four times that,
        which are split."""
        if len(self.linears) < 2:
            return
        end: Any = self.modules[""]
        if isinstance(end, nn.Sequential):
            while isinstance(end, nn.Sequential):
                holding = [m for m in end if any(isinstance(n, nn.Linear) for n in m.modules())]
                end = holding[-1] if holding else None
            if isinstance(end, nn.Linear):
                yield end, "the last linear of a Sequential model"
            return
        inputs = Counter(size for module in self.modules.values() for size in _inputs(module))
        for name, module in self.linears:
            if _under(name, self.blocks) or module.out_features == module.in_features:
                continue
            if not any(inputs[module.out_features // n] for n in (1, 2, 3, 4)
                       if module.out_features % n == 0):  # fmt: skip
                size = module.out_features
                yield module, f"nothing of the model takes {size} inputs, as many as it puts out"


def _inputs(module: nn.Module) -> set[int]:
    """The sizes of what a module may take."""
    if isinstance(module, nn.Linear):
        return {module.in_features}
    if isinstance(module, nn.Embedding):
        return set()
    sizes = {getattr(module, name, None) for name in _SIZES}
    for parameter in module._parameters.values():
        if parameter is None or isinstance(parameter, UninitializedParameter):
            continue
        norm = parameter.dim() == 1 and "norm" in type(module).__name__.lower()
        matrix = parameter.dim() > 1 and "Conv" not in type(module).__name__.removesuffix("1D")
        sizes |= set(parameter.shape[-2:]) if norm or matrix else set()
    return {size for size in sizes if isinstance(size, int)}
