"""What the tests of injected faults share: calls that may fail anywhere, and what must be whole
afterwards. Run as a script it does the same on a GPU, with the allocator of faults/allocator.cpp
(which a process takes before it first uses the GPU) or launches that fail (faults/launches.c).

    python tests/injected.py poison|memory|launch LIBRARY   prints a row of JSON
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import narrowfloat as nf

HERE = pathlib.Path(__file__).parent
M, K, N = 33, 100, 72
MODES = ("poison", "memory", "launch")


class Layer:
    """A layer with all that a call may leave half done: weights, gradients, caches, histories."""

    def __init__(self, recipe: str, device: str, dtype: torch.dtype, how: str = "training") -> None:
        torch.manual_seed(1)
        self.how = how
        self.layer = nf.Linear(K, N, device=device, dtype=dtype, recipe=recipe)
        self.x = torch.randn(M, K, device=device).to(dtype)
        self.dy = torch.randn(M, N, device=device).to(dtype)
        for parameter in self.layer.parameters():  # those of an earlier micro-batch
            parameter.grad = torch.randn_like(parameter)
        self.cache = contextlib.ExitStack()
        if how == "reused":
            self.cache.enter_context(nf.reuse_weights(self.layer))
        if how == "packed":
            self.packed = nf.PackedFP4Linear.from_linear(self.layer)

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()

    def call(self) -> list[Tensor]:
        """Results; the layer's own tensors are changed as a training step changes them."""
        if self.how == "packed":
            with torch.no_grad():
                return [self.packed(self.x)]
        if self.how == "inference":
            with torch.no_grad():
                return [self.layer(self.x)]
        if self.how == "quantized":
            made = [nf.quantize(self.x, f) for f in ("e4m3", "nvfp4", "fp8_block", "mxfp8")]
            return [t for q in made for t in q if isinstance(t, Tensor)]
        leaf = self.x.detach().requires_grad_()
        torch.manual_seed(2)  # of stochastic rounding
        y = self.layer(leaf)
        y.backward(self.dy)
        return [y.detach(), leaf.grad]

    def cold(self) -> None:
        """Nothing is cached: what the next call caches may fail too."""
        if self.layer.weight_cache is not None:
            self.layer.weight_cache.drop()

    def own(self) -> dict[str, Tensor]:
        """Copies of its parameters and their gradients, of x and dy."""
        found = {"x": self.x, "dy": self.dy}
        for name, parameter in self.layer.named_parameters():
            found[name] = parameter.detach()
            found[f"{name}.grad"] = parameter.grad
        if self.how == "packed":
            found |= dict(self.packed.named_buffers())
        return {name: t.cpu().clone() for name, t in found.items()}

    def history(self) -> Tensor | None:
        held = self.layer.scale_history
        return None if held is None else held.cpu().clone()

    def start_over(self, of: dict[str, Tensor]) -> None:
        for name, parameter in self.layer.named_parameters():
            parameter.grad = of[f"{name}.grad"].clone().to(parameter.device)


def equal(a: Tensor, b: Tensor) -> bool:
    a, b = (t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [name for name in a if not equal(a[name], b[name])]


def check_recovers(
    one: Layer,
    inject: Callable[[int], contextlib.AbstractContextManager[Any]],
    errors: tuple[type[BaseException], ...],
    steps: Iterator[int],
    what: str,
) -> int:
    """Each fault of `steps` in one.call(): the error reaches the caller, nothing of the layer is
    half done, and the next call has the right bits. How many faults there were."""
    before = one.own()
    right, grown = one.call(), one.own()
    after, faults = one.history(), 0
    one.start_over(before)
    for n in steps:
        one.cold()
        try:
            with inject(n):
                one.call()
        except errors:
            faults += 1
        else:
            one.start_over(before)
            return faults  # it had fewer allocations than that
        # autograd adds one parameter's gradient after another: each is the old one or the whole
        # new one
        now = one.own()
        wrong = [
            name
            for name in differing(before, now)
            if not (name.endswith(".grad") and equal(now[name], grown[name]))
        ]
        assert not wrong, f"{what}: fault {n} changed {wrong}"
        one.start_over(before)
        again = one.call()
        for at, (a, b) in enumerate(zip(again, right, strict=True)):
            assert equal(a, b), f"{what}: result {at} differs after fault {n}"
        wrong = differing(grown, one.own())
        assert not wrong, f"{what}: after fault {n} the next call makes other {wrong}"
        history = one.history()
        assert history is None or equal(history, after), f"{what}: history after fault {n}"
        one.start_over(before)
    return faults


# ---- on a CPU ----


class FailAt:
    """Inside, the n-th call that narrowfloat's own code makes raises instead, as an allocation in
    it does that fails, or an interrupt that comes there. 0: none, and `calls` says how many."""

    def __init__(self, n: int, error: type[BaseException] = torch.OutOfMemoryError) -> None:
        self.n, self.error, self.calls = n, error, 0
        self.folder = str(pathlib.Path(nf.__file__).parent)

    def __enter__(self) -> FailAt:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: Any, event: str, _: object) -> None:
        if event != "c_call" or not frame.f_code.co_filename.startswith(self.folder):
            return
        self.calls += 1
        if self.calls == self.n:
            raise self.error("injected")


