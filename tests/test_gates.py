"""Each gate of tools/gates.py refuses the wheel that it is there for."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import narrowfloat

ROOT = Path(__file__).resolve().parent.parent
VERSION = narrowfloat.__version__
INFO = f"narrowfloat-{VERSION}.dist-info"
NAME = f"narrowfloat-{VERSION}-cp311-cp311-linux_x86_64.whl"
METADATA = f"""Metadata-Version: 2.4
Name: narrowfloat
Version: {VERSION}
Summary: s
License-Expression: Apache-2.0
Description-Content-Type: text/markdown

# narrowfloat
"""

pytestmark = pytest.mark.skipif(
    not (ROOT / "tools/gates.py").exists(), reason="the tests do not lie in a checkout"
)


@pytest.fixture(scope="module")
def gates() -> ModuleType:
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("narrowfloat_gates", ROOT / "tools/gates.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a NamedTuple looks its own module up
    spec.loader.exec_module(module)
    return module


def need(gates: ModuleType, tool: str) -> None:
    try:
        gates.find_tool(tool)
    except gates.Unfit as e:
        pytest.skip(str(e))


def wheel(folder: Path, name: str = NAME, without: tuple[str, ...] = (), **more: bytes) -> Path:
    """A wheel with the files of a right one; `more` adds or replaces some."""
    files = {f"narrowfloat/{p.name}": b"" for p in (ROOT / "src/narrowfloat").glob("*.py*")}
    files |= {"narrowfloat/py.typed": b"", f"{INFO}/METADATA": METADATA.encode()}
    files |= {f"{INFO}/WHEEL": b"Wheel-Version: 1.0\n", f"{INFO}/RECORD": b""}
    files |= {f"{INFO}/licenses/LICENSE": b"", f"{INFO}/top_level.txt": b"narrowfloat\n"}
    files["narrowfloat/_C.cpython-311-x86_64-linux-gnu.so"] = b"\x7fELF"
    files |= more
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for n, content in files.items():
            if n not in without:
                archive.writestr(n, content)
    return path


def refused(gates: ModuleType, path: Path, gate: str, cuda: int | None = None) -> str:
    problems = gates.check_wheel(path, [gate], gates.Asked(cuda, False))
    return "\n".join(problems)


def test_contents(gates: ModuleType, tmp_path: Path) -> None:
    assert refused(gates, wheel(tmp_path), "contents") == ""


@pytest.mark.parametrize(
    "name", ["narrowfloat/kernels.cu", "narrowfloat/ops.h", "tests/test_ops.py", "setup.py"]
)
def test_contents_refuses_sources_and_tests(gates: ModuleType, tmp_path: Path, name: str) -> None:
    assert name in refused(gates, wheel(tmp_path, **{name: b""}), "contents")


@pytest.mark.parametrize(
    "name", ["narrowfloat/py.typed", "narrowfloat/_C.pyi", "narrowfloat/ops.py"]
)
def test_contents_refuses_a_lack(gates: ModuleType, tmp_path: Path, name: str) -> None:
    assert name in refused(gates, wheel(tmp_path, without=(name,)), "contents")


def test_contents_refuses_a_binary_that_python_would_not_find(
    gates: ModuleType, tmp_path: Path
) -> None:
    path = wheel(tmp_path, name=NAME.replace("cp311", "cp312"))
    assert "another Python than cp312" in refused(gates, path, "contents")
    path = wheel(tmp_path, without=("narrowfloat/_C.cpython-311-x86_64-linux-gnu.so",))
    assert "expected one narrowfloat/_C" in refused(gates, path, "contents")


def test_size(gates: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheel(tmp_path)
    assert refused(gates, path, "size") == ""
    assert gates.LARGEST == 20_000_000
    monkeypatch.setattr(gates, "LARGEST", 100)
    assert "at most 100 bytes" in refused(gates, path, "size")


def test_metadata(gates: ModuleType, tmp_path: Path) -> None:
    need(gates, "twine")
    assert refused(gates, wheel(tmp_path), "metadata") == ""
    without_text = METADATA.replace("\n# narrowfloat\n", "")
    path = wheel(tmp_path, **{f"{INFO}/METADATA": without_text.encode()})
    assert "twine check --strict" in refused(gates, path, "metadata")
    other = METADATA.replace(f"Version: {VERSION}", "Version: 9.9")
    name = NAME.replace(VERSION, "9.9")
    path = wheel(tmp_path, name=name, **{f"{INFO}/METADATA": other.encode()})
    assert f"not the {VERSION}" in refused(gates, path, "metadata")


# ---- gates that read the binary ----


def binary(folder: Path, *, needed: tuple[str, ...], calls: str = "", runpath: str = "") -> bytes:
    """A shared object that needs these libraries and calls this C function."""
    if shutil.which("cc") is None or shutil.which("readelf") is None:
        pytest.skip("cc and readelf are not here")
    libraries = []
    for name in needed:
        libraries.append(f"-l:{name}")
        command = ["cc", "-shared", f"-Wl,-soname,{name}", "-xc", "/dev/null"]
        subprocess.run([*command, "-o", str(folder / name)], check=True)
    source = "void *PyInit__C(void) { return 0; }"  # by this a module of Python is known
    source += f" void {calls}(void); void f(void) {{ {calls}(); }}" if calls else ""
    out = folder / "binary.so"
    command = ["cc", "-shared", "-fPIC", "-xc", "-", f"-L{folder}", f"-Wl,-rpath,{runpath}"]
    command += ["-Wl,--enable-new-dtags", "-Wl,--no-as-needed", *libraries, "-o", str(out)]
    subprocess.run(command, input=source, text=True, check=True)
    return out.read_bytes()


RUNPATH = "$ORIGIN/../torch/lib:$ORIGIN/../nvidia/cu13/lib"
RIGHT = ("libtorch.so", "libc10.so", "libcudart.so.13", "libcublasLt.so.13")
SO = "narrowfloat/_C.cpython-311-x86_64-linux-gnu.so"


def test_libraries(gates: ModuleType, tmp_path: Path) -> None:
    path = wheel(tmp_path, **{SO: binary(tmp_path, needed=RIGHT, runpath=RUNPATH)})
    assert refused(gates, path, "libraries") == ""
    assert refused(gates, path, "libraries", cuda=13) == ""
    assert "libcudart.so.12" in refused(gates, path, "libraries", cuda=12)


@pytest.mark.parametrize(
    ("needed", "runpath", "why"),
    [
        ((*RIGHT, "libtorch_python.so"), RUNPATH, "libtorch_python.so"),
        ((*RIGHT, "libcuda.so.1"), RUNPATH, "libcuda.so.1"),
        (RIGHT[:3], RUNPATH, "libcublasLt.so.13"),
        (RIGHT[:2], RUNPATH, "expected libcudart.so.N"),
        ((*RIGHT, "libcudart.so.12"), RUNPATH, "expected libcudart.so.N"),
        (RIGHT, "/usr/local/cuda/lib64", "RUNPATH"),
    ],
)
def test_libraries_refuses_what_users_lack(
    gates: ModuleType, tmp_path: Path, needed: tuple[str, ...], runpath: str, why: str
) -> None:
    path = wheel(tmp_path, **{SO: binary(tmp_path, needed=needed, runpath=runpath)})
    assert why in refused(gates, path, "libraries")


@pytest.mark.parametrize(
    "name", ["narrowfloat.libs/libcudart-0123.so.13", "narrowfloat/libcublasLt.so.13"]
)
def test_libraries_refuses_a_bundled_one(gates: ModuleType, tmp_path: Path, name: str) -> None:
    so = binary(tmp_path, needed=RIGHT, runpath=RUNPATH)
    path = wheel(tmp_path, **{SO: so, name: b"\x7fELF"})
    assert name in refused(gates, path, "libraries")
    assert name in refused(gates, path, "contents")


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ("aoti_torch_get_data_ptr", ""),
        # c10::detail::torchCheckFail and at::empty, as C++ names them
        ("_ZN3c106detail14torchCheckFailEPKcS2_jS2_", "beyond the stable ABI"),
        ("_ZN2at5emptyEv", "beyond the stable ABI"),
        ("", "not at all"),
    ],
)
def test_symbols(gates: ModuleType, tmp_path: Path, calls: str, why: str) -> None:
    """O-88: a wheel that is built for one torch alone is refused."""
    need(gates, "torch-abi-audit")
    so = binary(tmp_path, needed=RIGHT if calls else (), calls=calls, runpath=RUNPATH)
    found = refused(gates, wheel(tmp_path, **{SO: so}), "symbols")
    assert why in found and bool(found) == bool(why)


PROMISED = ["sm_89", "sm_90a", "sm_100f", "sm_120f", "compute_120"]


def listing(*archs: str, files: int = 2) -> str:
    kinds = {"sm": ("ELF", "cubin"), "compute": ("PTX", "ptx")}
    lines = []
    for arch in archs:
        kind, number = arch.split("_")
        file, end = kinds[kind]
        lines += [f"{file} file {i}: _C.{i}.sm_{number}.{end}\n" for i in range(files)]
    return "".join(lines)


def test_architectures(gates: ModuleType) -> None:
    """O-94: each architecture of the support table has each kernel."""
    assert gates.setup_py().default_archs((12, 9)) == PROMISED
    right = ["sm_89", "sm_90a", "sm_100", "sm_120", "compute_120"]  # as cuobjdump lists them
    assert gates.missing_architectures(listing(*right), PROMISED) is None
    for arch in right:
        others = [a for a in right if a != arch]
        found = gates.missing_architectures(listing(*others), PROMISED)
        assert found and f"{arch.replace('00', '00f') if arch == 'sm_100' else arch}" in found
        # One source of kernels that was compiled for all but this one.
        text = listing(*right) + listing(*others, files=1)
        assert "in 2 of 3 files" in gates.missing_architectures(text, PROMISED)
    assert "in 0 of 1" in gates.missing_architectures("", PROMISED)


def test_architectures_refuses_a_binary_without_kernels(gates: ModuleType, tmp_path: Path) -> None:
    need(gates, "cuobjdump")
    path = wheel(tmp_path, **{SO: binary(tmp_path, needed=RIGHT)})
    assert refused(gates, path, "architectures").startswith("architectures: ")


def test_platform(gates: ModuleType, tmp_path: Path) -> None:
    so = binary(tmp_path, needed=RIGHT)
    path = wheel(tmp_path, **{SO: so})
    assert refused(gates, path, "platform") == ""
    found = gates.check_wheel(path, ["platform"], gates.Asked(None, True))
    assert found and "expected a tag of manylinux_2_28" in found[0]
    newer = NAME.replace("linux_x86_64", "manylinux_2_34_x86_64")
    path = wheel(tmp_path, name=newer, **{SO: so})
    assert gates.check_wheel(path, ["platform"], gates.Asked(None, True))


def test_platform_refuses_a_newer_glibc_than_the_tag(
    gates: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-89: the tag promises no older glibc than the binary needs."""
    path = wheel(tmp_path, name=NAME.replace("linux_x86_64", "manylinux_2_28_x86_64"))
    monkeypatch.setattr(gates, "said", lambda *command: "Name: GLIBC_2.28 Name: GLIBC_2.2.5")
    assert refused(gates, path, "platform") == ""
    monkeypatch.setattr(gates, "said", lambda *command: "Name: GLIBC_2.34 Name: GLIBC_2.2.5")
    assert "needs glibc 2.34" in refused(gates, path, "platform")


