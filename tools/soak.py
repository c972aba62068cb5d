"""Runs a small model for many steps over recipes, shapes, streams and threads, and sees whether
anything grows, and whether a step still has the bits that a fresh process gives it.

    python tools/soak.py [--steps 20000] [--seconds 150] [--device cuda] [--out FILE]

What a step computes depends on its number alone: weights and inputs are drawn from it, stochastic
rounding is seeded with it. So steps that are far apart can be run again, by themselves, in another
process. A row of JSON is printed: growth_bytes is what the device holds more at the end of any
phase than after the warm-up, allocated or reserved.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowfloat as nf

WIDTHS = ((128, 256), (104, 72))  # of a model: in and out, between; the second not of 16
TOKENS = (1, 17, 64, 100, 256, 40, 333, 512)
HOWS = ("training", "reused", "inference")
PHASES = 10  # after the warm-up
HASHED = 200  # steps whose bits are compared


class Worker:
    """One thread's models and stream; nothing is shared with another's."""

    lock = threading.Lock()  # torch's generator is one of the process

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.recipes = [name for name in nf.RECIPES if nf.supported(name, device)]
        self.models: dict[tuple[str, int], nn.Module] = {}
        self.streams: list[Any] = []
        if self.device.type == "cuda":
            self.streams = [torch.cuda.Stream(device) for _ in range(2)]

    def model(self, recipe: str, at: int) -> nn.Module:
        if (recipe, at) not in self.models:
            outer, inner = WIDTHS[at]
            generator = torch.Generator().manual_seed(at)
            layers = nn.Linear(outer, inner), nn.GELU(), nn.Linear(inner, outer)
            made = nn.Sequential(*layers).to(torch.bfloat16)
            with torch.no_grad():
                for p in made.parameters():
                    drawn = torch.randn(p.shape, generator=generator)
                    p.copy_(drawn / p.shape[-1] ** 0.5)
            nf.convert(made, recipe, head=True, keep_last=0)
            self.models[recipe, at] = made.to(self.device)
        return self.models[recipe, at]

    def choices(self, step: int) -> tuple[str, int, int, str]:
        """Recipe, widths, tokens and way of a step: every pair meets, in cycles."""
        recipe = self.recipes[step % len(self.recipes)]
        turn = step // len(self.recipes)
        tokens = TOKENS[turn % len(TOKENS)]
        return recipe, turn // 3 % len(WIDTHS), tokens, HOWS[turn // 2 % len(HOWS)]

    def cycle(self) -> int:
        """Steps until all choices have been met, streams included."""
        return len(self.recipes) * len(TOKENS) * 6 * 2

    def run(self, step: int) -> list[Tensor]:
        recipe, at, tokens, how = self.choices(step)
        with self.lock:  # which nn.Linear draws from too
            model = self.model(recipe, at)
        stream = contextlib.nullcontext()
        if self.streams:
            stream = torch.cuda.stream(self.streams[step // 7 % len(self.streams)])
        made = nf.RECIPES[recipe]
        draws = made.draws_dx or made.draws_dw
        with stream, self.lock if draws else contextlib.nullcontext():
            generator = torch.Generator().manual_seed(step % 1000)
            x = torch.randn(tokens, WIDTHS[at][0], generator=generator).to(torch.bfloat16)
            x = x.to(self.device).requires_grad_(how != "inference")
            if draws:
                torch.manual_seed(step)
            for layer in model:
                if isinstance(layer, nf.Linear):
                    layer.start_history()
            return self.results(model, x, how, made.delayed is not None)

    def results(self, model: nn.Module, x: Tensor, how: str, delayed: bool) -> list[Tensor]:
        if how == "inference":
            with torch.no_grad():
                return [model(x)]
        reused = nf.reuse_weights(model) if how == "reused" else contextlib.nullcontext()
        with reused:
            for last in (False, True) if delayed or how == "reused" else (True,):
                y = model(x)
                found = torch.autograd.grad(y, [x, *model.parameters()], y.detach() * 0.5)
                if not last and delayed:
                    nf.step(model)
        return [y.detach(), *found]


def digest(tensors: Iterable[Tensor]) -> str:
    """Of what is computed: all streams are waited for, whichever the results come from."""
    found = hashlib.sha256()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for t in tensors:
        found.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def memory(device: str) -> tuple[int, int]:
    """(allocated, reserved) of the device, with nothing running."""
    if device == "cpu":
        return 0, 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def resident() -> int:
    """The most bytes of host memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def some_of(steps: int) -> set[int]:
    return set(range(0, steps, max(1, steps // HASHED)))


class Soak:
    def __init__(self, device: str, threads: int, steps: int, end: float) -> None:
        self.workers = [Worker(device) for _ in range(threads)]
        self.hashed, self.end = some_of(steps), end
        self.digests: dict[int, str] = {}
        self.done = 0

    def phase(self, pools: list[ThreadPoolExecutor], steps: range) -> None:
        """The steps of a phase, dealt out to the threads. A worker has one thread for good: PyTorch
        keeps a workspace of cuBLAS for each pair of a thread and a stream."""

        def work(index: int) -> int:
            count = 0
            for step in steps[index :: len(self.workers)]:
                if time.time() > self.end:
                    break
                results = self.workers[index].run(step)
                if step in self.hashed:
                    self.digests[step] = digest(results)
                count += 1
            return count

        running = [pool.submit(work, index) for index, pool in enumerate(pools)]
        self.done += sum(one.result() for one in running)


def soak(device: str, threads: int, steps: int, seconds: float) -> dict[str, Any]:
    begun = time.time()
    # the fresh process takes its share of the time
    runs = Soak(device, threads, steps, begun + 0.8 * seconds)
    # twice through, so that the allocator's blocks have found their places
    warm_up = min(steps // 2, 3 * runs.workers[0].cycle() * threads)
    grown, first, host = 0, (0, 0), 0
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(threads)]
        runs.phase(pools, range(warm_up))
        first, host = memory(device), resident()
        bounds = [warm_up + (steps - warm_up) * i // PHASES for i in range(PHASES + 1)]
        for low, high in zip(bounds, bounds[1:], strict=False):
            runs.phase(pools, range(low, high))
            now = memory(device)
            grown = max(grown, now[0] - first[0], now[1] - first[1])
    return {
        "bench": "soak",
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "steps": runs.done,
        "threads": threads,
        "warm_up": warm_up,
        "growth_bytes": grown,
        "allocated_bytes": first[0],
        "reserved_bytes": first[1],
        "host_growth_bytes": resident() - host,
        "seconds": round(time.time() - begun, 1),
        "digests": runs.digests,
    }


def fresh(device: str, steps: list[int]) -> dict[int, str]:
    """The digests of some steps in a process of its own, which runs nothing else."""
    command = [sys.executable, __file__, "--device", device, "--alone", ",".join(map(str, steps))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"soak: the fresh process failed:\n{done.stderr[-3000:]}")
    return {int(step): found for step, found in json.loads(done.stdout).items()}


def plans() -> dict[str, int]:
    module = nf._binary.module
    return {} if module is None else dict(module.plan_cache())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--seconds", type=float, default=150, help="where to stop before")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone is not None:
        worker = Worker(args.device)
        steps = [int(step) for step in args.alone.split(",")]
        print(json.dumps({step: digest(worker.run(step)) for step in steps}))
        return 0
    row = soak(args.device, args.threads, args.steps, args.seconds)
    digests = row.pop("digests")
    again = fresh(args.device, sorted(digests))
    differ = sorted(step for step in digests if digests[step] != again[step])
    row |= {"compared": len(digests), "differ": differ[:20], "equal": not differ, **plans()}
    print(json.dumps(row))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(row) + "\n")
    return 0 if not differ and row["growth_bytes"] <= 1 << 20 else 1


if __name__ == "__main__":
    raise SystemExit(main())
