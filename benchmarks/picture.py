"""How quality and speed are seen together: a recipe's gap in the demo's loss against the
speed of a large layer, both over bf16's, one point a recipe."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import record

LAYER = {"tokens": 16384, "in": 8192, "out": 8192}
CONDITIONS = {"mode": "eager", "weights": "requantized", "bias": False}


class Point(NamedTuple):
    recipe: str
    speed: float  # of the layer, forward + backward, over bf16's
    gap_percent: float  # of the validation loss over bf16's
    error_percent: float | None  # of the mean over seeds; None with one
    seeds: int


def points(found: Sequence[tuple[str, Mapping[str, Any]]], gpu: str) -> list[Point]:
    """The recipes that have both, of the newest rows of a GPU's results (record.read's, oldest
    first)."""
    speed: dict[str, float] = {}
    gap: dict[str, Mapping[str, Any]] = {}
    for name, content in found:
        for row in content["rows"] if name == gpu else ():
            recipe = row.get("recipe")
            if row["bench"] == "linear" and all(
                row.get(k) == v for k, v in {**LAYER, **CONDITIONS}.items()
            ):
                speed[recipe] = row["ratio"]
            if row["bench"] == "train" and row.get("gap_percent") is not None:
                gap[recipe] = row
    return [
        Point(r, speed[r], gap[r]["gap_percent"], gap[r].get("gap_error_percent"), gap[r]["seeds"])
        for r in sorted(speed.keys() & gap.keys())
    ]


def draw(shown: Sequence[Point], title: str, path: pathlib.Path) -> None:
    """As PNG. A hollow point is one seed, which says little."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for i, p in enumerate(sorted(shown, key=lambda p: -p.gap_percent)):
        color = f"C{i % 10}"
        axes.errorbar(
            p.speed,
            p.gap_percent,
            yerr=p.error_percent,
            marker="os^Dv"[i % 5],
            ms=6,
            capsize=3,
            color=color,
            mfc=color if p.seeds > 1 else "white",
            ls="",
            label=p.recipe,
        )
    axes.axhline(0, color="0.35", lw=1)
    axes.axvline(1, color="0.35", lw=1)
    sizes = " x ".join(map(str, LAYER.values()))
    axes.set(
        xlabel=f"speed of a layer {sizes}, forward + backward, over bf16",
        ylabel="validation loss of the demo over bf16's, %",
        title=title,
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write(gpu: str) -> pathlib.Path:
    found = record.read()
    shown = points(found, gpu)
    if not shown:
        raise SystemExit(
            f"picture: expected recipes that were trained and timed, got none on {gpu}"
        )
    title = next(c["machine"]["gpu"] for name, c in reversed(found) if name == gpu)
    path = record.RESULTS / gpu / "gap-and-speed.png"
    draw(shown, title, path)
    return path
