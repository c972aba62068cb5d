"""How one linear layer is measured: forward + backward, every mode, and its limit."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import measure
import peers
import record
import torch
from measure import Contender, Device
from run import BF16, Run
from torch import Tensor, nn

LARGE = (
    (4096, 4096, 4096),
    (8192, 4096, 14336),
    (16384, 4096, 4096),
    (16384, 8192, 8192),
    (16384, 8192, 28672),
)
SMALL = ((1024, 1024, 1024), (4096, 1024, 1024))


class Inputs(NamedTuple):
    xs: list[Tensor]  # [tokens, in], want gradients
    dys: list[Tensor]  # [tokens, out]


def trainer(
    modules: Sequence[nn.Module], inputs: Inputs, offset: int = 0, layers: int = 1
) -> Contender:
    """Forward + backward of `layers` layers beside each other, one call of backward for all;
    gradients are dropped between, untimed. Set s takes module s, or the one module there is.
    `offset` keeps two contenders off the sets that the other has just read."""
    parameters = [list(module.parameters()) for module in modules]

    def places(i: int) -> list[int]:
        return [(i * layers + r + offset) % len(inputs.xs) for r in range(layers)]

    def step(i: int) -> None:
        at = places(i)
        ys = [modules[s % len(modules)](inputs.xs[s]) for s in at]
        torch.autograd.backward(ys, [inputs.dys[s] for s in at])

    def reset(i: int) -> None:
        for s in places(i):
            inputs.xs[s].grad = None
            for parameter in parameters[s % len(modules)]:
                parameter.grad = None

    return Contender(step, reset)


def eager_layers(tokens: int, inputs: int, outputs: int, sets: int) -> int:
    """How many layers one timed run holds: about 4 ms of bf16 at 700 TFLOP/s. A call of backward
    costs the host as much as a layer or two, once a step of training and not once a layer."""
    bf16_ms = 6e3 * tokens * inputs * outputs / 7e14
    return min(sets, max(1, math.ceil(4 / bf16_ms)))


def captured_trainer(device: Device, modules: Sequence[nn.Module], inputs: Inputs) -> Contender:
    """One graph of a forward + backward over every set."""
    eager = trainer(modules, inputs)

    def call(s: int) -> None:
        eager.run(s)
        eager.reset(s)

    return measure.captured(device, [functools.partial(call, s) for s in range(len(inputs.xs))])


class LinearCase:
    """One shape and bias: layers of both kinds with the same weights, and rotating inputs."""

    def __init__(self, run: Run, shape: Sequence[int], bias: bool) -> None:
        import narrowfloat

        self.run, self.bias = run, bias
        self.tokens, self.inputs, self.outputs = shape
        weight = 2 * self.inputs * self.outputs
        data = 2 * self.tokens * (self.inputs + self.outputs)
        # while a row is measured: both layers' weights, one FP8 copy each way, gradients of one
        self.sets = run.device.sets(data + weight, data + 3 * weight)
        place: dict[str, Any] = {"device": run.device.torch, "dtype": BF16}
        features = (self.inputs, self.outputs, bias)
        self.plain: list[nn.Module] = [nn.Linear(*features, **place) for _ in range(self.sets)]
        self.ours: list[nn.Module] = [
            narrowfloat.Linear(*features, **place, recipe=run.recipe) for _ in range(self.sets)
        ]
        for mine, theirs in zip(self.ours, self.plain, strict=True):
            mine.load_state_dict(theirs.state_dict())
        self.data = Inputs(
            [run.randn(self.tokens, self.inputs, grad=True) for _ in range(self.sets)],
            [run.randn(self.tokens, self.outputs) for _ in range(self.sets)],
        )
        if narrowfloat.RECIPES[run.recipe].delayed is not None:
            # a step before those that are timed, as every step of training but the first has one
            first = trainer(self.ours, self.data)
            for s in range(self.sets):
                first.run(s)
                first.reset(s)
            narrowfloat.step()

    def label(self, mode: str, weights: str = "requantized") -> str:
        shape = f"{self.tokens}x{self.inputs}x{self.outputs}"
        return f"linear {shape} {mode} {weights} {'bias' if self.bias else 'no bias'}"

    def take(
        self, mode: str, weights: str, pair: Sequence[Contender], seconds: float, layers: int = 1
    ) -> None:
        """Time ours and bf16 in turns, then profile them so; `layers` in one run()."""
        run = self.run
        sets = 1 if mode == "graph" else self.sets
        times, base = measure.interleave(run.device, pair, seconds, sets)
        limit = None
        if run.recipe in measure.LAYER_BYTES:
            with run.attempt(f"{self.label(mode, weights)}: limit"):
                pair_ms = statistics.median(times) + statistics.median(base)
                rounds = min(max(int(300 / pair_ms), 9), 40)
                gemms = measure.profiled_gemm_ms(run.device, pair, rounds, layers)
                moved = measure.layer_bytes(
                    self.tokens,
                    self.inputs,
                    self.outputs,
                    reused=weights == "reused",
                    recipe=run.recipe,
                )
                limit = gemms and measure.limit_ms(gemms, moved, run.copy_gbps)
        self.add(run.recipe, mode, weights, times, base, layers, limit)

    def add(
        self,
        recipe: str,
        mode: str,
        weights: str,
        times: Sequence[float],
        base: Sequence[float],
        layers: int = 1,
        limit: float | None = None,
    ) -> None:
        ms = statistics.median(times) / layers
        self.run.out.add(
            record.row(
                "linear",
                recipe=recipe,
                mode=mode,
                weights=weights,
                tokens=self.tokens,
                **{"in": self.inputs, "out": self.outputs},
                bias=self.bias,
                ms=ms,
                bf16_ms=statistics.median(base) / layers,
                ratio=measure.pairwise_ratio(times, base),
                limit_ms=limit,
                of_limit=None if limit is None else limit / ms,
            )
        )

    def eager(self, weights: str, seconds: float) -> None:
        import narrowfloat

        ours = nn.ModuleList(self.ours)
        layers = eager_layers(self.tokens, self.inputs, self.outputs, self.sets)
        pair = [
            trainer(self.ours, self.data, 0, layers),
            trainer(self.plain, self.data, self.sets // 2, layers),
        ]
        reusing = weights == "reused"
        with narrowfloat.reuse_weights(ours) if reusing else contextlib.nullcontext():
            self.take("eager", weights, pair, seconds, layers=layers)

    def graph(self, seconds: float) -> None:
        pair = [
            captured_trainer(self.run.device, modules, self.data)
            for modules in (self.ours, self.plain)
        ]
        self.take("graph", "requantized", pair, seconds, layers=self.sets)

    def compiled(self, seconds: float) -> None:
        """One layer each: torch.compile would compile each of the rotated layers anew."""
        torch._dynamo.reset()
        ours, plain = peers.compiled(self.ours[0]), peers.compiled(self.plain[0])
        pair = [trainer([ours], self.data), trainer([plain], self.data, self.sets // 2)]
        self.take("compiled", "requantized", pair, seconds)

    def peer(self, recipe: str, seconds: float) -> None:
        torch._dynamo.reset()
        layer = nn.Linear(
            self.inputs, self.outputs, self.bias, device=self.run.device.torch, dtype=BF16
        )
        theirs = peers.compiled(peers.torchao(layer, recipe))
        plain = peers.compiled(self.plain[0])
        pair = [trainer([theirs], self.data), trainer([plain], self.data, self.sets // 2)]
        times, base = measure.interleave(self.run.device, pair, seconds, self.sets)
        self.add(f"torchao_{recipe}", "compiled", "requantized", times, base)


def linear(run: Run) -> None:
    """A layer, forward + backward, x wanting a gradient too, ours and bf16's in turns."""
    import narrowfloat

    shapes = run.shapes((*LARGE, *SMALL))
    torchao = peers.torchao_recipes() if run.options.peers else ()
    cases: list[tuple[tuple[int, ...], bool, list[str]]] = []
    caches = narrowfloat.RECIPES[run.recipe].cached_spec != 0
    for shape in shapes:
        graph = shape in SMALL or not run.device.cuda or run.options.graph
        for bias in (False,) if shape in SMALL else (False, True):
            modes = ["requantized"] + (["reused"] if caches else [])
            modes += ["graph"] if graph and not bias else []
            modes += ["compiled"] if run.options.compiled and not bias else []
            modes += [f"torchao {recipe}" for recipe in torchao if not bias]
            cases.append((shape, bias, modes))
    seconds = run.seconds(sum(len(modes) for _, _, modes in cases), 1.2)
    print(f"a copy moves {run.copy_gbps:.0f} GB/s", flush=True)
    for shape, bias, modes in cases:
        case = None
        with run.attempt(f"linear {shape} set-up"):
            case = LinearCase(run, shape, bias)
        for mode in modes if case is not None else ():
            assert case is not None
            where = ("eager", mode) if mode in ("requantized", "reused") else (mode,)
            with run.attempt(case.label(*where)):
                if mode == "graph":
                    case.graph(seconds)
                elif mode == "compiled":
                    case.compiled(seconds)
                elif mode.startswith("torchao"):
                    case.peer(mode.split()[1], seconds)
                else:
                    case.eager(mode, seconds)
        del case
