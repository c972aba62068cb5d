"""What the demo trains, on what, and how a recipe's loss is compared with the baseline's.

A byte-level GPT learns the source files of the standard library and of torch, once as plain
PyTorch and once per narrowfloat recipe, from the same initial weights and on the same batches.

    python examples/train_gpt.py                      # the machine decides the size
    python examples/train_gpt.py --seeds 0,1          # paired gaps with their error
    python examples/train_gpt.py --recipes fp8,nvfp4,mxfp4
    python examples/train_gpt.py --baseline old.json  # reuse the baseline runs of an earlier file
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import hashlib
import importlib.util
import itertools
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import narrowfloat

HELD_OUT = 20  # one file in 20 is held out: 5 %
READ_EVERY = 20  # steps between reads of the loss: each read waits for the device
UNTIMED = 10  # first steps, in which kernels load and cuBLASLt plans are made


@dataclasses.dataclass(frozen=True)
class Size:
    """One fixed experiment: two files compare only where all of this is the same."""

    layers: int
    width: int
    heads: int
    context: int  # bytes
    batch: int  # sequences a step
    steps: int
    rate: float
    warmup: int  # steps
    eval_batches: int  # at the end
    interim_batches: int  # at each interim evaluation
    interim_every: int  # steps, a multiple of READ_EVERY
    baseline: str  # what the unconverted model runs in: bf16 (autocast) or fp32


SIZES = {
    "full": Size(12, 768, 12, 1024, 32, 2000, 6e-4, 100, 64, 8, 200, "bf16"),
    # fp32: a CPU without bf16 instructions takes many times as long under autocast
    "cpu": Size(3, 192, 6, 128, 16, 300, 2e-3, 20, 32, 8, 60, "fp32"),
}


# The text


@dataclasses.dataclass(frozen=True)
class Text:
    train: Tensor  # [bytes] uint8
    held_out: Tensor  # [bytes] uint8
    files: int
    held_out_files: int
    fingerprint: str  # of both parts, in order

    def facts(self) -> dict[str, Any]:
        return {
            "train_bytes": self.train.numel(),
            "held_out_bytes": self.held_out.numel(),
            "files": self.files,
            "held_out_files": self.held_out_files,
            "fingerprint": self.fingerprint,
        }


def roots() -> dict[str, pathlib.Path]:
    """Prefix of a file's name -> folder that is searched."""
    return {
        "stdlib": pathlib.Path(sysconfig.get_paths()["stdlib"]),
        "torch": pathlib.Path(torch.__file__).parent,
    }


def source_files(folders: dict[str, pathlib.Path]) -> dict[str, pathlib.Path]:
    """Name such as `stdlib/json/decoder.py` -> path, sorted by name, for every .py and .h."""
    found = {}
    for prefix, root in folders.items():
        for folder, inner, names in os.walk(root):
            # what pip installed is another text on each machine
            inner[:] = [d for d in inner if d not in ("site-packages", "dist-packages")]
            for name in names:
                path = pathlib.Path(folder, name)
                if path.suffix in (".py", ".h") and path.is_file():
                    found[f"{prefix}/{path.relative_to(root).as_posix()}"] = path
    return dict(sorted(found.items()))


