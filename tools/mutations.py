"""Breaks kernels and host code on purpose, one small way at a time, and sees whether tests notice.

    python tools/mutations.py --out benchmarks/results/cpu/DATE-mutations.json [--only WORD ...]

Each mutant is a change of one place in a copy of the tree. The tests that should catch it run there
until the first one fails; C++ and CUDA sources run on the CPU, under tests/emulation. A mutant that
does not compile counts as nothing. It takes some 20 minutes of two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("outcome", "file", "what", "first", "seconds")


class Mutant(NamedTuple):
    what: str
    file: str  # from the root
    old: str  # stands in it once
    new: str
    tests: str  # as pytest takes them, apart by spaces


def python(file: str) -> str:
    return f"src/narrowfloat/{file}.py"


def kernel(file: str) -> str:
    return f"csrc/{file}"


TENSOR, LINEAR, FP4 = (python(f"reference/{n}") for n in ("tensor", "linear", "fp4_numerics"))
KERNELS, BLOCKS = "tests/test_kernels_emulated.py", "tests/test_block_kernels_emulated.py"
FP4_KERNELS, W4A16 = "tests/test_fp4_kernels_emulated.py", "tests/test_w4a16_emulated.py"
OPERATORS, TUNED = "tests/test_linear_emulated.py", "tests/test_tune_emulated.py"
FUZZ, QUANTIZE = "tests/test_fuzz.py", "tests/test_quantize.py"

MUTANTS = [
    # ---- reference numerics ----
    Mutant(
        "swapped scale: scale is 1 / scale", TENSOR,
        "torch.where(smallest, SMALLEST_SCALE, torch.div(amax, largest))",
        "torch.where(smallest, SMALLEST_SCALE, torch.div(largest, amax))",
        "tests/test_reference_tensor.py",
    ),
    Mutant(
        "no saturation", TENSOR, "x.clamp(-fmt.max, fmt.max)", "x.clamp(-fmt.max, 2 * fmt.max)",
        "tests/test_cases_values.py::test_o25_casts_saturate",
    ),
    Mutant(
        "unpadded tail: what lies beyond is not zero", TENSOR,
        "zeros = pad(x.float(), (0, padded(cols) - cols, 0, padded(rows) - rows))",
        "zeros = pad(x.float(), (0, padded(cols) - cols, 0, padded(rows) - rows), value=1.0)",
        f"{FUZZ}::test_padding",
    ),
    Mutant(
        "off by one: padding of what needs none", python("formats"), "return -(-size // PAD) * PAD",
        "return (size // PAD + 1) * PAD",
        "tests/test_reference_tensor.py",
    ),
    Mutant(
        "wrong tie: half way rounds up, not to even", FP4,
        "torch.tensor(half) if up else torch.nextafter(torch.tensor(half), infinity)",
        "torch.tensor(half)",
        "tests/test_reference_fp4.py",
    ),
    Mutant(
        "wrong tie: a power of two takes the scale above", python("reference/block"),
        "(amax.view(torch.int32) + 0x1FFFFF >> 23)", "(amax.view(torch.int32) + 0x200000 >> 23)",
        "tests/test_reference_block.py",
    ),
    Mutant(
        "swapped nibbles", python("reference/fp4"), "return codes[:, 0::2] | codes[:, 1::2] << 4",
        "return codes[:, 1::2] | codes[:, 0::2] << 4", "tests/test_reference_fp4.py",
    ),
    Mutant(
        "wrong seed: both orientations draw the same", FP4,
        "last = (high[1] << 1 | orientation) & _WORD", "last = (high[1] << 1) & _WORD",
        "tests/test_reference_fp4.py",
    ),
    Mutant(
        "biased chance: stochastic rounding without its half step", FP4, "r * 256 + 128) >> 16",
        "r * 256) >> 16", "tests/test_reference_fp4.py",
    ),
    Mutant(
        "a NaN is lost in its block's scale", FP4,
        "scales = torch.where(bad, E4M3.nan, scales)", "scales = torch.where(bad, 0, scales)",
        "tests/test_reference_fp4.py::test_a_block_that_is_not_finite_has_codes_of_zero",
    ),
    Mutant(
        "swapped scale: a's in place of b's", LINEAR, "return d * (a.scale * b.scale)",
        "return d * (a.scale * a.scale)", "tests/test_linear.py",
    ),
    Mutant(
        "wrong seed: dw rounds dy as dx does", LINEAR,
        "_factor(dy2.t(), choices.wgrad_a, dy_scale, seed, 1)",
        "_factor(dy2.t(), choices.wgrad_a, dy_scale, seed, 0)",
        f"{FUZZ}::test_a_few tests/test_operators.py::test_the_layer_is_what_its_operands_say",
    ),
    Mutant(
        "the bias gradient is summed as it was rounded", LINEAR,
        "db = dy2.float().sum(0).to(db_dtype)", "db = dy2.sum(0).to(db_dtype)",
        f"{FUZZ}::test_a_few tests/test_operators.py::test_what_no_gemm_makes",
    ),
    Mutant(
        "off by one: a history forgets a step", python("reference/delayed"),
        "row[FIRST + 1 :] = row[FIRST:-1].clone()", "row[FIRST + 2 :] = row[FIRST:-2].clone()",
        "tests/test_delayed.py",
    ),
    Mutant(
        "an overflow counts in a history", python("reference/delayed"), "if finite and joins:",
        "if joins:", f"tests/test_delayed.py {FUZZ}",
    ),
    # ---- the Python half ----
    Mutant(
        "stale cache: a weight's version is not looked at", python("weight_cache"),
        "key = (w._version, w.data_ptr(),", "key = (0, w.data_ptr(),",
        "tests/test_weight_cache.py",
    ),
    Mutant(
        "stale cache: a copy's contents for its original's", python("weight_cache"),
        "if found is not None and found[0] is w and found[1] == key:",
        "if found is not None and found[1][0] == key[0]:", "tests/test_weight_cache.py",
    ),
    Mutant(
        "nothing is freed when an optimizer steps", python("weight_cache"),
        "register_optimizer_step_post_hook(lambda *_: cache.drop())",
        "register_optimizer_step_post_hook(lambda *_: None)", "tests/test_weight_cache.py",
    ),
    Mutant(
        "wrong seed: every backward draws the same", python("ops"),
        "return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)",
        "return torch.ones(2, dtype=torch.int64, device=device)",
        "tests/test_stochastic.py::test_the_seed_is_torchs",
    ),
    Mutant(
        "swapped sizes in a fake", python("ops"),
        "dy.new_empty((n, in_features) if dw_dtype is not None else (0,), dtype=dw_dtype),",
        "dy.new_empty((in_features, n) if dw_dtype is not None else (0,), dtype=dw_dtype),",
        "tests/test_ops.py",
    ),
    Mutant(
        "one bit of a spec in another's place", python("spec"), '"forward.keep_w": (32, 1)',
        '"forward.keep_w": (31, 1)', "tests/test_spec.py",
    ),
    Mutant(
        "evaluation joins the history", python("autograd"),
        "(FORWARD_JOINS if asked else 0)", "FORWARD_JOINS", "tests/test_delayed.py",
    ),
    Mutant(
        "a gradient by the need of another", python("autograd"), "grads[1] if need_dw else None,",
        "grads[1] if need_dx else None,", "tests/test_linear.py tests/test_cases_autograd.py",
    ),
    Mutant(
        "a transposed gradient", python("functional"), "    return dw.t()\n\n\ndef _check",
        "    return dw\n\n\ndef _check", "tests/test_functional.py",
    ),
    Mutant(
        "off by one: stored scales of packed weights", python("w4a16"),
        "torch.arange(8, NVFP4.nan) + 40", "torch.arange(8, NVFP4.nan) + 41",
        "tests/test_w4a16.py",
    ),
    Mutant(
        "a plan for the wrong device", python("tune"), "module.load_plan(index, key,",
        "module.load_plan(0, key,", "tests/test_tune.py",
    ),
    Mutant(
        "a file that is written over in place", python("tune"), "        beside.replace(path)\n",
        "        path.write_text(beside.read_text())\n", "tests/test_tune.py",
    ),
    Mutant(
        "scales of half of the blocks", python("quantized"), "[:, :: fmt.block // GROUP]",
        "[:, fmt.block // GROUP - 1 :: fmt.block // GROUP][:, : -(-k // fmt.block)]",
        f"{FUZZ} {QUANTIZE}::test_quantize",
    ),
    # ---- kernels, on the CPU ----
    Mutant(
        "unpadded tail: columns beyond are not written", kernel("quantize/tensor_kernels.cu"),
        "  if (c >= tile.padded_cols) return;", "  if (c >= tile.cols) return;", KERNELS,
    ),
    Mutant(
        "dropped barrier before the sums of warps are read", kernel("quantize/tensor_kernels.cu"),
        "  __syncthreads();\n  if (static_cast<int>(threadIdx.x) < tile.cols) {",
        "  if (static_cast<int>(threadIdx.x) < tile.cols) {", KERNELS,
    ),
    Mutant(
        "an infinite multiplier of tiny tensors", kernel("quantize/numerics.cuh"),
        "  if (multiplier > kFltMax) return make_float2(kSmallestScale, kFltMax);\n", "", KERNELS,
    ),
    Mutant(
        "swapped scale and multiplier", kernel("quantize/numerics.cuh"),
        "return make_float2(__fdiv_rn(amax, max), multiplier);",
        "return make_float2(multiplier, __fdiv_rn(amax, max));", KERNELS,
    ),
    Mutant(
        "an overflow counts in a history", kernel("quantize/amax_history.cuh"),
        "if (!history.joins || amax_bits >= 0x7f800000u) return;", "if (!history.joins) return;",
        KERNELS,
    ),
    Mutant(
        "off by one: a step that has left a history counts", kernel("quantize/amax_history.cu"),
        "value[i] = at + 1 < length ?", "value[i] = at < length ?", KERNELS,
    ),
    Mutant(
        "off by one: a warp's maximum is left out", kernel("quantize/amax_history.cu"),
        "for (int i = 1; i < kRollThreads / 32; ++i)",
        "for (int i = 2; i < kRollThreads / 32; ++i)",
        KERNELS,
    ),
    Mutant(
        "wrong tie: a power of two takes the scale above", kernel("quantize/block_kernels.cu"),
        "(static_cast<int>(amax + 0x1fffffu) >> 23)", "(static_cast<int>(amax + 0x200000u) >> 23)",
        BLOCKS,
    ),
    Mutant(
        "unpadded tail: scales beyond the last square", kernel("quantize/block_kernels.cu"),
        "if (i > 0 && along + 1 == across && along + i < ld) to[down * ld + along + i] = 0.f;",
        "", BLOCKS,
    ),
    Mutant(
        "off by one: a scale that fits is rounded up", kernel("quantize/fp4_numerics.cuh"),
        "code < 0x7e && e4m3_value(code) < wanted", "code < 0x7e && e4m3_value(code) <= wanted",
        FP4_KERNELS,
    ),
    Mutant(
        "four over six with the range of six", kernel("quantize/fp4_numerics.cuh"),
        "(side.four_over_six ? 256.f : 448.f)", "(side.four_over_six ? 448.f : 448.f)", FP4_KERNELS,
    ),
    Mutant(
        "wrong seed: its first word twice", kernel("quantize/fp4_random.cuh"),
        "static_cast<uint64_t>(seed[1])", "static_cast<uint64_t>(seed[0])", FP4_KERNELS,
    ),
    Mutant(
        "wrong signs of the rotation", kernel("quantize/fp4_numerics.cuh"),
        "kRotationSigns >> i & 1 ? -x[i] : x[i]", "kRotationSigns >> i & 1 ? x[i] : -x[i]",
        FP4_KERNELS,
    ),
    Mutant(
        "swapped halves of K in unpacking", kernel("w4a16/unpack.cu"),
        "(half ? scales.y : scales.x) >> rows * 16", "(half ? scales.x : scales.y) >> rows * 16",
        W4A16,
    ),
    Mutant(
        "off by one: a warp's sum is left out", kernel("w4a16/few_tokens.cu"),
        "for (int w = 1; w < p.k_warps; ++w)", "for (int w = 2; w < p.k_warps; ++w)", W4A16,
    ),
    # ---- host code, on the CPU ----
    Mutant(
        "an unsafe split of K is taken", kernel("gemm/plan.cpp"),
        "return splits <= 1 || k % splits == 0 || k / splits % 32 != 0;", "return splits >= 1;",
        TUNED,
    ),
    Mutant(
        "a wrong candidate is kept", kernel("gemm/tune.cpp"),
        "if (apart <= kSame * kSame * norm) right.push_back", "if (apart == apart) right.push_back",
        TUNED,
    ),
    Mutant(
        "stale cache: a loaded plan is not noticed", kernel("gemm/tune.cpp"),
        "  table().insert_or_assign({device, k}, std::move(choice));\n  g_choices.fetch_add(1);",
        "  table().insert_or_assign({device, k}, std::move(choice));", TUNED,
    ),
    Mutant(
        "swapped scale: what was measured of w is not taken", kernel("linear/linear.cpp"),
        "if (scale_known) dgrad.b.take_scale(in.w_measured);",
        "if (scale_known) dgrad.a.take_scale(in.w_measured);", OPERATORS,
    ),
    Mutant(
        "rows of w for its columns", kernel("linear/operand.cpp"),
        "if (made() && side_ == 1 && in_bf16() && cast_.square && is_fp4(cast_.scaling)) {",
        "if (made() && side_ == 1 && in_bf16() && is_fp4(cast_.scaling)) {", OPERATORS,
    ),
    Mutant(
        "a bias in fp32 goes where 16 bits are read", kernel("gemm/gemm.cpp"),
        "bias_converted_ = !bias_apart_ && (type != epilogue_bias_type(d_type_) || ragged() ||",
        "bias_converted_ = !bias_apart_ && (ragged() ||", OPERATORS,
    ),
]  # fmt: skip


def copy_of_the_tree(to: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in [*names, *(str(p.relative_to(ROOT)) for p in ROOT.glob("src/narrowfloat/_C*.so"))]:
        if not (ROOT / name).is_file():
            continue
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)


class Running(NamedTuple):
    number: int
    mutant: Mutant
    tree: Path
    text: str  # what the file was
    pid: int
    log: Path
    begun: float


def start(number: int, m: Mutant, tree: Path) -> Running:
    """The mutant's tests in a child that has torch already, and narrowfloat not yet."""
    text = (tree / m.file).read_text()
    (tree / m.file).write_text(text.replace(m.old, m.new))
    log = tree / ".mutation.log"
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.setpgid(0, 0)
            os.nice(10)
            os.chdir(tree)
            to = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(to, 1)
            os.dup2(to, 2)
            paths = [str(tree / "src"), str(tree / "tests")]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of what tests start
            sys.path[:0] = paths
            sys.dont_write_bytecode = True  # a mutant may be as old as what it replaces
            arguments = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not gpu"]
            status = int(pytest.main([*arguments, *m.tests.split()]))
        finally:
            sys.stdout.flush()
            os._exit(status)
    return Running(number, m, tree, text, pid, log, time.time())


