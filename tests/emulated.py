"""Decides how kernels and their host code are compiled for the CPU, for the tests that run them
there (emulation/cuda_on_cpu.h)."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

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
        made = folder / f"{name}.rewritten.h"
        made.parent.mkdir(exist_ok=True)
        made.write_text(rewritten((CSRC / f"{name}.cu").read_text()))
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


# What of csrc the operators are made of; emulation/linear_entry.cpp stands in for the rest.
OPERATORS = ("api/tensors.cpp", "api/ops.cpp", "gemm/gemm.cpp", "gemm/scaled_mm.cpp",
             "gemm/epilogue.cu", "linear/*.cpp", "quantize/*.cpp", "quantize/*.cu")  # fmt: skip


def rewritten_host(source: str, place: str) -> str:
    """Host code for tensors on the CPU, its memory from emulation/host_on_cpu.h."""
    for old, new in (
        ("is_cuda()", "is_cpu()"),
        ("aoti_torch_device_type_cuda()", "aoti_torch_device_type_cpu()"),
        ("aoti_torch_empty_strided(", "host_on_cpu::empty_strided("),
        ("aoti_torch_get_current_cuda_stream(", "host_on_cpu::current_stream("),
        ("_LIBRARY_IMPL(narrowfloat, CUDA,", "_LIBRARY_IMPL(narrowfloat_emulated, CPU,"),
    ):
        source = source.replace(old, new)
    if place == "api/tensors.h":
        source, pieces = re.subn(
            r"bytes_ \+= [^;]*;", "bytes_ = host_on_cpu::piece(this, first, bytes);", source
        )
        assert pieces == 1, "where the pieces of a scratch are laid out"
    if place == "api/tensors.cpp":
        source, bases = re.subn(
            r"base_ = [^;]*data_ptr\(\)\);",
            "base_ = host_on_cpu::allocated(this, storage_->data_ptr());", source,
        )  # fmt: skip
        assert bases == 1, "where a scratch is allocated"
    return source


def build_operators(folder: pathlib.Path, csrc: pathlib.Path = CSRC) -> pathlib.Path:
    """A library that registers the operators in the namespace narrowfloat_emulated, for the CPU.

    Every file is compiled by itself, so that a test need not know of names in them that collide.
    """
    headers, compiler = cuda_headers(), shutil.which("g++")
    python = sysconfig.get_paths()["include"]
    pybind11 = importlib.util.find_spec("pybind11")
    if headers is None or compiler is None or not pathlib.Path(python, "Python.h").exists():
        pytest.skip("needs g++ and the headers of CUDA and Python")
    if pybind11 is None or pybind11.origin is None:
        pytest.skip("needs pybind11")
    place = pathlib.Path(torch.__file__).parent
    for path in csrc.rglob("*"):
        if path.suffix not in (".h", ".cuh", ".cpp", ".cu"):
            continue
        name = str(path.relative_to(csrc))
        made = folder / "csrc" / name
        made.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text()
        if path.suffix == ".cu":
            text = rewritten(text) if any(path.match(p) for p in OPERATORS) else ""
        made.write_text(rewritten_host(text, name))
    flags = [
        "-O1", "-std=c++20", "-fPIC", "-pthread", "-w", "-ffp-contract=off",
        f"-I{folder / 'csrc'}", f"-I{HERE / 'emulation'}", f"-isystem{headers}",
        f"-isystem{pathlib.Path(pybind11.origin).parent / 'include'}", f"-isystem{python}",
        f"-isystem{place / 'include'}",
        "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA",
    ]  # fmt: skip
    # fast_fibers.h has stacks of its own on x86-64
    emulation = (HERE / "emulation" / "cuda_on_cpu.h").read_text()
    if platform.machine() == "x86_64":
        emulation = emulation.replace("make_unique<char[]>(kStack)", "make_unique<char[]>(1)")
    (folder / "cuda_on_cpu.h").write_text(emulation)
    # what every unit includes, parsed once
    common = {}
    for kind, headers_of in (
        (".cu", ("fast_fibers.h", "cuda_on_cpu.h")),
        (".cpp", ("host_on_cpu.h",)),
    ):
        common[kind] = folder / f"all{kind}.h"
        common[kind].write_text("".join(f'#include "{name}"\n' for name in headers_of))
    sources = [p for pattern in OPERATORS for p in sorted((folder / "csrc").glob(pattern))]
    sources.append(HERE / "emulation" / "linear_entry.cpp")
    sources.sort(key=lambda p: p.name != "tensors.cpp")  # it takes longest, for pybind11

    def precompiled(header: pathlib.Path) -> None:
        run([compiler, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"])

    def compiled(source: pathlib.Path) -> pathlib.Path:
        made = folder / f"{source.parent.name}_{source.name}.o"
        before = ["-include", str(common[source.suffix]), "-x", "c++"]
        run([compiler, *flags, *before, "-c", str(source), "-o", str(made)])
        return made

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(precompiled, common.values()))
        objects = list(pool.map(compiled, sources))
    library = folder / "operators.so"
    run([
        compiler, "-shared", "-pthread", "-Wl,-Bsymbolic", *map(str, objects), "-o", str(library),
        f"-L{place / 'lib'}", f"-Wl,-rpath,{place / 'lib'}", "-ltorch_cpu", "-lc10",
    ])  # fmt: skip
    return library


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
