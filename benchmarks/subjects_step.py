"""A whole training step: forward, backward and a fused AdamW over a stack of transformer blocks,
every contender in turns."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable
from typing import Any

import measure
import peers
import record
import torch
from measure import Contender
from run import Run
from stacks import STACKS, Sizes, Stack, build
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN's attention is about twice torch's default on Hopper: a fair baseline has it.
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
BASE = ("bf16", "compiled")
KINDS = {  # of kernels, by what their names contain; the first that fits
    "gemm": ("nvjet", "gemm", "cutlass", "xmma", "gemv"),
    "attention": ("flash", "cudnn", "fmha", "attention"),
    "narrowfloat": ("narrowfloat",),
    "optimizer": ("adam", "multi_tensor"),
    "triton": ("triton",),
    "memory": ("Mem",),
}


@dataclasses.dataclass
class Trained:
    """A stack with its optimizer; a step in three parts, so that memory can be read between."""

    model: nn.Module
    stack: Stack
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    targets: torch.Tensor

    def forward(self) -> torch.Tensor:
        with sdpa_kernel(ATTENTION, set_priority=True):
            loss: torch.Tensor = self.model(self.tokens, self.targets)
        return loss

    def turn(self, _: int) -> None:
        self.step()

    def step(self) -> None:
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def contenders(run: Run) -> list[tuple[str, str]]:
    """(recipe, mode); bf16 compiled is what all are set against."""
    ours = dict.fromkeys((run.recipe, "fp8_delayed"))
    found = [BASE, ("bf16", "eager"), *((r, "eager") for r in ours)]
    if run.options.compiled:
        found += [(r, "compiled") for r in ours]
    if run.options.peers:
        found += [(f"torchao_{name}", "compiled") for name in peers.torchao_recipes()]
    return found


def make(run: Run, sizes: Sizes, recipe: str, mode: str) -> Trained:
    import narrowfloat

    stack = build(sizes, run.device.torch)
    if recipe.startswith("torchao_"):
        peers.torchao(stack.blocks, recipe.removeprefix("torchao_"))
    elif recipe != "bf16":
        narrowfloat.convert(stack.blocks, recipe, head=True)  # blocks alone: they have no head
    tokens, targets = (
        torch.randint(sizes.vocabulary, (sizes.batch, sizes.length), device=run.device.torch)
        for _ in range(2)
    )
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-5, fused=run.device.cuda)
    model: nn.Module = stack
    if mode == "compiled":  # a smoke run compiles no C++
        model = peers.compiled(stack, "inductor" if run.device.cuda else "eager")
    return Trained(model, stack, optimizer, tokens, targets)


def memory(run: Run, trained: Trained) -> tuple[int, int]:
    """Bytes above the resting state: held after the forward, and at the peak of a step."""
    for _ in range(3):
        trained.step()
    if not run.device.cuda:
        return 1, 1
    run.device.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    rest = torch.cuda.memory_allocated()
    loss = trained.forward()
    held = torch.cuda.memory_allocated() - rest
    loss.backward()
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    del loss
    run.device.synchronize()
    return held, torch.cuda.max_memory_allocated() - rest


def kernels(run: Run, step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel."""
    if not run.device.cuda:
        return {}
    rounds = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            step()
        run.device.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        ms = event.self_device_time_total / 1e3 / rounds
        lower = event.key.lower()
        kind = next(
            (k for k, names in KINDS.items() if any(name.lower() in lower for name in names)),
            "aten",
        )
        if ms > 0:
            found[kind] = found.get(kind, 0.0) + ms
    return {kind: float(f"{ms:.4g}") for kind, ms in sorted(found.items(), key=lambda kv: -kv[1])}


def step(run: Run) -> None:
    """Every contender's step in turns, over bf16 compiled and over bf16 in its own mode."""
    names = run.options.models or list(STACKS)
    for name in names:
        with run.attempt(f"step {name}"):
            _one(run, name, STACKS[name] if run.device.cuda else STACKS[name].small())


def _one(run: Run, name: str, sizes: Sizes) -> None:
    torch._dynamo.reset()
    made: dict[tuple[str, str], Trained] = {}
    bytes_of: dict[tuple[str, str], tuple[int, int]] = {}
    for recipe, mode in contenders(run):
        with run.attempt(f"step {name} {recipe} {mode}"):
            trained = make(run, sizes, recipe, mode)
            bytes_of[recipe, mode] = memory(run, trained)
            made[recipe, mode] = trained
    turns = [Contender(trained.turn) for trained in made.values()]
    seconds = run.seconds(len(STACKS), 12.0)
    times = dict(zip(made, measure.interleave(run.device, turns, seconds), strict=True))
    for (recipe, mode), trained in made.items():
        if (recipe, mode) == BASE:
            continue
        held, peak = (
            a / b for a, b in zip(bytes_of[recipe, mode], bytes_of["bf16", mode], strict=True)
        )
        run.out.add(
            record.row(
                "step",
                model=name,
                mode=mode,
                recipe=recipe,
                fused=False,
                ratio=measure.pairwise_ratio(times[recipe, mode], times[BASE]),
                ratio_same_mode=measure.pairwise_ratio(times[recipe, mode], times["bf16", mode]),
                held_ratio=held,
                peak_ratio=peak,
                ms=statistics.median(times[recipe, mode]),
                kernels=kernels(run, trained.step),
            )
        )
