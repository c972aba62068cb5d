"""Tests that every recipe computes on the CPU what it did when tests/bits_cpu.json was recorded.

A change that means to alter results records it anew, and says so:
python tests/bits.py record --device cpu --exact --out tests/bits_cpu.json
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterator

import bits
import pytest
import torch

RECORDED = pathlib.Path(__file__).with_name("bits_cpu.json")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: threads beside other work would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def recorded() -> dict[str, dict[str, str]]:
    return json.loads(RECORDED.read_text())["exact"]


@pytest.mark.parametrize("subject", bits.subjects("cpu"))
def test_results_are_those_recorded(subject: str) -> None:
    cases = [case for case in bits.subjects("cpu")[subject]() if case.group == "exact"]
    differ = {}
    for case in cases:
        found = bits.outcome(case)
        wanted = recorded().get(case.name)
        assert wanted is not None, f"{case.name} is not in {RECORDED.name}: record it"
        if what := bits.differences(found, wanted):
            differ[case.name] = (what, found.get("error"))
    assert set(differ) == {case.name for case in cases if case.name in bits.CHANGED}, differ


def test_no_recorded_case_is_gone() -> None:
    known = {case.name for cases in bits.subjects("cpu").values() for case in cases()}
    assert set(recorded()) <= known


def test_recipes_of_the_package_are_all_recorded() -> None:
    assert all(f"layer {name} batched" in recorded() for name in bits.nf.RECIPES)


def test_one_flipped_bit_is_a_difference() -> None:
    y = bits.integers((4, 8), 0)
    other = y.clone()
    other.view(-1).view(torch.int32)[3] ^= 1
    assert bits.digest(y) != bits.digest(other)
    assert bits.differences({"y": "a", "dx": "b"}, {"y": "a", "dx": "c"}) == ["dx"]
    assert bits.differences({"error": "ValueError: a"}, {"error": "ValueError: b"}) == []
    assert bits.differences({"error": "ValueError: a"}, {"error": "TypeError: a"}) == ["error"]
