"""Which recipe runs on which device, natively or how, and why where it does not."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from . import _binary, formats
from . import recipe as recipes
from .recipe import Recipe


class Support(NamedTuple):
    """Whether a recipe runs on a device. Its truth value is `ok`."""

    ok: bool
    how: str  # "native", "emulation", "reference", or "no"
    reason: str

    def __bool__(self) -> bool:
        return self.ok


class Architecture(NamedTuple):
    """Chips that run alike."""

    sm: str
    chips: str
    capabilities: tuple[tuple[int, int], ...]


SM89 = Architecture("sm_89", "Ada (L4, L40S, GeForce RTX 40)", ((8, 9),))
SM90 = Architecture("sm_90", "Hopper (H100, H200)", ((9, 0),))
SM100 = Architecture("sm_100, sm_103", "Blackwell (B200, B300)", ((10, 0), (10, 3)))
SM120 = Architecture(
    "sm_120, sm_121", "Blackwell (GeForce RTX 50, RTX PRO, GB10)", ((12, 0), (12, 1))
)
ARCHITECTURES = (SM89, SM90, SM100, SM120)


class Route(NamedTuple):
    """How an architecture computes the products of a kind, from a version of cuBLASLt on."""

    name: str  # as csrc calls it: "native", "epilogue", "bf16", "" where there is none
    on: str  # what computes them; why nothing does
    note: str = ""  # what else is to be said of it; what the chips have none of
    since: int = 0

    @property
    def how(self) -> str:
        named = {"native": "native", "epilogue": "native", "bf16": "emulation", "": "no"}
        return named[self.name]

    @property
    def cell(self) -> str:
        """In the table."""
        how = "exact emulation" if self.how == "emulation" else self.how
        note = f", {self.note}" if self.note and self.how == "native" else ""
        return f"{how} ({self.on}{note})"


_FP8, _FP4, _BF16 = "FP8 tensor cores", "FP4 tensor cores", "bf16 tensor cores"
_NO_BLOCKS = "fp32 scales a block are cuBLASLt's on sm_90 alone; fp8_block_pow2 runs"
_UNIT = Route("epilogue", _FP8, "unit scales, then a pass that scales")
_NOTHING_FINER = "tensor cores that scale blocks"
_NO_FP8_BY_BF16 = "tensor cores that multiply FP8 by bf16"


def _from(since: int, route: Route, older: Route) -> tuple[Route, Route]:
    """A route that cuBLASLt has from a version on, and the one before."""
    return route._replace(since=since), older


# The support table: kind of product -> architecture -> its routes, that of the newest library
# first. Kinds are how both operands are scaled: "fp8" by tensor, "fp8_bf16" one of them so and the
# other not, "fp4", formats.SCALINGS. csrc decides at a launch, and says what by _C.block_route and
# _C.has_fp4; tests hold both together.
TABLE: dict[str, dict[Architecture, tuple[Route, ...]]] = {
    "fp8": dict.fromkeys(ARCHITECTURES, (Route("native", _FP8),)),
    "fp8_bf16": dict.fromkeys(ARCHITECTURES, (Route("bf16", _BF16, _NO_FP8_BY_BF16),)),
    "bf16": dict.fromkeys(ARCHITECTURES, (Route("native", _BF16),)),
    "row": {
        SM89: (_UNIT,),
        SM90: _from(120900, Route("native", _FP8), _UNIT),
        SM100: (_UNIT,),
        SM120: (_UNIT,),
    },
    "block": {
        SM89: (Route("", _NO_BLOCKS),),
        SM90: _from(
            120900,
            Route("native", _FP8),
            Route("", "fp32 scales a block take cuBLASLt 12.9; fp8_block_pow2 runs"),
        ),
        SM100: (Route("", _NO_BLOCKS),),
        SM120: (Route("", _NO_BLOCKS),),
    },
    "block_pow2": {
        SM89: (Route("bf16", _BF16, _NOTHING_FINER),),
        SM90: _from(
            120900, Route("native", _FP8), Route("bf16", _BF16, "blocks before cuBLASLt 12.9")
        ),
        SM100: _from(
            120800,
            Route("native", _FP8, "as MXFP8"),
            Route("bf16", _BF16, "MXFP8 before cuBLASLt 12.8"),
        ),
        SM120: _from(
            120900,
            Route("native", _FP8, "as MXFP8"),
            Route("bf16", _BF16, "MXFP8 before cuBLASLt 12.9"),
        ),
    },
    "mx": {
        SM89: (Route("bf16", _BF16, _NOTHING_FINER),),
        SM90: (Route("bf16", _BF16, _NOTHING_FINER),),
        SM100: _from(
            120800, Route("native", _FP8), Route("bf16", _BF16, "MXFP8 before cuBLASLt 12.8")
        ),
        SM120: _from(
            120900, Route("native", _FP8), Route("bf16", _BF16, "MXFP8 before cuBLASLt 12.9")
        ),
    },
    "fp4": {
        SM89: (Route("bf16", _BF16, _FP4),),
        SM90: (Route("bf16", _BF16, _FP4),),
        SM100: _from(
            120803, Route("native", _FP4), Route("bf16", _BF16, "FP4 before cuBLASLt 12.8.3")
        ),
        SM120: _from(
            120804, Route("native", _FP4), Route("bf16", _BF16, "FP4 before cuBLASLt 12.8.4")
        ),
    },
}

# On which hardware the kinds were run; "mixed" is a recipe whose GEMMs are of several.
RAN: dict[Architecture, tuple[str, frozenset[str]]] = {
    SM90: ("run on an H200", frozenset({*TABLE, "mixed"})),
}


class Needs(NamedTuple):
    """What a recipe asks of a device."""

    name: str
    kinds: tuple[str, ...]
    mixed: bool


def needs_of(recipe: Recipe) -> Needs:
    return Needs(recipe.name, recipe.kinds, recipe.mixed)


def ran(row: Architecture, needs: Needs) -> str:
    """Whether, and where, recipes of these kinds were run on an architecture."""
    where, what = RAN.get(row, ("", frozenset()))
    needed = {*needs.kinds, *(("mixed",) if needs.mixed else ())}
    return where if needed <= what else "not run on hardware"


def route(kind: str, row: Architecture, cublaslt: int | None = None) -> Route:
    """How an architecture computes the products of a kind with a version of cuBLASLt (130100 is
    13.1.0), by default the newest."""
    routes = TABLE[kind][row]
    return next(r for r in routes if cublaslt is None or r.since <= cublaslt)


def _found_route(kind: str, row: Architecture, capability: tuple[int, int]) -> Route:
    """route() with the library that is loaded, as csrc decides it."""
    if _binary.module is None or kind in ("fp8", "bf16"):
        return route(kind, row)
    cublaslt = _binary.module.cublaslt_version()
    asked = getattr(_binary.module, "block_route", None)
    if asked is None or kind not in formats.SCALINGS:
        return route(kind, row, cublaslt)
    name = asked(formats.SCALINGS[kind].code, capability[0] * 10 + capability[1], cublaslt)
    same = (r for r in TABLE[kind][row] if r.name == name)
    return next(same, Route(name, _BF16 if name == "bf16" else _FP8))


def _worst(routes: list[Route]) -> str:
    found = [r.how for r in routes]
    return next((how for how in ("no", "emulation") if how in found), "native")


class EmulationWarning(UserWarning):
    """A recipe gives its numbers on a device, but not its speed; once a device."""


_REFERENCE = "reference (slow, the same quantized bytes)"


def _cells(recipe: Recipe, row: Architecture) -> tuple[str, str]:
    """How a recipe runs on an architecture, and where it was run."""
    needs = needs_of(recipe)
    routes = [route(kind, row) for kind in needs.kinds]
    worst = _worst(routes)
    how = "; ".join(dict.fromkeys(r.cell for r in routes if r.how == worst))
    return how, "" if worst == "no" else ran(row, needs)


def support_table() -> str:
    """The support table in Markdown, a line for each architecture and the recipes that run alike.
    README holds it as is."""
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, recipe in recipes.RECIPES.items():
        alike.setdefault(tuple(_cells(recipe, row) for row in ARCHITECTURES), []).append(name)
    rows = [("recipe", "architecture", "chips", "runs", "tested"), ("---",) * 5]
    for found, names in alike.items():
        for row, cells in zip(ARCHITECTURES, found, strict=True):
            rows.append((", ".join(names), row.sm, row.chips, *cells))
    rows.append(("every recipe", "other GPUs", "", "no", ""))
    rows.append(("every recipe", "CPU", "", _REFERENCE, "run"))
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
    another card in the machine does not matter. ValueError for a recipe that there is not.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, int):
        device = torch.device("cuda", device)
    return _supported(needs_of(recipes.get(recipe)), torch.device(device))


def _supported(needs: Needs, device: torch.device) -> Support:
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
            f"recipe {needs.name} needs FP8 tensor cores ({have}); cuda:{index} is "
            f"sm_{capability[0]}{capability[1]}",
        )
    if _binary.module is not None and not compiled_for(_binary.module.archs(), capability):
        return Support(
            False,
            "no",
            f"the binary has code for {_binary.module.archs()}, not for sm_{capability[0]}"
            f"{capability[1]} of cuda:{index} (build it without NARROWFLOAT_CUDA_ARCHS)",
        )
    routes = [_found_route(kind, row, capability) for kind in needs.kinds]
    how = _worst(routes)
    decisive = [r for r in routes if r.how == how]
    if how == "no":
        sm = f"sm_{capability[0]}{capability[1]}"
        return Support(
            False,
            "no",
            f"recipe {needs.name} does not run on {sm}, which cuda:{index} is: {decisive[0].on}",
        )
    if how == "emulation":
        lacks = " and ".join(dict.fromkeys(r.note or "GEMMs of this kind" for r in decisive))
        reason = f"{row.chips} has no {lacks}: the same numbers through its bf16 ones"
    else:
        on = " and ".join(dict.fromkeys(r.on for r in decisive))
        notes = "".join(dict.fromkeys(f", {r.note}" for r in decisive if r.note))
        reason = f"{on} of {row.chips} through cuBLASLt{notes}"
    return Support(True, how, f"{reason}; {ran(row, needs)}")


def never(recipe: str | Recipe, capability: tuple[int, int]) -> bool:
    """Whether the table says that no version of cuBLASLt runs a recipe on chips of a capability
    that run others."""
    row = _architecture(capability)
    return row is not None and any(
        route(kind, row).how == "no" for kind in recipes.get(recipe).kinds
    )


# Devices that were found to run GEMMs of these kinds, looked at in every call. All recipes of the
# same kinds need the same of a device.
_ALWAYS = frozenset((torch.device("cpu"), torch.device("meta")))
_ready: dict[tuple[str, ...], frozenset[torch.device]] = {}


def ready(kinds: tuple[str, ...]) -> frozenset[torch.device]:
    """The devices that were found to run recipes of these kinds."""
    return _ready.get(kinds, _ALWAYS)


def require(recipe: Recipe, device: torch.device) -> None:
    """NotImplementedError with the reason where `recipe` does not run on `device`; a warning, the
    first time for its kinds, where it is emulated there."""
    if torch.compiler.is_compiling():
        # asked now, while it is traced: a graph that looked at the sets above would be compiled
        # anew when they change
        _require_traced(*needs_of(recipe), device)
    elif device not in ready(recipe.kinds):
        _require(needs_of(recipe), device)


@torch.compiler.assume_constant_result
def _require_traced(name: str, kinds: tuple[str, ...], mixed: bool, device: torch.device) -> bool:
    if device not in ready(kinds):
        _require(Needs(name, kinds, mixed), device)
    return True


def _require(needs: Needs, device: torch.device) -> None:
    answer = _supported(needs, device)
    if not answer:
        raise NotImplementedError(
            f"narrowfloat: expected a device that runs recipe {needs.name}, got {device}: "
            f"{answer.reason}"
        )
    _ready[needs.kinds] = ready(needs.kinds) | {device}
    if answer.how == "emulation":
        warnings.warn(
            f"narrowfloat: recipe {needs.name} on {device}: {answer.reason}",
            EmulationWarning,
            stacklevel=4,
        )
