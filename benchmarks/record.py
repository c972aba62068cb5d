"""What a result is: the rows and their fields, the file they lie in, and the tables."""

from __future__ import annotations

import datetime
import json
import math
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results: written by bench.py table -->", "<!-- end of results -->"
NOTHING = "No results committed yet."

Row = dict[str, Any]

# What tells one row of a bench from another, and what is measured.
KEYS = {
    "linear": ("recipe", "mode", "weights", "tokens", "in", "out", "bias"),
    "gemm": ("recipe", "tokens", "in", "out"),
    "quantize": ("kernel", "rows", "cols"),
    "host": ("recipe",),
    "memory": ("recipe",),
    "model": ("recipe", "width", "blocks", "tokens"),
    "train": ("recipe", "params", "steps", "seeds"),
    "fork": ("recipe", "params", "first", "last", "seed"),
    "decode": ("recipe", "tokens", "in", "out"),
    "accumulation": ("accumulate", "terms"),
    "tune": ("recipe", "product", "tokens", "in", "out"),
    "step": ("model", "mode", "recipe", "fused"),
}
VALUES = {
    "linear": ("ms", "bf16_ms", "ratio", "limit_ms", "of_limit"),
    "gemm": ("ms", "bf16_ms", "ratio"),
    "quantize": ("gbps", "copy_gbps", "ratio"),
    "host": ("us_per_layer", "bf16_us_per_layer", "ratio"),
    "memory": ("bytes", "bf16_bytes", "ratio"),
    "model": ("ratio",),
    "train": ("loss", "bf16_loss", "gap_percent", "gap_error_percent"),
    "fork": ("loss", "bf16_loss", "gap_percent", "train_gap_percent", "weights_gap_percent"),
    "decode": ("ratio",),
    "accumulation": ("sum",),
    "tune": ("first_us", "us", "ratio", "offered", "tried", "right"),
    "step": ("ms", "ratio", "ratio_same_mode", "held_ratio", "peak_ratio"),
}
EXTRA = {"train", "decode", "step"}  # benches whose rows may carry more
LESS_IS_BETTER = {"host", "memory"}  # benches, and fields of others
LESS_OF = {"held_ratio", "peak_ratio"}
MACHINE = ("gpu", "driver", "torch", "cublaslt", "commit", "date")
NOISE = 0.02  # of a bar


def row(bench: str, **fields: Any) -> Row:
    """A row with exactly the fields of its bench, numbers to five digits; ValueError otherwise."""
    wanted = (*KEYS[bench], *VALUES[bench])
    missing = [name for name in wanted if name not in fields]
    strange = [name for name in fields if name not in wanted and bench not in EXTRA]
    if missing or strange:
        raise ValueError(
            f"row: expected the fields {', '.join(wanted)} for {bench}, got {missing} missing "
            f"and {strange} unknown"
        )
    ordered = {name: fields[name] for name in (*wanted, *(n for n in fields if n not in wanted))}
    for name, value in ordered.items():
        if isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError(f"row: expected a finite {name}, got {value} in {fields}")
            ordered[name] = float(f"{value:.5g}")
    return {"bench": bench, **ordered}


def key(r: Mapping[str, Any]) -> tuple[Any, ...]:
    return (r["bench"], *(r.get(name) for name in KEYS[r["bench"]]))


# The machine


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit(stated: str | None = None) -> str:
    """`stated`, for a copy of the tree whose git is absent or older than its files; else HEAD, with
    '-dirty' where tracked files other than results differ."""
    if stated:
        return stated
    head = _output("git", "rev-parse", "--verify", "HEAD")
    if not head:
        return "unknown"
    changed = _output(
        "git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"
    )
    return f"{head}-dirty" if changed else head


def cublaslt_version(number: int | None) -> str | None:
    """130100 -> '13.1.0' (the library counts major x 10000 + minor x 100 + patch)."""
    if number is None:
        return None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def gpu_slug(name: str) -> str:
    """'NVIDIA H200' -> 'h200': the folder of its results."""
    words = [w for w in re.split(r"[^a-z0-9]+", name.lower()) if w and w != "nvidia"]
    return "-".join(words) or "unknown"


