"""What the demo must keep: its split, its batches, its files, and what it refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import pathlib
import random
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

for _needed in ("tqdm", "matplotlib"):
    pytest.importorskip(_needed)

SCRIPT = pathlib.Path(__file__).parents[1] / "examples" / "train_gpt.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


demo = _load()
TINY = demo.Size(
    layers=1,
    width=32,
    heads=2,
    context=16,
    batch=4,
    steps=12,
    rate=1e-3,
    warmup=2,
    eval_batches=2,
    interim_batches=1,
    interim_every=20,
    baseline="fp32",
)
CPU = torch.device("cpu")


@pytest.fixture
def folders(tmp_path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Two roots of 200 small files, with what must not be read beside them."""
    draw = random.Random(0)
    found = {}
    for prefix in ("stdlib", "torch"):
        root = tmp_path / "text" / prefix
        for i in range(100):
            file = root / f"package{i % 7}" / f"module{i}{'.h' if i % 5 == 0 else '.py'}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"value = {draw.random()}\n" * 8)
        (root / "notes.txt").write_text("not a source file")
        (root / "site-packages").mkdir()
        (root / "site-packages" / "installed.py").write_text("not the library's")
        found[prefix] = root
    return found


@pytest.fixture
def tiny(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> pathlib.Path:
    """The demo on the small text with a tiny model; returns its folder for files."""
    monkeypatch.setattr(demo, "roots", lambda: folders)
    monkeypatch.setitem(demo.SIZES, "cpu", TINY)
    return tmp_path / "out"


def _run(out: pathlib.Path, *more: str) -> dict[str, Any]:
    demo.main(["--device", "cpu", "--out", str(out), *more])
    content = json.loads((out / "train_cpu.json").read_text())
    assert isinstance(content, dict)
    return content


# The split


def test_names_are_relative_posix_prefixed_and_of_the_library_alone(
    folders: dict[str, pathlib.Path],
) -> None:
    names = list(demo.source_files(folders))
    assert len(names) == 200 and names == sorted(names)
    assert all(name.split("/")[0] in ("stdlib", "torch") for name in names)
    assert "torch/package0/module0.h" in names
    assert not any("site-packages" in name or name.endswith(".txt") for name in names)


def test_split_depends_on_the_name_alone() -> None:
    # fixed for good: a different side on another machine would be a different experiment
    names = [f"stdlib/module{i}.py" for i in range(100)]
    held_out = [name for name in names if demo.is_held_out(name)]
    expected = (18, 36, 40, 41, 44, 48, 81, 90)
    assert held_out == [f"stdlib/module{i}.py" for i in expected]


def test_split_of_the_real_text_is_disjoint_and_about_5_percent() -> None:
    files = demo.source_files(demo.roots())
    held_out = {name for name in files if demo.is_held_out(name)}
    kept = {name for name in files if not demo.is_held_out(name)}
    assert not held_out & kept and held_out | kept == set(files)
    assert len(files) > 3000
    assert 0.04 < len(held_out) / len(files) < 0.06


def test_text_is_the_same_each_time_and_its_fingerprint_sees_a_change(
    folders: dict[str, pathlib.Path],
) -> None:
    first, second = demo.load_text(folders), demo.load_text(folders)
    assert first.facts() == second.facts()
    assert torch.equal(first.train, second.train) and torch.equal(first.held_out, second.held_out)
    file = next(path for path in folders["torch"].rglob("*.py"))
    file.write_bytes(file.read_bytes()[:-1] + b"#")  # the same length
    assert demo.load_text(folders).fingerprint != first.fingerprint


def test_a_folder_without_source_files_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit, match="expected source files, got 0"):
        demo.load_text({"stdlib": tmp_path})


# The batches


def test_batches_follow_the_seed_alone() -> None:
    one, same = (demo.training_starts(10_000, TINY, 3) for _ in range(2))
    assert torch.equal(one, same) and one.shape == (TINY.steps, TINY.batch)
    assert not torch.equal(one, demo.training_starts(10_000, TINY, 4))
    longer = dataclasses.replace(TINY, steps=2 * TINY.steps)
    assert torch.equal(demo.training_starts(10_000, longer, 3)[: TINY.steps], one)


def test_one_pass_repeats_no_byte_and_stays_in_the_text() -> None:
    length = (TINY.steps * TINY.batch + 2) * TINY.context
    starts = demo.training_starts(length, TINY, 0).flatten()
    assert starts.min() >= 0 and starts.max() + TINY.context + 1 <= length
    assert starts.sort().values.diff().min() >= TINY.context


