"""`python -m narrowfloat` tells what is here and what is wrong, and never crashes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import narrowfloat as nf
from narrowfloat import __main__ as main
from narrowfloat import _binary, support

PROBLEM = "narrowfloat._C: expected a binary, got none (the line to type)"
Run = Callable[[], tuple[int, str]]
World = Callable[..., Run]


def binary(**changed: object) -> SimpleNamespace:
    answers = {
        "archs": "sm_89 sm_90a sm_100f sm_120f compute_120",
        "cuda_version": 13020,
        "cublaslt_version": 130100,
        "torch_target": 0x020A000000000000,
        **changed,
    }
    made = {name: lambda value=value: value for name, value in answers.items()}
    return SimpleNamespace(**made, has_fp4=lambda capability, version: version >= 120804)


def broken(*_: object) -> object:
    raise RuntimeError("the device is lost")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> World:
    """world(capabilities...): a machine with these GPUs; gives a function that runs main()."""

    def make(
        *capabilities: tuple[int, int],
        module: object = None,
        problem: str | None = None,
        driver: str | None = None,
    ) -> Run:
        monkeypatch.setattr(_binary, "module", module)
        monkeypatch.setattr(_binary, "problem", problem)
        monkeypatch.setattr(main, "_driver", lambda: driver)
        monkeypatch.setattr(main, "_try", lambda name, device: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"Card {i}")

        def run() -> tuple[int, str]:
            code = main.main()
            out = capsys.readouterr()
            assert out.err == ""
            return code, out.out

        return run

    return make


def test_a_good_machine(world: World) -> None:
    code, out = world((9, 0), (12, 1), module=binary(), driver="580.65.06")()
    assert code == 0
    for words in (
        f"narrowfloat  {nf.__version__}",
        platform.python_version(),
        torch.__version__,
        f"CUDA {torch.version.cuda or '(none)'}",
        "cuBLASLt     13.1.0",
        "driver       580.65.06",
        "compiled for sm_89 sm_90a sm_100f sm_120f compute_120",
        "with CUDA 13.2, for torch 2.10 and newer",
        "cuda:0  Card 0, sm_90",
        "cuda:1  Card 1, sm_121",
        "fp8: native; FP8 tensor cores of Hopper",
        "fp8: native; FP8 tensor cores of Blackwell",
        "nvfp4: emulation; Hopper",
        "mxfp4: native; FP4 tensor cores of Blackwell",
        "cpu     fp8: reference",
        "cpu     nvfp4: reference",
        support.support_table(),
    ):
        assert words in out
    assert out.rstrip().endswith("Nothing is wrong here.")


def test_an_older_card_beside_a_good_one(world: World) -> None:
    code, out = world((8, 0), (9, 0), module=binary())()
    assert code == 0
    wrong = out.split("Wrong here:")[1]
    assert "cuda:0: fp8 does not run" in wrong and "sm_80" in wrong and "cuda:1" not in wrong


def test_what_a_chip_never_runs_is_not_wrong(world: World) -> None:
    """fp8_block on Blackwell: said, with what runs instead, and no fault of the machine."""
    code, out = world((12, 0), module=binary())()
    assert code == 0 and "fp8_block: no; recipe fp8_block does not run on sm_120" in out
    assert "fp8_block_pow2: native" in out and "Nothing is wrong here." in out
    code, out = world((9, 0), module=binary(cublaslt_version=120804))()
    assert code == 0 and "fp8_block: no" in out  # a newer library would
    assert "cuda:0: fp8_block does not run" in out.split("Wrong here:")[1]


def test_only_an_older_card(world: World) -> None:
    code, out = world((8, 6), module=binary())()
    assert code == 1 and "cuda:0 is sm_86" in out.split("Wrong here:")[1]


def test_gpu_without_a_binary(world: World) -> None:
    code, out = world((9, 0), (9, 0), problem=PROBLEM)()
    assert code == 1
    assert "none that can be used" in out and "cuBLASLt     not loaded" in out
    assert out.split("Wrong here:")[1].count(PROBLEM) == 1


def test_no_gpu(world: World) -> None:
    for module, problem in ((binary(), None), (None, PROBLEM)):
        code, out = world(module=module, problem=problem)()
        assert code == 0 and "no CUDA device" in out and support.support_table() in out
        assert (PROBLEM in out) == (problem is not None)
        assert out.rstrip().splitlines()[-1].startswith("No GPU here")


def test_cpu_torch_on_a_machine_with_a_gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    code, out = world(problem=PROBLEM, driver="580.65.06")()
    assert code == 1
    wrong = out.split("Wrong here:")[1]
    assert "580.65.06" in wrong and PROBLEM in wrong and "CUDA None" not in out


def test_driver_too_old_for_torch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world(module=binary(), driver="470.1")

    def warns() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warns)
    code, out = run()
    assert code == 1 and "too old" in out.split("Wrong here:")[1]


def test_binary_without_code_for_the_card(world: World) -> None:
    code, out = world((12, 0), module=binary(archs="sm_90a"))()
    assert code == 1 and "has code for sm_90a, not for sm_120" in out.split("Wrong here:")[1]


def test_kernels_that_do_not_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world((9, 0), module=binary())
    monkeypatch.setattr(main, "_try", broken)
    code, out = run()
    assert code == 1 and "fails: RuntimeError: the device is lost" in out.split("Wrong here:")[1]


@pytest.mark.parametrize(
    "name", ["is_available", "device_count", "get_device_capability", "get_device_name"]
)
def test_torch_cuda_that_raises(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run = world((9, 0), module=binary())
    monkeypatch.setattr(torch.cuda, name, broken)
    code, out = run()
    assert "the device is lost" in out and support.support_table() in out
    assert code == (0 if name == "get_device_name" else 1)


@pytest.mark.parametrize("name", ["archs", "cublaslt_version", "cuda_version", "torch_target"])
def test_a_binary_that_raises(world: World, name: str) -> None:
    module = binary()
    setattr(module, name, broken)
    code, out = world((9, 0), module=module)()
    assert "the device is lost" in out and support.support_table() in out
    assert code == (1 if name == "archs" else 0)


def test_a_driver_that_cannot_be_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world()
    monkeypatch.setattr(main, "_driver", broken)
    code, out = run()
    assert code == 0 and "driver       none found" in out


@pytest.mark.parametrize("name", nf.RECIPES)
def test_the_trial_layer(device: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        main._try(name, device)


def test_as_a_program() -> None:
    """In a fresh interpreter, on whatever is here."""
    done = subprocess.run(
        [sys.executable, "-m", "narrowfloat"],
        env={**os.environ, "PYTHONPATH": str(Path(nf.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr
    assert done.returncode == ("Wrong here:" in done.stdout) or torch.cuda.device_count() > 1
    assert support.support_table() in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("lines", [1])
def test_r32_a_reader_that_has_enough(lines: int) -> None:
    """As in `python -m narrowfloat | head`: no traceback, and the exit code of the whole report."""
    command = [sys.executable, "-m", "narrowfloat"]
    whole = subprocess.run(command, capture_output=True, text=True, timeout=300)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        read = [process.stdout.readline() for _ in range(lines)]
        process.stdout.close()
        said = process.stderr.read()
    assert read == whole.stdout.splitlines(keepends=True)[:lines]
    assert (process.returncode, said) == (whole.returncode, whole.stderr)
