"""Installs a wheel as users do, in a clean environment beside one torch, and says how it did.

python3 tools/load_wheel.py WHEEL --torch 'torch==2.11.0' [--python python3.12] [--cuda 13.0]
                            [--problem WORDS] [--tests FILE ...] [--record FILE]

The environment lies outside the checkout and goes afterwards (--keep DIR: it stays, and is used
again). TORCH_INDEX in the environment names the index that has torch, where pip's own does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = [
    f"test_{name}.py"
    for name in (
        *("quantize", "linear", "convert", "ops", "main", "packaging", "support", "recipe"),
        *("reuse", "tune", "delayed", "block_linear", "fp4_linear", "fp4_weights", "mixed"),
        "mixed_input",
    )
]
NEEDED = ["pytest>=8", "pytest-xdist", "hypothesis", "numpy", "safetensors"]
LONGEST_IMPORT = 0.15  # seconds over `import torch`

# Runs in the environment: prints one JSON object.
LOOK = """
import json, platform, subprocess, sys, time
import torch
started = time.perf_counter()
import narrowfloat
seconds = time.perf_counter() - started
from narrowfloat import _binary
x = torch.randn(16, 32, requires_grad=True)
narrowfloat.linear(x, torch.randn(8, 32)).sum().backward()
refused = None
try:
    _binary.require()
except RuntimeError as e:
    refused = str(e)
print(json.dumps({
    "python": platform.python_version(),
    "torch": torch.__version__,
    "torch_cuda": torch.version.cuda,
    "file": narrowfloat.__file__,
    "version": narrowfloat.__version__,
    "problem": refused,
    "archs": _binary.module.archs() if _binary.module else None,
    "cublaslt": _binary.module.cublaslt_version() if _binary.module else None,
    "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    "import_seconds": round(seconds, 3),
}))
"""


def pip(python: Path, *args: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")


def environment(where: Path, python: str, torch: str) -> Path:
    """Its Python; with torch, and what the tests need."""
    inside = where / "venv/bin/python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", str(where / "venv")], check=True)
    index = os.environ.get("TORCH_INDEX")
    pip(inside, torch, *(["--index-url", index] if index else []))
    pip(inside, *NEEDED)
    return inside


def look(python: Path, where: Path) -> dict[str, object]:
    """What LOOK finds, with the shortest of three imports: the first one reads a cold disk."""
    seen: list[dict[str, object]] = []
    for _ in range(3):
        done = subprocess.run(
            [str(python), "-c", LOOK], cwd=where, capture_output=True, text=True, env=clean()
        )
        if done.returncode:
            sys.exit(f"failed: import and a layer on the CPU\n{done.stdout}{done.stderr}")
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    return min(seen, key=lambda s: float(str(s["import_seconds"])))


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", required=True, help="a pip requirement, such as torch==2.11.0")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--cuda", help="the CUDA that this torch must be built for, or none")
    parser.add_argument("--problem", help="the binary must be refused, in words that have these")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files of tests/ to run")
    parser.add_argument("--record", type=Path, help="where to write what was seen, as JSON")
    parser.add_argument("--keep", type=Path, help="where the environment stays")
    args = parser.parse_args()
    where = args.keep or Path(tempfile.mkdtemp(prefix="narrowfloat-load-"))
    try:
        return load(args, where.resolve())
    finally:
        if not args.keep:
            shutil.rmtree(where)


def load(args: argparse.Namespace, where: Path) -> int:
    if ROOT in (where, *where.parents):
        sys.exit(f"{where} lies in the checkout, whose sources would be imported")
    python = environment(where, args.python, args.torch)
    pip(python, "--no-deps", "--force-reinstall", str(args.wheel.resolve()))
    wrong: list[str] = []
    found = look(python, where)
    seconds = float(str(found["import_seconds"]))
    print(json.dumps(found, indent=1), flush=True)
    file = Path(str(found.pop("file")))
    if where / "venv" not in file.parents:
        wrong.append(f"imported from {file}, not from the environment")
    if args.cuda and str(found["torch_cuda"] or "none") != args.cuda:
        wrong.append(f"torch is built for CUDA {found['torch_cuda']}, wanted was {args.cuda}")
    problem = str(found["problem"] or "")
    if args.problem is None and problem:
        wrong.append(problem)
    if args.problem is not None and args.problem not in problem:
        wrong.append(f"expected a problem with {args.problem!r}, got {problem or 'none'}")
    if seconds > LONGEST_IMPORT:
        wrong.append(f"import takes {seconds} s over torch's, at most {LONGEST_IMPORT} is right")
    report = subprocess.run(
        [str(python), "-m", "narrowfloat"], cwd=where, capture_output=True, text=True, env=clean()
    )
    print(report.stdout + report.stderr, flush=True)
    if "Traceback" in report.stderr or "Support\n" not in report.stdout:
        wrong.append("python -m narrowfloat fails")
    if problem not in report.stdout:
        wrong.append("python -m narrowfloat does not say the problem")
    found["tests"] = None
    if args.tests:
        shutil.rmtree(where / "tests", ignore_errors=True)
        shutil.copytree(ROOT / "tests", where / "tests")
        for name in ("README.md", "pyproject.toml"):  # the one is tested, the other has settings
            shutil.copy(ROOT / name, where)
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
        command += [f"tests/{name}" for name in args.tests]
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, env=clean())
        last = done.stdout.strip().splitlines()[-1:]
        found["tests"] = f"{' '.join(args.tests)}: {' '.join(last)}"
        print(found["tests"], flush=True)
        if done.returncode:
            print(done.stdout[-6000:] + done.stderr[-2000:])
            wrong.append("tests fail")
    found["wheel"] = args.wheel.name
    found["sha256"] = hashlib.sha256(args.wheel.read_bytes()).hexdigest()
    found["wrong"] = wrong
    if args.record:
        args.record.parent.mkdir(parents=True, exist_ok=True)
        args.record.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(f"WRONG: {w}" for w in wrong) or f"{args.wheel.name} works with {args.torch}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
