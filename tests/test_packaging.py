"""What a newcomer's install rests on: setup.py without torch, the reasons, the shared object."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import narrowfloat
from narrowfloat import _binary, support

ROOT = Path(__file__).resolve().parent.parent
PROMISED = ["sm_89", "sm_90a", "sm_100f", "sm_120f", "compute_120"]

in_checkout = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="the tests do not lie in a checkout of the source"
)


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    if not (ROOT / "setup.py").exists():
        pytest.skip("the tests do not lie in a checkout of the source")
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("narrowfloat_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- setup.py ----


def copy_of_checkout(to: Path) -> Path:
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    for name in ("src", "csrc", "tests", "tools", "examples", "benchmarks"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=skip)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, to)
    return to


def run_setup(where: Path, *argv: str, **env: str) -> subprocess.CompletedProcess:
    """setup.py where `import torch` and `import pybind11` fail and PATH has no nvcc."""
    code = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['pybind11'] = None; "
        "sys.argv = ['setup.py', *sys.argv[1:]]; runpy.run_path('setup.py', run_name='__main__')"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "NARROWFLOAT_"))}
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        cwd=where,
        env={**clean, "PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


@in_checkout
def test_metadata_and_sdist_need_neither_torch_nor_nvcc(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77.0.3")
    where = copy_of_checkout(tmp_path)
    done = run_setup(where, "egg_info", "sdist")
    assert done.returncode == 0, done.stderr
    (path,) = (where / "dist").iterdir()
    with tarfile.open(path) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        info = next(n for n in tar.getnames() if n.count("/") == 1 and n.endswith("PKG-INFO"))
        metadata = tar.extractfile(info).read().decode()
    assert f"\nVersion: {narrowfloat.__version__}\n" in metadata
    assert "\nRequires-Dist: torch>=2.10\n" in metadata
    wanted = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*.[ch]*")}
    wanted |= {"setup.py", "LICENSE", "src/narrowfloat/py.typed", "src/narrowfloat/_C.pyi"}
    assert wanted <= names
    assert not [n for n in names if n.endswith((".so", ".o", ".pyc"))]


@in_checkout
def test_wheel_without_the_compiled_part(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77.0.3")
    where = copy_of_checkout(tmp_path)
    done = run_setup(where, "bdist_wheel", NARROWFLOAT_NO_CUDA="1")
    assert done.returncode == 0, done.stderr
    (wheel,) = (where / "dist").iterdir()
    assert wheel.name == f"narrowfloat-{narrowfloat.__version__}-py3-none-any.whl"


@in_checkout
def test_build_without_torch_says_both_ways_out(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77.0.3")
    done = run_setup(copy_of_checkout(tmp_path), "build_ext")
    assert done.returncode != 0
    assert "torch is needed to build" in done.stderr and sys.executable in done.stderr
    assert "NARROWFLOAT_NO_CUDA=1" in done.stderr and "--no-build-isolation" in done.stderr


def test_build_on_cpu_torch_says_both_ways_out(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit) as e:
        setup_py.torch_cuda_version()
    text = str(e.value)
    assert str(Path(torch.__file__).parent) in text and "not a CUDA build" in text
    assert "NARROWFLOAT_NO_CUDA=1" in text and "--force-reinstall" in text


def test_version_in_one_place(setup_py: ModuleType) -> None:
    assert setup_py.version() == narrowfloat.__version__
    number = re.compile(rf"(?<![\d.]){re.escape(narrowfloat.__version__)}(?![\d.])")
    again = []
    for path in [ROOT / "setup.py", ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.py")]:
        if number.search(path.read_text()) and path.name != "_version.py":
            again.append(path)
    assert not again


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("90a", ["sm_90a"]),
        ("9.0a", ["sm_90a"]),
        ("8.9;12.0f", ["sm_89", "sm_120f"]),
        (" sm_89, compute_120 ", ["sm_89", "compute_120"]),
        ("90+PTX 90", ["sm_90", "compute_90"]),
        ("100F", ["sm_100f"]),
    ],
)
def test_arch_names(setup_py: ModuleType, text: str, archs: list[str]) -> None:
    assert setup_py.parse_archs(text) == archs


@pytest.mark.parametrize("text", ["", "hopper", "9", "90b", "compute_90+PTX", "90a,,x"])
def test_arch_names_refused(setup_py: ModuleType, text: str) -> None:
    with pytest.raises(SystemExit, match="expected names such as 90a"):
        setup_py.parse_archs(text)


def test_default_archs(setup_py: ModuleType) -> None:
    assert setup_py.default_archs((12, 9)) == setup_py.default_archs((13, 2)) == PROMISED
    # Before 12.9 nvcc knows no family targets, before 12.8 no Blackwell at all.
    assert "sm_100a" in setup_py.default_archs((12, 8))
    assert setup_py.default_archs((12, 6)) == ["sm_89", "sm_90a", "compute_90"]
    assert setup_py.gencodes(["sm_90a", "compute_120"]) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=compute_120",
    ]


def fake_nvcc(folder: Path, release: str, top: Path) -> Path:
    """A script that answers as nvcc does, for a toolkit somewhere else: like a shim on PATH."""
    nvcc = folder / "nvcc"
    folder.mkdir(parents=True, exist_ok=True)
    nvcc.write_text(
        f'#!/bin/sh\ncase "$1" in\n--version) echo "Cuda compilation tools, release {release}, V";;'
        f'\n*) echo "#$ TOP={top}/bin/.." >&2;;\nesac\n'
    )
    nvcc.chmod(0o755)
    return nvcc


def test_compiler_search_skips_a_wrong_major_and_sees_through_a_script(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "real/bin").mkdir(parents=True)
    fake_nvcc(tmp_path / "home/bin", "12.6", tmp_path / "home")
    fake_nvcc(tmp_path / "path", "13.2", tmp_path / "real")
    monkeypatch.setattr(setup_py, "nvidia_roots", list)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    assert setup_py.find_toolkit((13, 0)) == (tmp_path / "real", (13, 2))


def test_compiler_search_prefers_what_is_named(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheels = tmp_path / "nvidia"
    fake_nvcc(wheels / "cu13/bin", "13.0", wheels / "cu13")
    fake_nvcc(tmp_path / "home/bin", "13.1", tmp_path / "home")
    (tmp_path / "home/bin").mkdir(exist_ok=True)
    monkeypatch.setattr(setup_py, "nvidia_roots", lambda: [wheels])
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "home"))
    assert setup_py.find_toolkit((13, 0))[1] == (13, 1)
    monkeypatch.delenv("CUDA_PATH")
    assert setup_py.find_toolkit((13, 0)) == (wheels / "cu13", (13, 0))


@pytest.mark.parametrize(("cuda", "cure"), [((99, 1), "cuda-toolkit[nvcc,cccl]==99.1.*")])
def test_compiler_search_explains(
    setup_py: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cuda: tuple[int, int],
    cure: str,
) -> None:
    """O-93: a source build that cannot work fails early, and says why."""
    fake_nvcc(tmp_path / "bin", "12.6", tmp_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "none"))
    with pytest.raises(SystemExit) as e:
        setup_py.find_toolkit(cuda)
    text = str(e.value)
    assert f"{tmp_path}/bin/nvcc: CUDA 12.6" in text
    assert f"{tmp_path}/none/bin/nvcc: not there" in text
    assert "/usr/local/cuda/bin/nvcc" in text
    assert cure in text and "NARROWFLOAT_NO_CUDA=1" in text


def test_compiler_search_knows_that_cuda_12_is_not_on_the_index(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_py, "nvcc_candidates", lambda cuda: [])
    with pytest.raises(SystemExit) as e:
        setup_py.find_toolkit((12, 8))
    assert "cuda-toolkit" not in str(e.value) and "CUDA_HOME=" in str(e.value)


# ---- the reason why the binary cannot be used ----


def missing(name: str) -> ModuleType:
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def no_cudart(name: str) -> ModuleType:
    raise ImportError("libcudart.so.12: cannot open shared object file")


def built_for(cuda: int) -> SimpleNamespace:
    return SimpleNamespace(cuda_version=lambda: cuda)


@pytest.mark.parametrize(
    ("version", "cuda", "load", "words"),
    [
        ("2.9.1", "13.0", lambda name: built_for(13000), ["torch 2.10 or newer", "--upgrade"]),
        ("2.11.0+cpu", None, lambda name: built_for(13000), ["CUDA build of torch", "pip install"]),
        ("2.11.0", "13.0", missing, ["_C", "make build", "cuda-toolkit[nvcc,cccl]==13.0.*"]),
        ("2.11.0", "13.2", no_cudart, ["libcudart.so.12", "(CUDA 13.2)", "pip install"]),
        ("2.11.0", "12.8", lambda name: built_for(13000), ["one for CUDA 13", "export CUDA_HOME"]),
    ],
    ids=["old torch", "cpu torch", "no binary", "no libcudart", "wrong major"],
)
def test_problem_names_reason_and_cure(
    monkeypatch: pytest.MonkeyPatch, version: str, cuda: str, load: object, words: list[str]
) -> None:
    """O-88, O-90: what the binary was built for, what was found, what to type."""
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(_binary.importlib, "import_module", load)
    module, problem = _binary._load()
    assert module is None
    for word in ["expected", "got", *words]:
        assert word in problem


def test_usable_binary_has_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = built_for(13020)
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_binary.importlib, "import_module", lambda name: fake)
    assert _binary._load() == (fake, None)


def test_a_broken_dependency_is_not_taken_for_a_missing_binary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_binary.importlib, "import_module", lambda name: missing("elsewhere"))
    with pytest.raises(ModuleNotFoundError, match="elsewhere"):
        _binary._load()


@in_checkout
@pytest.mark.parametrize("cuda", ["12.8", "13.0", "13.2"])
def test_readme_has_the_line_to_type(monkeypatch: pytest.MonkeyPatch, cuda: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    readme = (ROOT / "README.md").read_text()
    printed = _binary._rebuild()
    assert _binary._BUILD in printed and f"`{_binary._BUILD}`" in readme
    if cuda >= "13":
        line = printed.removeprefix("in a checkout make build, or ").partition(";")[0]
        assert f" {cuda} | `{line}` |" in readme
    else:
        assert "export CUDA_HOME=<" in printed and "export CUDA_HOME=<" in readme


def test_require(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_binary, "module", None)
    monkeypatch.setattr(_binary, "problem", "narrowfloat._C: the reason")
    with pytest.raises(RuntimeError, match="the reason"):
        _binary.require()
    monkeypatch.setattr(_binary, "module", built_for(13000))
    assert _binary.require() is _binary.module


def test_module_or_problem() -> None:
    assert (_binary.module is None) == (_binary.problem is not None)


# ---- the shared object ----


@pytest.fixture(scope="module")
def shared_object() -> Path:
    if _binary.module is None:
        pytest.skip(f"no usable binary: {_binary.problem}")
    return Path(_binary.module.__file__)


def output(tool: str, *args: str) -> str:
    """What a program says; the test is skipped where it is not installed."""
    nvidia = importlib.util.find_spec("nvidia")  # where the package index puts CUDA's programs
    roots = list(nvidia.submodule_search_locations or []) if nvidia else []
    folders = [str(p) for root in roots for p in Path(root).glob("cu*/bin")]
    path = shutil.which(tool) or shutil.which(tool, path=os.pathsep.join(folders))
    if path is None:
        pytest.skip(f"{tool} is not installed")
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout


def test_only_stable_symbols_of_torch(shared_object: Path) -> None:
    names = output("nm", "-DC", "--undefined-only", str(shared_object))
    assert "aoti_torch_" in names
    unstable = [line for line in names.splitlines() if re.search(r"\b(c10|at|torch)::", line)]
    assert not unstable


def test_libraries_by_soname(shared_object: Path) -> None:
    dynamic = output("readelf", "-d", str(shared_object))
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    major = _binary.module.cuda_version() // 1000
    assert {f"libcudart.so.{major}", f"libcublasLt.so.{major}"} <= set(needed)
    # libtorch_python would tie the binary to one torch, libcuda to machines with a driver.
    assert not [n for n in needed if n.startswith(("libtorch_python", "libcuda.so", "libpython"))]
    (runpath,) = re.findall(r"\(RUNPATH\).*\[(.+)\]", dynamic)
    assert {"$ORIGIN/../torch/lib", f"$ORIGIN/../nvidia/cu{major}/lib"} <= set(runpath.split(":"))


def test_built_for_torch_2_10(shared_object: Path) -> None:
    assert _binary.module.torch_target() == 0x020A000000000000


def test_architectures_are_in_the_file(shared_object: Path) -> None:
    """O-94: what the binary says that it has is in it."""
    told = _binary.module.archs().split()
    assert told
    listing = output("cuobjdump", "--list-elf", "--list-ptx", str(shared_object))
    inside = {f"sm_{a}" for a in re.findall(r"\.sm_(\w+)\.cubin", listing)}
    inside |= {f"compute_{a}" for a in re.findall(r"\.sm_(\w+)\.ptx", listing)}
    # A family target is listed as its first chip: sm_100f as sm_100.
    assert {re.sub(r"f$", "", a) for a in told} <= inside


def test_support_table_and_promised_architectures_agree(setup_py: ModuleType) -> None:
    """O-94: every chip of the table has code in a wheel, and the dispatch says so."""
    archs = " ".join(setup_py.default_archs((12, 9)))
    for row in support.ARCHITECTURES:
        for capability in row.capabilities:
            assert support.compiled_for(archs, capability), capability


@in_checkout
def test_stub_lists_what_the_binary_has(shared_object: Path) -> None:
    stub = ast.parse((ROOT / "src/narrowfloat/_C.pyi").read_text())
    declared = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert declared == {n for n in dir(_binary.module) if not n.startswith("_")}