def test_a_short_text_is_passed_over_again() -> None:
    starts = demo.training_starts(100, TINY, 0)
    assert starts.shape == (TINY.steps, TINY.batch)
    assert starts.min() >= 0 and starts.max() + TINY.context + 1 <= 100
    with pytest.raises(SystemExit, match="bytes, got 20"):
        demo.training_starts(20, TINY, 0)


def test_targets_are_the_next_bytes() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    inputs, targets = demo.gather(text, torch.tensor([0, 7]), 16)
    assert inputs.tolist() == [list(range(16)), list(range(7, 23))]
    assert torch.equal(targets, inputs + 1)


def test_evaluation_windows_are_fixed_and_inside() -> None:
    starts = demo.evaluation_starts(1000, TINY, 5)
    assert torch.equal(starts, demo.evaluation_starts(1000, TINY, 5))
    assert starts.shape == (5, TINY.batch)
    assert starts.min() == 0 and starts.max() + TINY.context + 1 == 1000


# The model and its training


def test_fp4_recipes_leave_the_last_block_too() -> None:
    for recipe in ("nvfp4", "mxfp4", "nvfp4_four_over_six", "nvfp4_unbiased"):
        size = dataclasses.replace(TINY, layers=3)
        model = demo.build(size, 0, recipe, CPU)
        made = [n for n, m in model.named_modules() if isinstance(m, demo.narrowfloat.Linear)]
        assert len(made) == 8 and not any(n.startswith("blocks.2.") for n in made)
        assert all(str(model.get_submodule(n).recipe) == recipe for n in made)
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()


@pytest.mark.parametrize("recipe", ["fp8_row", "fp8_block_bf16_wgrad", "mxfp8"])
def test_rowwise_and_blockwise_recipes_take_every_block(recipe: str) -> None:
    model = demo.build(TINY, 0, recipe, CPU)
    made = [n for n, m in model.named_modules() if isinstance(m, demo.narrowfloat.Linear)]
    assert len(made) == 4 * TINY.layers
    assert all(str(model.get_submodule(n).recipe) == recipe for n in made)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()


def test_a_recipe_starts_from_the_baselines_weights_and_leaves_the_head() -> None:
    base, ours = (demo.build(TINY, 0, recipe, CPU) for recipe in ("fp32", "fp8"))
    theirs = base.state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.state_dict().items())
    assert type(ours.head) is torch.nn.Linear
    assert all(
        type(linear) is not torch.nn.Linear
        for block in ours.blocks
        for linear in (block.qkv, block.out, block.up, block.down)
    )


def test_sizes_are_the_ones_promised() -> None:
    full, small = demo.SIZES["full"], demo.SIZES["cpu"]
    with torch.device("meta"):
        blocks = sum(p.numel() for p in demo.GPT(full).blocks.parameters())
        whole = sum(p.numel() for p in demo.GPT(small).parameters())
    assert (full.context, full.batch, full.steps, full.rate) == (1024, 32, 2000, 6e-4)
    assert 85e6 < blocks < 86e6
    assert 1e6 <= whole <= 2e6
    # it evaluates only where it has read the loss
    assert all(size.interim_every % demo.READ_EVERY == 0 for size in (full, small))


def test_learning_rate_warms_up_and_ends_at_a_tenth() -> None:
    full = demo.SIZES["full"]
    rates = [demo.learning_rate(step, full) for step in range(full.steps)]
    assert rates[0] == pytest.approx(full.rate / 100)
    assert max(rates) == pytest.approx(full.rate) and rates.index(max(rates)) in (99, 100)
    assert rates[-1] == pytest.approx(full.rate / 10, rel=1e-3)


# The command