def calls_of(one: Layer) -> int:
    before = one.own()
    one.call()  # what is found out once
    one.cold()
    with FailAt(0) as counter:
        one.call()
    one.start_over(before)
    return counter.calls


# ---- on a GPU, in a process of its own ----


def compiled(mode: str, folder: pathlib.Path, on_cpu: bool = False) -> pathlib.Path:
    """The library that a mode needs; RuntimeError where it does not compile."""
    library = folder / f"{mode}.so"
    if mode == "launch":
        source, compiler, more = HERE / "faults" / "launches.c", shutil.which("cc"), ["-ldl"]
    else:
        source, compiler = HERE / "faults" / "allocator.cpp", shutil.which("g++")
        more = ["-std=c++20", "-DON_CPU"] if on_cpu else ["-std=c++20", *cuda_flags()]
    if compiler is None:
        raise RuntimeError("no compiler")
    command = [compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(library), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    return library


def cuda_flags() -> list[str]:
    from emulated import headers_with

    place, headers = (
        pathlib.Path(torch.__file__).parent,
        headers_with("cuda_runtime.h", "crt/host_config.h"),
    )
    libraries = [
        *place.parent.glob("nvidia/cu*/lib/libcudart.so.*"),
        *place.parent.glob("nvidia/cuda_runtime/lib/libcudart.so.*"),
        *pathlib.Path("/usr/local").glob("cuda*/lib64/libcudart.so.*"),
    ]
    if headers is None or not libraries:
        raise RuntimeError("no headers or library of CUDA's runtime")
    return [
        f"-I{place / 'include'}", f"-isystem{headers}", f"-L{place / 'lib'}", "-lc10",
        str(libraries[0]), f"-Wl,-rpath,{libraries[0].parent}", f"-Wl,-rpath,{place / 'lib'}",
    ]  # fmt: skip


def recipes_of(device: str) -> list[str]:
    return [name for name in nf.RECIPES if nf.supported(name, device)]


def hows_of(recipe: str) -> list[str]:
    made = nf.RECIPES[recipe]
    hows = ["training", "inference"]
    hows += ["reused"] if made.cached_spec else []
    hows += ["packed"] if recipe in ("nvfp4", "mxfp4") else []
    return [*hows, "quantized"] if recipe == "fp8" else hows


DTYPES = (torch.bfloat16, torch.float32)


def poison(library: ctypes.CDLL) -> dict[str, Any]:
    """Everything once in memory of NaN bytes and once in memory of zeros: the same bits, so no byte
    of a result was left unwritten and none was read that nobody wrote; no guard zone touched."""
    tried, errors = 0, []
    for recipe in recipes_of("cuda"):
        for dtype in DTYPES:
            for how in hows_of(recipe):
                made = []
                for poisoned in (1, 0):
                    library.faults_poison(poisoned)
                    with Layer(recipe, "cuda", dtype, how) as one:
                        results = [one.call(), one.call()]
                        torch.cuda.synchronize()
                        flat = [t for r in results for t in r] + [*one.own().values()]
                        made.append([t.cpu() for t in flat])
                tried += 1
                if not all(equal(a, b) for a, b in zip(*made, strict=True)):
                    errors.append(f"{recipe} {dtype} {how} depends on memory that nobody wrote")
    written = library.faults_found()
    if written:
        errors.append(library.faults_what().decode())
    return {"tried": tried, "errors": len(errors), "first": errors[:5]}


def failing(
    arm: Callable[[int], None], errors: tuple[type[BaseException], ...], most: int
) -> dict[str, Any]:
    @contextlib.contextmanager
    def inject(n: int) -> Iterator[None]:
        arm(n)
        try:
            yield
            torch.cuda.synchronize()
        finally:
            arm(0)

    tried, wrong = 0, []
    for recipe in recipes_of("cuda"):
        for dtype in DTYPES:
            for how in hows_of(recipe):
                what = f"{recipe} {dtype} {how}"
                try:
                    with Layer(recipe, "cuda", dtype, how) as one:
                        one.call()  # plans, and what is loaded once
                        one.start_over(one.own())
                        tried += check_recovers(one, inject, errors, iter(range(1, most)), what)
                except Exception as error:
                    wrong.append(f"{what}: {error!r}"[:500])
    return {"tried": tried, "errors": len(wrong), "first": wrong[:5]}


def main() -> int:
    mode, path = sys.argv[1:]
    library = ctypes.CDLL(path)
    if mode != "launch":
        library.faults_what.restype = ctypes.c_char_p
        allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "faults_alloc", "faults_free")
        torch.cuda.memory.change_current_allocator(allocator)
    number = ctypes.c_int64
    if mode == "poison":
        row = poison(library)
    elif mode == "memory":
        arm = lambda n: library.faults_fail_at(number(n))  # noqa: E731
        row = failing(arm, (torch.OutOfMemoryError,), 100)
    else:
        arm = lambda n: library.faults_launch_at(number(n))  # noqa: E731
        row = failing(arm, (RuntimeError,), 100)
    row = {"bench": "sanitizer", "name": mode, "passed": row["errors"] == 0, **row}
    print(json.dumps(row), flush=True)
    return 0 if row["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
