"""What is measured: one function a subject, with its shapes; README.md says how."""

from __future__ import annotations

import functools
import gc
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import measure
import peers
import record
import torch
from layer import LARGE, SMALL, Inputs, linear, trainer
from measure import Device
from run import BF16, Run
from subjects_block import quantize_block
from subjects_fork import fork
from subjects_fp4 import decode, quantize_fp4
from subjects_step import step
from subjects_tune import tune
from torch import Tensor, nn

QUANTIZED = ((16384, 8192), (4096, 4096), (1024, 1024))
MODELS = ((512, 8, 4096), (1024, 8, 8192), (4096, 4, 16384))  # width, blocks, tokens
QUANTIZERS = (  # format, rows, columns
    ("e4m3", True, True),
    ("e4m3", True, False),
    ("e4m3", False, True),
    ("e5m2", True, True),
)


# quantize, gemm: single kernels, in graphs over rotating inputs


def quantize(run: Run) -> None:
    """Each quantizing kernel, amax included, in turns with a copy of 2 GiB."""
    from narrowfloat import Cast
    from narrowfloat.spec import Quantize

    shapes = run.shapes(QUANTIZED)
    seconds = run.seconds(len(shapes) * len(QUANTIZERS), 0.5)
    for rows, cols in shapes:
        elements = rows * cols
        sets = run.device.sets(2 * elements, 4 * elements)
        inputs = [run.randn(rows, cols) for _ in range(sets)]
        for name, by_rows, by_columns in QUANTIZERS:
            sides = [s for s, wanted in (("rows", by_rows), ("columns", by_columns)) if wanted]
            kernel = f"{'+'.join(sides)} {name}"
            with run.attempt(f"quantize {kernel} {rows}x{cols}"):
                spec = Quantize(Cast(name), Cast(name), by_rows, by_columns).pack()
                op = torch.ops.narrowfloat.quantize
                calls = [functools.partial(op, x, spec) for x in inputs]
                moved = sets * measure.quantize_bytes(elements, by_rows, by_columns)
                run.take_quantize(kernel, (rows, cols), calls, moved, seconds)
                del calls
        del inputs


def accumulation(run: Run) -> None:
    """What a sum of ones, of one sign as activations can be, comes to; not a time."""
    for terms in (512, 1024, 4096, 8192, 16384):
        rows, scale = _quantized(run.randn(16, terms).fill_(1.0))
        for name in ("fast", "exact"):
            d = torch.ops.narrowfloat.scaled_mm(
                rows, rows, scale, scale, None, torch.float32, name == "fast"
            )
            run.out.add(
                record.row("accumulation", accumulate=name, terms=terms, sum=d[0, 0].item())
            )


