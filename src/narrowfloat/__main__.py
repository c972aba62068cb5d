"""Decides what `python -m narrowfloat` tells: versions, the binary, the devices, what runs where.

Exit code 1 where a GPU is there and no recipe runs on any of them, else 0.
"""

from __future__ import annotations

import os
import platform
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from . import __version__, _binary, recipe, support
from .autograd import linear

T = TypeVar("T")


def _ask(question: Callable[..., T], *args: Any) -> tuple[T | None, str]:
    """(answer, "") or (None, what went wrong). A broken driver or torch must not end the report."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer = question(*args)
        except Exception as e:
            return None, f"{type(e).__name__}: {str(e).strip() or 'no message'}"
    # torch warns, and does not raise, where the driver is too old for it
    return answer, "; ".join(str(w.message).strip() for w in caught)


def _driver() -> str | None:
    """The NVIDIA driver's version; known without a working torch.cuda, through nvidia-smi."""
    from torch.utils import collect_env

    found = collect_env.get_nvidia_driver_version(collect_env.run)
    return str(found) if found else None


def _release(version: int, major: int) -> str:
    """130100 and 10000 -> 13.1.0; 13020 and 1000 -> 13.2"""
    if major == 1000:
        return f"{version // 1000}.{version % 1000 // 10}"
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"


def _try(name: str, device: str) -> None:
    """One small layer, forward and backward: whether the kernels really start."""
    x = torch.ones(16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    with warnings.catch_warnings():  # what is emulated is said beside it
        warnings.simplefilter("ignore", support.EmulationWarning)
        y = linear(x, torch.ones_like(x), None, name)
    y.sum().backward()
    if y.sum().item() != 16**3 or x.grad is None or x.grad.sum().item() != 16**3:
        raise RuntimeError("a product of ones came out wrong")


def _versions(driver: str | None) -> list[str]:
    cublaslt = "not loaded (no binary)"
    if _binary.module is not None:
        number, why = _ask(_binary.module.cublaslt_version)
        cublaslt = why if number is None else _release(number, 10000)
    return [
        f"narrowfloat  {__version__}",
        f"Python       {platform.python_version()}, {sys.executable}",
        f"torch        {torch.__version__}, built with CUDA {torch.version.cuda or '(none)'}",
        f"cuBLASLt     {cublaslt}",
        f"driver       {driver or 'none found'}",
    ]


def _describe_binary() -> list[str]:
    if _binary.module is None or _binary.problem is not None:
        return [f"none that can be used. {_binary.problem}"]
    target = _binary.module.torch_target()
    return [
        f"compiled for {_binary.module.archs()}",
        f"with CUDA {_release(_binary.module.cuda_version(), 1000)}, "
        f"for torch {target >> 56}.{target >> 48 & 0xFF} and newer",
    ]


def _device(index: int, wrong: list[str]) -> tuple[list[str], bool]:
    """Lines about cuda:index, and whether any recipe runs on it."""
    where = f"cuda:{index}"
    name, why_name = _ask(torch.cuda.get_device_name, index)
    capability, why = _ask(torch.cuda.get_device_capability, index)
    if capability is None:
        wrong.append(f"{where}: torch cannot ask for its architecture: {why}")
        return [f"{where}  {name or why_name}"], False
    lines = [f"{where}  {name or why_name}, sm_{capability[0]}{capability[1]}"]
    runs = False
    for each in recipe.RECIPES:
        answer, why = _ask(support.supported, each, index)
        if answer is None:
            answer = support.Support(False, "no", why)
        if answer:
            _, why = _ask(_try, each, where)
            if why:
                answer = support.Support(False, "no", f"a layer of 16 x 16 fails: {why}")
        lines.append(f"        {each}: {answer.how}; {answer.reason}")
        if answer:
            runs = True
        elif answer.reason != _binary.problem and not support.never(each, capability):
            wrong.append(f"{where}: {each} does not run: {answer.reason}")
    return lines, runs


def _devices(driver: str | None, wrong: list[str]) -> tuple[list[str], bool]:
    """Lines about the devices, and whether all is well: a GPU that runs a recipe, or no GPU."""
    available, why = _ask(torch.cuda.is_available)
    count, why_count = _ask(torch.cuda.device_count) if available else (0, "")
    lines: list[str] = []
    fine = True
    if count:
        fine = False
        for index in range(count):
            found, why = _ask(_device, index, wrong)
            if found is None:
                wrong.append(f"cuda:{index}: {why}")
                found = [f"cuda:{index}  {why}"], False
            lines += found[0]
            fine = fine or found[1]
        if _binary.problem is not None:
            wrong.insert(0, _binary.problem)
    elif driver is not None or why or why_count:
        fine = False
        there = f"the NVIDIA driver {driver} is there, but " if driver else ""
        wrong.append(f"{there}torch finds no CUDA device: {why or why_count or 'it says not why'}")
        if _binary.problem is not None:
            wrong.append(_binary.problem)
        if torch.version.cuda is not None:
            wrong.append(
                f"look at nvidia-smi, CUDA_VISIBLE_DEVICES, and that the driver is new enough for "
                f"CUDA {torch.version.cuda}"
            )
        lines = ["no CUDA device that torch can use"]
    else:
        lines = ["no CUDA device"]
    for name in recipe.RECIPES:
        answer = support.supported(name, "cpu")
        lines.append(f"cpu     {name}: {answer.how}; {answer.reason}")
    return lines, fine


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # whoever reads, `head` or a pager, has enough: the exit code stays
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _section(title: str, lines: list[str]) -> None:
    _print(f"\n{title}")
    for line in lines:
        _print(textwrap.indent(line, "  "))


def main() -> int:
    driver, _ = _ask(_driver)
    wrong: list[str] = []
    _print("\n".join(_versions(driver)))
    binary, why = _ask(_describe_binary)
    _section("Binary (narrowfloat._C)", binary or [f"broken: {why}"])
    devices, fine = _devices(driver, wrong)
    _section("Devices", devices)
    _print(f"\nSupport\n\n{support.support_table()}\n")
    if wrong:
        _print("Wrong here:")
        _print("\n".join(f"- {line}" for line in wrong))
    elif devices[0].startswith("no CUDA device"):
        _print("No GPU here: everything runs on the CPU, through the reference kernels.")
    else:
        _print("Nothing is wrong here.")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
