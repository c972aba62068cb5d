"""How recipes are compared from one point of one training: what a recipe itself costs,
without the chance that leads whole trainings apart."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import shlex
import statistics
import sys
from types import ModuleType
from typing import Any, NamedTuple

import record
import torch
from run import Run
from torch import Tensor, nn


@functools.cache
def demo() -> ModuleType:
    path = record.ROOT / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Branch(NamedTuple):
    """How the steps after the fork went."""

    train: float  # mean loss over their second half
    in_bf16: float  # the same of the same weights in plain PyTorch
    held_out: float  # loss after them


class Training:
    """The demo's baseline up to half of its steps; branches take an eighth of them more, all on
    the same batches."""

    def __init__(self, run: Run, size: Any, seed: int, text: Any) -> None:
        self.size, self.seed, self.text = size, seed, text
        self.device = run.device.torch
        self.first, self.last = size.steps // 2, size.steps // 2 + size.steps // 8
        self.starts = demo().training_starts(text.train.numel(), size, seed).to(self.device)
        evaluated = demo().evaluation_starts(text.held_out.numel(), size, size.eval_batches)
        self.evaluated = evaluated.to(self.device)
        model = demo().build(size, seed, size.baseline, self.device)
        optimizer = demo().optimizer_for(model, size, self.device)
        self._steps(model, optimizer, 0, self.first)
        self.state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        self.params = sum(p.numel() for p in model.parameters())

    def _steps(self, model: Any, optimizer: Any, first: int, last: int) -> Tensor:
        step = functools.partial(demo().train_step, model, optimizer, self.text.train)
        return torch.stack([step(self.starts[i], i, self.size) for i in range(first, last)])

    def branch(self, recipe: str) -> Branch:
        model = demo().build(self.size, self.seed, recipe, self.device)
        optimizer = demo().optimizer_for(model, self.size, self.device)
        weights, moments = self.state
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(moments))
        plain = self._plain(model)
        middle = (self.first + self.last) // 2
        self._steps(model, optimizer, self.first, middle)
        train, in_bf16 = [], []
        for i in range(middle, self.last):
            batch = self.starts[i : i + 1]
            in_bf16.append(demo().evaluate(plain, self.text.train, batch, self.size))
            train.append(self._steps(model, optimizer, i, i + 1))
        held_out = demo().evaluate(model, self.text.held_out, self.evaluated, self.size)
        return Branch(torch.cat(train).double().mean().item(), statistics.fmean(in_bf16), held_out)

    def _plain(self, model: nn.Module) -> nn.Module:
        """The baseline's model of these very parameters."""
        plain: nn.Module = demo().build(self.size, self.seed, self.size.baseline, self.device)
        for name, module in plain.named_modules():
            module._parameters.update(model.get_submodule(name)._parameters)
        return plain


def fork(run: Run) -> None:
    """Of each recipe the loss after the fork over the baseline's; weights_gap_percent: of its
    weights in the baseline's GEMMs. The baseline's own row is its second branch: what two
    branches that differ in nothing lie apart."""
    options = demo().arguments(shlex.split(run.options.train_args))
    size = demo().SIZES["full" if run.device.cuda else "cpu"]
    if options.steps is not None:
        size = dataclasses.replace(size, steps=options.steps)
    text = demo().load_text(demo().roots())
    parts = {part: getattr(text, part).to(run.device.torch) for part in ("train", "held_out")}
    text = dataclasses.replace(text, **parts)
    for seed in options.seeds:
        training = Training(run, size, seed, text)
        base = training.branch(size.baseline)
        for recipe in (size.baseline, *options.recipes):
            with run.attempt(f"fork {recipe} seed {seed}"):
                own = training.branch(recipe)
                run.out.add(
                    record.row(
                        "fork",
                        recipe=recipe,
                        params=training.params,
                        first=training.first,
                        last=training.last,
                        seed=seed,
                        loss=own.held_out,
                        bf16_loss=base.held_out,
                        gap_percent=100 * (own.held_out / base.held_out - 1),
                        train_gap_percent=100 * (own.train / base.train - 1),
                        weights_gap_percent=100 * (own.in_bf16 / base.in_bf16 - 1),
                    )
                )
