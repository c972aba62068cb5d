"""What the command takes and writes; subjects.py holds what it measures.

python benchmarks/bench.py quantize linear host memory    # two minutes on an H200
python benchmarks/bench.py linear --shapes 4096x4096x4096 --compiled --peers
python benchmarks/bench.py train --train-args "--seeds 0 1"
python benchmarks/bench.py step --models llama-8B --compiled --peers
python benchmarks/bench.py table                          # README.md from what is committed
python benchmarks/bench.py picture                        # gap against speed, likewise
python benchmarks/bench.py quantize gemm linear host memory model --device cpu   # smoke
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence

import picture
import record
import torch
import variants
from measure import Device
from run import Run
from stacks import STACKS
from subjects import SUBJECTS

DEFAULT = ["quantize", "linear", "host", "memory"]


def shape(text: str) -> tuple[int, ...]:
    """'4096x4096x14336' (tokens x in x out) or '16384x8192' (rows x columns, for quantize)."""
    try:
        sizes = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        sizes = ()
    if len(sizes) not in (2, 3) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"expected tokens x in x out or rows x columns, as in 4096x4096x4096, got {text!r}"
        )
    return sizes


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure narrowfloat beside bf16.",
        epilog="benchmarks/README.md says how each is measured.",
    )
    add = parser.add_argument
    known = [*SUBJECTS, "table", "picture"]
    add("subjects", nargs="*", metavar="|".join(known), help=f"default: {' '.join(DEFAULT)}")
    add("--out", type=pathlib.Path, help="default: benchmarks/results/<gpu>/<date>-<commit>.json")
    add("--seconds", type=float, help="measuring time of each subject, shared by its rows")
    add("--shapes", type=shape, nargs="+", help="tokensxinxout, or rowsxcols for quantize")
    add("--recipe", default="fp8", help="default: fp8")
    add("--graph", action="store_true", help="linear: captured graphs for every shape")
    add("--compiled", action="store_true", help="linear, step: torch.compile too")
    add("--models", nargs="+", choices=list(STACKS), help="step: default: all")
    add("--peers", action="store_true", help="torchao's float8 beside ours, where installed")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a smoke run, tiny sizes")
    add("--commit", help="of a copy of the tree whose git is absent or older")
    add("--train-args", default="", help="more arguments for examples/train_gpt.py")
    add("--into", type=pathlib.Path, nargs="+", help="table: the files to put it into")
    found = parser.parse_args(argv)
    found.subjects = list(dict.fromkeys(found.subjects)) or DEFAULT
    for name in found.subjects:
        if name not in known:
            parser.error(f"expected subjects out of {', '.join(known)}, got {name}")
    if found.seconds is not None and found.seconds <= 0:
        parser.error(f"--seconds: expected more than 0, got {found.seconds}")
    return found


def write_tables(files: Sequence[pathlib.Path] | None) -> None:
    """Between the markers of each file; by default all rows into benchmarks/README.md, and those
    that users ask for into the package's README.md."""
    found = record.read()
    package = record.ROOT / "README.md"
    for path in files or (record.ROOT / "benchmarks" / "README.md", package):
        brief = path.resolve() == package
        path.write_text(record.into(path.read_text(), record.tables(found, brief)))
    print(record.tables(found))


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if "table" in options.subjects:
        write_tables(options.into)
        return 0
    if "picture" in options.subjects:
        print(picture.write(record.BARRED_GPU))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench: expected a GPU, got none (--device cpu makes a smoke run)")
    import narrowfloat  # noqa: F401  registers the operators

    device = Device(options.device)
    facts = record.machine(device.torch, options.commit)
    path = options.out
    if path is None and device.cuda:
        name = f"{facts['date'][:10]}-{facts['commit'][:10]}-{'-'.join(options.subjects)}.json"
        path = record.RESULTS / record.gpu_slug(facts["gpu"]) / name
    try:
        run = Run(options, device, record.Results(path, facts))
    except ValueError as problem:
        raise SystemExit(str(problem)) from None
    if not device.cuda:
        torch.set_num_threads(1)  # tiny sizes: threads would only wait for each other
    torch.manual_seed(0)
    began = time.perf_counter()
    for name in options.subjects:
        print(f"-- {name} ({time.perf_counter() - began:.0f} s)", flush=True)
        with run.attempt(name):
            SUBJECTS[name](run)
    print(f"\n{facts}")
    for r in run.out.rows.values():
        print(run.out.line(r))
    print(f"{path or 'nothing written'}, {time.perf_counter() - began:.0f} s")
    for failure in run.failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if run.failures else 0


if __name__ == "__main__":
    variants.register()  # here, since it changes a table of the package
    sys.exit(main())