def machine(device: torch.device, stated_commit: str | None = None) -> dict[str, Any]:
    gpu = driver = None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = driver.splitlines()[0] if driver else None
    try:
        from narrowfloat import _binary

        number = _binary.module.cublaslt_version() if _binary.module is not None else None
    except ImportError:
        number = None
    now = datetime.datetime.now(datetime.timezone.utc)
    values = (
        gpu or "CPU",
        driver,
        torch.__version__,
        cublaslt_version(number),
        commit(stated_commit),
        now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    return dict(zip(MACHINE, values, strict=True))


# The file


class Results:
    """The rows of one run; the file is rewritten at each add(), so that a killed run keeps them.

    A file that is there already is carried on with, if it comes from the same GPU, driver, torch,
    cuBLASLt and commit: a row measured again takes the place of the old one. ValueError otherwise.
    """

    def __init__(self, path: pathlib.Path | None, facts: Mapping[str, Any]) -> None:
        self.path, self.machine = path, dict(facts)
        self.rows: dict[tuple[Any, ...], Row] = {}
        if path is not None and path.exists():
            old = json.loads(path.read_text())
            for name in MACHINE:
                if name != "date" and old["machine"].get(name) != self.machine[name]:
                    raise ValueError(
                        f"bench: expected {path} to come from {name} {self.machine[name]}, got "
                        f"{old['machine'].get(name)} (name another --out file)"
                    )
            self.rows = {key(r): r for r in old["rows"]}

    def line(self, r: Row) -> str:
        return line(r, gpu_slug(self.machine["gpu"]))

    def add(self, *rows: Row) -> None:
        for r in rows:
            self.rows[key(r)] = r
            print(self.line(r), flush=True)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".tmp")
        content = {"machine": self.machine, "rows": list(self.rows.values())}
        beside.write_text(to_json(content))
        beside.replace(self.path)


def to_json(content: Mapping[str, Any]) -> str:
    """One line a row: readable, and a diff shows which rows changed."""
    rows = ",\n  ".join(json.dumps(r, allow_nan=False) for r in content["rows"])
    return (
        f'{{"machine": {json.dumps(content["machine"])},\n "rows": [\n  {rows}\n ]}}\n'
        if rows
        else f'{{"machine": {json.dumps(content["machine"])},\n "rows": []}}\n'
    )


# Bars: what the package must reach on an H200, as fields of a row, the field measured, its bar

BARRED_GPU = "h200"


def _shape(sizes: Sequence[int]) -> dict[str, int]:
    return dict(zip(("tokens", "in", "out"), sizes, strict=True))


def _linear_bars() -> list[tuple[dict[str, Any], str, float]]:
    shapes = (
        ((4096, 4096, 4096), 1.43, 1.55),
        ((8192, 4096, 14336), 1.63, 1.69),
        ((16384, 4096, 4096), 1.59, 1.61),
        ((16384, 8192, 8192), 1.72, 1.76),
        ((16384, 8192, 28672), 1.75, 1.80),
    )
    bars: list[tuple[dict[str, Any], str, float]] = []
    fp8 = {"bench": "linear", "recipe": "fp8"}
    for shape, fresh, reused in shapes:
        where = {**fp8, "mode": "eager", **_shape(shape)}
        bars.append(({**where, "weights": "requantized"}, "ratio", fresh))
        bars.append(({**where, "weights": "reused"}, "ratio", reused))
        if shape != (4096, 4096, 4096):
            bars.append((where, "of_limit", 0.96))
    for shape, fresh in (((1024, 1024, 1024), 0.70), ((4096, 1024, 1024), 0.85)):
        where = {**fp8, "mode": "graph", **_shape(shape)}
        bars.append(({**where, "weights": "requantized"}, "ratio", fresh))
    for shape, ratio in zip((s for s, _, _ in shapes[1:]), (0.95, 0.93, 0.97, 0.97), strict=True):
        where = {"bench": "linear", "recipe": "nvfp4", "mode": "eager", **_shape(shape)}
        bars.append((where, "ratio", ratio))
    for recipe, ratio in (("fp8_delayed", 1.76), ("fp8_row", 1.57), ("fp8_block", 1.5)):
        where = {"bench": "linear", "recipe": recipe, "mode": "eager", "weights": "requantized"}
        bars.append(({**where, **_shape((16384, 8192, 8192))}, "ratio", ratio))
        bars.append(({**where, **_shape((16384, 8192, 8192))}, "of_limit", 0.95))
    return bars


