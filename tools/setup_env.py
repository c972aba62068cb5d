"""What `make env` and `make build` do: the virtual environment, the compiler, the compiled part.

env (run by any Python): a virtual environment with torch, the tools that the build needs, the
extras and this checkout; and an nvcc of torch's CUDA where the machine has none.
build (run by the Python to build for): narrowfloat._C in place, but not on a CPU-only torch.
wheel-env (run by it too): what a release's wheel is built with, where nvcc is there already.
TORCH_INDEX in the environment names the index that has torch, where pip's own does not.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - whoever runs make may have an older one
    sys.exit(
        "narrowfloat needs Python 3.10 or newer, and {} is {}.{}; name another one: "
        "make PYTHON=python3.12".format(sys.executable, *sys.version_info[:2])
    )

import argparse
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def say(text: str) -> None:
    print(f"-- {text}", flush=True)


def pip(*args: str, **env: str) -> None:
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    cmd = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *quiet, *args]
    if subprocess.run(cmd, cwd=ROOT, env={**os.environ, **env}).returncode:
        sys.exit(f"failed: {' '.join(cmd)}")


def setup_py() -> ModuleType:
    """setup.py as a module: it knows where to look for nvcc."""
    spec = importlib.util.spec_from_file_location("narrowfloat_setup", ROOT / "setup.py")
    if spec is None or spec.loader is None:
        sys.exit("setup.py cannot be read")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_requires() -> list[str]:
    """The names under [build-system] of pyproject.toml: needed here, without build isolation."""
    try:
        import tomllib  # type: ignore[import-not-found,unused-ignore]
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]


def create(venv: Path) -> Path:
    """The Python of the virtual environment, which is made where there is none of this version."""
    tag = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python = venv / "bin" / tag
    if not python.exists() or not (venv / "bin/pip").exists():
        if not importlib.util.find_spec("venv") or not importlib.util.find_spec("ensurepip"):
            sys.exit(
                f"{sys.executable} has no venv with pip (on Debian: apt-get install "
                f"python3-venv, or {tag}-venv)"
            )
        say(f"virtual environment {venv} from {sys.executable}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    return python


def check_compiler() -> None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        sys.exit(f"{header} is not there (on Debian: apt-get install python3-dev)")
    cxx = os.environ.get("CXX", "c++").split()[0]  # what torch's build takes
    if shutil.which(cxx) is None:
        sys.exit(f"the C++ compiler {cxx} is not there (on Debian: apt-get install g++)")


def install_torch(torch_spec: str) -> None:
    say(f"{torch_spec} and what the build needs")
    index = os.environ.get("TORCH_INDEX")
    if index:
        pip(torch_spec, "--index-url", index)
    pip(torch_spec, *build_requires())


def wheel_env(torch_spec: str, cuda: str) -> None:
    """For cibuildwheel, in its container: a torch of this CUDA, or the wheel would be another."""
    install_torch(torch_spec)
    import torch

    if torch.version.cuda != cuda:
        sys.exit(
            f"expected a torch built for CUDA {cuda}, got {torch.__version__} for "
            f"{torch.version.cuda} (TORCH_INDEX: {os.environ.get('TORCH_INDEX') or 'not set'})"
        )
    setup_py().find_toolkit(tuple(map(int, cuda.split("."))))


def install(torch_spec: str) -> None:
    """Into the running Python: dependencies, this checkout, the compiler."""
    install_torch(torch_spec)
    say("narrowfloat (this checkout) with what its tests and demo need")
    pip("--no-build-isolation", "--editable", ".[demo,test]", NARROWFLOAT_NO_CUDA="1")
    if no_binary():
        return
    check_compiler()
    setup = setup_py()
    major, minor = setup.torch_cuda_version()
    try:
        setup.find_toolkit((major, minor))
    except SystemExit:
        if major < 13:  # the package index has no whole nvcc of CUDA 12
            raise
        say(f"no nvcc of CUDA {major} here: taking it from the package index")
        pip(f"cuda-toolkit[nvcc,cccl]=={major}.{minor}.*")


def no_binary() -> bool:
    import torch

    if os.environ.get("NARROWFLOAT_NO_CUDA", "0") not in ("", "0"):
        say("NARROWFLOAT_NO_CUDA is set: no compiled part, all runs on the CPU")
        return True
    if torch.version.cuda is None:
        say(f"torch {torch.__version__} is not a CUDA build: no compiled part, all runs on the CPU")
        return True
    return False


def build() -> None:
    if not no_binary():
        cmd = [sys.executable, "setup.py", "build_ext", "--inplace"]
        sys.exit(subprocess.run(cmd, cwd=ROOT).returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["env", "install", "build", "wheel-env"])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch", default="torch>=2.10", help="which torch: a pip requirement")
    parser.add_argument("--cuda", help="wheel-env: the CUDA that this torch must be built for")
    args = parser.parse_args()
    if args.what == "env":
        python = create(args.venv)
        cmd = [str(python), __file__, "install", "--torch", args.torch]
        sys.exit(subprocess.run(cmd).returncode)
    elif args.what == "install":
        install(args.torch)
    elif args.what == "wheel-env":
        wheel_env(args.torch, args.cuda)
    else:
        build()


if __name__ == "__main__":
    main()
