"""Times two builds of the package against each other, in turns within one command.

    python benchmarks/ab.py --old .old/src --new src --out FILE [--what host linear] [--pairs 9]

Each build runs in a process of its own that makes the same work, waits on its standard input, and
measures once for each line. The two take turns, old first and new first by turns, and one alone
computes at a time. A row has the median over the pairs of new / old, so that what drifts in the
machine between pairs cancels; below 1 the new build is faster, or takes less memory.

Rows are written as they come: a run that is cut keeps what it has. `spread` is half the distance
between the quartiles of the ratios; a ratio closer to 1 than that says nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

WHATS = ("host", "linear", "decode", "quantize", "memory")
LINEAR = ("fp8", "fp8_row", "fp8_block", "mxfp8", "nvfp4", "fp8_delayed")
SHAPES = ((8192, 4096, 4096), (4096, 8192, 8192))  # tokens, in, out
TOKENS = (1, 16, 64)
QUANTIZE: dict[str, tuple[str, dict[str, bool]]] = {
    "e4m3": ("e4m3", {}),
    "e5m2": ("e5m2", {}),
    "fp8_row": ("fp8_row", {}),
    "fp8_block": ("fp8_block", {}),
    "fp8_block two_d": ("fp8_block", {"two_d": True}),
    "fp8_block_pow2": ("fp8_block_pow2", {}),
    "mxfp8": ("mxfp8", {}),
    "nvfp4": ("nvfp4", {}),
    "nvfp4 two_d": ("nvfp4", {"two_d": True}),
    "nvfp4 four_over_six": ("nvfp4", {"four_over_six": True}),
    "nvfp4 stochastic": ("nvfp4", {"stochastic": True}),
    "mxfp4": ("mxfp4", {}),
}
ONCE = {"memory"}  # the same at each run: one pair

Row = dict[str, Any]
Measure = Callable[[], dict[str, float]]


def work(what: str, recipes: list[str], cuda: bool) -> list[Row]:
    """What is measured, as the fields that name its row; tiny sizes on the CPU."""
    shapes = SHAPES if cuda else ((64, 32, 48),)
    if what in ("host", "memory"):
        return [{"recipe": name} for name in recipes]
    if what == "linear":
        named = [name for name in LINEAR if name in recipes]
        sizes = [dict(zip(("tokens", "in", "out"), shape, strict=True)) for shape in shapes]
        return [{"recipe": name, **size} for size in sizes for name in named]
    if what == "decode":
        inputs, outputs = (4096, 14336) if cuda else (64, 96)
        return [{"tokens": tokens, "in": inputs, "out": outputs} for tokens in TOKENS]
    rows, cols = (16384, 8192) if cuda else (64, 128)
    return [{"format": name, "rows": rows, "cols": cols} for name in QUANTIZE]


# ---- a worker: torch and narrowfloat are imported here alone ----


class Worker:
    """Makes one piece of work at a time, and measures it when asked."""

    def __init__(self, device: str) -> None:
        import measure
        import torch

        import narrowfloat

        self.torch, self.nf, self.measure = torch, narrowfloat, measure
        self.device = measure.Device(device)
        if not self.device.cuda:
            torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= 8:  # both workers on the same few: they take turns
            os.sched_setaffinity(0, cores[4:7])
        self.place: dict[str, Any] = {"device": self.device.torch, "dtype": torch.bfloat16}

    def machine(self, commit: str | None) -> dict[str, Any]:
        import record

        return record.machine(self.device.torch, commit)

    def randn(self, *shape: int) -> Any:
        return self.torch.randn(shape, **self.place)

    def make(self, what: str, which: Row) -> Measure:
        self.torch.manual_seed(0)
        return getattr(self, what)(**which)

    def layer(self, recipe: str, inputs: int, outputs: int, bias: bool = True) -> Any:
        return self.nf.Linear(inputs, outputs, bias, **self.place, recipe=recipe)

    def host(self, recipe: str) -> Measure:
        """Host time of one more layer in a stack of small ones, as bench.py's `host` takes it, and
        the same of nn.Linear right after."""
        deep, shallow, count, size = (40, 8, 16, 128) if self.device.cuda else (3, 1, 1, 32)
        x, dy = self.randn(size, size).requires_grad_(), self.randn(size, size)

        def stacks(make: Callable[[], Any]) -> list[list[Any]]:
            return [[make() for _ in range(layers)] for layers in (shallow, deep)]

        def once(layers: list[Any], calls: int) -> float:
            parameters = [p for layer in layers for p in layer.parameters()]

            def step() -> None:
                y = x
                for layer in layers:
                    y = layer(y)
                y.backward(dy)

            def reset() -> None:
                x.grad = None
                for parameter in parameters:
                    parameter.grad = None

            return self.measure.host_us(step, reset, calls, self.device)

        ours = stacks(lambda: self.layer(recipe, size, size))
        plain = stacks(lambda: self.torch.nn.Linear(size, size, **self.place))

        def marginal(pair: list[list[Any]]) -> float:
            few, many = pair
            times = [(once(many, 1), once(few, 1)) for _ in range(count)]
            # the least of each: what else the host does only adds
            of_many, of_few = (min(column) for column in zip(*times, strict=True))
            return (of_many - of_few) / (deep - shallow)

        def run() -> dict[str, float]:
            return {"us": marginal(ours), "bf16_us": marginal(plain)}

        for layers in (*ours, *plain):
            once(layers, 4 if self.device.cuda else 1)
        self.nf.step()
        return run

    def timed(self, call: Callable[[], Any], count: int) -> Measure:
        """Microseconds of a call, `count` of them queued; by the device's clock."""

        def run() -> dict[str, float]:
            call()  # the first finds the device idle
            marks = self.device.marks(2)
            self.device.stamp(marks, 0)
            for _ in range(count):
                call()
            self.device.stamp(marks, 1)
            self.device.synchronize()
            return {"us": self.device.between(*marks) * 1e3 / count}

        for _ in range(3):
            call()
        return run

    def trainer(self, recipe: str, tokens: int, inputs: int, outputs: int) -> Callable[[], None]:
        layer = self.layer(recipe, inputs, outputs)
        x, dy = self.randn(tokens, inputs).requires_grad_(), self.randn(tokens, outputs)

        def step() -> None:
            layer(x).backward(dy)
            x.grad = layer.weight.grad = layer.bias.grad = None

        step()
        self.nf.step()  # of delayed scaling: a step before those that are timed
        return step

    def linear(self, recipe: str, tokens: int, **sizes: int) -> Measure:
        step = self.trainer(recipe, tokens, sizes["in"], sizes["out"])
        return self.timed(step, 20 if self.device.cuda else 2)

    def decode(self, tokens: int, **sizes: int) -> Measure:
        """A graph over layers that do not fit in L2 together."""
        plain = [
            self.torch.nn.Linear(sizes["in"], sizes["out"], bias=False, **self.place)
            for _ in range(4)
        ]
        layers = [self.nf.PackedFP4Linear.from_linear(layer, "nvfp4") for layer in plain]
        x = self.randn(tokens, sizes["in"])
        with self.torch.no_grad():
            calls = [functools.partial(layer, x) for layer in layers]
            graph = self.measure.captured(self.device, calls)
        run = self.timed(functools.partial(graph.run, 0), 50 if self.device.cuda else 2)
        return lambda: {"us": run()["us"] / len(layers)}

    def quantize(self, format: str, rows: int, cols: int) -> Measure:
        fmt, options = QUANTIZE[format]
        x = self.randn(rows, cols)
        call = functools.partial(self.nf.quantize, x, fmt, **options)
        return self.timed(call, 20 if self.device.cuda else 2)

    def memory(self, recipe: str) -> Measure:
        """Peak bytes of a forward and backward beyond what was there; on the CPU those saved."""
        size = 4096 if self.device.cuda else 64
        step = self.trainer(recipe, size, size, size)

        def run() -> dict[str, float]:
            if not self.device.cuda:
                saved: list[int] = []
                hooks = self.torch.autograd.graph.saved_tensors_hooks
                with hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
                    step()
                return {"bytes": sum(saved)}
            step()
            self.device.synchronize()
            before = self.torch.cuda.memory_allocated()
            self.torch.cuda.reset_peak_memory_stats()
            step()
            self.device.synchronize()
            return {"bytes": self.torch.cuda.max_memory_allocated() - before}

        return run

    def drop(self) -> None:
        gc.collect()
        if self.device.cuda:
            self.torch.cuda.empty_cache()
            self.device.synchronize()