def test_a_tiny_run_writes_table_plot_and_json(
    tiny: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = _run(tiny, "--recipes", "fp8", "--seeds", "0,1")
    printed = capsys.readouterr().out
    for column in ("validation loss", "gap to fp32", "tokens/s", "peak memory"):
        assert column in printed
    assert "n/a" in printed and "apart" in printed  # no memory to tell; the two seeds' floor
    assert (tiny / "train_cpu.png").read_bytes().startswith(b"\x89PNG")

    assert set(content) == {"machine", "config", "runs", "rows"}
    assert set(content["machine"]) == {"gpu", "driver", "torch", "cublaslt", "commit", "date"}
    assert content["config"]["data"]["files"] == 200
    order = [(run["recipe"], run["seed"]) for run in content["runs"]]
    assert order == [("fp32", 0), ("fp8", 0), ("fp32", 1), ("fp8", 1)]
    for run in content["runs"]:
        assert run["loss_curve"][-1][0] == run["val_curve"][-1][0] == TINY.steps
        losses = [run["val_loss"], *(loss for _, loss in run["loss_curve"] + run["val_curve"])]
        assert all(math.isfinite(loss) and 0 < loss < 8 for loss in losses)
        assert run["tokens_per_s"] > 0 and run["seconds"] > 0 and run["peak_bytes"] is None

    base, ours = content["rows"]
    assert (base["recipe"], ours["recipe"]) == ("fp32", "fp8")
    assert ours["bench"] == "train" and ours["seeds"] == 2 and ours["steps"] == TINY.steps
    of = {(run["recipe"], run["seed"]): run["val_loss"] for run in content["runs"]}
    gaps = [100 * (of["fp8", s] / of["fp32", s] - 1) for s in (0, 1)]
    assert ours["gap_percent"] == pytest.approx(sum(gaps) / 2)
    assert ours["gap_error_percent"] == pytest.approx(abs(gaps[0] - gaps[1]) / 2)
    assert ours["floor_percent"] > 0
    assert base["gap_percent"] is None and ours["bf16_loss"] is None  # the baseline was not bf16


def test_a_bf16_baseline_is_called_so_and_fills_its_column(
    tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(demo.SIZES, "cpu", dataclasses.replace(TINY, baseline="bf16"))
    base, ours = _run(tiny)["rows"]
    assert base["recipe"] == "bf16" and ours["bf16_loss"] == base["loss"] > 0
    assert "gap to bf16" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_memory_and_the_driver_are_told(tiny: pathlib.Path) -> None:
    demo.main(["--device", "cuda", "--size", "cpu", "--out", str(tiny)])
    content = json.loads((tiny / "train_cpu.json").read_text())
    assert content["machine"]["gpu"] and content["config"]["device"] == "cuda"
    assert all(run["peak_bytes"] > 0 for run in content["runs"])
    assert all(math.isfinite(run["val_loss"]) for run in content["runs"])


def test_one_seed_has_no_error(tiny: pathlib.Path) -> None:
    row = _run(tiny)["rows"][1]
    assert math.isfinite(row["gap_percent"])
    assert row["gap_error_percent"] is None and row["floor_percent"] is None


def test_the_same_command_gives_the_same_losses(tiny: pathlib.Path) -> None:
    first, second = (_run(tiny / name, "--recipes", "fp8") for name in ("a", "b"))
    for one, other in zip(first["runs"], second["runs"], strict=True):
        assert one["loss_curve"] == other["loss_curve"] and one["val_loss"] == other["val_loss"]


def test_a_baseline_of_a_file_is_reused_and_not_trained(tiny: pathlib.Path) -> None:
    whole = _run(tiny / "a", "--recipes", "fp8")
    ours = _run(tiny / "b", "--baseline", str(tiny / "a" / "train_cpu.json"))
    assert ours["rows"] == whole["rows"]
    assert ours["runs"][0]["from"] == "train_cpu.json"
    assert ours["runs"][0]["loss_curve"] == whole["runs"][0]["loss_curve"]


def test_without_a_baseline_there_is_no_gap(
    tiny: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = _run(tiny, "--no-baseline")["rows"]
    assert row["recipe"] == "fp8" and row["gap_percent"] is None and row["baseline_loss"] is None
    assert "validation loss" in capsys.readouterr().out


def test_another_configuration_text_or_seed_refuses_the_baseline(
    tiny: pathlib.Path, folders: dict[str, pathlib.Path]
) -> None:
    _run(tiny, "--recipes", "")
    file = str(tiny / "train_cpu.json")
    with pytest.raises(SystemExit, match="steps = 13, got 12"):
        _run(tiny / "b", "--baseline", file, "--steps", "13")
    with pytest.raises(SystemExit, match=r"fp32 run of each seed, got none of \[1\]"):
        _run(tiny / "b", "--baseline", file, "--seeds", "0", "1")
    next(folders["stdlib"].rglob("*.py")).write_text("changed")
    with pytest.raises(SystemExit, match="baseline with data"):
        _run(tiny / "b", "--baseline", file)
    (tiny / "broken.json").write_text("{}")
    with pytest.raises(SystemExit, match="to be a file of this script"):
        _run(tiny / "b", "--baseline", str(tiny / "broken.json"))
    assert not (tiny / "b").exists()


def test_wrong_options_say_what_was_expected(
    tiny: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, word in ((["--steps", "0"], "at least 1"), (["--seeds", "a"], "whole numbers")):
        with pytest.raises(SystemExit):
            _run(tiny, *options)
        assert word in capsys.readouterr().err


def test_a_loss_that_diverges_ends_the_run_and_is_null_in_the_file(
    tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "learning_rate", lambda step, size: math.nan)
    row = _run(tiny, "--recipes", "fp8")["rows"][1]
    assert row["loss"] is None and row["gap_percent"] is None
    assert "diverged" in capsys.readouterr().out
