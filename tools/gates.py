"""Decides whether a wheel, or the sdist, is fit for users. Exit 1 with the reasons if one is not.

python3 tools/gates.py dist/*.whl [--gate NAME ...] [--cuda 13] [--release] [--tag v0.1.0]
python3 tools/gates.py dist/*.tar.gz --python PYTHON   # builds a wheel of it; PYTHON has torch

Wheels need torch-abi-audit, twine and cuobjdump (all in the extra `test`) and binutils.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from setup_env import setup_py  # noqa: E402

LARGEST = 20_000_000  # bytes
PYTHON_FILES = r"narrowfloat/\w+\.pyi?"
ALLOWED = re.compile(
    rf"{PYTHON_FILES}|narrowfloat/py\.typed|narrowfloat/_C\.[\w.-]+\.so"
    r"|narrowfloat-[^/]+\.dist-info/(METADATA|WHEEL|RECORD|top_level\.txt|licenses/LICENSE"
    r"|sboms/[\w.-]+\.json)"  # auditwheel writes the latter
)
# What torch brings, and what every Linux of the platform tag has.
TORCH = {"libc10.so", "libc10_cuda.so", "libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so"}
SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libdl.so.2", "librt.so.1"}
SYSTEM |= {"libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


class Wheel(NamedTuple):
    path: Path
    names: list[str]
    folder: Path  # its unpacked files
    binaries: list[Path]

    @property
    def binary(self) -> Path:
        if len(self.binaries) != 1:
            raise Unfit(f"expected one narrowfloat/_C.*.so, got {len(self.binaries)}")
        return self.binaries[0]


class Unfit(Exception):
    """Why a file is not fit for users."""


class Asked(NamedTuple):
    cuda: int | None  # the major that the binary must be for
    release: bool  # the platform tag is a promise about glibc


# ---- tools ----


def find_tool(name: str) -> str:
    """A program: beside this Python, of a CUDA package of the index, or on PATH."""
    nvidia = importlib.util.find_spec("nvidia")
    roots = list(nvidia.submodule_search_locations or []) if nvidia else []
    folders = [sysconfig.get_path("scripts")]
    folders += [str(p) for root in roots for p in sorted(Path(root).glob("cu*/bin"), reverse=True)]
    found = shutil.which(name, path=os.pathsep.join(folders)) or shutil.which(name)
    if found is None:
        raise Unfit(f"{name} is not installed, so this was not checked (pip install '.[test]')")
    return found


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([find_tool(name), *args], capture_output=True, text=True)


def said(name: str, *args: str) -> str:
    done = run(name, *args)
    if done.returncode:
        raise Unfit(f"{name} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


# ---- gates of a wheel ----


def contents(wheel: Wheel, asked: Asked) -> None:
    other = [n for n in wheel.names if not ALLOWED.fullmatch(n)]
    if other:
        raise Unfit(f"files that do not belong there: {', '.join(other)}")
    modules = {p.name for p in (ROOT / "src/narrowfloat").glob("*.py*") if p.suffix != ".pyc"}
    wanted = {f"narrowfloat/{name}" for name in modules | {"py.typed", "_C.pyi"}}
    lacking = wanted - set(wheel.names)
    if not any(n.endswith("/licenses/LICENSE") for n in wheel.names):
        lacking.add("licenses/LICENSE")
    if lacking:
        raise Unfit(f"files that lack: {', '.join(sorted(lacking))}")
    tag = wheel.path.name.split("-")[-3]  # cp312
    if f".cpython-{tag.removeprefix('cp')}-" not in wheel.binary.name:
        raise Unfit(f"{wheel.binary.name} is for another Python than {tag}")


def size(wheel: Wheel, asked: Asked) -> None:
    if (got := wheel.path.stat().st_size) > LARGEST:
        raise Unfit(f"expected at most {LARGEST} bytes, got {got}")


def metadata(wheel: Wheel, asked: Asked) -> None:
    done = run("twine", "--no-color", "check", "--strict", str(wheel.path))
    if done.returncode:
        raise Unfit(f"twine check --strict: {' '.join((done.stdout + done.stderr).split())}")
    version = setup_py().version()
    (info,) = wheel.folder.glob("*.dist-info/METADATA")
    if f"\nVersion: {version}\n" not in info.read_text():
        raise Unfit(f"its version is not the {version} of src/narrowfloat/_version.py")


def libraries(wheel: Wheel, asked: Asked) -> None:
    shared = [n for n in wheel.names if re.search(r"\.so(\.|$)|\.libs/", n)]
    if bundled := [n for n in shared if not re.fullmatch(r"narrowfloat/_C\.[\w.-]+\.so", n)]:
        raise Unfit(f"bundled libraries: {', '.join(bundled)}")
    dynamic = said("readelf", "-dW", str(wheel.binary))
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    majors = {int(n) for n in re.findall(r"libcudart\.so\.(\d+)", " ".join(needed))}
    if len(majors) != 1 or (asked.cuda and majors != {asked.cuda}):
        raise Unfit(f"expected libcudart.so.{asked.cuda or 'N'} among {', '.join(sorted(needed))}")
    (major,) = majors
    cuda = {f"libcudart.so.{major}", f"libcublasLt.so.{major}"}
    if lacking := cuda - needed:
        raise Unfit(f"not linked by soname: {', '.join(lacking)}")
    # libtorch_python would tie it to one torch, libcuda.so.1 to machines with a driver.
    if other := needed - cuda - TORCH - SYSTEM:
        raise Unfit(f"linked against {', '.join(sorted(other))}, which users may not have")
    runpath = re.findall(r"\(RUNPATH\).*\[(.+)\]", dynamic)
    wanted = {"$ORIGIN/../torch/lib", f"$ORIGIN/../nvidia/cu{major}/lib"}
    if major == 12:
        wanted = {"$ORIGIN/../torch/lib", "$ORIGIN/../nvidia/cublas/lib"}
    if not runpath or not wanted <= set(runpath[0].split(":")):
        raise Unfit(f"expected a RUNPATH with {', '.join(sorted(wanted))}, got {runpath}")


def symbols(wheel: Wheel, asked: Asked) -> None:
    done = run("torch-abi-audit", "--json", "--check", "torch", str(wheel.binary))
    try:
        extensions = json.loads(done.stdout)["extensions"]
    except ValueError:
        raise Unfit(f"torch-abi-audit failed: {done.stderr.strip()}") from None
    if len(extensions) != 1:
        raise Unfit(f"{wheel.binary.name} is no module of Python")
    torch = extensions[0]["torch"]
    if done.returncode or not torch["uses_torch"] or not torch["stable"]:
        names = ", ".join(torch["unstable_symbols"][:5])
        raise Unfit(f"it uses torch beyond the stable ABI: {names or 'or not at all'}")
    oldest = torch["min_torch_version"]
    if tuple(map(int, oldest.split(".")[:2])) > (2, 10) or torch["unknown_shim_symbols"]:
        raise Unfit(f"it needs torch {oldest} ({torch['unknown_shim_symbols']}), promised is 2.10")


def architectures(wheel: Wheel, asked: Asked) -> None:
    listing = said("cuobjdump", "--list-elf", "--list-ptx", str(wheel.binary))
    if problem := missing_architectures(listing, setup_py().default_archs((12, 9))):
        raise Unfit(problem)


def missing_architectures(listing: str, promised: list[str]) -> str | None:
    """Each source of kernels must have been compiled for each architecture."""
    inside = Counter(f"sm_{a}" for a in re.findall(r"\.sm_(\w+)\.cubin", listing))
    inside += Counter(f"compute_{a}" for a in re.findall(r"\.sm_(\w+)\.ptx", listing))
    # A family target is listed as its first chip: sm_100f as sm_100.
    counts = {a: max(inside[a], inside[a.removesuffix("f")]) for a in promised}
    most = max(counts.values())
    if most and min(counts.values()) == most:
        return None
    return "kernels are not there for each architecture: " + ", ".join(
        f"{a} in {n} of {max(most, 1)} files" for a, n in counts.items()
    )


def platform(wheel: Wheel, asked: Asked) -> None:
    tag = wheel.path.stem.split("-")[-1]
    promise = re.search(r"manylinux_2_(\d+)_", tag)
    if asked.release and (promise is None or int(promise[1]) > 28):
        raise Unfit(f"expected a tag of manylinux_2_28 or older, got {tag}")
    if promise is None:
        return  # it is for the machine that built it
    versions = said("readelf", "-VW", str(wheel.binary))
    newest = max((int(n) for n in re.findall(r"GLIBC_2\.(\d+)", versions)), default=0)
    if newest > int(promise[1]):
        raise Unfit(f"it needs glibc 2.{newest}, and its tag {tag} promises less")


GATES: dict[str, Callable[[Wheel, Asked], None]] = {
    gate.__name__: gate
    for gate in (contents, size, metadata, libraries, symbols, architectures, platform)
}


def check_wheel(path: Path, names: list[str], asked: Asked) -> list[str]:
    """The reasons why the wheel is not fit, each with the name of its gate."""
    problems = []
    with tempfile.TemporaryDirectory() as temporary:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(temporary)
            files = [n for n in archive.namelist() if not n.endswith("/")]
        folder = Path(temporary)
        wheel = Wheel(path, files, folder, sorted(folder.glob("narrowfloat/_C.*.so")))
        for name in names:
            try:
                GATES[name](wheel, asked)
            except Unfit as e:
                problems.append(f"{name}: {e}")
    return problems


# ---- the sdist, the release ----


def without_network() -> list[str]:
    """What to put before a command to cut it from the network, where the machine allows it."""
    cut = ["unshare", "--map-root-user", "--net"]
    try:
        if subprocess.run([*cut, "true"], capture_output=True).returncode == 0:
            return cut
    except OSError:
        pass
    print("   (this machine does not let the build be cut from the network)")
    return []


def check_sdist(path: Path, python: str) -> list[str]:
    """Builds a wheel of it in an empty folder, with no git, no index, and loads that."""
    python = str(Path(python).absolute())  # not resolved: a virtual environment's is a link
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        with tarfile.open(path) as archive:
            archive.extractall(top / "source", filter="data")
        (source,) = (top / "source").iterdir()
        (top / "bin").mkdir()
        git = top / "bin/git"
        git.write_text("#!/bin/sh\necho 'the build calls git' >&2\nexit 1\n")
        git.chmod(0o755)
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        env |= {"PATH": f"{top / 'bin'}{os.pathsep}{env.get('PATH', '')}", "PIP_NO_INDEX": "1"}
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        build = [*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", str(top), str(source)]
        load = "import narrowfloat; from narrowfloat import _binary; print(narrowfloat.__file__)"
        for what, command in (
            ("its wheel is not built", [*without_network(), *build]),
            ("its wheel is not installed", []),
            ("its wheel does not load", [python, "-c", load + "; _binary.require()"]),
        ):
            if not command:
                (wheel,) = top.glob("*.whl")
                command = [*pip, "install", "--no-deps", "--target", str(top / "t"), str(wheel)]
            done = subprocess.run(command, cwd=top, env=env, capture_output=True, text=True)
            if done.returncode:
                return [f"sdist: {what}: {(done.stdout + done.stderr)[-3000:]}"]
            env["PYTHONPATH"] = str(top / "t")
        if str(top / "t") not in done.stdout:
            return [f"sdist: what was loaded is {done.stdout.strip()}"]
        asked = Asked(None, False)
        # NARROWFLOAT_CUDA_ARCHS may narrow this build: the architectures are the wheels' gate.
        names = [n for n in GATES if n != "architectures"]
        return [f"sdist: its wheel: {p}" for p in check_wheel(wheel, names, asked)]


def check_tag(tag: str) -> list[str]:
    """A tag releases the version of the source, and CHANGELOG.md has its section."""
    version = setup_py().version()
    if tag != f"v{version}":
        return [f"tag: expected v{version}, as in src/narrowfloat/_version.py, got {tag}"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    if not re.search(rf"^## \[?{re.escape(version)}\]? - \d{{4}}-\d\d-\d\d$", changes, re.M):
        return [f"tag: CHANGELOG.md has no line `## [{version}] - YYYY-MM-DD`"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="wheels and sdists")
    parser.add_argument("--gate", nargs="+", choices=GATES, default=list(GATES))
    parser.add_argument("--cuda", type=int, help="the CUDA major that the wheels must be for")
    parser.add_argument("--release", action="store_true", help="the wheels must be manylinux ones")
    parser.add_argument("--tag", help="the git tag that is to be released")
    parser.add_argument("--python", default=sys.executable, help="has torch, to build the sdist")
    args = parser.parse_args()
    if not args.files and not args.tag:
        parser.error("no file to check")
    failed = 0
    for path in args.files:
        if path.name.endswith(".whl"):
            problems = check_wheel(path, args.gate, Asked(args.cuda, args.release))
            told = ", ".join(args.gate)
        else:
            print(f"-- {path}: building a wheel of it", flush=True)
            problems, told = check_sdist(path, args.python), "builds a wheel that loads"
        print(f"{path.name}: {told if not problems else 'NOT FIT'}")
        print("".join(f"   {p}\n" for p in problems), end="", flush=True)
        failed += bool(problems)
    for problem in check_tag(args.tag) if args.tag else []:
        print(problem)
        failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