def serve(device: str) -> None:
    """Answers each line of standard input with one of JSON; what is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # of emulation
    worker = Worker(device)
    made: Measure | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if asked["do"] == "hello":
                folder = str(pathlib.Path(worker.nf.__file__).parent)
                answer = {"recipes": sorted(worker.nf.RECIPES), "folder": folder}
            elif asked["do"] == "machine":
                answer = worker.machine(asked["commit"])
            elif asked["do"] == "make":
                made = None
                worker.drop()
                made = worker.make(asked["what"], asked["which"])
                worker.device.synchronize()
            else:
                assert made is not None
                gc.collect()
                gc.disable()
                try:
                    answer = made()
                finally:
                    gc.enable()
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


# ---- the parent ----

Found = dict[str, list[dict[str, float]]]  # of the old and the new build, what each run measured


class Build:
    """A worker's process, asked and answered line by line."""

    def __init__(self, source: pathlib.Path, device: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
        command = [sys.executable, __file__, "--worker", "--device", device]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"ab: a worker ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextlib.contextmanager
def builds(old: pathlib.Path, new: pathlib.Path, device: str) -> Iterator[dict[str, Build]]:
    both = {"old": Build(old, device), "new": Build(new, device)}
    try:
        yield both
    finally:
        for build in both.values():
            build.close()


def row(what: str, which: Row, found: Found) -> Row:
    """Medians of both builds, and of the ratios of the pairs."""
    unit = "bytes" if what == "memory" else "us"
    old, new = ([answer[unit] for answer in found[side]] for side in ("old", "new"))
    ratios = sorted(b / a for a, b in zip(old, new, strict=True))
    made: Row = {"bench": "ab", "what": what, **which, "ratio": statistics.median(ratios)}
    if len(ratios) > 1:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        made["spread"] = (high - low) / 2
    made |= {"pairs": len(ratios)}
    made |= {f"old_{unit}": statistics.median(old), f"new_{unit}": statistics.median(new)}
    if what == "host":
        for side in ("old", "new"):
            over = [answer["us"] / answer["bf16_us"] for answer in found[side]]
            made[f"{side}_over_bf16"] = statistics.median(over)
        made["bf16_us"] = statistics.median(a["bf16_us"] for a in found["old"] + found["new"])
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in made.items()}


