"""Decides how kernels and their host code are compiled for the CPU, for the tests that run them
there (emulation/cuda_on_cpu.h)."""

from __future__ import annotations

import ctypes
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterable

import pytest
import torch

HERE = pathlib.Path(__file__).parent
CSRC = HERE.parent / "csrc"


def headers_with(*names: str) -> pathlib.Path | None:
    """Beside torch (its wheels bring them) or beside nvcc."""
    places = [
        *pathlib.Path(torch.__file__).parents[1].glob("nvidia/cu*/include"),
        *pathlib.Path("/usr/local").glob("cuda*/include"),
    ]
    return next((p for p in places if all((p / name).exists() for name in names)), None)


def cuda_headers() -> pathlib.Path | None:
    return headers_with("cuda_fp8.h", "crt/host_defines.h")  # the second comes with nvcc


def rewritten(source: str) -> str:
    """Launches of all kinds as calls; its own headers stay."""
    source = source.replace("#include <cooperative_groups.h>\n", "")
    source = re.sub(
        r"([\w:]+(?:<[^;{}]*?>)?)\s*<<<\s*([\w.]+|static_cast<unsigned>\(\w+\))\s*,\s*(\w+)\s*,"
        r"[^>]*>>>\(([^;]*)\);",
        r"cuda_on_cpu::launch(&\1, \2, \3, \4);",
        source,
    )
    source = re.sub(
        r"NF_CUDA\(cudaLaunchCooperativeKernel\([^;]*\);",
        "cuda_on_cpu::launch(kernel, blocks.x, kThreads, params); (void)args;",
        source,
    )
    sizes = re.search(r"config\{dim3\((\w+)\), dim3\((\w+)\)", source)
    if (
        sizes is not None
    ):  # (the emulation's gridDim is a macro: the struct's member cannot be read)
        source = re.sub(
            r"NF_CUDA\(cudaLaunchKernelEx\(&config,\s*([^;]*),\s*(\w+)\)\);",
            rf"cuda_on_cpu::launch(&\1, {sizes[1]}, {sizes[2]}, \2);",
            source,
        )
    source = re.sub(r"NF_CUDA\(cudaFuncSetAttribute\([^;]*\);", "", source)
    source = re.sub(
        r"extern __shared__ __align__\(16\) unsigned char (\w+)\[\];",
        r"unsigned char* const \1 = cuda_on_cpu::launch_shared();",
        source,
    )
    assert "<<<" not in source and not re.search("cudaLaunch[A-Za-z]*Kernel", source)
    return source.replace("&kernel", "kernel")


def with_host_code() -> list[str]:
    """What build() needs beside for code that includes torch's stable headers, and cuBLASLt's."""
    place, headers = pathlib.Path(torch.__file__).parent, headers_with("cublasLt.h")
    if headers is None:
        pytest.skip("needs cuBLASLt's headers")
    return [
        f"-idirafter{headers}",  # after those that nvcc came with
        f"-isystem{place / 'include'}", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA",
        f"-L{place / 'lib'}", f"-Wl,-rpath,{place / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


def build(
    folder: pathlib.Path, entry: str, kernels: Iterable[str], beside: Iterable[str] = ()
) -> ctypes.CDLL:
    """emulation/<entry> with csrc/<kernels>.cu rewritten beside it, loaded."""
    headers, compiler = cuda_headers(), shutil.which("g++")
    if headers is None or compiler is None:
        pytest.skip("needs g++ and the CUDA headers")
    for name in kernels:
        (folder / f"{name}.rewritten.h").write_text(rewritten((CSRC / f"{name}.cu").read_text()))
    library = folder / "kernels.so"
    command = [
        compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-w",
        "-ffp-contract=off",  # nvcc is kept from fusing by there being nothing to fuse
        "-Wl,-Bsymbolic",  # our cudart, not torch's
        f"-I{folder}", f"-I{HERE / 'emulation'}", f"-I{CSRC}", f"-isystem{headers}",
        str(HERE / "emulation" / entry), "-o", str(library), *beside,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return ctypes.CDLL(str(library))
