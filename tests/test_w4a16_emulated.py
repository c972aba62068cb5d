"""Tests of the GEMM with packed FP4 weights, without a GPU: its sources are compiled for the CPU
(emulation/w4a16/instructions.cuh), where copies come as late or as early as they may and a
cluster's threads run in any order. The hardware's memory model is for the tests marked gpu."""

from __future__ import annotations

import ctypes
import itertools
import pathlib
import random
import re
import shutil
import subprocess

import pytest
import torch
from emulated import CSRC, HERE, cuda_headers
from test_w4a16 import weights
from torch import Tensor

from narrowfloat import w4a16
from narrowfloat.formats import padded32
from narrowfloat.reference import fp4

BF16 = torch.bfloat16
REALS = {torch.float32: 0, BF16: 1, torch.float16: 2}
ROUNDING = {torch.float32: 1e-6, BF16: 2.0**-8, torch.float16: 2.0**-10}
SHARED = {"sm_90": 232448, "sm_89": 101376}


class Job(ctypes.Structure):
    """csrc/w4a16/matmul.h, FP4Matmul."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in "mnk"),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("bias_type", ctypes.c_int),
        ("y", ctypes.c_void_p),
        ("y_type", ctypes.c_int),
        ("constant", ctypes.c_bool),
    ]


class Call(ctypes.Structure):
    """emulation/w4a16_entry.cpp."""

    _fields_ = [
        ("job", Job),
        *(
            (name, ctypes.c_int64)
            for name in (
                "shared_bytes", "warp_tiles", "warps", "split", "row_groups", "slab", "stages",
                "blocks", "late_copies", "order",
            )
        ),
    ]  # fmt: skip


class TilesCall(ctypes.Structure):
    """emulation/w4a16_entry.cpp."""

    _fields_ = [
        ("job", Job),
        *(
            (name, ctypes.c_int64)
            for name in (
                "multiprocessors", "tokens", "warpgroups", "row_tiles", "split", "depth", "stages",
                "late_copies", "order",
            )
        ),
    ]  # fmt: skip


# found by the entry, and by one another, in the place of those in csrc
REWRITTEN = (
    "kernels.cuh", "few_tokens.cu", "more_tokens.cu", "unpack.cu", "matmul.cpp", "tiles.cu",
    "tiles.cuh", "tiles_plan.cpp",
)  # fmt: skip


def rewritten(sources: dict[str, str]) -> dict[str, str]:
    """Each pattern is there, in one of the files at least."""
    for pattern, by in (
        (r"extern __shared__ uint4 shared_words\[\];",
         "uint4* const shared_words = cluster_on_cpu::current->block->shared.data();"),
        (r"NF_CUDA\(cudaLaunchKernelEx\(&config, (fp4_kernel\([^()]*\)), p\)\);",
         r"cluster_on_cpu::launch(\1, config.gridDim.x, config.blockDim.x,"
         " config.dynamicSmemBytes, plan.split, p);"),
        (r"NF_CUDA\(cudaLaunchKernelEx\(&config, (arrange|multiply), p\)\);",
         r"cluster_on_cpu::launch(\1, config.gridDim.x, config.blockDim.x,"
         " config.dynamicSmemBytes, 1, p);"),
        (r"narrowfloat_fp4_unpack<<<([^;]*), (\w+), 0, stream>>>\(",
         r"cluster_on_cpu::launch(&narrowfloat_fp4_unpack, \1, \2, 0, 1, "),
        (r"const FP4Device facts = fp4_device\(device\);", "const FP4Device facts{};"),
        (r"NF_CUDA\(cudaGetLastError\(\)\);", ""),
        (r"(?<![\w.])gridDim", "cluster_on_cpu::grid"),
        (r"(?<![\w.])blockDim", "cluster_on_cpu::block_size"),
    ):  # fmt: skip
        assert any(re.search(pattern, source) for source in sources.values()), pattern
        sources = {name: re.sub(pattern, by, source) for name, source in sources.items()}
    for name, source in sources.items():
        assert "<<<" not in source and "cudaLaunchKernelEx" not in source, name
    return sources


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    headers, compiler = cuda_headers(), shutil.which("g++")
    if headers is None or compiler is None:
        pytest.skip("needs g++ and the CUDA headers")
    folder: pathlib.Path = tmp_path_factory.mktemp("fp4_matmul")
    (folder / "w4a16").mkdir()
    for name, source in rewritten({n: (CSRC / "w4a16" / n).read_text() for n in REWRITTEN}).items():
        (folder / "w4a16" / name).write_text(source)
    command = [
        compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-w", "-ffp-contract=off",
        "-Wl,-Bsymbolic",
        f"-I{folder}", f"-I{HERE / 'emulation'}", f"-I{CSRC}", f"-isystem{headers}",
        str(HERE / "emulation" / "w4a16_entry.cpp"), "-o", str(folder / "fp4_matmul.so"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = ctypes.CDLL(str(folder / "fp4_matmul.so"))
    for function in (loaded.run_fp4_matmul, loaded.run_fp4_tiles, loaded.run_fp4_unpack):
        function.restype = ctypes.c_char_p
    return loaded


def at(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


class Problem:
    def __init__(self, n: int, k: int, m: int, nan: bool = False) -> None:
        self.n, self.k, self.m = n, k, m
        scales = torch.randint(0, 127, (n, padded32(k) // 16), dtype=torch.uint8)
        middling = torch.randint(40, 70, scales.shape, dtype=torch.uint8)
        scales = torch.where(torch.rand(scales.shape) < 0.8, middling, scales)
        if nan and k:
            scales[n // 2, 0] = 127
        codes, tiled = weights(n, k, "cpu", scales)
        self.packed = w4a16.pack(codes, tiled, n, k)
        self.w = fp4.unpacked(codes, tiled, n, k)
        self.x = torch.randn(m, k).to(BF16)
        self.scale = torch.tensor([0.37])

    def run(
        self,
        library: ctypes.CDLL,
        out: torch.dtype,
        bias_dtype: torch.dtype | None,
        stride: int,
        constant: bool,
        **plan: int,
    ) -> bool:
        """Whether there is such a plan; what it computes is asserted to be right. A plan with
        multiprocessors is one of tiles."""
        x = torch.full((self.m, stride), float("nan"), dtype=BF16)
        x[:, : self.k] = self.x
        bias = None if bias_dtype is None else torch.randn(self.n).to(bias_dtype)
        y = torch.full((self.m, self.n), -777.0, dtype=out)
        job = Job(
            at(x), stride, at(self.packed), self.m, self.n, self.k, at(self.scale), at(bias),
            REALS[bias_dtype or torch.float32], at(y), REALS[out], constant,
        )  # fmt: skip
        if "multiprocessors" in plan:
            problem = library.run_fp4_tiles(ctypes.byref(TilesCall(job, **plan)))
        else:
            problem = library.run_fp4_matmul(ctypes.byref(Call(job, **plan)))
        if problem == b"no plan":
            return False
        assert problem is None, (problem, plan)
        want = self.x.double() @ self.w.double().t() * self.scale.double()
        size = self.x.double().abs() @ self.w.double().abs().t() * self.scale.double()
        if bias is not None:
            want, size = want + bias.double(), size + bias.double().abs()
        want = torch.where(want.abs() > torch.finfo(out).max, want.to(out).double(), want)
        near = (y.double() - want).abs() <= ROUNDING[out] * want.abs() + 1e-6 * size + 1e-7
        same = near | (want.isnan() & y.isnan()) | (want == y.double())
        assert same.all(), (self.n, self.k, self.m, plan, (~same).nonzero()[:4])
        return True


@pytest.mark.parametrize("n, k", [(32, 128), (33, 100), (70, 300), (1, 1)])
def test_unpack(library: ctypes.CDLL, n: int, k: int) -> None:
    p = Problem(n, k, 1)
    rows, cols, _ = p.packed.shape
    operand = torch.full((rows * 32, cols * 128), -1.0, dtype=BF16)
    alpha = torch.full((2,), -1.0)
    arguments = (at(p.packed), ctypes.c_int64(n), ctypes.c_int64(k), at(operand), at(p.scale))
    pointers = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments]
    assert library.run_fp4_unpack(*pointers, ctypes.c_void_p(at(alpha))) is None
    assert torch.equal(operand[:n, :k].float(), p.w)
    assert not operand[n:].any() and not operand[:, k:].any()
    assert alpha.tolist() == [p.scale.item(), 0.0]


@pytest.mark.parametrize("m", [1, 8, 9, 32, 64])
@pytest.mark.parametrize("n, k", [(32, 128), (33, 100), (200, 1024), (1, 1), (40, 0)])
def test_as_planned(library: ctypes.CDLL, n: int, k: int, m: int) -> None:
    p = Problem(n, k, m)
    for shared_bytes, late in itertools.product(SHARED.values(), (0, 1)):
        plan = dict.fromkeys((name for name, _ in Call._fields_[1:]), 0)
        plan |= {"shared_bytes": shared_bytes, "late_copies": late}
        assert p.run(library, torch.float32, None, max(k, 1), bool(late), **plan)


@pytest.mark.parametrize("streamed", [False, True])
def test_any_plan(library: ctypes.CDLL, streamed: bool) -> None:
    """Rings, slabs, stages and splits that wrap and that are not filled, in any order of
    threads."""
    choose = random.Random(0)
    ran = 0
    for i in range(60):
        n = choose.choice([1, 31, 33, 64, 100, 300, 520])
        k = choose.choice([1, 100, 129, 256, 1024, 1500, 2048])
        m = choose.choice([1, 8, 9, 17, 32, 33, 64] if streamed else [1, 2, 8, 9, 11, 16])
        p = Problem(n, k, m, nan=i % 5 == 0)
        split, warps = choose.choice([1, 1, 2, 4, 8]), choose.choice([4, 8, 16])
        row_groups = choose.choice([r for r in (1, 2, 4, 8) if r <= min(split, warps)])
        warp_tiles = 0
        if streamed:
            warp_tiles = choose.choice([1, 2] if m > 16 else [1])
            row_groups = choose.choice([1, 2, 3, 7])
            warps = row_groups * choose.choice([1, 2, 4] if row_groups < 3 else [1, 2])
        ran += p.run(
            library,
            choose.choice(list(REALS)),
            choose.choice([None, *REALS]),
            k + choose.choice([0, 8, 3]),
            choose.random() < 0.5,
            shared_bytes=choose.choice(list(SHARED.values())),
            warp_tiles=warp_tiles,
            warps=warps,
            split=split,
            row_groups=row_groups,
            slab=choose.choice([0, 1, 2, 3]),
            stages=choose.choice([0, 2, 3, 4]),
            blocks=choose.choice([0, 1, 9, 2]),
            late_copies=choose.randrange(2),
            order=choose.randrange(3),
        )
    assert ran > 40


@pytest.mark.parametrize("m", [16, 17, 130])
@pytest.mark.parametrize("n, k", [(32, 128), (33, 100), (200, 1024), (1, 1)])
def test_tiles_as_planned(library: ctypes.CDLL, n: int, k: int, m: int) -> None:
    p = Problem(n, k, m)
    plan = dict.fromkeys((name for name, _ in TilesCall._fields_[1:]), 0)
    plan |= {"multiprocessors": 3, "late_copies": 1}
    assert p.run(library, torch.float32, None, k, True, **plan)


def test_any_tiles(library: ctypes.CDLL) -> None:
    """Tiles that a block has to itself and that several share, in any order of blocks and threads;
    stages that wrap and that are not filled."""
    choose = random.Random(1)
    ran = 0
    for i in range(40):
        tokens, warpgroups, row_tiles = choose.choice(
            [(16, 2, 1), (16, 4, 1), (32, 2, 1), (64, 4, 1), (128, 2, 1), (128, 2, 2)]
        )
        n = choose.choice([1, 31, 100, 130, 256, 300, 516])
        k = choose.choice([1, 100, 129, 256, 700, 1024, 1500])
        m = choose.choice([1, tokens - 1, tokens, tokens + 1, 2 * tokens])
        p = Problem(n, k, m, nan=i % 5 == 0)
        ran += p.run(
            library,
            choose.choice(list(REALS)),
            choose.choice([None, *REALS]),
            k + choose.choice([0, 8, 3]),
            choose.random() < 0.5,
            multiprocessors=choose.choice([1, 2, 3, 5, 8]),
            tokens=tokens,
            warpgroups=warpgroups,
            row_tiles=row_tiles,
            split=choose.choice([1, 2, 3, 8]),
            depth=choose.choice([0, 1, 2, 3]),
            stages=choose.choice([0, 2, 3]),
            late_copies=choose.randrange(2),
            order=choose.randrange(3),
        )
    assert ran == 40
