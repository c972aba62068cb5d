"""What tools/gpu_tests.py runs under the sanitizers exists, and is run as it says."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
from typing import Any

import injected
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "gpu_tests.py"
if not TOOL.exists():
    pytest.skip("gpu_tests.py is in the repository alone", allow_module_level=True)


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_tests", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_test_that_is_named_exists(tool: Any) -> None:
    """A renamed test would leave a kernel unseen."""
    named = sorted({test for how in tool.SANITIZERS.values() for test in how.tests})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *named], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_how_each_sanitizer_is_run(tool: Any) -> None:
    assert set(tool.SANITIZERS) == {"memcheck", "racecheck", "initcheck", "synccheck"}
    assert tool.INJECTED == injected.MODES
    initcheck = tool.SANITIZERS["initcheck"]
    assert initcheck.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for how in tool.SANITIZERS.values():
        if not how.products:
            assert not set(how.tests) & tool.LOOK_AT_PRODUCTS