def is_held_out(name: str) -> bool:
    """By a hash of the name alone, so that a file is on the same side on each machine."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT == 0


def load_text(folders: dict[str, pathlib.Path]) -> Text:
    files = source_files(folders)
    parts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    for name, path in files.items():
        parts[is_held_out(name)] += path.read_bytes() + b"\0"
    if not (parts[False] and parts[True]):
        raise SystemExit(f"train_gpt: expected source files, got {len(files)} in {folders}")
    digest = hashlib.sha256(parts[False])
    digest.update(parts[True])
    train, held_out = (torch.frombuffer(parts[side], dtype=torch.uint8) for side in (False, True))
    count = sum(map(is_held_out, files))
    return Text(train, held_out, len(files), count, digest.hexdigest()[:16])


def training_starts(length: int, size: Size, seed: int) -> Tensor:
    """Where each step's sequences start, [steps, batch]: passes over disjoint, shuffled windows.

    All of them at once and from the CPU's generator: they are the same on each device, and a
    step needs no copy from the host.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = size.steps * size.batch
    windows = (length - 1) // size.context - 1  # one less: each pass is shifted by part of a window
    if windows < 1:
        raise SystemExit(f"train_gpt: expected over {2 * size.context} bytes, got {length}")
    passes = []
    for _ in range(-(-needed // windows)):
        shift = torch.randint(size.context, (), generator=generator)
        passes.append(torch.randperm(windows, generator=generator) * size.context + shift)
    return torch.cat(passes)[:needed].view(size.steps, size.batch)


def evaluation_starts(length: int, size: Size, batches: int) -> Tensor:
    """The fixed held-out windows, [batches, batch], spread evenly over the text."""
    last = length - size.context - 1
    if last < 0:
        raise SystemExit(f"train_gpt: expected over {size.context} held-out bytes, got {length}")
    count = batches * size.batch
    return torch.linspace(0, last, count, dtype=torch.float64).long().view(batches, size.batch)


def gather(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """text [bytes], starts [batch] -> (inputs, targets), each [batch, context] int64."""
    index = starts[:, None] + torch.arange(context + 1, device=text.device)
    tokens = text[index].long()
    return tokens[:, :-1], tokens[:, 1:]


# The model


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, width / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        # GPT-2's: what adds to the residual stream starts smaller, by the number of additions
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * size.layers) if adds else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # [batch, context, 256]


def build(size: Size, seed: int, recipe: str, device: torch.device) -> GPT:
    """The same weights for each recipe: drawn on the CPU before anything is converted."""
    torch.manual_seed(seed)
    model = GPT(size).to(device)
    if recipe != size.baseline:
        narrowfloat.convert(model, recipe)
    return model


# One run


def precision(size: Size, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """fp32 weights; what is not quantized computes in the baseline's type."""
    if size.baseline == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, size: Size) -> Tensor:
    with precision(size, tokens.device):
        logits = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, starts: Tensor, size: Size) -> float:
    losses = [loss_of(model, *gather(text, s, size.context), size) for s in starts]
    return torch.stack(losses).double().mean().item()


def learning_rate(step: int, size: Size) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = max(1, min(size.warmup, size.steps // 4))
    if step < warmup:
        return size.rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, size.steps - warmup)
    return size.rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_for(model: nn.Module, size: Size, device: torch.device) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = True if device.type == "cuda" else None
    return torch.optim.AdamW(groups, lr=size.rate, betas=(0.9, 0.95), fused=fused)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    starts: Tensor,
    step: int,
    size: Size,
) -> Tensor:
    """The loss of one step's batch, which lies on the device still."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, size)
    loss = loss_of(model, *gather(text, starts, size.context), size)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


class Stopwatch:
    """Seconds spent in timed parts; the device's queue is empty at both ends of each."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self._start = device, 0.0, 0.0

    def start(self) -> None:
        self._start = self._now()

    def stop(self) -> None:
        self.seconds += self._now() - self._start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def train(text: Text, size: Size, seed: int, recipe: str, device: torch.device) -> dict[str, Any]:
    """One model from start to end; returns an entry of the file's `runs`."""
    began = time.perf_counter()
    on_gpu = device.type == "cuda"
    if on_gpu:
        gc.collect()  # the model of the run before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    model = build(size, seed, recipe, device)
    optimizer = optimizer_for(model, size, device)
    starts = training_starts(text.train.numel(), size, seed).to(device)
    held_out = text.held_out
    interim = evaluation_starts(held_out.numel(), size, size.interim_batches).to(device)
    final = evaluation_starts(held_out.numel(), size, size.eval_batches).to(device)

    losses = torch.zeros(size.steps, device=device)  # kept there until somebody reads them
    loss_curve: list[list[float]] = []
    val_curve: list[list[float]] = []
    watch, untimed = Stopwatch(device), min(UNTIMED, size.steps // 2)
    speed, read = 0.0, 0
    with tqdm(total=size.steps, desc=f"{recipe}, seed {seed}", unit="step") as bar:
        watch.start()
        for step in range(size.steps):
            if step == untimed:
                watch = Stopwatch(device)
                watch.start()
            losses[step] = train_step(model, optimizer, text.train, starts[step], step, size)

            done = step + 1
            if done % READ_EVERY and done != size.steps:
                continue
            mean = losses[read:done].mean().item()
            loss_curve.append([done, mean])
            watch.stop()
            if done > untimed:
                speed = (done - untimed) * size.batch * size.context / watch.seconds
            bar.update(done - read)
            bar.set_postfix({"loss": f"{mean:.4f}", "tokens/s": f"{speed:,.0f}"})
            read = done
            if not math.isfinite(mean):
                break  # it will not come back
            if done % size.interim_every == 0 and done != size.steps:
                val_curve.append([done, evaluate(model, held_out, interim, size)])
            watch.start()
    val_loss = evaluate(model, held_out, final, size)
    # the curve's last point on the interim windows too, else it would compare two texts
    val_curve.append([read, evaluate(model, held_out, interim, size)])
    return {
        "recipe": recipe,
        "seed": seed,
        "loss_curve": loss_curve,
        "val_curve": val_curve,
        "val_loss": val_loss,
        "tokens_per_s": speed,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "seconds": time.perf_counter() - began,
    }


# The comparison


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [v for v in values if v is not None and math.isfinite(v)]
    return statistics.fmean(numbers) if len(numbers) == len(values) > 0 else None


def floor_percent(losses: Sequence[float]) -> float | None:
    """How far apart two baselines are that differ in nothing but their seed."""
    if len(losses) < 2 or not all(map(math.isfinite, losses)):
        return None
    apart = [abs(a - b) for a, b in itertools.combinations(losses, 2)]
    return 100 * statistics.fmean(apart) / statistics.fmean(losses)


def rows_of(runs: Sequence[dict[str, Any]], size: Size, params: int) -> list[dict[str, Any]]:
    """One row a recipe, the baseline first; a gap takes only the seeds that both have."""
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        loss = run["val_loss"]
        losses.setdefault(run["recipe"], {})[run["seed"]] = math.nan if loss is None else loss
    base = losses.get(size.baseline, {})
    floor = floor_percent(list(base.values()))
    rows = []
    for recipe in sorted(losses, key=lambda name: name != size.baseline):
        own = losses[recipe]
        seeds = [s for s in own if s in base] or list(own)
        gaps = [100 * (own[s] - base[s]) / base[s] for s in seeds if s in base]
        gap, compared = _mean(gaps), recipe != size.baseline
        error = None
        if gap is not None and len(gaps) > 1:
            error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        base_loss = _mean([base[s] for s in seeds if s in base])
        rows.append(
            {
                "bench": "train",
                "recipe": recipe,
                "params": params,
                "steps": size.steps,
                "seeds": len(seeds),
                "loss": _mean([own[s] for s in seeds]),
                "baseline": size.baseline,
                "baseline_loss": base_loss,
                "bf16_loss": base_loss if size.baseline == "bf16" else None,
                "gap_percent": gap if compared else None,
                "gap_error_percent": error if compared else None,
                "floor_percent": floor,
            }
        )
    return rows


def table(runs: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], size: Size) -> str:
    head = ["", "validation loss", f"gap to {size.baseline}", "tokens/s", "peak memory"]
    lines = [head]
    for row in rows:
        own = [run for run in runs if run["recipe"] == row["recipe"]]
        gap = "" if row["gap_percent"] is None else f"{row['gap_percent']:+.2f} %"
        if row["gap_error_percent"] is not None:
            gap += f" ± {row['gap_error_percent']:.2f}"
        loss = "diverged" if row["loss"] is None else f"{row['loss']:.4f}"
        peaks = [run["peak_bytes"] for run in own if run["peak_bytes"] is not None]
        peak = f"{max(peaks) / 2**30:.2f} GiB" if peaks else "n/a"
        speed = _mean([run["tokens_per_s"] for run in own])
        lines.append([row["recipe"], loss, gap, f"{speed or 0:,.0f}", peak])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    text.insert(1, "-" * len(text[0]))
    floor = rows[0]["floor_percent"] if rows else None
    if floor is not None:
        text.append(f"two seeds of {size.baseline} lie {floor:.2f} % apart")
    return "\n".join(text)


def plot(runs: Sequence[dict[str, Any]], size: Size, title: str, path: pathlib.Path) -> None:
    """Left the loss on the training text, right the held-out gap to the baseline of that seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    base = {run["seed"]: dict(run["val_curve"]) for run in runs if run["recipe"] == size.baseline}
    colors: dict[str, str] = {size.baseline: "0.35"}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for run in runs:
        name = run["recipe"]
        first = name not in [line.get_label() for line in left.get_lines()]
        color = colors.setdefault(name, f"C{len(colors) - 1}")
        style = {"color": color, "lw": 1.2, "label": name if first else None}
        steps, losses = zip(*run["loss_curve"], strict=True)
        left.plot(steps, [math.nan if v is None else v for v in losses], **style)
        theirs = base.get(run["seed"], {})
        both = [(step, loss) for step, loss in run["val_curve"] if loss and theirs.get(step)]
        if name != size.baseline and both:
            gaps = [100 * (loss / theirs[step] - 1) for step, loss in both]
            right.plot([step for step, _ in both], gaps, marker="o", ms=3, **style)
    left.set(xlabel="step", ylabel="training loss (nats a byte)", yscale="log", title=title)
    for write in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
        write("{x:g}")  # not powers of ten
    right.axhline(0, color=colors[size.baseline], lw=1)
    right.set(xlabel="step", ylabel="%", title=f"held-out loss, gap to {size.baseline}")
    for axes in (left, right):
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


# The file


def _output(*command: str) -> str | None:
    """What a command prints, None where it is not there or refuses."""
    try:
        done = subprocess.run(
            command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def machine(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    driver = None
    if gpu:
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        from narrowfloat import _binary

        number = _binary.module.cublaslt_version() if _binary.module else None
        # major x 10000 + minor x 100 + patch, said as benchmarks/record.py says it
        cublaslt = number and f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    except Exception:  # the training matters more than a version
        cublaslt = None
    if commit is None:
        commit = _output("git", "rev-parse", "--short=12", "HEAD")
        if commit and _output("git", "status", "--porcelain"):
            commit += "+changes"
    return {
        "gpu": gpu,
        "driver": driver.splitlines()[0] if driver else None,
        "torch": torch.__version__,
        "cublaslt": cublaslt,
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN: a loss that diverged is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """In one move: a command killed meanwhile leaves the file before."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(_finite(content), allow_nan=False, indent=1) + "\n")
    beside.replace(path)


def read_baseline(
    path: pathlib.Path, config: dict[str, Any], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """The baseline runs of an earlier file, refused unless all that decides a loss is the same."""
    try:
        content = json.loads(path.read_text())
        theirs, runs = content["config"], content["runs"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise SystemExit(
            f"train_gpt: expected {path} to be a file of this script, got {problem!r}"
        ) from None
    for key in sorted(config.keys() | theirs.keys()):
        if config.get(key) != theirs.get(key):
            raise SystemExit(
                f"train_gpt: expected a baseline with {key} = {config.get(key)}, "
                f"got {theirs.get(key)} in {path} (run without --baseline)"
            )
    kept = [r for r in runs if r["recipe"] == config["baseline"] and r["seed"] in seeds]
    missing = sorted(set(seeds) - {r["seed"] for r in kept})
    if missing:
        raise SystemExit(
            f"train_gpt: expected a {config['baseline']} run of each seed, "
            f"got none of {missing} in {path} (run without --baseline, or leave the seeds out)"
        )
    return [{**run, "from": path.name} for run in kept]


# The command


def _split(values: Sequence[str]) -> list[str]:
    return [v for value in values for v in re.split(r"[\s,]+", value) if v]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT as plain PyTorch and in narrowfloat's recipes."
    )
    add = parser.add_argument
    names = ", ".join(narrowfloat.RECIPES)
    add("--recipes", nargs="*", default=["fp8"], help=f"of {names} (default: fp8)")
    add("--seeds", nargs="+", default=["0"], help="numbers, by comma or space (default: 0)")
    add("--steps", type=int, help="default: the size's own")
    add("--size", choices=["auto", *SIZES], default="auto", help="auto: full with a GPU, else cpu")
    add("--device", help="default: cuda where there is one, else cpu")
    add("--out", type=pathlib.Path, default=pathlib.Path("demo_out"), help="default: demo_out")
    add("--eval-batches", type=int, help="batches of the last evaluation")
    add("--no-baseline", action="store_true", help="train the recipes alone")
    add("--baseline", type=pathlib.Path, metavar="FILE.json", help="reuse its baseline runs")
    add("--commit", help="for the JSON, where the tree comes without git")
    found = parser.parse_args(argv)
    found.recipes = list(dict.fromkeys(_split(found.recipes)))
    try:
        found.seeds = list(dict.fromkeys(int(seed) for seed in _split(found.seeds)))
    except ValueError:
        parser.error(f"--seeds: expected whole numbers, got {found.seeds}")
    for option in ("steps", "eval_batches"):
        value = getattr(found, option)
        if value is not None and value < 1:
            parser.error(f"--{option.replace('_', '-')}: expected at least 1, got {value}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = args.size if args.size != "auto" else ("full" if device.type == "cuda" else "cpu")
    changed = {"steps": args.steps, "eval_batches": args.eval_batches}
    size = dataclasses.replace(SIZES[name], **{k: v for k, v in changed.items() if v is not None})
    for recipe in args.recipes:  # before an hour is spent on the others
        support = narrowfloat.supported(recipe, device)
        if not support:
            raise SystemExit(f"train_gpt: {recipe} cannot run on {device}: {support.reason}")

    can_plot = importlib.util.find_spec("matplotlib") is not None
    if not can_plot:
        print("no plot of the loss curves: matplotlib is not installed", file=sys.stderr)

    text = load_text(roots())
    config = {"size": name, "device": device.type, **dataclasses.asdict(size), "data": text.facts()}
    runs: list[dict[str, Any]] = []
    if args.baseline:
        runs = read_baseline(args.baseline, config, args.seeds)
    plain = [] if args.baseline or args.no_baseline else [size.baseline]
    text = dataclasses.replace(text, train=text.train.to(device), held_out=text.held_out.to(device))

    args.out.mkdir(parents=True, exist_ok=True)
    picture, file = args.out / f"train_{name}.png", args.out / f"train_{name}.json"
    params = sum(p.numel() for p in GPT(size).parameters())
    facts = {"machine": machine(device, args.commit), "config": config}
    title = f"{params / 1e6:.1f} M parameters, {size.context} bytes x {size.batch} a step"
    print(
        f"{facts['machine']['gpu'] or 'CPU'}, torch {torch.__version__}: "
        f"{title}, {size.steps} steps\n"
        f"{text.files} files, {text.train.numel() / 1e6:.1f} MB to train on, "
        f"{text.held_out.numel() / 1e6:.1f} MB held out ({text.held_out_files} files)",
        flush=True,
    )
    for seed in args.seeds:
        for recipe in plain + args.recipes:
            runs.append(train(text, size, seed, recipe, device))
            rows = rows_of(runs, size, params)
            # after each run: a command that is killed keeps what was finished
            write_json(file, {**facts, "runs": runs, "rows": rows})
            if can_plot:
                plot(runs, size, title, picture)
    if runs:
        print(f"\n{table(runs, rows_of(runs, size, params), size)}\n")
        print(*(path for path in (picture, file) if path.exists()), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
