"""Decides which recipe runs on which device, natively or how, and says why where it does not."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import _binary
from . import recipe as recipes
from .recipe import Recipe


class Support(NamedTuple):
    """Whether a recipe runs on a device. Its truth value is `ok`."""

    ok: bool
    how: str  # "native", "reference", or "no"
    reason: str

    def __bool__(self) -> bool:
        return self.ok


class Architecture(NamedTuple):
    """One row of the support table."""

    sm: str
    chips: str
    capabilities: tuple[tuple[int, int], ...]
    ran: str  # on which hardware its code was run


ARCHITECTURES = (
    Architecture("sm_89", "Ada (L4, L40S, GeForce RTX 40)", ((8, 9),), "not run on hardware"),
    Architecture("sm_90", "Hopper (H100, H200)", ((9, 0),), "run on an H200"),
    Architecture(
        "sm_100, sm_103", "Blackwell (B200, B300)", ((10, 0), (10, 3)), "not run on hardware"
    ),
    Architecture(
        "sm_120, sm_121",
        "Blackwell (GeForce RTX 50, RTX PRO, GB10)",
        ((12, 0), (12, 1)),
        "not run on hardware",
    ),
)


def support_table() -> str:
    """The support table in Markdown, one line a recipe and architecture. README holds it as is."""
    rows = [("recipe", "architecture", "chips", "runs", "tested"), ("---",) * 5]
    for name in recipes.RECIPES:
        rows += [(name, a.sm, a.chips, "native (FP8 tensor cores)", a.ran) for a in ARCHITECTURES]
        rows.append((name, "other GPUs", "", "no", ""))
        rows.append((name, "CPU", "", "reference (slow, the same quantized bytes)", "run"))
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def compiled_for(archs: str, capability: tuple[int, int]) -> bool:
    """Whether a binary with these architectures ("sm_89 sm_90a sm_100f compute_120") has code for
    a chip. Rules: CUDA C++ Programming Guide, "Application Compatibility" and "Family-Specific
    Features"."""
    for arch in archs.split():
        kind, _, number = arch.partition("_")
        major, minor = int(number.rstrip("af")[:-1]), int(number.rstrip("af")[-1])
        if number.endswith("a"):  # this chip alone
            fits = (major, minor) == capability
        elif kind == "sm" or number.endswith("f"):  # later chips of the same major
            fits = major == capability[0] and minor <= capability[1]
        else:  # plain PTX: any later chip
            fits = (major, minor) <= capability
        if fits:
            return True
    return False


def _architecture(capability: tuple[int, int]) -> Architecture | None:
    for row in ARCHITECTURES:
        if capability in row.capabilities:
            return row
    return None


def supported(
    recipe: str | Recipe = "fp8", device: torch.device | str | int | None = None
) -> Support:
    """Whether `recipe` runs on `device` (default: the current CUDA device, else the CPU).

    A CPU is served by the reference kernels: right, and slow. The decision is the device's own:
    another card in the machine does not matter.
    """
    recipe = recipes.get(recipe)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, int):
        device = torch.device("cuda", device)
    device = torch.device(device)
    if device.type == "cpu":
        return Support(True, "reference", "plain PyTorch on the CPU, for tests and small models")
    if device.type == "meta":
        return Support(True, "reference", "shapes only")
    if device.type != "cuda":
        return Support(False, "no", f"{device.type} devices have no kernels here (cuda, cpu)")
    if _binary.problem is not None:
        return Support(False, "no", _binary.problem)
    if not torch.cuda.is_available():
        return Support(False, "no", "torch finds no CUDA device (see python -m narrowfloat)")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= (count := torch.cuda.device_count()):
        return Support(False, "no", f"there is no cuda:{index}; torch finds {count} CUDA device(s)")
    capability = torch.cuda.get_device_capability(index)
    row = _architecture(capability)
    if row is None:
        have = ", ".join(a.sm for a in ARCHITECTURES)
        return Support(
            False,
            "no",
            f"recipe {recipe} needs FP8 tensor cores ({have}); cuda:{index} is "
            f"sm_{capability[0]}{capability[1]}",
        )
    if _binary.module is not None and not compiled_for(_binary.module.archs(), capability):
        return Support(
            False,
            "no",
            f"the binary has code for {_binary.module.archs()}, not for sm_{capability[0]}"
            f"{capability[1]} of cuda:{index} (build it without NARROWFLOAT_CUDA_ARCHS)",
        )
    return Support(True, "native", f"FP8 tensor cores of {row.chips} through cuBLASLt; {row.ran}")


# Devices that were found to run FP8; asked at every call. Every recipe needs the same of a device.
ready: set[torch.device] = {torch.device("cpu"), torch.device("meta")}


def require(recipe: Recipe, device: torch.device) -> None:
    """NotImplementedError with the reason where `recipe` does not run on `device`."""
    if device in ready or torch.compiler.is_compiling():
        return
    answer = supported(recipe, device)
    if not answer:
        raise NotImplementedError(
            f"narrowfloat: expected a device that runs recipe {recipe}, got {device}: "
            f"{answer.reason}"
        )
    ready.add(device)
