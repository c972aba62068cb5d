"""Runs the GPU tests and the sanitizers on the machine at hand and writes down how they went.

python3 tools/gpu_tests.py --out benchmarks/results/h200/tests.json [--commit C] [--workers N]
                           [--sanitize memcheck racecheck initcheck synccheck [--sanitize-only]]
                           [--inject poison memory launch]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

Outcome = tuple[dict[str, object], str]
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

# Recipes whose operators launch every kernel of a layer, at sizes ragged and empty.
OPERATOR_TESTS = [
    f"tests/test_operators.py::test_operators_equal_reference[cuda-{case}-{recipe}]"
    for case in ("33x100x72-float32", "33x100x72-bfloat16", "0x48x32-float32")
    for recipe in (
        *("fp8", "fp8_row", "fp8_block", "fp8_bf16_wgrad", "mxfp8", "powers"),
        *("nvfp4", "mxfp4", "nvfp4_four_over_six", "plain", "w 1 x 16"),
        *("formats", "fp4 both ways", "nvfp4_mxfp8_backward"),
        *(f"without {operand}" for operand in ("fprop.b", "dgrad.a", "wgrad.b")),
    )
]

# A cast of each kernel; both orientations, views and many tiles of them.
CASTS = (
    *("tensor", "row e5m2", "block w", "pow2 w operands", "mx", "mxfp4 dy"),
    *("nvfp4 w both", "nvfp4 x rotated rows", "nvfp4 dy"),
    *("nvfp4 w four over six", "nvfp4 dy scaled up", "mxfp4 x", "mx, nvfp4 rotated"),
)

# What launches every kernel at ragged, strided, empty and ordinary sizes; the sanitizers run it.
KERNEL_TESTS = [
    *(f"tests/test_quantize.py::test_strides[cuda-{cast}]" for cast in CASTS),
    "tests/test_quantize.py::test_a_given_scale",
    *(
        f"tests/test_quantize.py::test_kernel_equals_reference[cuda-{shape}-tensor]"
        for shape in ("1x1", "5x13", "1x1030", "33x1", "129x257", "1000x72", "0x16", "16x0")
    ),
    "tests/test_quantize.py::test_empty",
    *OPERATOR_TESTS,
    "tests/test_scaled_mm.py::test_unaligned_views",
    "tests/test_w4a16.py::test_few_tokens",
    "tests/test_w4a16.py::test_tiles[33-100-17]",
    "tests/test_w4a16.py::test_tiles[515-2056-32]",
    "tests/test_delayed.py::test_kernels_equal_the_reference[shape2-dtype0]",
    "tests/test_delayed.py::test_kernels_equal_the_reference[shape2-dtype1]",
]

# Under racecheck any product of cuBLASLt dies of an illegal address (sanitizer of CUDA 13.0 on an
# H200; torch._scaled_mm alone does, without narrowfloat). There it is preloaded away, and what
# runs are the tests that look at no product.
LOOK_AT_PRODUCTS = {*OPERATOR_TESTS, "tests/test_scaled_mm.py::test_unaligned_views"}
RACE_TESTS = [
    *(test for test in KERNEL_TESTS if test not in LOOK_AT_PRODUCTS),
    "tests/test_operators.py::test_what_no_gemm_makes",
]
# initcheck watches every kernel, since what torch's own write is read by ours, and so no product
# either; and what is read of a product that was preloaded away was never written.
INIT_TESTS = [test for test in KERNEL_TESTS if test not in LOOK_AT_PRODUCTS]
NO_PRODUCTS = "int cublasLtMatmul(void) { return 0; }"


OURS = ["--kernel-regex", "kns=narrow"]


class Sanitizer(NamedTuple):
    """How a tool of compute-sanitizer is run."""

    tests: list[str]
    options: list[str]
    products: bool
    environment: dict[str, str]


SANITIZERS = {
    "memcheck": Sanitizer(KERNEL_TESTS, OURS, True, {}),
    "racecheck": Sanitizer(RACE_TESTS, OURS, False, {}),
    # torch's allocator hands memory on that an earlier tensor wrote, which would hide what is not
    "initcheck": Sanitizer(INIT_TESTS, [], False, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    "synccheck": Sanitizer(RACE_TESTS, OURS, False, {}),
}
INJECTED = ("poison", "memory", "launch")  # tests/injected.py


@functools.cache  # built once: what runs already has it loaded
def library_without_products() -> Path:
    library = ROOT / ".gpu_tests_no_products.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)],
        input=NO_PRODUCTS,
        text=True,
        check=True,
    )
    return library


def start(
    name: str, arguments: list[str], before: list[str], environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    return subprocess.Popen(
        [*command, f"--junitxml={xml_of(name)}", *arguments],
        cwd=ROOT,
        stdout=log_of(name).open("w"),  # no pipe: one that nobody reads yet would fill and block
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | (environment or {}),
        start_new_session=True,  # a sanitizer's child ends with it
    )


def xml_of(name: str) -> Path:
    return ROOT / f".gpu_tests_{name}.xml"


def log_of(name: str) -> Path:
    return ROOT / f".gpu_tests_{name}.log"


def finish(name: str, run: subprocess.Popen[str], begun: float, limit: float | None) -> Outcome:
    try:
        run.wait(timeout=limit)
        stopped = ""
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        stopped = f"\nstopped after {limit} s"
    output = log_of(name).read_text() + stopped
    log_of(name).unlink()
    summary: dict[str, object] = {"seconds": round(time.time() - begun, 1)}
    if stopped:
        summary["stopped"] = True
    if xml_of(name).exists():
        suite = next(ET.parse(xml_of(name)).getroot().iter("testsuite"))
        total, failed, skipped = (
            int(suite.get("tests", 0)),
            int(suite.get("failures", 0)) + int(suite.get("errors", 0)),
            int(suite.get("skipped", 0)),
        )
        summary |= {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}
        # by name in the summary itself: the printed output may be lost with a lent machine
        bad = [c for c in suite.iter("testcase") if {e.tag for e in c} & {"failure", "error"}]
        if bad:
            summary["failures"] = [f"{c.get('classname')}::{c.get('name')}" for c in bad]
        reasons = {e.get("message") for e in suite.iter("skipped")}
        if reasons:
            summary["skip_reasons"] = sorted(str(r) for r in reasons)
        xml_of(name).unlink()
    return summary, output


def injected(mode: str) -> Outcome:
    """What tests/injected.py finds in a mode, as a summary like that of tests."""
    sys.path[:0] = [str(ROOT / "tests")]
    import injected as script

    begun = time.time()
    library = script.compiled(mode, Path(tempfile.mkdtemp(prefix="narrowfloat_injected_")))
    environment = {"PYTHONPATH": str(ROOT / "src")}
    if mode == "launch":
        environment["LD_PRELOAD"] = str(library)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "injected.py"), mode, str(library)],
        env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    summary: dict[str, object] = {"errors": None, "failed": 1}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:  # else it died
        summary = json.loads(lines[-1])
        summary["failed"] = int(not summary["passed"])
    summary["seconds"] = round(time.time() - begun, 1)
    return summary, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit")
    parser.add_argument("--workers", default="6")
    parser.add_argument("--sanitize", nargs="*", default=[], choices=SANITIZERS)
    parser.add_argument("--inject", nargs="*", default=[], choices=INJECTED)
    parser.add_argument("--sanitize-only", action="store_true", help="without the tests themselves")
    parser.add_argument("--limit", type=float, help="seconds for the sanitizers, together")
    parser.add_argument("--shards", type=int, default=5, help="processes of each sanitizer")
    args = parser.parse_args()

    import record  # benchmarks/record.py: what machine this is
    import torch

    result: dict[str, object] = {
        "machine": record.machine(torch.device("cuda"), args.commit),
        "tests": {},
    }
    good = True

    def keep(name: str, summary: dict[str, object], output: str) -> None:
        nonlocal good
        good &= summary.get("failed") == 0 and summary.get("errors", 0) == 0
        result["tests"][name] = summary  # type: ignore[index]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {summary}", flush=True)
        if summary.get("failed") != 0 or summary.get("errors", 0) != 0:
            print(output[-6000:], flush=True)
            args.out.with_suffix(f".{name}.log").write_text(output)

    def add_row(name: str, errors: object, passed: bool) -> None:
        row = {"bench": "sanitizer", "name": name, "errors": errors, "passed": passed}
        result.setdefault("rows", []).append(row)  # type: ignore[attr-defined]
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(row), flush=True)

    if not args.sanitize_only:
        begun = time.time()
        keep("gpu", *finish("gpu", start("gpu", ["-n", args.workers], []), begun, None))
    sanitizer = shutil.which("compute-sanitizer")
    if args.sanitize and sanitizer is None:
        raise SystemExit("gpu_tests: compute-sanitizer is not on PATH")
    begun = time.time()
    running = {}  # beside each other: all are bound by the host
    for tool in args.sanitize:
        how = SANITIZERS[tool]
        before = [str(sanitizer), f"--tool={tool}", *how.options]
        environment = dict(how.environment)
        if not how.products:
            environment["LD_PRELOAD"] = str(library_without_products())
        running[tool] = [
            start(f"{tool}{i}", how.tests[i :: args.shards], before, environment)
            for i in range(args.shards)
        ]
    for tool, runs in running.items():
        output, of_each = "", []
        for i, run in enumerate(runs):
            left = None if args.limit is None else max(args.limit - (time.time() - begun), 1)
            summary, its_output = finish(f"{tool}{i}", run, begun, left)
            found = re.findall(r"SUMMARY: (\d+) ", its_output)
            summary["errors"] = sum(map(int, found)) if found else None
            output += its_output
            of_each.append(summary)
        summary = {}
        for key in dict.fromkeys(key for one in of_each for key in one):
            values = [one.get(key, 0) for one in of_each]
            counts = [value for value in values if isinstance(value, int)]
            lists = [value for value in values if isinstance(value, list)]
            if lists:
                summary[key] = sorted({line for lines in lists for line in lines})
                continue
            # where one has no number, it has not ended, and nothing is known of all
            summary[key] = sum(counts) if len(counts) == len(values) else None
        summary["seconds"] = round(time.time() - begun, 1)
        if summary["errors"] or summary.get("failed"):
            summary["report"] = [s for s in output.splitlines() if s.startswith("=====")][:60]
        keep(tool, summary, output)
        # what did not end, or failed, has not passed, whatever it reports
        passed = summary["errors"] == 0 and summary.get("failed") == 0
        add_row(tool, summary["errors"], passed)
    for mode in args.inject:
        row, output = injected(mode)
        keep(mode, row, output)
        add_row(mode, row["errors"], row["failed"] == 0)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