def pairs_of(both: dict[str, Build], what: str, which: Row, pairs: int) -> Found:
    for build in both.values():
        build.ask("make", what=what, which=which)
    found: Found = {"old": [], "new": []}
    for pair in range(1 if what in ONCE else pairs):
        for side in ("old", "new") if pair % 2 == 0 else ("new", "old"):
            found[side].append(both[side].ask("run"))
    return found


def fresh_processes(options: argparse.Namespace, recipes: list[str]) -> dict[str, Found]:
    """Host times of each recipe, of one pair of medians from every pair of fresh processes.

    A process is faster or slower than the next of the same build by a tenth or more (where its
    memory lies, which cores it gets), however often it is asked; so each counts once.
    """
    found: dict[str, Found] = {recipe: {"old": [], "new": []} for recipe in recipes}
    began = time.monotonic()
    for pair in range(options.processes):
        if time.monotonic() - began > options.seconds:
            print(f"{pair} pairs of processes, the time is over", flush=True)
            break
        with builds(options.old, options.new, options.device) as both:
            for recipe in recipes:
                of_pair = pairs_of(both, "host", {"recipe": recipe}, options.pairs)
                for side, answers in of_pair.items():
                    middle = {
                        key: statistics.median(answer[key] for answer in answers)
                        for key in answers[0]
                    }
                    found[recipe][side].append(middle)
    return found


def write(path: pathlib.Path, machine: dict[str, Any], rows: list[Row]) -> None:
    """As bench.py writes its results: one line a row."""
    lines = ",\n  ".join(json.dumps(r) for r in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"machine": {json.dumps(machine)},\n "rows": [\n  {lines}\n ]}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--old", type=pathlib.Path, help="folder that holds narrowfloat, built")
    parser.add_argument("--new", type=pathlib.Path, default=pathlib.Path("src"))
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--what", nargs="+", choices=WHATS, default=list(WHATS))
    parser.add_argument("--recipes", nargs="+", help="default: every recipe that both builds have")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument(
        "--processes", type=int, default=1, help="with more, host alone: fresh pairs of processes"
    )
    parser.add_argument("--seconds", type=float, default=190, help="begin no row after these")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--commit", help="of the new build, for a copy of the tree without git")
    parser.add_argument("--old-commit")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.device)
        return 0
    if options.old is None or options.out is None:
        parser.error("--old and --out are needed")
    began, failed, rows = time.monotonic(), 0, []
    with builds(options.old, options.new, options.device) as both:
        hello = {side: build.ask("hello") for side, build in both.items()}
        for side, source in (("old", options.old), ("new", options.new)):
            if pathlib.Path(str(hello[side]["folder"])).parent != source.resolve():
                raise SystemExit(f"ab: {side} took narrowfloat from {hello[side]['folder']}")
        machine = both["new"].ask("machine", commit=options.commit)
        machine["old"] = options.old_commit
        common = [name for name in hello["old"]["recipes"] if name in hello["new"]["recipes"]]
        recipes = [name for name in common if name in (options.recipes or common)]
        if options.processes > 1:
            for recipe, found in fresh_processes(options, recipes).items():
                rows.append(row("host", {"recipe": recipe}, found) | {"fresh_processes": True})
                print(json.dumps(rows[-1]), flush=True)
            write(options.out, machine, rows)
            return 0
        for what in options.what:
            for which in work(what, recipes, options.device == "cuda"):
                name = " ".join(map(str, (what, *which.values())))
                if time.monotonic() - began > options.seconds:
                    print(f"not begun, the time is over: {name}", flush=True)
                    failed += 1
                    continue
                try:
                    rows.append(row(what, which, pairs_of(both, what, which, options.pairs)))
                except ValueError as error:  # costs this row alone
                    print(f"FAILED {name}\n{error}", file=sys.stderr, flush=True)
                    failed += 1
                    continue
                made, unit = rows[-1], "bytes" if what == "memory" else "us"
                over = f", over bf16 {made['new_over_bf16']:.3f}" if what == "host" else ""
                sizes = f"{made[f'old_{unit}']:g} -> {made[f'new_{unit}']:g} {unit}"
                spread = f" +- {made['spread']:.4f}" if "spread" in made else ""
                print(f"{name}: {made['ratio']:.4f}{spread}, {sizes}{over}", flush=True)
                write(options.out, machine, rows)
    print(f"{len(rows)} rows, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
