"""The soak of tools/soak.py: its own bookkeeping on the CPU, and a short run on a GPU."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import narrowfloat as nf

TOOL = pathlib.Path(__file__).resolve().parent.parent / "tools" / "soak.py"
if not TOOL.exists():
    pytest.skip("soak.py is in the repository alone", allow_module_level=True)


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("soak", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_recipe_meets_every_shape_way_and_stream() -> None:
    worker = tool().Worker("cpu")
    seen = {(*worker.choices(step), step // 7 % 2) for step in range(worker.cycle())}
    assert len({c[0] for c in seen}) == len(nf.RECIPES)
    for recipe in nf.RECIPES:
        of_it = [c for c in seen if c[0] == recipe]
        assert {c[3] for c in of_it} == set(tool().HOWS)
        assert {c[2] for c in of_it} == set(tool().TOKENS)
        assert {c[1] for c in of_it} == {0, 1} and {c[4] for c in of_it} == {0, 1}


def test_a_step_depends_on_its_number_alone() -> None:
    module = tool()
    one, other = module.Worker("cpu"), module.Worker("cpu")
    steps = range(0, 2 * len(nf.RECIPES), 3)
    first = {step: module.digest(one.run(step)) for step in steps}
    assert first == {step: module.digest(other.run(step)) for step in reversed(steps)}
    assert len(set(first.values())) == len(first)


def test_a_few_steps_on_a_cpu() -> None:
    row = run("--device", "cpu", "--steps", "20", "--threads", "2", "--seconds", "100")
    assert row["equal"] and row["growth_bytes"] == 0 and row["compared"] == row["steps"] == 20


@pytest.mark.gpu
def test_a_short_soak(cuda: str, tmp_path: pathlib.Path) -> None:
    # the first half is the warm-up: every choice on both streams
    arguments = ("--steps", "8000", "--seconds", "60")
    row = run(*arguments, "--out", str(tmp_path / "soak.json"))
    assert row["equal"] and row["growth_bytes"] <= 1 << 20
    assert json.loads((tmp_path / "soak.json").read_text()) == row
    assert torch.cuda.is_available()
