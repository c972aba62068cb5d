"""Decides whether the compiled module narrowfloat._C can be used with the torch that is here.

`module` is _C or None. Where it is None, `problem` says why, and what to type.
"""

import importlib
import re
from pathlib import Path
from types import ModuleType

import torch  # before _C: it loads libtorch, libcudart and libcublasLt, which _C finds by soname

__all__ = ["module", "problem", "require"]

_OLDEST_TORCH = (2, 10)
# The lines of README's install table: no wheel is published yet that could be named instead.
_BUILD = "pip install --no-build-isolation --no-deps --force-reinstall ."
_TOOLS = "ninja 'pybind11>=3.0.1' 'setuptools>=77.0.3' packaging"


def _here() -> str:
    return f"torch {torch.__version__} (CUDA {torch.version.cuda})"


def _rebuild() -> str:
    """What to type, in a checkout, for a binary that fits the torch that is here."""
    cuda = str(torch.version.cuda)
    if int(cuda.split(".")[0]) < 13:  # the package index has a whole nvcc from CUDA 13 on
        nvcc = f"export CUDA_HOME=<a toolkit of CUDA {cuda} or 12.9>"
    else:
        nvcc = f"pip install 'cuda-toolkit[nvcc,cccl]=={cuda}.*' {_TOOLS}"
    return f"in a checkout make build, or {nvcc}; {_BUILD}"


def _torch_problem() -> str | None:
    """Why no binary at all could run on this torch."""
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST_TORCH:
        return f"expected torch 2.10 or newer, got {_here()} (pip install --upgrade 'torch>=2.10')"
    if torch.version.cuda is None:
        return (
            f"expected a CUDA build of torch, got {_here()}, which is not one "
            "(pip install --force-reinstall 'torch>=2.10', on Linux a CUDA build)"
        )
    return None


def _missing() -> str:
    """Why Python finds no _C: none was built, or one for another Python."""
    folder = Path(__file__).parent
    others = ", ".join(sorted(p.name for p in folder.glob("_C.*.so")))
    if others:
        return f"expected a binary for this Python in {folder}, got {others} ({_rebuild()})"
    return f"expected the compiled module _C in {folder}, got an install without it ({_rebuild()})"


def _load() -> tuple[ModuleType | None, str | None]:
    if problem := _torch_problem():
        return None, problem
    try:
        module = importlib.import_module("narrowfloat._C")
    except ModuleNotFoundError as e:
        if e.name != "narrowfloat._C":
            raise
        return None, _missing()
    except ImportError as e:  # the libcudart.so.N of another CUDA, a too old libstdc++
        return None, f"expected a binary that loads with {_here()}, got: {e} ({_rebuild()})"
    built = module.cuda_version() // 1000
    if int(str(torch.version.cuda).split(".")[0]) != built:
        return None, f"expected a binary for {_here()}, got one for CUDA {built} ({_rebuild()})"
    return module, None


module, problem = _load()
problem = problem and f"narrowfloat._C: {problem}"


def require() -> ModuleType:
    """The compiled module; RuntimeError with `problem` where it cannot be used."""
    if module is None:
        raise RuntimeError(problem)
    return module