def _decode_bars() -> list[tuple[dict[str, Any], str, float]]:
    where = {"bench": "decode", "recipe": "nvfp4"}
    wanted = (
        ((1, 8192, 28672), 2.8),
        ((16, 8192, 28672), 2.3),
        ((1, 4096, 4096), 1.4),
        ((16, 4096, 4096), 1.15),
        ((4096, 4096, 4096), 0.9),
    )
    bars = [({**where, **_shape(shape)}, "ratio", ratio) for shape, ratio in wanted]
    few = ({**where, "tokens": tokens} for tokens in (2, 4, 8))
    bars += [(few_tokens, "ratio", 1.0) for few_tokens in few]
    return [*bars, (where, "ratio", 0.85)]  # the first that fits counts


def _quantize_bars() -> list[tuple[dict[str, Any], str, float]]:
    where = {"bench": "quantize", "rows": 16384, "cols": 8192}
    sides = ("rows+columns e4m3", "rows e4m3", "columns e4m3", "rows+columns e5m2")
    bars = [({**where, "kernel": kernel}, "ratio", 0.88) for kernel in sides]
    nvfp4 = {
        "nvfp4 rows": 0.90,
        "nvfp4 rows+rotated columns": 0.75,
        "nvfp4 rows+rotated stochastic columns": 0.60,
        "nvfp4 stochastic rows+rotated stochastic columns": 0.50,
    }
    return bars + [({**where, "kernel": k}, "ratio", ratio) for k, ratio in nvfp4.items()]


def _step_bars() -> list[tuple[dict[str, Any], str, float]]:
    wanted = {
        "eager": {"gpt2-124M": 1.08, "llama-1B": 1.33, "llama-8B": 1.47, "llama-70B": 1.60},
        "compiled": {"gpt2-124M": 1.12, "llama-1B": 1.31, "llama-8B": 1.46, "llama-70B": 1.62},
    }
    fp8 = {"bench": "step", "recipe": "fp8"}
    bars: list[tuple[dict[str, Any], str, float]] = [
        ({**fp8, "mode": mode, "model": model}, "ratio", ratio)
        for mode, of_mode in wanted.items()
        for model, ratio in of_mode.items()
    ]
    in_eager = {**fp8, "mode": "eager", "model": "llama-8B"}
    bars += [(in_eager, "held_ratio", 0.75), (in_eager, "peak_ratio", 0.85)]
    return [*bars, (fp8, "peak_ratio", 1.0)]


BARS = [
    *_linear_bars(),
    *_step_bars(),
    ({"bench": "host", "recipe": "fp8"}, "ratio", 1.15),
    ({"bench": "memory", "recipe": "fp8"}, "ratio", 0.53),
    ({"bench": "memory", "recipe": "nvfp4"}, "ratio", 0.31),
    *_quantize_bars(),
    *_decode_bars(),
]


def bar(r: Mapping[str, Any], field: str, gpu: str) -> float | None:
    """The bar of a row's field; None where there is none."""
    if gpu != BARRED_GPU:
        return None
    for where, name, value in BARS:
        if name == field and all(r.get(k) == v for k, v in where.items()):
            return value
    return None


def verdict(r: Mapping[str, Any], field: str, gpu: str) -> str:
    """The bar and 'met', 'near' (short by no more than noise) or 'missed'; '' without a bar."""
    wanted, value = bar(r, field, gpu), r.get(field)
    if wanted is None or value is None:
        return ""
    sign = -1 if r["bench"] in LESS_IS_BETTER or field in LESS_OF else 1
    short = sign * (wanted - value) / wanted
    word = "met" if short <= 0 else "near" if short <= NOISE else "missed"
    return f"{wanted:g} {word}"


# Tables


def _number(value: Any, name: str = "") -> str:
    if isinstance(value, float) and name.endswith("loss"):
        return f"{value:.4f}"
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        size = abs(value)
        digits = 0 if size >= 1000 else 1 if size >= 10 else 3 if size >= 0.1 else 4
        return f"{value:.{digits}f}"
    return str(value)


def _verdicts(r: Mapping[str, Any], gpu: str) -> str:
    marks = ((name, verdict(r, name, gpu)) for name in VALUES[r["bench"]])
    return "; ".join(f"{name.replace('_', ' ')} {mark}" for name, mark in marks if mark)


def line(r: Mapping[str, Any], gpu: str = "") -> str:
    """A row as one line of a terminal, with its bars where that GPU has some."""
    fields = ", ".join(
        f"{name} {_number(r[name])}" for name in VALUES[r["bench"]] if r.get(name) is not None
    )
    bars = _verdicts(r, gpu)
    marks = f"  [{bars}]" if bars else ""
    named = {name: _number(r.get(name)) for name in KEYS[r["bench"]]}
    if "tokens" in named and "in" in named:
        named["tokens"] = " x ".join((named["tokens"], named.pop("in"), named.pop("out")))
    if "bias" in named:
        named["bias"] = "bias" if r["bias"] else "no bias"
    return f"{r['bench']:9}{' '.join(named.values())}: {fields}{marks}"


