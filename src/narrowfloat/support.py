"""Decides which recipe runs on which device, natively or how, and says why where it does not."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from . import _binary
from . import recipe as recipes
from .recipe import AnyRecipe, FP4Recipe


class Support(NamedTuple):
    """Whether a recipe runs on a device. Its truth value is `ok`."""

    ok: bool
    how: str  # "native", "emulation", "reference", or "no"
    reason: str

    def __bool__(self) -> bool:
        return self.ok


class Architecture(NamedTuple):
    """One row of the support table."""

    sm: str
    chips: str
    capabilities: tuple[tuple[int, int], ...]
    has_fp4: bool  # tensor cores
    ran_fp8: str  # on which hardware the code of a format was run
    ran_fp4: str

    def ran(self, fp4: bool) -> str:
        return self.ran_fp4 if fp4 else self.ran_fp8

    def native(self, fp4: bool) -> bool:
        return self.has_fp4 or not fp4


_NOT_RUN = "not run on hardware"
ARCHITECTURES = (
    Architecture("sm_89", "Ada (L4, L40S, GeForce RTX 40)", ((8, 9),), False, _NOT_RUN, _NOT_RUN),
    Architecture(
        "sm_90", "Hopper (H100, H200)", ((9, 0),), False, "run on an H200", "run on an H200"
    ),
    Architecture(
        "sm_100, sm_103", "Blackwell (B200, B300)", ((10, 0), (10, 3)), True, _NOT_RUN, _NOT_RUN
    ),
    Architecture(
        "sm_120, sm_121",
        "Blackwell (GeForce RTX 50, RTX PRO, GB10)",
        ((12, 0), (12, 1)),
        True,
        _NOT_RUN,
        _NOT_RUN,
    ),
)


class EmulationWarning(UserWarning):
    """A recipe gives its numbers on a device, but not its speed; once a device."""


def support_table() -> str:
    """The support table in Markdown, a line for each architecture and the recipes that run alike.
    README holds it as is."""
    rows = [("recipe", "architecture", "chips", "runs", "tested"), ("---",) * 5]
    for fp4 in (False, True):
        same = [n for n, r in recipes.RECIPES.items() if isinstance(r, FP4Recipe) == fp4]
        name, native = ", ".join(same), f"native ({'FP4' if fp4 else 'FP8'} tensor cores)"
        emulation = "exact emulation (bf16 tensor cores)"
        rows += [
            (name, a.sm, a.chips, native if a.native(fp4) else emulation, a.ran(fp4))
            for a in ARCHITECTURES
        ]
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


def _library_without_fp4(capability: tuple[int, int]) -> int:
    """cuBLASLt's version where it is too old for FP4 on a chip that has it, else 0; the binary asks
    the same."""
    if _binary.module is None:
        return 0
    version = _binary.module.cublaslt_version()
    return 0 if _binary.module.has_fp4(capability[0] * 10 + capability[1], version) else version


def supported(
    recipe: str | AnyRecipe = "fp8", device: torch.device | str | int | None = None
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
    fp4 = isinstance(recipe, FP4Recipe)
    ran = row.ran(fp4)
    if fp4 and row.has_fp4 and (version := _library_without_fp4(capability)):
        return Support(
            True,
            "emulation",
            f"cuBLASLt {version} has no FP4 products for {row.chips} (12.8 update 1 has): the same "
            f"numbers through its bf16 tensor cores; {ran}",
        )
    if not row.native(fp4):
        return Support(
            True,
            "emulation",
            f"{row.chips} has no FP4 tensor cores: the same numbers through its bf16 ones; {ran}",
        )
    kind = "FP4" if fp4 else "FP8"
    return Support(True, "native", f"{kind} tensor cores of {row.chips} through cuBLASLt; {ran}")


# Devices that were found to run FP8, and FP4; asked at every call. All recipes of either need the
# same of a device.
ready: set[torch.device] = {torch.device("cpu"), torch.device("meta")}
ready_fp4: set[torch.device] = {torch.device("cpu"), torch.device("meta")}


def require(recipe: AnyRecipe, device: torch.device) -> None:
    """NotImplementedError with the reason where `recipe` does not run on `device`; a warning, the
    first time, where it is emulated there."""
    known = ready_fp4 if isinstance(recipe, FP4Recipe) else ready
    if device in known or torch.compiler.is_compiling():
        return
    answer = supported(recipe, device)
    if not answer:
        raise NotImplementedError(
            f"narrowfloat: expected a device that runs recipe {recipe}, got {device}: "
            f"{answer.reason}"
        )
    known.add(device)
    if answer.how == "emulation":
        warnings.warn(
            f"narrowfloat: recipe {recipe} on {device}: {answer.reason}",
            EmulationWarning,
            stacklevel=4,
        )
