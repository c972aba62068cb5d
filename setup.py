"""How narrowfloat._C is compiled: which nvcc, which architectures, which CUDA libraries.

Read while building, never at run time:
  NARROWFLOAT_CUDA_ARCHS  the architectures to compile for, such as "90a" or "sm_89 compute_90"
  NARROWFLOAT_NO_CUDA=1   install without the compiled part (everything then runs on the CPU)
  CUDA_HOME, CUDA_PATH    the CUDA toolkit to use; MAX_JOBS: how many files to compile at once
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).resolve().parent
# pip and uv run the other commands to read metadata, where neither torch nor nvcc need exist.
BUILD_COMMANDS = {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop", "install"}
SOURCES = (".cpp", ".cu")
TORCH_TARGET = 0x020A000000000000  # one byte a part: torch 2.10, the oldest that the binary runs on


def version() -> str:
    text = (ROOT / "src/narrowfloat/_version.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.M)
    if found is None:
        raise SystemExit("narrowfloat: src/narrowfloat/_version.py has no __version__ line")
    return found[1]


# ---- architectures ----


def default_archs(cuda: tuple[int, int]) -> list[str]:
    """Every chip that the package promises, as far as this nvcc knows it."""
    if cuda >= (12, 9):  # the first with family targets: 100f is 100 and 103, 120f is 120 and 121
        return ["sm_89", "sm_90a", "sm_100f", "sm_120f", "compute_120"]
    if cuda >= (12, 8):
        return ["sm_89", "sm_90a", "sm_100a", "sm_120a", "compute_120"]
    return ["sm_89", "sm_90a", "compute_90"]


def parse_archs(text: str) -> list[str]:
    """ "90a", "9.0a", "sm_90a" are machine code, "compute_120" is PTX, "90+PTX" is both."""
    archs: list[str] = []
    for word in re.split(r"[\s,;]+", text.strip()):
        m = re.fullmatch(r"(sm_|compute_)?(\d+?)\.?(\d)([af]?)(\+PTX)?", word, re.I)
        if m is None or (m[1] and m[5]):
            raise SystemExit(
                f"narrowfloat: NARROWFLOAT_CUDA_ARCHS: expected names such as 90a, 120f, sm_89 or "
                f"compute_120, got {word!r} in {text!r}"
            )
        name = m[2] + m[3] + m[4].lower()
        names = [f"sm_{name}", f"compute_{name}"] if m[5] else [(m[1] or "sm_").lower() + name]
        archs += [a for a in names if a not in archs]
    return archs


def gencodes(archs: list[str]) -> list[str]:
    return [f"-gencode=arch=compute_{a.split('_')[1]},code={a}" for a in archs]


# ---- the compiler and the libraries ----


def nvidia_roots() -> list[Path]:
    """The folders site-packages/nvidia of this Python: a namespace package, so maybe several."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []


