# What a newcomer runs. `make help` lists it.
#   PYTHON=python3.12      the Python to use (3.10 or newer)
#   TORCH='torch==2.11.0'  the torch to install into .venv
#   VENV=none              use PYTHON as it is: no virtual environment, nothing is installed
#   WHEEL=dist/*.whl       the wheels that `make gates` and `make load` look at
#   ARGS='...'             passed on to the demo, the tests or the benchmark
#   NARROWFLOAT_CUDA_ARCHS=90a, NARROWFLOAT_NO_CUDA=1, MAX_JOBS=4: see setup.py

PYTHON ?= python3
TORCH ?= torch>=2.10
VENV ?= .venv
ARGS ?=
WHEEL ?= $(wildcard dist/*.whl)
CXX_FILES = $(foreach e,h cuh cpp cu,$(wildcard csrc/*/*.$(e)))
TEST_CXX_FILES = $(foreach e,h cuh cpp,$(wildcard tests/emulation/*.$(e) tests/emulation/*/*.$(e)))

ifeq ($(VENV),none)
PY := $(PYTHON)
STATE := build/state
READY :=
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
STATE := $(VENV)
READY := $(VENV)/.ready
endif

.PHONY: help env build demo test lint format bench wheel sdist gates load cuda12 workflows clean force

help:
	@echo "make demo    set up, build, train a small GPT in bf16 and FP8 (ARGS='--recipes fp8,nvfp4,mxfp4', '--help')"
	@echo "make test    set up, build, run the tests (ARGS='-k linear')"
	@echo "make bench   set up, build, benchmark on the GPU (ARGS='linear')"
	@echo "make env     the virtual environment with torch, the dependencies and nvcc"
	@echo "make build   the compiled part, narrowfloat._C, in place"
	@echo "make wheel   a wheel for this Python in dist/"
	@echo "make gates   whether wheels and sdist are fit for users (WHEEL='dist/*.whl dist/*.tar.gz')"
	@echo "make load    installs one WHEEL beside a TORCH, in a clean environment, and tests it"
	@echo "make sdist, make cuda12, make workflows: see CONTRIBUTING.md, Releasing"
	@echo "make lint    ruff, clang-format, mypy; make format lets the first two change the files"
	@echo "make clean   remove what was built (rm -r $(VENV) for the environment)"

env: $(READY)
build: $(STATE)/.built

# What the last run was asked for: another answer sets up or builds anew, the same one does not.
ASKED_ENV = $(PYTHON) $(TORCH) $(NARROWFLOAT_NO_CUDA)
$(STATE)/.asked-env: ASKED = $(ASKED_ENV)
$(STATE)/.asked-build: ASKED = $(PYTHON) $(NARROWFLOAT_CUDA_ARCHS) $(NARROWFLOAT_NO_CUDA) $(CUDA_HOME)
$(STATE)/.asked-env $(STATE)/.asked-build: force
	@mkdir -p $(STATE)
	@echo "$(ASKED)" | cmp -s - $@ || echo "$(ASKED)" > $@

$(VENV)/.ready: pyproject.toml tools/setup_env.py $(STATE)/.asked-env
	$(PYTHON) tools/setup_env.py env --venv $(VENV) --torch '$(TORCH)'
	@echo "$(ASKED_ENV)" > $(STATE)/.asked-env  # a new environment begins as an empty folder
	@touch $@

$(STATE)/.built: setup.py tools/setup_env.py $(CXX_FILES) src/narrowfloat/_version.py $(READY) $(STATE)/.asked-build
	$(PY) tools/setup_env.py build
	@touch $@

demo: build
	$(PY) examples/train_gpt.py $(ARGS)

# Two workers, a file each: what a file compiles for the CPU is compiled once. In their order: of
# the files with few tests some take longest, and these would come last.
test: build
	$(PY) -m pytest $(if $(TOOLS),-n 2 --dist loadfile --no-loadscope-reorder) $(ARGS)

bench: build
	$(PY) benchmarks/bench.py $(ARGS)

wheel: $(READY)
	rm -rf build/lib* build/bdist*
	$(PY) -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

sdist: $(READY)
	$(PY) setup.py --quiet sdist

gates: $(READY)
	$(PY) tools/gates.py $(WHEEL) $(ARGS)

load:
	$(PYTHON) tools/load_wheel.py $(WHEEL) --python $(PYTHON) --torch '$(TORCH)' $(ARGS)

cuda12: $(READY)
	$(PY) tools/check_cuda12.py $(ARGS)

# ---- for developers ----

ifeq ($(VENV),none)
TOOLS :=
BIN := $(PYTHON) -m
CLANG_FORMAT := clang-format
TOOL_BIN :=
else
TOOLS := $(VENV)/.tools
BIN := $(PY) -m
CLANG_FORMAT := $(VENV)/bin/clang-format
TOOL_BIN := $(VENV)/bin/
endif

$(VENV)/.tools: $(READY)
	NARROWFLOAT_NO_CUDA=1 $(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[dev]'
	@touch $@

lint: $(TOOLS)
	$(BIN) ruff check .
	$(BIN) ruff format --check .
	$(if $(CXX_FILES),$(CLANG_FORMAT) --dry-run -Werror $(CXX_FILES) $(TEST_CXX_FILES))
	$(BIN) mypy

workflows: $(TOOLS)
	$(TOOL_BIN)check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(TOOL_BIN)zizmor --offline --no-progress .github/workflows
	$(TOOL_BIN)cibuildwheel --platform linux --archs x86_64,aarch64 --print-build-identifiers .

format: $(TOOLS)
	$(BIN) ruff check --fix .
	$(BIN) ruff format .
	$(if $(CXX_FILES),$(CLANG_FORMAT) -i $(CXX_FILES) $(TEST_CXX_FILES))

clean:
	rm -rf build dist src/*.egg-info src/narrowfloat/_C.*.so $(STATE)/.built
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