def test_cuda_12_refuses_a_call_that_its_oldest_runtime_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-90: what is compiled with the newest CUDA 12 loads beside the oldest that torch has."""
    pytest.importorskip("setuptools")
    if shutil.which("c++") is None or shutil.which("nm") is None:
        pytest.skip("c++ and nm are not here")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import check_cuda12

    library = tmp_path / "libcudart.so.12"
    source = 'extern "C" void cudaOld() {}'
    command = ["c++", "-shared", "-fPIC", "-xc++", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    offered = check_cuda12.exported(library)
    assert "cudaOld" in offered
    file = tmp_path / "calls.cpp"
    for name, why in (("cudaOld", None), ("cudaNew_v2", "not in libcudart of CUDA 12.6: cudaNew")):
        file.write_text(f'extern "C" void {name}(); void f() {{ {name}(); }}')
        found = check_cuda12.check_host(file, [], tmp_path, offered)
        assert found == why or (why and found.startswith(why))


# ---- the sdist, the tag, the command, the index, the workflows ----


def test_sdist_that_does_not_build(gates: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    import tarfile

    source = tmp_path / "narrowfloat-1.0"
    source.mkdir()
    (source / "setup.py").write_text("import subprocess; subprocess.run(['git'], check=True)\n")
    path = tmp_path / "narrowfloat-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(source, source.name)
    (problem,) = gates.check_sdist(path, sys.executable)
    assert "its wheel is not built" in problem and "the build calls git" in problem


def test_tag(gates: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "ROOT", tmp_path)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text("## [Unreleased]\n")
    assert "CHANGELOG.md has no line" in gates.check_tag(f"v{VERSION}")[0]
    changes.write_text(f"## [Unreleased]\n\n## [{VERSION}] - 2026-11-29\n")
    assert gates.check_tag(f"v{VERSION}") == []
    assert f"expected v{VERSION}" in gates.check_tag("v9.9")[0]


def test_changelog_keeps_its_form() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert lines[0] == "# Changelog"
    sections = [line for line in lines if line.startswith("## ")]
    assert sections[0] == "## [Unreleased]" or "## [Unreleased]" not in sections
    for line in sections:
        assert re.fullmatch(r"## \[(Unreleased\]|\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d)", line), line
    kinds = {line[4:] for line in lines if line.startswith("### ")}
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_command_fails(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    for more, code in (({}, 0), ({"setup.py": b""}, 1)):
        path = wheel(tmp_path, **more)
        command = [sys.executable, str(ROOT / "tools/gates.py"), str(path), "--gate", "contents"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("NOT FIT" in done.stdout) == bool(code)


def test_index_has_a_directory_for_each_cuda(tmp_path: Path) -> None:
    for cuda in ("cu12", "cu13"):
        (tmp_path / cuda).mkdir()
        metadata = METADATA.replace("Summary: s", "Requires-Python: >=3.10")
        wheel(tmp_path / cuda, **{f"{INFO}/METADATA": metadata.encode(), SO: cuda.encode()})
    command = [sys.executable, str(ROOT / "tools/wheel_index.py"), "site"]
    command += ["cu12=cu12", "cu13=cu13"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert 'href="cu13/"' in (tmp_path / "site/index.html").read_text()
    for cuda in ("cu12", "cu13"):
        page = (tmp_path / f"site/{cuda}/narrowfloat/index.html").read_text()
        digest = hashlib.sha256((tmp_path / cuda / NAME).read_bytes()).hexdigest()
        assert f'href="{NAME}#sha256={digest}" data-requires-python="&gt;=3.10"' in page
        assert (tmp_path / f"site/{cuda}/narrowfloat" / NAME).exists()
    failed = subprocess.run([*command, "cu14=site"], cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode != 0 and "no wheel of narrowfloat" in failed.stderr


def test_release_packs_what_the_index_unpacks(tmp_path: Path) -> None:
    for cuda in ("cu12", "cu13"):
        (tmp_path / cuda).mkdir()
        wheel(tmp_path / cuda, **{SO: cuda.encode()})
    (tmp_path / "sdist").mkdir()
    (tmp_path / f"sdist/narrowfloat-{VERSION}.tar.gz").write_bytes(b"")
    script = ["bash", str(ROOT / "tools/release.sh")]
    subprocess.run([*script, "pack"], cwd=tmp_path, check=True)
    # The public index knows no CUDA: it has those for CUDA 13.
    public = {p.name: p.read_bytes() for p in (tmp_path / "public").iterdir()}
    assert set(public) == {NAME, f"narrowfloat-{VERSION}.tar.gz"}
    assert public[NAME] == (tmp_path / "cu13" / NAME).read_bytes()
    # Of two releases the index has the wheels of both.
    older = NAME.replace(VERSION, "0.0.1")
    for tag, name in ((f"v{VERSION}", NAME), ("v0.0.1", older)):
        (tmp_path / "tars" / tag).mkdir(parents=True)
        for cuda in ("cu12", "cu13"):
            (tmp_path / cuda / NAME).rename(tmp_path / cuda / name)
            subprocess.run(["tar", "cf", f"tars/{tag}/{cuda}.tar", cuda], cwd=tmp_path, check=True)
            (tmp_path / cuda / name).rename(tmp_path / cuda / NAME)
    environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(
        [*script, "index", "tars", "site/whl"], cwd=tmp_path, env=environment, check=True
    )
    for cuda in ("cu12", "cu13"):
        found = {p.name for p in (tmp_path / "site/whl" / cuda / "narrowfloat").glob("*.whl")}
        assert found == {NAME, older}


def test_a_wheel_for_each_promised_python() -> None:
    """O-93: else pip falls back to a source build."""
    text = (ROOT / "pyproject.toml").read_text()
    promised = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)
    built = re.search(r'^build = "(.+)"$', text, re.M)
    assert promised and built
    assert built[1].split() == [f"cp3{minor}-*" for minor in promised]
    assert f'requires-python = ">=3.{promised[0]}"' in text


has_workflows = pytest.mark.skipif(
    not (ROOT / ".github/workflows").is_dir(), reason="the sdist has no workflows: git has"
)


@has_workflows
def test_workflows_load_the_oldest_and_newest_python() -> None:
    """O-93: each is installed from a wheel, never from source."""
    text = (ROOT / "pyproject.toml").read_text()
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    wheels = (ROOT / ".github/workflows/wheels.yml").read_text()
    loaded = set(re.findall(r'case: cu.*python: "(.+?)"', wheels))
    assert loaded == set(promised)


@has_workflows
def test_workflows_pin_actions_and_call_what_is_here() -> None:
    text = "".join(p.read_text() for p in (ROOT / ".github/workflows").glob("*.yml"))
    actions = re.findall(r"uses: (.+)", text)
    assert actions
    for action in actions:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", action), action
    for path in re.findall(r"\b(?:tools|\.ci)/\w+(?:\.\w+)?", text):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"run: make (\w+)", text):
        assert re.search(rf"^{target}:", makefile, re.M), target
