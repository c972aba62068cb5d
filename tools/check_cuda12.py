"""Compiles csrc as far as CUDA 12.9 can be had from the package index, without making anything.

PYTHON tools/check_cuda12.py [--headers DIR]    # PYTHON has torch and pybind11

The index has no whole nvcc of CUDA 12: it has the headers and ptxas. So the C++ files are compiled
against those headers, and what they call must be in the libcudart of the oldest CUDA 12 that torch
has, which the wheels load too. Each kernel is compiled with these headers by the nvcc that is here,
of CUDA 13, whose PTX the ptxas of 12.9 then assembles for each architecture. What 12.9's own front
end makes of them is seen by the workflow `wheels` alone.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from setup_env import setup_py  # noqa: E402

PACKAGES = ["cuda-runtime", "cublas", "cuda-nvcc", "cuda-cccl"]
OLDEST = "12.6"  # torch's cu126, which loads what 12.9 compiled
NEWEST_PTX = "8.8"  # that ptxas of 12.9 takes
setup = setup_py()


def download(to: Path, *names: str) -> None:
    """Into a folder of its own: beside torch they would replace the libraries that it loads."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--upgrade", "--target", str(to)]
    if subprocess.run([*command, *names]).returncode:
        sys.exit(f"cannot be had: {' '.join(names)}")


def run(*command: str) -> str | None:
    """What a compiler complained of, or None."""
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stdout + done.stderr)[-2000:] if done.returncode else None


def called(binary: Path) -> set[str]:
    """The functions of the CUDA runtime that an object or a shared library needs."""
    dynamic = ["-D"] if ".so" in binary.name else []
    command = ["nm", *dynamic, "--undefined-only", str(binary)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r" U (_*cuda[A-Z]\w*)", listing))


def exported(library: Path) -> set[str]:
    command = ["nm", "-D", "--defined-only", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r" [A-Za-z] (\w+)", listing))


def check_host(file: Path, flags: list[str], headers: Path, offered: set[str]) -> str | None:
    with tempfile.TemporaryDirectory() as temporary:
        made, binary = Path(temporary) / "made.d", Path(temporary) / "made.o"
        command = ["c++", "-c", *flags, "-MD", "-MF", str(made), str(file), "-o", str(binary)]
        if complaint := run(*command):
            return complaint
        words = made.read_text().split()
        newer = called(binary) - offered
    # Else it was checked against the headers of some other CUDA that the machine has.
    used = [Path(w).resolve() for w in words if w.endswith(("/cuda_runtime.h", "/cublasLt.h"))]
    if other := [str(u) for u in used if not u.is_relative_to(headers)]:
        return f"headers from elsewhere: {', '.join(other)}"
    return f"not in libcudart of CUDA {OLDEST}: {', '.join(sorted(newer))}" if newer else None


def check_kernels(
    file: Path, arch: str, nvcc: Path, ptxas: Path, flags: list[str]
) -> tuple[str, str] | None:
    number = arch.split("_")[1]
    with tempfile.TemporaryDirectory() as temporary:
        ptx = Path(temporary) / "kernels.ptx"
        made = f"-gencode=arch=compute_{number},code=compute_{number}"
        if complaint := run(str(nvcc), "-ptx", "-O3", *flags, made, str(file), "-o", str(ptx)):
            return f"{file.name} for {arch}", complaint
        text = re.sub(r"^\.version .+$", f".version {NEWEST_PTX}", ptx.read_text(), flags=re.M)
        ptx.write_text(text)
        complaint = run(str(ptxas), f"-arch=sm_{number}", str(ptx), "-o", str(ptx) + ".cubin")
        return (f"{file.name} for {arch}, ptxas of 12.9", complaint) if complaint else None


def find_nvcc() -> Path | None:
    """Of any CUDA that knows all architectures."""
    for nvcc in setup.nvcc_candidates((13, 0)):
        info = setup.nvcc_info(nvcc) if nvcc.exists() else None
        if info and info[1] >= (12, 9):
            return nvcc
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--headers", type=Path, help="a folder to keep them in, or that has them")
    args = parser.parse_args()
    nvcc = find_nvcc()  # first: torch's module of the next line would name it in CUDA_HOME
    import pybind11
    from torch.utils.cpp_extension import include_paths

    failed: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        headers = (args.headers or Path(temporary)).resolve()
        if not (headers / "nvidia").is_dir():
            download(headers, *(f"nvidia-{name}-cu12==12.9.*" for name in PACKAGES))
        oldest = headers / f"oldest/nvidia/cuda_runtime/lib/libcudart.so.{OLDEST.split('.')[0]}"
        if not oldest.exists():
            download(headers / "oldest", f"nvidia-cuda-runtime-cu12=={OLDEST}.*")
        offered = exported(oldest)
        cuda = sorted(headers.glob("nvidia/*/include"))
        flags = ["-std=c++20", "-DUSE_CUDA", "-DTORCH_EXTENSION_NAME=_C"]
        flags += [f"-DTORCH_TARGET_VERSION=0x{setup.TORCH_TARGET:016x}"]
        flags += ['-DNARROWFLOAT_VERSION=""', '-DNARROWFLOAT_ARCHS=""']
        folders = [ROOT / "csrc", pybind11.get_include(), *cuda, *include_paths("cpu")]
        flags += [f"-I{d}" for d in [*folders, sysconfig.get_path("include")]]
        hosts = sorted((ROOT / "csrc").rglob("*.cpp"))
        for file in hosts:
            if complaint := check_host(file, [*flags, "-fPIC"], headers, offered):
                failed.append((file.name, complaint))
        print(
            f"CUDA 12.9: {len(hosts) - len(failed)} of {len(hosts)} C++ files compile, and call "
            f"what CUDA {OLDEST} has"
        )
        if nvcc is None:
            print("no nvcc of CUDA 12.9 or newer here: the kernels were not looked at")
        else:
            ptxas = headers / "nvidia/cuda_nvcc/bin/ptxas"
            ptxas.chmod(0o755)
            kernels = sorted((ROOT / "csrc").rglob("*.cu"))
            archs = setup.default_archs((12, 9))
            with ThreadPoolExecutor(int(setup.default_jobs())) as pool:
                todo = [(f, a, nvcc, ptxas, flags) for f in kernels for a in archs]
                found = [c for c in pool.map(lambda t: check_kernels(*t), todo) if c]
            failed += found
            print(
                f"CUDA 12.9's headers and ptxas: {len(todo) - len(found)} of {len(todo)} compile "
                f"({len(kernels)} files of kernels, {len(archs)} architectures)"
            )
    for name, complaint in failed:
        print(f"{name}:\n{complaint}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