def read(folder: pathlib.Path = RESULTS) -> list[tuple[str, dict[str, Any]]]:
    """(folder's name, file's content) for every result below `folder`, oldest first."""
    found = []
    for path in sorted(folder.glob("*/*.json")):
        content = json.loads(path.read_text())
        if "machine" in content and "rows" in content:
            found.append((path.parent.name, content))
    return sorted(found, key=lambda item: item[1]["machine"].get("date") or "")


def _order(r: Mapping[str, Any]) -> tuple[Any, ...]:
    """Sizes lead, so that what was measured on one shape stands together."""
    names = KEYS[r["bench"]]
    sizes = [n for n in names if isinstance(r.get(n), int) and not isinstance(r.get(n), bool)]
    return (*(r[n] for n in sizes), *(str(r.get(n)) for n in names if n not in sizes))


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    out = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    out += [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join(out)


# What a table for users leaves out: rows that only those who work on the package look for.
BRIEF: dict[str, Callable[[Row], bool]] = {
    "linear": lambda r: (r["mode"], r["weights"], r["bias"]) == ("eager", "requantized", False),
    "host": lambda r: True,
    "memory": lambda r: True,
    "decode": lambda r: r["tokens"] in (1, 4, 16, 64, 256, 1024, 4096),
}


def _most_seeds(rows: Iterable[Row]) -> list[Row]:
    """Of one experiment the row with the most seeds; rows of other benches all."""
    most: dict[tuple[Any, ...], Row] = {}
    for r in rows:
        which = key({**r, "seeds": None})
        if which not in most or r.get("seeds", 0) > most[which]["seeds"]:
            most[which] = r
    return list(most.values())


def _origins(machines: Iterable[Mapping[str, Any]]) -> str:
    """The commits, by what they ran with."""
    commits: dict[str, dict[str, None]] = {}
    for m in machines:
        name, date = str(m.get("commit")), str(m.get("date"))[:10]
        dirty = "-dirty" if name.endswith("-dirty") else ""
        where = f"torch {m.get('torch')}, driver {m.get('driver')}, cuBLASLt {m.get('cublaslt')}"
        commits.setdefault(f"on {date} ({where})", {})[f"{name[:10]}{dirty}"] = None
    return "; ".join(f"{', '.join(names)} {where}" for where, names in commits.items())


def tables(found: Sequence[tuple[str, dict[str, Any]]], brief: bool = False) -> str:
    """Markdown: for each GPU and bench the newest of each row, and the commits they come from."""
    if not found:
        return NOTHING
    parts: list[str] = []
    for gpu in sorted({name for name, _ in found}):
        newest: dict[tuple[Any, ...], tuple[Row, Mapping[str, Any]]] = {}
        for name, content in found:
            for r in content["rows"] if name == gpu else ():
                if r["bench"] not in KEYS:  # "ab" compares two builds: no table of its own
                    continue
                if not brief or BRIEF.get(r["bench"], lambda _: False)(r):
                    newest[key(r)] = r, content["machine"]
        if not newest:
            continue
        machines = [machine for _, machine in newest.values()]
        parts.append(f"### {machines[0].get('gpu')}\n\nFrom commits {_origins(machines)}.")
        for bench in KEYS:
            rows = _most_seeds(r for r, _ in newest.values() if r["bench"] == bench)
            if not rows:
                continue
            rows.sort(key=_order)
            columns = [*KEYS[bench], *VALUES[bench]]
            barred = any(_verdicts(r, gpu) for r in rows)
            head = [c.replace("_", " ") for c in columns] + (["bar"] if barred else [])
            body = []
            for r in rows:
                cells = [_number(r.get(c), c) for c in columns]
                body.append([*cells, _verdicts(r, gpu)] if barred else cells)
            parts.append(f"**{bench}**\n\n{_table(head, body)}")
    return "\n\n".join(parts) if parts else NOTHING


def into(text: str, markdown: str) -> str:
    """`text` with what lies between its two markers replaced; ValueError where they are missing."""
    start, end = text.find(BEGIN), text.find(END)
    if start < 0 or end < start:
        raise ValueError(f"table: expected the markers {BEGIN} and {END}, got a text without them")
    return f"{text[: start + len(BEGIN)]}\n\n{markdown}\n\n{text[end:]}"