class Operands(NamedTuple):
    a: Tensor  # [M, K] bf16
    b: Tensor  # [N, K] bf16
    a_rows: Tensor  # [M, K] e4m3
    a_scale: Tensor
    b_rows: Tensor  # [N, K] e4m3
    b_scale: Tensor


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the rows and the scale, e4m3."""
    from narrowfloat import Cast
    from narrowfloat.spec import both

    rows, _, _, _, scales = torch.ops.narrowfloat.quantize(x, both(Cast("e4m3"), None).pack())
    return rows, scales


def _operands(run: Run, tokens: int, inputs: int, outputs: int) -> Operands:
    a, b = run.randn(tokens, inputs), run.randn(outputs, inputs)
    return Operands(a, b, *_quantized(a), *_quantized(b))


def gemm(run: Run) -> None:
    """One FP8 GEMM on quantized operands, beside torch.mm in bf16 and torch._scaled_mm."""

    def ours(o: Operands, fast: bool) -> Tensor:
        d: Tensor = torch.ops.narrowfloat.scaled_mm(
            o.a_rows, o.b_rows, o.a_scale, o.b_scale, None, BF16, fast
        )
        return d

    def theirs(o: Operands, fast: bool) -> Tensor:
        d: Tensor = torch._scaled_mm(
            o.a_rows,
            o.b_rows.t(),
            scale_a=o.a_scale[0],
            scale_b=o.b_scale[0],
            out_dtype=BF16,
            use_fast_accum=fast,
        )
        return d

    gemms = {
        "fp8 fast": functools.partial(ours, fast=True),
        "fp8 exact": functools.partial(ours, fast=False),
        "torch._scaled_mm fast": functools.partial(theirs, fast=True),
        "torch._scaled_mm exact": functools.partial(theirs, fast=False),
    }
    shapes = run.shapes((*SMALL, *LARGE))
    seconds = run.seconds(len(shapes) * len(gemms), 0.5)
    for tokens, inputs, outputs in shapes:
        read = (tokens + outputs) * inputs  # one byte an element is what FP8 reads
        kept = 3 * read + 4 * tokens * outputs
        sets = run.device.sets(read, kept)
        rotated = [_operands(run, tokens, inputs, outputs) for _ in range(sets)]
        baseline = measure.captured(
            run.device, [functools.partial(torch.mm, o.a, o.b.t()) for o in rotated]
        )
        for recipe, call in gemms.items():
            with run.attempt(f"gemm {recipe} {tokens}x{inputs}x{outputs}"):
                mine = measure.captured(run.device, [functools.partial(call, o) for o in rotated])
                times, base = measure.interleave(run.device, [mine, baseline], seconds)
                run.out.add(
                    record.row(
                        "gemm",
                        recipe=recipe,
                        tokens=tokens,
                        **{"in": inputs, "out": outputs},
                        ms=statistics.median(times) / sets,
                        bf16_ms=statistics.median(base) / sets,
                        ratio=measure.pairwise_ratio(times, base),
                    )
                )
                del mine
        del baseline, rotated


# host, memory, model: many layers


def _stack(run: Run, make: Callable[..., nn.Module], count: int, width: int) -> nn.Sequential:
    layers = [make(width, width, device=run.device.torch, dtype=BF16) for _ in range(count)]
    return nn.Sequential(*layers)


def _makers(run: Run) -> tuple[Callable[..., nn.Module], Callable[..., nn.Module]]:
    import narrowfloat

    return functools.partial(narrowfloat.Linear, recipe=run.recipe), nn.Linear


def host(run: Run) -> None:
    """Host time of one more layer in a stack of tiny ones (128 x 128, 128 tokens, with bias)."""
    deep, shallow, count, rounds = (40, 8, 25, 15) if run.device.cuda else (4, 2, 2, 2)
    x, dy = run.randn(128, 128, grad=True), run.randn(128, 128)
    stacks = [(_stack(run, m, shallow, 128), _stack(run, m, deep, 128)) for m in _makers(run)]

    def once(model: nn.Sequential, calls: int) -> float:
        layers, parameters = list(model), list(model.parameters())

        def step() -> None:
            y = x
            for layer in layers:
                y = layer(y)
            y.backward(dy)

        def reset() -> None:
            x.grad = None
            for parameter in parameters:
                parameter.grad = None

        return measure.host_us(step, reset, calls, run.device)

    with run.attempt("host"):
        for models in stacks:
            for model in models:
                once(model, 5)
        marginal: tuple[list[float], list[float]] = ([], [])
        began = time.perf_counter()
        gc.collect()
        gc.disable()
        try:
            while len(marginal[0]) < rounds or (
                run.options.seconds and time.perf_counter() - began < run.options.seconds
            ):
                for kept, (few, many) in zip(marginal, stacks, strict=True):
                    spent = once(many, count) - once(few, count)
                    kept.append(spent / (deep - shallow))
        finally:
            gc.enable()
        ours, base = marginal
        run.out.add(
            record.row(
                "host",
                recipe=run.recipe,
                us_per_layer=statistics.median(ours),
                bf16_us_per_layer=statistics.median(base),
                ratio=measure.pairwise_ratio(base, ours),
            )
        )


def held_bytes(device: Device, model: nn.Module, leaf: Tensor) -> int:
    """What the graph of a forward holds beyond the parameters: everything that the backward needs.

    The model's input is a copy made inside (its own backward needs nothing) and its output goes
    into a sum that needs none of it, so that each layer counts with what it keeps of its input
    and nothing counts twice or not at all. The allocator's count; on the CPU that of the tensors
    saved.
    """
    saved: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    if not device.cuda:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(leaf.clone()).sum()
        loss.backward()
        return sum(saved.values())
    for _ in range(2):  # so that workspaces and plans are there before
        model(leaf.clone()).sum().backward()
        model.zero_grad(set_to_none=True)
        leaf.grad = None
    device.synchronize()
    before = torch.cuda.memory_allocated(device.torch)
    loss = model(leaf.clone()).sum()
    device.synchronize()
    held = torch.cuda.memory_allocated(device.torch) - before
    loss.backward()
    return held


def memory(run: Run) -> None:
    """16 layers of 4096 x 4096 with bias, 4096 tokens."""
    width, tokens = (4096, 4096) if run.device.cuda else (64, 64)
    with run.attempt("memory"):
        leaf = run.randn(tokens, width, grad=True)
        ours, base = (
            held_bytes(run.device, _stack(run, make, 16, width), leaf) for make in _makers(run)
        )
        fields = {"bytes": ours, "bf16_bytes": base, "ratio": ours / base}
        run.out.add(record.row("memory", recipe=run.recipe, **fields))


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))), four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model(run: Run) -> None:
    """A stack of MLP blocks, forward + backward: eager; peers compiled, over bf16 compiled."""
    import narrowfloat

    torchao = peers.torchao_recipes() if run.options.peers else ()
    cases = MODELS if run.device.cuda else ((32, 2, 64),)
    seconds = run.seconds(len(cases) * (1 + len(torchao)), 2.0)

    def make(width: int, blocks: int) -> nn.Module:
        stack = nn.Sequential(*(Block(width) for _ in range(blocks)))
        return stack.to(run.device.torch, BF16)

    for width, blocks, tokens in cases:
        shared = Inputs(
            [run.randn(tokens, width, grad=True) for _ in range(4)],
            [run.randn(tokens, width) for _ in range(4)],
        )
        for recipe in (run.recipe, *(f"torchao_{name}" for name in torchao)):
            with run.attempt(f"model {width} {recipe}"):
                ours, plain = make(width, blocks), make(width, blocks)
                ours.load_state_dict(plain.state_dict())
                if recipe == run.recipe:
                    narrowfloat.convert(ours, recipe, head=True)  # there is no LM head here
                else:
                    torch._dynamo.reset()
                    ours = peers.compiled(peers.torchao(ours, recipe.removeprefix("torchao_")))
                    plain = peers.compiled(plain)
                pair = [trainer([ours], shared), trainer([plain], shared, 2)]
                times, base = measure.interleave(run.device, pair, seconds, 4)
                where = {"width": width, "blocks": blocks, "tokens": tokens}
                ratio = measure.pairwise_ratio(times, base)
                run.out.add(record.row("model", recipe=recipe, **where, ratio=ratio))


# train: the demo


def train(run: Run) -> None:
    """examples/train_gpt.py as it is, in a process of its own; its rows are taken over."""
    folder = record.ROOT / "demo_out"
    arguments = ["--device", run.device.torch.type, "--out", str(folder)]
    arguments += ["--recipes", run.recipe, *shlex.split(run.options.train_args)]
    began = time.time()
    script = str(record.ROOT / "examples" / "train_gpt.py")
    with run.attempt("train"):
        try:
            subprocess.run([sys.executable, script, *arguments], check=True)
        finally:  # it writes after each run, and what it finished counts
            for path in folder.glob("train_*.json"):
                if path.stat().st_mtime >= began:
                    rows = json.loads(path.read_text())["rows"]
                    run.out.add(*(record.row(**r) for r in rows if r["recipe"] != r["baseline"]))


SUBJECTS: dict[str, Callable[[Run], None]] = {
    f.__name__: f
    for f in (
        quantize,
        quantize_fp4,
        quantize_block,
        accumulation,
        gemm,
        linear,
        decode,
        host,
        memory,
        model,
        tune,
        train,
        fork,
        step,
    )
}
