"""Decides when products measure cuBLASLt's candidates, and how what they found is kept: tune()."""

from __future__ import annotations

import json
import os
import pathlib
import re
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from . import _binary

PathLike = str | os.PathLike[str]


def _module(who: str) -> ModuleType:
    if _binary.module is None:
        raise NotImplementedError(
            f"{who}: expected the compiled part, for products through cuBLASLt: {_binary.problem}"
        )
    return _binary.module


@contextmanager
def tune(file: PathLike | None = None, *, sm89: bool = False) -> Iterator[None]:
    """Inside, the first product of each shape measures the algorithms that cuBLASLt offers for it.

    Outside, and for a shape that was not met inside, a product has cuBLASLt's first choice, which
    is the best for most large shapes. Run the model's forward and backward inside, once with each
    of its shapes: each candidate runs on the operands at hand; one whose result differs from the
    first one's is dropped; the fastest stays if it gains 2 %, in this process, for every thread.
    It takes up to some tens of milliseconds a product, waits for the device, and needs memory
    beside torch's for a copy of a product's result.

    file: plans that an earlier run saved are loaded if it is there (see load_plans), so that their
    shapes are not measured again, and all are saved to it in the end, after an exception too. A
    file that load_plans() refuses, damaged or of other versions, is left out with a warning and
    replaced in the end. Not measured are products
    inside a capture, those that add to their output, and those on Ada (sm89), where candidates of
    some versions of cuBLASLt fault, unless sm89=True.

    ValueError inside torch.use_deterministic_algorithms(True): which one is fastest may differ
    from run to run (load plans there instead).
    """
    module = _module("tune")
    if torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "tune: expected torch.use_deterministic_algorithms(False), got True (which plan is "
            "fastest may differ between runs; save plans once and load_plans() them)"
        )
    if file is not None and pathlib.Path(file).exists():
        try:
            load_plans(file)
        except ValueError as error:
            warnings.warn(f"tune: {error}; its plans are measured anew", stacklevel=3)
    module.start_tuning(sm89)
    try:
        yield
    finally:
        module.stop_tuning(sm89)
        if file is not None:
            save_plans(file)


def _versions(module: ModuleType) -> dict[str, int]:
    return {"cublaslt": module.cublaslt_version(), "driver": module.driver_version()}


def save_plans(file: PathLike) -> None:
    """Write all plans that this process measured or loaded, as JSON, with the versions they are
    good for, the microseconds of cuBLASLt's first choice and of the plan, and how many algorithms
    cuBLASLt offered, were safe to try, and had the right result (0 of a plan that was loaded).
    Of several processes the last one's file stays. OSError where it cannot be written; the file
    that was there is then as it was."""
    module = _module("save_plans")
    plans = [
        {
            "device": torch.cuda.get_device_name(device),
            "product": product,
            "first_us": round(first, 2),
            "us": round(chosen, 2),
            "offered": offered,
            "tried": tried,
            "right": right,
            "key": key,
            "algorithm": algorithm,
        }
        for device, key, algorithm, product, first, chosen, offered, tried, right in module.plans()
    ]
    path = pathlib.Path(file)
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # in one move: no half file
    try:
        beside.write_text(json.dumps({**_versions(module), "plans": plans}, indent=1) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)  # where the disk is full, or an interrupt came


def load_plans(file: PathLike) -> int:
    """Take the plans of a file of save_plans() for the devices of the same name; how many there
    were for them.

    ValueError where the file was written beside another cuBLASLt or driver, or is none of these,
    OSError where it cannot be read. All of its plans are taken, or none.
    """
    module = _module("load_plans")
    try:
        content: dict[str, Any] = json.loads(pathlib.Path(file).read_text())
        theirs = {name: content[name] for name in ("cublaslt", "driver")}
        plans = [
            (str(p["device"]), str(p["key"]), str(p["algorithm"]), str(p["product"]))
            for p in content["plans"]
        ]
        for at, name in ((1, "key"), (2, "algorithm")):
            if len({len(plan[at]) for plan in plans}) > 1 or not all(
                re.fullmatch("[0-9a-f]+", plan[at]) for plan in plans
            ):
                raise ValueError(f"expected hexadecimal digits of one length as each {name}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"load_plans: expected a file of save_plans(), got {file} ({error!r})"
        ) from None
    ours = _versions(module)
    if theirs != ours:
        raise ValueError(
            f"load_plans: expected plans for {ours}, got {theirs} in {file} "
            "(algorithms do not carry over: delete the file and measure again)"
        )
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    taken = 0
    for name, key, algorithm, product in plans:
        for index, here in enumerate(names):
            if here == name:
                module.load_plan(index, key, algorithm, product)
        taken += name in names
    return taken