def nvcc_info(nvcc: Path) -> tuple[Path, tuple[int, int]] | None:
    """(toolkit folder, version) as nvcc itself tells them, since nvcc on PATH may be a script."""

    def said(*args: str) -> str:
        done = subprocess.run([str(nvcc), *args], capture_output=True, text=True)
        return done.stdout + done.stderr

    try:
        release = re.search(r"release (\d+)\.(\d+)", said("--version"))
        top = re.search(
            r"^#\$ TOP=(.+)$",
            said("--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull),
            re.M,
        )
    except OSError:
        return None
    if release is None or top is None:
        return None
    return Path(top[1].strip()).resolve(), (int(release[1]), int(release[2]))


def nvcc_candidates(torch_cuda: tuple[int, int]) -> list[Path]:
    major, minor = torch_cuda
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found = [Path(home) / "bin/nvcc" for home in homes]
    found += [root / f"cu{major}/bin/nvcc" for root in nvidia_roots()]
    on_path = shutil.which("nvcc")
    found += [Path(on_path)] if on_path else []
    found += [Path(f"/usr/local/cuda-{major}.{minor}/bin/nvcc")]
    found += [Path(f"/usr/local/cuda-{major}/bin/nvcc"), Path("/usr/local/cuda/bin/nvcc")]
    return list(dict.fromkeys(found))


def find_toolkit(torch_cuda: tuple[int, int]) -> tuple[Path, tuple[int, int]]:
    """The first toolkit of torch's CUDA major, or SystemExit with all that was looked at."""
    major, minor = torch_cuda
    looked = []
    for nvcc in nvcc_candidates(torch_cuda):
        info = nvcc_info(nvcc) if nvcc.exists() else None
        if info and info[1][0] == major:
            return info
        why = "not there" if not nvcc.exists() else "does not run"
        looked.append(f"  {nvcc}: " + (f"CUDA {info[1][0]}.{info[1][1]}" if info else why))
    # The package index has a working nvcc from CUDA 13 on; for 12 it has only parts of one.
    cure = (
        f"  pip install 'cuda-toolkit[nvcc,cccl]=={major}.{minor}.*' ninja 'pybind11>=3.0.1'\n"
        if major >= 13
        else f"  install the CUDA {major} toolkit (12.9 for every architecture), then\n"
        "  export CUDA_HOME=<its folder>\n"
    )
    raise SystemExit(
        f"\nnarrowfloat: no nvcc of CUDA {major} found, and torch here is built for CUDA "
        f"{major}.{minor}. Looked at (CUDA_HOME and CUDA_PATH, site-packages/nvidia, PATH, "
        "/usr/local):\n" + "\n".join(looked) + "\nTwo ways out. Get the compiler:\n" + cure + "  "
        "pip install --no-build-isolation narrowfloat\n"
        "or install without the compiled part, for the CPU alone:\n"
        "  NARROWFLOAT_NO_CUDA=1 pip install --no-build-isolation narrowfloat\n"
    )


def find_file(name: str, dirs: list[Path]) -> Path:
    for d in dirs:
        if (d / name).exists():
            return d
    raise SystemExit(
        f"narrowfloat: {name} not found in\n  " + "\n  ".join(map(str, dirs)) + "\n"
        "(a CUDA build of torch from the package index brings it: pip install --force-reinstall "
        "torch)"
    )


def default_jobs() -> str:
    """As many compilers at once as there are cores, and 4 GiB of free memory for each."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
        kib = int(re.search(r"MemAvailable:\s+(\d+)", meminfo)[1])  # type: ignore[index]
    except (OSError, TypeError):
        kib = 8 << 20
    return str(max(1, min(len(os.sched_getaffinity(0)), kib // (4 << 20))))


# ---- the extension ----


def torch_cuda_version() -> tuple[int, int]:
    """The CUDA that the torch here is built for, or SystemExit with the ways out."""
    no_cuda = "NARROWFLOAT_NO_CUDA=1 pip install --no-build-isolation narrowfloat"
    try:
        import torch
    except ImportError as e:
        raise SystemExit(
            f"\nnarrowfloat: torch is needed to build, and {sys.executable} cannot import it ({e})."
            "\nTwo ways out. Install it, then build against it:\n"
            "  pip install 'torch>=2.10' ninja 'pybind11>=3.0.1' 'setuptools>=77.0.3'\n"
            "  pip install --no-build-isolation narrowfloat\n"
            f"or install without the compiled part, for the CPU alone:\n  {no_cuda}\n"
        ) from e
    if torch.version.cuda is None:
        raise SystemExit(
            f"\nnarrowfloat: torch {torch.__version__} in {Path(torch.__file__).parent} is not a "
            "CUDA build (torch.version.cuda is None), so the compiled part cannot be built.\n"
            "Two ways out. Install a CUDA build of torch, then build against it:\n"
            "  pip install --force-reinstall 'torch>=2.10'   # the default build on Linux\n"
            "  pip install --no-build-isolation narrowfloat\n"
            f"or install without the compiled part, for the CPU alone:\n  {no_cuda}\n"
        )
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


def extension() -> dict[str, Any]:
    """The arguments of setup() that build narrowfloat._C."""
    torch_cuda = torch_cuda_version()
    top, cuda = find_toolkit(torch_cuda)
    os.environ["CUDA_HOME"] = str(top)  # cpp_extension reads it once, when imported
    # ninja lies beside the Python of a virtual environment that need not be an active one.
    os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", "")
    os.environ["MAX_JOBS"] = os.environ.get("MAX_JOBS") or default_jobs()
    import pybind11
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    major = cuda[0]
    cudart, cublaslt = f"libcudart.so.{major}", f"libcublasLt.so.{major}"
    wheels = nvidia_roots()
    libs = [top / "lib64", top / "lib", *sorted(top.glob("targets/*/lib"))]
    libs += [d for r in wheels for d in (r / f"cu{major}/lib", r / "cuda_runtime/lib")]
    libs += [r / "cublas/lib" for r in wheels]
    headers = [top / "include", *sorted(top.glob("targets/*/include"))]
    headers += [d for r in wheels for d in (r / f"cu{major}/include", r / "cublas/include")]
    lib_dirs = dict.fromkeys(find_file(name, libs) for name in (cudart, cublaslt))

    archs_asked = os.environ.get("NARROWFLOAT_CUDA_ARCHS")
    archs = parse_archs(archs_asked) if archs_asked else default_archs(cuda)
    print(f"narrowfloat: nvcc {cuda[0]}.{cuda[1]} in {top}, for {' '.join(archs)}")
    both = ["-O3", "-std=c++20", f"-DTORCH_TARGET_VERSION=0x{TORCH_TARGET:016x}", "-DUSE_CUDA"]
    cxx = [*both, "-g0", "-fvisibility=hidden"]
    cxx += [f'-DNARROWFLOAT_VERSION="{version()}"', f'-DNARROWFLOAT_ARCHS="{" ".join(archs)}"']
    nvcc = [*both, *gencodes(archs), "-Xcompiler=-fvisibility=hidden,-g0"]
    nvcc += [f"--threads={min(len(os.sched_getaffinity(0)), len(archs))}"]
    if cuda >= (13, 0):  # on 12 it would ask for a newer driver
        nvcc.append("--compress-mode=size")

    runpath = ["torch/lib", f"nvidia/cu{major}/lib"]
    if major == 12:
        runpath += ["nvidia/cuda_runtime/lib", "nvidia/cublas/lib"]
    ext = CUDAExtension(
        "narrowfloat._C",
        sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in SOURCES),
        # pip's pybind11 goes first: torch's own copy refuses TORCH_TARGET_VERSION before 2.13.
        include_dirs=[
            pybind11.get_include(),
            str(ROOT / "csrc"),  # ninja compiles from another folder
            str(find_file("cuda_runtime.h", headers)),
            str(find_file("cublasLt.h", headers)),
        ],
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        extra_link_args=[
            *(f"-L{d}" for d in lib_dirs),
            f"-l:{cudart}",
            f"-l:{cublaslt}",
            "-Wl,-s",
            "-Wl,-rpath," + ":".join(f"$ORIGIN/../{d}" for d in runpath),
        ],
    )
    # torch_python would tie the binary to one torch; cudart is linked by its soname above.
    ext.libraries = [lib for lib in ext.libraries if lib not in ("torch_python", "cudart")]
    return {"ext_modules": [ext], "cmdclass": {"build_ext": BuildExtension}}


if __name__ == "__main__":
    building = BUILD_COMMANDS & set(sys.argv[1:])
    no_cuda = os.environ.get("NARROWFLOAT_NO_CUDA", "0") not in ("", "0")
    setup(**(extension() if building and not no_cuda else {}))
