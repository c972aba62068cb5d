"""Compiles csrc as far as CUDA 12.9 can be had from the package index, without making anything.

PYTHON tools/check_cuda12.py [--headers DIR]    # PYTHON has torch and pybind11

The index has no whole nvcc of CUDA 12: it has the headers and ptxas. So the C++ files are compiled
against those headers, and each kernel with them by the nvcc that is here, of CUDA 13, whose PTX the
ptxas of 12.9 then assembles for each architecture. What 12.9's own front end makes of them is seen
by the workflow `wheels` alone.
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
NEWEST_PTX = "8.8"  # that ptxas of 12.9 takes
setup = setup_py()


def download(to: Path) -> None:
    """Into a folder of its own: beside torch they would replace the libraries that it loads."""
    names = [f"nvidia-{name}-cu12==12.9.*" for name in PACKAGES]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--upgrade", "--target", str(to)]
    if subprocess.run([*command, *names]).returncode:
        sys.exit("the headers of CUDA 12.9 cannot be had")


def run(*command: str) -> str | None:
    """What a compiler complained of, or None."""
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stdout + done.stderr)[-2000:] if done.returncode else None


def check_host(file: Path, flags: list[str], headers: Path) -> str | None:
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "made.d"
        command = ["c++", "-fsyntax-only", *flags, "-MD", "-MF", str(made), str(file)]
        if complaint := run(*command):
            return complaint
        words = made.read_text().split()
    # Else it was checked against the headers of some other CUDA that the machine has.
    used = [Path(w).resolve() for w in words if w.endswith(("/cuda_runtime.h", "/cublasLt.h"))]
    other = [str(u) for u in used if not u.is_relative_to(headers)]
    return f"headers from elsewhere: {', '.join(other)}" if other else None


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
            download(headers)
        cuda = sorted(headers.glob("nvidia/*/include"))
        flags = ["-std=c++20", "-DUSE_CUDA", "-DTORCH_EXTENSION_NAME=_C"]
        flags += [f"-DTORCH_TARGET_VERSION=0x{setup.TORCH_TARGET:016x}"]
        flags += ['-DNARROWFLOAT_VERSION=""', '-DNARROWFLOAT_ARCHS=""']
        folders = [ROOT / "csrc", pybind11.get_include(), *cuda, *include_paths("cpu")]
        flags += [f"-I{d}" for d in [*folders, sysconfig.get_path("include")]]
        hosts = sorted((ROOT / "csrc").glob("*.cpp"))
        for file in hosts:
            if complaint := check_host(file, flags, headers):
                failed.append((file.name, complaint))
        print(f"CUDA 12.9: {len(hosts) - len(failed)} of {len(hosts)} C++ files compile")
        if nvcc is None:
            print("no nvcc of CUDA 12.9 or newer here: the kernels were not looked at")
        else:
            ptxas = headers / "nvidia/cuda_nvcc/bin/ptxas"
            ptxas.chmod(0o755)
            kernels = sorted((ROOT / "csrc").glob("*.cu"))
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
