"""Faults: memory that runs out in any allocation, a launch that fails, an interrupt, a damaged
file. Parameters, gradients, caches, histories and files are whole afterwards, and the next
call is right.

On a GPU each kind runs in a process of its own, with an allocator that poisons and guards memory,
or with launches that fail (injected.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import subprocess
import sys

import injected
import pytest
import torch
from conftest import assert_same_bits

import narrowfloat as nf


@pytest.mark.parametrize("recipe", nf.RECIPES)
def test_a_fault_in_any_call_leaves_a_layer_whole(recipe: str) -> None:
    """No memory, and interrupts, spread over all the places where narrowfloat calls torch, forward
    and backward."""
    errors = torch.OutOfMemoryError, KeyboardInterrupt

    def inject(n: int) -> injected.FailAt:
        return injected.FailAt(n, errors[n % 2])

    for how in injected.hows_of(recipe):
        with injected.Layer(recipe, "cpu", torch.float32, how) as one:
            number = injected.calls_of(one)
            places = sorted({1 + i * (number - 1) // 11 for i in range(12)})
            faults = injected.check_recovers(one, inject, errors, iter(places), f"{recipe} {how}")
            assert faults == len(places)


@pytest.mark.parametrize("recipe", nf.RECIPES)
def test_no_result_depends_on_memory_that_nobody_wrote(recipe: str) -> None:
    """torch.empty() filled with NaN, and not: the same bits."""
    made = []
    for fill in (True, False):
        torch.use_deterministic_algorithms(fill)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        try:
            for how in injected.hows_of(recipe):
                with injected.Layer(recipe, "cpu", torch.bfloat16, how) as one:
                    made.append([*one.call(), *one.call(), *one.own().values()])
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = True
    half = len(made) // 2
    for first, second in zip(made[:half], made[half:], strict=True):
        for a, b in zip(first, second, strict=True):
            assert_same_bits(a, b, recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", injected.MODES)
def test_on_a_gpu(cuda: str, mode: str, tmp_path: pathlib.Path) -> None:
    try:
        library = injected.compiled(mode, tmp_path)
    except RuntimeError as error:
        pytest.skip(str(error))
    environment = os.environ | ({"LD_PRELOAD": str(library)} if mode == "launch" else {})
    done = subprocess.run(
        [sys.executable, injected.__file__, mode, str(library)],
        capture_output=True, text=True, env=environment, timeout=540,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["passed"] and row["tried"] > len(nf.RECIPES), row


def test_the_allocator_sees_what_is_written_beside(tmp_path: pathlib.Path) -> None:
    """faults/allocator.cpp itself, on memory of the host."""
    library = ctypes.CDLL(str(injected.compiled("poison", tmp_path, on_cpu=True)))
    library.faults_alloc.restype = ctypes.c_void_p
    library.faults_what.restype = ctypes.c_char_p
    arguments = ctypes.c_ssize_t(100), 0, None
    first, second = (library.faults_alloc(*arguments) for _ in range(2))
    assert ctypes.string_at(first, 100) == b"\xff" * 100
    library.faults_poison(0)
    third = library.faults_alloc(*arguments)
    assert ctypes.string_at(third, 100) == bytes(100)
    ctypes.memset(first, 1, 100)
    library.faults_free(ctypes.c_void_p(first), *arguments)
    assert library.faults_found() == 0
    ctypes.memset(second + 100, 1, 1)
    assert library.faults_found() == 1
    assert library.faults_what() == b"byte 0 after an allocation of 100 bytes was written"
    ctypes.memset(third - 1, 1, 1)
    library.faults_free(ctypes.c_void_p(third), *arguments)
    assert library.faults_found() > 1
    library.faults_fail_at(ctypes.c_int64(0))
    library.faults_alloc(*arguments)
    assert ctypes.c_int64(library.faults_count()).value == 1


@pytest.mark.parametrize("mode", injected.MODES)
def test_what_runs_on_a_gpu_compiles(mode: str, tmp_path: pathlib.Path) -> None:
    try:
        library = injected.compiled(mode, tmp_path)
    except RuntimeError as error:
        if "no compiler" in str(error) or "no headers" in str(error):
            pytest.skip(str(error))
        raise
    names = ("faults_launch_at",) if mode == "launch" else ("faults_alloc", "faults_free")
    symbols = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True).stdout
    assert all(f" T {name}" in symbols for name in names)