def outcome_of(r: Running, status: int) -> tuple[str, str]:
    """("passed", "failed", "crashed" or "broken", the first failure or what broke)."""
    output = r.log.read_text(errors="replace")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    first = found[1] if found else ""
    if re.search(r"^E .*\berror: ", output, re.M):
        return "broken", "does not compile: " + first
    if os.WIFSIGNALED(status):
        return "crashed", f"signal {os.WTERMSIG(status)}"
    code = os.WEXITSTATUS(status)
    if code == 0:
        return ("passed", "") if " passed" in output else ("broken", "every test was skipped")
    return ("failed", first) if code == 1 else ("broken", output[-500:])


def run_all(chosen: list[Mutant], trees: list[Path], limit: float) -> Iterator[dict[str, object]]:
    waiting, free, running = list(enumerate(chosen)), list(trees), list[Running]()
    while waiting or running:
        while waiting and free:
            running.append(start(*waiting.pop(0), free.pop()))
        time.sleep(0.1)
        for r in list(running):
            pid, status = os.waitpid(r.pid, os.WNOHANG)
            late = pid == 0 and time.time() - r.begun > limit
            if pid == 0 and not late:
                continue
            if late:
                os.killpg(r.pid, signal.SIGKILL)
                os.waitpid(r.pid, 0)
            outcome, first = ("stopped", "") if late else outcome_of(r, status)
            (r.tree / r.mutant.file).write_text(r.text)
            running.remove(r)
            free.append(r.tree)
            yield {
                "bench": "mutation",
                "what": r.mutant.what,
                "file": r.mutant.file,
                "old": r.mutant.old,
                "new": r.mutant.new,
                "outcome": outcome,
                "first": first,
                "seconds": round(time.time() - r.begun, 1),
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="words of what, file or tests")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once, a copy each")
    parser.add_argument("--limit", type=float, default=600, help="seconds a mutant")
    parser.add_argument("--list", action="store_true", help="check that each applies; run nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [m for m in MUTANTS if not args.only or any(w in "|".join(m) for w in args.only)]
    for m in chosen:
        count = (ROOT / m.file).read_text().count(m.old)
        if count != 1:
            raise SystemExit(
                f"mutations: expected {m.old!r} once in {m.file}, got it {count} times"
            )
    if args.list:
        print(f"{len(chosen)} mutants")
        return 0
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="narrowfloat_mutants_") as folder:
        trees = [Path(folder) / str(job) for job in range(args.jobs)]
        for tree in trees:
            copy_of_the_tree(tree)
        for row in run_all(chosen, trees, args.limit):
            rows.append(row)
            print(f"{len(rows)}/{len(chosen)}", *(row[n] for n in SHOWN), flush=True)
            tried = [r for r in rows if r["outcome"] != "broken"]
            caught = sum(r["outcome"] in ("failed", "crashed", "stopped") for r in tried)
            summary = {"bench": "mutations", "tried": len(tried), "caught": caught}
            if args.out is not None:  # as it goes: a run may be stopped
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text("".join(json.dumps(r) + "\n" for r in [*rows, summary]))
    print(json.dumps(summary))
    return 0 if summary["tried"] == summary["caught"] == len(chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main())
